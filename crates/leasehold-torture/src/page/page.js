'use strict';
// Draws a run: lanes over time on one canvas that is as large as what is seen of it. Each lane has rows
// of bars that do not overlap, in order, so that what is in sight is found by halving, and of what
// falls on one pixel only the first is drawn: the work depends on the window, not on the run.

const data = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);

// The parts of an operation, as the data has them.
const ops = data.ops.map(([worker, n, lock, weight, times, token, how, written], index) => ({
  index, worker, n, lock, weight, token, how,
  invoked: times[0], acquired: times[1], end: Math.max(times[2], times[0]), held: times[3],
  wrote: written[0], plain: written[1], fenced: written[2],
}));
const span = Math.max(data.span, 1);

const LABEL = 150, AXIS = 34, ROW = 12, THIN = 8, TRACK = 12, QUEUE = 14, GAP = 6;
const MOST_ROWS = 24;

// ---- Lanes -------------------------------------------------------------------------------------

// Puts spans into as few rows as none overlaps another in. What has no room goes into the last.
function rowsOf(list, from, to) {
  const rows = [], ends = [];
  for (const op of list) {
    let row = ends.findIndex(end => end <= from(op));
    if (row < 0) row = Math.min(ends.length, MOST_ROWS - 1);
    if (!rows[row]) rows[row] = [];
    rows[row].push(op);
    ends[row] = Math.max(ends[row] ?? 0, to(op));
  }
  return rows;
}

// How many wait, as steps: moments, and the number from each on.
function queueOf(list) {
  const steps = [];
  for (const op of list) steps.push([op.invoked, 1], [op.acquired ?? op.end, -1]);
  steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let waiting = 0, most = 1;
  const at = [], count = [];
  for (const [when, change] of steps) {
    waiting += change;
    most = Math.max(most, waiting);
    at.push(when);
    count.push(waiting);
  }
  return { at, count, most };
}

function lanesOf() {
  const lanes = [];
  let y = AXIS;
  const add = lane => {
    lane.y = y;
    y += lane.height + GAP;
    lanes.push(lane);
  };
  const byStart = (list, key) => list.slice().sort((a, b) => a[key] - b[key]);
  const groups = key => {
    const found = new Map();
    for (const op of ops) (found.get(op[key]) ?? found.set(op[key], []).get(op[key])).push(op);
    return found;
  };
  const byLock = groups('lock'), byWorker = groups('worker');
  data.locks.forEach((lock, index) => {
    const here = byLock.get(index) ?? [];
    const rows = rowsOf(byStart(here.filter(op => op.acquired !== null), 'acquired'), op => op.acquired, op => op.end);
    const wrote = byStart(here.filter(op => op.wrote !== null), 'wrote');
    const tracks = ['plain', 'fenced'].map(which => wrote.filter(op => op[which] !== null));
    const bars = Math.max(rows.length, 1) * ROW;
    const height = QUEUE + bars + (wrote.length ? 2 * TRACK : 0);
    add({ lock: index, label: lock.name, rows, row: ROW, top: QUEUE, bars, queue: queueOf(here), tracks: wrote.length ? tracks : [], height });
  });
  for (const { id, died } of data.workers) {
    const here = byStart(byWorker.get(id) ?? [], 'invoked');
    const rows = rowsOf(here, op => op.invoked, op => op.end);
    const bars = Math.max(rows.length, 1) * THIN;
    add({ worker: id, label: `worker ${id}`, died, rows, row: THIN, top: 0, bars, tracks: [], height: bars });
  }
  return { lanes, height: y };
}
const { lanes, height } = lanesOf();
const laneOfWorker = new Map(lanes.filter(lane => 'worker' in lane).map(lane => [lane.worker, lane]));
const laneOfLock = new Map(lanes.filter(lane => 'lock' in lane).map(lane => [lane.lock, lane]));
const places = new Map();
for (const lane of lanes) lane.rows.forEach((row, i) => row.forEach(op => {
  places.set(op, [...(places.get(op) ?? []), [lane, i]]);
}));

// ---- The window --------------------------------------------------------------------------------

const chart = $('chart'), canvas = $('canvas'), pen = canvas.getContext('2d');
const view = { from: 0, to: span, width: 0, height: 0, selected: null, violation: -1, fault: -1 };
const LEAST = 20; // microseconds from side to side

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

// ---- Drawing -----------------------------------------------------------------------------------

let color = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ['paper', 'ink', 'faint', 'rule', 'lane', 'wait', 'hold', 'on-hold', 'doubt', 'pause', 'kill', 'cut', 'servers', 'stall', 'taken', 'refused', 'lost', 'focus']) {
    color[name] = style.getPropertyValue('--' + name).trim();
  }
}

// The first of what is in order whose end is not before the time.
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
  let seen = -1;
  for (let i = firstFrom(row, op => op.end, view.from); i < row.length && begin(row[i]) <= view.to; i++) {
    const op = row[i], to = x(op.end);
    // A hold is drawn before a wait that shares its pixel.
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
  if (wide > 24) text(op.token, left + 3, y + high - 3, wide - 5, color['on-hold'], 10);
}

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
  // On top, and each: these are what one looks for.
  for (let i = from; i < track.length && track[i].wrote <= view.to; i++) {
    const fate = track[i][which];
    if (!BAD[fate]) continue;
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
    // The end tells more: names begin alike.
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

// What is wide enough says what it is.
function servers() {
  for (const band of data.bands) {
    const from = Math.max(x(band.from), LABEL), to = Math.min(x(band.to), view.width);
    if (band.fault === 'servers' && to > from) text('server down', from + 3, AXIS - 9, to - from - 4, color.ink);
  }
}

// A moment, as exactly as steps of this length need.
function shown(t, step = 1) {
  if (step >= 1e6) return (t / 1e6).toFixed(0) + ' s';
  if (step >= 1e3 && span >= 1e6) return (t / 1e6).toFixed(step >= 1e5 ? 1 : step >= 1e4 ? 2 : 3) + ' s';
  return (t / 1e3).toFixed(step >= 1e3 ? 0 : 3) + ' ms';
}

function tell(took) {
  const d = drawn;
  $('drawn').textContent = `From ${shown(view.from)} to ${shown(view.to)}: ${d.lanes} lanes, ${d.bars} bars, ${d.held} holds, ${d.marks} writes, ${d.refused} refused, ${d.lost} late or lost, ${d.bands} bands.`;
  Object.assign(document.documentElement.dataset, { drawn: JSON.stringify(d), from: view.from, to: view.to, took: took.toFixed(1) });
}

// ---- What is where -----------------------------------------------------------------------------

const MOMENT = t => t === null ? '' : (t / 1e3).toFixed(3) + ' ms';
const FATE = { taken: 'taken', refused: 'refused', late: 'taken, though late', lost: 'taken, and lost' };
function detailOf(op) {
  const parts = [`${op.worker}.${op.n} on ${data.locks[op.lock].name}`, `asked at ${MOMENT(op.invoked)}`];
  if (op.acquired !== null) parts.push(`acquired at ${MOMENT(op.acquired)}` + (op.token ? ` with token ${op.token}` : ''));
  if (op.held) parts.push(`believed that it held until ${MOMENT(op.held[1])}`);
  if (op.plain) parts.push(`wrote at ${MOMENT(op.wrote)}, unfenced: ${FATE[op.plain]}`);
  if (op.fenced) parts.push(`fenced: ${FATE[op.fenced]}`);
  parts.push(`${op.how} at ${MOMENT(op.end)}`);
  return parts.join('; ');
}

function select(op) {
  view.selected = op;
  $('detail').textContent = op ? detailOf(op) : '\u00a0';
  draw();
}

function showLane(lane) {
  if (lane.y < chart.scrollTop + AXIS || lane.y + lane.height > chart.scrollTop + chart.clientHeight) {
    chart.scrollTop = lane.y - chart.clientHeight / 3;
  }
}

// The window of some operations, with as much again on either side.
function goTo(list) {
  const held = op => op.held ?? [op.acquired ?? op.invoked, op.end];
  let from = Math.min(...list.map(op => held(op)[0])), to = Math.max(...list.map(op => Math.max(held(op)[1], op.wrote ?? 0)));
  const margin = Math.max((to - from) * 0.6, 200);
  look(from - margin, to + margin);
}

function showViolation(index) {
  const broken = data.violations[index];
  if (!broken) return;
  view.violation = index;
  document.querySelectorAll('#violations a').forEach((a, i) => a.classList.toggle('here', i === index));
  const about = broken.ops.map(i => ops[i]);
  if (about.length) goTo(about);
  const lane = laneOfLock.get(about.length ? about[0].lock : broken.lock);
  if (lane) showLane(lane);
  select(about[0] ?? null);
  $('detail').textContent = broken.what + (about.length ? ' — ' + detailOf(about[0]) : '');
}

const faults = data.bands.filter(band => band.fault !== 'stall')
  .concat(data.workers.filter(w => w.died !== null).map(w => ({ fault: 'kill', worker: w.id, from: w.died, to: w.died })))
  .sort((a, b) => a.from - b.from);
function showFault(step) {
  if (!faults.length) return;
  view.fault = view.fault < 0 && step < 0 ? faults.length - 1 : (view.fault + step + faults.length) % faults.length;
  const { fault, worker, from, to } = faults[view.fault];
  const margin = Math.max((to - from) * 0.7, span / 200);
  look(from - margin, to + margin);
  const lane = laneOfWorker.get(worker);
  if (lane) showLane(lane);
  view.selected = null;
  $('detail').textContent = `${fault}${worker === null ? '' : ` of worker ${worker}`} from ${MOMENT(from)} to ${MOMENT(to)}`;
}

const inOrder = ops.slice().sort((a, b) => a.invoked - b.invoked);
function step(by) {
  let at = view.selected ? inOrder.indexOf(view.selected) + by : firstFrom(inOrder, op => op.invoked, view.from);
  at = Math.min(Math.max(at, 0), inOrder.length - 1);
  const op = inOrder[at];
  if (!op) return;
  if (op.end < view.from || op.invoked > view.to) {
    const half = (view.to - view.from) / 2;
    look(op.invoked - half, op.invoked + half);
  }
  const [lane] = places.get(op)[0];
  showLane(lane);
  select(op);
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const t = time(event.clientX - box.left), y = event.clientY - box.top + chart.scrollTop;
  const lane = lanes.find(lane => y >= lane.y && y < lane.y + lane.height);
  if (!lane || event.clientX - box.left < LABEL) return null;
  const slack = (view.to - view.from) / view.width * 4;
  const track = lane.tracks[Math.floor((y - lane.y - lane.top - lane.bars) / TRACK)];
  if (track) {
    const near = op => Math.abs(op.wrote - t);
    const i = firstFrom(track, op => op.wrote, t - slack);
    return track.slice(i, i + 20).filter(op => near(op) <= slack).sort((a, b) => near(a) - near(b))[0] ?? null;
  }
  const row = lane.rows[Math.floor((y - lane.y - lane.top) / lane.row)];
  if (!row) return null;
  const op = row[firstFrom(row, op => op.end, t - slack)];
  return op && ('lock' in lane ? op.acquired : op.invoked) <= t + slack ? op : null;
}

// ---- Hands -------------------------------------------------------------------------------------

const KEYS = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), '+': () => zoom(0.6), '=': () => zoom(0.6), '-': () => zoom(1 / 0.6),
  '0': fit, Home: () => look(0, view.to - view.from), End: () => look(span - (view.to - view.from), span),
  n: () => showFault(1), p: () => showFault(-1), '[': () => step(-1), ']': () => step(1),
  v: () => data.violations.length && showViolation((view.violation + 1) % data.violations.length),
  Escape: () => select(null),
};
chart.addEventListener('keydown', event => {
  const act = KEYS[event.key];
  // Up and down scroll the lanes, as in any page.
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
chart.addEventListener('scroll', draw);
chart.addEventListener('wheel', event => {
  if (event.ctrlKey || event.metaKey) {
    zoom(Math.exp(Math.sign(event.deltaY) * 0.25), time(event.clientX - canvas.getBoundingClientRect().left));
  } else if (event.deltaX) {
    pan(event.deltaX / view.width);
  } else {
    return;
  }
  event.preventDefault();
}, { passive: false });
let grip = null;
canvas.addEventListener('pointerdown', event => {
  grip = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: chart.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener('pointermove', event => {
  if (!grip) return;
  grip.moved ||= Math.abs(event.clientX - grip.x) + Math.abs(event.clientY - grip.y) > 4;
  if (!grip.moved) return;
  const by = (grip.x - event.clientX) / (view.width - LABEL) * (grip.to - grip.from);
  chart.scrollTop = grip.top + grip.y - event.clientY;
  look(grip.from + by, grip.to + by);
});
canvas.addEventListener('pointerup', event => {
  if (grip && !grip.moved) select(under(event));
  grip = null;
});
// The browser scrolls by itself, under a finger.
canvas.addEventListener('pointercancel', () => { grip = null; });
for (const [id, act] of Object.entries({ fit, in: KEYS['+'], out: KEYS['-'], left: KEYS.ArrowLeft, right: KEYS.ArrowRight, before: KEYS.p, next: KEYS.n })) {
  $(id).addEventListener('click', act);
}
window.addEventListener('resize', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColors(); draw(); });
window.addEventListener('beforeprint', () => {
  document.documentElement.classList.add('printing');
  $('report').open = true;
  readColors();
  paint(true);
});
window.addEventListener('afterprint', () => {
  document.documentElement.classList.remove('printing');
  readColors();
  paint();
});

// ---- The rest of the page ----------------------------------------------------------------------

function legend() {
  const entries = [['wait', 'waits'], ['hold', 'believes that it holds'], ['doubt', 'not beyond doubt'], ['pause', 'paused'], ['cut', 'cut off'], ['kill', 'killed'],
    ['servers', 'server down'], ['stall', 'did not run'], ['taken', 'write taken'], ['refused', '✕ refused'], ['lost', '● lost, ○ late']];
  for (const [name, what] of entries) {
    const entry = document.createElement('span'), patch = document.createElement('i');
    patch.style.background = `var(--${name})`;
    entry.append(patch, what);
    $('legend').append(entry);
  }
}

// With thousands the list would be slower than the picture.
const MOST_LISTED = 500;
function violations() {
  $('broken').hidden = data.violations.length === 0;
  data.violations.slice(0, MOST_LISTED).forEach((broken, index) => {
    const item = document.createElement('li'), link = document.createElement('a');
    link.href = `#v${index + 1}`;
    link.textContent = `${broken.name}: ${broken.what}`;
    // A second time as well, when the address is the same.
    link.addEventListener('click', () => showViolation(index));
    item.append(link);
    $('violations').append(item);
  });
  const more = data.violations.length - MOST_LISTED;
  if (more > 0) {
    const item = document.createElement('li');
    item.textContent = `and ${more} more, which the key v goes on to`;
    $('violations').append(item);
  }
}

// #v3 is the third violation, #t=1.5,2 the time from 1.5 to 2 ms.
function byAddress() {
  const violation = /^#v(\d+)$/.exec(location.hash), window = /^#t=([\d.]+),([\d.]+)$/.exec(location.hash);
  if (violation) showViolation(Number(violation[1]) - 1);
  if (window) look(Number(window[1]) * 1e3, Number(window[2]) * 1e3);
}

$('summary').textContent = data.summary;
$('summary').classList.add(data.verdict);
document.title = `${data.verdict}: ${data.store}`;
if (data.command || data.seed) {
  $('again').hidden = false;
  $('command').textContent = data.command || `seed ${data.seed}`;
}
legend();
violations();
readColors();
// No higher than its lanes; the style says how high at most.
chart.style.height = height + 4 + 'px';
// The canvas is as high as the frame, and sticks to it: what is behind it makes the frame scroll.
$('height').style.height = Math.max(height - chart.clientHeight, 0) + 'px';
window.addEventListener('hashchange', byAddress);
fit();
paint();
byAddress();
