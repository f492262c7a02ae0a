//! A chunked body (RFC 9112 section 7.1), read to the letter: only `CRLF` ends a line, and what nobody needs is bounded.

use crate::{downstream::framing::head::is_token, error::Error};

/// Bytes of extensions in one body. We drop them, and so does everybody else: many of them are only a way to keep us busy.
const EXTENSION_LIMIT: u32 = 8 * 1024;
/// Bytes and fields of trailers.
const TRAILER_LIMIT: u32 = 16 * 1024;
const TRAILER_FIELDS: u32 = 100;
/// More digits than any size has that fits 63 bits.
const DIGITS: u8 = 16;

/// Where in a chunked body we are.
#[derive(Debug, Default)]
pub struct Chunks {
    part: Part,
    /// Bytes of data to come in this chunk.
    size: u64,
    digits: u8,
    extensions: u32,
    trailers: u32,
    fields: u32,
}

#[derive(Clone, Copy, Debug, Default)]
enum Part {
    #[default]
    Size,
    /// White space, after which only an extension may come.
    Blank,
    Extension,
    SizeEnd,
    Data,
    DataCr,
    DataEnd,
    /// At the start of a line after the last chunk.
    Trailer,
    TrailerName,
    TrailerValue,
    TrailerEnd,
    End,
}

impl Chunks {
    /// Reads on; the number of bytes to the end of the body, if it is among these.
    ///
    /// # Errors
    /// What is wrong, and how many bytes before it are fine.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Option<usize>, (usize, Error)> {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            if let Part::Data = self.part {
                let here = (bytes.len() - at) as u64;
                let skipped = self.size.min(here);
                self.size -= skipped;
                // No more than `here`, which is a length.
                at += skipped as usize;
                if self.size == 0 {
                    self.part = Part::DataCr;
                }
                continue;
            }
            let over = matches!((self.part, byte), (Part::End, b'\n'));
            self.part = self
                .step(byte)
                .map_err(|what| (at, Error::Malformed(what)))?;
            at += 1;
            if over {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    fn step(&mut self, byte: u8) -> Result<Part, &'static str> {
        Ok(match (self.part, byte) {
            (Part::Size, b'\r') if self.digits > 0 => Part::SizeEnd,
            (Part::Size, b' ' | b'\t') if self.digits > 0 => self.extension(Part::Blank)?,
            (Part::Size, b';') if self.digits > 0 => self.extension(Part::Extension)?,
            (Part::Size, _) => self.digit(byte)?,
            (Part::Blank, b' ' | b'\t') => self.extension(Part::Blank)?,
            (Part::Blank, b';') => self.extension(Part::Extension)?,
            (Part::Blank, _) => {
                return Err("a chunk's size must be followed by CRLF or an extension");
            }
            (Part::Extension, b'\r') => Part::SizeEnd,
            (Part::Extension, _) if is_control(byte) => {
                return Err("a chunk's extension must not hold control characters");
            }
            (Part::Extension, _) => self.extension(Part::Extension)?,
            (Part::SizeEnd, b'\n') => {
                self.digits = 0;
                if self.size == 0 {
                    Part::Trailer
                } else {
                    Part::Data
                }
            }
            (Part::DataCr, b'\r') => Part::DataEnd,
            (Part::DataEnd, b'\n') => Part::Size,
            (Part::DataCr | Part::DataEnd, _) => {
                return Err("a chunk's data must be as long as its size says and end with CRLF");
            }
            (Part::Trailer, b'\r') => Part::End,
            (Part::Trailer, _) if is_token(byte) => {
                self.fields += 1;
                if self.fields > TRAILER_FIELDS {
                    return Err("a request may have 100 trailer fields; send fewer");
                }
                self.trailer(Part::TrailerName)?
            }
            (Part::TrailerName, b':') => self.trailer(Part::TrailerValue)?,
            (Part::TrailerName, _) if is_token(byte) => self.trailer(Part::TrailerName)?,
            (Part::Trailer | Part::TrailerName, _) => {
                return Err("a trailer field must begin with its name and a colon");
            }
            (Part::TrailerValue, b'\r') => self.trailer(Part::TrailerEnd)?,
            (Part::TrailerValue, _) if is_control(byte) => {
                return Err("a trailer field must not hold control characters");
            }
            (Part::TrailerValue, _) => self.trailer(Part::TrailerValue)?,
            (Part::TrailerEnd, b'\n') => self.trailer(Part::Trailer)?,
            (Part::SizeEnd | Part::TrailerEnd, _) => {
                return Err("lines must end with CRLF, not with CR alone");
            }
            (Part::End, b'\n') => Part::Size,
            (Part::End, _) => return Err("a chunked body must end with an empty line"),
            // Skipped by the caller.
            (Part::Data, _) => Part::Data,
        })
    }

    fn digit(&mut self, byte: u8) -> Result<Part, &'static str> {
        let Some(digit) = char::from(byte).to_digit(16) else {
            return Err("a chunk must begin with its size in hexadecimal digits");
        };
        self.digits += 1;
        // The first test keeps the top four bits free for the shift, and 63 bits are more than any body has.
        if self.digits > DIGITS || self.size > u64::MAX >> 5 {
            return Err("a chunk's size is too large");
        }
        self.size = self.size << 4 | u64::from(digit);
        Ok(Part::Size)
    }

    fn extension(&mut self, next: Part) -> Result<Part, &'static str> {
        self.extensions += 1;
        if self.extensions > EXTENSION_LIMIT {
            return Err("a body may have 8 KiB of chunk extensions; send fewer");
        }
        Ok(next)
    }

    fn trailer(&mut self, next: Part) -> Result<Part, &'static str> {
        self.trailers += 1;
        if self.trailers > TRAILER_LIMIT {
            return Err("a request may have 16 KiB of trailer fields; send fewer");
        }
        Ok(next)
    }
}

/// Controls other than the tab.
fn is_control(byte: u8) -> bool {
    byte.is_ascii_control() && byte != b'\t'
}
