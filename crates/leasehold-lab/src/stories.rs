//! The stories, in the order in which they are listed. Each has its own file.

mod check_then_write;
mod dead_holders_status_row;
mod del_without_looking;
mod drained_pool;
mod for_update_without_index;
mod guessed_lease;
mod herd;
mod late_answer;
mod lost_failover;
mod lost_reply;
mod node_that_forgets;
mod paused_holder;
mod setnx_then_expire;
mod setnx_time_getset;
mod two_nodes;
mod unfenced_read;

use crate::story::Story;

/// All stories.
pub const ALL: &[Story] = &[
    paused_holder::STORY,
    del_without_looking::STORY,
    setnx_then_expire::STORY,
    setnx_time_getset::STORY,
    lost_failover::STORY,
    node_that_forgets::STORY,
    herd::STORY,
    dead_holders_status_row::STORY,
    for_update_without_index::STORY,
    drained_pool::STORY,
    lost_reply::STORY,
    guessed_lease::STORY,
    late_answer::STORY,
    unfenced_read::STORY,
    check_then_write::STORY,
    two_nodes::STORY,
];

/// Returns the story of this name.
pub fn named(name: &str) -> Option<&'static Story> {
    ALL.iter().find(|story| story.name == name)
}
