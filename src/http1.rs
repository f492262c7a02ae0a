//! HTTP/1.1 on the wire (RFC 9112): heads and bodies, between buffers and the types of the `http` crate.
//!
//! The codec of the paced path, for both sides of it. A message is read where it lies in the buffer that the socket
//! filled, its fields keep the spelling of whoever wrote them, and a small message goes out in one write. What is allowed
//! to come from a client is not judged here: [`crate::downstream::framing`] has read every byte before.

pub mod body;
pub mod head;
pub mod outbox;

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{BufMut as _, BytesMut};
use tokio::io::AsyncRead;
use tokio_util::io::poll_read_buf;

/// What is read at once at first. A buffer that a read has filled is made twice as large.
pub const READ_AT_FIRST: usize = 4 * 1024;
/// What is read at once at most.
const READ_AT_MOST: usize = 512 * 1024;

/// The buffer that a stream is read into.
#[derive(Debug)]
pub struct Inbox {
    /// What was read and is not consumed.
    pub bytes: BytesMut,
    /// How much the next read has room for.
    room: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox {
            bytes: BytesMut::new(),
            room: READ_AT_FIRST,
        }
    }
}

impl Inbox {
    /// Reads what there is, and says how much it was: nothing at the end of the stream.
    ///
    /// # Errors
    /// The stream broke.
    pub fn poll_fill<I>(&mut self, stream: &mut I, cx: &mut Context<'_>) -> Poll<io::Result<usize>>
    where
        I: AsyncRead + Unpin,
    {
        self.bytes.reserve(self.room);
        // Into memory that nobody has cleared: the length of what is read is known by the buffer alone.
        let mut limited = (&mut self.bytes).limit(self.room);
        let read = ready!(poll_read_buf(Pin::new(stream), cx, &mut limited))?;
        if read == self.room && self.room < READ_AT_MOST {
            self.room *= 2;
        }
        Poll::Ready(Ok(read))
    }

    /// Lets go of what is more than `room`, if nothing is in it.
    pub fn shrink(&mut self, room: usize) {
        if self.room > room && self.bytes.is_empty() {
            self.bytes = BytesMut::new();
            self.room = room;
        }
    }

    /// Lets go of the memory, of which nothing is in use.
    pub fn rest(&mut self) {
        if self.bytes.is_empty() {
            *self = Inbox::default();
        }
    }
}
