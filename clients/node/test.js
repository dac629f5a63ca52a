'use strict';
// Tests with the real command. LEASEHOLD_COMMAND is its path, LEASEHOLD_STORE a store with leases.
//
// With LEASEHOLD_OVER=http, the locks are those of a `leasehold serve`, to which the client connects directly.
//
// The tests are named after the rows of the table in clients/README.md, as in ../python/tests.py.

const assert = require('node:assert');
const { spawn, spawnSync } = require('node:child_process');
const { randomUUID } = require('node:crypto');
const { once } = require('node:events');
const { chmodSync, existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } = require('node:fs');
const { tmpdir } = require('node:os');
const { join } = require('node:path');
const { createInterface } = require('node:readline');
const { test } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { elect, lock, withLock, LeaseholdError, Lost, NotAcquired, Unavailable } = require('./index.js');

const STORE = process.env.LEASEHOLD_STORE;
const overHttp = process.env.LEASEHOLD_OVER === 'http';
const withLeases = { skip: STORE || overHttp ? false : 'no store with leases' };
const aboutTheCommand = { skip: overHttp ? 'the client uses no command' : false };
const UNREACHABLE = overHttp ? 'http://127.0.0.1:1/' : 'redis://127.0.0.1:1/';

function command(words, store) {
  const env = store ? { ...process.env, LEASEHOLD_STORE: store } : process.env;
  return spawnSync(process.env.LEASEHOLD_COMMAND, words, { env, encoding: 'utf8' });
}

function directory(t) {
  const path = mkdtempSync(join(tmpdir(), 'leasehold-node-'));
  t.after(() => rmSync(path, { recursive: true, force: true }));
  return path;
}

/** A store with leases. */
const leased = (t) => (overHttp ? files(t) : STORE);

/** A store of files, or a server of one. */
function files(t) {
  const path = directory(t);
  const store = `file:${path}/store`;
  if (!overHttp) return store;
  const words = ['serve', '--store', store, '--listen', `unix:${path}/socket`];
  const server = spawn(process.env.LEASEHOLD_COMMAND, words, { stdio: ['ignore', 'ignore', 'inherit'] });
  t.after(() => server.kill('SIGKILL'));
  while (!existsSync(`${path}/socket`)) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 10);
  return `http+unix://${path}/socket`;
}

/** The process that keeps a lock. */
const pidOf = (held) => (overHttp ? process.pid : held._keeper.process.pid);

/** A program that is used as the command. */
function standIn(t, script) {
  const path = join(directory(t), 'stand-in');
  writeFileSync(path, `#!/bin/sh\n${script}\n`);
  chmodSync(path, 0o700);
  return path;
}

const prints = (line) => `echo '${JSON.stringify(line)}'`;

const claims = (store, name = 'x y') => JSON.parse(command(['show', '--json', name], store).stdout).claims.length;

async function eventually(what) {
  const end = Date.now() + 60_000;
  while (!what()) {
    assert(Date.now() < end, 'never');
    await sleep(10);
  }
}

/** Another Node with this store, and a function that returns its next line. */
function start(t, script, store, words = []) {
  const code = `const { lock } = require(${JSON.stringify(__dirname)});\n(async () => {\n${script}\n})();`;
  const env = { ...process.env, LEASEHOLD_STORE: store };
  const child = spawn(process.execPath, [...words, '-e', code], { env, stdio: ['pipe', 'pipe', 'inherit'] });
  t.after(() => child.kill('SIGKILL'));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  return [child, async () => (await lines.next()).value];
}

test('a lock is held and released', async (t) => {
  const store = files(t);
  const first = await lock('x y', { store, label: 'the first' });
  assert.equal(first.state, 'held');
  assert.equal(command(['verify', first.sequencer], store).status, 0);
  first.check();
  await assert.rejects(lock('x y', { store, wait: 0 }), (e) => e instanceof NotAcquired && /the first/.test(e.message));
  await first.release();
  await first.release();
  assert.equal(first.state, 'released');
  assert.equal(claims(store), 0);
  const later = await withLock('x y', { store }, (held) => held.token);
  assert(later > first.token);
});

test('a waiter sees the holders', async (t) => {
  const store = files(t);
  const first = await lock('x', { store, label: 'the first' });
  // The store `file:` has no leases. A server adds them.
  assert.equal(first.deadline === null, !overHttp);
  const seen = [];
  const onWaiting = (held) => {
    seen.push([held.state, held.ahead, held.heldBy, held.holders]);
    first.release();
  };
  const second = await lock('x', { store, onWaiting });
  await second.release();
  const [state, ahead, heldBy, holders] = seen[0];
  assert.deepEqual([state, ahead], ['waiting', 1]);
  assert.match(heldBy, /\(the first\) for /);
  assert.deepEqual(holders.map((one) => [one.label, one.pid]), [['the first', pidOf(first)]]);
});

test('an error in the body releases the lock', async (t) => {
  const store = files(t);
  await assert.rejects(withLock('x y', { store }, () => Promise.reject(new Error('inside'))), /inside/);
  assert.equal(claims(store), 0);
});

test('holders take turns', async (t) => {
  const store = files(t);
  let inside = 0;
  const turn = () =>
    withLock('x', { store }, async () => {
      assert.equal(++inside, 1);
      await sleep(1);
      inside--;
    });
  await Promise.all(Array.from({ length: 10 }, turn));
});

test('a cancelled wait leaves the queue', async (t) => {
  const store = files(t);
  const held = await lock('x y', { store });
  const cancels = new AbortController();
  const waiting = lock('x y', { store, signal: cancels.signal });
  await eventually(() => claims(store) === 2);
  cancels.abort(new Error('enough'));
  await assert.rejects(waiting, /enough/);
  await eventually(() => claims(store) === 1);
  held.check();
  await held.release();
});

test('a killed caller releases the lock', async (t) => {
  const store = files(t);
  const [child, line] = start(t, "await lock('x y', { lease: 5000 }); console.log('in');", store);
  assert.equal(await line(), 'in');
  assert.equal(claims(store), 1);
  child.kill('SIGKILL');
  await withLock('x y', { store, wait: 60_000 }, () => {});
});

test('children of a killed caller do not keep the lock', async (t) => {
  const store = files(t);
  const script = `
    const { spawn } = require('node:child_process');
    const { _keeper: { process: hold } } = await lock('x y', { lease: 5000 });
    // Node closes the pipes in its children. Some other code in the process may not.
    const stdio = hold ? [hold.stdin, hold.stdout, 'ignore'] : 'ignore';
    console.log(spawn('sleep', ['1000'], { stdio, detached: true }).pid);`;
  const [child, line] = start(t, script, store);
  const pid = Number(await line());
  try {
    child.kill('SIGKILL');
    // The child still exists.
    await withLock('x y', { store, wait: 60_000 }, () => process.kill(pid, 0));
  } finally {
    process.kill(pid, 'SIGKILL');
  }
});

test('a child process cannot release the lock', async (t) => {
  const store = files(t);
  const held = await lock('x y', { store });
  for (const signal of ['SIGTERM', 'SIGKILL']) {
    const [child, line] = start(t, "console.log('in'); setInterval(() => {}, 1e6);", store);
    assert.equal(await line(), 'in');
    child.kill(signal);
    await once(child, 'exit');
  }
  held.check();
  assert.equal(claims(store), 1);
  await held.release();
});

test('an interrupted acquire leaves nothing held', async (t) => {
  const store = files(t);
  await withLock('x y', { store }, () => {});
  for (const delay of [0, 1, 2, 5, 10, 15, 20, 30, 50, 100]) {
    const cancels = new AbortController();
    setTimeout(() => cancels.abort(new Error('enough')), delay);
    const { signal } = cancels;
    const held = await lock('x y', { store, signal }).catch((error) => assert.match(error.message, /enough/));
    await held?.release();
    await eventually(() => claims(store) === 0);
  }
  await assert.rejects(lock('x y', { store, signal: AbortSignal.abort(new Error('enough')) }), /enough/);
});

test('an interrupted release can be repeated', async (t) => {
  const store = files(t);
  const held = await lock('x y', { store });
  const first = held.release();
  await held.release();
  assert.deepEqual([held.state, claims(store)], ['released', 0]);
  await first;
  // The process ends in the middle of the release.
  const [child] = start(t, "const held = await lock('x y', { lease: 2000 }); held.release(); process.exit();", store);
  await once(child, 'exit');
  await eventually(() => claims(store) === 0);
});

test('a lock can be released at exit', async (t) => {
  const store = files(t);
  const ways = [
    "process.on('exit', () => held.release()); process.exit();",
    'process.exit();',
    "process.on('exit', () => held.release()); process.kill(process.pid, 'SIGTERM');",
  ];
  for (const way of ways) {
    const [child] = start(t, `const held = await lock('x y', { lease: 2000 }); ${way}`, store);
    await once(child, 'exit');
    await eventually(() => claims(store) === 0);
  }
});

test('an unreferenced lock stays held', async (t) => {
  const store = files(t);
  const script = `
    await lock('x y', { lease: 5000 });
    setInterval(() => { gc(); console.log('collected'); }, 10);`;
  const [child, line] = start(t, script, store, ['--expose-gc']);
  for (let i = 0; i < 5; i++) {
    assert.equal(await line(), 'collected');
    assert.equal(claims(store), 1);
  }
  child.kill();
  await eventually(() => claims(store) === 0);
});

test('a candidate takes over when the leader is gone', async (t) => {
  const store = files(t);
  const ends = [new AbortController(), new AbortController()];
  const led = [];
  const stand = async (who) => {
    const { signal } = ends[who];
    for await (const term of elect('x y', { store, signal })) {
      led.push([who, term.token]);
      while (!term.lost && !signal.aborted) await sleep(10);
    }
  };
  const one = stand(0);
  await eventually(() => led.length === 1);
  const two = stand(1);
  await eventually(() => claims(store) === 2);
  assert.equal(command(['evict', 'x y'], store).status, 0);
  // The evicted candidate rejoins the queue, after the other one.
  await eventually(() => led.length === 2 && claims(store) === 2);
  assert.deepEqual(led.map(([who]) => who), [0, 1]);
  assert(led[1][1] > led[0][1]);
  for (const end of ends) end.abort();
  await Promise.all([one, two]);
  await eventually(() => claims(store) === 0);
  // An error in the body ends the loop, and the term.
  const fails = async () => {
    for await (const _ of elect('x y', { store })) throw new Error('inside');
  };
  await assert.rejects(fails(), /inside/);
  assert.equal(claims(store), 0);
});

test('candidates survive an unreachable store', async () => {
  const cancels = new AbortController();
  const term = elect('x y', { store: UNREACHABLE, wait: 0, signal: cancels.signal }).next();
  // Longer than several attempts.
  assert.equal(await Promise.race([term, sleep(2000, 'waits')]), 'waits');
  cancels.abort();
  assert.deepEqual(await term, { value: undefined, done: true });
});

test('candidates survive a killed command', aboutTheCommand, async (t) => {
  const starts = join(directory(t), 'starts');
  const path = standIn(t, `echo >> ${starts}\nkill -9 $$`);
  const cancels = new AbortController();
  const term = elect('x y', { command: path, signal: cancels.signal }).next();
  await eventually(() => existsSync(starts) && readFileSync(starts).length > 2);
  cancels.abort();
  assert.deepEqual(await term, { value: undefined, done: true });
});

test('an election ends for invalid options', async (t) => {
  const store = files(t);
  await assert.rejects(elect('x'.repeat(999), { store }).next(), (e) => e.code === 2);
  await assert.rejects(elect('x', { command: 'echo' }).next(), /not the leasehold command/);
  await assert.rejects(elect('x', { command: '/nowhere' }).next(), /cannot start \/nowhere/);
  await assert.rejects(elect('x', { wait: -1 }).next(), RangeError);
});

test('errors do not depend on the exit status', aboutTheCommand, async (t) => {
  for (const [code, kind] of [[75, NotAcquired], [69, Unavailable], [2, LeaseholdError]]) {
    const path = standIn(t, prints({ event: 'failed', code, message: 'so it is' }));
    const wanted = (e) => e.constructor === kind && e.code === code && e.message === 'so it is';
    await assert.rejects(lock('x', { command: path }), wanted);
  }
  // In a process that was started with SIGCHLD ignored.
  const store = files(t);
  const held = await lock('x y', { store });
  const client = `require(${JSON.stringify(__dirname)})`;
  const script = `${client}.lock('x y', { wait: 0 }).catch((e) => console.log(e.name, e.code))`;
  const words = ['-c', "trap '' CHLD; exec \"$0\" -e \"$1\"", process.execPath, script];
  const said = spawnSync('sh', words, { env: { ...process.env, LEASEHOLD_STORE: store }, encoding: 'utf8' });
  assert.equal(said.stdout, 'NotAcquired 75\n', said.stderr);
  await held.release();
});

test('invalid options are rejected', async (t) => {
  const store = files(t);
  for (const [options, name, message] of [
    [{ shared: true, exclusive: true }, 'TypeError', 'shared and exclusive exclude each other: set one of them'],
    [{ shared: true, of: 2 }, 'TypeError', 'shared and of exclude each other: set one of them'],
    [{ permits: 2 }, 'TypeError', 'permits requires of, the size of the semaphore'],
    [{ lease: 0 }, 'RangeError', 'lease must be greater than 0 milliseconds'],
    [{ maxHold: 0 }, 'RangeError', 'maxHold must be greater than 0 milliseconds'],
  ]) {
    await assert.rejects(lock('x', { store, ...options }), { name, message });
    await assert.rejects(elect('x', { store, ...options }).next(), { name, message });
  }
  for (const path of ['echo', standIn(t, 'echo 5'), standIn(t, "echo '{}'")]) {
    await assert.rejects(lock('x', { store, command: path }), /not the leasehold command/);
  }
  await assert.rejects(lock('x', { store, command: '/nowhere' }), /cannot start \/nowhere/);
  // Node throws these errors of the system, and emits others as events.
  const file = join(directory(t), 'file');
  writeFileSync(file, '');
  for (const [options, kind] of [[{ command: `${file}/leasehold` }, 'ENOTDIR'], [{ command: '' }, '']]) {
    const wanted = (e) => e instanceof LeaseholdError && /^cannot start /.test(e.message) && e.message.includes(kind);
    await assert.rejects(lock('x', { store, ...options }), wanted);
    await assert.rejects(elect('x', { store, ...options }).next(), wanted);
  }
  if (!overHttp) await assert.rejects(lock('x', { store, label: 'y'.repeat(300_000) }), /cannot start .*E2BIG/);
  for (const take of [lock, (name, options) => elect(name, options).next()]) {
    for (const name of [undefined, null, {}, 5, 'a\0b']) {
      await assert.rejects(take(name, { store }), (e) => e instanceof TypeError && e.message.startsWith('name '));
    }
    for (const label of [{}, 5, 'a\0b']) {
      await assert.rejects(take('x', { store, label }), (e) => e instanceof TypeError && e.message.startsWith('label '));
    }
    // The URL may contain a password.
    const wanted = { name: 'TypeError', message: 'store contains a NUL character' };
    await assert.rejects(take('x', { store: 'redis://:secret@\0/' }), wanted);
  }
  // An unset variable would otherwise select the locks of this machine.
  await assert.rejects(lock('x', { store: '' }), /store is empty/);
  for (const name of ['of', 'permits']) {
    for (const [value, kind] of [[0, RangeError], [-1, RangeError], [2.5, TypeError], ['2', TypeError]]) {
      const wanted = (e) => e instanceof kind && e.message.startsWith(`${name} must be `);
      await assert.rejects(lock('x', { store, [name]: value }), wanted);
    }
  }
  await assert.rejects(lock('x', { store: UNREACHABLE, wait: 0 }), Unavailable);
});

test('times are rounded to milliseconds', async (t) => {
  const store = files(t);
  // A stand-in for the command gets the times as arguments.
  const path = standIn(t, `echo "{\\"event\\":\\"failed\\",\\"code\\":2,\\"message\\":\\"$4\\"}"`);
  const times = [[0, 0], [1, 1], [1000.4, 1000], [10_000 / 3, 3333], [0.1 + 0.2, 1], [1e-9, 1], [-0, 0], [5000n, 5000]];
  for (const [wait, milliseconds] of times) {
    await assert.rejects(lock('x', { command: path, wait }), { message: `--wait=${milliseconds}ms` });
  }
  for (let i = 0; i < 3; i++) {
    const wait = 1000 * (5 + Math.random());
    await withLock('x', { store, wait, lease: 10_000 / 3, maxHold: 1e5 / 3, minHold: 1 / 3, lockDelay: 0 }, () => {});
  }
});

test('infinity means no limit', async (t) => {
  const store = files(t);
  for (const endless of [Infinity, 1e300, 10n ** 400n]) {
    await withLock('x y', { store, wait: endless, maxHold: endless }, () => assert.equal(claims(store), 1));
  }
});

test('invalid times are rejected by name', async (t) => {
  const store = files(t);
  const rejects = (name, value, kind, text) => {
    const wanted = (e) => e instanceof kind && e.message.startsWith(`${name} must be ${text}, not `);
    return assert.rejects(lock('x', { store, [name]: value }), wanted);
  };
  const range = 'between 0 milliseconds and 100 years';
  const names = ['wait', 'lease', 'maxHold', 'minHold', 'lockDelay'];
  for (const name of names) {
    for (const value of [-1, -1e-9, NaN, -Infinity, -5n]) await rejects(name, value, RangeError, range);
    for (const value of ['5s', '5', true, [], {}, Symbol('x')]) {
      await rejects(name, value, TypeError, 'a number of milliseconds');
    }
  }
  for (const name of ['lease', 'minHold', 'lockDelay']) {
    for (const value of [Infinity, 1e300]) await rejects(name, value, RangeError, range);
  }
});

test('a loss is reported before the command ends', aboutTheCommand, async (t) => {
  const held = { event: 'held', token: 7, sequencer: 's' };
  const lines = [prints(held), 'sleep 0.3', prints({ event: 'at_risk' }), prints({ event: 'lost', reason: 'expired' })];
  const path = standIn(t, [...lines, 'exec sleep 1000'].join('\n'));
  const lost = await lock('x', { command: path });
  const [loss] = await once(lost, 'lost');
  assert(loss instanceof Lost && /expired/.test(loss.message));
  assert.throws(() => lost.check(), Lost);
  lost._keeper.process.kill('SIGKILL');
  await assert.rejects(lost.release(), Lost);
  // The event arrives together with the line that the lock is held.
  const both = [held, { event: 'lost', reason: 'expired' }].map((line) => JSON.stringify(line)).join('\\n');
  const brief = await lock('x', { command: standIn(t, `printf '${both}\\n'\nexec sleep 1000`) });
  const [again] = await once(brief, 'lost');
  assert(again instanceof Lost);
  brief._keeper.process.kill('SIGKILL');
});

// Tests on a store with leases.

/** Starts a Node that holds this lock with a lease of 4 s. It prints the pid of its command, if it has one. */
function startHolder(t, store, name) {
  const script = `
    const held = await lock(${JSON.stringify(name)}, { lease: 4000 });
    console.log(held._keeper.process?.pid ?? 0);
    process.stdin.once('data', async (time) => {
      const pause = () => new Promise((done) => setTimeout(done, 10));
      for (let left = Number(time); left > 0 && !held.lost; left -= 10) await pause();
      console.log(held.lost ? 'lost' : 'held');
      await held.release().catch((error) => console.log(error.name));
      process.exit();
    });`;
  return start(t, script, store);
}

test('a paused caller keeps its lock', overHttp ? aboutTheCommand : withLeases, async (t) => {
  const name = `node ${randomUUID()}`;
  const [child, line] = startHolder(t, STORE, name);
  await line();
  child.kill('SIGSTOP');
  // Longer than the lease.
  await sleep(7000);
  assert.equal(command(['run', '--try', name, '--', 'true']).status, 75);
  child.kill('SIGCONT');
  child.stdin.write('0\n');
  assert.deepEqual([await line(), await line()], ['held', undefined]);
});

test('a loss during a pause is reported after it', withLeases, async (t) => {
  const [store, name] = [leased(t), `node ${randomUUID()}`];
  const [child, line] = startHolder(t, store, name);
  const both = [Number(await line()), child.pid].filter((pid) => pid);
  for (const pid of both) process.kill(pid, 'SIGSTOP');
  await withLock(name, { store, wait: 60_000 }, async () => {
    for (const pid of both) process.kill(pid, 'SIGCONT');
    child.stdin.write('60000\n');
    assert.deepEqual([await line(), await line()], ['lost', 'Lost']);
  });
});

test('an evicted lock is lost', withLeases, async (t) => {
  const [store, name] = [leased(t), `node ${randomUUID()}`];
  const held = await lock(name, { store, lease: 4000 });
  const left = held.deadline - Date.now();
  assert(left > 0 && left <= 4000, `${left} ms`);
  const lost = once(held, 'lost');
  assert.equal(command(['evict', name], store).status, 0);
  const [loss] = await lost;
  assert(loss instanceof Lost && held.lost);
  assert.throws(() => held.check(), Lost);
  await assert.rejects(held.release(), Lost);
});

test('a lock is lost when its command is killed', overHttp ? aboutTheCommand : withLeases, async () => {
  const name = `node ${randomUUID()}`;
  const held = await lock(name, { lease: 1000 });
  const lost = once(held, 'lost');
  held._keeper.process.kill('SIGKILL');
  await lost;
  // The hold ended when its lease expired.
  const later = await withLock(name, { wait: 60_000 }, (next) => next.token);
  assert(later > held.token);
});

test('a lock is lost when its command is terminated', aboutTheCommand, async (t) => {
  const store = files(t);
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT']) {
    const held = await lock('x y', { store });
    const lost = once(held, 'lost');
    process.kill(held._keeper.process.pid, signal);
    const [loss] = await lost;
    assert(loss instanceof Lost && /another process ended the leasehold process/.test(loss.message), signal);
    assert.deepEqual([held.lost, held.state], [true, 'lost']);
    assert.throws(() => held.check(), Lost);
    // The command has released the lock.
    await withLock('x y', { store, wait: 60_000 }, () => {});
    await assert.rejects(held.release(), Lost);
    assert.equal(held.state, 'lost');
  }
  // The command has ended when the release is requested.
  const late = await lock('x y', { store });
  process.kill(late._keeper.process.pid, 'SIGTERM');
  const end = Date.now() + 60_000;
  while (claims(store) > 0) assert(Date.now() < end, 'never');
  spawnSync('sleep', ['0.5']);
  await assert.rejects(late.release(), Lost);
  // A command that prints the line and does not end.
  const lines = [{ event: 'held', token: 7, sequencer: 's' }, { event: 'released' }].map(prints).join('\n');
  const brief = await lock('x', { command: standIn(t, `${lines}\nexec sleep 1000`) });
  await eventually(() => brief.lost);
  brief._keeper.process.kill('SIGKILL');
  // A lock that was granted after its wait was cancelled is not returned.
  const [waiting, [held, released]] = [prints({ event: 'waiting', ahead: 1 }), lines.split('\n')];
  const path = standIn(t, [waiting, 'read line', held, released].join('\n'));
  const onWaiting = (held) => held.release();
  await assert.rejects(lock('x', { command: path, onWaiting }), /the wait was cancelled/);
});
