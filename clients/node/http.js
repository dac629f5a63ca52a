'use strict';
// Locks of a `leasehold serve`, over HTTP.
//
// There are never two holders because of the network:
//
// - A lost reply, a repeated request: the client draws the claim's ID, and every call is about this claim. A second copy
//   of a join, a renewal or a release finds what the first one did. So after an error, the client repeats the call.
// - A late request: a renewal never joins. A join that arrives after its claim was released makes a claim that no client
//   renews or uses: it expires within its lease. An ID is used again neither after a release, nor after the server has
//   lost its claim, nor six seconds after its first join. The client releases the claim of an abandoned ID.
// - A late reply: a lease is counted from before its request was sent, so the delay only shortens it. The reply of a
//   request that was given up is dropped with its connection.
// - No reply: the lock is lost when the lease ends by this machine's clock, which is before it ends at the server. A
//   timer watches the clock, and `held.lost` reads it, so the loss is visible even before the event loop runs again.

const { randomBytes, randomInt } = require('node:crypto');
const { readFileSync } = require('node:fs');
const http = require('node:http');
const https = require('node:https');
const os = require('node:os');

const PORT = 8484;
// The longest wait for an answer, in seconds: from the only replica, and from one of several.
const ANSWER = [5, 1.5];
// How long a join may take at least, in seconds, even if the wait ends before.
const SHORTEST_ANSWER = 1;
// The first and the longest pause before a call is repeated.
const PAUSE = [0.05, 1];
// How long a claim is requested from a server that does not answer. A longer lease extends it.
const PATIENCE = 15;
// How long `release` waits for the server. After that, releasing continues in the background.
const FAREWELL = 5;
// The range of leases and the default, in milliseconds.
const [SHORTEST, LONGEST, LEASE] = [50, 86_400_000, 15_000];
// How long a queue position lasts without a call, in milliseconds. The server has the same default.
const WAITER_LEASE = 6000;
// The longest answer, in bytes.
const LONGEST_ANSWER = 16 << 20;
// How many waiters at the front request the holders whenever their positions change.
const NEAR = 3;
// The resolution of the clock, in seconds.
const TICK = 0.01;

const [USAGE, UNAVAILABLE, NOT_ACQUIRED] = [2, 69, 75];
// The exit code of `leasehold hold` for each kind of problem. All other kinds mean that the store cannot be used.
const CODES = {
  contended: NOT_ACQUIRED,
  timeout: NOT_ACQUIRED,
  lost: NOT_ACQUIRED,
  invalid_name: USAGE,
  config: USAGE,
  unsupported: USAGE,
  mismatch: USAGE,
};
// After these, the call is repeated.
const TRANSIENT = ['unreachable', 'full', 'closed'];

const EXPIRED = 'its lease expired before a renewal was acknowledged';
const GONE = 'the store no longer has this hold (evicted, expired or its data was lost)';
const MAX_HOLD = 'its max_hold has elapsed';

/** Whether this store is a server that the client connects to directly. */
const isUrl = (store) => /^(https?|http\+unix):/.test(store);

/** Seconds on a clock that continues while the machine is suspended, and cannot be set. */
const now = () => os.uptime();

/** No lock is held, and none will be: the code and the message of the event `failed`. */
class Failed extends Error {
  constructor(code, message, isTransient = false) {
    super(message);
    Object.assign(this, { code, isTransient });
  }
}

const invalid = (what) => new Failed(USAGE, `invalid store URL: ${what}`);

/** The reason of an error, without anything that was sent or received. */
const why = (error) => (/^[A-Z0-9_]+$/.test(error.code) ? error.code : error.name);

/** The parts of a store's URL. Errors show no part of it that may be a token. */
class Url {
  constructor(url) {
    const [, scheme, rest] = /^([a-z+]+):\/\/([^]*)$/.exec(url) ?? [];
    if (!scheme) throw invalid('missing "//" after the scheme');
    const [place, query] = split(rest, '?');
    const known = ['prefix', 'token', 'token_file', ...(scheme === 'https' ? ['ca', 'cert', 'key'] : [])];
    this.parameters = {};
    for (const pair of query ? query.split('&') : []) {
      const [key, value] = split(pair, '=');
      if (!known.includes(key)) {
        // A parameter without a name, or with a strange one, may be a token.
        const shown = /^[a-z_]{1,19}$/.test(key) && pair !== key ? key : 'without a name';
        throw invalid(`unknown parameter ${shown}; known: ${known.join(', ')}`);
      }
      this.parameters[key] = decoded(value);
    }
    this.prefix = this.parameters.prefix ?? '';
    this.base = '';
    const [hosts, path] = split(place, '/');
    if (hosts.includes('@')) throw invalid('it cannot contain a user name or a password; use ?token_file=/path/to/file');
    if (scheme === 'http+unix') {
      if (hosts || !path) throw invalid('use http+unix:///a/socket');
      this.hosts = [{ socketPath: `/${decoded(path)}`, host: 'localhost' }];
    } else {
      this.base = `/${path}`.replace(/\/+$/, '');
      if (!/^[A-Za-z0-9/._~-]*$/.test(this.base)) throw invalid('its path contains characters that leasehold does not send');
      this.hosts = hosts.split(',').map(host);
      const names = this.hosts.map(({ host, port }) => `${host}:${port}`);
      if (new Set(names).size < names.length) throw invalid('it names a replica twice');
    }
    this.module = scheme === 'https' ? https : http;
    this.tls = this._tls();
    checkToken(this.parameters.token ?? '');
  }

  _tls() {
    const { ca, cert, key } = this.parameters;
    if ((cert == null) !== (key == null)) throw invalid('cert= and key= need each other');
    const tls = {};
    for (const [name, file] of Object.entries({ ca, cert, key })) {
      if (file == null) continue;
      try {
        tls[name] = readFileSync(file);
      } catch (error) {
        throw new Failed(USAGE, `cannot use ${name}=${file}: ${why(error)}`);
      }
    }
    return tls;
  }

  /** The headers of a request, with the token as it is now. */
  headers() {
    let { token, token_file: file } = this.parameters;
    if (file != null) {
      try {
        token = readFileSync(file, 'utf8').trim();
      } catch (error) {
        throw new Failed(UNAVAILABLE, `cannot read token_file=${file}: ${why(error)}`);
      }
    }
    const headers = { accept: 'application/json', 'content-type': 'application/json' };
    return token ? { ...headers, authorization: `Bearer ${checkToken(token)}` } : headers;
  }
}

function split(text, by) {
  const at = text.indexOf(by);
  return at < 0 ? [text, ''] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    throw invalid('it contains an invalid escape');
  }
}

function checkToken(token) {
  if (/^[!-~]*$/.test(token)) return token;
  throw new Failed(USAGE, 'the token contains characters that a header cannot have');
}

/** The name and the port of one replica. */
function host(text) {
  const [, ipv6, name, digits] = /^(?:\[([^\][%\s]+)\]|([^\][%:\s]+))(?::(\d{1,5}))?$/.exec(text) ?? [];
  const port = Number(digits ?? PORT);
  if (!(ipv6 ?? name) || port < 1 || port > 65535) throw invalid('use http://host1,host2:8484/ or http+unix:///a/socket');
  return { host: ipv6 ?? name, port };
}

/** Sends the requests of one claim, one after another. */
class Sender {
  constructor(url) {
    this.url = url;
    // Clients are spread over the replicas.
    this.number = randomInt(url.hosts.length);
    // The store of the replicas, if there are several.
    this.identity = null;
    this._connect();
  }

  _connect() {
    this.agent = new this.url.module.Agent({ keepAlive: true, maxSockets: 1, noDelay: true });
    this.isChecked = this.url.hosts.length === 1;
  }

  close() {
    this.agent.destroy();
  }

  _next() {
    this.close();
    this.number = (this.number + 1) % this.url.hosts.length;
    this._connect();
  }

  /** Returns the status and the fields of the answer. Without an answer, returns the status 0 and the reason. */
  async send(method, path, body, signal) {
    const progress = { unsent: true };
    try {
      if (!this.isChecked) await this._check(signal);
      const [status, fields] = await this._exchange(method, path, body, signal, progress);
      // Another replica may reach the store.
      if (status >= 500 && (fields.kind == null || TRANSIENT.includes(fields.kind))) this._next();
      return [status, fields];
    } catch (error) {
      if (error instanceof Failed) {
        const kind = error.code === UNAVAILABLE ? 'denied' : 'config';
        return [0, { kind, detail: error.message, unsent: true }];
      }
      this._next();
      return [0, { kind: 'unreachable', detail: `no answer from the server: ${why(error)}`, unsent: progress.unsent }];
    }
  }

  /** Replicas over different stores would grant one lock twice. */
  async _check(signal) {
    const [status, store] = await this._exchange('GET', '/v1/store', undefined, signal, {});
    if (status === 401 || status === 403) throw new Failed(UNAVAILABLE, store.detail ?? 'the server rejected the token');
    if (status !== 200) throw Object.assign(new Error(), { code: `HTTP_${status}` });
    this.identity ??= store.identity;
    if (store.identity !== this.identity) {
      this._next();
      throw new Failed(USAGE, 'the servers of the URL have different stores');
    }
    this.isChecked = true;
  }

  _exchange(method, path, body, signal, progress) {
    const { module, tls, base, hosts } = this.url;
    const headers = this.url.headers();
    const options = { ...hosts[this.number], ...tls, agent: this.agent, method, path: base + path, headers, signal };
    return new Promise((resolve, reject) => {
      const request = module.request(options, (response) => {
        const parts = [];
        let size = 0;
        response.on('data', (part) => {
          size += part.length;
          if (size > LONGEST_ANSWER) request.destroy(new Error());
          parts.push(part);
        });
        response.on('error', reject);
        response.on('aborted', () => reject(Object.assign(new Error(), { code: 'ECONNRESET' })));
        response.on('end', () => {
          const fields = parsed(Buffer.concat(parts).toString());
          // A proxy wrote this answer if it is not JSON. Its text is not shown.
          if (!fields && response.statusCode < 300) reject(Object.assign(new Error(), { code: 'NOT_JSON' }));
          else resolve([response.statusCode, fields ?? {}]);
        });
      });
      request.on('socket', (socket) => {
        const connected = () => (progress.unsent = false);
        if (socket.connecting) socket.once(module === https ? 'secureConnect' : 'connect', connected);
        else connected();
      });
      request.on('error', reject);
      request.end(body && JSON.stringify(body));
    });
  }
}

/** The fields of an answer, or nothing if it is not an object. The token is a BigInt, since a number has only 53 bits. */
function parsed(text) {
  try {
    const fields = JSON.parse(text);
    if (typeof fields !== 'object' || Array.isArray(fields)) return null;
    if (fields?.token != null) fields.token = BigInt(/"token":\s*(\d+)/.exec(text)[1]);
    return fields;
  } catch {
    return null;
  }
}

/** Acquires, renews and releases a lock. Reports the events of `leasehold hold --json`. */
class Keeper {
  constructor(name, store, options) {
    Object.assign(this, { name, store, options });
    this.isLeaving = this.isHeld = this.isLost = this.isAtRisk = this.isReported = false;
    // Until when the hold is certain, from when it is at risk, and when `maxHold` ends.
    this.deadline = this.risk = this.ends = Infinity;
    // Until when the lock stays unavailable after a release.
    this.keepUntil = 0;
    // Until when the server may have the claim without a further call.
    this.lives = 0;
    // The claims of earlier IDs that the server may still have, and until when.
    this.abandoned = [];
    this.wake = () => {};
  }

  /** Calls `onEvent` with each event, and `onEnd` with the last one. */
  start(onEvent, onEnd) {
    Object.assign(this, { onEvent, onEnd });
    this._run();
  }

  /** Releases the lock, or leaves the queue, in the background. */
  release() {
    this.isLeaving = true;
    this.wake();
  }

  /** Does nothing, because the end is reported in time, whatever the server does. */
  kill() {}

  /** Whether the hold has ended by the clock, perhaps before any timer has noticed. */
  isOver() {
    return this.isHeld && now() >= Math.min(this.deadline, this.ends);
  }

  async _run() {
    let last;
    try {
      last = await this._keep();
    } catch (error) {
      const { code = UNAVAILABLE } = error instanceof Failed ? error : {};
      last = { event: 'failed', code, message: error.message };
      // Before it is released.
      if (this.isHeld) this._lose(error.message);
    }
    await this._leave(last);
    clearTimeout(this.timer);
    this.sender?.close();
    this._report(last);
  }

  /** Returns the last event. The claim may still be at the server. */
  async _keep() {
    const url = new Url(this.store);
    this.body = this._claim();
    this.prefix = url.prefix;
    this.body.name = url.prefix + this.body.name;
    this.tries = url.hosts.length + 1;
    this.limit = Math.max(Math.min(ANSWER[url.hosts.length > 1 ? 1 : 0], this.lease / 3), 0.02);
    this._newClaim();
    this.sender = new Sender(url);
    const taken = this.isLeaving ? null : await this._take();
    if (!taken) return { event: 'failed', message: 'the wait was cancelled' };
    const reason = await this._hold(...taken);
    if (!reason) return { event: 'released' };
    if (reason === MAX_HOLD) {
      // The holder may still work, so the lock stays unavailable for the lock delay.
      this.keepUntil = Math.max(this.keepUntil, now() + this.body.lock_delay_ms / 1000);
    } else {
      // A claim that the server may still have ends when its lease expires.
      this.lives = 0;
    }
    return { event: 'lost', message: reason };
  }

  /** The fields of the claim. `lock` has checked some of them, and the server checks the others. */
  _claim() {
    const { shared, exclusive, max: of, permits, label, 'lock-delay': delay } = this.options;
    let lease = this.options.lease ?? LEASE;
    if (lease < SHORTEST || lease > LONGEST) throw new Failed(USAGE, `invalid lease ${lease} ms: expected 50 ms to 1 day`);
    this.lease = lease / 1000;
    const claim = { name: this.name, lease_ms: lease, waiter_lease_ms: Math.min(lease, WAITER_LEASE) };
    Object.assign(claim, { host: os.hostname(), pid: process.pid, label: label ?? '', lock_delay_ms: delay ?? 0 });
    if (shared) return { ...claim, kind: 'rwlock', weight: 1 };
    if (exclusive) return { ...claim, kind: 'rwlock' };
    return of == null ? claim : { ...claim, kind: 'semaphore', capacity: Number(of), weight: Number(permits ?? 1) };
  }

  _newClaim() {
    this._abandon();
    this.id = randomBytes(16).toString('hex');
    this.born = now();
  }

  /** Stops using the claim. `_withdraw` releases it. */
  _abandon() {
    if (this.lives > 0) this.abandoned.push({ id: this.id, lives: this.lives });
    this.lives = 0;
  }

  /** Reports what the clock changes, now and later. */
  _watch() {
    clearTimeout(this.timer);
    if (!this.isHeld) return;
    const moment = now();
    if (this.isOver()) {
      this._lose(moment >= this.ends ? MAX_HOLD : EXPIRED);
      return;
    }
    if (this.isAtRisk !== moment >= this.risk) {
      this.isAtRisk = !this.isAtRisk;
      this._say(this.isAtRisk ? 'at_risk' : 'recovered');
    }
    const news = Math.min(this.isAtRisk ? Infinity : this.risk, this.deadline, this.ends);
    // The clock of timers does not count a suspend, so not longer than a second.
    this.timer = setTimeout(() => this._watch(), Math.min(news - moment + 0.001, 1) * 1000);
  }

  /** Sleeps until then, or until the lock is lost or to be released. */
  async _pause(until) {
    while (!this.isLeaving && !this.isLost && now() < until) await this._sleep(until);
  }

  async _sleep(until) {
    let timer;
    await new Promise((resolve) => {
      this.wake = resolve;
      timer = setTimeout(resolve, Math.min(until - now() + 0.001, 1) * 1000);
    });
    clearTimeout(timer);
  }

  _lose(reason) {
    this.isHeld = false;
    this.isLost = true;
    this.reason = reason;
    this.onEvent({ event: 'lost', reason });
    this.wake();
  }

  _say(event, fields = {}) {
    const left = Math.min(this.deadline, this.ends) - now();
    const deadline = left === Infinity ? null : Date.now() / 1000 + left;
    this.onEvent({ event, deadline, ...fields });
  }

  /** Reports the last event, once. */
  _report(last) {
    if (this.isReported) return;
    this.isReported = true;
    this.onEnd(last);
  }

  /**
   * Sends a request. Returns a time before it was sent, the status and the fields of the answer. With `givesWay`, a call
   * of `release` ends it.
   */
  async _ask(method, path, body, limit = this.limit, givesWay = false) {
    const sent = now();
    const ends = new AbortController();
    const timer = setTimeout(() => ends.abort(), limit * 1000);
    if (givesWay) this.wake = () => ends.abort();
    if (givesWay && this.isLeaving) ends.abort();
    const [status, fields] = await this.sender.send(method, path, body, ends.signal);
    clearTimeout(timer);
    if (ends.signal.aborted && status === 0) fields.detail = `no answer from the server within ${short(limit)}`;
    // A poll renews the claim, too.
    const isKept = path.startsWith('/v1/claims') && method !== 'DELETE';
    const isRefused = status >= 400 && status < 500 && this.lives === 0;
    if (isKept && !fields.unsent && !isRefused) this.lives = now() + this.lease;
    return [sent, status, fields];
  }

  _path(id, more) {
    const fields = Object.entries({ ...this.body, ...more }).filter(([, value]) => value !== '' && value !== 0);
    return `/v1/claims/${id}?${fields.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join('&')}`;
  }

  /** Waits for the lock. Returns a time before the grant was requested, and its fields. null: `release` was called. */
  async _take() {
    const { wait, 'min-hold': minHold } = this.options;
    let heard = now();
    const end = wait == null ? Infinity : heard + wait / 1000;
    if (minHold) await this._checkMinHold();
    let [step, failures, early, error] = [this._join, 0, 0, null];
    for (;;) {
      const [sent, status, fields] = await step.call(this, end);
      if (this.isLeaving) return null;
      const moment = now();
      let pause = 0;
      const state = status >= 200 && status < 300 ? fields.status : null;
      if (['held', 'waiting', 'lost'].includes(state)) [heard, failures, error] = [moment, 0, null];
      if (state === 'held') {
        if (deadline(sent, fields) - moment > this.lease / 3) return [sent, fields];
        // Too little time is left. A renewal never joins, so its answer contains the state of the claim.
        [step, pause] = [this._renew, 0.01];
      } else if (state === 'waiting') {
        if (wait === 0) throw new Failed(NOT_ACQUIRED, `${JSON.stringify(this.name)} is not free [contended]`);
        await this._withdraw();
        await this._waits(fields, end);
        // A server that shuts down answers early. It must not be polled in a tight loop.
        early = step === this._poll && moment - sent < this._pollTime(end) / 2 ? early + 1 : 0;
        [step, pause] = [this._poll, pauseAfter(early + 1)];
      } else if (state === 'lost') {
        this._newClaim();
        [step, pause] = [this._join, 0.01];
      } else {
        failures += 1;
        error = problem(status, fields);
        // A server that states when to retry is reachable.
        if (fields.retry_after_ms != null) heard = moment;
        // A server that is full has answered, and the lock may be free.
        const isFullAtEnd = fields.kind === 'full' && moment >= end;
        let isFinal = isFullAtEnd || moment - heard > Math.max(PATIENCE, this.lease);
        if (wait === 0) isFinal = failures >= this.tries;
        if (isFinal || !error.isTransient) throw error;
        pause = pauseAfter(failures);
        // A queue position may have expired unseen. One claim never gets two positions.
        if (step === this._join && moment - this.born > this.body.waiter_lease_ms / 1000) this._newClaim();
      }
      if (moment >= end && wait !== 0) throw await this._timeout(wait, error);
      await this._pause(Math.min(moment + pause, end));
    }
  }

  async _checkMinHold() {
    const [, status, store] = await this._ask('GET', '/v1/store');
    if (status === 200 && !store.guarantees.min_hold) {
      throw new Failed(USAGE, 'this store does not support minHold: it cannot keep a released lock unavailable');
    }
  }

  _join(end) {
    const isTry = this.options.wait === 0;
    const limit = isTry ? this.limit : Math.min(this.limit, Math.max(end - now(), SHORTEST_ANSWER));
    const body = { id: this.id, mode: isTry ? 'try' : 'wait', claim: this.body };
    return this._ask('POST', '/v1/claims', body, limit);
  }

  _renew() {
    let { lease_ms } = this.body;
    if (this.ends < Infinity) {
      // The lease ends soon after `maxHold`, even if this process is paused.
      const left = Math.max(this.ends, this.keepUntil) - now();
      lease_ms = Math.min(lease_ms, Math.trunc(Math.max(left, 0) * 1020) + 25);
    }
    return this._ask('PUT', `/v1/claims/${this.id}`, { ...this.body, lease_ms });
  }

  _poll(end) {
    const wait = this._pollTime(end);
    const path = this._path(this.id, { wait: `${Math.trunc(wait * 1000)}ms` });
    return this._ask('GET', path, undefined, wait + this.limit, true);
  }

  _pollTime(end) {
    // Short enough to poll the next replica before the queue position expires.
    return Math.max(Math.min(this.body.waiter_lease_ms / 3000, end - now()), 0);
  }

  /** Reports the position if it has changed, and the holders to the first waiters. */
  async _waits(fields, end) {
    const { ahead } = fields;
    if (ahead === this.place) return;
    const isNear = this.others == null || fields.head_remaining_ms != null || ahead - this.others < NEAR;
    const lock = isNear ? await this._lock(end) : null;
    if (this.isLeaving) return;
    const claims = lock?.claims ?? [];
    [this.place, this.others] = [ahead, Math.max(claims.length, 1)];
    const holders = claims.filter(({ standing }) => standing === 'holding').map(holder);
    this.onEvent({ event: 'waiting', ahead, held_by: heldBy(lock), holders });
  }

  /** The holders of the lock, if the server answers soon. */
  async _lock(end) {
    const limit = Math.max(Math.min(1, this.limit, end - now()), 0.02);
    const [, status, fields] = await this._ask('GET', `/v1/locks/${escaped(this.body.name)}/holders`, undefined, limit, true);
    return status === 200 ? fields.lock : null;
  }

  /** The error of a wait that has ended. `error` is that of the last request, or null if it succeeded. */
  async _timeout(wait, error) {
    const known = heldBy(await this._lock(Infinity));
    if (error && !known) return error;
    const state = `${JSON.stringify(this.name)} is ${known ?? 'not free'}`;
    return new Failed(NOT_ACQUIRED, `timed out after ${short(wait / 1000)}: ${state}`);
  }

  /** Renews the lock until `release` is called, or returns why it is lost. */
  async _hold(sent, fields) {
    const { token, sequencer } = fields;
    const { 'max-hold': maxHold, 'min-hold': minHold } = this.options;
    const moment = now();
    if (maxHold != null) this.ends = moment + maxHold / 1000;
    if (minHold) this.keepUntil = moment + minHold / 1000;
    let [renewal, failures] = [this._granted(sent, fields), 0];
    this.isHeld = true;
    this._say('held', { token, sequencer: this._sequencer(sequencer) });
    this._watch();
    await this._withdraw();
    for (;;) {
      await this._pause(renewal);
      this._watch();
      if (this.isLeaving || this.isLost) return this.reason;
      const [sent, status, fields] = await this._renew();
      // A loss is final, whatever the answer is.
      this._watch();
      if (this.isLost) return this.reason;
      const state = status === 200 ? fields.status : null;
      if (state === 'held' && fields.token === token) {
        [renewal, failures] = [this._granted(sent, fields), 0];
        this._watch();
      } else if (['held', 'waiting', 'lost'].includes(state)) {
        // A late copy of the join has made another claim with this ID.
        if (state !== 'lost') this._abandon();
        this._lose(GONE);
      } else {
        // Whether the lease was renewed is unknown, so the deadline stays.
        failures += 1;
        renewal = now() + Math.min(pauseAfter(failures), this.lease / 10);
      }
    }
  }

  /** The sequencer as all clients of this URL write it. To them, a prefix is part of the store. */
  _sequencer(text) {
    if (!this.prefix) return text;
    const [version, side, token, store] = text.split(':');
    return [version, side, token, store + escaped(`/${this.prefix}`), escaped(this.name)].join(':');
  }

  /** Notes until when a grant is certain. Returns when to renew it. */
  _granted(sent, fields) {
    const remaining = fields.remaining_ms;
    const lease = remaining == null ? this.lease : remaining / 1000;
    this.deadline = Math.max(deadline(sent, fields), this.isHeld ? this.deadline : 0);
    this.risk = remaining == null ? Infinity : sent + (lease * 2) / 3;
    if (this.ends < Infinity) {
      this.risk = Math.min(this.risk, this.ends - Math.min(this.lease, this.options['max-hold'] / 1000) / 3);
    }
    return sent + lease / 3;
  }

  /**
   * Releases the claim and the abandoned ones, and then reports the last event. Repeats the release until the lease is
   * over. If the server does not answer, the caller does not wait that long.
   */
  async _leave(last) {
    this.isHeld = false;
    this.isLeaving = true;
    clearTimeout(this.timer);
    const began = now();
    let failures = 0;
    while (now() < this.lives || this.abandoned.length > 0) {
      if (now() < this.lives) {
        const keep_ms = Math.trunc(Math.max(this.keepUntil - now(), 0) * 1000);
        const [, status, fields] = await this._ask('DELETE', this._path(this.id, { keep_ms }));
        if (status === 200) {
          this.lives = 0;
          // If the call was repeated, an earlier copy may have released the lock.
          if (last.event === 'released' && !fields.left && !failures) {
            this._lose(GONE);
            Object.assign(last, { event: 'lost', message: GONE });
          }
        } else if (![0, 401].includes(status) && !problem(status, fields).isTransient) {
          // The server has rejected the release, and not only the token, which may change. The caller does not wait
          // for the next attempts.
          this._report(last);
        }
      }
      await this._withdraw();
      failures += 1;
      if (now() - began >= FAREWELL) this._report(last);
      const until = now() + pauseAfter(failures);
      while (now() < until) await this._sleep(until);
    }
  }

  /** Releases the abandoned claims, until a request fails. */
  async _withdraw() {
    while (this.abandoned.length > 0) {
      const [{ id, lives }] = this.abandoned;
      if (now() < lives && (await this._ask('DELETE', this._path(id)))[1] !== 200) return;
      this.abandoned.shift();
    }
  }
}

/**
 * Until when a grant is certain. Two clocks may run at different rates, so the time is shortened by 1 % and 2 ms, and by
 * the resolution of the clock.
 */
function deadline(sent, { remaining_ms: remaining }) {
  return remaining == null ? Infinity : sent + (remaining / 1000) * 0.99 - 0.002 - TICK;
}

/** How long to wait before a call is repeated. The first time 0, because the connection may have been an old one. */
const pauseAfter = (failures) => (failures === 1 ? 0 : Math.min(PAUSE[0] * 2 ** (failures - 2), PAUSE[1]));

/** The error of an answer, or of a missing one. */
function problem(status, fields) {
  let { kind } = fields;
  let what = fields.detail || fields.title;
  if (typeof kind !== 'string') {
    // The answer is not from the service, but perhaps from a proxy.
    kind = [401, 403, 407].includes(status) ? 'denied' : 'config';
    if ([408, 425, 429].includes(status) || status >= 500) kind = 'unreachable';
    what = `the server answered with the HTTP status ${status}`;
  }
  return new Failed(CODES[kind] ?? UNAVAILABLE, `${what} [${kind}]`, TRANSIENT.includes(kind));
}

/** The name as one segment of a path: every byte that is not a letter or digit is escaped, also the dots. */
function escaped(name) {
  const escape = (c) => `%${c.charCodeAt(0).toString(16).toUpperCase().padStart(2, '0')}`;
  return Buffer.from(name).toString('latin1').replace(/[^A-Za-z0-9]/g, escape);
}

/** A holder as in `leasehold show --json`. */
function holder({ standing: state, host, pid, label = '', token = null, weight, since_ms, remaining_ms }) {
  const remaining_seconds = remaining_ms == null ? null : remaining_ms / 1000;
  return { state, host, pid, label, token, weight, since_seconds: since_ms / 1000, remaining_seconds };
}

/** Returns words that follow "is": the holder, or the reason why the lock is unavailable. null if that is unknown. */
function heldBy(lock) {
  const claims = lock?.claims ?? [];
  const [first, ...others] = claims.filter(({ standing }) => standing === 'holding');
  const departed = claims.find(({ standing }) => standing === 'departed');
  if (first) {
    const more = others.length > 0 ? `, and by ${others.length} more` : '';
    return `held by ${client(first)} for ${short(first.since_ms / 1000)}${more}`;
  }
  if (!departed) return null;
  const left = departed.remaining_ms == null ? '' : ` for ${short(departed.remaining_ms / 1000)} more`;
  if (lock.frozen == null) return `in cooldown${left}; last held by ${client(departed)}`;
  return `frozen${left} by ${printable(departed.host)}${lock.frozen ? `: ${printable(lock.frozen)}` : ''}`;
}

const client = ({ host, pid, label }) => `${printable(host)} pid ${pid}${label ? ` (${printable(label)})` : ''}`;

const printable = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

function short(seconds) {
  const whole = Math.trunc(seconds);
  if (whole < 1) return `${Math.trunc(seconds * 1000)}ms`;
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.trunc(whole / 60)}m ${whole % 60}s`;
  return `${Math.trunc(whole / 3600)}h ${Math.trunc((whole % 3600) / 60)}m`;
}

module.exports = { Keeper, isUrl };
