//! Serves HTTP/1.1 on one byte stream: a client's connection, or the inside of an intercepted tunnel.
//!
//! The codec is hyper's. What is added here is time: a connection that sends nothing, sends its head too slowly, or
//! idles too long is ended, and one that is drained announces it with its last answer.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::{Instant, sleep, timeout},
};

use crate::{drain::Signal, proxy::Downstream};

/// A request head must be complete this long after its first byte, and the first byte of all after the connection.
const HEAD_DEADLINE: Duration = Duration::from_secs(10);
/// A kept-alive connection may wait this long for its next request: longer than any client keeps its own.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// Request heads larger than this are refused.
const HEAD_LIMIT: usize = 64 * 1024;
/// Fields in a request head.
const FIELD_LIMIT: usize = 100;

/// A connection that we close is read on for this long, and for so many reads, so that the peer gets our last answer.
const LINGER_DEADLINE: Duration = Duration::from_secs(2);
const LINGER_READS: usize = 64;

/// What a stream that is not HTTP is told.
pub const BAD_REQUEST: &[u8] = b"HTTP/1.1 400 Bad Request\r\nproxy-status: paceline; error=http_request_error\r\n\
    content-type: text/plain\r\ncontent-length: 42\r\nconnection: close\r\n\r\npaceline: send valid HTTP/1.1, or TLS 1.2\n";

/// What is left of a connection when HTTP on it is over.
#[derive(Debug)]
pub struct Rest<I> {
    /// The stream.
    pub stream: I,
    /// Bytes of it that were read but are not HTTP.
    pub early: Bytes,
}

/// Serves requests until the connection ends, or until a CONNECT was answered with 200; then the stream comes back.
pub async fn serve<I>(stream: I, downstream: Arc<Downstream>, mut drain: Signal) -> Option<Rest<I>>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let phase = Arc::new(Phase(AtomicU8::new(NEW)));
    let service = {
        let (downstream, phase) = (downstream.clone(), phase.clone());
        service_fn(move |request| {
            let (answer, busy) = (downstream.clone().serve(request), Busy::begin(&phase));
            async move {
                let mut answer = answer.await?;
                answer.body_mut().keep(busy);
                Ok::<_, Infallible>(answer)
            }
        })
    };
    let watched = Watched {
        stream,
        phase: phase.clone(),
    };
    let mut connection = http1::Builder::new()
        .half_close(false)
        .auto_date_header(false)
        .preserve_header_case(true)
        .max_headers(FIELD_LIMIT)
        .max_header_size(HEAD_LIMIT)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(watched), service);
    let (mut seen, mut since) = (NEW, Instant::now());
    let mut draining = false;
    loop {
        tokio::select! {
            biased;
            ended = &mut connection => {
                let parts = connection.into_parts();
                let mut stream = parts.io.into_inner().stream;
                if downstream.has_promise() {
                    return Some(Rest { stream, early: parts.read_buf });
                }
                // The codec answers only some of the heads that it cannot read, and nobody else has seen them.
                if ended.is_err_and(|e| e.is_parse()) && phase.0.load(Relaxed) == HEAD {
                    let _ = timeout(LINGER_DEADLINE, stream.write_all(BAD_REQUEST)).await;
                    let _ = timeout(LINGER_DEADLINE, stream.shutdown()).await;
                }
                linger(stream).await;
                return None;
            }
            () = drain.started(), if !draining => {
                draining = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            // Looked at from time to time only: setting a timer anew for each request would cost more than it is worth.
            () = sleep(HEAD_DEADLINE) => {
                let now = phase.0.load(Relaxed);
                if now != seen || now == BUSY {
                    (seen, since) = (now, Instant::now());
                }
                let patience = if now == IDLE { IDLE_DEADLINE } else { Duration::ZERO };
                if now != BUSY && since.elapsed() >= patience {
                    return None;
                }
            }
        }
    }
}

/// Reads and forgets what the peer still sends, until it closes too. Closing with unread bytes would make the kernel
/// reset the connection, and the peer lose our last answer (RFC 9112 section 9.6).
async fn linger<I: AsyncRead + Unpin>(mut stream: I) {
    let mut scrap = [0; 4096];
    let drained = async {
        for _ in 0..LINGER_READS {
            if !matches!(stream.read(&mut scrap).await, Ok(1..)) {
                return;
            }
        }
    };
    let _ = timeout(LINGER_DEADLINE, drained).await;
}

/// Where a connection is in its life, as seen at its socket and at the service.
#[derive(Debug)]
struct Phase(AtomicU8);

/// Nothing has come yet.
const NEW: u8 = 0;
/// A part of a request head has come.
const HEAD: u8 = 1;
/// A request is being answered.
const BUSY: u8 = 2;
/// All requests so far have been answered.
const IDLE: u8 = 3;
/// The codec has answered a head that it could not read.
const SPOILT: u8 = 4;

/// Marks a connection as busy until it is dropped, which is when the last byte of the answer has been handed over.
#[derive(Debug)]
pub struct Busy(Arc<Phase>);

impl Busy {
    fn begin(phase: &Arc<Phase>) -> Self {
        phase.0.store(BUSY, Relaxed);
        Busy(phase.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.store(IDLE, Relaxed);
    }
}

/// The stream, noting when a head begins to arrive.
#[derive(Debug)]
struct Watched<I> {
    stream: I,
    phase: Arc<Phase>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before && matches!(self.phase.0.load(Relaxed), NEW | IDLE) {
            self.phase.0.store(HEAD, Relaxed);
        }
        polled
    }
}

impl<I> Watched<I> {
    /// Bytes that go out between a head's first byte and its request are the codec's own, or the rest of an answer.
    fn writing(&self) {
        let _ = self
            .phase
            .0
            .compare_exchange(HEAD, SPOILT, Relaxed, Relaxed);
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.writing();
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writing();
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
