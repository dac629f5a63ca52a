//! One run, from the first worker to the last, and the store's promises for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use leasehold::store::{Guarantees, Survival};
use leasehold::{Client, ErrorKind, Kind, MAX_READERS};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::args::Plan;
use super::checker::{Property, Terms};
use super::faults::{disturb, inject};
use super::history::{Fault, Final, History, LockSpec, Resource, Write, now};
use super::ledger::{self, Entry, Ledger};
use super::parent::{Parent, State};
use super::reach::Reach;
use super::resource::Cell;
use super::trial::{Fence, Trial};

/// Number of permits of the semaphore.
const PERMITS: u32 = 3;
/// Extra time for a busy machine, in addition to the store's promises.
const SLACK: Duration = Duration::from_secs(1);

/// Returns the locks of one run, `of_each` of each kind. While a fault blocks one, the others stay
/// in use. Their names are unique to the run, so other clients' locks are not touched.
fn locks(prefix: &str, kinds: &[Kind], of_each: u32) -> Vec<LockSpec> {
    let spec = |(kind, n): (&Kind, u32)| {
        let (word, capacity) = match kind {
            Kind::Mutex => ("mutex", 1),
            Kind::RwLock => ("rwlock", MAX_READERS),
            Kind::Semaphore => ("semaphore", PERMITS),
        };
        LockSpec { name: format!("{prefix}{word}-{n}"), kind: *kind, capacity }
    };
    kinds.iter().flat_map(|kind| (1..=of_each).map(move |n| (kind, n))).map(spec).collect()
}

fn run_name(run: u64) -> String {
    format!("{run:016x}")
}

/// Returns the time after which a crashed holder's lock is free.
fn recovery(promises: &Guarantees, lease: Duration) -> Duration {
    promises.recovery + lease * promises.recovery_leases + SLACK
}

/// Returns the time after which the store ends a hold that is not renewed.
fn runs_out(store: &Client, lease: Duration) -> Duration {
    match store.guarantees().recovery_leases {
        // The lease belongs to a session. The longest lease is at least three quarters of the
        // session's timeout.
        0 => store.store().longest_lease().saturating_mul(4) / 3,
        _ => lease,
    }
}

/// Returns the worse of two outcomes.
fn worse(one: Survival, other: Survival) -> Survival {
    match (one, other) {
        (Survival::Unsafe, _) | (_, Survival::Unsafe) => Survival::Unsafe,
        (Survival::Fenced, _) | (_, Survival::Fenced) => Survival::Fenced,
        _ => Survival::Exclusive,
    }
}

/// Returns the store's promises under these faults.
fn terms(promises: &Guarantees, faults: &[Fault], lease: Duration) -> Terms {
    let survives = |fault: &Fault| match fault {
        Fault::Pause | Fault::Stale => promises.on_pause,
        Fault::Cut => promises.on_partition,
        // No promise depends on how a client ends.
        Fault::Kill => Survival::Exclusive,
        Fault::Servers => worse(promises.on_store_crash, promises.on_failover),
    };
    let mut claimed: std::collections::BTreeSet<_> = Property::ALL.into_iter().collect();
    if !promises.fifo {
        claimed.remove(&Property::Fifo);
    }
    let exclusive =
        |f: &Fault| matches!(survives(f), Survival::Exclusive | Survival::NotApplicable);
    if promises.has_leases() || !faults.iter().all(exclusive) {
        claimed.remove(&Property::Unfenced);
    }
    // A server that forgot a grant does not report it. A pause or a cut is different, because the
    // holder's own clock detects it.
    if faults.contains(&Fault::Servers) && survives(&Fault::Servers) == Survival::Fenced {
        claimed.remove(&Property::Exclusion);
    }
    if faults.iter().any(|f| survives(f) == Survival::Unsafe) {
        use Property::{Effect, Exclusion, TokenOrder, TokenUnique, Updates};
        for property in [Exclusion, TokenOrder, TokenUnique, Effect, Updates] {
            claimed.remove(&property);
        }
    }
    // Without leases no waiter loses its place, however long a client is paused.
    let shared_stalls = promises.has_leases() && promises.stall.longest() > lease / 3;
    let recovery_ms = u64::try_from(recovery(promises, lease).as_millis()).ok();
    Terms { claimed, recovery_ms, shared_stalls }
}

/// Runs the test from the first worker to the last. Returns what was tried and what happened.
///
/// # Errors
/// - The store cannot be reached.
/// - No worker can begin.
pub(super) async fn run(plan: Plan) -> leasehold::Result<(Trial, History)> {
    // Unsupported options are refused before anything is created.
    plan.faults()?;
    plan.fence()?;
    plan.clocks()?;
    let store = leasehold::connect(&plan.store).await?;
    run_on(store, plan).await
}

/// Like [`run`], on a store that is already open.
pub(super) async fn run_on(store: Client, plan: Plan) -> leasehold::Result<(Trial, History)> {
    let promises = store.guarantees().clone();
    let kinds = plan.kinds(&promises)?;
    let mut faults = plan.faults()?;
    if !plan.command.is_empty() {
        faults.push(Fault::Servers);
    }
    let mut rng = Rng::with_seed(plan.seed);
    // This is not derived from the seed. A second run of one seed must not meet the leftovers of
    // the first.
    let run = Rng::new().u64(..);
    let reach = Reach::new(&store, &plan.store)?;
    let prefix = format!("{}leasehold-torture-{}/", plan.namespace, run_name(run));
    let locks = locks(&prefix, &kinds, plan.locks);
    let ledger = match plan.fence_in_store {
        true => {
            Some((ledger::open(&plan.store, &run_name(run), locks.len()).await?, run_name(run)))
        }
        false => None,
    };
    let cells = locks.iter().map(|_| (Cell::plain(), Cell::fenced())).collect();
    let state = State {
        history: History { locks: locks.clone(), ..History::default() },
        ambushes: Vec::new(),
        cells,
        workers: BTreeMap::new(),
        next_worker: 0,
        rng: rng.fork(),
        unable: None,
    };
    let parent = Arc::new(Parent {
        lease: plan.lease,
        leases: promises.has_leases(),
        runs_out: runs_out(&store, plan.lease),
        reach,
        program: plan.program.clone(),
        clocks: plan.clocks()?,
        locks,
        ledger: ledger.as_ref().map(|(_, run)| run.clone()),
        state: Mutex::new(state),
        ended: Notify::new(),
    });
    let probe = store.mutex(format!("{}leasehold-torture-probe/{}", plan.namespace, run_name(run)));
    let mut notes = JoinSet::new();
    notes.spawn(parent.clone().note_stalls());
    notes.spawn(parent.clone().note_slow_store(probe));
    let recovery = recovery(&promises, plan.lease);
    let time = plan.time(recovery.saturating_sub(SLACK));
    torture(&parent, &plan, time, &faults, recovery, &mut rng).await?;
    parent.end_workers(recovery + plan.lease * 4 + Duration::from_secs(10)).await;
    notes.shutdown().await;
    let residue = residue(&store, &prefix, recovery).await?;
    let stored = match &ledger {
        Some((ledger, _)) => Some(stored(ledger.as_ref(), parent.locks.len()).await?),
        None => None,
    };
    let mut state = parent.state();
    let mut history = std::mem::take(&mut state.history);
    history.ended = now();
    history.residue = residue;
    history.finals = state.cells.iter().map(|(p, f)| (p.end(), f.end())).collect();
    for (end, (fenced, writes)) in history.finals.iter_mut().zip(stored.into_iter().flatten()) {
        end.1 = fenced;
        history.writes.extend(writes);
    }
    let trial = Trial {
        store: store.url().to_owned(),
        command: plan.command_again(store.url(), time),
        seed: Some(plan.seed),
        seconds: Some(time.as_secs()),
        clients: Some(plan.clients),
        lease_ms: u64::try_from(plan.lease.as_millis()).ok(),
        fence: if plan.fence_in_store { Fence::Store } else { Fence::Process },
        leases: promises.has_leases(),
        terms: terms(&promises, &faults, plan.lease),
        faults: faults.into_iter().collect(),
    };
    Ok((trial, history))
}

/// Returns the contents of each fenced resource in the store and the writes that it accepted.
/// Removes the resources.
async fn stored(ledger: &dyn Ledger, locks: usize) -> leasehold::Result<Vec<(Final, Vec<Write>)>> {
    let mut all = Vec::new();
    for lock in 0..locks {
        let entries = ledger.entries(lock).await?;
        let write = |(_, entry): &(usize, Entry)| Write {
            lock,
            resource: Resource::Fenced,
            op: entry.op,
            token: entry.token,
            at: None,
        };
        all.push((ledger::replay(&entries)?.end(), entries.iter().map(write).collect()));
    }
    ledger.remove(locks).await?;
    Ok(all)
}

/// Starts the workers, and injects faults until the time is over.
async fn torture(
    parent: &Arc<Parent>,
    plan: &Plan,
    time: Duration,
    faults: &[Fault],
    recovery: Duration,
    rng: &mut Rng,
) -> leasehold::Result<()> {
    let failed = |why: String| {
        let what = format!("cannot start the workers: {why}");
        leasehold::Error::new(ErrorKind::Config, what)
    };
    for _ in 0..plan.clients {
        parent.spawn().map_err(|e| failed(e.to_string()))?;
    }
    let end = Instant::now() + time;
    let (loops, every) = plan.pace();
    let of_workers: Vec<Fault> = faults.iter().copied().filter(|f| *f != Fault::Servers).collect();
    let injectors: Vec<_> = (0..if of_workers.is_empty() { 0 } else { loops })
        .map(|_| tokio::spawn(inject(parent.clone(), of_workers.clone(), every, end, rng.fork())))
        .collect();
    let disturbs = disturb(parent.clone(), plan.command.clone(), recovery, end);
    let mut disturbs = std::pin::pin!(disturbs);
    let mut disturbed = None;
    while Instant::now() < end {
        let tick = sleep(Duration::from_millis(50).min(end.duration_since(Instant::now())));
        tokio::select! {
            () = tick => {}
            done = &mut disturbs, if disturbed.is_none() => disturbed = Some(done),
        }
        if let Some(Err(why)) = &disturbed {
            return Err(leasehold::Error::new(ErrorKind::Config, format!("CMD failed: {why}")));
        }
        if let Some(why) = parent.state().unable.take() {
            return Err(failed(why));
        }
    }
    for injector in injectors {
        let _ = injector.await;
    }
    // The program's last run must complete, so that the servers are in the state in which it leaves
    // them.
    match disturbed {
        Some(_) => Ok(()),
        None => disturbs
            .await
            .map_err(|why| leasehold::Error::new(ErrorKind::Config, format!("CMD failed: {why}"))),
    }
}

/// Returns what is left in the store after the promised time.
async fn residue(
    store: &Client,
    prefix: &str,
    patience: Duration,
) -> leasehold::Result<Vec<String>> {
    let deadline = Instant::now() + patience;
    loop {
        let left = store.list(prefix).await?;
        if left.is_empty() || Instant::now() >= deadline {
            let shown = |info: &leasehold::store::LockInfo| {
                let claims: Vec<String> =
                    info.claims.iter().map(|c| format!("{:?}: {}", c.state, c.holder)).collect();
                format!("{}: left in the store: {}", info.name, claims.join("; "))
            };
            return Ok(left.iter().map(shown).collect());
        }
        sleep(Duration::from_millis(20)).await;
    }
}
