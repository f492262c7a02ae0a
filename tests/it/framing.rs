//! One request in, at most one request out: what two parsers could read differently is refused, in clear text and
//! inside a tunnel, and what is forwarded is what was sent.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    time::Duration,
};

use crate::bed::{
    client::{Answer, Session},
    origin::{Arrival, Origin},
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const PLAIN: &str = "plain.test";

/// A replica with both ways through it.
struct Ways {
    site: Site,
    replica: Replica,
    plain: Origin,
    tls: Origin,
}

/// In clear text by absolute-form, or by origin-form inside TLS.
#[derive(Clone, Copy, Debug)]
enum Way {
    Plain,
    Inside,
}

impl Ways {
    fn open() -> Ways {
        let (site, plain, tls) = (Site::new(), Origin::plain(&[PLAIN]), Origin::tls(&[HOST]));
        let recipe = Recipe::new()
            .destination("google_image", &["*.googleusercontent.com", PLAIN], "500.0")
            .origin(&plain)
            .origin(&tls);
        let replica = Replica::start(&site, "r0", &recipe);
        Ways {
            site,
            replica,
            plain,
            tls,
        }
    }

    fn session(&self, way: Way) -> Session {
        match way {
            Way::Plain => self.replica.session(PLAIN),
            Way::Inside => self.replica.browser(&self.site, HOST).tunnel().unwrap(),
        }
    }

    fn arrivals(&self, way: Way) -> Vec<Arrival> {
        match way {
            Way::Plain => self.plain.arrivals(),
            Way::Inside => self.tls.arrivals(),
        }
    }
}

impl Way {
    /// Puts in for `{U}` what a target begins with, for `{H}` the host.
    fn fill(self, template: &[u8]) -> Vec<u8> {
        let (host, start) = match self {
            Way::Plain => (PLAIN, format!("http://{PLAIN}")),
            Way::Inside => (HOST, String::new()),
        };
        let filled = replaced(template, b"{U}", start.as_bytes());
        replaced(&filled, b"{H}", host.as_bytes())
    }
}

fn replaced(text: &[u8], what: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        match rest.strip_prefix(what) {
            Some(after) => {
                out.extend_from_slice(by);
                rest = after;
            }
            None => {
                out.push(rest[0]);
                rest = &rest[1..];
            }
        }
    }
    out
}

/// What is wrong with a refusal of the kind that must end the connection.
fn fault_in(answer: &Answer, status: u16, rest: io::Result<Vec<u8>>) -> Option<String> {
    let says = |name: &str, what: &str| answer.field(name).is_some_and(|v| v.contains(what));
    if answer.status() != status {
        Some(format!("status {}", answer.head.start_line))
    } else if !says("proxy-status", "paceline; error=http_request_error") {
        Some(format!("Proxy-Status {:?}", answer.field("proxy-status")))
    } else if !answer.text().starts_with("paceline: ") || answer.text().trim_end().contains('\n') {
        Some(format!("text {:?}", answer.text()))
    } else if !says("connection", "close") {
        Some("the answer does not announce the end".to_owned())
    } else if !rest.as_ref().is_ok_and(Vec::is_empty) {
        Some(format!("the connection goes on: {rest:?}"))
    } else {
        None
    }
}

/// Sends a request that must be refused; what is wrong if it is not.
fn refused(ways: &Ways, way: Way, request: &[u8], status: u16) -> Option<String> {
    let before = ways.arrivals(way).len();
    let mut session = ways.session(way);
    // A long one may be refused, and the connection closed, before all of it is sent.
    let _ = session.send(&way.fill(request));
    let fault = match session.answer() {
        Err(e) => Some(format!("no answer: {e}")),
        Ok(answer) => fault_in(&answer, status, session.rest()),
    };
    fault.or_else(|| (ways.arrivals(way).len() > before).then(|| "the origin saw it".to_owned()))
}

/// A name, a request and its status.
type Row = (&'static str, Vec<u8>, u16);

fn row(name: &'static str, request: impl AsRef<[u8]>, status: u16) -> Row {
    (name, request.as_ref().to_vec(), status)
}

fn get(target: &str, fields: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: {{H}}\r\n{fields}\r\n")
}

fn post(fields: &str, body: &str) -> String {
    format!("POST {{U}}/x HTTP/1.1\r\nHost: {{H}}\r\n{fields}\r\n{body}")
}

fn chunked(body: &str) -> String {
    post("Transfer-Encoding: chunked\r\n", body)
}

fn lengths_and_codings() -> Vec<Row> {
    let te = |name, value: &str, status| {
        row(
            name,
            post(&format!("Transfer-Encoding: {value}\r\n"), "0\r\n\r\n"),
            status,
        )
    };
    let cl = |name, value: &str| {
        row(
            name,
            post(&format!("Content-Length: {value}\r\n"), "hello"),
            400,
        )
    };
    let both = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n";
    let old = post("Transfer-Encoding: chunked\r\n", "0\r\n\r\n").replace("HTTP/1.1", "HTTP/1.0");
    vec![
        row("CL and TE", post(both, "0\r\n\r\n"), 400),
        row(
            "TE and CL",
            post(
                "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
                "0\r\n\r\n",
            ),
            400,
        ),
        te("TE xchunked", "xchunked", 400),
        te("TE chunked, identity", "chunked, identity", 400),
        te("TE identity", "identity", 400),
        te("TE with a parameter", "chunked;q=1", 400),
        te("TE quoted", "\"chunked\"", 400),
        te("TE after a vertical tab", "\x0bchunked", 400),
        te("TE before a NUL", "chunked\0", 400),
        te("TE after a comma", ",chunked", 400),
        te("TE before a comma", "chunked,", 400),
        te("TE chunked twice", "chunked, chunked", 400),
        te("TE x, chunked", "x, chunked", 501),
        te("TE gzip, chunked", "gzip, chunked", 501),
        row(
            "two TE",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                "0\r\n\r\n",
            ),
            400,
        ),
        row(
            "TE, then identity",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
                "0\r\n\r\n",
            ),
            400,
        ),
        row(
            "identity, then TE",
            post(
                "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
                "0\r\n\r\n",
            ),
            400,
        ),
        row("TE in HTTP/1.0", old, 400),
        row(
            "two equal CL",
            post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello"),
            400,
        ),
        row(
            "two different CL",
            post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello!"),
            400,
        ),
        cl("CL in a list", "5, 5"),
        cl("CL +5", "+5"),
        cl("CL -5", "-5"),
        cl("CL 0x5", "0x5"),
        cl("CL 5_0", "5_0"),
        cl("CL 05", "05"),
        cl("CL empty", ""),
        cl("CL 5 5", "5 5"),
        cl("CL 2^63", "9223372036854775808"),
        cl("CL 2^64", "18446744073709551616"),
        cl("CL of 40 digits", &"9".repeat(40)),
        row(
            "Connection names CL",
            post(
                "Connection: close, Content-Length\r\nContent-Length: 5\r\n",
                "hello",
            ),
            400,
        ),
        row(
            "Connection names TE",
            post(
                "Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n",
                "0\r\n\r\n",
            ),
            400,
        ),
        row(
            "Connection names Host",
            get("{U}/x", "Connection: host\r\n"),
            400,
        ),
    ]
}

fn lines_and_fields() -> Vec<Row> {
    let fine = get("{U}/x", "X: y\r\n");
    let many: String = (0..101).map(|n| format!("X-{n}: y\r\n")).collect();
    vec![
        row("bare LF everywhere", fine.replace("\r\n", "\n"), 400),
        row(
            "bare LF after the request line",
            fine.replacen("\r\n", "\n", 1),
            400,
        ),
        row("bare LF after a field", fine.replace("y\r\n", "y\n"), 400),
        row(
            "bare LF at the end",
            fine.replace("\r\n\r\n", "\r\n\n"),
            400,
        ),
        row("LF CR", fine.replace("\r\n", "\n\r"), 400),
        row("bare CR in a value", fine.replace(": y", ": y\rz"), 400),
        row("bare CR as line end", fine.replace("y\r\n", "y\r"), 400),
        row(
            "CR LF CR X at the end",
            fine.replace("\r\n\r\n", "\r\n\rX"),
            400,
        ),
        row("NUL in a value", fine.replace(": y", ": \0y"), 400),
        row("DEL in a value", fine.replace(": y", ": \x7fy"), 400),
        row("folded field", fine.replace(": y", ": y\r\n z"), 400),
        row("folded with a tab", fine.replace(": y", ":\r\n\ty"), 400),
        row("folded first field", fine.replace("Host", " Host"), 400),
        row("folded Host", fine.replace("Host: ", "Host:\r\n "), 400),
        row(
            "folded TE",
            post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"),
            400,
        ),
        row("space before the colon", fine.replace("X:", "X :"), 400),
        row("space in a name", fine.replace("X:", "X Y:"), 400),
        row("name that is no token", fine.replace("X:", "X(Y):"), 400),
        row("name of obs-text", fine.replace("X:", "X\u{e9}:"), 400),
        row("no name", fine.replace("X:", ":"), 400),
        row("no colon", fine.replace("X: y", "X"), 400),
        row("no Host", fine.replace("Host: {H}\r\n", ""), 400),
        row("two Hosts", get("{U}/x", "Host: {H}\r\n"), 400),
        row(
            "two different Hosts",
            get("{U}/x", "host: other.test\r\n"),
            400,
        ),
        row("Host with a path", fine.replace("{H}", "{H}/x"), 400),
        row("Host with userinfo", fine.replace("{H}", "u@{H}"), 400),
        row("Host list", fine.replace("{H}", "{H}, {H}"), 400),
        row(
            "three empty lines before",
            format!("\r\n\r\n\r\n{fine}"),
            400,
        ),
        row(
            "a thousand empty lines before",
            "\r\n".repeat(1000) + &fine,
            400,
        ),
        row("101 fields", get("{U}/x", &many), 431),
        row("5,000 fields", get("{U}/x", &"X: y\r\n".repeat(5_000)), 431),
        row(
            "100 KiB in one field",
            get("{U}/x", &format!("X: {}\r\n", "y".repeat(100 * 1024))),
            431,
        ),
        row(
            "100 KiB in fields",
            get(
                "{U}/x",
                &format!("X: {}\r\n", "y".repeat(5 * 1024)).repeat(20),
            ),
            431,
        ),
    ]
}

fn request_lines() -> Vec<Row> {
    let fine = get("{U}/x", "");
    let version = |name, version: &str| row(name, fine.replace("HTTP/1.1", version), 400);
    let target = |name, target: &str| row(name, get(target, ""), 400);
    vec![
        version("HTTP/2.0", "HTTP/2.0"),
        version("HTTP/1.2", "HTTP/1.2"),
        version("HTTP/0.9", "HTTP/0.9"),
        version("HTTP/1.1x", "HTTP/1.1x"),
        version("http/1.1", "http/1.1"),
        version("trailing space", "HTTP/1.1 "),
        row("no version", fine.replace(" HTTP/1.1", ""), 400),
        row("two spaces", fine.replace(" HTTP/1.1", "  HTTP/1.1"), 400),
        row(
            "tab for a space",
            fine.replace(" HTTP/1.1", "\tHTTP/1.1"),
            400,
        ),
        row("method that is no token", fine.replace("GET", "G\"T"), 400),
        row("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        target("space in the target", "{U}/a b"),
        target("control in the target", "{U}/a\x01b"),
        target("NUL in the target", "{U}/a\0b"),
        target("fragment", "{U}/a#b"),
        target("bracket in the path", "{U}/<script>"),
        row(
            "target that is no UTF-8",
            b"GET {U}/\xff HTTP/1.1\r\nHost: {H}\r\n\r\n",
            400,
        ),
        row(
            "target of 70 KB",
            get(&format!("{{U}}/{}", "a".repeat(70_000)), ""),
            414,
        ),
        row(
            "target of 1 MB without an end",
            format!("GET {{U}}/{}", "a".repeat(1_000_000)),
            414,
        ),
    ]
}

fn chunks() -> Vec<Row> {
    let rest = "\r\nhello\r\n0\r\n\r\n";
    vec![
        row("LF in an extension", chunked(&format!("5;\n{rest}")), 400),
        row("CR in an extension", chunked(&format!("5;a\rb{rest}")), 400),
        row(
            "NUL in an extension",
            chunked(&format!("5;a\0b{rest}")),
            400,
        ),
        row("space after the size", chunked(&format!("5 {rest}")), 400),
        row("size with a sign", chunked(&format!("+5{rest}")), 400),
        row("size with 0x", chunked(&format!("0x5{rest}")), 400),
        row(
            "size of 17 digits",
            chunked(&format!("00000000000000005{rest}")),
            400,
        ),
        row(
            "size of 2^64 + 5",
            chunked(&format!("10000000000000005{rest}")),
            400,
        ),
        row("no size", chunked(rest), 400),
        row("data without CRLF", chunked("5\r\nhelloXX0\r\n\r\n"), 400),
        row("data with LF", chunked("5\r\nhello\n0\r\n\r\n"), 400),
        row("data with CR", chunked("5\r\nhello\r0\r\n\r\n"), 400),
        row("LF after the size", chunked("5\nhello\r\n0\r\n\r\n"), 400),
        row("LF at the end", chunked("5\r\nhello\r\n0\n\n"), 400),
        row("trailer that is none", chunked("0\r\nX\r\n\r\n"), 400),
        row("folded trailer", chunked("0\r\nX: y\r\n z\r\n\r\n"), 400),
        row(
            "bare LF in a trailer",
            chunked("0\r\nX: y\nZ: z\r\n\r\n"),
            400,
        ),
    ]
}

/// These come in several reads; so the request is under way when the fault is seen.
fn long_chunks() -> Vec<Row> {
    let trailers: String = (0..1_000).map(|n| format!("X-{n}: y\r\n")).collect();
    vec![
        row(
            "extension of 20 KiB",
            chunked(&format!(
                "5;{}\r\nhello\r\n0\r\n\r\n",
                "x".repeat(20 * 1024)
            )),
            400,
        ),
        row(
            "100,000 chunks with extensions",
            chunked(&("1;x\r\na\r\n".repeat(100_000) + "0\r\n\r\n")),
            400,
        ),
        row(
            "1,000 trailers",
            chunked(&format!("0\r\n{trailers}\r\n")),
            400,
        ),
        row(
            "trailer of 1 MB",
            chunked(&format!("0\r\nX: {}\r\n\r\n", "y".repeat(1_000_000))),
            400,
        ),
    ]
}

fn all_refused(
    rows: &[Row],
    ways: &[Way],
    check: impl Fn(&Ways, Way, &[u8], u16) -> Option<String>,
) {
    let bed = Ways::open();
    let mut faults = Vec::new();
    for way in ways {
        for (name, request, status) in rows {
            faults.extend(
                check(&bed, *way, request, *status).map(|f| format!("{way:?}, {name}: {f}")),
            );
        }
    }
    assert!(
        faults.is_empty(),
        "{} rows:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

const BOTH: [Way; 2] = [Way::Plain, Way::Inside];

#[test]
fn ambiguous_lengths_and_codings_are_refused() {
    all_refused(&lengths_and_codings(), &BOTH, refused);
}

#[test]
fn lines_and_fields_that_parsers_differ_about_are_refused() {
    all_refused(&lines_and_fields(), &BOTH, refused);
}

#[test]
fn request_lines_that_are_not_exactly_so_are_refused() {
    all_refused(&request_lines(), &BOTH, refused);
}

#[test]
fn malformed_chunks_are_refused() {
    all_refused(&chunks(), &BOTH, refused);
}

#[test]
fn what_is_not_http_at_all_is_refused_at_once() {
    let rows = [
        row(
            "a ClientHello",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            400,
        ),
        row("SOCKS 5", b"\x05\x01\x00", 400),
        row("SOCKS 4", b"\x04\x01\x00\x50", 400),
        row("SSH", b"SSH-2.0-OpenSSH_9.2\r\n", 400),
        row("PROXY v1", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n", 400),
        row("PROXY v2", b"\r\n\r\n\0\r\nQUIT\n", 400),
        row(
            "CONNECT with a length",
            b"CONNECT plain.test:443 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
            400,
        ),
        row(
            "CONNECT with chunks",
            b"CONNECT plain.test:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        row(
            "CONNECT with a NUL",
            b"CONNECT plain\0.test:443 HTTP/1.1\r\n\r\n",
            400,
        ),
        row(
            "CONNECT with a fragment",
            b"CONNECT plain.test#x:443 HTTP/1.1\r\n\r\n",
            400,
        ),
        row(
            "CONNECT of 1 MB",
            "CONNECT ".to_owned() + &"a".repeat(1_000_000),
            414,
        ),
    ];
    all_refused(&rows, &[Way::Plain], refused);
}

#[test]
fn a_body_that_turns_out_malformed_never_ends_as_if_it_were_whole() {
    // The origin sees these begin, and would answer 200 if it saw one of them end.
    let check = |bed: &Ways, way: Way, request: &[u8], status| {
        let mut session = bed.session(way);
        let _ = session.send(&way.fill(request));
        match session.answer() {
            Err(e) => Some(format!("no answer: {e}")),
            Ok(answer) => fault_in(&answer, status, session.rest()),
        }
    };
    all_refused(&long_chunks(), &BOTH, check);

    let bed = Ways::open();
    for way in BOTH {
        for (first, second) in [
            ("5\r\nhel", "loXX0\r\n\r\n"),
            ("5\r\nhello\r\n", "0\n\n"),
            ("1\r\na\r\n1;", "\n\r\nb\r\n0\r\n\r\n"),
        ] {
            let mut session = bed.session(way);
            let before = bed.arrivals(way).len();
            session.send(&way.fill(chunked(first).as_bytes())).unwrap();
            crate::bed::await_until::await_until(
                "the request to begin",
                Duration::from_secs(10),
                || (bed.arrivals(way).len() > before).then_some(()),
            );
            session.send(second.as_bytes()).unwrap();
            let answer = session.answer().unwrap();
            assert_eq!(
                fault_in(&answer, 400, session.rest()),
                None,
                "{way:?} {second:?}"
            );
        }
    }
}

#[test]
fn requests_before_a_malformed_one_are_answered_first_and_none_after_it() {
    let bed = Ways::open();
    for way in BOTH {
        let before = bed.arrivals(way).len();
        let good = |n: usize| get(&format!("{{U}}/b/{n}"), "");
        let bad = get("{U}/x", "Content-Length: 1\r\nContent-Length: 1\r\n");
        let stream = good(1) + &good(2) + &bad + &good(3);
        for pieces in [1, 40] {
            let mut session = bed.session(way);
            let bytes = way.fill(stream.as_bytes());
            for piece in bytes.chunks(bytes.len().div_ceil(pieces)) {
                // The last pieces may come too late.
                let _ = session.send(piece);
            }
            for length in [1, 2] {
                let answer = session.answer().unwrap();
                assert_eq!((answer.status(), answer.body.len()), (200, length));
            }
            let answer = session.answer().unwrap();
            assert_eq!(fault_in(&answer, 400, session.rest()), None, "{way:?}");
        }
        assert_eq!(bed.arrivals(way).len() - before, 4, "{way:?}");
    }
}

#[test]
fn eight_pipelined_requests_are_eight_requests_answered_in_order() {
    let bed = Ways::open();
    for way in BOTH {
        let mut session = bed.session(way);
        let eight: String = (1..=8).map(|n| get(&format!("{{U}}/b/{n}"), "")).collect();
        session.send(&way.fill(eight.as_bytes())).unwrap();
        for n in 1..=8 {
            let answer = session.answer().unwrap();
            assert_eq!((answer.status(), answer.body.len()), (200, n));
        }
        let targets: Vec<String> = bed.arrivals(way).into_iter().map(|a| a.target).collect();
        assert_eq!(
            targets,
            (1..=8).map(|n| format!("/b/{n}")).collect::<Vec<_>>(),
            "{way:?}"
        );
    }
}

#[test]
fn a_body_longer_than_its_length_is_a_request_of_its_own() {
    let bed = Ways::open();
    for way in BOTH {
        let mut session = bed.session(way);
        let tail = get("{U}/b/3", "");
        session
            .send(&way.fill(post("Content-Length: 5\r\n", &format!("hello{tail}")).as_bytes()))
            .unwrap();
        assert!(
            session.answer().unwrap().text().starts_with("5 "),
            "{way:?}"
        );
        assert_eq!(session.answer().unwrap().body.len(), 3, "{way:?}");
        assert_eq!(bed.arrivals(way).len(), 2);
    }
}

#[test]
fn what_is_well_formed_arrives_as_it_was_sent() {
    let bed = Ways::open();
    for way in BOTH {
        for target in [
            "//evil",
            "/%00%2f..//.",
            "/a\\b",
            "/\u{e9}",
            "/a?b=c?d/e&f[]=g|h",
        ] {
            let mut session = bed.session(way);
            session
                .send(&way.fill(get(&format!("{{U}}{target}"), "").as_bytes()))
                .unwrap();
            let answer = session.answer().unwrap();
            assert_eq!(answer.status(), 200, "{way:?} {target}: {}", answer.text());
            assert_eq!(bed.arrivals(way).last().unwrap().target, target, "{way:?}");
        }
        let long = "y".repeat(15 * 1024);
        for (request, body) in [
            (post("Content-Length: \t5 \r\nX_Y: z\r\n", "hello"), 5),
            (
                format!("\r\n\r\n{}", post("Content-Length: 5\r\n", "hello")),
                5,
            ),
            (
                post(
                    &format!("X: {long}\r\nTransfer-Encoding: Chunked\r\n"),
                    "5;a=b\r\nhello\r\n6\t; c\r\n world\r\n0\r\nX: y\r\n\r\n",
                ),
                11,
            ),
        ] {
            for pieces in [1, request.len()] {
                let mut session = bed.session(way);
                let bytes = way.fill(request.as_bytes());
                for piece in bytes.chunks(bytes.len().div_ceil(pieces.min(300))) {
                    session.send(piece).unwrap();
                }
                let answer = session.answer().unwrap();
                let text = answer.text();
                assert!(
                    text.starts_with(&format!("{body} ")),
                    "{way:?} {request:.99}: {} {text}",
                    answer.status()
                );
                // Still in step.
                session
                    .send(&way.fill(get("{U}/b/7", "").as_bytes()))
                    .unwrap();
                assert_eq!(session.answer().unwrap().body.len(), 7);
            }
        }
        let posted = bed
            .arrivals(way)
            .into_iter()
            .find(|a| a.method == "POST")
            .unwrap();
        assert_eq!(posted.field("content-length"), Some("5"));
        assert_eq!(posted.field("x_y"), Some("z"));
    }
}

#[test]
fn a_refusal_is_counted_and_has_the_form_that_its_method_needs() {
    let bed = Ways::open();
    let mut session = bed.replica.session(PLAIN);
    session
        .send(b"CONNECT plain.test:80 HTTP/1.1\r\nFolded:\r\n field\r\n\r\n")
        .unwrap();
    let answer = session.answer().unwrap();
    assert!(
        answer.head.start_line.contains("folded"),
        "the phrase says why: {}",
        answer.head.start_line
    );

    let mut head = TcpStream::connect(bed.replica.proxy()).unwrap();
    head.write_all(b"HEAD http://plain.test/ HTTP/1.1\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    head.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 400") && text.ends_with("\r\n\r\n"),
        "no body for HEAD: {text}"
    );
}

#[test]
fn a_client_that_stops_within_a_head_is_told_so() {
    let bed = Ways::open();
    let mut client = TcpStream::connect(bed.replica.proxy()).unwrap();
    client
        .write_all(b"GET http://plain.test/ HTTP/1.1\r\nHost: pl")
        .unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 400") && text.contains("ended within a request head"),
        "{text}"
    );
    assert_eq!(bed.plain.arrivals().len(), 0);
}
