//! Heads: from a buffer to the types of the `http` crate and back, each name spelled as it came.

use std::mem::MaybeUninit;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::CONNECTION, request, response,
};
use httparse::{Header, ParserConfig, Status};
use hyper::ext::ReasonPhrase;

use crate::downstream::framing;

/// Fields in the head of an answer, which are no more than there are bits in a `u128`, and bytes.
const ANSWER_FIELDS: usize = 128;
const ANSWER_LIMIT: usize = 256 * 1024;

/// The head of a message as it came, and where its fields are in it. Names are the same however they are spelled (RFC 9110
/// section 5.1), but not all recipients know.
#[derive(Clone, Debug, Default)]
pub struct Spelling {
    head: Bytes,
    fields: Vec<Place>,
}

/// Where name and value of a field are in a head.
#[derive(Clone, Copy, Debug)]
struct Place {
    name: (u32, u32),
    value: (u32, u32),
}

/// Not a head of HTTP/1.1 or HTTP/1.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Takes the head of a request out of `buffer`, which begins with a whole one.
///
/// # Errors
/// It cannot be read.
pub fn request(buffer: &mut BytesMut) -> Result<(request::Parts, Spelling), Malformed> {
    let mut fields = [const { MaybeUninit::uninit() }; framing::FIELD_LIMIT];
    let mut read = httparse::Request::new(&mut []);
    let Ok(Status::Complete(length)) = read.parse_with_uninit_headers(buffer, &mut fields) else {
        return Err(Malformed);
    };
    let (Some(method), Some(target), Some(version)) = (read.method, read.path, read.version) else {
        return Err(Malformed);
    };
    let mut parts = Request::new(()).into_parts().0;
    parts.method = Method::from_bytes(method.as_bytes()).map_err(|_| Malformed)?;
    parts.version = version_of(version);
    let target = place(buffer, target.as_bytes());
    let fields = places(buffer, read.headers);
    let head = buffer.split_to(length).freeze();
    let spelling = Spelling { head, fields };
    parts.uri = Uri::from_maybe_shared(spelling.slice(target)).map_err(|_| Malformed)?;
    parts.headers = spelling.fields()?;
    Ok((parts, spelling))
}

/// Takes the head of an answer out of `buffer`, if all of it is there. How much of it was looked at is kept in `seen`, which is
/// nought at first: to read it from its beginning with each byte that comes would be the origin's choice, and our time.
///
/// # Errors
/// It cannot be read, or is too large.
pub fn response(
    buffer: &mut BytesMut,
    seen: &mut usize,
) -> Result<Option<(response::Parts, Spelling)>, Malformed> {
    let before = std::mem::replace(seen, buffer.len());
    let fresh = &buffer[before.min(buffer.len())..];
    // No line has ended, of which there may be so many.
    if before > 0 && buffer.len() < ANSWER_LIMIT && !fresh.contains(&b'\n') {
        return Ok(None);
    }
    let mut fields = [const { MaybeUninit::uninit() }; ANSWER_FIELDS];
    let mut read = httparse::Response::new(&mut []);
    let config = ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut read, buffer, &mut fields) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) if buffer.len() < ANSWER_LIMIT => return Ok(None),
        _ => return Err(Malformed),
    };
    let (Some(code), Some(version)) = (read.code, read.version) else {
        return Err(Malformed);
    };
    let mut parts = Response::new(()).into_parts().0;
    parts.status = StatusCode::from_u16(code).map_err(|_| Malformed)?;
    parts.version = version_of(version);
    let usual = parts.status.canonical_reason().unwrap_or_default();
    if let Some(reason) = read.reason.filter(|r| !r.is_empty() && *r != usual) {
        let reason = ReasonPhrase::try_from(reason.as_bytes()).map_err(|_| Malformed)?;
        parts.extensions.insert(reason);
    }
    let fields = places(buffer, read.headers);
    let head = buffer.split_to(length).freeze();
    *seen = 0;
    let spelling = Spelling { head, fields };
    parts.headers = spelling.fields()?;
    Ok(Some((parts, spelling)))
}

fn version_of(minor: u8) -> Version {
    match minor {
        0 => Version::HTTP_10,
        _ => Version::HTTP_11,
    }
}

/// Where the fields are, which were read from `head`; its length fits any of these numbers.
fn places(head: &[u8], fields: &[Header<'_>]) -> Vec<Place> {
    let places = fields.iter().map(|field| Place {
        name: place(head, field.name.as_bytes()),
        value: place(head, field.value),
    });
    places.collect()
}

fn place(head: &[u8], part: &[u8]) -> (u32, u32) {
    let start = part.as_ptr() as usize - head.as_ptr() as usize;
    (start as u32, (start + part.len()) as u32)
}

impl Spelling {
    fn slice(&self, (start, end): (u32, u32)) -> Bytes {
        self.head.slice(start as usize..end as usize)
    }

    fn fields(&self) -> Result<HeaderMap, Malformed> {
        // With room for what we add ourselves: to grow would be to build it twice.
        let mut map = HeaderMap::with_capacity(self.fields.len() + 2);
        for Place { name, value } in &self.fields {
            let name = HeaderName::from_bytes(part(&self.head, *name)).map_err(|_| Malformed)?;
            let value = HeaderValue::from_maybe_shared(self.slice(*value));
            map.append(name, value.map_err(|_| Malformed)?);
        }
        Ok(map)
    }

    /// How this name was spelled, if it was there.
    pub fn of<'s>(&'s self, name: &'s HeaderName) -> &'s [u8] {
        let names = self.fields.iter().map(|place| part(&self.head, place.name));
        let mut names = names.filter(|spelled| spelled.eq_ignore_ascii_case(name.as_ref()));
        names.next().unwrap_or(name.as_ref())
    }

    /// Writes fields, spelled as they came where they came. Most are still in the order in which they did.
    pub fn write<'f>(
        &self,
        fields: impl IntoIterator<Item = (&'f HeaderName, &'f HeaderValue)>,
        out: &mut BytesMut,
    ) {
        let (mut next, mut used) = (0, 0_u128);
        for (name, value) in fields {
            // Each place lends its spelling once; there are no more of them than bits.
            let fits = |i: &usize| {
                let spelled = part(&self.head, self.fields[*i].name);
                used & (1 << i) == 0 && spelled.eq_ignore_ascii_case(name.as_ref())
            };
            let places = next..self.fields.len();
            let spelled = match places.chain(0..next).find(fits) {
                Some(i) => {
                    next = i + 1;
                    used |= 1 << i;
                    part(&self.head, self.fields[i].name)
                }
                None => name.as_ref(),
            };
            write_field(spelled, value.as_bytes(), out);
        }
    }
}

/// Writes one field; behind the colon of one without a value comes nothing, as it does mostly.
pub fn write_field(name: &[u8], value: &[u8], out: &mut BytesMut) {
    out.reserve(name.len() + value.len() + 4);
    out.put_slice(name);
    out.put_slice(if value.is_empty() { b":" } else { b": " });
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

fn part(head: &[u8], (start, end): (u32, u32)) -> &[u8] {
    &head[start as usize..end as usize]
}

/// Writes the first line of a request.
pub fn write_request_line(method: &Method, target: &Uri, out: &mut BytesMut) {
    out.put_slice(method.as_str().as_bytes());
    out.put_slice(b" ");
    let target = target.path_and_query().map_or("/", |t| t.as_str());
    out.put_slice(target.as_bytes());
    out.put_slice(b" HTTP/1.1\r\n");
}

/// Writes the first line of an answer.
pub fn write_status_line(parts: &response::Parts, old: bool, out: &mut BytesMut) {
    out.put_slice(if old { b"HTTP/1.0 " } else { b"HTTP/1.1 " });
    out.put_slice(parts.status.as_str().as_bytes());
    out.put_slice(b" ");
    match parts.extensions.get::<ReasonPhrase>() {
        Some(reason) => out.put_slice(reason.as_bytes()),
        None => out.put_slice(
            parts
                .status
                .canonical_reason()
                .unwrap_or_default()
                .as_bytes(),
        ),
    }
    out.put_slice(b"\r\n");
}

/// Whether `Connection` has this option (RFC 9110 section 7.6.1).
pub fn has_option(fields: &HeaderMap, option: &str) -> bool {
    let values = fields.get_all(CONNECTION).iter();
    values
        .flat_map(|v| v.as_bytes().split(|b| *b == b','))
        .any(|o| o.trim_ascii().eq_ignore_ascii_case(option.as_bytes()))
}

/// Whether the sender of a message means to keep the connection (RFC 9112 section 9.3).
pub fn is_kept(version: Version, fields: &HeaderMap) -> bool {
    match version {
        Version::HTTP_10 => has_option(fields, "keep-alive") && !has_option(fields, "close"),
        _ => !has_option(fields, "close"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(spelling: &Spelling, fields: &HeaderMap) -> String {
        let mut out = BytesMut::new();
        spelling.write(fields, &mut out);
        String::from_utf8(out.to_vec()).expect("as it was read")
    }

    #[test]
    fn a_head_is_taken_out_and_what_follows_stays() {
        let mut buffer = BytesMut::from("\r\nGET /a?b HTTP/1.0\r\nX-A:  1 \r\n\r\nGET");
        let (parts, _) = request(&mut buffer).expect("well-formed");
        assert_eq!(
            (parts.method, parts.version),
            (Method::GET, Version::HTTP_10)
        );
        assert_eq!(
            (parts.uri, &parts.headers["x-a"]),
            (Uri::from_static("/a?b"), &HeaderValue::from_static("1"))
        );
        assert_eq!(buffer, "GET");
        let mut buffer = BytesMut::from("HTTP/1.1 299 Fine so far\r\nx: y\r\n\r\nbody");
        let (parts, _) = response(&mut buffer, &mut 0)
            .expect("well-formed")
            .expect("whole");
        let reason = parts.extensions.get::<ReasonPhrase>().expect("unusual");
        assert_eq!(
            (parts.status.as_u16(), reason.as_bytes()),
            (299, &b"Fine so far"[..])
        );
        assert_eq!(buffer, "body");
        let mut line = BytesMut::new();
        write_status_line(&parts, false, &mut line);
        assert_eq!(line, "HTTP/1.1 299 Fine so far\r\n");
    }

    #[test]
    fn a_head_that_is_none_or_has_no_end_is_malformed() {
        for text in [
            "SSH-2.0-x\r\n\r\n",
            "HTTP/2.0 200 OK\r\n\r\n",
            "HTTP/1.1 99 x\r\n\r\n",
        ] {
            assert!(
                response(&mut BytesMut::from(text), &mut 0).is_err(),
                "{text}"
            );
        }
        assert_eq!(
            response(&mut BytesMut::from("HTTP/1.1 200 OK\r\nx"), &mut 0).map(|h| h.is_none()),
            Ok(true)
        );
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(ANSWER_LIMIT));
        assert!(response(&mut BytesMut::from(&long[..]), &mut 0).is_err());
        let many = format!(
            "HTTP/1.1 200 OK\r\n{}\r\n",
            "x: y\r\n".repeat(ANSWER_FIELDS + 1)
        );
        assert!(response(&mut BytesMut::from(&many[..]), &mut 0).is_err());
    }

    #[test]
    fn the_end_of_a_head_is_seen_wherever_it_is_cut() {
        for head in [
            "HTTP/1.1 200 OK\r\nx: y\r\n\r\n",
            "HTTP/1.1 200 OK\nx: y\n\n",
        ] {
            for first in 1..head.len() {
                for second in first..head.len() {
                    let (mut buffer, mut seen) = (BytesMut::new(), 0);
                    for end in [first, second] {
                        buffer.extend_from_slice(&head.as_bytes()[buffer.len()..end]);
                        let read = response(&mut buffer, &mut seen).map(|head| head.is_some());
                        assert_eq!(read, Ok(false), "{first} {second}");
                    }
                    buffer.extend_from_slice(&head.as_bytes()[second..]);
                    let read = response(&mut buffer, &mut seen).map(|head| head.is_some());
                    assert_eq!((read, seen), (Ok(true), 0), "{first} {second}");
                }
            }
        }
    }

    #[test]
    fn names_keep_their_spelling_whatever_is_taken_out_or_put_in() {
        let head = "GET / HTTP/1.1\r\nHOST: a\r\nx-Dup: 1\r\nProxy-Connection: y\r\nX-DUP: 2\r\nEmpty:\r\n\r\n";
        let (mut parts, spelling) = request(&mut BytesMut::from(head)).expect("well-formed");
        parts.headers.remove("proxy-connection");
        parts.headers.append("via", HeaderValue::from_static("us"));
        let text = written(&spelling, &parts.headers);
        // Taking one out of the map moves its last into the gap.
        let mut lines: Vec<_> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(
            lines,
            ["Empty:", "HOST: a", "X-DUP: 2", "via: us", "x-Dup: 1"]
        );
    }

    #[test]
    fn connections_are_kept_as_their_version_has_it() {
        for (version, said, kept) in [
            (Version::HTTP_11, "", true),
            (Version::HTTP_11, "foo, Close", false),
            (Version::HTTP_10, "", false),
            (Version::HTTP_10, "Keep-Alive", true),
            (Version::HTTP_10, "keep-alive, close", false),
        ] {
            let mut fields = HeaderMap::new();
            fields.insert(CONNECTION, HeaderValue::from_static(said));
            assert_eq!(is_kept(version, &fields), kept, "{version:?} {said}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_as_it_came(fields in prop::collection::vec(("[A-Za-z][A-Za-z-]{0,12}", "[!-~]([ -~]{0,20}[!-~])?"), 0..20)) {
            // The map keeps fields of one name together, so each has another here.
            let mut seen = std::collections::HashSet::new();
            let lines: Vec<String> = fields
                .iter()
                .filter(|(name, _)| seen.insert(name.to_ascii_lowercase()))
                .map(|(name, value)| format!("{name}: {value}\r\n"))
                .collect();
            let head = format!("GET / HTTP/1.1\r\n{}\r\n", lines.concat());
            let (parts, spelling) = request(&mut BytesMut::from(&head[..])).expect("well-formed");
            prop_assert_eq!(written(&spelling, &parts.headers), lines.concat());
        }
    }
}
