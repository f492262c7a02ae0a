//! What is to be written: heads, and bodies in their framing.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName,
    header::{
        AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
        CONTENT_TYPE, HOST, MAX_FORWARDS, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING,
    },
};
use tokio::io::AsyncWrite;

use crate::http1::head;

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
    /// The stream may have kept some of it to itself.
    unflushed: bool,
}

impl Outbox {
    /// Whether all has been handed to the stream.
    pub fn is_empty(&self) -> bool {
        self.lead.is_empty() && self.body.is_empty() && self.tail.is_empty()
    }

    /// Whether all is on its way: a stream that encrypts may take all and keep some until it is flushed.
    pub fn is_flushed(&self) -> bool {
        self.is_empty() && !self.unflushed
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
            digits[at] = b"0123456789ABCDEF"[left % 16];
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
                head::write_field(name.as_ref(), value.as_bytes(), &mut self.lead);
            }
        }
        self.lead.extend_from_slice(b"\r\n");
    }

    /// Writes all of it, and has it flushed. Unless it [is flushed](Self::is_flushed) this must be asked again.
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
            (self.moved, self.unflushed) = (true, true);
            self.written(written);
        }
        // Of a large head nothing stays.
        if self.lead.capacity() > KEPT {
            self.lead = BytesMut::new();
        }
        ready!(Pin::new(stream).poll_flush(cx))?;
        self.unflushed = false;
        Poll::Ready(Ok(()))
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

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http::HeaderValue;
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::http1::body::{Decoder, Part};

    /// Takes no more than so many bytes at a time, and every other time none.
    struct Narrow {
        taken: Vec<u8>,
        width: usize,
        busy: bool,
    }

    impl Narrow {
        fn new(width: usize) -> Self {
            Narrow {
                taken: Vec::new(),
                width,
                busy: false,
            }
        }
    }

    impl AsyncWrite for Narrow {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.busy = !self.busy;
            if self.busy {
                return Poll::Pending;
            }
            let length = bytes.len().min(self.width);
            self.taken.extend_from_slice(&bytes[..length]);
            Poll::Ready(Ok(length))
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            parts: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let all: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            self.poll_write(cx, &all)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn flush(outbox: &mut Outbox, stream: &mut Narrow) {
        let mut cx = Context::from_waker(Waker::noop());
        while !outbox.is_empty() {
            let _ = outbox.poll_flush(stream, &mut cx);
        }
    }

    #[test]
    fn only_announced_trailers_go_out_and_none_that_frames() {
        let mut head = HeaderMap::new();
        head.insert(TRAILER, HeaderValue::from_static("X-Sum, Content-Length"));
        let encoder = Encoder::chunked(&head);
        let mut trailers = HeaderMap::new();
        for name in ["x-sum", "content-length", "x-other"] {
            trailers.insert(HeaderName::from_static(name), HeaderValue::from_static("1"));
        }
        let (mut outbox, mut stream) = (Outbox::default(), Narrow::new(100));
        outbox.data(&encoder, Bytes::from_static(b"ab"));
        outbox.end(&encoder, Some(&trailers));
        flush(&mut outbox, &mut stream);
        assert_eq!(stream.taken, b"2\r\nab\r\n0\r\nx-sum: 1\r\n\r\n");
    }

    proptest! {
        #[test]
        fn what_goes_out_is_read_again(sizes in vec(0..3 * COPIED, 0..6), width in 1..2 * COPIED, chunked: bool) {
            let encoder = match chunked {
                true => Encoder::Chunked(Vec::new()),
                false => Encoder::Plain,
            };
            let (mut outbox, mut stream) = (Outbox::default(), Narrow::new(width));
            let mut all = Vec::new();
            for (i, size) in sizes.into_iter().enumerate() {
                let piece = vec![i as u8; size];
                all.extend_from_slice(&piece);
                if !outbox.has_room() {
                    flush(&mut outbox, &mut stream);
                }
                outbox.data(&encoder, piece.into());
            }
            if !outbox.has_room() {
                flush(&mut outbox, &mut stream);
            }
            outbox.end(&encoder, None);
            flush(&mut outbox, &mut stream);
            let mut read = Vec::new();
            let mut buffer = BytesMut::from(&stream.taken[..]);
            let mut decoder = match chunked {
                true => Decoder::chunked(),
                false => Decoder::of_length(all.len() as u64),
            };
            let mut readable = buffer.len();
            loop {
                match decoder.decode(&mut buffer, &mut readable) {
                    Ok(Part::Data(data)) => read.extend_from_slice(&data),
                    Ok(Part::End) => break,
                    other => prop_assert!(false, "{:?}", other),
                }
            }
            prop_assert!(read == all && buffer.is_empty());
        }
    }
}
