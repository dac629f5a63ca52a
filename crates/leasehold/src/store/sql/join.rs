//! Getting in and out: by one statement on the lock's row where that decides it, else by a section.

use std::time::Duration;

use super::Shared;
use super::call::Answer;
use super::fault::Failure;
use super::loaded::Reach;
use super::rows::{Cells, int, kind_number, micros, plain};
use super::url::Dialect;
use super::wire::{Arg, Wire};
use crate::claim::{Claim, Token};
use crate::queue::At;
use crate::store::{Joined, Mode, mismatch};

impl Shared {
    pub(super) async fn join(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        mode: Mode,
    ) -> Result<Answer, Failure> {
        if let Some(token) = self.take(wire, claim).await? {
            let remaining = Some(claim.lease);
            return Ok(Answer::Joined(Joined::Holding { token, remaining }));
        }
        if mode == Mode::Wait {
            self.waiters.enlist(claim.id, || ());
        }
        let reach = Reach::FrontAnd(claim.id);
        let joined = self.section(wire, &claim.name, reach, Some(claim), |loaded| {
            let at = At { now: loaded.now, stamp: loaded.now };
            let joined = loaded.queue.join(claim, mode, at, &self.session);
            joined.map(|joined| loaded.with_hidden(joined))
        });
        let joined = joined.await?.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
        Ok(match joined {
            // No longer than was asked for: by a clock that was set back, more may be left.
            Ok(Joined::Holding { token, remaining }) => {
                let remaining = remaining.map(|left| left.min(claim.lease));
                Answer::Joined(Joined::Holding { token, remaining })
            }
            Ok(joined) => Answer::Joined(joined),
            Err(m) => Answer::Refused(mismatch(claim, m.kind, m.capacity)),
        })
    }

    /// The fast path. The lease it answers is counted from before the call was sent, so it is no
    /// longer than the row says.
    async fn take(&self, wire: &mut dyn Wire, claim: &Claim) -> Result<Option<Token>, Failure> {
        if claim.weight == 0 || claim.weight > claim.capacity {
            return Ok(None);
        }
        let floor = || int(claim.seen.saturating_add(1).min(Token::MAX / 2));
        let name = || Arg::Name(claim.name.as_str().to_owned());
        let what = || [kind_number(claim.kind).into(), i64::from(claim.capacity).into()];
        let who = || [claim.id.to_hex().into(), i64::from(claim.weight).into()];
        let people = || {
            [
                plain(&claim.holder.host).into(),
                i64::from(claim.holder.pid).into(),
                plain(&claim.holder.label).into(),
            ]
        };
        let (lease, delay) = (|| micros(claim.lease), || micros(claim.lock_delay));
        let mut args = Vec::with_capacity(12);
        match self.dialect {
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                args.push(floor());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.extend(people());
                args.push(delay());
                args.push(name());
                let done = wire.run(&self.sql.take, args).await?;
                Ok(if done.affected == 1 { Token::new(done.last_id) } else { None })
            }
            _ => {
                args.push(name());
                args.extend(what());
                args.extend(who());
                args.push(lease());
                args.push(delay());
                args.extend(people());
                args.push(floor());
                args.push(floor());
                let rows = wire.rows(&self.sql.take, args).await?;
                let Some(row) = rows.into_iter().next() else { return Ok(None) };
                Ok(Token::new(Cells::new(row).count()?))
            }
        }
    }

    pub(super) async fn leave(
        &self,
        wire: &mut dyn Wire,
        claim: &Claim,
        keep: Option<Duration>,
        waited: bool,
    ) -> Result<bool, Failure> {
        if keep.is_none_or(|keep| keep.is_zero()) && !waited {
            let args = vec![Arg::Name(claim.name.as_str().into()), claim.id.to_hex().into()];
            if wire.run(&self.sql.release, args).await?.affected == 1 {
                return Ok(true);
            }
        }
        let left = self.section(wire, &claim.name, Reach::FrontAnd(claim.id), None, |loaded| {
            loaded.queue.leave(claim.id, keep, loaded.now)
        });
        Ok(left.await?.unwrap_or(false))
    }
}
