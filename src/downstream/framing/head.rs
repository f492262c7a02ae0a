//! A request head, read line by line (RFC 9112 sections 2 to 6), and what it says about the body.
//!
//! At least as strict as the codec in all it knows, so that the codec refuses nothing that was let pass here: its own
//! refusals have no text.

use http::Uri;

use crate::error::Error;

/// Bytes in a request line. Longer URLs are no use: most servers refuse them.
const LINE_LIMIT: usize = 16 * 1024;
/// Bytes in a head.
pub const HEAD_LIMIT: usize = 64 * 1024;
/// Fields in a head.
pub const FIELD_LIMIT: usize = 100;
/// Empty lines before a request line. RFC 9112 section 2.2 tolerates one, for clients that end a body with it.
const BLANK_LIMIT: u8 = 2;

/// The first byte of a ClientHello (RFC 8446 section 5.1). Some libraries take an https URL of a proxy at its word.
const TLS_HANDSHAKE: u8 = 0x16;

/// The body that follows a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// None.
    Absent,
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// No body, and no HTTP either: what follows a CONNECT.
    Opaque,
    /// None, and what follows is HTTP only if the answer is not that protocols are switched.
    Undecided,
}

/// What is known of a head so far.
#[derive(Debug, Default)]
pub struct Head {
    /// Where the line begins that is being read, in bytes from the start of the head.
    line: usize,
    /// Bytes of the head that have been looked at.
    seen: usize,
    blanks: u8,
    asked: Option<Asked>,
    fields: usize,
    hosts: usize,
    length: Option<u64>,
    chunked: bool,
    /// `Connection: upgrade` and `Upgrade: websocket`, the one switch that is let through.
    upgrade: bool,
    websocket: bool,
}

/// What the request line says, as far as it matters here.
#[derive(Clone, Copy, Debug)]
struct Asked {
    connect: bool,
    /// HTTP/1.0
    old: bool,
}

impl Head {
    /// Reads on. `bytes` begin where the head does, in every call. The head's length and its body, once it is complete.
    ///
    /// # Errors
    /// What is wrong with it. It is found at the same byte however the bytes are cut into calls.
    pub fn read(&mut self, bytes: &[u8]) -> Result<Option<(usize, Body)>, Error> {
        loop {
            let found = control(&bytes[self.seen..]).map(|i| self.seen + i);
            let at = found.unwrap_or(bytes.len());
            if self.asked.is_none() && at - self.line > LINE_LIMIT {
                return Err(Error::TargetTooLong);
            }
            // A line needs two more bytes than it has before its end.
            if at + if found.is_some() { 2 } else { 0 } > HEAD_LIMIT {
                return Err(Error::HeadTooLarge);
            }
            self.seen = at;
            match (found.map(|at| bytes[at]), bytes.get(at + 1)) {
                (None, _) | (Some(b'\r'), None) => return Ok(None),
                (Some(b'\r'), Some(b'\n')) => {}
                (Some(b'\r'), Some(_)) => {
                    return malformed("lines must end with CRLF, not with CR alone");
                }
                (Some(b'\n'), _) => {
                    return malformed("lines must end with CRLF, not with LF alone");
                }
                (Some(TLS_HANDSHAKE), _) if at == 0 => return Err(Error::TlsToPlainPort),
                (Some(_), _) => {
                    return malformed(
                        "a request head must not hold control characters; send HTTP/1.1",
                    );
                }
            }
            let line = &bytes[self.line..at];
            (self.line, self.seen) = (at + 2, at + 2);
            match self.asked {
                None if line.is_empty() => {
                    self.blanks += 1;
                    if self.blanks > BLANK_LIMIT {
                        return malformed("there are too many empty lines before the request");
                    }
                }
                None => self.asked = Some(request_line(line)?),
                Some(asked) if line.is_empty() => return Ok(Some((self.seen, self.body(asked)?))),
                Some(asked) => self.field(line, asked)?,
            }
        }
    }

    fn field(&mut self, line: &[u8], asked: Asked) -> Result<(), Error> {
        self.fields += 1;
        if self.fields > FIELD_LIMIT {
            return Err(Error::HeadTooLarge);
        }
        let end = line
            .iter()
            .position(|b| !is_token(*b))
            .unwrap_or(line.len());
        match line.get(end) {
            Some(b':') if end > 0 => {}
            Some(b' ' | b'\t') if end == 0 => {
                return malformed("a field must not be folded; write it in one line");
            }
            Some(b' ' | b'\t') if line[end..].trim_ascii_start().first() == Some(&b':') => {
                return malformed("a field must not have a space before its colon");
            }
            _ => return malformed("a field must be a name, a colon and a value"),
        }
        let (name, value) = (&line[..end], line[end + 1..].trim_ascii());
        // Lengths first: no two of these have the same, and few other fields have any of them.
        match end {
            4 if name.eq_ignore_ascii_case(b"host") && !asked.connect => {
                self.hosts += 1;
                if self.hosts > 1 {
                    return malformed("there is more than one Host field; send one");
                }
                if !is_host(value) {
                    return malformed(
                        "the Host field is malformed; write a host, or a host and a port",
                    );
                }
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                // Whoever honours that removes the field and leaves the next server without it.
                let essential = [&b"content-length"[..], b"transfer-encoding", b"host"];
                for option in value.split(|b| *b == b',').map(<[u8]>::trim_ascii) {
                    if essential.iter().any(|e| e.eq_ignore_ascii_case(option)) {
                        return malformed(
                            "Connection must not name Host, Content-Length or Transfer-Encoding",
                        );
                    }
                    self.upgrade |= option.eq_ignore_ascii_case(b"upgrade");
                }
            }
            7 if name.eq_ignore_ascii_case(b"upgrade") => {
                let mut protocols = value.split(|b| *b == b',').map(<[u8]>::trim_ascii);
                self.websocket |= protocols.any(|p| p.eq_ignore_ascii_case(b"websocket"));
            }
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                if self.length.is_some() {
                    return malformed("there is more than one Content-Length; send one");
                }
                self.length = Some(length(value)?);
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                if self.chunked {
                    return malformed(
                        "there is more than one Transfer-Encoding; send one, chunked",
                    );
                }
                coding(value)?;
                self.chunked = true;
            }
            _ => {}
        }
        Ok(())
    }

    /// RFC 9112 section 6.3, without the leniency.
    fn body(&self, asked: Asked) -> Result<Body, Error> {
        // What HTTP/1.0 says of it is not heard (RFC 9110 section 7.8).
        let switches = self.upgrade && self.websocket && !asked.old;
        match (self.length, self.chunked) {
            (Some(_), _) | (_, true) if asked.connect => malformed("CONNECT must not have a body"),
            _ if asked.connect => Ok(Body::Opaque),
            _ if self.hosts == 0 && !asked.old => malformed("the Host field is missing"),
            (Some(_), true) => malformed("send Content-Length or Transfer-Encoding, not both"),
            (None, true) if asked.old => {
                malformed("HTTP/1.0 has no Transfer-Encoding; send Content-Length")
            }
            (None | Some(0), false) if switches => Ok(Body::Undecided),
            // RFC 6455 section 4.1: a GET. With a body it would be unclear where the other protocol begins.
            _ if switches => malformed("a request for WebSocket must not have a body"),
            (None, true) => Ok(Body::Chunked),
            (None | Some(0), false) => Ok(Body::Absent),
            (Some(length), false) => Ok(Body::Length(length)),
        }
    }
}

/// RFC 9112 section 3: one space between method, target and version, and none elsewhere.
fn request_line(line: &[u8]) -> Result<Asked, Error> {
    let mut parts = line.split(|b| *b == b' ');
    let (Some(method), Some(target), version, None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return malformed("a request line must be a method, a URL without spaces, and HTTP/1.1");
    };
    if method.is_empty() || !method.iter().all(|b| is_token(*b)) {
        return malformed("a request must begin with its method");
    }
    let old = match version {
        Some(b"HTTP/1.1") => false,
        Some(b"HTTP/1.0") => true,
        _ => return malformed("only HTTP/1.1 and HTTP/1.0 are spoken here"),
    };
    let connect = method == b"CONNECT";
    let plain = if connect {
        is_plain_authority(target)
    } else {
        is_plain_target(target)
    };
    if !plain {
        unusual_target(target)?;
    }
    Ok(Asked { connect, old })
}

/// Most targets: a path, or an http URL, in the characters of RFC 3986 alone.
pub fn is_plain_target(target: &[u8]) -> bool {
    let path = match target.first() {
        Some(b'/') => target,
        _ => {
            let Some(rest) = target
                .strip_prefix(b"http://")
                .or_else(|| target.strip_prefix(b"https://"))
            else {
                return false;
            };
            let end = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
            let (authority, path) = rest.split_at(end);
            if !is_plain_authority(authority) {
                return false;
            }
            path
        }
    };
    path.iter().all(|b| is(*b, PATH))
}

/// A name or an IPv4 address, with or without a port.
pub fn is_plain_authority(text: &[u8]) -> bool {
    let mut parts = text.split(|b| *b == b':');
    let (host, port, more) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
    let plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    let port = port.is_none_or(|p| (1..=5).contains(&p.len()) && p.iter().all(u8::is_ascii_digit));
    !host.is_empty() && host.iter().all(plain) && port && more.is_none()
}

/// All others: whatever the codec's own parser takes, which also allows raw UTF-8.
fn unusual_target(target: &[u8]) -> Result<(), Error> {
    if target.contains(&b'#') {
        return malformed(
            "a URL with a fragment cannot be asked for; leave out # and what follows",
        );
    }
    if target.contains(&b'\t')
        || std::str::from_utf8(target).is_err()
        || Uri::try_from(target).is_err()
    {
        return malformed("the URL has characters that must be percent-encoded");
    }
    Ok(())
}

/// Digits alone: `+5`, `05`, `5, 5` and an empty value are each read by somebody as something else.
fn length(value: &[u8]) -> Result<u64, Error> {
    let digits = value.iter().all(u8::is_ascii_digit) && !value.is_empty();
    if !digits || (value[0] == b'0' && value.len() > 1) {
        return malformed("Content-Length must be one plain decimal number");
    }
    let add = |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    // 63 bits: others count in signed numbers.
    match value.iter().try_fold(0, add) {
        Some(sum) if i64::try_from(sum).is_ok() => Ok(sum),
        _ => malformed("Content-Length is too large"),
    }
}

/// Only `chunked`, once and alone. Another coding below it is well-formed, but we don't take it off (section 6.1: 501).
fn coding(value: &[u8]) -> Result<(), Error> {
    let chunked = |c: &[u8]| c.eq_ignore_ascii_case(b"chunked");
    if chunked(value) {
        return Ok(());
    }
    let mut codings = value.split(|b| *b == b',').map(<[u8]>::trim_ascii).rev();
    let last = codings.next().unwrap_or_default();
    if chunked(last)
        && codings.all(|c| !c.is_empty() && !chunked(c) && c.iter().all(|b| is_token(*b)))
    {
        return Err(Error::UnknownCoding);
    }
    malformed("Transfer-Encoding must be chunked and nothing else")
}

/// RFC 9110 section 7.2, in outline: what host it is, and whether it is the right one, is judged elsewhere. It may be
/// empty beside a URL that has an authority.
fn is_host(value: &[u8]) -> bool {
    let (host_fine, port) = match value.strip_prefix(b"[") {
        Some(rest) => {
            let end = rest.iter().position(|b| *b == b']').unwrap_or(0);
            let literal = |b: &u8| b.is_ascii_hexdigit() || matches!(b, b':' | b'.');
            (
                end > 0 && rest[..end].iter().all(literal),
                &rest[(end + 1).min(rest.len())..],
            )
        }
        None => {
            let end = value.iter().position(|b| *b == b':').unwrap_or(value.len());
            (value[..end].iter().all(|b| is(*b, HOST)), &value[end..])
        }
    };
    let port_fine = match port {
        [] => true,
        [b':', digits @ ..] => digits.len() <= 5 && digits.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    host_fine && port_fine
}

/// `tchar` of RFC 9110 section 5.6.2.
pub fn is_token(byte: u8) -> bool {
    is(byte, TOKEN)
}

fn malformed<T>(what: &'static str) -> Result<T, Error> {
    Err(Error::Malformed(what))
}

/// The first control character other than the tab.
fn control(bytes: &[u8]) -> Option<usize> {
    // Sixteen at a time, without a branch, becomes one comparison of vectors. Almost all lines are longer than that.
    let mut start = 0;
    for block in bytes.chunks_exact(16) {
        let found = block
            .iter()
            .fold(false, |found, b| found | (*b < b' ') | (*b == 0x7f));
        if found && let Some(i) = block.iter().position(|b| is(*b, CONTROL)) {
            return Some(start + i);
        }
        start += 16;
    }
    let i = bytes[start..].iter().position(|b| is(*b, CONTROL))?;
    Some(start + i)
}

const TOKEN: u8 = 1;
const PATH: u8 = 2;
const HOST: u8 = 4;
const CONTROL: u8 = 8;

/// To which of the four classes each byte belongs.
static CLASSES: [u8; 256] = classes();

fn is(byte: u8, class: u8) -> bool {
    CLASSES[usize::from(byte)] & class != 0
}

const fn classes() -> [u8; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        if b.is_ascii_alphanumeric() {
            table[byte] = TOKEN | PATH | HOST;
        } else if b.is_ascii_control() && b != b'\t' {
            table[byte] = CONTROL;
        }
        byte += 1;
    }
    mark(&mut table, b"!#$%&'*+-.^_`|~", TOKEN);
    mark(&mut table, b"-._~%!$&'()*+,;=:@/?", PATH);
    mark(&mut table, b"-._~%!$&'()*+;=", HOST);
    table
}

const fn mark(table: &mut [u8; 256], bytes: &[u8], class: u8) {
    let mut i = 0;
    while i < bytes.len() {
        table[bytes[i] as usize] |= class;
        i += 1;
    }
}
