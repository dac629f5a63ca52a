'use strict';
// The lanes and their contents. Each lane has rows of bars, which are sorted and do not overlap.

const data = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);

// The parts of an operation, in the order in which the data contains them.
const ops = data.ops.map(([worker, n, lock, weight, times, token, how, written], index) => ({
  index, worker, n, lock, weight, token, how,
  invoked: times[0], acquired: times[1], end: Math.max(times[2], times[0]), held: times[3],
  wrote: written[0], plain: written[1], fenced: written[2],
}));
const span = Math.max(data.span, 1);

const LABEL = 150, AXIS = 34, ROW = 12, THIN = 8, TRACK = 12, QUEUE = 14, GAP = 6;
const MOST_ROWS = 24;

// Distributes spans, which are sorted by their beginning, over as few rows as possible without overlaps. If there are
// too many rows, the other spans go into the last one. `reach` is the latest end in the row up to each of its spans.
function rowsOf(list, from) {
  const rows = [];
  for (const op of list) {
    let row = rows.find(row => row.reach.at(-1) <= from(op));
    if (!row && rows.length < MOST_ROWS) rows.push(row = { ops: [], reach: [] });
    row ??= rows.at(-1);
    row.reach.push(Math.max(row.reach.at(-1) ?? 0, op.end));
    row.ops.push(op);
  }
  return rows;
}

// Returns the number of waiters as steps: times, and the number from each time on.
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
    const rows = rowsOf(byStart(here.filter(op => op.acquired !== null), 'acquired'), op => op.acquired);
    const wrote = byStart(here.filter(op => op.wrote !== null), 'wrote');
    const tracks = ['plain', 'fenced'].map(which => wrote.filter(op => op[which] !== null));
    const bars = Math.max(rows.length, 1) * ROW;
    const height = QUEUE + bars + (wrote.length ? 2 * TRACK : 0);
    add({ lock: index, label: lock.name.replace(/^leasehold-torture-[0-9a-f]{16}\//, ''), rows, row: ROW, top: QUEUE, bars, queue: queueOf(here), tracks: wrote.length ? tracks : [], height });
  });
  for (const { id, died } of data.workers) {
    const here = byStart(byWorker.get(id) ?? [], 'invoked');
    const rows = rowsOf(here, op => op.invoked);
    const bars = Math.max(rows.length, 1) * THIN;
    add({ worker: id, label: `worker ${id}`, died, rows, row: THIN, top: 0, bars, tracks: [], height: bars });
  }
  return { lanes, height: y };
}
const { lanes, height } = lanesOf();
const laneOfWorker = new Map(lanes.filter(lane => 'worker' in lane).map(lane => [lane.worker, lane]));
const laneOfLock = new Map(lanes.filter(lane => 'lock' in lane).map(lane => [lane.lock, lane]));
// The rank of each token among its lock's tokens: +1 is the lowest.
const rank = new Map();
for (const op of ops) {
  if (op.token) (rank.get(op.lock) ?? rank.set(op.lock, new Map()).get(op.lock)).set(op.token, 0);
}
for (const tokens of rank.values()) {
  const sorted = [...tokens.keys()].map(BigInt).sort((a, b) => (a < b ? -1 : 1));
  sorted.forEach((token, i) => tokens.set(String(token), i + 1));
}
const places = new Map();
for (const lane of lanes) lane.rows.forEach((row, i) => row.ops.forEach(op => {
  places.set(op, [...(places.get(op) ?? []), [lane, i]]);
}));
