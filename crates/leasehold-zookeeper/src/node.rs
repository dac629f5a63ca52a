//! The children of a lock's node: what their names contain, and which of them are holders.
//!
//! A child's name contains everything that decides which claims are holders, so one listing is
//! enough:
//!
//! | | `naming=curator` | `naming=kazoo` |
//! |---|---|---|
//! | mutex | `_c_GUID-lock-SEQ` | `GUID-m__lock__SEQ` |
//! | reader, writer | `_c_GUID-__READ__SEQ`, `_c_GUID-__WRIT__SEQ` | `GUID-r__rlock__SEQ`, `GUID-w__lock__SEQ` |
//! | `w` permits of `c` | `_c_GUID-claim-sWofC-SEQ` | `GUID-claim-sWofC-SEQ` |
//!
//! GUID is the claim's ID. SEQ is the number that the server appends. The first two rows are the
//! names of Curator's `InterProcessMutex` and `InterProcessReadWriteLock`, and of kazoo's `Lock`,
//! `ReadLock` and `WriteLock`. (kazoo looks only at the text just before the number, so leasehold's
//! additional letter is harmless. A kazoo client's own `__lock__` may be a mutex or a writer.) Only
//! leasehold uses the names in the last row.
//!
//! # Other versions
//! Clients of different versions need to agree only on these names, so no name ever changes its
//! meaning. A version that needs another kind of claim gives it a name of a new form. Older
//! versions treat such a child as foreign: they do not join or grant, and they do not suggest
//! deleting it. The data of a child is for display, and unknown fields in it are ignored.
//!
//! # Order
//! Children are ordered by their numbers *as text*, as in Curator and kazoo. Text order equals
//! creation order until the number passes 2,147,483,647 and becomes negative. After that, Curator
//! and kazoo grant the lock to every new child immediately, and leasehold cannot prevent two
//! holders by ordering the children differently. Therefore leasehold warns from [`LATE_SEQUENCE`]
//! on and refuses to join from [`LAST_SEQUENCE`] on.

use std::collections::HashMap;

use leasehold_core::queue::granted;
use leasehold_core::{Claim, ClaimId, Kind, MAX_READERS};

/// The naming convention in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Curator,
    Kazoo,
}

/// The sequence number at which leasehold starts to warn that the numbers will run out.
pub(super) const LATE_SEQUENCE: i64 = 1 << 30;
/// The sequence number from which no claim joins. It is a million before the numbers turn negative.
pub(super) const LAST_SEQUENCE: i64 = i32::MAX as i64 - 1_000_000;

/// The kind of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Mutex,
    Reader,
    Writer,
    /// A mutex or a writer that kazoo created.
    Exclusive,
    /// A semaphore's permits, which only leasehold creates.
    Sized {
        kind: Kind,
        weight: u32,
        capacity: u32,
    },
}

impl Shape {
    fn of(claim: &Claim) -> Self {
        let Claim { kind, weight, capacity, .. } = *claim;
        match (kind, weight, capacity) {
            (Kind::Mutex, 1, 1) => Self::Mutex,
            (Kind::RwLock, 1, MAX_READERS) => Self::Reader,
            (Kind::RwLock, MAX_READERS, MAX_READERS) => Self::Writer,
            _ => Self::Sized { kind, weight, capacity },
        }
    }

    /// Returns the kind and capacity of the lock that such a child belongs to, if the child
    /// determines them.
    fn lock(self) -> Option<(Kind, u32)> {
        match self {
            Self::Mutex => Some((Kind::Mutex, 1)),
            Self::Reader | Self::Writer => Some((Kind::RwLock, MAX_READERS)),
            Self::Exclusive => None,
            Self::Sized { kind, capacity, .. } => Some((kind, capacity)),
        }
    }

    fn weight(self, capacity: u32) -> u32 {
        match self {
            Self::Mutex | Self::Reader => 1,
            Self::Writer | Self::Exclusive => capacity,
            Self::Sized { weight, .. } => weight,
        }
    }
}

/// One child of a lock's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    shape: Shape,
    /// Index at which the number begins.
    digits: usize,
}

impl Node {
    /// Parses a name. Fails if neither leasehold nor a client with the same naming creates such
    /// names.
    pub(super) fn parse(naming: Naming, name: String) -> Result<Self, String> {
        match Self::parts(naming, &name) {
            Some((digits, shape)) => Ok(Self { name, shape, digits }),
            None => Err(name),
        }
    }

    /// Returns where the number begins, and the kind of the child.
    fn parts(naming: Naming, name: &str) -> Option<(usize, Shape)> {
        let positive = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let negative = name[..positive].strip_suffix('-').map(str::len);
        let number_at = |digits: usize| {
            // The server writes ten characters, or eleven if ten are not enough.
            let shape = (name.len() - digits >= 10).then(|| shape(naming, &name[..digits]))??;
            Some((digits, shape))
        };
        number_at(positive).or_else(|| number_at(negative?))
    }

    fn digits(&self) -> &str {
        &self.name[self.digits..]
    }

    /// Returns the child's sequence number.
    pub(super) fn sequence(&self) -> i64 {
        self.digits().parse().unwrap_or(i64::MAX)
    }

    /// Returns whether only a client with this naming creates such a name. A child whose name
    /// merely ends like that of a claim (`block-0000000001`) counts as a claim, because it may be
    /// another client's lock. But leasehold does not delete such a child.
    pub(super) fn is_surely_a_claim(&self, naming: Naming) -> bool {
        let head = &self.name[..self.digits];
        let is_hex = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
        let is_guid = |text: &str| {
            let dashed = text.split('-').map(str::len).eq([8, 4, 4, 4, 12]);
            (text.len() == 32 || dashed) && is_hex(&text.replace('-', ""))
        };
        let after = |length: usize, text: &str| {
            let (guid, rest) = text.split_at_checked(length)?;
            is_guid(guid).then(|| rest.to_owned())
        };
        match (naming, head.strip_prefix("_c_")) {
            (Naming::Curator, None) => matches!(head, "lock-" | "__READ__" | "__WRIT__"),
            (Naming::Curator, Some(guarded)) => {
                // Curator and leasehold use dashes in the GUID. The Go client does not.
                let rest = after(36, guarded).or_else(|| after(32, guarded));
                rest.is_some_and(|rest| {
                    matches!(&*rest, "-lock-" | "-__READ__" | "-__WRIT__")
                        || rest.starts_with("-claim-")
                })
            }
            (Naming::Kazoo, _) => after(32, head).is_some_and(|rest| {
                matches!(
                    &*rest,
                    "__lock__" | "__rlock__" | "-m__lock__" | "-w__lock__" | "-r__rlock__"
                ) || rest.starts_with("-claim-")
            }),
        }
    }

    /// Returns the ID of the claim, if the GUID is one.
    pub(super) fn id(&self, naming: Naming) -> Option<ClaimId> {
        let guid = match naming {
            Naming::Curator => self.name.strip_prefix("_c_")?.get(..36)?.replace('-', ""),
            Naming::Kazoo => self.name.get(..32)?.to_owned(),
        };
        ClaimId::from_hex(&guid)
    }
}

/// Returns the kind of a child, according to the part of the name before the number.
fn shape(naming: Naming, head: &str) -> Option<Shape> {
    let guid_and_dash = match naming {
        Naming::Curator => "_c_".len() + 36 + 1,
        Naming::Kazoo => 32 + 1,
    };
    let sized = head.get(guid_and_dash..).and_then(|rest| rest.strip_prefix("claim-"));
    if let Some(sized) = sized {
        let (kind, numbers) = sized.strip_suffix('-')?.split_at_checked(1)?;
        let kind = match kind {
            "m" => Kind::Mutex,
            "r" => Kind::RwLock,
            "s" => Kind::Semaphore,
            _ => return None,
        };
        let (weight, capacity) = numbers.split_once("of")?;
        let (weight, capacity) = (weight.parse().ok()?, capacity.parse().ok()?);
        return (0 < weight && weight <= capacity).then_some(Shape::Sized {
            kind,
            weight,
            capacity,
        });
    }
    let ends = |marker| head.ends_with(marker);
    match naming {
        Naming::Curator if ends("lock-") => Some(Shape::Mutex),
        Naming::Curator if ends("__READ__") => Some(Shape::Reader),
        Naming::Curator if ends("__WRIT__") => Some(Shape::Writer),
        Naming::Kazoo if ends("__rlock__") => Some(Shape::Reader),
        Naming::Kazoo if ends("__lock__") => Some(match head.get(32..) {
            Some("-m__lock__") => Shape::Mutex,
            Some("-w__lock__") => Shape::Writer,
            _ => Shape::Exclusive,
        }),
        _ => None,
    }
}

/// Returns the name of the claim's node without the sequence number that ZooKeeper appends. Every
/// retry of the request uses the same prefix.
pub(super) fn prefix(naming: Naming, claim: &Claim) -> String {
    let marker = |curator: &str, kazoo: &str| match naming {
        Naming::Curator => format!("-{curator}"),
        Naming::Kazoo => format!("-{kazoo}"),
    };
    let rest = match Shape::of(claim) {
        Shape::Mutex | Shape::Exclusive => marker("lock-", "m__lock__"),
        Shape::Reader => marker("__READ__", "r__rlock__"),
        Shape::Writer => marker("__WRIT__", "w__lock__"),
        Shape::Sized { kind, weight, capacity } => {
            let kind = match kind {
                Kind::Mutex => 'm',
                Kind::RwLock => 'r',
                Kind::Semaphore => 's',
            };
            format!("-claim-{kind}{weight}of{capacity}-")
        }
    };
    format!("{}{rest}", guid(naming, claim.id))
}

/// Returns the start of the name of a claim's child, which does not depend on the kind of claim.
pub(super) fn guid(naming: Naming, id: ClaimId) -> String {
    let hex = id.to_hex();
    match naming {
        Naming::Curator => {
            let [a, b, c, d, e] = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            format!("_c_{a}-{b}-{c}-{d}-{e}")
        }
        Naming::Kazoo => hex,
    }
}

/// All children of a lock, in the order of the queue.
#[derive(Debug)]
pub(super) struct Children {
    nodes: Vec<Node>,
    /// The kind and capacity of the lock, which the first child determines.
    lock: Option<(Kind, u32)>,
}

/// The position of a claim.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QueuePosition {
    /// How many claims are ahead.
    pub(super) ahead: usize,
    /// By how much the weight of the claims ahead exceeds `room`.
    pub(super) excess: u64,
    /// How much weight may be ahead of the claim when it is granted.
    pub(super) room: u64,
    /// Claims of which at least one must leave before this one can be granted. Empty if it is
    /// granted.
    pub(super) blockers: Vec<Blocker>,
    /// The nearest of the other claims ahead, at most as many as the blockers. Each can replace a
    /// blocker that left.
    pub(super) spare: Vec<Blocker>,
}

/// A claim that blocks another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blocker {
    pub(super) name: String,
    pub(super) weight: u32,
}

impl Children {
    /// Orders a listing. Fails with the name of a child that does not follow this naming.
    pub(super) fn order(naming: Naming, names: Vec<String>) -> Result<Self, String> {
        let nodes: Result<Vec<Node>, String> =
            names.into_iter().map(|name| Node::parse(naming, name)).collect();
        let mut nodes = nodes?;
        nodes.sort_unstable_by(|a, b| a.digits().cmp(b.digits()));
        Ok(Self::in_order(nodes))
    }

    fn in_order(nodes: Vec<Node>) -> Self {
        let lock = nodes.iter().find_map(|n| n.shape.lock());
        // If no child determines the lock, all children belong to kazoo, and could be mutexes.
        let lock = lock.or((!nodes.is_empty()).then_some((Kind::Mutex, 1)));
        Self { nodes, lock }
    }

    /// Returns the first `count` children.
    pub(super) fn front(&self, count: usize) -> Self {
        Self { nodes: self.nodes.iter().take(count).cloned().collect(), lock: self.lock }
    }

    pub(super) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the kind and capacity of the lock, or `None` if it has no children.
    pub(super) fn lock(&self) -> Option<(Kind, u32)> {
        self.lock
    }

    fn capacity(&self) -> u32 {
        self.lock.map_or(1, |(_, capacity)| capacity)
    }

    /// Returns how much of the capacity a child takes.
    pub(super) fn weight(&self, node: &Node) -> u32 {
        node.shape.weight(self.capacity())
    }

    /// Returns the greatest sequence number, or -1 if the lock has no children.
    pub(super) fn last_sequence(&self) -> i64 {
        self.nodes.iter().map(Node::sequence).max().unwrap_or(-1)
    }

    /// Returns whether a sequence number has turned negative.
    pub(super) fn is_disordered(&self) -> bool {
        self.nodes.iter().any(|n| n.sequence() < 0)
    }

    /// Returns how many of the first children are holders.
    pub(super) fn holding(&self) -> usize {
        granted(self.nodes.iter().map(|n| self.weight(n)), self.capacity())
    }

    /// Returns whether `claim` would be granted immediately if it joined, provided that the lock
    /// has the claim's kind and capacity.
    pub(super) fn has_room_for(&self, claim: &Claim) -> bool {
        let ahead: u64 = self.nodes.iter().map(|n| u64::from(self.weight(n))).sum();
        ahead + u64::from(claim.weight) <= u64::from(claim.capacity)
    }

    /// Returns the kind and capacity of the lock according to the claims ahead, if they differ from
    /// those of this claim. A claim without others ahead determines the lock itself.
    pub(super) fn mismatch(&self, claim: &Claim, own: &str) -> Option<(Kind, u32)> {
        if claim.weight == 0 || claim.weight > claim.capacity {
            return Some((claim.kind, claim.capacity));
        }
        let ahead = self.nodes.iter().take_while(|n| n.name != own);
        let mut shapes = ahead.clone().filter_map(|n| n.shape.lock());
        let shape = match shapes.next() {
            Some(lock) => lock,
            // A lock of kazoo fits any claim, except one for a semaphore.
            None if ahead.clone().next().is_some() && claim.kind == Kind::Semaphore => {
                (Kind::Mutex, 1)
            }
            None => return None,
        };
        (shape != (claim.kind, claim.capacity)).then_some(shape)
    }

    /// Returns the position of the child with this name. Returns `None` if it does not exist.
    ///
    /// A claim can be granted only when the weight ahead of it is at most the capacity minus its
    /// own weight. The *blockers* together weigh more than that. So while they all stay, the claim
    /// cannot be granted whatever the others do, and it need not watch the others. Blockers are the
    /// nearest claims ahead, so that a departure wakes the claims that now fit and few others. A
    /// reader has one blocker, a writer.
    pub(super) fn position_of(&self, own: &str) -> Option<QueuePosition> {
        let mine = self.nodes.iter().position(|n| n.name == own)?;
        let ahead = self.nodes[..mine].iter().map(|n| u64::from(self.weight(n))).sum();
        Some(self.position_at(mine, ahead))
    }

    /// Returns the position of the child at this index, with this weight ahead of it.
    fn position_at(&self, mine: usize, weight_ahead: u64) -> QueuePosition {
        let before = &self.nodes[..mine];
        let room = self.room(mine);
        let mut blockers = Vec::new();
        if weight_ahead > room {
            let mut sum = 0;
            for node in before.iter().rev() {
                let weight = self.weight(node);
                sum += u64::from(weight);
                blockers.push(Blocker { name: node.name.clone(), weight });
                if sum > room {
                    break;
                }
            }
            // The nearest claims may be too light to matter if a heavy one is included.
            blockers.retain(|b| {
                let needed = sum - u64::from(b.weight) <= room;
                if !needed {
                    sum -= u64::from(b.weight);
                }
                needed
            });
        }
        let blocks = |node: &Node| blockers.iter().any(|b| b.name == node.name);
        let spare = before.iter().rev().filter(|node| !blocks(node)).take(blockers.len());
        let spare = spare.map(|n| Blocker { name: n.name.clone(), weight: self.weight(n) });
        let (spare, excess) = (spare.collect(), weight_ahead.saturating_sub(room));
        QueuePosition { ahead: mine, excess, room, blockers, spare }
    }

    /// Returns how much weight may be ahead of the child at this index when it is granted.
    fn room(&self, place: usize) -> u64 {
        let weight = self.nodes.get(place).map_or(0, |node| self.weight(node));
        u64::from(self.capacity()).saturating_sub(u64::from(weight))
    }

    /// Indexes the children, so that many positions can be looked up cheaply.
    pub(super) fn places(&self) -> Places<'_> {
        let at = self.nodes.iter().enumerate().map(|(i, n)| (n.name.as_str(), i)).collect();
        let sum = |sum: &mut u64, node| {
            let before = *sum;
            *sum += u64::from(self.weight(node));
            Some(before)
        };
        Places { children: self, at, ahead: self.nodes.iter().scan(0, sum).collect() }
    }
}

/// The positions of all children in a queue. Creating them takes one pass over the queue, however
/// many lookups follow.
#[derive(Debug)]
pub(super) struct Places<'a> {
    children: &'a Children,
    at: HashMap<&'a str, usize>,
    /// The weight ahead of each child.
    ahead: Vec<u64>,
}

impl Places<'_> {
    /// Returns how many children are ahead of the one with this name, and whether the latter is a
    /// holder. Returns `None` if no child has this name.
    pub(super) fn of(&self, own: &str) -> Option<(usize, bool)> {
        let place = *self.at.get(own)?;
        Some((place, self.ahead[place] <= self.children.room(place)))
    }

    /// Like [`Children::position_of`].
    pub(super) fn position_of(&self, own: &str) -> Option<QueuePosition> {
        let place = *self.at.get(own)?;
        Some(self.children.position_at(place, self.ahead[place]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use leasehold_core::Name;

    fn claim(kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new("n").unwrap(), kind, weight, capacity).unwrap()
    }

    fn child(naming: Naming, claim: &Claim, sequence: i64) -> String {
        format!("{}{sequence:010}", prefix(naming, claim))
    }

    const BOTH: [Naming; 2] = [Naming::Curator, Naming::Kazoo];

    // S76
    #[test]
    fn child_names_match_those_of_other_clients() {
        let id = ClaimId::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        let mut mutex = claim(Kind::Mutex, 1, 1);
        mutex.id = id;
        assert_eq!(
            child(Naming::Curator, &mutex, 1),
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000001"
        );
        assert_eq!(
            child(Naming::Kazoo, &mutex, 1),
            "0123456789abcdef0123456789abcdef-m__lock__0000000001"
        );
    }

    #[test]
    fn encoded_data_is_decoded_unchanged() {
        for naming in BOTH {
            for (kind, weight, capacity) in [
                (Kind::Mutex, 1, 1),
                (Kind::RwLock, 1, MAX_READERS),
                (Kind::RwLock, MAX_READERS, MAX_READERS),
                (Kind::Semaphore, 2, 7),
                (Kind::Semaphore, 1, 1),
            ] {
                let claim = claim(kind, weight, capacity);
                for sequence in [0, 41, i64::from(i32::MAX), i64::from(i32::MIN), -7] {
                    let name = child(naming, &claim, sequence);
                    let node = Node::parse(naming, name.clone()).unwrap();
                    assert_eq!(node.sequence(), sequence, "{name}");
                    assert_eq!(node.shape, Shape::of(&claim), "{name}");
                    assert_eq!(node.id(naming), Some(claim.id), "{name}");
                }
            }
        }
    }

    // S76
    #[test]
    fn foreign_child_names_are_distinguished_from_ours() {
        let kazoo = "0123456789abcdef0123456789abcdef__lock__0000000004".to_owned();
        assert_eq!(Node::parse(Naming::Kazoo, kazoo.clone()).unwrap().shape, Shape::Exclusive);
        assert_eq!(Node::parse(Naming::Curator, kazoo.clone()), Err(kazoo));
        for foreign in ["leases", "locks", "lock-", "lock-123", "a", "0000000001", "x-0000000001"] {
            for naming in BOTH {
                assert_eq!(Node::parse(naming, foreign.into()), Err(foreign.into()));
            }
        }
        // Without protection, Curator's children have no GUID.
        let bare = Node::parse(Naming::Curator, "lock-0000000003".into()).unwrap();
        assert_eq!((bare.shape, bare.sequence()), (Shape::Mutex, 3));
    }

    // F01
    #[test]
    fn nodes_that_only_resemble_claims_are_not_deletable() {
        let surely = |naming, name: &str| {
            Node::parse(naming, name.into()).is_ok_and(|node| node.is_surely_a_claim(naming))
        };
        for naming in BOTH {
            for (kind, weight, capacity) in [
                (Kind::Mutex, 1, 1),
                (Kind::RwLock, 1, MAX_READERS),
                (Kind::RwLock, MAX_READERS, MAX_READERS),
                (Kind::Semaphore, 2, 7),
            ] {
                let name = child(naming, &claim(kind, weight, capacity), 7);
                assert!(surely(naming, &name), "{name}");
            }
        }
        for name in [
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000001",
            "_c_0123456789abcdef0123456789abcdef-lock-0000000001",
            "_c_01234567-89ab-cdef-0123-456789abcdef-__WRIT__-000000001",
            "lock-0000000001",
        ] {
            assert!(surely(Naming::Curator, name), "{name}");
        }
        let kazoo = "0123456789abcdef0123456789abcdef__rlock__0000000004";
        assert!(surely(Naming::Kazoo, kazoo));
        for name in ["block-0000000001", "_c_x-lock-0000000001", "my-lock-0000000001"] {
            assert!(Node::parse(Naming::Curator, name.into()).is_ok(), "{name}");
            assert!(!surely(Naming::Curator, name), "{name}");
        }
        let name = "sub/x__lock__0000000001";
        assert!(Node::parse(Naming::Kazoo, name.into()).is_ok(), "{name}");
        assert!(!surely(Naming::Kazoo, name), "{name}");
    }

    // S73
    #[test]
    fn children_are_ordered_as_by_other_clients() {
        let mutexes: Vec<Claim> = (0..3).map(|_| claim(Kind::Mutex, 1, 1)).collect();
        let numbers = [i64::from(i32::MAX), 5, i64::from(i32::MIN)];
        let names = mutexes.iter().zip(numbers).map(|(c, n)| child(Naming::Curator, c, n));
        let children = Children::order(Naming::Curator, names.collect()).unwrap();
        let order: Vec<i64> = children.nodes().iter().map(Node::sequence).collect();
        assert_eq!(order, [i64::from(i32::MIN), 5, i64::from(i32::MAX)]);
        assert!(children.is_disordered());
    }

    fn queue(claims: &[Claim]) -> Children {
        let names = claims.iter().zip(0..).map(|(c, n)| child(Naming::Curator, c, n));
        Children::order(Naming::Curator, names.collect()).unwrap()
    }

    fn blockers(children: &Children, of: usize) -> Vec<usize> {
        let position = children.position_of(&children.nodes()[of].name).unwrap();
        let at = |b: &Blocker| children.nodes().iter().position(|n| n.name == b.name).unwrap();
        position.blockers.iter().map(at).collect()
    }

    #[test]
    fn only_blocking_claims_are_watched() {
        let mutexes: Vec<Claim> = (0..4).map(|_| claim(Kind::Mutex, 1, 1)).collect();
        assert_eq!(blockers(&queue(&mutexes), 0), [0; 0]);
        assert_eq!(blockers(&queue(&mutexes), 3), [2]);
        let (r, w) =
            (claim(Kind::RwLock, 1, MAX_READERS), claim(Kind::RwLock, MAX_READERS, MAX_READERS));
        let all = [&r, &w, &r, &r, &w, &r, &w].map(|c| claim(c.kind, c.weight, c.capacity));
        let rw = queue(&all);
        assert_eq!(blockers(&rw, 1), [0], "a writer waits for the nearest claim");
        assert_eq!(
            blockers(&rw, 3),
            [1],
            "a reader waits for the writer ahead of it, not for the reader"
        );
        assert_eq!(blockers(&rw, 5), [4]);
        let permits: Vec<Claim> = (0..5).map(|_| claim(Kind::Semaphore, 1, 2)).collect();
        assert_eq!(blockers(&queue(&permits), 4), [3, 2]);
    }

    // S16
    #[test]
    fn first_claim_determines_kind_and_capacity() {
        let (a, b) = (claim(Kind::Semaphore, 1, 2), claim(Kind::Semaphore, 1, 3));
        let children = queue(&[a.clone(), b.clone()]);
        let name = |i: usize| children.nodes()[i].name.clone();
        assert_eq!(children.mismatch(&a, &name(0)), None);
        assert_eq!(children.mismatch(&b, &name(1)), Some((Kind::Semaphore, 2)));
    }

    proptest! {
        /// While all blockers stay, no departure of another claim lets the claim be granted, and
        /// each blocker is needed.
        #[test]
        fn blockers_are_sufficient_and_minimal(
            weights in proptest::collection::vec(1_u32..=6, 1..12),
            extra in 0_u32..3,
        ) {
            let capacity = 6 + extra;
            let claims: Vec<Claim> =
                weights.iter().map(|&w| claim(Kind::Semaphore, w, capacity)).collect();
            let children = queue(&claims);
            let holding = children.holding();
            for i in 0..claims.len() {
                let all = blockers(&children, i);
                prop_assert_eq!(all.is_empty(), i < holding);
                let (places, own) = (children.places(), &children.nodes()[i].name);
                prop_assert_eq!(places.of(own), Some((i, i < holding)));
                prop_assert_eq!(places.position_of(own), children.position_of(own));
                let weight = |indices: &[usize]| {
                    indices.iter().map(|&j| weights[j]).sum::<u32>() + weights[i]
                };
                if !all.is_empty() {
                    prop_assert!(weight(&all) > capacity);
                    for left_out in 0..all.len() {
                        let mut others = all.clone();
                        others.remove(left_out);
                        prop_assert!(weight(&others) <= capacity);
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_child_name_is_parsed_or_returned(name in testbed::texts(&[
            "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000001",
            "0123456789abcdef0123456789abcdef__lock__0000000001",
            "_c_01234567-89ab-cdef-0123-456789abcdef-__WRIT__-2147483647",
        ])) {
            for naming in BOTH {
                match Node::parse(naming, name.clone()) {
                    Ok(node) => prop_assert_eq!(node.name, name.clone()),
                    Err(rejected) => prop_assert_eq!(rejected, name.clone()),
                }
            }
        }
    }
}
