//! Constructors of the requests that the store sends, and parsers of their replies.

use super::fault::Failure;
use super::proto::{
    Compare, DeleteRangeRequest, Done, KeyValue, Op, Operand, Order, PutRequest, RangeRequest,
    RangeResponse, Relation, RequestOp, ResponseOp, SortBy, Target, TxnResponse,
};
use leasehold_core::{Error, ErrorKind};

/// Maximum number of operations per transaction (etcd's own limit is 128).
pub(super) const OPERATIONS: usize = 100;

/// Returns the condition that this range contains no keys. If `end` is empty, the range is the
/// single key `key`.
pub(super) fn absent(key: Vec<u8>, end: Vec<u8>) -> Compare {
    created(Relation::Equal, key, end, 0)
}

/// Returns the condition that this revision created the key.
pub(super) fn still(key: Vec<u8>, revision: u64) -> Compare {
    created(Relation::Equal, key, Vec::new(), i64::try_from(revision).unwrap_or(i64::MAX))
}

/// Returns the condition that no key of the range was created after this revision.
pub(super) fn none_since(key: Vec<u8>, end: Vec<u8>, revision: i64) -> Compare {
    created(Relation::Less, key, end, revision.saturating_add(1))
}

fn created(relation: Relation, key: Vec<u8>, range_end: Vec<u8>, revision: i64) -> Compare {
    Compare {
        result: relation.into(),
        target: Target::Create.into(),
        key,
        operand: Some(Operand::CreateRevision(revision)),
        range_end,
    }
}

/// Returns the condition that this revision wrote the key last.
pub(super) fn unwritten_since(key: Vec<u8>, revision: i64) -> Compare {
    Compare {
        result: Relation::Equal.into(),
        target: Target::Modified.into(),
        key,
        operand: Some(Operand::ModRevision(revision)),
        range_end: Vec::new(),
    }
}

/// Returns the condition that the key is attached to this lease.
pub(super) fn hangs_on(key: Vec<u8>, lease: i64) -> Compare {
    Compare {
        result: Relation::Equal.into(),
        target: Target::Lease.into(),
        key,
        operand: Some(Operand::Lease(lease)),
        range_end: Vec::new(),
    }
}

pub(super) fn op(op: Op) -> RequestOp {
    RequestOp { op: Some(op) }
}

pub(super) fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
    op(Op::Put(PutRequest { key, value, lease, ignore_value: false, ignore_lease: false }))
}

/// Returns an operation that writes another value. The key stays attached to its lease.
pub(super) fn write(key: Vec<u8>, value: Vec<u8>) -> RequestOp {
    let (lease, ignore_value, ignore_lease) = (0, false, true);
    op(Op::Put(PutRequest { key, value, lease, ignore_value, ignore_lease }))
}

/// Returns an operation that writes the current value again, to notify the watchers of the key.
pub(super) fn touch(key: Vec<u8>) -> RequestOp {
    let (ignore_value, ignore_lease) = (true, true);
    op(Op::Put(PutRequest { key, value: Vec::new(), lease: 0, ignore_value, ignore_lease }))
}

pub(super) fn delete(key: Vec<u8>) -> RequestOp {
    op(Op::Delete(DeleteRangeRequest { key }))
}

/// Returns a request for one key.
pub(super) fn get(key: Vec<u8>) -> RangeRequest {
    range(key, Vec::new())
}

/// Returns a request for all keys from `key` (inclusive) to `range_end` (exclusive).
pub(super) fn range(key: Vec<u8>, range_end: Vec<u8>) -> RangeRequest {
    RangeRequest {
        key,
        range_end,
        limit: 0,
        order: Order::None.into(),
        by: SortBy::Key.into(),
        serializable: false,
        keys_only: false,
        max_create_revision: 0,
    }
}

/// Returns a request for the oldest keys of a range.
pub(super) fn oldest(key: Vec<u8>, range_end: Vec<u8>, limit: i64) -> RangeRequest {
    let (order, by) = (Order::Ascending.into(), SortBy::Create.into());
    RangeRequest { limit, order, by, ..range(key, range_end) }
}

/// Returns a request for the keys of a range that were created up to a revision, the youngest
/// first, without their values.
pub(super) fn youngest(key: Vec<u8>, range_end: Vec<u8>, up_to: u64, limit: i64) -> RangeRequest {
    let (order, by) = (Order::Descending.into(), SortBy::Create.into());
    let max_create_revision = i64::try_from(up_to).unwrap_or(i64::MAX);
    RangeRequest { limit, order, by, max_create_revision, keys_only: true, ..range(key, range_end) }
}

/// The keys of a range, and the revision at which they were read.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) kvs: Vec<KeyValue>,
    /// How many keys the range has, even if fewer were requested.
    pub(super) count: usize,
    pub(super) revision: i64,
}

impl From<RangeResponse> for Found {
    fn from(response: RangeResponse) -> Self {
        let revision = response.header.map_or(0, |header| header.revision);
        let count = usize::try_from(response.count).unwrap_or(0);
        Self { kvs: response.kvs, count, revision }
    }
}

/// Returns the revision at which a transaction was executed.
pub(super) fn revision_of(txn: &TxnResponse) -> i64 {
    txn.header.as_ref().map_or(0, |header| header.revision)
}

pub(super) fn ranged(response: Option<ResponseOp>) -> Result<Found, Failure> {
    match response.and_then(|r| r.done) {
        Some(Done::Range(range)) => Ok(range.into()),
        _ => Err(out_of_step()),
    }
}

pub(super) fn out_of_step() -> Failure {
    let what = "etcd's reply belongs to another request";
    Failure::Final(Error::new(ErrorKind::Corrupt, what).with_hint("report this as a bug"))
}
