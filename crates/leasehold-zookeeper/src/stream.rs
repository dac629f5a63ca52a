//! A connection with a member, whether encrypted or not.

use tokio::io::{AsyncRead, AsyncWrite};

/// A connection with a member.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
