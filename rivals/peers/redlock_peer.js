// node-redlock as a peer. Argument: a server's port. Each input line is one task.
const Redis = require("ioredis");
const Redlock = require("redlock");
const readline = require("readline");

const port = Number(process.argv[2]);
const now = () => process.hrtime.bigint();
const open = () => new Redlock([new Redis(port)], { retryCount: -1, retryDelay: 5, retryJitter: 5 });

async function turn(redlock, name) {
  const lock = await redlock.lock(name, 15000);
  const note = now();
  await lock.unlock();
  return note;
}

const alone = open();
async function pair(seconds) {
  const started = now();
  let pairs = 0;
  do {
    await turn(alone, "node-redlock");
    pairs += 1;
  } while (now() - started < BigInt(Math.round(seconds * 1e9)));
  console.log(Number(now() - started) / pairs);
}

const many = [];
async function contend(seconds, n) {
  while (many.length < n) many.push(open());
  const until = now() + BigInt(Math.round(seconds * 1e9));
  const work = async (redlock) => {
    const notes = [];
    for (;;) {
      const note = await turn(redlock, "contention");
      if (note >= until) return notes;
      notes.push(note);
    }
  };
  const all = await Promise.all(many.slice(0, n).map(work));
  for (const notes of all) console.log(notes.join(" "));
}

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [work, seconds, n] = line.split(" ");
    await (work === "pair" ? pair(Number(seconds)) : contend(Number(seconds), Number(n)));
  }
  process.exit(0);
})();
