//! An index of a long queue, which finds a claim's position without a linear search.
//!
//! # The argument
//! The order of the queue is the order of the tokens. So a binary search finds the position of a
//! claim whose token is known. A map has the token of every claim in the queue, and possibly of
//! others: a new claim is added immediately, and claims that have left are removed only
//! occasionally.
//!
//! So a claim that is not in the map is not in the queue. For a claim in the map, the position of
//! its token is checked. If the claim is not there, it has left or the tokens are out of order. The
//! whole queue is then searched, which gives the right result in both cases.
//!
//! A short queue has no map, because a linear search is faster. The map is created when the queue
//! reaches [`MANY`] claims, and has all of them. It is rebuilt when half of its claims have left,
//! and dropped when few claims are left.

use crate::types::claim::{ClaimId, IdMap};
use crate::types::token::Token;

/// The queue length from which a map is kept.
const MANY: usize = 32;

/// The tokens of the claims in a queue.
#[derive(Clone, Debug, Default)]
pub(super) enum Index {
    /// The queue is read from a store, used once and written back. Building a map would cost more
    /// than a search.
    #[default]
    Never,
    /// The queue is short.
    Few,
    Many(IdMap<Token>),
}

/// The result of a search in the index.
pub(super) enum Found {
    /// The claim is not in the queue.
    Nowhere,
    /// The claim has this token, if it has not left.
    Under(Token),
    Unknown,
}

impl Index {
    pub(super) fn kept() -> Self {
        Self::Few
    }

    /// Adds the last of these claims, which has just joined.
    pub(super) fn joined(
        &mut self,
        all: impl DoubleEndedIterator<Item = (ClaimId, Token)> + ExactSizeIterator,
    ) {
        let here = all.len();
        match self {
            Self::Never => {}
            _ if here < MANY / 2 => *self = Self::Few,
            Self::Few if here < MANY => {}
            Self::Many(tokens) if tokens.len() < 2 * here => tokens.extend({ all }.next_back()),
            Self::Few | Self::Many(_) => *self = Self::Many(all.collect()),
        }
    }

    /// Drops the map if only `here` claims are left and the queue is short now.
    pub(super) fn shrink(&mut self, here: usize) {
        if here < MANY && matches!(self, Self::Many(_)) {
            *self = Self::Few;
        }
    }

    pub(super) fn place_of(&self, id: ClaimId) -> Found {
        match self {
            Self::Never | Self::Few => Found::Unknown,
            Self::Many(tokens) => {
                tokens.get(&id).map_or(Found::Nowhere, |token| Found::Under(*token))
            }
        }
    }
}
