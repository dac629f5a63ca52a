//! Fences: how a resource rejects writes with stale fencing tokens.
//!
//! A lock alone cannot stop a holder that was paused: its lease expires, another client acquires
//! the lock, and then the first client resumes and writes. Only the resource can reject that write.
//! It stores the highest token seen and rejects smaller ones.
//!
//! Every fence needs the following, whatever the resource is:
//!
//! - **Check and write are one atomic step.** If the write is a separate step, a larger token can
//!   arrive between the two.
//! - **Reads show the token too**, if what is written depends on what was read. A fence learns
//!   about a new holder only when that holder shows its token. Until then, it accepts a late write
//!   of the previous holder. A new holder that had read the data before without showing its token
//!   would overwrite that write without noticing it. A read that raises the highest token seen
//!   prevents this. So let the check be the first step.
//! - **The highest token seen is stored with the data.** If it is on another node, the check is not
//!   atomic with the write. A resource that consists of several independent nodes stores a highest
//!   token on each of them, and a holder shows its token to all of them before it reads or writes
//!   any. The replicas of one node share a single highest token, stored where their writes are
//!   ordered.
//! - **All tokens come from one store.** If a lock moves to a store with smaller tokens (etcd,
//!   ZooKeeper), every fence rejects the new holders; see
//!   [`Builder::token_offset`](crate::Builder::token_offset).
//! - **The hold is exclusive.** Permits and readers hold the lock at the same time, so the largest
//!   of their tokens is no reason to reject the others.
//!
//! # Available fences
//!
//! | the resource is | use |
//! |---|---|
//! | rows in a SQL database | `fence::sql` (features `sqlite`, `postgres`, `mysql`) |
//! | keys on a Redis server | `fence::redis` (feature `redis`) |
//! | keys in the etcd that keeps the lock | `EtcdGuardExt::etcd_compare` (feature `etcd`), which needs no stored token |
//! | nodes in the ZooKeeper that keeps the lock | `ZooKeeperGuardExt::zookeeper_node` (feature `zookeeper`), which needs no stored token |
//! | an object in S3, Google Cloud Storage, Azure | `fence::object` (features `s3`, `gs`, `az`) |
//! | a value in memcached | `fence::memcached` (feature `memcached`) |
//! | a key in a NATS bucket | `fence::nats` (feature `nats`) |
//! | behind HTTP | `fence::http` (feature `http`) |
//! | anything else that can compare and write in one step | a check of your own, which rejects smaller tokens with [`Error::stale_fence`](crate::Error::stale_fence) |

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
pub use leasehold_transactions::fence as sql;
