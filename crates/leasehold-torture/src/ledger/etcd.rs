//! The fenced resource in etcd. Each entry is a key. A transaction puts it on the condition that
//! the lock is held ([`Hold::etcd_compare`]). Entries are ordered by their creation.

use async_trait::async_trait;
use leasehold::{EtcdGuardExt, Hold, Result};
use prost::{Message, Oneof};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::{Entry, Ledger, Proof, failed, foreign, parts};
use crate::resource::Read;

pub(crate) struct Etcd {
    channel: Channel,
    token: Option<String>,
    prefix: String,
}

impl Etcd {
    pub(crate) async fn open(url: &str, run: &str) -> Result<Self> {
        let of = parts(url)?;
        let endpoint = |server: &str| Endpoint::from_shared(format!("http://{server}"));
        let endpoints: std::result::Result<Vec<_>, _> =
            of.servers.split(',').map(endpoint).collect();
        let channel = Channel::balance_list(endpoints.map_err(failed)?.into_iter());
        let prefix = format!("leasehold-torture-{run}/entries/");
        let mut etcd = Self { channel, token: None, prefix };
        if let Some((name, password)) = of.user {
            let who = AuthenticateRequest { name: name.into(), password: password.into() };
            let answer: AuthenticateResponse =
                etcd.call("/etcdserverpb.Auth/Authenticate", who).await?;
            etcd.token = Some(answer.token);
        }
        Ok(etcd)
    }

    async fn call<Q, A>(&self, path: &'static str, question: Q) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut request = tonic::Request::new(question);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.parse().map_err(failed)?);
        }
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.map_err(failed)?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(request, path, ProstCodec::<Q, A>::default()).await;
        Ok(answer.map_err(failed)?.into_inner())
    }

    /// Runs a request on the condition of `proof`. `None`: the condition does not hold.
    async fn on(&self, proof: &Proof, then: Then) -> Result<Option<TxnResponse>> {
        let Proof::Compare(compare) = proof else { return Err(foreign(proof)) };
        let success = vec![RequestOp { then: Some(then) }];
        let txn = TxnRequest { compare: vec![compare.clone()], success };
        let answer: TxnResponse = self.call("/etcdserverpb.KV/Txn", txn).await?;
        Ok(answer.succeeded.then_some(answer))
    }

    fn keys(&self, lock: usize) -> (Vec<u8>, Vec<u8>) {
        // A range excludes its end, and `0` is the character after the slash.
        (
            format!("{}{lock}/", self.prefix).into_bytes(),
            format!("{}{lock}0", self.prefix).into_bytes(),
        )
    }

    /// Requests all entries in the order of their creation, or only the last one.
    fn range(&self, lock: usize, last: bool) -> RangeRequest {
        let (key, range_end) = self.keys(lock);
        let (limit, order) = if last { (1, DESCENDING) } else { (0, ASCENDING) };
        RangeRequest { key, range_end, limit, order, by: BY_CREATION }
    }
}

fn entry(kv: &KeyValue) -> Result<(usize, Entry)> {
    let version = usize::try_from(kv.create_revision).map_err(failed)?;
    Ok((version, serde_json::from_slice(&kv.value).map_err(failed)?))
}

#[async_trait]
impl Ledger for Etcd {
    fn prove(&self, guard: &Hold) -> Result<Proof> {
        Ok(Proof::Compare(guard.etcd_compare()?.to_protobuf()))
    }

    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>> {
        let Some(answer) = self.on(proof, Then::Range(self.range(lock, true))).await? else {
            return Ok(None);
        };
        let range = answer.responses.into_iter().next().and_then(|op| op.range);
        let last = range.and_then(|range| range.kvs.into_iter().next());
        let (version, value) = match last {
            Some(kv) => entry(&kv).map(|(version, entry)| (version, entry.value))?,
            None => (0, 0),
        };
        Ok(Some(Read { version, value }))
    }

    async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool> {
        let key = format!("{}{lock}/{}", self.prefix, entry.op).into_bytes();
        let value = serde_json::to_vec(&entry).map_err(failed)?;
        Ok(self.on(proof, Then::Put(PutRequest { key, value })).await?.is_some())
    }

    async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>> {
        let answer: RangeResponse =
            self.call("/etcdserverpb.KV/Range", self.range(lock, false)).await?;
        answer.kvs.iter().map(entry).collect()
    }

    async fn remove(&self, locks: usize) -> Result<()> {
        for lock in 0..locks {
            let (key, range_end) = self.keys(lock);
            let delete = DeleteRangeRequest { key, range_end };
            let _: Nothing = self.call("/etcdserverpb.KV/DeleteRange", delete).await?;
        }
        Ok(())
    }
}

const ASCENDING: i32 = 1;
const DESCENDING: i32 = 2;
const BY_CREATION: i32 = 2;

// etcd's messages, as far as they are used here. The field numbers are those of its published API
// (v3).

#[derive(Clone, PartialEq, Message)]
struct TxnRequest {
    /// Comparisons in wire format, as the library encodes them.
    #[prost(bytes = "vec", repeated, tag = "1")]
    compare: Vec<Vec<u8>>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
struct RequestOp {
    #[prost(oneof = "Then", tags = "1, 2")]
    then: Option<Then>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Then {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
}

#[derive(Clone, PartialEq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    limit: i64,
    #[prost(int32, tag = "5")]
    order: i32,
    #[prost(int32, tag = "6")]
    by: i32,
}

#[derive(Clone, PartialEq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct TxnResponse {
    #[prost(bool, tag = "2")]
    succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    range: Option<RangeResponse>,
}

#[derive(Clone, PartialEq, Message)]
struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(int64, tag = "2")]
    create_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    password: String,
}

#[derive(Clone, PartialEq, Message)]
struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    token: String,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}
