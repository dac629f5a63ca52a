'use strict';
// Locks for programs on more than one process or machine.
//
// The lock is held by the command `leasehold hold`, which this module starts and follows: it waits its turn,
// renews the lease, and gives the lock back when it is told to, or when this process is gone, however that came.
// Nothing stops a program when its lock is lost: look at `held.lost` before what matters, listen to 'lost', or
// give `held.token` to a resource that refuses the smaller of two.

const { spawn } = require('node:child_process');
const { EventEmitter } = require('node:events');
const { createInterface } = require('node:readline');
const { setTimeout: sleep } = require('node:timers/promises');

/** The command said no. `code` is its exit code, the message its own line. */
class LeaseholdError extends Error {
  constructor(message, code) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}
/** Somebody else held the lock for as long as was waited (75). */
class NotAcquired extends LeaseholdError {}
/** The store cannot be reached or used (69). */
class Unavailable extends LeaseholdError {}
/** The lock was held, and is not any more (74). */
class Lost extends LeaseholdError {}

const ERRORS = { 69: Unavailable, 74: Lost, 75: NotAcquired };
// How long the command has to say that it has released: it gives up on a silent store before that.
const FAREWELL = 30_000;
// How long a candidate pauses before it stands again, at first and at most.
const PAUSE = [100, 10_000];

/** A lock that is held, until it is released or lost. Emits 'lost', 'at_risk' and 'recovered'. */
class Held extends EventEmitter {
  constructor(name) {
    super();
    this.name = name;
    /** The fencing token, a BigInt: it rises from holder to holder. */
    this.token = null;
    /** The hold as a string, for `leasehold check`. */
    this.sequencer = null;
    /** 'waiting', 'held', 'at_risk', 'lost' or 'released'. */
    this.state = 'waiting';
    /** How many are before it, while it waits. */
    this.ahead = null;
    /** Who holds, or why nobody may, in words, as it was when the place in the queue last changed. */
    this.heldBy = null;
    /** Who holds: objects as `leasehold show --json` has them (host, pid, label, since_seconds, …). */
    this.holders = [];
    /**
     * Until when it was certain as it was told last (held, at risk, recovered), a Date; it is renewed long before that.
     * null: until it ends.
     */
    this.deadline = null;
    /** Why it was lost. */
    this.reason = null;
  }

  /** Whether it is not held any more, though nobody released it. */
  get lost() {
    return this.state === 'lost';
  }

  /** Throws `Lost` if the lock is not held any more. Asks nobody. */
  check() {
    if (this.lost) throw this._loss();
  }

  /** Gives the lock back. Rejects with `Lost` if it was lost before. A second time it says the same. */
  async release() {
    this._leaving = true;
    this._process.stdin.end('release\n');
    // One that does not end is not waited for for ever; the lease ends what it held.
    const timer = setTimeout(() => this._process.kill('SIGKILL'), FAREWELL);
    await this._ended.finally(() => clearTimeout(timer));
    this.check();
  }

  _loss() {
    return new Lost(`lost ${JSON.stringify(this.name)}: ${this.reason}`, 74);
  }
}

/**
 * Takes a lock; resolves with what is `Held`.
 *
 * Options, all of them optional. `store`: its URL. `wait`: for how many milliseconds; 0: not at all; without it:
 * for ever. `lease`, `maxHold`, `atLeast`, `lockDelay`: milliseconds. `shared`, `exclusive`: the sides of a
 * read-write lock. `of`, `permits`: a semaphore. `label`: what others read about this holder. `onWaiting`:
 * called with what is `Held` to be, as it stands in the queue and whenever its place changes. `signal`: an AbortSignal
 * that ends the waiting. `command`: the program, if it is not the one in the PATH.
 */
function lock(name, options = {}) {
  const { store, shared, exclusive, signal, command = process.env.LEASEHOLD_COMMAND ?? 'leasehold' } = options;
  const times = { wait: options.wait, lease: options.lease, 'max-hold': options.maxHold };
  Object.assign(times, { 'at-least': options.atLeast, 'lock-delay': options.lockDelay });
  const values = { of: options.of, permits: options.permits, label: options.label };
  const said = (all, unit) =>
    Object.entries(all).flatMap(([word, value]) => (value == null ? [] : [`--${word}=${value}${unit}`]));
  const words = ['hold', '--json', ...said(times, 'ms'), ...said(values, '')];
  if (shared) words.push('--shared');
  if (exclusive) words.push('--exclusive');
  words.push('--', name);
  // Not among the words, which anybody on this machine can read: it may have a password.
  const env = store == null ? process.env : { ...process.env, LEASEHOLD_STORE: store };
  if (signal?.aborted) return Promise.reject(signal.reason);
  const { onWaiting } = options;
  const how = { command, words, env, signal, onWaiting };
  return new Promise((resolve, reject) => follow(new Held(name), how, resolve, reject));
}

function follow(held, { command, words, env, signal, onWaiting }, resolve, reject) {
  // In a session of its own: Ctrl-C is for us, who may have to clean up under the lock.
  const child = spawn(command, words, { env, stdio: ['pipe', 'pipe', 'pipe'], detached: true });
  const cannot = (error) => `cannot start ${command}: ${error.message}`;
  if (!child.stdin) {
    // No more processes, or no more files.
    child.on('error', (error) => reject(new LeaseholdError(cannot(error))));
    return;
  }
  held._process = child;
  let last = {};
  let errors = '';
  const abort = () => {
    child.stdin.end('release\n');
    reject(signal.reason);
  };
  signal?.addEventListener('abort', abort, { once: true });
  child.stdin.on('error', () => {});
  child.stderr.on('data', (data) => (errors += data));
  const lines = createInterface({ input: child.stdout });
  lines.on('line', (line) => {
    try {
      last = JSON.parse(line) ?? {};
    } catch {
      last = {};
    }
    if (!last.event) {
      errors = `${command} speaks of other things: is it leasehold?`;
      child.kill('SIGKILL');
      return;
    }
    hear(held, last, line, resolve);
    if (last.event === 'waiting') onWaiting?.(held);
    if (held.state !== 'waiting') signal?.removeEventListener('abort', abort);
  });
  held._ended = new Promise((ended) => {
    const end = (message, code) => {
      signal?.removeEventListener('abort', abort);
      ended();
      if (held.state === 'waiting') {
        reject(new (ERRORS[code] ?? LeaseholdError)(last.message ?? message, code));
      } else if (last.event === 'released') {
        held.state = 'released';
      } else {
        // Without a word it was killed: nobody renews the lock any more.
        lose(held, message);
      }
    };
    child.on('error', (error) => end(cannot(error)));
    child.on('close', (code, by) => end(errors.trim() || `leasehold ended with ${code ?? by}`, code));
  });
}

function hear(held, told, line, resolve) {
  if (told.event === 'waiting') {
    held.ahead = told.ahead;
    held.heldBy = told.held_by ?? null;
    held.holders = told.holders ?? [];
  } else if (told.event === 'held') {
    held.state = 'held';
    // All its digits: a number here has 53 bits.
    held.token = BigInt(/"token":(\d+)/.exec(line)[1]);
    held.sequencer = told.sequencer;
    held.deadline = deadline(told);
    resolve(held);
  } else if (told.event === 'at_risk' || told.event === 'recovered') {
    held.state = told.event === 'at_risk' ? 'at_risk' : 'held';
    held.deadline = deadline(told);
    held.emit(told.event);
  } else if (told.event === 'lost') {
    // At once: it may take its time to end, where the store is silent.
    lose(held, told.reason);
  }
}

const deadline = (told) => (told.deadline == null ? null : new Date(told.deadline * 1000));

function lose(held, reason) {
  if (held.lost) return;
  held.reason = reason;
  held.state = 'lost';
  if (!held._leaving) held.emit('lost', held._loss());
}

/** Takes the lock, does `work` with what is held, and gives it back. Rejects with `Lost` if it was lost meanwhile. */
async function withLock(name, options, work) {
  if (typeof options === 'function') [options, work] = [{}, options];
  const held = await lock(name, options);
  let done;
  try {
    done = await work(held);
  } catch (error) {
    // What went wrong inside says more than that the lock was lost.
    await held.release().catch(() => {});
    throw error;
  }
  await held.release();
  return done;
}

/**
 * An election: `for await (const term of elect('books', { signal }))` waits until it leads, and the body works with what is
 * `Held`, whose token is the term's number, until that is `lost` or the signal says so. After it the term is given back,
 * and it stands again, after a pause that grows while terms are short, and through outages of any length. It ends with
 * the signal, or as the loop is left. Options as those of `lock`.
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
      // One that was killed can be started again; one that is not there, or refuses, cannot.
      if (error.code !== null && !(error.code in ERRORS)) throw error;
    }
    if (term) {
      try {
        yield term;
      } finally {
        // Whoever is deposed stands again.
        await term.release().catch(() => {});
      }
    }
    if (Date.now() - began > longest) pause = first;
    await sleep(pause, undefined, { signal }).catch(() => {});
    pause = Math.min(2 * pause, longest);
  }
}

module.exports = { elect, lock, withLock, Held, LeaseholdError, NotAcquired, Unavailable, Lost };
