//! The body of an answer: a line of our own, or the origin's bytes as they come.
//!
//! With the body travel the guards of the request: its place among those under way, and its record. They are dropped
//! with it, so that a request ends when its last byte has gone, however it ends.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{
    error::Error, http1::head::Spelling, pacing::lane::Departure, record::Record,
    upstream::exchange::AnswerBody,
};

/// A body.
#[derive(Debug)]
pub struct Answer {
    source: Source,
    /// The source said that it has no more; bodies of unknown length say it no other way.
    ended: bool,
    departure: Option<Departure>,
    record: Option<Box<Record>>,
}

#[derive(Debug)]
enum Source {
    Text(Option<Bytes>),
    Origin(AnswerBody),
}

impl Answer {
    /// A text of our own.
    pub fn text(text: impl Into<Bytes>) -> Self {
        let text = Some(text.into()).filter(|t: &Bytes| !t.is_empty());
        Answer {
            source: Source::Text(text),
            ended: false,
            departure: None,
            record: None,
        }
    }

    /// What the origin sends; `departure` ends with it.
    pub fn origin(body: AnswerBody, departure: Option<Departure>) -> Self {
        Answer {
            source: Source::Origin(body),
            ended: false,
            departure,
            record: None,
        }
    }

    /// How the fields of its head were spelled by the origin. What is returned is needed no more than once.
    pub fn take_spelling(&mut self) -> Spelling {
        match &mut self.source {
            Source::Text(_) => Spelling::default(),
            Source::Origin(body) => body.take_spelling(),
        }
    }

    /// Whether it is a text of our own.
    pub fn is_ours(&self) -> bool {
        matches!(self.source, Source::Text(_))
    }

    /// Sends on what there is of the request's body, while nobody takes this one.
    pub fn poll_upload(&mut self, cx: &mut Context<'_>) {
        if let Source::Origin(body) = &mut self.source {
            body.poll_upload(cx);
        }
    }

    /// All of it has been taken: lets go of what the next request can use, though the client may not have it yet.
    pub fn settle(&mut self) {
        self.ended |= self.is_end_stream();
        self.source = Source::Text(None);
        self.departure = None;
    }

    /// The record that ends with this body.
    pub fn record(&mut self, record: Box<Record>) {
        self.record = Some(record);
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let frame = match &mut this.source {
            Source::Text(text) => text.take().map(|t| Ok(Frame::data(t))),
            Source::Origin(body) => ready!(Pin::new(body).poll_frame(cx)),
        };
        match (&frame, &mut this.record) {
            (Some(Ok(frame)), Some(record)) => {
                record.received(frame.data_ref().map_or(0, |d| d.len() as u64))
            }
            (Some(Err(e)), Some(record)) => record.failed(e, None),
            _ => {}
        }
        this.ended |= frame.is_none();
        if !matches!(frame, Some(Ok(_))) {
            this.departure = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.ended
            || match &self.source {
                Source::Text(text) => text.is_none(),
                Source::Origin(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |t| t.len() as u64)),
            Source::Origin(body) => body.size_hint(),
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let whole = self.is_end_stream();
        if let (true, Some(record)) = (whole, &mut self.record) {
            record.complete();
        }
    }
}
