//! `leasehold release` ends the hold of a script, and `leasehold evict` ends any hold.
//!
//! `release --token` first contacts the [`hold`](crate::hold) process that has the lock, through
//! its [control socket](crate::control_socket). Only that process knows whether the lock was held
//! all the time, and it keeps the lock for the time of `--min-hold`. If it does not exist (it was
//! killed, or runs on another machine), the claim is removed from the store.

use std::process::ExitCode;

use leasehold::store::Evict;
use leasehold::{Client, Token};

use crate::args::{EvictArgs, ReleaseArgs, StoreArgs};
use crate::block_on::block_on;
use crate::control_socket::ControlSocket;
use crate::events::note;
use crate::exit::{self, Failure};
use crate::frozen;
use crate::take::{held_by, with_store};

pub(crate) fn main(args: &ReleaseArgs) -> ExitCode {
    let ReleaseArgs { store, name, token, .. } = args;
    finish(block_on(with_store(store, async |locks| match *token {
        Some(token) => release(locks, name, token).await,
        None => evict(locks, store, name, None).await,
    })))
}

pub(crate) fn evict_main(args: &EvictArgs) -> ExitCode {
    let EvictArgs { store, name, token } = args;
    finish(block_on(with_store(store, async |locks| evict(locks, store, name, *token).await)))
}

fn finish(done: Result<(), Failure>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// The hint for a script that lost its lock.
const OVERLAP: &str = "work done since then may overlap with another holder's: check its result";

async fn release(locks: &Client, name: &str, token: Token) -> Result<(), Failure> {
    let socket = ControlSocket::new(locks.identity(), name, token.get());
    if let Some(answer) = socket.request_release().await {
        return answer.map_err(|failure| match failure.code {
            exit::LOST => failure.hint(OVERLAP),
            _ => failure,
        });
    }
    match locks.evict(name, Evict::Token(token)).await? {
        0 => {
            let what = format!(
                "token {token} does not hold {name:?}: wrong token, or the hold was already lost \
                 or released"
            );
            Err(Failure::new(exit::LOST, what).hint(OVERLAP))
        }
        _ => Ok(()),
    }
}

async fn evict(
    locks: &Client,
    store: &StoreArgs,
    name: &str,
    token: Option<Token>,
) -> Result<(), Failure> {
    let nothing_held =
        |what: String| Failure::new(exit::NOT_HELD, what).hint(store.command("show", Some(name)));
    let lock = match token {
        // The holders of a lock that cannot be read can be evicted too.
        None => locks.holders(name).await.ok().flatten(),
        Some(_) => None,
    };
    if let Some(frozen) = lock.as_ref().filter(|lock| frozen::is_frozen(lock)) {
        let state = held_by(frozen).unwrap_or_default();
        let what = format!("{name:?} has no holder: it is {state}");
        let hint = format!("to end the freeze: {}", store.command("unfreeze", Some(name)));
        return Err(Failure::new(exit::NOT_HELD, what).hint(hint));
    }
    let whom = token.map_or(Evict::Holders, Evict::Token);
    let evicted = locks.evict(name, whom).await?;
    let has_holder = lock.is_none_or(|lock| lock.holders().next().is_some());
    let done = match (evicted, token) {
        (0, Some(token)) => {
            return Err(nothing_held(format!("token {token} does not hold {name:?}")));
        }
        (0, None) => return Err(nothing_held(format!("{name:?} has no holder"))),
        (_, Some(token)) => format!("evicted the holder of {name:?} with token {token}"),
        (_, None) if !has_holder => format!("ended the cooldown of {name:?}"),
        (1, None) => format!("evicted the holder of {name:?}"),
        (_, None) => format!("evicted {evicted} holders of {name:?}"),
    };
    note(&done);
    Ok(())
}
