// Finds operations, faults and violations, moves the window there and describes them.


const MOMENT = t => t === null ? '' : (t / 1e3).toFixed(3) + ' ms';
const FATE = { taken: 'accepted', refused: 'rejected', late: 'accepted although late', lost: 'accepted but lost' };
function detailOf(op) {
  const parts = [`${op.worker}.${op.n} on ${data.locks[op.lock].name}`, `requested at ${MOMENT(op.invoked)}`];
  if (op.acquired !== null) parts.push(`acquired at ${MOMENT(op.acquired)}` + (op.token ? ` with token ${op.token}` : ''));
  if (op.held) parts.push(`believed it held until ${MOMENT(op.held[1])}`);
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

// Moves the window to these operations, with a margin on both sides.
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
  const op = row.ops[firstFrom(row.reach, end => end, t - slack)];
  return op && ('lock' in lane ? op.acquired : op.invoked) <= t + slack ? op : null;
}
