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
