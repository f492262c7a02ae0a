//! Passing bytes both ways, with what either side sent too early put back in front.

mod passing;

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use crate::{downstream::socket::Socket, proxy::relay::passing::Passing, record::Record};

/// A tunnel in which nothing moves for this long, either way, has been left by somebody. It is looked at from time to
/// time only.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// No tunnel is older than this, whatever moves in it: who was let in must ask again from time to time.
const LIFE_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// Passes bytes until both sides have ended; one side's end is passed on as such, and the other goes on. Ends too when
/// nothing moves for long, and when the rules no longer allow the tunnel, which `outlived` tells.
pub async fn relay<C, O>(
    client: Early<C>,
    mut origin: O,
    mut record: Option<Box<Record>>,
    outlived: impl Future<Output = ()>,
) where
    C: AsyncRead + AsyncWrite + Unpin,
    O: AsyncRead + AsyncWrite + Unpin,
{
    let (mut client, moved) = (client, Arc::<AtomicU64>::default());
    client.moved = Some(moved.clone());
    let (mut sending, mut receiving) = (Passing::default(), Passing::default());
    let both = std::future::poll_fn(|cx| {
        let sent = sending.poll(&mut client, &mut origin, cx)?;
        let received = receiving.poll(&mut origin, &mut client, cx)?;
        match (sent, received) {
            (Poll::Ready(sent), Poll::Ready(received)) => Poll::Ready(Ok((sent, received))),
            _ => Poll::Pending,
        }
    });
    let abandoned = async {
        let opened = Instant::now();
        let (mut before, mut since) = (0, opened);
        while since.elapsed() < IDLE_DEADLINE && opened.elapsed() < LIFE_DEADLINE {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = moved.load(Relaxed);
            if now != before {
                (before, since) = (now, Instant::now());
            }
        }
    };
    let ended: Option<(u64, u64)> = tokio::select! {
        ended = both => io::Result::ok(ended),
        () = abandoned => None,
        () = outlived => {
            record.iter_mut().for_each(|r| r.broke_off("rules_changed"));
            None
        }
    };
    // A reset by either side is an ordinary end of a tunnel.
    if let (Some((sent, received)), Some(mut record)) = (ended, record) {
        record.sent().store(sent, Relaxed);
        record.received(received);
        record.complete();
    }
}

/// A stream with what was read of it too early put back in front.
#[derive(Debug)]
pub struct Early<S> {
    early: Bytes,
    stream: S,
    /// Where reads and writes that got through are counted, once somebody wants to know.
    moved: Option<Arc<AtomicU64>>,
}

impl<S> Early<S> {
    /// `early` comes before what `stream` has to give.
    pub fn new(early: Bytes, stream: S) -> Self {
        Early {
            early,
            stream,
            moved: None,
        }
    }

    fn count<T>(&self, polled: &Poll<T>) {
        if let (true, Some(moved)) = (polled.is_ready(), &self.moved) {
            moved.fetch_add(1, Relaxed);
        }
    }
}

impl Early<Socket> {
    /// The first byte, which stays to be read; `None` if there is none in time.
    pub async fn first_byte(&self, until: Instant) -> Option<u8> {
        if let Some(first) = self.early.first() {
            return Some(*first);
        }
        let first = tokio::time::timeout_at(until, self.stream.first_byte()).await;
        first.ok()?.ok()?
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Early<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.early.is_empty() {
            let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
            self.count(&polled);
            return polled;
        }
        let n = self.early.len().min(buf.remaining());
        buf.put_slice(&self.early[..n]);
        self.early.advance(n);
        if self.early.is_empty() {
            // Lets the buffer go that these bytes were a part of.
            self.early = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Early<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.count(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.count(&polled);
        polled
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
