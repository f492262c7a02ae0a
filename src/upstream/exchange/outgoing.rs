//! The body of a request on its way to an origin: read ahead while the request waits, counted as it goes.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use super::Stall;
use crate::{downstream::incoming::Incoming, error::Error, headers, http1::head::Spelling};

/// How much of a body is read while its request waits.
const AHEAD: usize = 64 * 1024;

/// The body of a request on its way to an origin, its bytes counted as they go.
#[derive(Debug)]
pub struct Outgoing {
    /// `None` for a message that is sent again: it has no body.
    incoming: Option<Incoming>,
    spelling: Spelling,
    /// What was read while the request waited.
    ahead: BytesMut,
    trailers: Option<HeaderMap>,
    pub(super) sent: Arc<AtomicU64>,
    expected: bool,
    stall: Stall,
}

impl Outgoing {
    /// The body that a client sends; the bytes handed on are added to `sent`. With `expected`, the client waits for a 100
    /// before it sends any (RFC 9110 section 10.1.1): asking for the first frame makes the codec send one.
    pub fn new(mut incoming: Incoming, sent: Arc<AtomicU64>, expected: bool) -> Self {
        Outgoing {
            expected,
            spelling: incoming.take_spelling(),
            incoming: Some(incoming),
            ahead: BytesMut::new(),
            trailers: None,
            sent,
            stall: Stall::default(),
        }
    }

    /// The body of the same message sent once more, if it has none.
    pub fn repeated(&self) -> Option<Self> {
        self.is_end_stream().then(|| Outgoing {
            incoming: None,
            spelling: self.spelling.clone(),
            ahead: BytesMut::new(),
            trailers: None,
            sent: self.sent.clone(),
            expected: false,
            stall: Stall::default(),
        })
    }

    /// How the fields of the request's head were spelled.
    pub(super) fn spelling(&self) -> &Spelling {
        &self.spelling
    }

    /// Whether the client waits for leave to send it.
    pub fn is_expected(&self) -> bool {
        self.expected
    }

    /// Reads up to 64 KiB while the request waits, so that the end of a client that leaves is not hidden behind
    /// them. Resolves only if the body breaks off.
    pub async fn read_ahead(&mut self) -> Error {
        std::future::poll_fn(|cx| {
            while self.ahead.len() < AHEAD {
                let Some(incoming) = &mut self.incoming else {
                    break;
                };
                match ready!(Pin::new(incoming).poll_frame(cx)) {
                    // Copied: a piece, however small, would hold the buffer that it was read into.
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(data) => self.ahead.extend_from_slice(&data),
                        Err(frame) => self.trailers = frame.into_trailers().ok(),
                    },
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
        let ahead = match (this.ahead.is_empty(), this.trailers.take()) {
            (true, trailers) => trailers.map(Frame::trailers),
            (false, trailers) => {
                this.trailers = trailers;
                Some(Frame::data(std::mem::take(&mut this.ahead).freeze()))
            }
        };
        let mut frame = match ahead {
            Some(frame) => Some(Ok(frame)),
            None => match this.incoming.as_mut().map(|i| Pin::new(i).poll_frame(cx)) {
                None => None,
                Some(Poll::Ready(frame)) => frame,
                Some(Poll::Pending) => {
                    ready!(this.stall.poll(BODY_DEADLINE, cx));
                    Some(Err(Error::BodyTimeout))
                }
            },
        };
        this.stall.moved = true;
        if let Some(Ok(frame)) = &mut frame
            && let Some(trailers) = frame.trailers_mut()
        {
            headers::strip_trailers(trailers);
        }
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
        self.ahead.is_empty()
            && self.trailers.is_none()
            && self.incoming.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let none = || SizeHint::with_exact(0);
        let rest = self.incoming.as_ref().map_or_else(none, Body::size_hint);
        let ahead = self.ahead.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(ahead));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(ahead));
        }
        hint
    }
}

/// Why a request's body ends before its end.
pub const BODY_BROKEN: Error =
    Error::Malformed("the request's body ended early or is malformed; send all of it as framed");

/// A client that has begun a body and sends nothing more of it for this long holds the origin's connection, and a place
/// among those under way, for nothing.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
