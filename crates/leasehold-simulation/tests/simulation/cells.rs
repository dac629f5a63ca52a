//! The network between one process and cells. Requests that are sent together may be interleaved
//! with others, partially executed, or executed in another order. A read may be stale. A duplicate
//! arrives later than its original. Then "refused" is a correct answer, as [`Cells`] demands.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_cell::memory::MemoryCells;
use leasehold_cell::{Answer, Cells, Message, Messenger, Request, System};
use leasehold_core::{Clock, Error, ErrorKind, Result};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep, timeout};

use crate::net::{Fate, Wire};
use crate::plan::STALE;

/// The recently observed values of each key.
#[derive(Debug)]
pub(crate) struct Past<T>(Mutex<BTreeMap<String, Vec<(Instant, T)>>>);

impl<T> Default for Past<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Past<T> {
    /// Records the current value.
    pub(crate) fn keep(&self, key: &str, seen: &T) {
        let mut all = self.0.lock().unwrap();
        let of_key = all.entry(key.to_owned()).or_default();
        of_key.retain(|(at, _)| at.elapsed() < STALE);
        of_key.push((Instant::now(), seen.clone()));
    }

    /// Returns an earlier value that was read, if there is one.
    pub(crate) fn old(&self, key: &str, rng: &mut fastrand::Rng) -> Option<T> {
        let all = self.0.lock().unwrap();
        let of_key = all.get(key)?.iter().filter(|(at, _)| at.elapsed() < STALE);
        rng.choice(of_key.collect::<Vec<_>>()).map(|(_, seen)| seen.clone())
    }
}

/// The cells, as one process reaches them.
#[derive(Debug)]
pub(crate) struct CellWire {
    pub(crate) cells: Arc<MemoryCells>,
    pub(crate) past: Arc<Past<Answer>>,
    pub(crate) wire: Arc<Wire>,
    pub(crate) clock: Clock,
    /// Time limit for an answer.
    pub(crate) limit: Duration,
}

/// Requests in flight.
#[derive(Clone)]
struct Batch {
    cells: Arc<MemoryCells>,
    past: Arc<Past<Answer>>,
    /// The requests in the order of execution.
    steps: Vec<Step>,
    /// Number of requests that are executed.
    done: usize,
}

#[derive(Clone)]
struct Step {
    /// Its position in the batch.
    nth: usize,
    after: Duration,
    request: Request,
    /// Seed for choosing an earlier value, if the read is stale.
    behind: Option<u64>,
}

impl Batch {
    async fn arrives(self) -> Result<Vec<Answer>> {
        let all = self.steps.len();
        let mut answers = vec![Answer::Refused; all];
        for Step { nth, after, request, behind } in self.steps.into_iter().take(self.done) {
            sleep(after).await;
            let looks = matches!(request, Request::Get { .. }).then(|| request.key().to_owned());
            let answer =
                self.cells.run(vec![request]).await?.pop().expect("one answer for each request");
            answers[nth] = match (looks, behind) {
                (None, _) => answer,
                (Some(key), None) => {
                    self.past.keep(&key, &answer);
                    answer
                }
                (Some(key), Some(seed)) => {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    self.past.old(&key, &mut rng).unwrap_or(answer)
                }
            };
        }
        if self.done < all {
            Err(no_answer("the connection broke between two requests"))
        } else {
            Ok(answers)
        }
    }
}

fn no_answer(what: &'static str) -> Error {
    Error::new(ErrorKind::Unreachable, what)
}

impl CellWire {
    fn batch(&self, requests: Vec<Request>) -> Batch {
        let air = &self.wire.air;
        let system = self.cells.system();
        let quick = air.weather.lock().unwrap().quick;
        let all = requests.len();
        let is_halved = all > 1 && air.happens("halved", |weather| weather.halved);
        let mut ranks = BTreeMap::<String, u64>::new();
        let mut steps = Vec::new();
        for (nth, request) in requests.into_iter().enumerate() {
            let is_behind = system.looks_behind
                && matches!(request, Request::Get { .. })
                && air.happens("behind", |weather| weather.stale);
            let mut rng = air.rng.lock().unwrap();
            if !system.forgets {
                ranks.entry(request.key().to_owned()).or_insert_with(|| rng.u64(..));
            }
            let behind = is_behind.then(|| rng.u64(..));
            let after = if nth == 0 { Duration::ZERO } else { quick.mul_f64(rng.f64() / 4.0) };
            let request = shorter(request, system.grain.mul_f64(rng.f64()));
            steps.push(Step { nth, after, request, behind });
        }
        steps.sort_by_key(|step| (ranks.get(step.request.key()).copied(), step.nth));
        let done = if is_halved { air.rng.lock().unwrap().usize(0..all) } else { all };
        Batch { cells: self.cells.clone(), past: self.past.clone(), steps, done }
    }
}

/// Shortens a cell's life, as a server with a coarse clock does.
fn shorter(mut request: Request, by: Duration) -> Request {
    match &mut request {
        Request::Create { lives: Some(lives), .. }
        | Request::Replace { lives: Some(lives), .. }
        | Request::Touch { lives, .. } => *lives = lives.saturating_sub(by),
        _ => {}
    }
    request
}

#[async_trait]
impl Cells for CellWire {
    fn system(&self) -> &System {
        self.cells.system()
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let is_told = self.wire.air.judge.is_told();
        let what = if is_told { shown(&requests) } else { String::new() };
        let batch = self.batch(requests);
        let describe = |answers: &Vec<Answer>| {
            answers.iter().map(describe_answer).collect::<Vec<_>>().join("; ")
        };
        let asked = self.wire.call(what, describe, false, || batch.clone().arrives());
        timeout(self.limit, asked).await.unwrap_or_else(|_| Err(no_answer("no answer in time")))
    }

    fn wall_micros(&self) -> u64 {
        self.clock.wall_micros()
    }

    fn messenger(&self) -> Option<&dyn Messenger> {
        self.cells.messenger().map(|_| self as &dyn Messenger)
    }
}

#[async_trait]
impl Messenger for CellWire {
    async fn listen(&self, name: &str, sender: UnboundedSender<Message>) -> Result<()> {
        let (cells, name) = (self.cells.clone(), name.to_owned());
        let asked = self.wire.call(
            format!("listen {name}"),
            |()| "done".into(),
            false,
            || {
                let (cells, name, sender) = (cells.clone(), name.clone(), sender.clone());
                async move { cells.listen(&name, sender).await }
            },
        );
        timeout(self.limit, asked).await.unwrap_or_else(|_| Err(no_answer("no answer in time")))
    }

    async fn send(&self, name: &str, what: String) {
        self.wire.air.judge.log(|| format!("  {} rings {name}: {what}", self.wire.process));
        let (cells, name) = (self.cells.clone(), name.to_owned());
        if let Fate::Arrives(after) = self.wire.fate("notification lost") {
            tokio::spawn(async move {
                sleep(after).await;
                cells.send(&name, what).await;
            });
        }
    }
}

/// Describes a queue briefly, by the beginnings of its claims' IDs.
pub(crate) fn brief(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    let mut parts = text.split("\"id\":\"");
    let head = parts.next().unwrap_or_default().lines().next().unwrap_or_default();
    let ids: Vec<String> = parts.map(|part| part.chars().take(6).collect()).collect();
    format!("{head:?} {ids:?}")
}

/// Describes an answer without the whole contents of a queue.
fn describe_answer(answer: &Answer) -> String {
    match answer {
        Answer::Found(found) => format!("{} is {}", found.version.0, brief(&found.value)),
        other => format!("{other:?}"),
    }
}

fn shown(requests: &[Request]) -> String {
    let all = requests.iter().map(|request| match request {
        Request::Get { key } => format!("get {key}"),
        Request::Create { key, value, lives } => format!("create {key} {} {lives:?}", brief(value)),
        Request::Replace { key, value, version, lives } => {
            format!("replace {key} {} by {} {lives:?}", version.0, brief(value))
        }
        Request::Touch { key, version, lives, .. } => {
            format!("touch {key} {} {lives:?}", version.0)
        }
        Request::Remove { key, version } => format!("remove {key} {}", version.0),
    });
    all.collect::<Vec<_>>().join("; ")
}
