'use strict';
// Locks of a `leasehold serve` under faults of the network and the server. LEASEHOLD_COMMAND is the path of the command.
//
// Each test has a twin of the same name in ../python/tests_http.py. The behavior of both clients is tested by test.js with
// LEASEHOLD_OVER=http.

const assert = require('node:assert');
const { spawn, spawnSync } = require('node:child_process');
const { createHash } = require('node:crypto');
const { once } = require('node:events');
const { mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } = require('node:fs');
const http = require('node:http');
const https = require('node:https');
const { tmpdir } = require('node:os');
const { join } = require('node:path');
const { createInterface } = require('node:readline');
const { test } = require('node:test');
const { setTimeout: sleep } = require('node:timers/promises');
const { lock, withLock, LeaseholdError, Lost, NotAcquired, Unavailable } = require('./index.js');

function command(words, store) {
  const env = { ...process.env, LEASEHOLD_STORE: store };
  return spawnSync(process.env.LEASEHOLD_COMMAND, words, { env, encoding: 'utf8' });
}

const claims = (store) => JSON.parse(command(['show', '--json', 'x y'], store).stdout).claims.length;

async function eventually(what) {
  const end = Date.now() + 60_000;
  while (!what()) {
    assert(Date.now() < end, 'never');
    await sleep(10);
  }
}

function directory(t) {
  const path = mkdtempSync(join(tmpdir(), 'leasehold-node-'));
  t.after(() => rmSync(path, { recursive: true, force: true }));
  return path;
}

/** A server of this store. */
async function start(t, store, ...words) {
  const stdio = ['ignore', 'pipe', 'inherit'];
  const process_ = spawn(process.env.LEASEHOLD_COMMAND, ['serve', '--store', store, ...words], { stdio });
  t.after(() => process_.kill('SIGKILL'));
  const [line] = await once(createInterface({ input: process_.stdout }), 'line');
  return { process: process_, address: line.replace('listening on ', '') };
}

/** A server of files at a socket. */
async function serve(t) {
  const path = directory(t);
  const { process } = await start(t, `file:${path}/store`, '--listen', `unix:${path}/socket`);
  return { path, socket: `${path}/socket`, process, store: `http+unix://${path}/socket` };
}

/**
 * Passes requests on to the server at this socket. `rule` gets the method and a function that passes the request on and
 * resolves with the answer. It resolves with the answer for the client, or with nothing to close the connection.
 */
async function proxy(t, socketPath, rule, tls) {
  const handler = (request, response) => {
    const { method, url: path } = request;
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', async () => {
      const headers = { 'content-type': 'application/json' };
      const forward = () =>
        new Promise((resolve, reject) => {
          const passed = http.request({ socketPath, method, path, headers }, async (reply) => {
            let text = '';
            for await (const part of reply) text += part;
            resolve([reply.statusCode, text]);
          });
          passed.on('error', reject);
          passed.end(Buffer.concat(parts));
        });
      const answer = await one.rule(method, forward).catch(() => null);
      if (answer) response.writeHead(answer[0]).end(answer[1]);
      else request.socket.destroy();
    });
  };
  const server = tls ? https.createServer(tls, handler) : http.createServer(handler);
  const one = { rule };
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  t.after(() => {
    server.close();
    server.closeAllConnections();
  });
  one.host = `127.0.0.1:${server.address().port}`;
  one.store = `${tls ? 'https' : 'http'}://${one.host}/`;
  return one;
}

const pass = (_, forward) => forward();

/** Checks a lock that was just acquired and is never renewed: it is lost before its lease ends at the server. */
async function isLostInTime(held, lease) {
  const { deadline } = held;
  assert(deadline - Date.now() < 0.99 * lease);
  await once(held, 'lost');
  // The machine may be busy with other tests.
  assert(Date.now() - deadline < 5000);
}

test('a lost reply neither loses nor leaves a lock', async (t) => {
  const { socket, store: direct } = await serve(t);
  const counts = {};
  const { store } = await proxy(t, socket, async (method, forward) => {
    const answer = await forward();
    // Drops the first answer to each method, and then every second one.
    counts[method] = (counts[method] ?? 0) + 1;
    return counts[method] % 2 ? null : answer;
  });
  const held = await lock('x y', { store, lease: 8000 });
  assert.equal(claims(direct), 1);
  await sleep(10_000);
  held.check();
  await held.release();
  assert.deepEqual([held.state, claims(direct)], ['released', 0]);
  await withLock('x y', { store: direct }, () => assert.rejects(lock('x y', { store, wait: 0 }), NotAcquired));
  assert(counts.POST && counts.PUT && counts.DELETE);
});

test('a repeated request changes nothing', async (t) => {
  const { socket, store: direct } = await serve(t);
  const { store } = await proxy(t, socket, async (_, forward) => {
    const answer = await forward();
    await forward();
    return answer;
  });
  const held = await lock('x y', { store, lease: 8000 });
  assert.equal(claims(direct), 1);
  await sleep(10_000);
  held.check();
  await assert.rejects(lock('x y', { store, wait: 300 }), NotAcquired);
  assert.equal(claims(direct), 1);
  await held.release();
  assert.deepEqual([held.state, claims(direct)], ['released', 0]);
});

test('a late request makes no second holder', async (t) => {
  const { socket, store: direct } = await serve(t);
  const joins = [];
  const { store } = await proxy(t, socket, (method, forward) => {
    if (method === 'POST') joins.push(forward);
    return forward();
  });
  const held = await lock('x y', { store, lease: 10_000 });
  await held.release();
  // The network delivers another copy of the join now.
  await joins[0]();
  assert.deepEqual([held.state, claims(direct)], ['released', 1]);
  // No client renews that claim, so it expires.
  const later = await withLock('x y', { store: direct, wait: 30_000 }, ({ token }) => token);
  assert(later > held.token);
});

test('a late reply never extends a hold', async (t) => {
  const { socket, store: direct } = await serve(t);
  const [late, delay] = [[], 10_000];
  const { store } = await proxy(t, socket, async (method, forward) => {
    const answer = await forward();
    // Delays all answers to renewals, and the first one to a join.
    if (method === 'PUT' || (method === 'POST' && late.length === 0)) {
      late.push(method);
      await sleep(delay);
    }
    return answer;
  });
  const began = performance.now();
  const held = await lock('x y', { store, lease: 6000 });
  const lost = isLostInTime(held, 6000);
  // A repeated join acquired the lock.
  assert(performance.now() - began < delay);
  await lost;
  // The server has renewed it, so no other client can hold it yet.
  assert.equal(claims(direct), 1);
  assert(late.includes('PUT'));
  await sleep(delay);
  assert.equal(held.state, 'lost');
  await assert.rejects(held.release(), (e) => e instanceof Lost && /expired/.test(e.message));
});

test('a wait longer than a lease leaves no claim', async (t) => {
  const { store } = await serve(t);
  const held = await lock('x y', { store });
  const waiter = withLock('x y', { store, lease: 4000 }, () => {});
  await assert.rejects(lock('x y', { store, lease: 4000, wait: 5000 }), NotAcquired);
  assert.equal(claims(store), 2);
  await held.release();
  await waiter;
  assert.equal(claims(store), 0);
});

test('an abandoned claim is released', async (t) => {
  const { socket, store: direct } = await serve(t);
  const left = [];
  const { store } = await proxy(t, socket, async (method, forward) => {
    const answer = await forward();
    // Drops the answers until the client joins with another ID.
    if (method === 'POST' && claims(direct) < 3) return null;
    if (method === 'DELETE') left.push(claims(direct));
    return answer;
  });
  await withLock('x y', { store: direct }, async () => {
    await assert.rejects(lock('x y', { store, lease: 4000, wait: 10_000 }), NotAcquired);
    // The first release is that of the abandoned claim.
    assert.deepEqual(left, [2, 1]);
  });
});

test('a late copy of a join is released', async (t) => {
  const { socket, store: direct } = await serve(t);
  const [joins, left] = [[], []];
  const { store } = await proxy(t, socket, async (method, forward) => {
    if (method === 'POST') joins.push(forward);
    const answer = await forward();
    if (method === 'DELETE') left.push(claims(direct));
    return answer;
  });
  const held = await lock('x y', { store });
  const lost = once(held, 'lost');
  assert.equal(command(['evict', 'x y'], direct).status, 0);
  await joins[0]();
  assert.equal(claims(direct), 1);
  // The next renewal finds another token.
  await lost;
  await assert.rejects(held.release(), Lost);
  assert.deepEqual(left, [0]);
});

test('an invalid answer leaves no claim', async (t) => {
  const { socket, store: direct } = await serve(t);
  const invalid = [200, '{"status": "waiting", "lock": {"claims": [{"standing": "holding"}]}}'];
  const { store } = await proxy(t, socket, async (method, forward) => (method === 'GET' ? invalid : forward()));
  await withLock('x y', { store: direct }, async () => {
    await assert.rejects(lock('x y', { store, wait: 300 }), LeaseholdError);
    assert.equal(claims(direct), 1);
    // A call that does not wait must not poll.
    const waits = await proxy(t, socket, async () => [202, '{"status": "waiting", "ahead": 1}']);
    await assert.rejects(lock('x y', { store: waits.store, wait: 0 }), NotAcquired);
  });
});

test('a wait that ends reports the last error', async (t) => {
  const { socket, store: direct } = await serve(t);
  const ends = async (method, answer, wanted) => {
    const rule = async (each, forward) => (each === method ? answer : forward());
    const { store } = await proxy(t, socket, rule);
    await assert.rejects(lock('x y', { store, wait: 2000 }), wanted);
  };
  const full = [429, '{"kind": "full", "detail": "over quota"}'];
  await ends('POST', full, /\[full\]/);
  await ends('POST', null, /\[unreachable\]/);
  await withLock('x y', { store: direct }, async () => {
    await ends('POST', full, /\[full\]/);
    await ends('GET', null, /\[unreachable\]/);
    await ends('POST', null, (e) => e instanceof NotAcquired && /held by/.test(e.message));
  });
});

test('a wait continues while the server is full', async (t) => {
  const { socket, store: direct } = await serve(t);
  const full = [429, '{"kind": "full", "detail": "over quota", "retry_after_ms": 100}'];
  // Longer than the outage of a server that a wait survives.
  const end = performance.now() + 17_000;
  const { store } = await proxy(t, socket, async (_, forward) => (performance.now() < end ? full : forward()));
  await withLock('x y', { store, wait: 60_000 }, () => assert.equal(claims(direct), 1));
});

test('a request lasts no longer than the wait', async (t) => {
  const { socket } = await serve(t);
  const { store } = await proxy(t, socket, () => new Promise(() => {}));
  await assert.rejects(lock('x y', { store, wait: 1900 }), /within 1s \[unreachable\]/);
});

test('a caller does not wait for a rejected release', async (t) => {
  const { socket } = await serve(t);
  const denied = [403, '{"kind": "denied", "detail": "no right to hold"}'];
  const { store } = await proxy(t, socket, async (method, forward) => (method === 'DELETE' ? denied : forward()));
  const held = await lock('x y', { store });
  const began = performance.now();
  await held.release();
  assert(performance.now() - began < 5000);
});

test('a hold survives a restart of the server', async (t) => {
  const path = directory(t);
  const [store, direct] = [`http+unix://${path}/socket`, `sqlite:${path}/locks.db`];
  const again = () => start(t, direct, '--listen', `unix:${path}/socket`);
  const first = await again();
  const held = await lock('x y', { store, lease: 10_000 });
  const waiter = withLock('x y', { store }, () => {});
  await eventually(() => claims(store) === 2);
  first.process.kill('SIGKILL');
  await sleep(1000);
  await again();
  // Longer than the lease.
  await sleep(11_000);
  held.check();
  assert.equal(command(['verify', held.sequencer], direct).status, 0);
  await held.release();
  assert.equal(held.state, 'released');
  await waiter;
  assert.equal(claims(store), 0);
});

test('a paused server loses the lock before its lease ends', async (t) => {
  const { store, process } = await serve(t);
  const held = await lock('x y', { store, lease: 2000 });
  process.kill('SIGSTOP');
  await isLostInTime(held, 2000);
  assert.throws(() => held.check(), Lost);
  await assert.rejects(lock('x y', { store, wait: 0, lease: 1000 }), Unavailable);
  process.kill('SIGCONT');
  const later = await withLock('x y', { store, wait: 30_000 }, ({ token }) => token);
  assert(later > held.token);
});

test('a release is repeated until the server answers', async (t) => {
  const { socket, store: direct, process } = await serve(t);
  let rejected = 0;
  const { store } = await proxy(t, socket, async (method, forward) => {
    if (method !== 'DELETE' || rejected === 4) return forward();
    rejected += 1;
    return rejected % 2 ? [502, '<html>'] : null;
  });
  await withLock('x y', { store }, () => {});
  assert.deepEqual([rejected, claims(direct)], [4, 0]);
  // A caller does not wait for a server that is gone.
  const held = await lock('x y', { store: direct });
  process.kill('SIGKILL');
  const began = performance.now();
  await held.release();
  assert(performance.now() - began < 12_000);
  assert.equal(held.state, 'released');
});

/** The address of a server on TCP that accepts these tokens. */
async function withTokens(t, path, ...tokens) {
  const token_sha256 = tokens.map((token) => createHash('sha256').update(token).digest('hex'));
  const identity = { name: 'ci', token_sha256, prefixes: ['ci/'], rights: ['hold', 'inspect'] };
  writeFileSync(`${path}/tokens.json`, JSON.stringify({ identities: [identity] }));
  const words = ['--listen', '127.0.0.1:0', '--tokens', `${path}/tokens.json`];
  return (await start(t, `file:${path}/other`, ...words)).address;
}

test('a rejected token is an error without the token', async (t) => {
  const address = await withTokens(t, directory(t), 'accepted');
  for (const [name, query] of [['ci/x', 'token=sekret'], ['ci/x', ''], ['x', 'token=accepted']]) {
    await assert.rejects(lock(name, { store: `${address}/?${query}` }), (e) => {
      return e instanceof Unavailable && /\[denied\]/.test(e.message) && !/sekret|accepted|[0-9a-f]{32}/.test(e.stack);
    });
  }
  const store = `${address}/?prefix=ci/&token=accepted`;
  await withLock('x', { store }, ({ name, sequencer }) => {
    assert.equal(name, 'x');
    assert.equal(command(['verify', sequencer], store).status, 0);
  });
});

test('a token file is read for each request', async (t) => {
  const path = directory(t);
  const address = await withTokens(t, path, 'first', 'second');
  const options = { store: `${address}/?token_file=${path}/token`, lease: 8000 };
  await assert.rejects(lock('ci/x', options), /cannot read token_file=.*ENOENT/);
  const write = (token) => {
    writeFileSync(`${path}/new`, `${token}\n`);
    renameSync(`${path}/new`, `${path}/token`);
  };
  write('first');
  await withLock('ci/x', options, async (held) => {
    write('second');
    await sleep(10_000);
    held.check();
  });
  const held = await lock('ci/x', options);
  const lost = once(held, 'lost');
  write('wrong');
  await lost;
  assert.match(held.reason, /expired/);
});

test('invalid urls are rejected without their secrets', async () => {
  for (const store of [
    'http:',
    'http:h',
    'http://',
    'http://a,a',
    'http://h:0',
    'http://user:sekret@h/',
    'http://sekret@h/',
    'http://h/?tokn=sekret',
    'http://h/?sekret',
    'http://h/?token=sek%0aret',
    'http://h/?ca=/x',
    'http://h/a%20b',
    'http://h/a&token=sekret',
    'http+unix://h/socket',
    'http+unix:///',
    'https://h?cert=/x',
    'https://h?ca=/nowhere',
  ]) {
    const wanted = (e) => e instanceof LeaseholdError && e.code === 2 && !e.stack.includes('sekret');
    await assert.rejects(lock('x', { store, wait: 0 }), wanted, store);
  }
});

test('the next replica takes over', async (t) => {
  const { socket, store: direct } = await serve(t);
  const proxies = [await proxy(t, socket, pass), await proxy(t, socket, pass)];
  const store = `http://127.0.0.1:1,${proxies.map(({ host }) => host).join(',')}`;
  const held = await lock('x y', { store, lease: 8000 });
  for (const one of proxies) {
    // Each proxy in turn closes all connections for longer than a lease.
    one.rule = async () => null;
    await sleep(10_000);
    held.check();
    one.rule = pass;
  }
  await held.release();
  assert.deepEqual([held.state, claims(direct)], ['released', 0]);
});

test('replicas of different stores are rejected', async (t) => {
  const servers = [await serve(t), await serve(t)];
  let down;
  const proxies = [];
  for (const server of servers) {
    proxies.push(await proxy(t, server.socket, async (_, forward) => (down === server ? null : forward())));
  }
  const store = `http://${proxies.map(({ host }) => host).join(',')}`;
  let held;
  // A slow replica makes the client use the next one, which is rejected.
  while (!held) held = await lock('x y', { store, lease: 5000 }).catch(() => null);
  const lost = once(held, 'lost');
  // The server that granted the lock goes down.
  down = servers.find((server) => claims(server.store) > 0);
  assert(down);
  await lost;
});

test('all kinds and times of locks', async (t) => {
  const { store } = await serve(t);
  const take = (options) => lock('x y', { store, ...options });
  const readers = [await take({ shared: true }), await take({ shared: true })];
  await assert.rejects(take({ exclusive: true, wait: 0 }), NotAcquired);
  for (const reader of readers) await reader.release();
  const writer = await take({ exclusive: true });
  await assert.rejects(take({ shared: true, wait: 100 }), NotAcquired);
  await writer.release();
  const semaphore = (options) => lock('s', { store, of: 3, ...options });
  const permits = [await semaphore({ permits: 2 }), await semaphore({})];
  await assert.rejects(semaphore({ wait: 0 }), NotAcquired);
  for (const permit of permits) await permit.release();
  await assert.rejects(take({ of: 2, permits: 3 }), (e) => e instanceof LeaseholdError && e.code === 2);
  const held = await take({ maxHold: 500 });
  await once(held, 'lost');
  assert.match(held.reason, /max_hold/);
  await eventually(() => claims(store) === 0);
  const began = performance.now();
  await withLock('x y', { store, minHold: 1000 }, () => {});
  await assert.rejects(take({ wait: 100 }), (e) => e instanceof NotAcquired && /in cooldown/.test(e.message));
  await withLock('x y', { store, wait: 30_000 }, () => assert(performance.now() - began > 1000));
});

test('a frozen lock is not acquired', async (t) => {
  const { store } = await serve(t);
  assert.equal(command(['freeze', 'x y', '--for', '1h', '--reason', 'repairs'], store).status, 0);
  for (const wait of [0, 200]) {
    const wanted = (e) => e instanceof NotAcquired && /repairs/.test(e.message);
    await assert.rejects(lock('x y', { store, wait }), wanted);
  }
});

test('https needs the right certificate', async (t) => {
  const { path, socket } = await serve(t);
  const [pem, key] = [`${path}/server.pem`, `${path}/server.key`];
  const words = 'req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1'.split(' ');
  assert.equal(spawnSync('openssl', [...words, '-keyout', key, '-out', pem]).status, 0);
  // The client must send a certificate, too.
  const [cert, secret] = [readFileSync(pem), readFileSync(key)];
  const tls = { cert, key: secret, ca: cert, requestCert: true, rejectUnauthorized: true };
  const { store } = await proxy(t, socket, pass, tls);
  const ours = `cert=${pem}&key=${key}`;
  await withLock('x y', { store: `${store}?ca=${pem}&${ours}`, lease: 8000 }, async (held) => {
    await sleep(10_000);
    held.check();
  });
  for (const query of [ours, `ca=${pem}`]) {
    await assert.rejects(lock('x y', { store: `${store}?${query}`, wait: 0 }), Unavailable);
  }
});

test('a busy program does not hide a loss', async (t) => {
  const { store } = await serve(t);
  const held = await lock('x y', { store, lease: 1000 });
  const end = performance.now() + 1100;
  while (performance.now() < end);
  assert(held.lost);
  assert.throws(() => held.check(), Lost);
  await assert.rejects(held.release(), Lost);
});
