//! The body of a client's request, read from its connection as it is asked for.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{
    error::Error,
    http1::{body::Part, head::Spelling},
};

/// Where a body comes from.
pub trait Source: fmt::Debug + Send + Sync {
    /// The next part of the body of the request that is being answered.
    ///
    /// # Errors
    /// The connection broke, or the body is malformed.
    fn poll_part(&self, cx: &mut Context<'_>) -> Poll<Result<Part, Error>>;
}

/// A body.
#[derive(Debug, Default)]
pub struct Incoming {
    /// `None` where there is no body, or no more of it.
    source: Option<Arc<dyn Source>>,
    /// How much is to come, where that is known.
    left: Option<u64>,
    spelling: Spelling,
}

impl Incoming {
    /// No body; the head's fields were spelled like this.
    pub fn none(spelling: Spelling) -> Self {
        Incoming {
            source: None,
            left: None,
            spelling,
        }
    }

    /// So many bytes of `source`, where that is known.
    pub fn new(source: Arc<dyn Source>, left: Option<u64>, spelling: Spelling) -> Self {
        Incoming {
            source: Some(source),
            left,
            spelling,
        }
    }

    /// How the fields of the request's head were spelled. What is returned is needed no more than once.
    pub fn take_spelling(&mut self) -> Spelling {
        std::mem::take(&mut self.spelling)
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(source) = &self.source else {
            return Poll::Ready(None);
        };
        let frame = match ready!(source.poll_part(cx)) {
            Ok(Part::Data(data)) => {
                if let Some(left) = &mut self.left {
                    *left = left.saturating_sub(data.len() as u64);
                }
                Ok(Frame::data(data))
            }
            Ok(Part::Trailers(trailers)) => Ok(Frame::trailers(trailers)),
            Ok(Part::End | Part::Later) => {
                self.source = None;
                return Poll::Ready(None);
            }
            Err(e) => Err(e),
        };
        if frame.is_err() || self.left == Some(0) {
            self.source = None;
        }
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.source, self.left) {
            (None, _) => SizeHint::with_exact(0),
            (Some(_), Some(left)) => SizeHint::with_exact(left),
            (Some(_), None) => SizeHint::default(),
        }
    }
}
