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

/// What is read at once at first. A buffer that a read has filled, or nearly, is made twice as large.
pub const READ_AT_FIRST: usize = 4 * 1024;
/// What is read at once at most.
const READ_AT_MOST: usize = 256 * 1024;

/// A read of so much is likely to have more behind it.
const PIECE: usize = 8 * 1024;

/// The buffer that a stream is read into.
#[derive(Debug)]
pub struct Inbox {
    /// What was read and is not consumed.
    pub bytes: BytesMut,
    /// How much the next read has room for, and how much a read may have room for at most.
    room: usize,
    most: usize,
    /// The stream broke behind what was read last.
    broken: Option<io::Error>,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox::with_room(READ_AT_FIRST, READ_AT_MOST)
    }
}

impl Inbox {
    /// One that begins with reads of so much and ends with reads of `most`.
    pub fn with_room(room: usize, most: usize) -> Self {
        Inbox {
            bytes: BytesMut::new(),
            room,
            most,
            broken: None,
        }
    }

    /// Reads what there is, and says how much it was: nothing at the end of the stream.
    ///
    /// # Errors
    /// The stream broke.
    pub fn poll_fill<I>(&mut self, stream: &mut I, cx: &mut Context<'_>) -> Poll<io::Result<usize>>
    where
        I: AsyncRead + Unpin,
    {
        if let Some(e) = self.broken.take() {
            return Poll::Ready(Err(e));
        }
        self.bytes.reserve(self.room);
        let mut read = ready!(self.poll_read(stream, cx))?;
        // TLS gives a record at a time. To pass each on by itself would be a write for each, and a wake-up of the peer.
        while read >= PIECE && read + PIECE <= self.room {
            match self.poll_read(stream, cx) {
                Poll::Ready(Ok(more @ 1..)) => read += more,
                // A stream tells that it broke once, and then that it has ended.
                Poll::Ready(Err(e)) => {
                    self.broken = Some(e);
                    break;
                }
                Poll::Ready(Ok(0)) | Poll::Pending => break,
            }
        }
        let full = read >= self.room || self.room > PIECE && read + PIECE > self.room;
        if full && self.room < self.most {
            self.room *= 2;
        }
        Poll::Ready(Ok(read))
    }

    /// Reads into the room that is left.
    fn poll_read<I>(&mut self, stream: &mut I, cx: &mut Context<'_>) -> Poll<io::Result<usize>>
    where
        I: AsyncRead + Unpin,
    {
        // Into memory that nobody has cleared: the length of what is read is known by the buffer alone.
        let room = self.bytes.capacity() - self.bytes.len();
        let mut limited = (&mut self.bytes).limit(room);
        poll_read_buf(Pin::new(stream), cx, &mut limited)
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
            *self = Inbox::with_room(READ_AT_FIRST, self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::ReadBuf;

    use super::*;

    /// Gives so many records, breaks once, and has ended then.
    struct Records(usize, bool);

    impl AsyncRead for Records {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.0 > 0 {
                self.0 -= 1;
                buf.put_slice(&[7; 16 * 1024][..buf.remaining().min(16 * 1024)]);
            } else if !std::mem::replace(&mut self.1, true) {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn records_are_taken_together_and_a_break_behind_them_is_told() {
        let (mut inbox, mut stream) = (Inbox::default(), Records(100, false));
        let mut cx = Context::from_waker(Waker::noop());
        let mut reads = Vec::new();
        loop {
            match inbox.poll_fill(&mut stream, &mut cx) {
                Poll::Ready(Ok(read)) => reads.push(read),
                Poll::Ready(Err(e)) => break assert_eq!(e.kind(), io::ErrorKind::ConnectionReset),
                Poll::Pending => panic!("it has something to say"),
            }
        }
        assert_eq!(reads.iter().sum::<usize>(), inbox.bytes.len());
        // The last record of a read may begin where there is room for half of it.
        let most = READ_AT_MOST + PIECE;
        assert!(
            reads.iter().all(|read| (1..=most).contains(read)),
            "{reads:?}"
        );
        assert!(reads.iter().any(|read| *read >= 256 * 1024), "{reads:?}");
    }
}
