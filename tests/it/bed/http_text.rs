//! HTTP/1.1 heads as text: enough to read what a proxy answers and what it sends, with nothing normalised away.
//! A library would hide the very things (reason phrase, order, spelling) that some tests look at.

use std::io::{self, BufRead, Read};

/// A start line and its fields, in the order and spelling received.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// `GET /b/5 HTTP/1.1` or `HTTP/1.1 200 OK`
    pub start_line: String,
    /// Name and value of each field.
    pub fields: Vec<(String, String)>,
}

impl Head {
    /// Parses a head, with or without its closing empty line.
    pub fn parse(text: &[u8]) -> Head {
        let text = String::from_utf8_lossy(text);
        let mut lines = text.split("\r\n");
        let start_line = lines.next().unwrap_or_default().to_owned();
        let fields = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        Head { start_line, fields }
    }

    /// Reads up to and including the empty line.
    ///
    /// # Errors
    /// `UnexpectedEof` when the peer closes first, with what came until then in the text.
    pub fn read(from: &mut impl BufRead) -> io::Result<Head> {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            if from.read_until(b'\n', &mut text)? == 0 {
                let so_far = String::from_utf8_lossy(&text).into_owned();
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("closed after {so_far:?}"),
                ));
            }
        }
        Ok(Head::parse(&text))
    }

    /// The first field of that name, whatever its case.
    pub fn field(&self, name: &str) -> Option<&str> {
        field(&self.fields, name)
    }

    /// The status of a response.
    ///
    /// # Errors
    /// `InvalidData` when the start line is no status line.
    pub fn status(&self) -> io::Result<u16> {
        let status = self
            .start_line
            .strip_prefix("HTTP/1.")
            .and_then(|rest| rest.get(2..5)?.parse().ok());
        status.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("no status in {:?}", self.start_line),
            )
        })
    }
}

/// The first field of that name, whatever its case.
pub fn field<'a>(fields: &'a [(String, String)], name: &str) -> Option<&'a str> {
    fields
        .iter()
        .find(|(n, _)| n.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
}

/// Hands the body that follows `head` to `sink` piece by piece, so that a test of 200 MiB holds one piece.
///
/// # Errors
/// `UnexpectedEof` when the body ends before its framing (RFC 9112 section 6) says so.
pub fn read_body(
    head: &Head,
    from: &mut impl BufRead,
    mut sink: impl FnMut(&[u8]),
) -> io::Result<()> {
    let chunked = head
        .field("transfer-encoding")
        .is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"));
    if chunked {
        loop {
            let mut line = String::new();
            from.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim().split(';').next().unwrap_or_default(), 16)
                .map_err(|_| {
                    io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        format!("no chunk size in {line:?}"),
                    )
                })?;
            read_exactly(size, from, &mut sink)?;
            read_exactly(2, from, &mut |_| {})?;
            if size == 0 {
                return Ok(());
            }
        }
    }
    let status = head.status()?;
    if status == 204 || status == 304 || status < 200 {
        return Ok(());
    }
    match head
        .field("content-length")
        .and_then(|length| length.parse().ok())
    {
        Some(length) => read_exactly(length, from, &mut sink),
        None => {
            let mut rest = Vec::new();
            from.read_to_end(&mut rest)?;
            sink(&rest);
            Ok(())
        }
    }
}

fn read_exactly(
    mut left: usize,
    from: &mut impl Read,
    sink: &mut impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut piece = [0; 16 * 1024];
    while left > 0 {
        let room = left.min(piece.len());
        let read = from.read(&mut piece[..room])?;
        if read == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("closed {left} bytes before the end"),
            ));
        }
        sink(&piece[..read]);
        left -= read;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &[u8]) -> io::Result<Vec<u8>> {
        let mut from = text;
        let head = Head::read(&mut from)?;
        let mut body = Vec::new();
        read_body(&head, &mut from, |piece| body.extend_from_slice(piece))?;
        Ok(body)
    }

    #[test]
    fn a_body_is_read_by_length_by_chunks_and_to_the_end() {
        assert_eq!(
            body(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcX").unwrap(),
            b"abc"
        );
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n";
        assert_eq!(body(chunked).unwrap(), b"abc");
        assert_eq!(body(b"HTTP/1.0 200 OK\r\n\r\nabc").unwrap(), b"abc");
    }

    #[test]
    fn a_body_cut_short_is_an_error() {
        assert!(body(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc").is_err());
        assert!(body(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab").is_err());
        assert!(body(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n").is_err());
    }

    #[test]
    fn the_reason_phrase_survives() {
        let head = Head::parse(b"HTTP/1.1 403 port 25 is not in connect_ports\r\nX: y\r\n\r\n");
        assert_eq!(head.status().unwrap(), 403);
        assert!(head.start_line.ends_with("port 25 is not in connect_ports"));
        assert_eq!(head.field("x"), Some("y"));
    }
}
