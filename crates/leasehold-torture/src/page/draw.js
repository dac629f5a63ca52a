// Draws the visible part, on a canvas of the same size. The first visible bar is found by binary search, and only the
// first bar of each pixel is drawn. So the work depends on the size of the window, not on the length of the run.


const chart = $('chart'), canvas = $('canvas'), pen = canvas.getContext('2d');
const view = { from: 0, to: span, width: 0, height: 0, selected: null, violation: -1, fault: -1 };
const LEAST = 20; // smallest width of the window, in microseconds

function look(from, to) {
  const width = Math.min(Math.max(to - from, LEAST), span * 1.04);
  from = Math.min(Math.max(from, -span * 0.02), span * 1.02 - width);
  view.from = from;
  view.to = from + width;
  draw();
}
const fit = () => look(-span * 0.01, span * 1.01);
const x = t => LABEL + (t - view.from) / (view.to - view.from) * (view.width - LABEL);
const time = px => view.from + (px - LABEL) / (view.width - LABEL) * (view.to - view.from);
function zoom(factor, around = (view.from + view.to) / 2) {
  look(around - (around - view.from) * factor, around + (view.to - around) * factor);
}
const pan = part => look(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));


let color = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ['paper', 'ink', 'faint', 'rule', 'lane', 'wait', 'hold', 'on-hold', 'doubt', 'pause', 'kill', 'cut', 'servers', 'stall', 'taken', 'refused', 'lost', 'focus']) {
    color[name] = style.getPropertyValue('--' + name).trim();
  }
}

// Returns the index of the first element of a sorted list that ends at this time or later.
function firstFrom(list, end, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (end(list[mid]) < t) low = mid + 1; else high = mid;
  }
  return low;
}

let drawn = {};
let waiting = 0;
function draw() {
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; paint(); });
}

function paint(all = false) {
  const began = performance.now();
  const scale = all ? Math.min(2, 16000 / Math.max(height, 1)) : window.devicePixelRatio || 1;
  view.width = all ? 1100 : chart.clientWidth;
  view.height = all ? height : chart.clientHeight;
  canvas.width = Math.round(view.width * scale);
  canvas.height = Math.round(view.height * scale);
  canvas.style.height = view.height + 'px';
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = color.paper;
  pen.fillRect(0, 0, view.width, view.height);
  drawn = { lanes: 0, bars: 0, held: 0, marks: 0, refused: 0, lost: 0, bands: 0 };
  const top = all ? 0 : chart.scrollTop;
  pen.save();
  pen.translate(0, -top);
  const inSight = lanes.filter(lane => lane.y + lane.height >= top && lane.y <= top + view.height);
  pen.save();
  pen.beginPath();
  pen.rect(LABEL, top, view.width - LABEL, view.height);
  pen.clip();
  for (const lane of inSight) ground(lane);
  bands(top);
  for (const lane of inSight) {
    if (lane.queue) queue(lane);
    lane.rows.forEach((row, i) => bars(lane, row, lane.y + lane.top + i * lane.row, lane.row));
    lane.tracks.forEach((track, i) => marks(lane, track, i ? 'fenced' : 'plain', lane.y + lane.top + lane.bars + i * TRACK));
    if (lane.died != null) death(lane);
  }
  if (view.selected) frame(view.selected);
  pen.restore();
  for (const lane of inSight) label(lane);
  pen.restore();
  axis();
  servers();
  tell(performance.now() - began);
}

function ground(lane) {
  drawn.lanes += 1;
  pen.fillStyle = color.lane;
  pen.fillRect(LABEL, lane.y, view.width - LABEL, lane.height);
}

function bands(top) {
  for (const band of data.bands) {
    if (band.to < view.from || band.from > view.to) continue;
    const lane = band.worker === null ? null : laneOfWorker.get(band.worker);
    if (band.worker !== null && !lane) continue;
    const [y, high] = lane ? [lane.y - 2, lane.height + 4] : [top, view.height];
    const from = x(band.from), wide = Math.max(x(band.to) - from, 1);
    pen.fillStyle = color[band.fault] ?? color.stall;
    pen.fillRect(from, y, wide, high);
    drawn.bands += 1;
  }
}

function queue(lane) {
  const { at, count, most } = lane.queue;
  const base = lane.y + QUEUE, unit = (QUEUE - 3) / most;
  pen.fillStyle = color.wait;
  let i = Math.max(firstFrom(at, t => t, view.from) - 1, 0), px = -1, high = 0;
  const flush = (from, to) => high > 0 && pen.fillRect(from, base - high * unit, Math.max(to - from, 1), high * unit);
  for (; i < at.length && at[i] <= view.to; i++) {
    const from = Math.max(Math.floor(x(at[i])), LABEL);
    if (from === px) { high = Math.max(high, count[i]); continue; }
    if (px >= 0) flush(px, from);
    [px, high] = [from, count[i]];
  }
  if (px >= 0) flush(px, i < at.length ? x(at[i]) : x(at[i - 1]));
}

function bars(lane, row, y, high) {
  const ofLock = 'lock' in lane, begin = ofLock ? op => op.acquired : op => op.invoked;
  let seen = -1e9;
  for (let i = firstFrom(row.reach, end => end, view.from); i < row.ops.length && begin(row.ops[i]) <= view.to; i++) {
    const op = row.ops[i], to = x(op.end);
    // Draws only the first of the bars that end on one pixel.
    if (to - seen < 1) continue;
    seen = Math.floor(to);
    drawn.bars += 1;
    if (!ofLock) bar(color.wait, op.invoked, op.acquired ?? op.end, y + high * 0.35, high * 0.3);
    if (op.acquired === null) continue;
    bar(color.doubt, op.acquired, op.end, y + high * 0.3, high * 0.4);
    if (!op.held) continue;
    drawn.held += 1;
    bar(color.hold, op.held[0], op.held[1], y + 1, high - 2);
    if (op.token && high >= 11) tokenOf(op, y, high);
  }
}

function bar(fill, from, to, y, high) {
  pen.fillStyle = fill;
  const left = x(from);
  pen.fillRect(left, y, Math.max(x(to) - left, 1), high);
}

function tokenOf(op, y, high) {
  const left = Math.max(x(op.held[0]), LABEL), wide = Math.min(x(op.held[1]), view.width) - left;
  if (wide > 24) text(short(op), left + 3, y + high - 3, wide - 5, color['on-hold'], 10);
}

// Long tokens of one lock begin with the same digits and do not fit, so the token's rank is shown instead.
const short = op => op.token.length > 6 ? `+${rank.get(op.lock).get(op.token)}` : op.token;

const BAD = { refused: 'refused', late: 'lost', lost: 'lost' };
function marks(lane, track, which, y) {
  const middle = y + TRACK / 2;
  let seen = -1;
  const from = firstFrom(track, op => op.wrote, view.from);
  for (let i = from; i < track.length && track[i].wrote <= view.to; i++) {
    const px = Math.round(x(track[i].wrote));
    if (BAD[track[i][which]] || px === seen) continue;
    seen = px;
    drawn.marks += 1;
    pen.fillStyle = color.taken;
    pen.fillRect(px - 1, middle - 4, 2, 8);
  }
  // Rejected, late and lost writes are drawn on top, because readers search for them.
  const last = {};
  for (let i = from; i < track.length && track[i].wrote <= view.to; i++) {
    const fate = track[i][which], pixel = Math.round(x(track[i].wrote));
    if (!BAD[fate] || last[fate] === pixel) continue;
    last[fate] = pixel;
    drawn.marks += 1;
    drawn[BAD[fate]] += 1;
    const px = x(track[i].wrote);
    fate === 'refused' ? cross(px, middle, color.refused) : ring(px, middle, color.lost, fate === 'lost');
  }
}

function cross(px, y, stroke) {
  pen.strokeStyle = stroke;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(px - 4, y - 4); pen.lineTo(px + 4, y + 4);
  pen.moveTo(px + 4, y - 4); pen.lineTo(px - 4, y + 4);
  pen.stroke();
}

function ring(px, y, fill, isFull) {
  pen.strokeStyle = pen.fillStyle = fill;
  pen.lineWidth = 2;
  pen.beginPath();
  pen.arc(px, y, 4, 0, 7);
  isFull ? pen.fill() : pen.stroke();
}

function death(lane) {
  const px = x(lane.died);
  pen.fillStyle = color.kill;
  pen.fillRect(px - 1, lane.y - 2, 2, lane.height + 4);
  pen.fillStyle = color.paper;
  pen.fillRect(px + 1, lane.y, Math.max(view.width - px, 0), lane.height);
  cross(px + 7, lane.y + lane.height / 2, color.kill);
}

function frame(op) {
  pen.strokeStyle = color.focus;
  pen.lineWidth = 2;
  for (const [lane, row] of places.get(op) ?? []) {
    const from = x('lock' in lane ? op.acquired : op.invoked);
    pen.strokeRect(from - 2, lane.y + lane.top + row * lane.row - 1, Math.max(x(op.end) - from, 1) + 4, lane.row + 2);
  }
}

function text(what, left, y, room, fill, size = 11) {
  pen.fillStyle = fill;
  pen.font = `${size}px system-ui, sans-serif`;
  let shown = what.length > 200 ? what.slice(0, 200) : what;
  if (pen.measureText(shown).width > room) {
    // The end is shown, because many names begin with the same characters.
    while (shown.length > 1 && pen.measureText('…' + shown).width > room) shown = shown.slice(Math.ceil(shown.length / 8));
    shown = '…' + shown;
  }
  if (pen.measureText(shown).width <= room) pen.fillText(shown, left, y);
}

function label(lane) {
  text(lane.label, 6, lane.y + (lane.queue ? QUEUE : 0) + 9, LABEL - 12, color.ink);
  lane.tracks.forEach((_, i) => text(i ? 'fenced' : 'unfenced', 84, lane.y + lane.top + lane.bars + i * TRACK + 10, LABEL - 86, color.faint, 10));
}

function axis() {
  pen.fillStyle = color.paper;
  pen.fillRect(0, 0, view.width, AXIS - 4);
  const room = (view.to - view.from) / Math.max((view.width - LABEL) / 110, 1);
  const power = 10 ** Math.floor(Math.log10(room));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= room);
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    pen.fillStyle = color.rule;
    pen.fillRect(Math.round(x(t)), 16, 1, view.height);
    text(shown(t, step), x(t) + 3, 12, 100, color.faint);
  }
}

// Labels the bands that are wide enough.
function servers() {
  for (const band of data.bands) {
    const from = Math.max(x(band.from), LABEL), to = Math.min(x(band.to), view.width);
    if (band.fault === 'servers' && to > from) text('server down', from + 3, AXIS - 9, to - from - 4, color.ink);
  }
}

// Formats a time, with the precision that steps of this length need.
function shown(t, step = 1) {
  if (step >= 1e6) return (t / 1e6).toFixed(0) + ' s';
  if (step >= 1e3 && span >= 1e6) return (t / 1e6).toFixed(step >= 1e5 ? 1 : step >= 1e4 ? 2 : 3) + ' s';
  return (t / 1e3).toFixed(step >= 1e3 ? 0 : 3) + ' ms';
}

function tell(took) {
  const d = drawn;
  $('drawn').textContent = `From ${shown(view.from)} to ${shown(view.to)}: ${d.lanes} lanes, ${d.bars} bars, ${d.held} holds, ${d.marks} writes, ${d.refused} rejected, ${d.lost} late or lost, ${d.bands} faults.`;
  Object.assign(document.documentElement.dataset, { drawn: JSON.stringify(d), from: view.from, to: view.to, took: took.toFixed(1) });
}
