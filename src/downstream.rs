//! Serves HTTP/1.1 on one byte stream: a client's connection, or the inside of an intercepted tunnel.
//!
//! The codec is hyper's. What is added here is time: a connection that sends nothing, sends its head too slowly, or
//! idles too long is ended, and one that is drained announces it with its last answer. What is added below the codec
//! is suspicion: see [`framing`].

pub mod framing;
mod rarely;
pub mod socket;
pub mod watched;

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header::CONNECTION};
use hyper::{
    server::conn::http1::{self, Parts},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::{Instant, sleep, timeout},
};

use crate::{
    downstream::{
        rarely::Rarely,
        watched::{Phase, Watch, Watched},
    },
    drain::Signal,
    proxy::Downstream,
};

/// A request head must be complete this long after its first byte, and the first byte of all after the connection.
pub const HEAD_DEADLINE: Duration = Duration::from_secs(10);
/// A kept-alive connection may wait this long for its next request: longer than any client keeps its own.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// A connection without a request for this long lets go of the codec and its buffers until the next comes.
const DOZE_AFTER: Duration = Duration::from_millis(100);

/// A client that takes none of its answer for this long is given up.
const BLOCKED_DEADLINE: Duration = Duration::from_secs(60);
/// A drain leaves a connection on which nothing is being answered this long: a request may be on its way, and its answer
/// announces the end, while the codec would end the connection under it.
const LAST_REQUEST: Duration = Duration::from_secs(1);
/// How often such a connection is looked at.
const LOOK_FOR_LAST: Duration = Duration::from_millis(10);
/// How often a client is looked for whose bytes are not being read.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A connection that we close is read on for this long, and for so many reads, so that the peer gets our last answer.
const LINGER_DEADLINE: Duration = Duration::from_secs(2);
const LINGER_READS: usize = 256;

/// What a stream that is not HTTP is told.
pub const BAD_REQUEST: &[u8] = b"HTTP/1.1 400 Bad Request\r\nproxy-status: paceline; error=http_request_error\r\n\
    content-type: text/plain\r\ncontent-length: 42\r\nconnection: close\r\n\r\npaceline: send valid HTTP/1.1, or TLS 1.2\n";

/// What a client is told whose request head does not come to an end.
const TOO_SLOW: &[u8] = b"HTTP/1.1 408 Request Timeout\r\nproxy-status: paceline; error=http_request_error\r\n\
    content-type: text/plain\r\ncontent-length: 49\r\nconnection: close\r\n\r\npaceline: the request head took too long to come\n";

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
    let watch = Watch::new();
    let leaving = Arc::new(AtomicBool::new(false));
    let service = {
        let (downstream, watch) = (downstream.clone(), watch.clone());
        let leaving = leaving.clone();
        service_fn(move |request| {
            let (busy, verdict) = watch.begin();
            let answer = downstream.clone().serve(request, verdict);
            let (downstream, watch) = (downstream.clone(), watch.clone());
            let leaving = leaving.clone();
            async move {
                let mut answer = answer.await?;
                if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
                    watch.switched();
                } else if leaving.load(Relaxed) && !downstream.has_promise() {
                    let close = HeaderValue::from_static("close");
                    answer.headers_mut().insert(CONNECTION, close);
                }
                answer.body_mut().keep(busy);
                Ok::<_, Infallible>(answer)
            }
        })
    };
    let codec = |stream, service| {
        let connection = http1::Builder::new()
            // Else it reads on while a request waits, to see the client leave, with 8 KiB for each; the socket tells as well.
            .half_close(true)
            .auto_date_header(false)
            .preserve_header_case(true)
            .max_headers(framing::FIELD_LIMIT)
            .max_header_size(framing::HEAD_LIMIT)
            .header_read_timeout(None)
            .serve_connection(stream, service);
        Box::new(connection)
    };
    let stream = TokioIo::new(Watched::new(stream, watch.clone()));
    let mut connection = codec(stream, service);
    let (mut seen, mut since) = ((Phase::New, 0, None), Instant::now());
    let (mut draining, mut looking) = (false, false);
    let (mut resting, mut rested) = (false, 0);
    // The inside of a tunnel ends, once it is idle, when the rules no longer allow what it was opened for.
    let outlived = async {
        match downstream.opened() {
            Some(tunnel) => {
                let proxy = &downstream.proxy;
                proxy.in_force.outlived(&tunnel, &proxy.upstream).await;
            }
            None => std::future::pending().await,
        }
    };
    let outlived = std::pin::pin!(outlived);
    let mut outlived = Rarely::new(outlived);
    // Looked at from time to time only: setting a timer anew for each request would cost more than it is worth.
    let mut round = std::pin::pin!(sleep(HEAD_DEADLINE));
    // Runs only while nothing is answered, so it is set anew a few times a second at the most.
    let mut doze = std::pin::pin!(sleep(Duration::ZERO));
    let leave = std::pin::pin!(time_to_leave(&mut drain, &watch, &leaving));
    let mut leave = Rarely::new(leave);
    loop {
        let step = std::future::poll_fn(|cx| match Pin::new(&mut *connection).poll(cx) {
            Poll::Ready(end) => Poll::Ready(Step::Ended(end)),
            Poll::Pending if !looking && watch.is_inattentive() => {
                match downstream.socket.poll_first_byte(cx) {
                    Poll::Ready(Ok(Some(_))) => Poll::Ready(Step::Look),
                    Poll::Ready(Ok(None) | Err(_)) => Poll::Ready(Step::Left),
                    Poll::Pending => Poll::Pending,
                }
            }
            Poll::Pending if !resting && watch.is_at_rest() => Poll::Ready(Step::Rest),
            Poll::Pending if watch.phase() == Phase::Head => {
                let head = (Phase::Head, watch.served());
                if head == (seen.0, seen.1) {
                    Poll::Pending
                } else {
                    Poll::Ready(Step::Head(head.1))
                }
            }
            Poll::Pending => Poll::Pending,
        });
        tokio::select! {
            biased;
            step = step => match step {
                Step::Ended(end) => {
                    if end.is_err_and(|e| e.is_user()) {
                        // An answer broke off. An orderly end would make a whole one of it for clients that read to
                        // the end of the stream.
                        downstream.socket.reset_when_closed();
                        return None;
                    }
                    let parts = connection.into_parts();
                    let (stream, early) = parts.io.into_inner().into_parts(parts.read_buf);
                    if downstream.has_promise() {
                        return Some(Rest { stream, early });
                    }
                    linger(stream).await;
                    return None;
                }
                // With the connection go the requests on it: what waits is not sent, what is under way is broken off.
                Step::Left => return None,
                Step::Look => looking = true,
                Step::Rest => {
                    (resting, rested) = (true, watch.served());
                    doze.as_mut().reset(Instant::now() + DOZE_AFTER);
                }
                // A head that does not come whole has a time of its own, from its first byte.
                Step::Head(number) => {
                    (seen, since) = ((Phase::Head, number, None), Instant::now());
                    round.as_mut().reset(since + HEAD_DEADLINE);
                }
            },
            () = &mut leave, if !draining => {
                draining = true;
                Pin::new(&mut *connection).graceful_shutdown();
            }
            () = &mut outlived, if !draining => {
                draining = true;
                Pin::new(&mut *connection).graceful_shutdown();
            }
            () = sleep(LOOK_EVERY), if looking => {
                looking = watch.is_inattentive();
                if looking && downstream.socket.has_left() {
                    return None;
                }
            }
            () = doze.as_mut(), if resting => {
                resting = false;
                if draining || !watch.is_at_rest() || watch.served() != rested {
                    continue;
                }
                // The codec's buffers are most of what a connection takes, and there are many that rest. What the codec
                // knows beyond one request is in the stream below it.
                let Parts { io, service, .. } = unboxed(connection).into_parts();
                let patience = match watch.phase() {
                    Phase::New => HEAD_DEADLINE,
                    _ => IDLE_DEADLINE,
                };
                let woken = tokio::select! {
                    biased;
                    _ = downstream.socket.first_byte() => Woken::Spoken,
                    () = &mut leave => Woken::Leaving,
                    () = &mut outlived => Woken::Leaving,
                    () = sleep(patience) => Woken::Forgotten,
                };
                connection = codec(io, service);
                round.as_mut().reset(Instant::now() + HEAD_DEADLINE);
                match woken {
                    Woken::Spoken => {}
                    Woken::Leaving => {
                        draining = true;
                        Pin::new(&mut *connection).graceful_shutdown();
                    }
                    Woken::Forgotten => return None,
                }
            }
            () = round.as_mut() => {
                round.as_mut().reset(Instant::now() + HEAD_DEADLINE);
                let now = (watch.phase(), watch.served(), watch.blocked());
                let patience = match now {
                    (Phase::New | Phase::Head, ..) => Duration::ZERO,
                    // A client that takes nothing of its answer holds the origin's connection and a place among those
                    // under way.
                    (_, _, Some(_)) => BLOCKED_DEADLINE,
                    (Phase::Busy, ..) => Duration::MAX,
                    (Phase::Idle, ..) => IDLE_DEADLINE,
                };
                if now != seen {
                    (seen, since) = (now, Instant::now());
                } else if since.elapsed() >= patience {
                    // The same for a whole round, or for as long as such a state may last.
                    if now.0 == Phase::Head {
                        let parts = connection.into_parts();
                        let mut stream = parts.io.into_inner().into_parts(parts.read_buf).0;
                        let _ = timeout(LINGER_DEADLINE, stream.write_all(TOO_SLOW)).await;
                        linger(stream).await;
                    }
                    return None;
                }
            }
        }
    }
}

/// Out of its box, and the box is gone: moved out of in place, it would stay for as long as its variable.
#[allow(clippy::boxed_local, reason = "that it is boxed is the point")]
fn unboxed<T>(boxed: Box<T>) -> T {
    *boxed
}

/// Resolves when the codec may be told to finish.
async fn time_to_leave(drain: &mut Signal, watch: &Watch, leaving: &AtomicBool) {
    drain.started().await;
    leaving.store(true, Relaxed);
    let end = Instant::now() + LAST_REQUEST;
    while watch.phase() != Phase::Busy && Instant::now() < end {
        sleep(LOOK_FOR_LAST).await;
    }
}

/// What a poll of the connection came to.
enum Step {
    Ended(hyper::Result<()>),
    /// The client has gone away while its request was being answered.
    Left,
    /// There are bytes of the client that nobody reads, and its end may stand behind them.
    Look,
    /// Nothing is to be done until the client says something.
    Rest,
    /// A part of a head has come, behind so many requests.
    Head(u64),
}

/// What ends the rest of a connection.
enum Woken {
    /// The client has said something, or gone away.
    Spoken,
    /// It is time to go.
    Leaving,
    /// Nobody has said anything for long.
    Forgotten,
}

/// Says that we are done, then reads and forgets what the peer still sends, until it closes too. Closing with unread
/// bytes would make the kernel reset the connection, and the peer lose our last answer (RFC 9112 section 9.6).
async fn linger<I: AsyncRead + AsyncWrite + Unpin>(mut stream: I) {
    // The codec has done so already, but not after a CONNECT or an upgrade: it leaves the stream to its caller then.
    let _ = timeout(LINGER_DEADLINE, stream.shutdown()).await;
    // Not in the future: each connection would carry it from its beginning.
    let mut scrap = vec![0; 4096];
    let drained = async {
        for _ in 0..LINGER_READS {
            if !matches!(stream.read(&mut scrap).await, Ok(1..)) {
                return;
            }
        }
    };
    let _ = timeout(LINGER_DEADLINE, drained).await;
}
