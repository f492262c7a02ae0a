//! Serves HTTP/1.1 on one byte stream: a client's connection, or the inside of an intercepted tunnel.
//!
//! What is said there is read and written by [`connection`]. What is added here is time: a connection that sends nothing,
//! sends its head too slowly or idles too long is ended, one whose client has left is not answered, and one that is drained
//! announces it with its last answer. Of a client that takes nothing the kernel tells, as of one that has left.

pub mod connection;
pub mod framing;
pub mod incoming;
mod rarely;
pub mod socket;

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep, sleep, timeout},
};

use crate::{
    downstream::{
        connection::{Answering, Asked, BrokenOff, Connection},
        rarely::Rarely,
    },
    drain::Signal,
    proxy::Downstream,
};

/// A request head must be complete this long after its first byte, and the first byte of all after the connection.
pub const HEAD_DEADLINE: Duration = Duration::from_secs(10);
/// A kept-alive connection may wait this long for its next request: longer than any client keeps its own.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// A connection without a request for this long lets go of its buffers until the next comes.
const DOZE_AFTER: Duration = Duration::from_millis(100);
/// A drain leaves a connection on which nothing is being answered this long: a request may be on its way, and its answer
/// announces the end.
const LAST_REQUEST: Duration = Duration::from_secs(1);
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
    let connection = Connection::new(stream);
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
    let leave = async {
        tokio::select! {
            () = drain.started() => LAST_REQUEST,
            () = outlived => Duration::ZERO,
        }
    };
    let leave = std::pin::pin!(leave);
    let mut leave = Leave {
        signal: Rarely::new(leave),
        by: None,
    };
    let mut timer = std::pin::pin!(sleep(HEAD_DEADLINE));
    let mut first = true;
    loop {
        let patience = match std::mem::take(&mut first) {
            true => HEAD_DEADLINE,
            false => IDLE_DEADLINE,
        };
        let next = next(
            &connection,
            &downstream,
            patience,
            &mut leave,
            timer.as_mut(),
        );
        let Asked {
            request,
            verdict,
            form,
        } = match next.await {
            Ok(asked) => asked,
            Err(Over::Ended) => {
                linger(&connection).await;
                return None;
            }
            Err(Over::TooSlow) => {
                let _ = timeout(LINGER_DEADLINE, connection.say(TOO_SLOW)).await;
                linger(&connection).await;
                return None;
            }
            Err(Over::Forgotten) => return None,
        };
        // Boxed, so that a connection has room for a request only while it has one.
        let serving = Box::pin(downstream.clone().serve(request, verdict));
        let mut attention = Attention::new(&connection, &downstream);
        let answer = attention.to(&mut leave, serving).await.ok()?;
        let last = leave.by.is_some() && !downstream.has_promise();
        let mut answering = connection.begin(answer, form, last);
        let sending = Sending {
            connection: &connection,
            answering: &mut answering,
        };
        match attention.to(&mut leave, sending).await {
            Ok(Ok(())) => {}
            Ok(Err(BrokenOff)) => {
                // An orderly end would make a whole answer of it for clients that read to the end of the stream.
                downstream.socket.reset_when_closed();
                return None;
            }
            Err(Gone) => return None,
        }
        let kept = answering.kept;
        drop(answering);
        if downstream.has_promise() {
            return connection.into_rest();
        }
        if !kept || !connection.go_on() {
            linger(&connection).await;
            return None;
        }
    }
}

/// When it is time to go: the answer under way is the last, and where there is none, the connection ends soon.
struct Leave<F> {
    signal: Rarely<F>,
    by: Option<Instant>,
}

impl<F: Future<Output = Duration> + Unpin> Leave<F> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if self.by.is_none()
            && let Poll::Ready(grace) = Pin::new(&mut self.signal).poll(cx)
        {
            self.by = Some(Instant::now() + grace);
        }
    }
}

/// Why no request comes.
enum Over {
    /// The client has said that it will send nothing more, or it is time to go.
    Ended,
    /// The head did not come to its end.
    TooSlow,
    /// Nobody has said anything for long.
    Forgotten,
}

/// Waits for a request, its first byte for as long as `patience` says.
async fn next<I, F>(
    connection: &Connection<I>,
    downstream: &Downstream,
    patience: Duration,
    leave: &mut Leave<F>,
    mut timer: Pin<&mut Sleep>,
) -> Result<Asked, Over>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = Duration> + Unpin,
{
    let since = Instant::now();
    let mut until = since + patience;
    // A connection that rests has no buffers: they are most of what it takes, and there are many that rest.
    let mut doze = Some(since + DOZE_AFTER);
    let (mut begun, mut resting) = (false, false);
    std::future::poll_fn(|cx| {
        if resting {
            resting = downstream.socket.poll_first_byte(cx).is_pending();
        }
        if !resting {
            match connection.poll_asked(cx) {
                Poll::Ready(Some(asked)) => return Poll::Ready(Ok(asked)),
                Poll::Ready(None) => return Poll::Ready(Err(Over::Ended)),
                Poll::Pending => {}
            }
            if !begun && connection.has_begun() {
                // A head that does not come whole has a time of its own, from its first byte.
                begun = true;
                until = Instant::now() + HEAD_DEADLINE;
                doze = None;
            }
        }
        leave.poll(cx);
        loop {
            let mut due = doze.map_or(until, |doze| doze.min(until));
            due = leave.by.map_or(due, |by| by.min(due));
            if !poll_due(timer.as_mut(), due, cx) {
                return Poll::Pending;
            }
            let now = Instant::now();
            match leave.by {
                Some(by) if by <= now => return Poll::Ready(Err(Over::Ended)),
                _ if until <= now && begun => return Poll::Ready(Err(Over::TooSlow)),
                _ if until <= now => return Poll::Ready(Err(Over::Forgotten)),
                _ => {}
            }
            if doze.take_if(|doze| *doze <= now).is_some() {
                connection.rest();
                resting = downstream.socket.poll_first_byte(cx).is_pending();
                if !resting {
                    cx.waker().wake_by_ref();
                }
            }
        }
    })
    .await
}

/// Whether `due` has come; else who asks is woken then, or before. A timer that runs is moved only to an earlier time:
/// to set it anew with each request would cost more than a few wake-ups for nothing.
fn poll_due(mut timer: Pin<&mut Sleep>, due: Instant, cx: &mut Context<'_>) -> bool {
    if due < timer.deadline() {
        timer.as_mut().reset(due);
    }
    while timer.as_mut().poll(cx).is_ready() {
        if due <= Instant::now() {
            return true;
        }
        timer.as_mut().reset(due);
    }
    false
}

/// The client has left. With the connection go the requests on it: what waits is not sent, what is under way is broken
/// off.
struct Gone;

/// Sees a client leave whose request is being answered.
struct Attention<'c, I> {
    connection: &'c Connection<I>,
    downstream: &'c Downstream,
    /// There are bytes of the client that nobody reads, and its end may stand behind them.
    looking: Option<Pin<Box<Sleep>>>,
}

impl<'c, I: AsyncRead + AsyncWrite + Unpin + Send + 'static> Attention<'c, I> {
    fn new(connection: &'c Connection<I>, downstream: &'c Downstream) -> Self {
        Attention {
            connection,
            downstream,
            looking: None,
        }
    }

    /// Does `work` unless the client leaves before.
    async fn to<W, F>(&mut self, leave: &mut Leave<F>, mut work: W) -> Result<W::Output, Gone>
    where
        W: Future + Unpin,
        F: Future<Output = Duration> + Unpin,
    {
        std::future::poll_fn(|cx| {
            leave.poll(cx);
            if let Poll::Ready(done) = Pin::new(&mut work).poll(cx) {
                return Poll::Ready(Ok(done));
            }
            if self.has_left(cx) {
                return Poll::Ready(Err(Gone));
            }
            Poll::Pending
        })
        .await
    }

    fn has_left(&mut self, cx: &mut Context<'_>) -> bool {
        let socket = &self.downstream.socket;
        if self.connection.was_reading() {
            self.looking = None;
            return false;
        }
        if self.looking.is_none() {
            match socket.poll_first_byte(cx) {
                Poll::Pending => return false,
                Poll::Ready(Ok(None) | Err(_)) => return true,
                Poll::Ready(Ok(Some(_))) => {}
            }
        }
        let looking = self
            .looking
            .get_or_insert_with(|| Box::pin(sleep(LOOK_EVERY)));
        while looking.as_mut().poll(cx).is_ready() {
            if socket.has_left() {
                return true;
            }
            looking.as_mut().reset(Instant::now() + LOOK_EVERY);
        }
        false
    }
}

/// Sends an answer to its end.
struct Sending<'c, I> {
    connection: &'c Connection<I>,
    answering: &'c mut Answering,
}

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> Future for Sending<'_, I> {
    type Output = Result<(), BrokenOff>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let connection = self.connection;
        connection.poll_answer(self.answering, cx)
    }
}

/// Says that we are done, then reads and forgets what the peer still sends, until it closes too. Closing with unread
/// bytes would make the kernel reset the connection, and the peer lose our last answer (RFC 9112 section 9.6).
async fn linger<I: AsyncRead + AsyncWrite + Unpin + Send + 'static>(connection: &Connection<I>) {
    let _: Result<io::Result<()>, _> = timeout(LINGER_DEADLINE, connection.shutdown()).await;
    if connection.has_ended() {
        return;
    }
    // Not in the future: each connection would carry it from its beginning.
    let mut scrap = vec![0; 4096];
    let drained = async {
        for _ in 0..LINGER_READS {
            if !connection.forget(&mut scrap).await {
                return;
            }
        }
    };
    let _ = timeout(LINGER_DEADLINE, drained).await;
}
