//! What is fuzzed: each target takes any bytes and holds the program to what it promises of them. Two runners use them:
//! `tests/fuzz.rs`, in every test run, and libFuzzer by way of `fuzz/fuzz_targets`, by hand.
//!
//! A new parser of bytes from outside gets a function here, a row in [`ALL`], and a file in `fuzz/fuzz_targets`.

use std::{path::Path, str::FromStr as _};

use bytes::BytesMut;
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, PROXY_AUTHORIZATION, TRANSFER_ENCODING},
};
use paceline::{
    authority::{Authority, Host, HostPattern},
    config::Config,
    downstream::framing::{Fault, Framing},
    headers,
    http1::{
        body::{Decoder, Part},
        head,
    },
    listener::proxy_protocol,
    membership::{cluster::Cluster, lease::Lease},
    pacing::{
        throttle::{
            CAP, Moment, Rules, Throttle,
            tracker::{Event, Tracker},
        },
        time::{LocalTime, SECOND},
    },
    store::postgres::address::Address,
};

/// A function of bytes, with inputs to begin from.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    pub seeds: &'static [&'static str],
}

pub const ALL: &[Target] = &[
    Target {
        name: "authority",
        run: authority,
        seeds: &[
            "lh3.googleusercontent.com:443",
            "[2001:db8::7]:8443",
            "192.0.2.1:80",
            "B\u{fc}cher.example.:443",
            "xn--bcher-kva.example",
            "*.example.com",
            "u:p@host:443",
            "127.1",
            "0x7f.1:1",
            "[::ffff:127.0.0.1]:1",
        ],
    },
    Target {
        name: "answer",
        run: answer,
        seeds: &[
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 299 So so\r\nX: \r\nx: y\r\n\r\nabc",
        ],
    },
    Target {
        name: "request",
        run: request,
        seeds: &[
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST http://a/ HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nA: b\r\n\r\n",
            "CONNECT a:443 HTTP/1.1\r\n\r\n\u{16}\u{3}\u{1}",
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nxyz",
            "GET / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.1\nHost: a\n\n",
            "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ],
    },
    Target {
        name: "fields",
        run: fields,
        seeds: &[
            "Priority: u=0, i\nPaceline-Max-Wait: 5s\nVia: 1.1 paceline",
            "Connection: close, X-Secret, Content-Length\nX-Secret: 1\nContent-Length: 5\nKeep-Alive: 5\nTE: trailers",
            "Transfer-Encoding: chunked\nProxy-Authorization: Basic eDp5\nProxy-Connection: keep-alive",
            "Upgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Key: x\nSec-WebSocket-Version: 13",
            "Retry-After: 120\nDate: Sun, 06 Nov 1994 08:49:37 GMT",
            "Retry-After: Sun, 06 Nov 1994 08:50:37 GMT\nDate: Sunday, 06-Nov-94 08:49:37 GMT",
            "Paceline-Max-Wait: 1e308\nPriority: u=9;u=1\nProxy-Status: paceline; error=x",
        ],
    },
    Target {
        name: "hello",
        run: hello,
        seeds: &[
            "\u{16}\u{3}\u{1}\0\u{5}\u{1}\0\0\u{1}\0",
            "\u{16}\u{3}\u{3}\0\u{1}\u{1}\u{16}\u{3}\u{3}\0\u{3}\0\0\0",
            "GET / HTTP/1.1\r\n",
        ],
    },
    Target {
        name: "config",
        run: config,
        seeds: &[
            "[proxy]\nlisten = \"127.0.0.1:0\"\nmax_wait = \"5s\"\nallow_clients = [\"private\", \"10.0.0.0/8\"]\n\
             [proxy.auth]\nusers = { a = \"sha256:00\" }\n[admin]\nlisten = \"127.0.0.1:1\"\ntoken = \"hunter2\"\n\
             [[destination]]\nname = \"a\"\nhosts = [\"*.example.com\"]\nrate = \"30/min\"\n",
            "[store]\nurl = \"postgres://u:hunter2@db/x?sslmode=require\"\ntable = \"a.b\"\nkey_prefix = \"k:\"\n\
             max_replicas = 3\nlease_ttl = \"5m\"\n[upstream]\nresolve = { \"a:1\" = \"b:2\" }\n[ca]\ndir = \"certs\"\n\
             [[destination]]\nname = \"a\"\nhosts = [\"a.test\"]\nrate = 7.0\nlockout_status = [403]\n",
        ],
    },
    Target {
        name: "proxy_header",
        run: proxy_header,
        seeds: &[
            "PROXY TCP4 192.0.2.1 192.0.2.2 12345 443\r\nGET ",
            "PROXY TCP6 2001:db8::1 ::1 1 65535\r\n",
            "PROXY UNKNOWN\r\n",
            "\r\n\r\n\0\r\nQUIT\n\u{21}\u{11}\0\u{c}\u{7f}\0\0\u{1}\u{7f}\0\0\u{2}\0\u{50}\u{1}\u{1b}",
            "\r\n\r\n\0\r\nQUIT\n\u{20}\0\0\0",
        ],
    },
    Target {
        name: "lease",
        run: lease,
        seeds: &[
            "1700000000000000000 a1b2 {\"replica\":\"r0\",\"ceilings\":{\"d\":7.0},\"dispatches\":{\"d\":12},\
             \"seconds\":{\"d\":{\"1700000000\":7}},\"failing\":[\"d\"],\"shares\":3}",
            "-9223372036854775808 x {\"replica\":\"\"}",
            "5 x {\"replica\":\"r\",\"dispatches\":{\"d\":18446744073709551615},\"seconds\":{\"d\":{\"1700000000\":18446744073709551615}}}",
            "free",
            "1 2 3",
        ],
    },
    Target {
        name: "throttle",
        run: throttle,
        seeds: &[
            "4 {\"version\":1700000000000000,\"episode\":2,\"multiplier\":4,\"clean\":7,\"hold\":{\"at\":1},\"lockout\":{\"at\":2},\
             \"pause\":{\"at\":0},\"evidence\":[[12345,1700000000000000000,403]]}",
            "0 {\"version\":3,\"episode\":1,\"multiplier\":1,\"clean\":0,\"hold\":{\"at\":0},\"lockout\":{\"at\":2,\
             \"until\":1700000060000000000,\"span\":900000000000,\"status\":403},\"pause\":{\"at\":0},\"evidence\":[]}",
            "16 {\"version\":18446744073709551615,\"episode\":18446744073709551615,\"multiplier\":16,\"clean\":4294967295,\
             \"hold\":{\"at\":18446744073709551615},\"lockout\":{\"at\":0},\"pause\":{\"at\":0},\"evidence\":[]}",
        ],
    },
    Target {
        name: "store_url",
        run: store_url,
        seeds: &[
            "postgres://u:hunter2@db.internal:5432,other/x?sslmode=verify-full&target_session_attrs=read-write",
            "postgresql:///x?host=/tmp&application_name=a%20b",
            "postgres://u:hun@ter2@db/x",
        ],
    },
];

/// Puts a target's seeds where libFuzzer looks for inputs to begin from: in `corpus/NAME` of the working directory.
#[allow(dead_code, reason = "libFuzzer's side alone needs it")]
pub fn write_seeds(name: &str) {
    for target in ALL.iter().filter(|target| target.name == name) {
        for (n, seed) in target.seeds.iter().enumerate() {
            // Fuzzing goes on without them.
            let _ = std::fs::write(format!("corpus/{name}/seed-{n}"), seed);
        }
    }
}

/// What is parsed is printed in one way only, and that way means the same.
pub fn authority(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(parsed) = Authority::parse(&text, Some(443)) {
        assert_ne!(parsed.port, 0);
        assert_folded(&parsed.host);
        assert_eq!(
            Authority::parse(&parsed.to_string(), None).as_ref(),
            Ok(&parsed)
        );
    }
    if let Ok(host) = Host::parse(&text) {
        assert_folded(&host);
        assert_eq!(Host::parse(&host.to_string()).as_ref(), Ok(&host));
    }
    if let Ok(pattern) = HostPattern::from_str(&text) {
        assert!(pattern.overlaps(&pattern));
        assert_eq!(
            HostPattern::from_str(&pattern.to_string()).as_ref(),
            Ok(&pattern)
        );
    }
}

fn assert_folded(host: &Host) {
    match host {
        Host::Name(name) => {
            assert!((1..=253).contains(&name.len()) && !name.ends_with('.'));
            assert!(name.split('.').all(|label| (1..=63).contains(&label.len())));
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._".contains(&b);
            assert!(name.bytes().all(plain), "{name:?}");
        }
        Host::Ip(ip) => assert_eq!(ip.to_canonical(), *ip),
    }
}

/// An answer is read, or is malformed, the same however its bytes are cut; what is read can be written and is read again. The
/// first byte says how they are cut.
pub fn answer(bytes: &[u8]) {
    let Some((cut, stream)) = bytes.split_first() else {
        return;
    };
    let whole = read_answer([stream]);
    let piecewise = read_answer(stream.chunks(usize::from(*cut).max(1)));
    assert_eq!(whole, piecewise);
}

/// The head as it is written again, the data, and whether it ended; or nothing where it is malformed.
fn read_answer<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Option<(Option<BytesMut>, Vec<u8>, bool)> {
    let (mut buffer, mut data) = (BytesMut::new(), Vec::new());
    let (mut written, mut seen) = (None, 0);
    let mut decoder = Decoder::Over;
    for piece in pieces {
        buffer.extend_from_slice(piece);
        if written.is_none() {
            let Some((parts, spelling)) = head::response(&mut buffer, &mut seen).ok()? else {
                continue;
            };
            let mut again = BytesMut::new();
            head::write_status_line(&parts, parts.version == Version::HTTP_10, &mut again);
            spelling.write(&parts.headers, &mut again);
            again.extend_from_slice(b"\r\n");
            let (same, _) = head::response(&mut again.clone(), &mut 0).ok()??;
            assert_eq!((same.status, &same.headers), (parts.status, &parts.headers));
            decoder = match parts.headers.contains_key(TRANSFER_ENCODING) {
                true => Decoder::chunked(),
                false => Decoder::UntilClose,
            };
            written = Some(again);
        }
        let mut readable = buffer.len();
        loop {
            match decoder.decode(&mut buffer, &mut readable).ok()? {
                Part::Data(part) => data.extend_from_slice(&part),
                Part::Trailers(_) => {}
                Part::End | Part::Later => break,
            }
            assert_eq!(readable, buffer.len());
        }
    }
    if written.is_none() {
        // A head of which no line has ended is not looked at with each byte.
        head::response(&mut buffer, &mut 0).ok()?;
    }
    Some((written, data, decoder.is_over()))
}

/// What passes does not depend on how the bytes were cut, and nothing passes after a fault. The first byte says how they
/// are cut.
pub fn request(bytes: &[u8]) {
    let Some((cut, stream)) = bytes.split_first() else {
        return;
    };
    let whole = follow([stream]);
    let piecewise = follow(stream.chunks(usize::from(*cut).max(1)));
    match (whole, piecewise) {
        ((passed, heads, None), other) => assert_eq!(other, (passed, heads, None)),
        // How much of a request has passed before its fault shows depends on the cuts, but not what is wrong.
        ((.., fault), (.., other)) => assert_eq!(fault, other),
    }
}

/// Bytes that passed, heads among them, and what was wrong.
fn follow<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (usize, u64, Option<paceline::error::Error>) {
    let (mut framing, mut held, mut passed) = (Framing::default(), Vec::new(), 0);
    for piece in pieces {
        held.extend_from_slice(piece);
        let (passing, fault) = framing.follow(&held);
        assert!(passing <= held.len());
        passed += passing;
        held.drain(..passing);
        if let Some(Fault::Refused(e) | Fault::Broken(e)) = fault {
            assert!((400..=599).contains(&e.status(StatusCode::SERVICE_UNAVAILABLE).as_u16()));
            assert_eq!(framing.follow(b"GET / HTTP/1.0\r\n\r\n"), (0, None));
            return (passed, framing.heads(), Some(e));
        }
    }
    (passed, framing.heads(), None)
}

/// What ends at a proxy goes no further, and what is read of a field has its bounds.
pub fn fields(bytes: &[u8]) {
    let mut map = HeaderMap::new();
    for line in bytes.split(|b| *b == b'\n') {
        let mut parts = line.splitn(2, |b| *b == b':');
        let name = parts
            .next()
            .and_then(|name| HeaderName::from_bytes(name).ok());
        let value = parts.next().map(<[u8]>::trim_ascii);
        let value = value.and_then(|value| HeaderValue::from_bytes(value).ok());
        if let (Some(name), Some(value)) = (name, value) {
            map.append(name, value);
        }
    }
    assert!(headers::urgency(&map) <= 7);
    let _ = headers::max_wait(&map);
    assert_ne!(headers::retry_after(&map), Some(std::time::Duration::ZERO));
    let _ = headers::has_passed_us(&map);
    let _ = headers::asks_for_websocket(&map);
    let _ = headers::is_framed_well(StatusCode::OK, &map);
    let framing = [CONTENT_LENGTH, TRANSFER_ENCODING].map(|name| map.get_all(name).iter().count());
    let (mut up, mut down) = (map.clone(), map);
    headers::strip_request(&mut up);
    headers::strip_response(&mut down);
    let kept = [CONTENT_LENGTH, TRANSFER_ENCODING].map(|name| up.get_all(name).iter().count());
    assert_eq!(kept, framing, "no Connection field unframes a request");
    for map in [&up, &down] {
        for name in ["keep-alive", "proxy-connection", "upgrade"] {
            assert!(!map.contains_key(name), "{name}");
        }
        assert!(
            !map.keys()
                .any(|name| name.as_str().starts_with("paceline-"))
        );
    }
    assert!(!up.contains_key(PROXY_AUTHORIZATION));
    assert!(!down.contains_key(CONNECTION) && !down.contains_key(TRANSFER_ENCODING));
}

/// A ClientHello, whole or in pieces, never takes the process with it (RUSTSEC-2024-0399 did). The name in it is read as
/// any other.
pub fn hello(bytes: &[u8]) {
    let mut acceptor = rustls::server::Acceptor::default();
    for mut piece in bytes.chunks(7) {
        while !piece.is_empty() {
            if acceptor.read_tls(&mut piece).is_err() {
                return;
            }
        }
        match acceptor.accept() {
            Ok(None) => {}
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                if let Some(Ok(host)) = hello.server_name().map(Host::parse) {
                    assert_folded(&host);
                }
                return;
            }
            Err(_) => return,
        }
    }
}

/// Any text is a configuration or a list of mistakes, each in one line and without a secret.
pub fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match Config::parse(&text, Path::new("paceline.toml"), &|_| None) {
        Ok(config) => {
            let shown = format!("{} {config:?}", config.summary());
            // Where it stands in another place than a secret's, it may be shown.
            let secret = config.admin.token.iter().any(|t| t.reveal() == "hunter2");
            let elsewhere = text.matches("hunter2").count() > 1;
            assert!(!secret || elsewhere || !shown.contains("hunter2"));
        }
        Err(faults) => {
            for fault in faults.iter() {
                let line = fault.to_string();
                assert!(!line.contains('\n') && line.len() < 4_096, "{line}");
            }
        }
    }
}

/// A header is found whole or not at all, whatever comes behind it, and takes no more than there is.
pub fn proxy_header(bytes: &[u8]) {
    let whole = proxy_protocol::parse(bytes);
    if let Ok(Some(header)) = &whole {
        assert!(header.length <= bytes.len());
        for end in 0..bytes.len() {
            match proxy_protocol::parse(&bytes[..end]) {
                Ok(None) => assert!(end < header.length, "{end} of {header:?}"),
                Ok(Some(earlier)) => {
                    assert_eq!(earlier, *header);
                    assert!(end >= header.length);
                }
                Err(e) => panic!("a part of a header is wrong, all of it is not: {e}"),
            }
        }
    }
}

/// A row that is a lease can be written again as it was read.
pub fn lease(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(lease) = Lease::parse(&text) {
        let again = format!(
            "{} {} {}",
            lease.at.0,
            lease.incarnation,
            lease.word.to_text()
        );
        assert_eq!(Lease::parse(&again).as_ref(), Some(&lease));
        let mut cluster = Cluster::default();
        for (incarnation, now) in [
            ("a", 1_700_000_000),
            ("b", 1_700_000_000),
            ("a", 1_700_000_001),
        ] {
            let lease = Lease {
                incarnation: incarnation.to_owned(),
                ..lease.clone()
            };
            cluster.hear(&lease, now, incarnation == "b");
            let _ = cluster.figures("d", now);
        }
    }
}

/// Whatever stands in the row of a throttle, what goes on from there keeps its bounds, and is written as it was read.
pub fn throttle(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let at = Moment {
        now: LocalTime(1_000 * SECOND),
        offset: Some(1_700_000_000 * SECOND),
    };
    if let Some(read) = Throttle::parse(&text, at) {
        let again = Throttle::parse(&read.to_text(at), at);
        assert!(again.is_some_and(|again| again.says_the_same(&read, at)));
    }
    let mut tracker = Tracker::new(Rules::default());
    tracker.seen(at, Some(&text));
    let episode = tracker.episode();
    for event in [
        Event::Clean { episode },
        Event::Throttled {
            episode,
            retry_after: Some(i64::MAX),
        },
        Event::Throttled {
            episode: u64::MAX,
            retry_after: None,
        },
        Event::Forbidden {
            url: 1,
            status: 403,
        },
        Event::Pause(i64::MAX),
        Event::Resume,
        Event::Unlock,
    ] {
        tracker.apply(at, event);
        if let Some(write) = tracker.write(at) {
            tracker.wrote(at, &write, true);
        }
        let regime = tracker.regime(at.now);
        assert!((1..=CAP).contains(&regime.multiplier), "{regime:?}");
        let later = Moment {
            now: at.now.plus(SECOND),
            ..at
        };
        tracker.seen(later, Some(&text));
        tracker.lapse(later);
    }
}

/// What is wrong with a URL is said without any of its password.
pub fn store_url(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    // Names a file of roots, which need not be read a million times.
    if text.contains("sslrootcert") {
        return;
    }
    match Address::parse(&text) {
        Ok(_) => {}
        Err(e) => {
            let said = format!("{e:?}");
            assert!(!said.contains("hunter2"), "{said}");
        }
    }
}
