'use strict';
// Against the real command: LEASEHOLD_COMMAND says where it is, LEASEHOLD_STORE a store with leases.

const assert = require('node:assert');
const { spawn, spawnSync } = require('node:child_process');
const { randomUUID } = require('node:crypto');
const { once } = require('node:events');
const { chmodSync, mkdtempSync, rmSync, writeFileSync } = require('node:fs');
const { tmpdir } = require('node:os');
const { join } = require('node:path');
const { test } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { elect, lock, withLock, LeaseholdError, Lost, NotAcquired, Unavailable } = require('./index.js');

const withLeases = { skip: process.env.LEASEHOLD_STORE ? false : 'no store with leases' };

function command(words, store) {
  const env = store ? { ...process.env, LEASEHOLD_STORE: store } : process.env;
  return spawnSync(process.env.LEASEHOLD_COMMAND, words, { env, encoding: 'utf8' });
}

function files(t) {
  const directory = mkdtempSync(join(tmpdir(), 'leasehold-node-'));
  t.after(() => rmSync(directory, { recursive: true }));
  return `file:${directory}/store`;
}

const claims = (name, store) => JSON.parse(command(['show', '--json', name], store).stdout).claims.length;

test('it is held and given back', async (t) => {
  const store = files(t);
  const first = await lock('x y', { store, label: 'the first' });
  assert.equal(first.state, 'held');
  assert.equal(command(['check', first.sequencer], store).status, 0);
  first.check();
  await assert.rejects(lock('x y', { store, wait: 0 }), (e) => e instanceof NotAcquired && /the first/.test(e.message));
  await first.release();
  await first.release();
  assert.equal(first.state, 'released');
  assert.equal(claims('x y', store), 0);
  const later = await withLock('x y', { store }, (held) => held.token);
  assert(later > first.token);
});

test('one leads, and another takes over', async (t) => {
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
  const until = async (what) => {
    while (!what()) await sleep(10);
  };
  const one = stand(0);
  await until(() => led.length === 1);
  const two = stand(1);
  await until(() => claims('x y', store) === 2);
  assert.equal(command(['release', 'x y', '--force'], store).status, 0);
  // Deposed, it stands again, behind the other.
  await until(() => led.length === 2 && claims('x y', store) === 2);
  assert.deepEqual(led.map(([who]) => who), [0, 1]);
  assert(led[1][1] > led[0][1]);
  for (const end of ends) end.abort();
  await Promise.all([one, two]);
  await until(() => claims('x y', store) === 0);
  // What no waiting mends.
  await assert.rejects(elect('x'.repeat(999), { store }).next(), (e) => e.code === 2);
  await assert.rejects(elect('x', { command: '/nowhere' }).next(), LeaseholdError);
});

test('who waits learns who holds', async (t) => {
  const store = files(t);
  const first = await lock('x', { store, label: 'the first' });
  assert.equal(first.deadline, null);
  const heard = [];
  const onWaiting = (held) => {
    heard.push([held.state, held.ahead, held.heldBy, held.holders]);
    first.release();
  };
  const second = await lock('x', { store, onWaiting });
  await second.release();
  const [state, ahead, heldBy, holders] = heard[0];
  assert.deepEqual([state, ahead], ['waiting', 1]);
  assert.match(heldBy, /\(the first\) for /);
  assert.deepEqual(holders.map((one) => [one.label, one.pid]), [['the first', first._process.pid]]);
});

test('one after the other is inside', async (t) => {
  const store = files(t);
  let inside = 0;
  const turn = () =>
    withLock('x', { store }, async () => {
      assert.equal(++inside, 1);
      await sleep(1);
      inside--;
    });
  await Promise.all(Array.from({ length: 10 }, turn));
  await assert.rejects(withLock('x', { store }, () => Promise.reject(new Error('inside'))), /inside/);
  assert.equal(claims('x', store), 0);
});

test('who does not want to wait any more leaves the queue', async (t) => {
  const store = files(t);
  const held = await lock('x', { store });
  const gives = new AbortController();
  const waiting = lock('x', { store, signal: gives.signal });
  while (claims('x', store) < 2) await sleep(10);
  gives.abort(new Error('enough'));
  await assert.rejects(waiting, /enough/);
  while (claims('x', store) > 1) await sleep(10);
  await held.release();
});

test('a caller that is killed holds nothing', async (t) => {
  const store = files(t);
  const script = `require(${JSON.stringify(__dirname)}).lock('x').then(() => console.log('in')); setTimeout(() => {}, 1e6)`;
  const child = spawn(process.execPath, ['-e', script], { env: { ...process.env, LEASEHOLD_STORE: store } });
  const [said] = await once(child.stdout, 'data');
  assert.equal(String(said), 'in\n');
  assert.equal(claims('x', store), 1);
  child.kill('SIGKILL');
  const held = await lock('x', { store, wait: 60_000 });
  await held.release();
});

test('a loss is believed before the command has ended', async (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'leasehold-node-'));
  t.after(() => rmSync(directory, { recursive: true }));
  const script = join(directory, 'stand-in');
  const says = (line) => `echo '${JSON.stringify(line)}'\n`;
  const lines = [{ event: 'held', token: 7, sequencer: 's' }, { event: 'at_risk' }, { event: 'lost', reason: 'expired' }];
  writeFileSync(script, `#!/bin/sh\n${says(lines[0])}sleep 0.3\n${says(lines[1])}${says(lines[2])}exec sleep 1000\n`);
  chmodSync(script, 0o700);
  const held = await lock('x', { command: script });
  const [loss] = await once(held, 'lost');
  assert(loss instanceof Lost && /expired/.test(loss.message));
  assert.throws(() => held.check(), Lost);
  held._process.kill('SIGKILL');
  await assert.rejects(held.release(), Lost);
});

test('what is said wrong is told', async (t) => {
  const store = files(t);
  const code = (wanted) => (e) => e instanceof LeaseholdError && e.code === wanted;
  await assert.rejects(lock('x', { store, shared: true, exclusive: true }), code(2));
  await assert.rejects(lock('x', { store, command: 'echo' }), /not the leasehold command/);
  await assert.rejects(lock('x', { store, command: '/nowhere' }), /cannot start \/nowhere/);
  await assert.rejects(lock('x', { store: 'redis://127.0.0.1:1', wait: 0 }), Unavailable);
});

test('a lock that is taken away is lost', withLeases, async () => {
  const name = `node ${randomUUID()}`;
  const held = await lock(name, { lease: 2000 });
  const left = held.deadline - Date.now();
  assert(left > 0 && left <= 2000, `${left} ms`);
  const told = once(held, 'lost');
  assert.equal(command(['release', '--force', name]).status, 0);
  const [loss] = await told;
  assert(loss instanceof Lost && held.lost);
  assert.throws(() => held.check(), Lost);
  await assert.rejects(held.release(), Lost);
});

test('its leasehold is killed', withLeases, async () => {
  const name = `node ${randomUUID()}`;
  const held = await lock(name, { lease: 1000 });
  const told = once(held, 'lost');
  held._process.kill('SIGKILL');
  await told;
  // Nobody gave it back: its lease did.
  const later = await withLock(name, { wait: 60_000 }, (next) => next.token);
  assert(later > held.token);
});
