//! The body of an answer, and the connection it comes on, which goes back to the pool with its last byte.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::{Ready, Stall, Upload, Wire};
use crate::{
    error::Error,
    headers,
    http1::{
        body::{Decoder, Part},
        head::Spelling,
    },
    upstream::stream::Stream,
};

/// The body of an answer, and the connection it comes on.
#[derive(Debug)]
pub struct AnswerBody {
    pub(super) spelling: Spelling,
    pub(super) decoder: Decoder,
    /// Until the answer is over.
    pub(super) ready: Option<Ready>,
    pub(super) upload: Upload,
    /// Whether the connection can take another request afterwards.
    pub(super) kept: bool,
    pub(super) stall: Stall,
    /// How much of the request's body had been sent when this was last looked at.
    pub(super) sent: u64,
}

impl AnswerBody {
    /// How the fields of the answer's head were spelled. What is returned is needed no more than once.
    pub fn take_spelling(&mut self) -> Spelling {
        std::mem::take(&mut self.spelling)
    }

    /// After an answer of 101: the bare stream, and what was already read of it.
    pub fn into_stream(mut self) -> Option<(Stream, Bytes)> {
        let Ready(wire) = self.ready.take()?;
        let Wire { stream, inbox, .. } = *wire;
        Some((stream, Bytes::copy_from_slice(&inbox.bytes)))
    }

    /// Sends on what there is of the request's body, while nobody takes the answer's.
    pub fn poll_upload(&mut self, cx: &mut Context<'_>) {
        if let Some(Ready(wire)) = &mut self.ready {
            let Wire { stream, outbox, .. } = &mut **wire;
            if let Poll::Ready(Err(_)) = self.upload.poll(stream, outbox, cx) {
                // What the origin has of it is not whole, and must not pass for it.
                self.ready = None;
            }
        }
    }

    /// The whole answer is there: its connection is done with.
    fn over(&mut self) {
        if let Some(ready) = self.ready.take()
            && self.kept
            && self.upload.is_done()
        {
            ready.release();
        }
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, Error>> {
        let Some(Ready(wire)) = &mut self.ready else {
            return Poll::Ready(match self.decoder.is_over() {
                true => Ok(Part::End),
                false => Err(Error::Terminated),
            });
        };
        let Wire {
            stream,
            inbox,
            outbox,
            ..
        } = &mut **wire;
        if let Poll::Ready(Err(e)) = self.upload.poll(stream, outbox, cx) {
            return Poll::Ready(Err(e));
        }
        loop {
            let mut readable = inbox.bytes.len();
            match self.decoder.decode(&mut inbox.bytes, &mut readable) {
                Ok(Part::Later) => {}
                Ok(part) => return Poll::Ready(Ok(part)),
                Err(_) => return Poll::Ready(Err(Error::Terminated)),
            }
            match inbox.poll_fill(stream, cx) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(Ok(0)) if matches!(self.decoder, Decoder::UntilClose) => {
                    self.decoder = Decoder::Over;
                }
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(Error::Terminated)),
                Poll::Pending => {
                    // As long as the request's body moves, the origin may wait for the rest of it.
                    let sent = self.upload.sent();
                    self.stall.moved |= std::mem::replace(&mut self.sent, sent) != sent;
                    ready!(self.stall.poll(STALL_DEADLINE, cx));
                    return Poll::Ready(Err(Error::ResponseTimeout));
                }
            }
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
        let part = ready!(this.poll_part(cx));
        this.stall.moved = true;
        let frame = match part {
            Ok(Part::Data(data)) => Ok(Frame::data(data)),
            Ok(Part::Trailers(mut trailers)) => {
                headers::strip_trailers(&mut trailers);
                Ok(Frame::trailers(trailers))
            }
            Ok(Part::End | Part::Later) => {
                this.over();
                return Poll::Ready(None);
            }
            Err(e) => {
                this.ready = None;
                Err(e)
            }
        };
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.decoder.is_over()
    }

    fn size_hint(&self) -> SizeHint {
        self.decoder
            .left()
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        // A body of known length is not read past its last byte: its end is seen here.
        if self.decoder.is_over() {
            self.over();
        }
    }
}
