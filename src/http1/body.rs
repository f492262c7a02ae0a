//! Bodies: where they end, and what their chunks say (RFC 9112 sections 6 and 7).

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use httparse::Status;

/// Bytes of one line with a chunk's size and its extensions, and of the trailers of one body: a little more than clients may
/// send, which the follower has found to be within their limit.
const LINE_LIMIT: usize = 17 * 1024;
/// Fields of the trailers of one body.
const TRAILER_FIELDS: usize = 100;

/// Reads a body out of a buffer.
#[derive(Debug, Default)]
pub enum Decoder {
    /// There is none, or all of it was read.
    #[default]
    Over,
    /// So many bytes are to come.
    Length(u64),
    /// Chunks.
    Chunked(Chunk),
    /// All that comes until the stream ends.
    UntilClose,
}

/// Where in a body of chunks we are.
#[derive(Debug, Default)]
pub enum Chunk {
    /// At the line with a size.
    #[default]
    Size,
    /// So many bytes of data are to come in this chunk.
    Data(u64),
    /// Behind the data of a chunk.
    DataEnd,
    /// Behind the last chunk.
    Trailers,
}

/// A part of a body.
#[derive(Debug)]
pub enum Part {
    /// Some of it.
    Data(Bytes),
    /// The fields behind it.
    Trailers(HeaderMap),
    /// There is no more.
    End,
    /// The rest is not in the buffer yet.
    Later,
}

/// A body that is not framed as it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Decoder {
    /// Of a body whose length is known.
    pub fn of_length(length: u64) -> Self {
        match length {
            0 => Decoder::Over,
            length => Decoder::Length(length),
        }
    }

    /// Of a body in chunks.
    pub fn chunked() -> Self {
        Decoder::Chunked(Chunk::default())
    }

    /// Whether nothing of it is to come.
    pub fn is_over(&self) -> bool {
        matches!(self, Decoder::Over)
    }

    /// How much is to come, where that is known.
    pub fn left(&self) -> Option<u64> {
        match self {
            Decoder::Over => Some(0),
            Decoder::Length(left) => Some(*left),
            Decoder::Chunked(_) | Decoder::UntilClose => None,
        }
    }

    /// Takes the next part out of `buffer`, of which the first `readable` bytes may be read; those taken are counted off.
    ///
    /// # Errors
    /// The chunks are malformed.
    pub fn decode(
        &mut self,
        buffer: &mut BytesMut,
        readable: &mut usize,
    ) -> Result<Part, Malformed> {
        loop {
            match self {
                Decoder::Over => return Ok(Part::End),
                _ if *readable == 0 => return Ok(Part::Later),
                Decoder::UntilClose => {
                    return Ok(Part::Data(take(buffer, readable, *readable)));
                }
                Decoder::Length(left) => {
                    let data = take(buffer, readable, least(*left, *readable));
                    *self = Decoder::of_length(*left - data.len() as u64);
                    return Ok(Part::Data(data));
                }
                Decoder::Chunked(chunk) => match chunk.decode(buffer, readable)? {
                    None => {}
                    Some(Part::Trailers(fields)) => {
                        *self = Decoder::Over;
                        if !fields.is_empty() {
                            return Ok(Part::Trailers(fields));
                        }
                    }
                    Some(part) => return Ok(part),
                },
            }
        }
    }
}

impl Chunk {
    /// One step: a part, or nothing where it is to go on at once.
    fn decode(
        &mut self,
        buffer: &mut BytesMut,
        readable: &mut usize,
    ) -> Result<Option<Part>, Malformed> {
        let here = &buffer[..*readable];
        match self {
            // An empty line has no size, though some take it for nought.
            Chunk::Size if !here[0].is_ascii_hexdigit() => Err(Malformed),
            Chunk::Size => match httparse::parse_chunk_size(here) {
                // An extension may hold no control character: a line feed in it is the end of the line to some.
                Ok(Status::Complete((line, _))) if here[..line - 2].iter().any(is_control) => {
                    Err(Malformed)
                }
                Ok(Status::Complete((line, size))) => {
                    advance(buffer, readable, line);
                    *self = match size {
                        0 => Chunk::Trailers,
                        size => Chunk::Data(size),
                    };
                    Ok(None)
                }
                Ok(Status::Partial) => later(here),
                Err(_) => Err(Malformed),
            },
            Chunk::Data(left) => {
                if here.is_empty() {
                    return Ok(Some(Part::Later));
                }
                let data = take(buffer, readable, least(*left, *readable));
                *left -= data.len() as u64;
                if *left == 0 {
                    *self = Chunk::DataEnd;
                }
                Ok(Some(Part::Data(data)))
            }
            Chunk::DataEnd => match here {
                [b'\r', b'\n', ..] => {
                    advance(buffer, readable, 2);
                    *self = Chunk::Size;
                    Ok(None)
                }
                [] | [b'\r'] => Ok(Some(Part::Later)),
                _ => Err(Malformed),
            },
            Chunk::Trailers => {
                let mut fields = [httparse::EMPTY_HEADER; TRAILER_FIELDS];
                match httparse::parse_headers(here, &mut fields) {
                    Ok(Status::Complete((length, fields))) => {
                        let fields = trailers(fields)?;
                        advance(buffer, readable, length);
                        Ok(Some(Part::Trailers(fields)))
                    }
                    Ok(Status::Partial) => later(here),
                    Err(_) => Err(Malformed),
                }
            }
        }
    }
}

fn trailers(fields: &[httparse::Header<'_>]) -> Result<HeaderMap, Malformed> {
    let mut map = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| Malformed)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_| Malformed)?;
        map.append(name, value);
    }
    Ok(map)
}

/// A line, or the trailers, of which some is missing: unless it has become too long, the rest may come.
fn later(here: &[u8]) -> Result<Option<Part>, Malformed> {
    match here.len() {
        LINE_LIMIT.. => Err(Malformed),
        _ => Ok(Some(Part::Later)),
    }
}

fn is_control(byte: &u8) -> bool {
    byte.is_ascii_control() && *byte != b'\t'
}

fn least(left: u64, here: usize) -> usize {
    usize::try_from(left).map_or(here, |left| left.min(here))
}

fn take(buffer: &mut BytesMut, readable: &mut usize, length: usize) -> Bytes {
    *readable -= length;
    buffer.split_to(length).freeze()
}

fn advance(buffer: &mut BytesMut, readable: &mut usize, length: usize) {
    *readable -= length;
    buffer.advance(length);
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::Index};

    use super::*;

    /// What a decoder makes of a stream that comes in pieces: data, trailers, what is left, and whether it ended.
    #[derive(Debug, PartialEq, Eq)]
    struct Read {
        data: Vec<u8>,
        trailers: Vec<(String, String)>,
        rest: Vec<u8>,
        end: Result<bool, Malformed>,
    }

    fn read<'b>(mut decoder: Decoder, pieces: impl Iterator<Item = &'b [u8]>) -> Read {
        let (mut buffer, mut data, mut trailers) = (BytesMut::new(), Vec::new(), Vec::new());
        let mut end = Ok(false);
        for piece in pieces {
            buffer.extend_from_slice(piece);
            let mut readable = buffer.len();
            while end == Ok(false) {
                match decoder.decode(&mut buffer, &mut readable) {
                    Ok(Part::Data(part)) => data.extend_from_slice(&part),
                    Ok(Part::Trailers(fields)) => trailers.extend(fields.iter().map(|(n, v)| {
                        let value = String::from_utf8_lossy(v.as_bytes());
                        (n.to_string(), value.into_owned())
                    })),
                    Ok(Part::End) => end = Ok(true),
                    Ok(Part::Later) => break,
                    Err(e) => end = Err(e),
                }
                assert_eq!(readable, buffer.len());
            }
        }
        Read {
            data,
            trailers,
            rest: buffer.to_vec(),
            end,
        }
    }

    fn chunked(stream: &[u8]) -> Read {
        read(Decoder::chunked(), [stream].into_iter())
    }

    #[test]
    fn a_body_ends_where_it_says_and_what_follows_stays() {
        let of = |decoder, stream: &'static [u8]| read(decoder, [stream].into_iter());
        let three = of(Decoder::of_length(3), b"abcGET");
        assert_eq!(
            (&three.data[..], &three.rest[..]),
            (&b"abc"[..], &b"GET"[..])
        );
        assert_eq!(of(Decoder::of_length(0), b"GET").rest, b"GET");
        assert_eq!(of(Decoder::UntilClose, b"abc").end, Ok(false));
        let chunks = chunked(b"2;a=b\r\nab\r\n1 \r\nc\r\n0\r\nX-Sum: 9\r\n\r\nGET");
        assert_eq!(chunks.data, b"abc");
        assert_eq!(chunks.trailers, [("x-sum".to_owned(), "9".to_owned())]);
        assert_eq!((chunks.end, &chunks.rest[..]), (Ok(true), &b"GET"[..]));
    }

    #[test]
    fn chunks_that_others_may_read_otherwise_are_malformed() {
        for stream in [
            &b"3\nabc\r\n0\r\n\r\n"[..],
            b"3\r\nabcX0\r\n\r\n",
            b"3\r\nabc\n0\r\n\r\n",
            b"0x3\r\nabc\r\n0\r\n\r\n",
            b"-3\r\n",
            b"\r\n",
            b"g\r\n",
            b"11111111111111111\r\n",
            b"3;a\nb\r\nabc\r\n0\r\n\r\n",
            b"3;\0\r\nabc\r\n0\r\n\r\n",
            b"0\r\nno colon\r\n\r\n",
            b"0\r\n folded: x\r\n\r\n",
        ] {
            assert_eq!(
                chunked(stream).end,
                Err(Malformed),
                "{}",
                stream.escape_ascii()
            );
        }
    }

    #[test]
    fn a_line_and_trailers_have_an_end() {
        let line = [&b"3;"[..], &[b'x'; 2 * LINE_LIMIT]].concat();
        assert_eq!(chunked(&line).end, Err(Malformed));
        let trailers = [&b"0\r\nx: "[..], &[b'x'; 2 * LINE_LIMIT]].concat();
        assert_eq!(chunked(&trailers).end, Err(Malformed));
        let fields = b"x: y\r\n".repeat(TRAILER_FIELDS + 1);
        assert_eq!(
            chunked(&[b"0\r\n", &fields[..], b"\r\n"].concat()).end,
            Err(Malformed)
        );
    }

    proptest! {
        #[test]
        fn chunks_are_read_the_same_however_they_are_cut(
            chunks in vec(vec(any::<u8>(), 1..40), 0..6),
            cuts in vec(any::<Index>(), 0..12),
            change in proptest::option::of((any::<Index>(), any::<u8>())),
        ) {
            let mut stream = Vec::new();
            for chunk in &chunks {
                stream.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                stream.extend(chunk);
                stream.extend(b"\r\n");
            }
            stream.extend(b"0\r\nA: b\r\n\r\nGET");
            if let Some((at, byte)) = change {
                let at = at.index(stream.len());
                stream[at] = byte;
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let cut = read(Decoder::chunked(), cuts.windows(2).map(|w| &stream[w[0]..w[1]]));
            let whole = chunked(&stream);
            prop_assert_eq!((&whole.data, whole.end), (&cut.data, cut.end));
            if change.is_none() {
                prop_assert_eq!(&whole.data, &chunks.concat());
                prop_assert_eq!((whole.end, &whole.rest[..]), (Ok(true), &b"GET"[..]));
            }
        }
    }
}
