//! The follower against cuts, garbage, valid streams, single faults, and the codec itself.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use http::{Request, Response, Version, header::CONTENT_LENGTH};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
};

use super::*;
use crate::downstream::connection::Connection;

/// What became of a stream.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    /// Requests before the one at fault, or all.
    fine: u64,
    fault: Option<Error>,
    /// Bytes that passed; with a fault that depends on the cuts.
    passed: usize,
}

/// Feeds a stream, cut at these places, as the socket does.
fn feed<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Seen {
    let (mut framing, mut held, mut passed) = (Framing::default(), Vec::new(), 0);
    for piece in pieces {
        held.extend_from_slice(piece);
        let (passing, fault) = framing.follow(&held);
        passed += passing;
        held.drain(..passing);
        let (fine, e) = match fault {
            None => continue,
            Some(Fault::Refused(e)) => (framing.heads(), e),
            Some(Fault::Broken(e)) => (framing.heads() - 1, e),
        };
        assert_eq!(
            framing.follow(b"GET / HTTP/1.0\r\n\r\n"),
            (0, None),
            "something passes after a fault"
        );
        return Seen {
            fine,
            fault: Some(e),
            passed,
        };
    }
    Seen {
        fine: framing.heads(),
        fault: None,
        passed,
    }
}

fn whole(stream: &[u8]) -> Seen {
    feed([stream])
}

fn fault(stream: impl AsRef<[u8]>) -> Option<Error> {
    let stream = stream.as_ref();
    let seen = whole(stream);
    assert_eq!(
        seen.fault,
        feed(stream.chunks(1)).fault,
        "{}",
        stream.escape_ascii()
    );
    seen.fault
}

/// A request with these fields after `Host`, and this after the head.
fn post(fields: &str, body: &str) -> String {
    format!("POST http://a.test/x HTTP/1.1\r\nHost: a.test\r\n{fields}\r\n{body}")
}

fn chunked(body: &str) -> String {
    post("Transfer-Encoding: chunked\r\n", body)
}

const GET: &str = "GET http://a.test/x?y=%20 HTTP/1.1\r\nHost: a.test\r\n\r\n";

#[test]
fn ordinary_requests_pass() {
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(16_000));
    for stream in [
        GET,
        &GET.repeat(8),
        "GET / HTTP/1.0\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.0\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nhost:\r\n\r\n",
        "GET /%00/../\\//|{}\u{e9} HTTP/1.1\r\nHost: a_b.test:80\r\nX_Y: \u{e9}\t z \r\nX-Empty:\r\n\r\n",
        "GET http://[::1]:80/ HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
        "CONNECT a.test:443 HTTP/1.1\r\n\r\n\x16\x03\x01\0\n\r",
        "CONNECT a.test:443 HTTP/1.1\r\nHost: b, c\r\nHost: d\r\n\r\n",
        &long,
        &post("Content-Length: 5\r\n", "\r\n\0\n\r"),
        &post("content-LENGTH:\t 0 \t\r\n", GET),
        &post("Content-Length: 9223372036854775807\r\n", "x"),
        &post("Transfer-Encoding: CHUNKED \r\n", "0\r\n\r\n"),
        &post(
            "Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n",
            GET,
        ),
        &chunked(&format!(
            "5\r\nhello\r\nA;x=\"y z\"\r\n0123456789\r\n000\r\nX: y\r\n\r\n{GET}"
        )),
        &chunked("5 \t;x\r\nhello\r\n0\r\n\r\n"),
    ] {
        assert_eq!(fault(stream), None, "{stream:?}");
        assert_eq!(whole(stream.as_bytes()).passed, stream.len(), "{stream:?}");
    }
}

#[test]
fn ambiguous_heads_are_faults() {
    let te = |value: &str| post(&format!("Transfer-Encoding: {value}\r\n"), "0\r\n\r\n");
    let cl = |value: &str| post(&format!("Content-Length: {value}\r\n"), "hello");
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n");
    let lines = |text: &str| text.replace("\r\n", "\n");
    let mut streams = vec![
        post(
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        post(
            "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
            "0\r\n\r\n",
        ),
        post(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        post(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
            "0\r\n\r\n",
        ),
        post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello"),
        post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello!"),
        "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        lines(GET),
        GET.replacen("\r\n", "\n", 1),
        GET.replace("\r\n\r\n", "\r\n\n"),
        GET.replace("\r\n\r\n", "\n\r\n"),
        GET.replace("\r\n", "\n\r"),
        GET.replace("\r\n", "\r"),
        GET.replace("\r\n\r\n", "\r\n\rX"),
        GET.replace("Host: a", "Host: a\r b"),
        post("X: a\rb\r\n", ""),
        post("X: a\0b\r\n", ""),
        post("X: a\x7fb\r\n", ""),
        post("X: y\r\n z\r\n", ""),
        post("X: y\r\n\tz\r\n", ""),
        post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"),
        GET.replace("Host:", " Host:"),
        GET.replace("Host: a", "Host:\r\n a"),
        GET.replace("Host:", "Host :"),
        GET.replace("Host:", "Host\t:"),
        GET.replace("Host:", "Ho st:"),
        GET.replace("Host: a.test\r\n", ""),
        post("Host: a.test\r\n", ""),
        post("host: b.test\r\n", ""),
        post("no colon\r\n", ""),
        post(": no name\r\n", ""),
        post("N\u{e4}me: x\r\n", ""),
        post("N(ame): x\r\n", ""),
        post("Connection: close, Content-Length\r\n", ""),
        post("Connection: transfer-encoding\r\n", ""),
        post("Connection: keep-alive\r\nConnection: x,\tHOST ,y\r\n", ""),
        "CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello".to_owned(),
        "CONNECT a.test:443 HTTP/1.1\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "CONNECT a.test:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        format!("\r\n\r\n\r\n{GET}"),
        format!("\n{GET}"),
        format!("{GET}\r\n\r\n\r\n"),
        GET.replace("HTTP/1.1", "HTTP/1.2"),
        GET.replace("HTTP/1.1", "HTTP/1.1x"),
        GET.replace("HTTP/1.1", "http/1.1"),
        GET.replace(" HTTP/1.1", ""),
        GET.replace(" HTTP/1.1", "  HTTP/1.1"),
        GET.replace(" HTTP/1.1", "\tHTTP/1.1"),
        GET.replace(" HTTP/1.1", " HTTP/1.1 "),
        GET.replace("GET ", "GET\t"),
        GET.replace("GET", " GET"),
        GET.replace("GET", "G(T"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "\x05\x01\0".to_owned(),
        "SSH-2.0-OpenSSH\r\n".to_owned(),
        "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n".to_owned(),
        get("/a b"),
        get("/a\tb"),
        get("/a\0b"),
        get("/a#b"),
        get("http://a.test/#b"),
        get("http://a.test#b"),
        get(""),
        get("<script>"),
        get("/<script>"),
        get("http:///x"),
    ];
    streams.extend(
        [
            "xchunked",
            "chunked, identity",
            "identity",
            "chunked;q=1",
            "\"chunked\"",
            "\x0bchunked",
            "chunked\0",
        ]
        .map(te),
    );
    streams.extend(
        [
            ",chunked",
            "chunked,",
            "",
            "gzip",
            "chunked, chunked",
            "x y, chunked",
            "chunked chunked",
        ]
        .map(te),
    );
    streams.extend(
        [
            "5, 5", "+5", "-5", "0x5", "5_0", "05", "", "5 5", "5;", "5.0", "\u{b2}",
        ]
        .map(cl),
    );
    streams.extend(
        [
            "9223372036854775808",
            "18446744073709551616",
            &"9".repeat(40),
        ]
        .map(cl),
    );
    streams.extend(
        [
            "a b", "a,b", "a/b", "u@a", "a:b", "a:1:2", "a:123456", "[::1", "[]", "[x]", "[::1]x",
            "\u{e4}", "a\\", "a?",
        ]
        .map(|host| GET.replace("Host: a.test", &format!("Host: {host}"))),
    );
    for stream in streams {
        assert!(
            matches!(fault(&stream), Some(Error::Malformed(_))),
            "{stream:?}: {:?}",
            whole(stream.as_bytes())
        );
    }
    assert_eq!(fault("\x16\x03\x01"), Some(Error::TlsToPlainPort));
    let mut bytes = GET.as_bytes().to_vec();
    bytes[5] = 0xff;
    assert!(fault(bytes).is_some(), "a target that is no UTF-8");
}

#[test]
fn other_codings_are_not_implemented() {
    for coding in ["gzip, chunked", "gzip,deflate ,\tChunked"] {
        let stream = post(&format!("Transfer-Encoding: {coding}\r\n"), "0\r\n\r\n");
        assert_eq!(fault(stream), Some(Error::UnknownCoding), "{coding}");
    }
}

#[test]
fn what_is_too_large_is_refused_at_the_limit() {
    let target = |n: usize| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(n - 14));
    assert_eq!(fault(target(16 * 1024)), None);
    assert_eq!(fault(target(16 * 1024 + 1)), Some(Error::TargetTooLong));
    assert_eq!(
        fault("CONNECT ".to_owned() + &"a".repeat(17_000)),
        Some(Error::TargetTooLong),
        "never ends"
    );

    let around = post("X: \r\n", "").len();
    let value = |n: usize| post(&format!("X: {}\r\n", "a".repeat(n - around)), "");
    assert_eq!(fault(value(64 * 1024)), None);
    assert_eq!(fault(value(64 * 1024 + 1)), Some(Error::HeadTooLarge));
    assert_eq!(
        fault(post(&format!("X: {}", "a".repeat(70_000)), "")),
        Some(Error::HeadTooLarge),
        "never ends"
    );

    let fields = |n: usize| post(&"X: y\r\n".repeat(n - 1), "");
    assert_eq!(fault(fields(100)), None);
    assert_eq!(fault(fields(101)), Some(Error::HeadTooLarge));
}

#[test]
fn chunks_that_are_not_exactly_chunks_are_faults() {
    let one = |line: &str| chunked(&format!("{line}\r\nhello\r\n0\r\n\r\n"));
    let mut streams = vec![
        chunked("5\r\nhelloXX0\r\n\r\n"),
        chunked("5\r\nhello\n0\r\n\r\n"),
        chunked("5\r\nhello\r0\r\n\r\n"),
        chunked("5\r\nhello0\r\n\r\n"),
        chunked("5\r\nhell\r\n0\r\n\r\n"),
        chunked("5\nhello\r\n0\r\n\r\n"),
        chunked("5\rXhello\r\n0\r\n\r\n"),
        chunked("0\r\nX\r\n\r\n"),
        chunked("0\r\nX : y\r\n\r\n"),
        chunked("0\r\n: y\r\n\r\n"),
        chunked("0\r\nX: y\r\n z\r\n\r\n"),
        chunked("0\r\nX: y\n\r\n"),
        chunked("0\r\nX: \0\r\n\r\n"),
        chunked("0\r\nX: y\rz\r\n\r\n"),
        chunked("0\r\n\n"),
        chunked("0\r\n\rX"),
        chunked(&format!("0\r\n{}\r\n", "X: y\r\n".repeat(101))),
        chunked(&format!("0\r\nX: {}\r\n\r\n", "y".repeat(17_000))),
        one(&format!("5;{}", "x".repeat(9_000))),
        chunked(&"1;xxxxxxx\r\na\r\n".repeat(2_000)),
    ];
    streams.extend(
        [
            "", "-5", "+5", "0x5", "5x", " 5", "5 ", "5\t", "5 5", ";x", "5;a\nb", "5;a\rb",
            "5;a\0b",
        ]
        .map(one),
    );
    streams.extend(
        [
            "8000000000000000",
            "10000000000000005",
            "00000000000000005",
            &"f".repeat(30),
        ]
        .map(one),
    );
    for stream in streams {
        let shown = &stream[..stream.len().min(200)];
        assert!(
            matches!(fault(&stream), Some(Error::Malformed(_))),
            "{shown:?}"
        );
    }
}

#[test]
fn a_request_is_refused_whole_as_long_as_its_head_has_not_passed() {
    let stream = GET.to_owned() + &chunked("5\r\nhelloXX");
    let (passing, fault) = Framing::default().follow(stream.as_bytes());
    assert_eq!(passing, GET.len());
    assert!(matches!(fault, Some(Fault::Refused(_))));

    let mut framing = Framing::default();
    let (head, body) = stream.split_at(stream.len() - 4);
    assert_eq!(framing.follow(head.as_bytes()), (head.len(), None));
    let (passing, fault) = framing.follow(body.as_bytes());
    assert!(
        passing == 2 && matches!(fault, Some(Fault::Broken(_))),
        "{passing} {fault:?}"
    );
}

#[test]
fn what_follows_a_request_for_websocket_waits_for_the_answer() {
    let switch =
        "GET /x HTTP/1.1\r\nHost: a\r\nConnection: x, Upgrade\r\nUpgrade: WebSocket\r\n\r\n";
    let stream = switch.to_owned() + GET;
    for switched in [true, false] {
        let mut framing = Framing::default();
        assert_eq!(framing.follow(stream.as_bytes()), (switch.len(), None));
        assert!(framing.is_undecided());
        framing.decide(switched);
        assert_eq!(framing.follow(GET.as_bytes()), (GET.len(), None));
        assert_eq!(framing.heads(), if switched { 1 } else { 2 });
    }
    let body = switch.replace("Host", "Content-Length: 5\r\nHost");
    assert!(matches!(fault(body), Some(Error::Malformed(_))));
}

#[test]
fn a_head_passes_whole_or_not_at_all() {
    let mut framing = Framing::default();
    for end in 1..GET.len() {
        assert_eq!(framing.follow(&GET.as_bytes()[..end]), (0, None));
    }
    assert_eq!(framing.follow(GET.as_bytes()), (GET.len(), None));
}

/// One request, and what the codec must make of it.
fn request() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let target = "(/[!-\"$-;=?-~]{0,40}|http://[a-z0-9._-]{1,20}(:[0-9]{1,5})?(/[a-z%?&=]{0,20})?|http://\\[::1\\]/)";
    // Neither of the names that have a meaning here nor of those that steer the codec.
    let fields = vec(
        ("X[!#$%&'*+.^_`|~0-9a-zA-Z-]{0,20}", "[ -~\t\u{e9}]{0,60}"),
        0..20,
    );
    let body = prop_oneof![
        Just((String::new(), Vec::new(), Vec::new())),
        vec(any::<u8>(), 0..300).prop_map(|b| (
            format!("Content-Length: {}\r\n", b.len()),
            b.clone(),
            b
        )),
        (
            vec((vec(any::<u8>(), 1..50), "(;[ -~]{0,20})?"), 0..8),
            "(X-[a-z]{1,9}: [ -~]{0,9}\r\n){0,3}"
        )
            .prop_map(|(chunks, trailers)| {
                let (mut framed, mut plain) = (Vec::new(), Vec::new());
                for (data, extension) in chunks {
                    framed.extend(format!("{:x}{extension}\r\n", data.len()).bytes());
                    framed.extend(&data);
                    framed.extend(b"\r\n");
                    plain.extend(data);
                }
                framed.extend(format!("0\r\n{trailers}\r\n").bytes());
                ("Transfer-Encoding: chunked\r\n".to_owned(), framed, plain)
            }),
    ];
    (
        "(GET|POST|HEAD|DELETE|x-[!#$%&'*+.^_`|~a-zA-Z-]{0,9})",
        target,
        fields,
        body,
        "(\r\n){0,2}",
    )
        .prop_filter_map(
            "a target that no parser takes",
            |(method, target, fields, (framing, framed, plain), blank)| {
                http::Uri::try_from(&target).ok()?;
                let mut text = format!("{blank}{method} {target} HTTP/1.1\r\nHost: a.test\r\n");
                for (name, value) in fields {
                    text += &format!("{name}:{value}\r\n");
                }
                let mut bytes = (text + &framing + "\r\n").into_bytes();
                bytes.extend(framed);
                Some((bytes, plain))
            },
        )
}

/// A stream of requests, and their bodies.
fn stream() -> impl Strategy<Value = (Vec<u8>, Vec<Vec<u8>>)> {
    vec(request(), 1..4).prop_map(|requests| {
        let (framed, bodies): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
        (framed.concat(), bodies)
    })
}

/// Small changes of the kind that parsers differ about.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let bytes = select(vec![
        &b"\r"[..],
        b"\n",
        b"\r\n",
        b" ",
        b"\t",
        b":",
        b",",
        b"0",
        b"\0",
        b"#",
        b"\xff",
        b"[",
        b"@",
        b"/",
        b";",
        b"%",
        b"\x7f",
        b"A",
        b"\r\nContent-Length: 5",
        b"\r\nTransfer-Encoding: chunked",
        b"\r\nContent-Length: 5, 5",
        b"\r\nTransfer-Encoding: x, chunked",
        b"\r\nHost: b",
        b" HTTP/1.1",
        b" HTTP/1.0",
        b"\r\nConnection: close",
        b"\r\nExpect: 100-continue",
        b"\r\nUpgrade: x",
        b"<",
        b"\\",
    ]);
    let change = (any::<Index>(), 0_usize..3, bytes);
    (stream(), vec(change, 0..3)).prop_map(|((mut stream, _), changes)| {
        for (place, removed, put) in changes {
            let at = place.index(stream.len() + 1);
            let end = (at + removed).min(stream.len());
            stream.splice(at..end, put.iter().copied());
        }
        stream
    })
}

/// What the codec made of one request.
#[derive(Debug)]
struct Read {
    length: Option<u64>,
    body: Vec<u8>,
    closes: bool,
    whole: bool,
}

/// Gives a stream to the codec, set up as it is in use, with nobody in front of it.
fn codec(stream: &[u8]) -> (Vec<Read>, Result<(), hyper::Error>) {
    let reads = Arc::new(Mutex::new(Vec::new()));
    let service = {
        let reads = reads.clone();
        service_fn(move |request: Request<Incoming>| {
            let reads = reads.clone();
            async move {
                let (head, body) = request.into_parts();
                let fields = &head.headers;
                // As it reads them: a value that is not ASCII says nothing.
                let options = fields.get_all(http::header::CONNECTION).iter();
                let options = options.filter_map(|v| v.to_str().ok());
                let mut options = options.flat_map(|v| v.split(','));
                // To HTTP/1.0 the answer would have to say that the connection stays.
                let closes = head.version == Version::HTTP_10
                    || options.any(|o| o.trim().eq_ignore_ascii_case("close"));
                let length = fields
                    .get(CONTENT_LENGTH)
                    .and_then(|v| v.to_str().ok()?.parse().ok());
                let body = body.collect().await;
                let whole = body.is_ok();
                let body = body.map(|b| b.to_bytes().to_vec()).unwrap_or_default();
                reads.lock().expect("no panic holds it").push(Read {
                    length,
                    body,
                    closes,
                    whole,
                });
                Ok::<_, Infallible>(Response::new(Empty::<bytes::Bytes>::new()))
            }
        })
    };
    let io = TokioIo::new(tokio::io::join(stream, tokio::io::sink()));
    let served = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime")
        .block_on(
            http1::Builder::new()
                .half_close(true)
                .max_headers(FIELD_LIMIT)
                .max_header_size(HEAD_LIMIT)
                .header_read_timeout(None)
                .serve_connection(io, service),
        );
    let reads = std::mem::take(&mut *reads.lock().expect("no panic holds it"));
    (reads, served)
}

/// What our own connection makes of a stream: the body of each request, or nothing where it broke off.
fn ours(stream: &[u8]) -> Vec<Option<Vec<u8>>> {
    // All of it is there, so that nothing is waited for.
    let mut cx = Context::from_waker(Waker::noop());
    let stream = std::io::Cursor::new(stream.to_vec());
    let connection = Connection::new(tokio::io::join(stream, tokio::io::sink()));
    let mut bodies = Vec::new();
    while let Poll::Ready(Some(mut asked)) = connection.poll_asked(&mut cx) {
        if asked.verdict.is_err() {
            break;
        }
        let collecting = std::pin::pin!(asked.request.body_mut().collect());
        let Poll::Ready(body) = collecting.poll(&mut cx) else {
            panic!("a body waits for bytes that are there");
        };
        bodies.push(body.ok().map(|body| body.to_bytes().to_vec()));
        if !connection.go_on() {
            break;
        }
    }
    bodies
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn a_verdict_does_not_depend_on_how_the_stream_is_cut(stream in mutated(), cuts in vec(any::<Index>(), 0..20)) {
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let cut = feed(cuts.windows(2).map(|w| &stream[w[0]..w[1]]));
        let (whole, single) = (whole(&stream), feed(stream.chunks(1)));
        prop_assert_eq!((whole.fine, whole.fault), (single.fine, single.fault));
        prop_assert_eq!((whole.fine, whole.fault), (cut.fine, cut.fault));
        if whole.fault.is_none() {
            prop_assert_eq!(&whole, &cut);
            prop_assert_eq!(&whole, &single);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(stream in vec(any::<u8>(), 0..200), cut in any::<Index>()) {
        let at = cut.index(stream.len() + 1);
        feed([&stream[..at], &stream[at..]]);
        let mut chunks = chunked("").into_bytes();
        chunks.extend(&stream);
        feed([&chunks[..]]);
    }

    #[test]
    fn valid_streams_pass_and_the_codec_sees_the_same_requests((stream, bodies) in stream()) {
        let seen = whole(&stream);
        prop_assert_eq!(&seen, &Seen { fine: bodies.len() as u64, fault: None, passed: stream.len() });
        let (reads, served) = codec(&stream);
        prop_assert!(served.is_ok(), "{:?}", served);
        prop_assert_eq!(reads.into_iter().map(|r| r.body).collect::<Vec<_>>(), bodies.clone());
        prop_assert_eq!(ours(&stream), bodies.into_iter().map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn what_passes_is_read_and_what_is_broken_is_no_whole_body(stream in mutated()) {
        let mut framing = Framing::default();
        let (_, fault) = framing.follow(&stream);
        let bodies = ours(&stream);
        // After a CONNECT, or a request to switch, there is no telling.
        if stream.windows(8).any(|w| w == b"CONNECT ") || stream.windows(7).any(|w| w.eq_ignore_ascii_case(b"upgrade")) {
            return Ok(());
        }
        prop_assert_eq!(bodies.len() as u64, framing.heads(), "{}", stream.escape_ascii());
        if let Some((last, others)) = bodies.split_last() {
            prop_assert!(others.iter().all(Option::is_some));
            prop_assert!(last.is_some() || !matches!(fault, Some(Fault::Refused(_))));
            prop_assert!(last.is_none() || !matches!(fault, Some(Fault::Broken(_))));
        }
    }

    #[test]
    fn the_codec_refuses_nothing_that_passes(stream in mutated()) {
        // All the heads that are fine, and of the last one as much as has come.
        let (mut framing, mut passed) = (Framing::default(), Vec::new());
        let (passing, fault) = framing.follow(&stream);
        passed.extend(&stream[..passing]);
        let (reads, served) = codec(&passed);
        // The codec reads no further than a request that says that it is the last.
        let expected = reads.iter().position(|r| r.closes).map_or(framing.heads(), |i| framing.heads().min(i as u64 + 1));
        prop_assert_eq!(reads.len() as u64, expected, "{} {:?} {:?}", passed.escape_ascii(), served, reads);
        let (last, others) = match reads.split_last() {
            Some(split) => split,
            None => return Ok(()),
        };
        prop_assert!(others.iter().all(|r| r.whole));
        prop_assert!(others.iter().all(|r| r.length.is_none_or(|l| l == r.body.len() as u64)));
        if fault.is_some_and(|f| matches!(f, Fault::Broken(_))) {
            prop_assert!(!last.whole, "a broken request ended as if it were whole");
        }
    }

    #[test]
    fn plain_targets_are_targets_to_the_codec(path in "(/|https?://)[ -~]{0,30}", authority in "[ -~]{1,20}(:[0-9]{0,6})?") {
        if head::is_plain_target(path.as_bytes()) {
            prop_assert!(http::Uri::try_from(&path).is_ok(), "{}", path);
        }
        let url = format!("http://{authority}/");
        if head::is_plain_target(url.as_bytes()) {
            prop_assert!(http::Uri::try_from(&url).is_ok(), "{}", url);
        }
        if head::is_plain_authority(authority.as_bytes()) {
            prop_assert!(http::Uri::try_from(&authority).is_ok(), "{}", authority);
        }
    }
}
