//! Redis: python-redis-lock, whose waiters are notified through a list, and node-redlock on one
//! server, whose waiters poll.

use std::cell::RefCell;
use std::path::Path;
use std::process::Command;

use testbed::{Redis, Setup};

use crate::contention;
use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair;
use crate::peer::Peer;
use crate::{CONTENDERS, clients, ours, two_threads};

pub(crate) fn all(effort: Effort) -> Result<()> {
    let server = Redis::with(Setup::new().fast());
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let port = server.port().to_string();
    let mut python = Command::new(here.join("target/python/bin/python"));
    let python = Peer::start(python.arg(here.join("peers/redis_lock_peer.py")).arg(&port))?;
    let mut node = Command::new("node");
    node.env("NODE_PATH", here.join("target/node/node_modules"));
    let node = Peer::start(node.arg(here.join("peers/redlock_peer.js")).arg(&port))?;
    let (python, node) = (RefCell::new(python), RefCell::new(node));

    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let mut subjects = vec![
        Subject::new("python-redis-lock", || python.borrow_mut().pair(effort)),
        Subject::new("node-redlock", || node.borrow_mut().pair(effort)),
    ];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("rivals: redis:, uncontended pair", &alternate(effort, subjects)?, 2);
    let runtime = two_threads()?;
    let clients = clients(&runtime, &server.url())?;
    for n in CONTENDERS {
        let subjects = vec![
            Subject::new("python-redis-lock", || python.borrow_mut().contend(n, effort)),
            Subject::new("node-redlock", || node.borrow_mut().contend(n, effort)),
            ours(&runtime, &clients, n, effort),
        ];
        let title = format!("rivals: redis:, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 2);
    }
    Ok(())
}
