//! Bodies: where they end, and what their chunks say (RFC 9112 sections 6 and 7).

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use httparse::Status;

/// Bytes of one line with a chunk's size and its extensions, and of the trailers of one body.
const LINE_LIMIT: usize = 16 * 1024;
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
            Chunk::Size => match httparse::parse_chunk_size(here) {
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
