//! The stream under the codec: it notes where the connection is in its life, and lets nothing pass that is not framed
//! as it must be.
//!
//! A head that is refused is replaced by one that nobody sent, so that the refusal takes the way of all answers: after
//! those to the requests before it, with a record, and with its reason. Only the replaced head is marked; see [`Watch`].

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    downstream::framing::{Fault, Framing},
    error::Error,
};

/// A head that comes in several pieces is read in pieces no larger than this.
const PIECE: usize = 16 * 1024;

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Nothing has come yet.
    New,
    /// A part of a request head has come.
    Head,
    /// A request is being answered.
    Busy,
    /// All requests so far have been answered.
    Idle,
}

/// What the stream and the service know of each other. One task uses it; the atomics only make it shareable.
#[derive(Debug)]
pub struct Watch {
    phase: AtomicU8,
    /// Heads that have been let pass, and requests that have been served.
    heads: AtomicU64,
    served: AtomicU64,
    fault: OnceLock<Error>,
    /// Whether the codec waits for the client's next byte, and so would see its end.
    reading: AtomicBool,
    /// Whether the last write did not get through.
    blocked: AtomicBool,
    /// Writes that did.
    taken: AtomicU64,
    /// Whether what was written may still lie in the stream's own buffer.
    unflushed: AtomicBool,
    switched: AtomicBool,
    /// Who waits for the end of an answer.
    waiting: Mutex<Option<Waker>>,
}

impl Watch {
    /// For a connection on which nothing has come yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Watch {
            phase: AtomicU8::new(Phase::New as u8),
            heads: AtomicU64::new(0),
            served: AtomicU64::new(0),
            fault: OnceLock::new(),
            reading: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            unflushed: AtomicBool::new(false),
            switched: AtomicBool::new(false),
            waiting: Mutex::new(None),
        })
    }

    /// Where the connection is.
    pub fn phase(&self) -> Phase {
        let all = [Phase::New, Phase::Head, Phase::Busy, Phase::Idle];
        all[usize::from(self.phase.load(Relaxed)) % all.len()]
    }

    /// How many requests have been read so far: a sign of life that a glance at the phase can miss.
    pub fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    /// Whether the client has yet to take bytes that are ready for it, and then how often it took some: one that is
    /// slow has nearly always some to take.
    pub fn blocked(&self) -> Option<u64> {
        let taken = || self.taken.load(Relaxed);
        self.blocked.load(Relaxed).then(taken)
    }

    /// A write to the client came to this.
    fn wrote<T>(&self, polled: &Poll<T>) {
        self.blocked.store(polled.is_pending(), Relaxed);
        if polled.is_ready() {
            self.taken.fetch_add(1, Relaxed);
        }
    }

    /// Whether a request is being answered and nobody would see its client leave.
    pub fn is_inattentive(&self) -> bool {
        self.phase() == Phase::Busy && !self.reading.load(Relaxed)
    }

    /// Whether all requests are answered to the last byte, and only the client's next byte is waited for. The codec holds
    /// nothing then that could not be had again.
    pub fn is_at_rest(&self) -> bool {
        matches!(self.phase(), Phase::New | Phase::Idle)
            && self.reading.load(Relaxed)
            && !self.blocked.load(Relaxed)
            && !self.unflushed.load(Relaxed)
            && self.served.load(Relaxed) == self.heads.load(Relaxed)
            && self.fault.get().is_none()
    }

    /// The codec has read a request: whether it may be served. The mark keeps the connection busy.
    pub fn begin(self: &Arc<Self>) -> (Busy, Result<(), Error>) {
        self.set(Phase::Busy);
        // Requests are counted on both sides of the codec. One that it made of something else than a head that was let
        // pass is the replaced one, or there is a fault in us or in it; neither may go anywhere.
        let verdict = if self.served.fetch_add(1, Relaxed) < self.heads.load(Relaxed) {
            Ok(())
        } else {
            Err(self
                .fault
                .get()
                .copied()
                .unwrap_or(Error::Malformed("the request cannot be read")))
        };
        (Busy(self.clone()), verdict)
    }

    /// The answer to the last request is that protocols are switched.
    pub fn switched(&self) {
        self.switched.store(true, Relaxed);
    }

    /// Whether the last request that was let pass has switched protocols, once that is known; else who asks is woken.
    fn has_switched(&self, cx: &Context<'_>) -> Option<bool> {
        if self.switched.load(Relaxed) {
            return Some(true);
        }
        let answered = self.served.load(Relaxed) >= self.heads.load(Relaxed);
        if answered && self.phase() != Phase::Busy {
            return Some(false);
        }
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        None
    }

    fn set(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
    }
}

/// Marks a connection as busy until it is dropped, which is when the last byte of the answer has been handed over.
#[derive(Debug)]
pub struct Busy(Arc<Watch>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(Phase::Idle);
        let waiting = self
            .0
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// A stream whose bytes are followed as they are read.
#[derive(Debug)]
pub struct Watched<I> {
    stream: I,
    watch: Arc<Watch>,
    framing: Framing,
    /// Bytes that were read but not handed on: some that may be, then the beginning of a head.
    held: Vec<u8>,
    passing: usize,
    fault: Option<Fault>,
}

impl<I> Watched<I> {
    /// Follows `stream` from its first byte.
    pub fn new(stream: I, watch: Arc<Watch>) -> Self {
        Watched {
            stream,
            watch,
            framing: Framing::default(),
            held: Vec::new(),
            passing: 0,
            fault: None,
        }
    }

    /// The stream, and what was read of it beyond `early`, what the codec has read beyond its last request.
    pub fn into_parts(self, early: Bytes) -> (I, Bytes) {
        // Copied even where nothing was held: the codec's bytes are a part of its whole buffer, and a tunnel would hold
        // that, mostly for no byte at all, until its client says something.
        (self.stream, [&early[..], &self.held].concat().into())
    }

    /// Notes what the follower made of bytes of which `passing` may be handed on.
    fn followed(&mut self, fault: Option<Fault>) {
        self.watch.heads.store(self.framing.heads(), Relaxed);
        if let Some(Fault::Refused(e) | Fault::Broken(e)) = fault {
            // The first fault is the last: nothing is followed after it.
            let _ = self.watch.fault.set(e);
            self.fault = fault;
        }
    }

    /// Follows what is held, all of it.
    fn follow_held(&mut self) {
        let (passing, fault) = self.framing.follow(&self.held);
        self.followed(fault);
        self.hold(passing);
    }

    /// Lets the first `passing` of the held bytes pass; after a fault nothing is left of the others.
    fn hold(&mut self, passing: usize) {
        self.passing = passing;
        if let Some(fault) = self.fault {
            let replacement = match fault {
                Fault::Refused(_) => replacement(&self.held[passing..]),
                Fault::Broken(_) => b"",
            };
            self.held.truncate(passing);
            self.held.extend_from_slice(replacement);
            self.passing = self.held.len();
        }
    }

    fn hand_on(&mut self, buf: &mut ReadBuf<'_>) {
        let length = self.passing.min(buf.remaining());
        buf.put_slice(&self.held[..length]);
        self.held.drain(..length);
        self.passing -= length;
        if self.held.is_empty() {
            // Most connections never need it again.
            self.held = Vec::new();
        }
    }

    /// The end of the stream, unless it comes amid a head: who only stopped sending still gets an answer. While a
    /// request is being answered it is a client that goes away.
    fn ended(&mut self) {
        let begun = self.held.iter().any(|b| !matches!(b, b'\r' | b'\n'));
        if begun && self.watch.phase() != Phase::Busy {
            let e = Error::Malformed("the connection ended within a request head; send all of it");
            self.followed(Some(Fault::Refused(e)));
            self.hold(0);
        }
    }
}

/// A head to stand for one that is refused. The method stays: it decides what form the answer has.
fn replacement(head: &[u8]) -> &'static [u8] {
    let head = head.trim_ascii_start();
    if head.starts_with(b"CONNECT ") {
        b"CONNECT * HTTP/1.1\r\n\r\n"
    } else if head.starts_with(b"HEAD ") {
        b"HEAD * HTTP/1.1\r\n\r\n"
    } else if head.starts_with(b"POST ") {
        b"POST * HTTP/1.1\r\n\r\n"
    } else {
        b"GET * HTTP/1.1\r\n\r\n"
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = self.read_on(cx, buf);
        self.watch.reading.store(polled.is_pending(), Relaxed);
        polled
    }
}

impl<I: AsyncRead + Unpin> Watched<I> {
    fn read_on(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self;
        loop {
            if this.passing > 0 {
                this.hand_on(buf);
                return Poll::Ready(Ok(()));
            }
            match this.fault {
                // The codec gives this error to whoever reads the body, and so the request is broken off upstream.
                Some(Fault::Broken(_)) => {
                    return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
                }
                // The answer comes by itself, and with it the end. To read an end of the stream before would lose it.
                Some(Fault::Refused(_)) => return Poll::Pending,
                None => {}
            }
            if this.framing.is_undecided() {
                match this.watch.has_switched(cx) {
                    Some(switched) => {
                        this.framing.decide(switched);
                        this.follow_held();
                    }
                    // Read all the same, to see a client that goes away; but hold no more than one that has not read
                    // the answer can have to say.
                    None if this.held.len() >= PIECE => return Poll::Pending,
                    None => {
                        let mut piece = buf.take(PIECE);
                        ready!(Pin::new(&mut this.stream).poll_read(cx, &mut piece))?;
                        if piece.filled().is_empty() {
                            return Poll::Ready(Ok(()));
                        }
                        this.held.extend_from_slice(piece.filled());
                    }
                }
            } else if this.held.is_empty() {
                // Read in place: most heads come whole, and bodies have nothing to wait for.
                let before = buf.filled().len();
                ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
                let fresh = &buf.filled()[before..];
                if fresh.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                this.arriving();
                let (passing, fault) = this.framing.follow(fresh);
                if passing < fresh.len() {
                    this.held.extend_from_slice(&fresh[passing..]);
                    buf.set_filled(before + passing);
                }
                this.followed(fault);
                this.hold(0);
                if passing > 0 {
                    return Poll::Ready(Ok(()));
                }
            } else {
                this.arriving();
                let mut piece = buf.take(PIECE);
                ready!(Pin::new(&mut this.stream).poll_read(cx, &mut piece))?;
                if piece.filled().is_empty() {
                    this.ended();
                    if this.fault.is_none() {
                        return Poll::Ready(Ok(()));
                    }
                    continue;
                }
                this.held.extend_from_slice(piece.filled());
                this.follow_held();
            }
        }
    }
}

impl<I> Watched<I> {
    fn arriving(&self) {
        if matches!(self.watch.phase(), Phase::New | Phase::Idle) {
            self.watch.set(Phase::Head);
        }
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch.wrote(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch.wrote(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch.unflushed.store(polled.is_pending(), Relaxed);
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    const SWITCH: &[u8] =
        b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";

    /// A stream on which a request to switch, and something behind it, has come; and been read, and is being answered.
    async fn asked(early: &[u8]) -> (Watched<tokio::io::DuplexStream>, Arc<Watch>, Busy) {
        let (mut client, server) = duplex(64 * 1024);
        client
            .write_all(&[SWITCH, early].concat())
            .await
            .expect("room");
        // Kept open: the end of the stream is the end of the client.
        tokio::spawn(async move {
            let _ = client.read(&mut [0]).await;
        });
        let watch = Watch::new();
        let mut watched = Watched::new(server, watch.clone());
        let mut head = vec![0; 1024];
        let length = watched.read(&mut head).await.expect("a stream");
        assert_eq!(&head[..length], SWITCH);
        let (busy, verdict) = watch.begin();
        assert_eq!(verdict, Ok(()));
        let mut buf = [0; 64];
        let mut buf = ReadBuf::new(&mut buf);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(
            Pin::new(&mut watched)
                .poll_read(&mut cx, &mut buf)
                .is_pending()
        );
        (watched, watch, busy)
    }

    #[tokio::test]
    async fn what_comes_before_a_switch_is_answered_is_left_as_it_came() {
        let (watched, watch, busy) = asked(b"\x81\0\n").await;
        watch.switched();
        drop(busy);
        assert_eq!(&watched.into_parts(Bytes::new()).1[..], b"\x81\0\n");
    }

    #[tokio::test]
    async fn what_comes_before_a_switch_is_refused_is_read_as_requests() {
        let next = b"GET /y HTTP/1.1\r\nHost: a\r\n\r\n";
        let (mut watched, watch, busy) = asked(next).await;
        let mut bytes = vec![0; 1024];
        let reading = watched.read(&mut bytes);
        let answered = async { drop(busy) };
        let (length, ()) = tokio::join!(reading, answered);
        assert_eq!(&bytes[..length.expect("a stream")], next);
        assert_eq!(watch.begin().1, Ok(()));

        let (mut watched, watch, busy) = asked(b"\x81\0\n").await;
        drop(busy);
        let length = watched.read(&mut bytes).await.expect("a stream");
        assert_eq!(&bytes[..length], b"GET * HTTP/1.1\r\n\r\n");
        assert!(watch.begin().1.is_err());
    }
}
