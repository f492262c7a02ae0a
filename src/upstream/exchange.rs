//! One request and its answer on one ready connection.
//!
//! The connection is polled by the task that waits for the answer and later by the one that reads its body, in turn
//! with them. So a request crosses from its client's socket to its origin's without a task switch, and dropping the
//! exchange at any point closes the connection: a half-used one is never seen again.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::http1::{Builder, Connection, SendRequest},
};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::{
    error::Error,
    headers,
    upstream::{Target, pool::Pool, stream::Stream},
};

/// The body of a request on its way to an origin, its bytes counted as they go.
#[derive(Debug)]
pub struct Outgoing {
    /// `None` for a message that is sent again: it has no body.
    incoming: Option<Incoming>,
    /// What was read while the request waited.
    ahead: VecDeque<Frame<Bytes>>,
    ahead_bytes: usize,
    sent: Arc<AtomicU64>,
    expected: bool,
    stall: Stall,
}

impl Outgoing {
    /// The body that a client sends; the bytes handed on are added to `sent`. With `expected`, the client waits for a 100
    /// before it sends any (RFC 9110 section 10.1.1): asking for the first frame makes the codec send one.
    pub fn new(incoming: Incoming, sent: Arc<AtomicU64>, expected: bool) -> Self {
        Outgoing {
            expected,
            incoming: Some(incoming),
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            sent,
            stall: Stall::default(),
        }
    }

    /// The body of the same message sent once more, if it has none.
    pub fn repeated(&self) -> Option<Self> {
        self.is_end_stream().then(|| Outgoing {
            incoming: None,
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            sent: self.sent.clone(),
            expected: false,
            stall: Stall::default(),
        })
    }

    /// Whether the client waits for leave to send it.
    pub fn is_expected(&self) -> bool {
        self.expected
    }

    /// Reads up to 64 KiB while the request waits, so that the end of a client that leaves is not hidden behind
    /// them. Resolves only if the body breaks off.
    pub async fn read_ahead(&mut self) -> hyper::Error {
        std::future::poll_fn(|cx| {
            while self.ahead_bytes < AHEAD {
                let Some(incoming) = &mut self.incoming else {
                    break;
                };
                match ready!(Pin::new(incoming).poll_frame(cx)) {
                    Some(Ok(frame)) => {
                        self.ahead_bytes += frame.data_ref().map_or(0, Bytes::len);
                        self.ahead.push_back(frame);
                    }
                    Some(Err(e)) => return Poll::Ready(e),
                    None => break,
                }
            }
            Poll::Pending
        })
        .await
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let mut frame = match this.ahead.pop_front() {
            Some(frame) => Some(Ok(frame)),
            None => match this.incoming.as_mut().map(|i| Pin::new(i).poll_frame(cx)) {
                None => None,
                Some(Poll::Ready(frame)) => frame.map(|frame| frame.map_err(|_| BODY_BROKEN)),
                Some(Poll::Pending) => {
                    ready!(this.stall.poll(BODY_DEADLINE, cx));
                    Some(Err(Error::BodyTimeout))
                }
            },
        };
        this.stall.moved = true;
        strip_trailers(&mut frame);
        if let Some(data) = frame
            .as_ref()
            .and_then(|f| f.as_ref().ok())
            .and_then(Frame::data_ref)
        {
            self.sent.fetch_add(data.len() as u64, Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let ahead: usize = self
            .ahead
            .iter()
            .filter_map(Frame::data_ref)
            .map(Bytes::len)
            .sum();
        let none = || SizeHint::with_exact(0);
        let rest = self.incoming.as_ref().map_or_else(none, Body::size_hint);
        let ahead = ahead as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(ahead));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(ahead));
        }
        hint
    }
}

/// Why a request's body ends before its end.
const BODY_BROKEN: Error =
    Error::Malformed("the request's body ended early or is malformed; send all of it as framed");

/// A client that has begun a body and sends nothing more of it for this long holds the origin's connection, and a place
/// among those under way, for nothing.
const BODY_DEADLINE: Duration = Duration::from_secs(30);

/// Notices that nothing moves.
#[derive(Debug, Default)]
struct Stall {
    /// Runs while nothing comes; most bodies come without it.
    until: Option<Pin<Box<Sleep>>>,
    /// Something came since it was last looked at.
    moved: bool,
}

impl Stall {
    /// To be asked when nothing comes: resolves once that has been so for `patience`.
    fn poll(&mut self, patience: Duration, cx: &mut Context<'_>) -> Poll<()> {
        let until = Instant::now() + patience;
        let sleep = self
            .until
            .get_or_insert_with(|| Box::pin(sleep_until(until)));
        if std::mem::take(&mut self.moved) {
            sleep.as_mut().reset(until);
        }
        sleep.as_mut().poll(cx)
    }
}

/// How much of a body is read while its request waits.
const AHEAD: usize = 64 * 1024;

/// Interim answers (1xx) that an origin may send before its answer; each is read and left out, which must have an end.
const INTERIM_LIMIT: usize = 16;

type Wire = Connection<TokioIo<Stream>, Outgoing>;

/// An origin that sends nothing for this long, while nothing is sent to it either, is given up.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// A connection that a request can be written to.
#[derive(Debug)]
pub struct Ready {
    sender: SendRequest<Outgoing>,
    wire: Box<Wire>,
    ended: bool,
    /// For the wait for an answer. It lives with the connection: to put a timer off is cheap, to set one up is not.
    patience: Pin<Box<Sleep>>,
    target: Target,
    pool: Arc<Pool>,
}

/// A request that was not answered.
#[derive(Debug)]
pub enum Unanswered {
    /// Nothing of it was written; here it is back.
    Unsent(Box<Request<Outgoing>>),
    /// Some of it may have been written: it must not be sent again.
    Failed(Error),
}

impl Ready {
    /// Speaks HTTP/1.1 on a stream.
    ///
    /// # Errors
    /// The stream is broken.
    pub async fn handshake(stream: Stream, target: Target, pool: Arc<Pool>) -> Result<Self, Error> {
        let made = Builder::new()
            .preserve_header_case(true)
            .max_headers(128)
            .max_buf_size(256 * 1024)
            .handshake(TokioIo::new(stream))
            .await;
        let (sender, wire) = made.map_err(|_| Error::Terminated)?;
        Ok(Ready {
            sender,
            wire: Box::new(wire),
            ended: false,
            patience: Box::pin(sleep_until(Instant::now() + ANSWER_DEADLINE)),
            target,
            pool,
        })
    }

    /// Whom it leads to.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Whether the origin has not closed it, as far as this machine knows.
    pub fn is_alive(&mut self) -> bool {
        self.poll_end(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    }

    /// Itself, if it is alive.
    pub fn if_alive(mut self) -> Option<Self> {
        self.is_alive().then_some(self)
    }

    /// Resolves when the connection ends.
    pub async fn ended(&mut self) {
        std::future::poll_fn(|cx| self.poll_end(cx)).await;
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.ended {
            // An error ends it as well as a close does; why does not matter to a request that has not been sent.
            let _ = ready!(Pin::new(&mut *self.wire).poll(cx));
            self.ended = true;
        }
        Poll::Ready(())
    }

    /// After an answer of 101: the bare stream, and what was already read of it.
    pub async fn into_stream(mut self) -> (Stream, Bytes) {
        self.ended().await;
        let parts = self.wire.into_parts();
        (parts.io.into_inner(), parts.read_buf)
    }

    /// Sends a request and waits for the head of its answer. As long as the request's body moves, the origin has time.
    ///
    /// # Errors
    /// Nothing of the request was written, and it comes back; or it may have been, and the connection is gone.
    pub async fn send(
        mut self,
        mut request: Request<Outgoing>,
    ) -> Result<(Response<Incoming>, Ready), Unanswered> {
        let interim = Arc::new(AtomicUsize::new(0));
        let seen = interim.clone();
        hyper::ext::on_informational(&mut request, move |_| {
            seen.fetch_add(1, Relaxed);
        });
        let sent = request.body().sent.clone();
        let mut before = sent.load(Relaxed);
        self.patience
            .as_mut()
            .reset(Instant::now() + ANSWER_DEADLINE);
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let outcome = std::future::poll_fn(|cx| {
            let _ = self.poll_end(cx);
            if interim.load(Relaxed) > INTERIM_LIMIT {
                return Poll::Ready(Err(Error::BadResponse));
            }
            if let Poll::Ready(outcome) = answer.as_mut().poll(cx) {
                return Poll::Ready(Ok(outcome));
            }
            while self.patience.as_mut().poll(cx).is_ready() {
                let now = sent.load(Relaxed);
                if now == before {
                    return Poll::Ready(Err(Error::ResponseTimeout));
                }
                before = now;
                self.patience
                    .as_mut()
                    .reset(Instant::now() + ANSWER_DEADLINE);
            }
            Poll::Pending
        })
        .await;
        let outcome = outcome.map_err(Unanswered::Failed)?;
        match outcome {
            Ok(response) => Ok((response, self)),
            Err(mut e) => Err(match e.take_message() {
                Some(request) => Unanswered::Unsent(Box::new(request)),
                None => Unanswered::Failed(of_hyper(e.error())),
            }),
        }
    }

    /// Back to the pool, if it can take another request.
    fn release(mut self) {
        // Lets the connection see that the exchange is over; then it says whether it is ready for the next.
        if self.is_alive() && self.sender.is_ready() {
            let pool = self.pool.clone();
            pool.put(self);
        }
    }
}

/// The body of an answer, and the connection it comes on.
#[derive(Debug)]
pub struct AnswerBody {
    incoming: Incoming,
    ready: Option<Ready>,
    stall: Stall,
}

impl AnswerBody {
    /// The body of the answer that came on `ready`.
    pub fn new(incoming: Incoming, ready: Ready) -> Self {
        AnswerBody {
            incoming,
            ready: Some(ready),
            stall: Stall::default(),
        }
    }
}

/// An origin that has begun an answer and sends nothing more of it for this long is given up.
const STALL_DEADLINE: Duration = Duration::from_secs(60);

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        if let Some(ready) = &mut this.ready {
            let _ = ready.poll_end(cx);
        }
        let Poll::Ready(mut frame) = Pin::new(&mut this.incoming).poll_frame(cx) else {
            ready!(this.stall.poll(STALL_DEADLINE, cx));
            this.ready = None;
            return Poll::Ready(Some(Err(Error::ResponseTimeout)));
        };
        strip_trailers(&mut frame);
        this.stall.moved = true;
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(Ok(frame)),
            Some(Err(e)) => {
                this.ready = None;
                Some(Err(of_hyper(&e)))
            }
            None => {
                if let Some(ready) = this.ready.take() {
                    ready.release();
                }
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        // A body of known length is not read past its last byte: its end is seen here.
        if self.incoming.is_end_stream()
            && let Some(ready) = self.ready.take()
        {
            ready.release();
        }
    }
}

fn strip_trailers<E>(frame: &mut Option<Result<Frame<Bytes>, E>>) {
    if let Some(Ok(frame)) = frame
        && let Some(trailers) = frame.trailers_mut()
    {
        headers::strip_trailers(trailers);
    }
}

fn of_hyper(e: &hyper::Error) -> Error {
    if e.is_user() {
        // The one thing of ours that can fail there is the client's body.
        let cause = std::error::Error::source(e).and_then(|cause| cause.downcast_ref());
        cause.copied().unwrap_or(BODY_BROKEN)
    } else if e.is_parse() || e.is_parse_status() {
        Error::BadResponse
    } else if e.is_timeout() {
        Error::ResponseTimeout
    } else {
        Error::Terminated
    }
}
