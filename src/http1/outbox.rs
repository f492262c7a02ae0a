//! What is to be written: heads, and bodies in their framing.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName,
    header::{
        AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
        CONTENT_TYPE, HOST, MAX_FORWARDS, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING,
    },
};
use tokio::io::AsyncWrite;

/// A piece of a body up to this long is copied behind what is before it: two buffers cost a write more than that.
const COPIED: usize = 8 * 1024;
/// The memory that is kept for the next message.
const KEPT: usize = 16 * 1024;

/// Fields that frame a message or lead it somewhere come in its head or not at all (RFC 9110 section 6.5.1).
const FRAMING: [HeaderName; 12] = [
    AUTHORIZATION,
    CACHE_CONTROL,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_RANGE,
    CONTENT_TYPE,
    HOST,
    MAX_FORWARDS,
    SET_COOKIE,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
];

/// How a body is framed on its way out.
#[derive(Debug, Default)]
pub enum Encoder {
    /// As it is: its length has been said, or it ends with the connection.
    #[default]
    Plain,
    /// In chunks, and behind them those of the trailers that are named here.
    Chunked(Vec<HeaderName>),
}

impl Encoder {
    /// In chunks, with the trailers that `Trailer` announces (RFC 9110 section 6.6.2).
    pub fn chunked(fields: &HeaderMap) -> Self {
        let announced = fields.get_all(TRAILER).iter();
        let announced = announced.flat_map(|v| v.as_bytes().split(|b| *b == b','));
        let names = announced.filter_map(|n| HeaderName::from_bytes(n.trim_ascii()).ok());
        Encoder::Chunked(names.filter(|n| !FRAMING.contains(n)).collect())
    }
}

/// Bytes on their way out, in order: the first part, the second, and the end of a chunk.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Heads, sizes of chunks and small bodies.
    pub lead: BytesMut,
    body: Bytes,
    tail: &'static [u8],
    /// Some of it has been written since this was last looked at.
    moved: bool,
}

impl Outbox {
    /// Whether all has been handed to the stream.
    pub fn is_empty(&self) -> bool {
        self.lead.is_empty() && self.body.is_empty() && self.tail.is_empty()
    }

    /// Whether some was written since the last time that this was asked.
    pub fn has_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Whether another piece of a body may be put into it.
    pub fn has_room(&self) -> bool {
        self.body.is_empty() && self.tail.is_empty() && self.lead.len() < COPIED
    }

    /// Puts a piece of a body behind what is there; all that was there before it must have been written, but for the lead.
    pub fn data(&mut self, encoder: &Encoder, data: Bytes) {
        debug_assert!(self.body.is_empty() && self.tail.is_empty());
        // An empty chunk would be the end.
        if data.is_empty() {
            return;
        }
        let chunked = matches!(encoder, Encoder::Chunked(_));
        if chunked {
            self.size(data.len());
        }
        if data.len() <= COPIED {
            self.lead.extend_from_slice(&data);
            if chunked {
                self.lead.extend_from_slice(b"\r\n");
            }
        } else {
            self.body = data;
            if chunked {
                self.tail = b"\r\n";
            }
        }
    }

    fn size(&mut self, size: usize) {
        let mut digits = [0; 2 * size_of::<usize>()];
        let mut at = digits.len();
        let mut left = size;
        while at > 0 && (left > 0 || at == digits.len()) {
            at -= 1;
            digits[at] = b"0123456789abcdef"[left % 16];
            left /= 16;
        }
        self.lead.extend_from_slice(&digits[at..]);
        self.lead.extend_from_slice(b"\r\n");
    }

    /// Puts the end of a body behind it, with those of the trailers that were announced.
    pub fn end(&mut self, encoder: &Encoder, trailers: Option<&HeaderMap>) {
        let Encoder::Chunked(announced) = encoder else {
            return;
        };
        self.lead.extend_from_slice(b"0\r\n");
        for (name, value) in trailers.into_iter().flatten() {
            if announced.contains(name) {
                self.lead.reserve(name.as_str().len() + value.len() + 4);
                self.lead.put_slice(name.as_ref());
                self.lead.put_slice(b": ");
                self.lead.put_slice(value.as_bytes());
                self.lead.put_slice(b"\r\n");
            }
        }
        self.lead.extend_from_slice(b"\r\n");
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// The stream broke.
    pub fn poll_flush<I>(&mut self, stream: &mut I, cx: &mut Context<'_>) -> Poll<io::Result<()>>
    where
        I: AsyncWrite + Unpin,
    {
        while !self.is_empty() {
            let stream = Pin::new(&mut *stream);
            let written = if self.body.is_empty() && self.tail.is_empty() {
                ready!(stream.poll_write(cx, &self.lead))?
            } else {
                let parts = [&self.lead[..], &self.body[..], self.tail].map(IoSlice::new);
                ready!(stream.poll_write_vectored(cx, &parts))?
            };
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.moved = true;
            self.written(written);
        }
        // Of a large head nothing stays.
        if self.lead.capacity() > KEPT {
            self.lead = BytesMut::new();
        }
        Pin::new(stream).poll_flush(cx)
    }

    fn written(&mut self, written: usize) {
        let lead = written.min(self.lead.len());
        match lead == self.lead.len() {
            true => self.lead.clear(),
            false => self.lead.advance(lead),
        }
        let body = (written - lead).min(self.body.len());
        self.body.advance(body);
        if self.body.is_empty() {
            // Its memory may be read into again.
            self.body = Bytes::new();
        }
        self.tail = &self.tail[written - lead - body..];
    }

    /// Lets go of the memory, of which nothing is in use.
    pub fn rest(&mut self) {
        if self.is_empty() {
            self.lead = BytesMut::new();
        }
    }
}
