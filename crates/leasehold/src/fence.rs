//! The resource's side of the fencing token: what makes a late writer harmless.
//!
//! A lock alone cannot stop a holder that was paused: its lease ends, the next one holds, and then
//! the first wakes and writes. Only the resource can refuse that write: it remembers the greatest
//! token it has seen and refuses smaller ones.
//!
//! What a fence needs, whatever the resource:
//! - **Check and write are one atomic step.** A check that is followed by a separate write lets a
//!   greater token in between.
//! - **Reads carry the token too**, if what is written depends on what was read. A fence knows of a
//!   new holder only once that holder has come by: a late write that arrives *before* the new
//!   holder's first step is accepted, in token order. If the new holder had read before that
//!   without showing its token, its write then overwrites the late one unseen. A read that
//!   raises the mark closes the door behind it. So: first thing, check.
//! - **The mark is where the data is.** A mark on another node than the data is not atomic with it.
//!   A resource of several nodes keeps one on each, and a holder shows its token to all of them
//!   before it reads or writes any; replicas of one node have one, where their writes are put in
//!   order.
//! - **Tokens are of one store.** When a lock moves to a store whose tokens are smaller (etcd,
//!   ZooKeeper), every fence is closed: [`Builder::token_offset`](crate::Builder::token_offset).
//! - **The hold is exclusive.** Permits of a semaphore and readers hold side by side: the greatest
//!   token among them is no reason to refuse the others.
//!
//! # Which
//! | the resource is | use |
//! |---|---|
//! | rows in a SQL database | `fence::sql` (features `sqlite`, `postgres`, `mysql`) |
//! | keys on a Redis server | `fence::redis` (feature `redis`) |
//! | keys in the etcd that keeps the lock | `EtcdGuardExt::etcd_compare` (feature `etcd`): no mark at all |
//! | nodes in the ZooKeeper that keeps the lock | `ZooKeeperGuardExt::zookeeper_node` (feature `zookeeper`), likewise |
//! | an object in S3, Google Cloud Storage, Azure | `fence::object` (features `s3`, `gs`, `az`) |
//! | a value in memcached | `fence::memcached` (feature `memcached`) |
//! | a key in a NATS bucket | `fence::nats` (feature `nats`) |
//! | behind HTTP | `fence::http` (feature `http`) |
//! | anything else that can compare and write in one step | refuse smaller tokens there, with [`Error::stale_fence`](crate::Error::stale_fence) |

#[cfg(feature = "memcached")]
#[doc(inline)]
pub use leasehold_cell::memcached::fence as memcached;
#[cfg(feature = "nats")]
#[doc(inline)]
pub use leasehold_cell::nats::fence as nats;
#[cfg(any(feature = "s3", feature = "gs", feature = "az"))]
#[doc(inline)]
pub use leasehold_cell::objects::fence as object;
#[doc(inline)]
pub use leasehold_core::fence::*;
#[cfg(feature = "http")]
#[doc(inline)]
pub use leasehold_http as http;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use leasehold_redis::fence as redis;
#[cfg(feature = "sql")]
#[doc(inline)]
pub use leasehold_sql::fence as sql;
