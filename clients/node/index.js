'use strict';
// Distributed locks with fencing tokens.
//
// This module starts the command `leasehold hold` for each lock. The command waits in the queue and renews the lease. It
// releases the lock on request, and when this process ends for whatever reason. Nothing stops a program when its lock is
// lost: check `held.lost` before critical steps, listen to 'lost', or send `held.token` to a resource that rejects smaller
// tokens than it has seen.
//
// If the store is the URL of a `leasehold serve` (`http:`, `https:` or `http+unix:`), this module connects to it and needs
// no command. This process renews the lease. If it ends without a release, the lease ends the hold.
//
// A lock belongs to the process that acquired it. Children of that process do not keep it. A lock that no variable
// refers to stays held until it is released or the process ends.

const { spawn } = require('node:child_process');
const { EventEmitter } = require('node:events');
const { readFileSync } = require('node:fs');
const { createInterface } = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');
const { inspect } = require('node:util');
const http = require('./http.js');

/**
 * The lock was not acquired or was lost. `code` is the exit code of the command; null: a signal killed the command;
 * undefined: it could not be started.
 */
class LeaseholdError extends Error {
  constructor(message, code) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}
/** Another client held the lock during the whole wait (75). */
class NotAcquired extends LeaseholdError {}
/** The store is unreachable or unusable (69). */
class Unavailable extends LeaseholdError {}
/** The lock was held and then lost (74). */
class Lost extends LeaseholdError {}

const ERRORS = { 69: Unavailable, 74: Lost, 75: NotAcquired };
// The exit code when the system has no more processes, files or memory, and the errors that mean the same.
const SYSTEM = 71;
const SHORTAGES = ['EAGAIN', 'EMFILE', 'ENFILE', 'ENOMEM'];
// Milliseconds that the command has to release. It gives up earlier on a store that does not answer.
const FAREWELL = 30_000;
// Why a lock is lost that this process did not release, and why a wait ends that this process gave up.
const ENDED = 'another process ended the leasehold process';
const CANCELLED = 'the wait was cancelled';
// The first and the longest pause before a candidate rejoins the queue, in milliseconds.
const PAUSE = [100, 10_000];
// The longest time in milliseconds. The command counts nanoseconds in 64 bits.
const CENTURY = 100 * 365 * 86_400_000;

/** An acquired lock, until it is released or lost. Emits 'lost', 'at_risk' and 'recovered'. */
class Held extends EventEmitter {
  constructor(name, keeper) {
    super();
    this.name = name;
    // What acquires, renews and releases the lock. It reports the events of `leasehold hold --json`.
    Object.defineProperty(this, '_keeper', { value: keeper });
    /** The fencing token, a BigInt: each holder gets a higher one. */
    this.token = null;
    /** The hold as a string, for `leasehold verify`. */
    this.sequencer = null;
    /** 'waiting', 'held', 'at_risk', 'lost' or 'released'. */
    this.state = 'waiting';
    /** How many claims are ahead in the queue, while it waits. */
    this.ahead = null;
    /**
     * In words, the holders or the reason why the lock is unavailable, when the place in the queue last changed. After
     * the wait has begun, only the first three waiters get it; for others it is null.
     */
    this.heldBy = null;
    /** The holders, as objects like in `leasehold show --json` (host, pid, label, since_seconds, …); empty if heldBy is null. */
    this.holders = [];
    /**
     * The time until which the lock is guaranteed even if no further renewal succeeds, a Date, as of the last event
     * (held, at_risk, recovered). null: no limit.
     */
    this.deadline = null;
    /** Why it was lost. */
    this.reason = null;
  }

  /** Whether the lock was lost. */
  get lost() {
    return this.state === 'lost' || this._keeper.isOver();
  }

  /** Throws `Lost` if the lock was lost. Does not contact the store. */
  check() {
    if (this.lost) throw this._loss();
  }

  /** Releases the lock. Rejects with `Lost` if it was lost before. A second call has the same result. */
  async release() {
    this._leaving = true;
    this._keeper.release();
    const timer = setTimeout(() => this._keeper.kill(), FAREWELL);
    await this._ended.finally(() => clearTimeout(timer));
    this.check();
  }

  _loss() {
    return new Lost(`lost ${JSON.stringify(this.name)}: ${this.reason ?? 'its lease expired'}`, 74);
  }
}

/** A string without NUL, which no command line can contain. */
function text(name, value) {
  if (typeof value !== 'string') throw new TypeError(`${name} must be a string, not ${inspect(value)}`);
  if (value.includes('\0')) throw new TypeError(`${name} contains a NUL character: ${inspect(value)}`);
  return value;
}

/** A time in whole milliseconds, or nothing if there is no limit. */
function milliseconds(name, value, { isEndless = false, isPositive = false } = {}) {
  if (value == null) return null;
  if (typeof value !== 'number' && typeof value !== 'bigint') {
    throw new TypeError(`${name} must be a number of milliseconds, not ${inspect(value)}`);
  }
  const time = Number(value);
  if (isEndless && time > CENTURY) return null;
  if (isPositive && time === 0) throw new RangeError(`${name} must be greater than 0 milliseconds`);
  if (!(time >= 0 && time <= CENTURY)) {
    throw new RangeError(`${name} must be between 0 milliseconds and 100 years, not ${inspect(value)}`);
  }
  // 0 has a meaning of its own, so a shorter time than a millisecond does not become 0.
  return Math.round(time) || (time > 0 ? 1 : 0);
}

/** A whole number from 1, or nothing. */
function whole(name, value) {
  if (value == null) return null;
  const isWhole = typeof value === 'bigint' || Number.isSafeInteger(value);
  if (!isWhole) throw new TypeError(`${name} must be a whole number, not ${inspect(value)}`);
  if (value < 1) throw new RangeError(`${name} must be at least 1, not ${inspect(value)}`);
  return value;
}

/** Checks that these options fit together. */
function combined({ shared, exclusive, of, permits }) {
  const given = Object.entries({ shared, exclusive, of: of != null }).filter(([, value]) => value).map(([name]) => name);
  if (given.length > 1) throw new TypeError(`${given[0]} and ${given[1]} exclude each other: set one of them`);
  if (permits != null && of == null) throw new TypeError('permits requires of, the size of the semaphore');
}

/**
 * Acquires a lock and resolves with a `Held`. Rejects with a `TypeError` or `RangeError` that names an invalid option.
 *
 * Options, with times in milliseconds, which are rounded to whole ones:
 * - `store`: the URL of the store
 * - `wait`: the longest wait; 0: do not wait; Infinity: no limit, the default
 * - `lease`: the time until the lock of a crashed machine is freed
 * - `maxHold`: the longest hold; Infinity: no limit, the default
 * - `minHold`: the shortest hold: the lock stays taken for this long even if it is released earlier
 * - `lockDelay`: how long the lock stays unavailable after a crash
 * - `shared`, `exclusive`: the two sides of a read-write lock
 * - `of`, `permits`: the size of a semaphore, and how many permits to take
 * - `label`: text that other clients see for this holder
 * - `onWaiting`: called with the `Held` when it joins the queue and whenever its place changes
 * - `signal`: an AbortSignal that ends the wait
 * - `command`: the path of the `leasehold` program; it is used for servers too, if it is given
 */
async function lock(name, options = {}) {
  text('name', name);
  const { store, shared, exclusive, signal, onWaiting } = options;
  const values = {
    wait: milliseconds('wait', options.wait, { isEndless: true }),
    lease: milliseconds('lease', options.lease, { isPositive: true }),
    'max-hold': milliseconds('maxHold', options.maxHold, { isEndless: true, isPositive: true }),
    'min-hold': milliseconds('minHold', options.minHold),
    'lock-delay': milliseconds('lockDelay', options.lockDelay),
    max: whole('of', options.of),
    permits: whole('permits', options.permits),
    label: options.label == null ? null : text('label', options.label),
    shared: Boolean(shared),
    exclusive: Boolean(exclusive),
  };
  combined(options);
  if (store === '') throw new TypeError("store is empty: is the variable set? For this machine's locks, use file:");
  // Without its value, which may contain a password.
  if (String(store).includes('\0')) throw new TypeError('store contains a NUL character');
  signal?.throwIfAborted();
  const url = store ?? defaultStore();
  const isDirect = options.command == null && http.isUrl(url);
  const program = options.command ?? process.env.LEASEHOLD_COMMAND ?? 'leasehold';
  const keeper = isDirect ? new http.Keeper(name, url, values) : new Command(name, program, store, values);
  return new Promise((resolve, reject) => follow(new Held(name, keeper), { signal, onWaiting }, resolve, reject));
}

/** The URL of the default store, or nothing. */
function defaultStore() {
  const { LEASEHOLD_STORE: store, LEASEHOLD_STORE_FILE: file } = process.env;
  if (store || !file) return store ?? '';
  try {
    return readFileSync(file, 'utf8').trim();
  } catch {
    // The command reports the error.
    return '';
  }
}

/** The error for a command that cannot be started. */
function cannotStart(command, error) {
  const code = SHORTAGES.includes(error.code) ? SYSTEM : undefined;
  return new LeaseholdError(`cannot start ${command}: ${error.message}`, code);
}

/** Keeps a lock by the command `leasehold hold`. */
class Command {
  constructor(name, command, store, values) {
    this.command = command;
    // Whether `release` was called, and whether the command was running then.
    this.isEnding = this.isRequested = false;
    // A child process may have the same pipes open, so the command also watches this process.
    this.words = ['hold', '--json', `--caller=${process.pid}`];
    const times = ['wait', 'lease', 'max-hold', 'min-hold', 'lock-delay'];
    for (const [word, value] of Object.entries(values)) {
      if (value === true) this.words.push(`--${word}`);
      else if (value != null && value !== false) this.words.push(`--${word}=${value}${times.includes(word) ? 'ms' : ''}`);
    }
    this.words.push('--', name);
    // In the environment, because all users can read command lines, and a URL may contain a password.
    this.env = store == null ? process.env : { ...process.env, LEASEHOLD_STORE: store };
  }

  /** Calls `onEvent` with each event, and `onEnd` with the last one and with what else is known of the end. */
  start(onEvent, onEnd) {
    const { command, words, env } = this;
    // In a session of its own: Ctrl-C must reach only this process, which may have to clean up under the lock.
    let child;
    try {
      child = spawn(command, words, { env, stdio: ['pipe', 'pipe', 'pipe'], detached: true });
    } catch (error) {
      // Node throws some errors, such as E2BIG, and emits the others.
      onEnd({}, cannotStart(command, error));
      return;
    }
    let last = {};
    child.on('error', (error) => onEnd(last, cannotStart(command, error)));
    // The system has no more processes or files.
    if (!child.stdin) return;
    this.process = child;
    let errors = '';
    // The command ended before the release was requested.
    child.stdin.on('error', () => (this.isRequested = false));
    child.stderr.on('data', (data) => (errors += data));
    const lines = createInterface({ input: child.stdout });
    lines.on('line', (line) => {
      try {
        last = JSON.parse(line) ?? {};
      } catch {
        last = {};
      }
      if (!last.event) {
        last = { event: 'failed', message: `unexpected output from ${command}: it is not the leasehold command` };
        lines.removeAllListeners('line');
        this.kill();
        return;
      }
      // From the text: a JavaScript number has only 53 bits.
      if (last.event === 'held') last.token = BigInt(/"token":(\d+)/.exec(line)[1]);
      // The command received a signal. Another client may hold the lock now.
      if (last.event === 'released' && !this.isRequested) last = { event: 'lost', reason: ENDED };
      onEvent(last);
    });
    child.on('close', (status, by) => {
      const said = errors.trim() || `the leasehold process ended with ${status ?? by}`;
      onEnd(last, error(last, status, said));
    });
  }

  release() {
    if (!this.process || this.isEnding) return;
    const { stdin } = this.process;
    this.isEnding = true;
    this.isRequested = !stdin.destroyed;
    stdin.end('release\n');
  }

  /** Ends a command that hangs. Its hold ends when the lease expires. */
  kill() {
    this.process?.kill('SIGKILL');
  }

  /** Returns false, because the command reports the end. */
  isOver() {
    return false;
  }
}

/** Returns the error of the last event. Without one, the exit status is the reason. */
function error(last, status, said) {
  const code = last.event === 'failed' ? last.code : status;
  return new (ERRORS[code] ?? LeaseholdError)(last.message ?? said, code);
}

function follow(held, { signal, onWaiting }, resolve, reject) {
  const keeper = held._keeper;
  const abort = () => {
    held._leaving = true;
    keeper.release();
    reject(signal.reason);
  };
  signal?.addEventListener('abort', abort, { once: true });
  held._ended = new Promise((ended) => {
    const onEvent = (event) => {
      // The wait was cancelled, and the keeper already releases the lock. `onEnd` reports that.
      if (event.event === 'held' && held._leaving) return;
      apply(held, event, resolve);
      // An error of the callback must not become an error of the keeper.
      if (event.event === 'waiting' && onWaiting) queueMicrotask(() => onWaiting(held));
      if (held.state !== 'waiting') signal?.removeEventListener('abort', abort);
    };
    const onEnd = (last, failure = error(last)) => {
      signal?.removeEventListener('abort', abort);
      if (held.token === null) {
        reject(held._leaving && last.event !== 'failed' ? new LeaseholdError(CANCELLED) : failure);
      } else if (last.event === 'released') {
        held.state = 'released';
      } else {
        // No last line: the command was killed, and the lock is no longer renewed.
        lose(held, failure.message);
      }
      ended();
    };
    keeper.start(onEvent, onEnd);
  });
}

function apply(held, event, resolve) {
  if (event.event === 'waiting') {
    held.ahead = event.ahead;
    held.heldBy = event.held_by ?? null;
    held.holders = event.holders ?? [];
  } else if (event.event === 'held') {
    held.state = 'held';
    held.token = event.token;
    held.sequencer = event.sequencer;
    held.deadline = deadline(event);
    resolve(held);
  } else if (event.event === 'at_risk' || event.event === 'recovered') {
    held.state = event.event === 'at_risk' ? 'at_risk' : 'held';
    held.deadline = deadline(event);
    queueMicrotask(() => held.emit(event.event));
  } else if (event.event === 'lost') {
    // Immediately: the command may take a while to end if the store does not answer.
    lose(held, event.reason);
  }
}

const deadline = (event) => (event.deadline == null ? null : new Date(event.deadline * 1000));

function lose(held, reason) {
  if (held.state === 'lost') return;
  held.reason = reason;
  held.state = 'lost';
  // Later, so that the caller of `lock` can listen first. The lock may be lost as soon as it is held.
  if (!held._leaving) setImmediate(() => held.emit('lost', held._loss()));
}

/** Acquires the lock, calls `work` with the `Held`, and releases it. Rejects with `Lost` if the lock was lost meanwhile. */
async function withLock(name, options, work) {
  if (typeof options === 'function') [options, work] = [{}, options];
  const held = await lock(name, options);
  let done;
  try {
    done = await work(held);
  } catch (error) {
    // The error of `work` is more useful than the loss of the lock.
    await held.release().catch(() => {});
    throw error;
  }
  await held.release();
  return done;
}

/**
 * Leader election. `for await (const term of elect('books', { signal }))` waits until this process leads. The body works
 * with the `Held`, whose token is the number of the term, until `term.lost` or the signal. After the body, the candidate
 * releases the lock and rejoins the queue, after a pause that grows while terms are short. It retries through outages
 * of any length. The signal, or leaving the loop, ends it. Options as for `lock`.
 */
async function* elect(name, options = {}) {
  const { signal } = options;
  const [first, longest] = PAUSE;
  let pause = first;
  while (!signal?.aborted) {
    const began = Date.now();
    let term;
    try {
      term = await lock(name, options);
    } catch (error) {
      if (signal?.aborted) return;
      // A command that was killed can be restarted. One that does not exist, or rejects its options, cannot.
      if (error.code !== null && error.code !== SYSTEM && !(error.code in ERRORS)) throw error;
    }
    if (term) {
      try {
        yield term;
      } finally {
        // The lock may be lost: the candidate rejoins the queue anyway.
        await term.release().catch(() => {});
      }
    }
    if (Date.now() - began > longest) pause = first;
    await sleep(pause, undefined, { signal }).catch(() => {});
    pause = Math.min(2 * pause, longest);
  }
}

module.exports = { elect, lock, withLock, Held, LeaseholdError, NotAcquired, Unavailable, Lost };
