//! The requests that the store is built on: one transaction, one range, many ranges.

use super::client::{Answered, Client};
use super::fault::Failure;
use super::proto::{Op, RangeRequest, RangeResponse, TxnRequest, TxnResponse};
use super::requests::{Found, OPERATIONS, op, out_of_step, ranged, revision_of};

impl Client {
    pub(super) async fn txn(&self, txn: TxnRequest) -> Result<Answered<TxnResponse>, Failure> {
        self.call("/etcdserverpb.KV/Txn", txn).await
    }

    pub(super) async fn range(&self, range: RangeRequest) -> Result<Found, Failure> {
        let answered = self.call::<_, RangeResponse>("/etcdserverpb.KV/Range", range).await?;
        Ok(answered.answer.into())
    }

    /// Reads many ranges, up to `OPERATIONS` of them per transaction.
    pub(super) async fn ranges(&self, all: Vec<RangeRequest>) -> Result<Vec<Found>, Failure> {
        let mut found = Vec::with_capacity(all.len());
        for some in all.chunks(OPERATIONS) {
            let success = some.iter().map(|r| op(Op::Range(r.clone()))).collect();
            let txn = TxnRequest { compare: Vec::new(), success, failure: Vec::new() };
            let answer = self.txn(txn).await?.answer;
            let revision = revision_of(&answer);
            for response in answer.responses {
                found.push(Found { revision, ..ranged(Some(response))? });
            }
        }
        if found.len() == all.len() { Ok(found) } else { Err(out_of_step()) }
    }
}
