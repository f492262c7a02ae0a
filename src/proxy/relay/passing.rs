//! Bytes on their way in one direction of a tunnel, and the buffer that they need only while they are.
//!
//! A tunnel is idle most of its life, and there are many. So a buffer belongs to the thread, not to the tunnel: it is
//! borrowed for as long as bytes are in it, which is longer than one poll only where their reader is slow. What the
//! bytes mean, or that there is another direction, this does not know.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The most bytes under way in one direction.
const BUFFER: usize = 32 * 1024;

/// Buffers kept for each thread. One is enough for all who only look whether there is something to read; the others are
/// for those whose reader is slow by turns.
const SPARES: usize = 8;

thread_local! {
    /// The buffers that the next tunnels borrow: at first one for each direction of one.
    static SPARE: RefCell<Vec<Box<[u8]>>> = RefCell::new(vec![buffer(), buffer()]);
}

/// One direction.
#[derive(Debug, Default)]
pub(super) struct Passing {
    /// What was read and not yet written, and where it begins and ends.
    held: Option<Box<[u8]>>,
    begins: usize,
    ends: usize,
    passed: u64,
    /// Written, but maybe not on its way.
    unflushed: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Passing,
    /// The reader has come to the end; the writer is to be told.
    Ending,
    Ended,
}

impl Passing {
    /// Passes what can be passed now. Resolves with the number of all bytes once `from` has ended, and `to` was told so;
    /// may be polled again then.
    pub(super) fn poll(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<u64>> {
        while self.stage == Stage::Passing {
            if self.begins == self.ends {
                ready!(self.fill(from, to, cx))?;
            }
            ready!(self.empty(to, cx))?;
        }
        if self.stage == Stage::Ending {
            // Flushes as well.
            ready!(Pin::new(to).poll_shutdown(cx))?;
            self.stage = Stage::Ended;
        }
        Poll::Ready(Ok(self.passed))
    }

    /// Reads once into a borrowed buffer, which is kept only if something came.
    fn fill(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let mut buffer = borrow();
        let mut space = ReadBuf::new(&mut buffer);
        let polled = Pin::new(from).poll_read(cx, &mut space);
        let length = space.filled().len();
        match polled {
            Poll::Ready(Ok(())) if length > 0 => {
                (self.begins, self.ends) = (0, length);
                self.held = Some(buffer);
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Ok(())) => self.stage = Stage::Ending,
            Poll::Ready(Err(_)) | Poll::Pending => {}
        }
        give_back(buffer);
        if polled.is_pending() && self.unflushed {
            // Nothing more comes for now: what a stream with a buffer of its own still has must go.
            ready!(Pin::new(to).poll_flush(cx))?;
            self.unflushed = false;
        }
        polled
    }

    /// Writes what is held, and gives the buffer back.
    fn empty(
        &mut self,
        to: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(held) = &self.held else {
            return Poll::Ready(Ok(()));
        };
        while self.begins < self.ends {
            let written = ready!(Pin::new(&mut *to).poll_write(cx, &held[self.begins..self.ends]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.begins += written;
            self.passed += written as u64;
            self.unflushed = true;
        }
        self.held.take().into_iter().for_each(give_back);
        Poll::Ready(Ok(()))
    }
}

fn buffer() -> Box<[u8]> {
    vec![0; BUFFER].into_boxed_slice()
}

fn borrow() -> Box<[u8]> {
    let spare = SPARE.with_borrow_mut(Vec::pop);
    spare.unwrap_or_else(buffer)
}

fn give_back(buffer: Box<[u8]>) {
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < SPARES {
            spare.push(buffer);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    fn poll(
        passing: &mut Passing,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<u64> {
        let mut cx = Context::from_waker(Waker::noop());
        passing.poll(from, to, &mut cx).map(|r| r.expect("streams"))
    }

    #[tokio::test]
    async fn an_idle_direction_holds_no_buffer_and_one_whose_reader_is_slow_does() {
        let (mut sender, mut from) = duplex(BUFFER);
        let (mut to, mut receiver) = duplex(4);
        let mut passing = Passing::default();
        assert!(poll(&mut passing, &mut from, &mut to).is_pending());
        assert!(passing.held.is_none());

        sender.write_all(b"123456").await.expect("room");
        assert!(poll(&mut passing, &mut from, &mut to).is_pending());
        assert!(passing.held.is_some());

        let mut all = [0; 6];
        receiver.read_exact(&mut all[..4]).await.expect("bytes");
        assert!(poll(&mut passing, &mut from, &mut to).is_pending());
        assert!(passing.held.is_none());
        receiver.read_exact(&mut all[4..]).await.expect("bytes");
        assert_eq!(&all, b"123456");
    }

    #[tokio::test]
    async fn the_end_is_passed_on_after_the_last_byte_and_the_count_is_of_all() {
        let (mut sender, mut from) = duplex(2 * BUFFER);
        let (mut to, mut receiver) = duplex(1000);
        let sent: Vec<u8> = (0..BUFFER + 5).map(|n| n as u8).collect();
        sender.write_all(&sent).await.expect("room");
        drop(sender);
        let mut passing = Passing::default();
        let (mut received, mut count) = (Vec::new(), 0);
        let passed = std::future::poll_fn(|cx| passing.poll(&mut from, &mut to, cx));
        let reading = receiver.read_to_end(&mut received);
        let (passed, read) = tokio::join!(passed, reading);
        count += passed.expect("streams");
        assert_eq!(count, sent.len() as u64);
        assert_eq!(read.expect("a stream"), sent.len());
        assert_eq!(received, sent);
        assert_eq!(poll(&mut passing, &mut from, &mut to), Poll::Ready(count));
    }
}
