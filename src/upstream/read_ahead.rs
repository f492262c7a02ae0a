//! A connection that is read ahead of TLS, while much comes.
//!
//! TLS asks for a record at a time. For a large body that is a system call for each 16 KiB, and the origin is woken for
//! each to send as much again.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Buf as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http1::Inbox;

/// When so much has come without a break, there is likely to be more.
const RUN: usize = 32 * 1024;
/// What is read ahead at first, and at most. It grows as the reads fill it.
const AT_FIRST: usize = 64 * 1024;
const AT_MOST: usize = 512 * 1024;

/// The connection. As long as little comes it is read as it is asked to be, without a buffer.
#[derive(Debug)]
pub struct ReadAhead<S> {
    stream: S,
    ahead: Inbox,
    /// So much has come in reads that were all filled.
    run: usize,
}

impl<S> ReadAhead<S> {
    /// On `stream`.
    pub fn new(stream: S) -> Self {
        ReadAhead {
            stream,
            ahead: Inbox::with_room(AT_FIRST, AT_MOST),
            run: 0,
        }
    }

    /// Lets go of the memory, unless something is in it.
    pub fn rest(&mut self) {
        self.run = 0;
        if self.ahead.bytes.is_empty() {
            self.ahead = Inbox::with_room(AT_FIRST, AT_MOST);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let ReadAhead { stream, ahead, run } = &mut *self;
        if ahead.bytes.is_empty() {
            if *run < RUN {
                let (before, room) = (buf.filled().len(), buf.remaining());
                ready!(Pin::new(stream).poll_read(cx, buf))?;
                let read = buf.filled().len() - before;
                *run = if read == room { *run + read } else { 0 };
                return Poll::Ready(Ok(()));
            }
            ready!(ahead.poll_fill(stream, cx))?;
        }
        let length = ahead.bytes.len().min(buf.remaining());
        buf.put_slice(&ahead.bytes[..length]);
        ahead.bytes.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use proptest::{collection::vec, prelude::*};
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// Gives what it has in pieces of these lengths, none at 0, and then ends or breaks.
    struct Pieces {
        bytes: Vec<u8>,
        lengths: Vec<usize>,
        breaks: bool,
        reads: usize,
    }

    impl AsyncRead for Pieces {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.reads += 1;
            let piece = match self.lengths.pop() {
                Some(0) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(piece) => piece,
                None => usize::MAX,
            };
            let length = piece.min(self.bytes.len()).min(buf.remaining());
            buf.put_slice(&self.bytes[..length]);
            self.bytes.drain(..length);
            if length == 0 && std::mem::take(&mut self.breaks) {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            Poll::Ready(Ok(()))
        }
    }

    fn stream(length: usize, lengths: Vec<usize>, breaks: bool) -> ReadAhead<Pieces> {
        ReadAhead::new(Pieces {
            bytes: (0..length).map(|i| (i % 251) as u8).collect(),
            lengths,
            breaks,
            reads: 0,
        })
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_came_and_how_it_ended(
            length in 0..600_000_usize,
            lengths in vec(prop_oneof![Just(0), 1..70_000_usize], 0..40),
            asked in 1..20_000_usize,
            breaks: bool,
        ) {
            let mut stream = stream(length, lengths, breaks);
            let whole = stream.stream.bytes.clone();
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let (read, ended) = runtime.block_on(async {
                let (mut read, mut piece) = (Vec::new(), vec![0; asked]);
                loop {
                    match stream.read(&mut piece).await {
                        Ok(0) => break (read, Ok(())),
                        Ok(n) => read.extend_from_slice(&piece[..n]),
                        Err(e) => break (read, Err(e.kind())),
                    }
                }
            });
            prop_assert!(read == whole);
            prop_assert_eq!(ended, if breaks { Err(io::ErrorKind::ConnectionReset) } else { Ok(()) });
        }
    }

    /// Reads `length` bytes in pieces as TLS does, and says how often the connection was asked.
    fn reads_for(stream: &mut ReadAhead<Pieces>, length: usize) -> usize {
        let (mut cx, before) = (Context::from_waker(Waker::noop()), stream.stream.reads);
        let mut left = length;
        while left > 0 {
            let mut piece = vec![0; left.min(16 * 1024)];
            let mut buf = ReadBuf::new(&mut piece);
            let read = Pin::new(&mut *stream).poll_read(&mut cx, &mut buf);
            assert!(matches!(read, Poll::Ready(Ok(()))));
            left -= buf.filled().len();
        }
        stream.stream.reads - before
    }

    #[test]
    fn a_large_body_is_read_in_large_pieces_and_its_memory_is_let_go() {
        let mut stream = stream(8 * 1024 * 1024, Vec::new(), false);
        let reads = reads_for(&mut stream, 4 * 1024 * 1024);
        assert!((8..16).contains(&reads), "{reads}");
        assert!(stream.ahead.bytes.capacity() >= 256 * 1024);
        let ahead = stream.ahead.bytes.len();
        assert_eq!(reads_for(&mut stream, ahead), 0);
        stream.rest();
        assert_eq!(stream.ahead.bytes.capacity(), 0);
    }

    #[test]
    fn small_answers_are_read_without_a_buffer() {
        let mut stream = stream(1024 * 1024, vec![1_000; 1_000], false);
        assert_eq!(reads_for(&mut stream, 1_000_000), 1_000);
        assert_eq!(stream.ahead.bytes.capacity(), 0);
    }
}
