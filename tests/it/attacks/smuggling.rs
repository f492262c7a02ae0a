//! Requests that two parsers read as two different things. Whoever passes one on smuggles; so each is refused, in clear text
//! and in a tunnel, and what is passed on has one form.

use std::{net::Shutdown, time::Duration};

use super::{BOTH, Reply, Row, Scene, arrived, both, get, post, request, row};
use crate::bed::scripted::Step;

fn bad(id: &'static str, what: &str, sends: impl AsRef<[u8]>) -> Row {
    row(id, what, sends, Reply::Ends(400, "http_request_error"))
}

fn bad_as(id: &'static str, what: &str, sends: impl AsRef<[u8]>, status: u16) -> Row {
    row(id, what, sends, Reply::Ends(status, "http_request_error"))
}

fn chunked(body: &str) -> String {
    post("Transfer-Encoding: chunked\r\n", body)
}

fn codings() -> Vec<Row> {
    let both = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n";
    let back = "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n";
    let chunks = "5\r\nhello\r\n0\r\n\r\n";
    let smuggled = "0\r\n\r\nGET {U}/evil-{n} HTTP/1.1\r\nHost: {H}\r\n\r\n";
    let mut rows = vec![
        bad("D01", "a length and chunks", post(both, smuggled)),
        bad(
            "D01",
            "a length of the smuggled",
            post(&both.replace(": 5", ": 50"), smuggled),
        ),
        bad(
            "D01",
            "a length of none and chunks",
            post(&both.replace(": 5", ": 0"), chunks),
        ),
        bad("D02", "chunks and a length", post(back, smuggled)),
        bad("D02", "chunks and a length, in a GET", get(back)),
        bad(
            "D04",
            "chunked twice",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                chunks,
            ),
        ),
        bad(
            "D04",
            "chunked, then identity",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
                chunks,
            ),
        ),
        bad(
            "D04",
            "identity, then chunked",
            post(
                "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
                chunks,
            ),
        ),
        bad(
            "D04",
            "chunked, then nothing",
            post(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding:\r\n",
                chunks,
            ),
        ),
        bad(
            "D05",
            "a space before the colon",
            post("Transfer-Encoding : chunked\r\n", chunks),
        ),
        bad(
            "D05",
            "a folded coding",
            post("Transfer-Encoding:\r\n chunked\r\n", chunks),
        ),
        bad(
            "D05",
            "a control in the name",
            post("Transfer-\x01Encoding: chunked\r\n", chunks),
        ),
        bad(
            "D05",
            "a bare CR before the name",
            post("X: y\rTransfer-Encoding: chunked\r\n", chunks),
        ),
        bad(
            "D05",
            "a bare LF before the name",
            post("X: y\nTransfer-Encoding: chunked\r\n", chunks),
        ),
        bad(
            "D06",
            "chunks in HTTP/1.0",
            post("Transfer-Encoding: chunked\r\n", chunks).replace("HTTP/1.1", "HTTP/1.0"),
        ),
        bad_as(
            "D07",
            "gzip below chunked",
            post("Transfer-Encoding: gzip, chunked\r\n", chunks),
            501,
        ),
        bad_as(
            "D07",
            "an unknown coding below chunked",
            post("Transfer-Encoding: x, chunked\r\n", chunks),
            501,
        ),
        bad(
            "D07",
            "gzip alone",
            post("Transfer-Encoding: gzip\r\n", "hello"),
        ),
    ];
    for coding in [
        "xchunked",
        "chunked, identity",
        "identity",
        "chunked;q=1",
        "\"chunked\"",
        "\x0bchunked",
        "chunked\0",
        ",chunked",
        "chunked,",
        "chunked, chunked",
        "chunkedx",
        "chunk",
        "",
        "chunked chunked",
        "\u{a0}chunked",
        "chunked\x0c",
        "[chunked]",
        "identity, chunked, identity",
    ] {
        rows.push(bad(
            "D03",
            &format!("coding {coding:?}"),
            post(&format!("Transfer-Encoding: {coding}\r\n"), chunks),
        ));
    }
    rows
}

fn lengths() -> Vec<Row> {
    let mut rows = vec![
        bad(
            "D08",
            "two equal lengths",
            post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello"),
        ),
        bad(
            "D08",
            "two lengths",
            post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello!"),
        ),
        bad(
            "D08",
            "two lengths in one field",
            post("Content-Length: 5, 5\r\n", "hello"),
        ),
        bad(
            "D08",
            "a length and an empty one",
            post("Content-Length: 5\r\nContent-Length:\r\n", "hello"),
        ),
        bad(
            "D08",
            "a space before the colon",
            post("Content-Length : 5\r\n", "hello"),
        ),
        bad(
            "D35",
            "Connection names the length",
            post(
                "Connection: close, Content-Length\r\nContent-Length: 5\r\n",
                "hello",
            ),
        ),
        bad(
            "D35",
            "Connection names the coding",
            post(
                "Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n",
                "0\r\n\r\n",
            ),
        ),
        bad(
            "D35",
            "Connection names the host",
            get("Connection: host\r\n"),
        ),
    ];
    for length in [
        "+5",
        "-5",
        "0x5",
        "5_0",
        "05",
        "",
        "5 5",
        "5,",
        ",5",
        "5.0",
        "5e0",
        "\u{ff15}",
        "5\x0b",
        "5;",
        "\"5\"",
        "9223372036854775808",
        "18446744073709551616",
        "18446744073709551621",
        "9999999999999999999999999999999999999999",
    ] {
        rows.push(bad(
            "D09",
            &format!("length {length:?}"),
            post(&format!("Content-Length: {length}\r\n"), "hello"),
        ));
    }
    rows
}

fn lines() -> Vec<Row> {
    let fine = get("X: y\r\n");
    let edited = |id, what: &str, from: &str, to: &str| {
        assert!(fine.contains(from), "{what} would change nothing");
        bad(id, what, fine.replace(from, to))
    };
    vec![
        edited("D17", "LF everywhere", "\r\n", "\n"),
        bad(
            "D17",
            "LF after the request line",
            fine.replacen("\r\n", "\n", 1),
        ),
        edited("D17", "LF after a field", "y\r\n", "y\n"),
        edited("D17", "LF at the end", "\r\n\r\n", "\r\n\n"),
        edited("D17", "LF CR everywhere", "\r\n", "\n\r"),
        edited(
            "D17",
            "LF, then a field that is another's",
            "X: y",
            "X: y\nX-Evil: {n}",
        ),
        edited("D18", "CR in a value", ": y", ": y\rz"),
        edited("D18", "CR as the end of a line", "y\r\n", "y\r"),
        edited("D18", "CR everywhere", "\r\n", "\r"),
        edited("D18", "CR LF CR X at the end", "\r\n\r\n", "\r\n\rX"),
        edited("D18", "CR CR LF", "y\r\n", "y\r\r\n"),
        edited("D19", "a NUL in a value", ": y", ": \0y"),
        edited("D19", "a NUL in a name", "X:", "X\0:"),
        edited("D19", "a DEL in a value", ": y", ": \x7fy"),
        edited("D19", "an escape in a value", ": y", ": \x1b[31m"),
        edited("D20", "a folded field", ": y", ": y\r\n z"),
        edited("D20", "a field folded with a tab", ": y", ":\r\n\ty"),
        edited("D20", "a folded first field", "Host", " Host"),
        edited("D20", "a folded Host", "Host: ", "Host:\r\n "),
        edited("D21", "a space before the colon", "X:", "X :"),
        edited("D21", "a tab before the colon", "X:", "X\t:"),
        edited("D21", "a space in a name", "X:", "X Y:"),
        edited("D21", "a name that is no token", "X:", "X(Y):"),
        edited("D21", "a name beyond ASCII", "X:", "X\u{e9}:"),
        edited("D21", "no name", "X:", ":"),
        edited("D21", "no colon", "X: y", "X"),
        edited("D22", "no Host", "Host: {H}\r\n", ""),
        edited("D22", "two Hosts", "X: y", "Host: {H}"),
        edited("D22", "two Hosts of two", "X: y", "host: evil.test"),
        edited("D22", "a Host with a path", "{H}", "{H}/x"),
        edited("D22", "a Host with a user", "{H}", "u@{H}"),
        edited("D22", "a list of Hosts", "{H}", "{H}, {H}"),
        edited("D22", "a Host with a space", "{H}", "{H} evil.test"),
        bad(
            "D30",
            "three empty lines before",
            format!("\r\n\r\n\r\n{fine}"),
        ),
        bad(
            "D30",
            "a thousand empty lines before",
            "\r\n".repeat(1000) + &fine,
        ),
        bad("D30", "a bare LF before", format!("\n{fine}")),
        bad("D30", "a space before", format!(" {fine}")),
    ]
}

fn request_lines() -> Vec<Row> {
    let fine = get("");
    let mut rows = vec![
        bad("D23", "no version", fine.replace(" HTTP/1.1", "")),
        bad("D23", "two spaces", fine.replace(" HTTP/1.1", "  HTTP/1.1")),
        bad(
            "D23",
            "a tab for a space",
            fine.replace(" HTTP/1.1", "\tHTTP/1.1"),
        ),
        bad(
            "D23",
            "a space behind",
            fine.replace("HTTP/1.1", "HTTP/1.1 "),
        ),
        bad(
            "D23",
            "two requests in one line",
            fine.replace(" HTTP/1.1", " HTTP/1.1 GET /evil HTTP/1.1"),
        ),
        bad(
            "D23",
            "a method that is no token",
            fine.replace("GET", "G\"T"),
        ),
        bad("D23", "no method", fine.replace("GET", "")),
        bad(
            "D24",
            "a target that is no UTF-8",
            b"GET {U}/{n}\xff HTTP/1.1\r\nHost: {H}\r\n\r\n",
        ),
        bad_as(
            "D24",
            "a target of 70 KB",
            request("GET", &format!("{{U}}/{}", "a".repeat(70_000)), "", ""),
            414,
        ),
        bad_as(
            "D24",
            "a target of 1 MB without an end",
            format!("GET {{U}}/{}", "a".repeat(1_000_000)),
            414,
        ),
    ];
    for target in [
        "/{n} b",
        "/{n}\x01b",
        "/{n}\0b",
        "/{n}#b",
        "/{n}?a#b",
        "/<script>{n}",
        "/{n}\x7f",
        "/{n}\tb",
    ] {
        rows.push(bad(
            "D24",
            target,
            request("GET", &format!("{{U}}{target}"), "", ""),
        ));
    }
    for version in [
        "HTTP/2.0",
        "HTTP/1.2",
        "HTTP/0.9",
        "HTTP/1.1x",
        "http/1.1",
        "HTTP/1.10",
        "HTTP/01.1",
        "HTTP/1,1",
    ] {
        rows.push(bad("D23", version, fine.replace("HTTP/1.1", version)));
    }
    rows
}

fn chunks() -> Vec<Row> {
    let rest = "\r\nhello\r\n0\r\n\r\n";
    let mut rows = vec![
        bad(
            "D27",
            "data without an end",
            chunked("5\r\nhelloXX0\r\n\r\n"),
        ),
        bad(
            "D27",
            "data that ends with LF",
            chunked("5\r\nhello\n0\r\n\r\n"),
        ),
        bad(
            "D27",
            "data that ends with CR",
            chunked("5\r\nhello\r0\r\n\r\n"),
        ),
        bad(
            "D27",
            "data longer than said",
            chunked("4\r\nhello\r\n0\r\n\r\n"),
        ),
        bad("D27", "LF after the size", chunked("5\nhello\r\n0\r\n\r\n")),
        bad("D27", "CR after the size", chunked("5\rhello\r\n0\r\n\r\n")),
        bad("D27", "LF at the end", chunked("5\r\nhello\r\n0\n\n")),
        bad("D27", "another size at the end", chunked("0\r\n0\r\n\r\n")),
        bad("D28", "no size", chunked(rest)),
        bad(
            "D28",
            "an extension without size",
            chunked(&format!(";x{rest}")),
        ),
        bad("D29", "a trailer that is none", chunked("0\r\nX\r\n\r\n")),
        bad(
            "D29",
            "a folded trailer",
            chunked("0\r\nX: y\r\n z\r\n\r\n"),
        ),
        bad("D29", "LF in a trailer", chunked("0\r\nX: y\nZ: z\r\n\r\n")),
        bad(
            "D29",
            "a space before a trailer's colon",
            chunked("0\r\nX : y\r\n\r\n"),
        ),
        bad("D29", "a NUL in a trailer", chunked("0\r\nX: \0\r\n\r\n")),
    ];
    for (id, size) in [
        ("D26", "5;\n"),
        ("D26", "5;a\rb"),
        ("D26", "5;a\0b"),
        ("D26", "5;a\nGET /evil HTTP/1.1"),
        ("D28", "5 "),
        ("D28", " 5"),
        ("D28", "+5"),
        ("D28", "-5"),
        ("D28", "0x5"),
        ("D28", "00000000000000005"),
        ("D28", "10000000000000005"),
        ("D28", "8000000000000005"),
        ("D28", "5g"),
        ("D28", "5,5"),
        ("D28", "\u{ff15}"),
        ("D28", "5 5"),
        ("D28", "5\x0b"),
    ] {
        rows.push(bad(
            id,
            &format!("size {size:?}"),
            chunked(&format!("{size}{rest}")),
        ));
    }
    rows
}

fn sizes() -> Vec<Row> {
    let many = |count: usize| {
        (0..count)
            .map(|n| format!("X-{n}: y\r\n"))
            .collect::<String>()
    };
    let much = "y".repeat(100 * 1024);
    vec![
        bad_as(
            "E11",
            "101 fields",
            request("GET", "{U}/{n}", &many(98), ""),
            431,
        ),
        bad_as("E11", "5,000 fields", get(&"X: y\r\n".repeat(5_000)), 431),
        bad_as(
            "E11",
            "100 KiB in one field",
            get(&format!("X: {much}\r\n")),
            431,
        ),
        bad_as(
            "E11",
            "100 KiB in fields",
            get(&format!("X: {}\r\n", &much[..5 * 1024]).repeat(20)),
            431,
        ),
        bad_as(
            "E11",
            "100 KiB without an end",
            format!("GET {{U}}/{{n}} HTTP/1.1\r\nX: {much}"),
            431,
        ),
    ]
}

/// What is passed on, and in what form.
fn passed() -> Vec<Row> {
    let passes = |id, what: &str, sends: String| row(id, what, sends, Reply::Passes(&[200]));
    // The form in which a body with a length arrives.
    let posted = |fields: &str, body: &str| {
        post(&format!("{fields}via: 1.1 paceline\r\n"), body).replace("{U}", "")
    };
    let two = get("") + &get("").replace("/{n}", "/{n}/second");
    let second = arrived("").replace("/{n}", "/{n}/second");
    let mut rows = vec![
        passes("D09", "a length in white space", post("Content-Length: \t5 \r\n", "hello")).heard(b"hello").arrives(&[&posted("Content-Length: 5\r\n", "hello")]),
        passes("D30", "two empty lines before", format!("\r\n\r\n{}", get(""))).arrives(&[&arrived("")]),
        passes("D26", "extensions", chunked("5;a=b\r\nhello\r\n0;x\r\n\r\n")).heard(b"0\r\n\r\n").arrives(&[&posted("Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n")]),
        passes("D28", "sizes with zeros and capitals", chunked("00A\r\nhellohello\r\n0\r\n\r\n")).heard(b"0\r\n\r\n").arrives(&[&posted("Transfer-Encoding: chunked\r\n", "A\r\nhellohello\r\n0\r\n\r\n")]),
        passes("D29", "trailers nobody announced", chunked("5\r\nhello\r\n0\r\nX-T: s3cret\r\nAuthorization: s3cret\r\n\r\n")).heard(b"0\r\n\r\n").arrives(&[&posted("Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n0\r\n\r\n")]),
        passes("D37", "an upgrade to h2c", get("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n")).arrives(&[&arrived("")]),
        passes("D37", "an upgrade to TLS", get("Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n")).arrives(&[&arrived("")]),
        row("D31", "two in one write", two, Reply::Passes(&[200, 404])).arrives(&[&arrived(""), &second]),
        row("D11", "a body longer than its length", post("Content-Length: 5\r\n", "hello") + &get("").replace("/{n}", "/{n}/second"), Reply::Passes(&[200, 404]))
            .heard(b"hello")
            .arrives(&[&posted("Content-Length: 5\r\n", "hello"), &second]),
        row("D38", "Proxy-Connection in HTTP/1.0", get("Proxy-Connection: keep-alive\r\n").replace("HTTP/1.1", "HTTP/1.0"), Reply::Last(&[200]))
            .arrives(&[&arrived("").replace("via: 1.1", "via: 1.0")]),
    ];
    let announced = "Content-Length, Transfer-Encoding, Host, Authorization, Connection, Proxy-Authorization, Paceline-Max-Wait, Cookie, Te, Trailer, Via, X-T";
    let trailers = "Content-Length: 99\r\nTransfer-Encoding: chunked\r\nHost: evil.test\r\nAuthorization: s3cret\r\nConnection: close\r\nProxy-Authorization: Basic s3cret\r\nPaceline-Max-Wait: 1s\r\nCookie: s3cret\r\nTE: gzip\r\nTrailer: Host\r\nVia: 1.1 evil\r\nX-T: fine\r\n";
    rows.push(
        passes(
            "D29",
            "trailers that were announced",
            post(
                &format!("Trailer: {announced}\r\nTransfer-Encoding: chunked\r\n"),
                &format!("5\r\nhello\r\n0\r\n{trailers}\r\n"),
            ),
        )
        .heard(b"fine\r\n\r\n")
        .arrives(&[&posted(
            &format!("Trailer: {announced}\r\nTransfer-Encoding: chunked\r\n"),
            "5\r\nhello\r\n0\r\nx-t: fine\r\n\r\n",
        )]),
    );
    for method in [
        "GET", "HEAD", "DELETE", "OPTIONS", "PATCH", "PROPFIND", "X-EVIL",
    ] {
        let target = "{U}/{n}?key=s3cret-query";
        let asked = request(method, target, "Content-Length: 5\r\n", "hello");
        let arrives = request(
            method,
            &target.replace("{U}", ""),
            "Content-Length: 5\r\nvia: 1.1 paceline\r\n",
            "hello",
        );
        let said = crate::bed::scripted::say("HTTP/1.1 204 No Content\r\n\r\n");
        rows.push(
            row("D12", method, asked, Reply::Passes(&[204]))
                .origin(vec![said])
                .heard(b"hello")
                .arrives(&[&arrives]),
        );
    }
    for target in [
        "//evil/{n}",
        "/{n}/%00%2f..//.",
        "/{n}\\b",
        "/{n}\"b",
        "/{n}\u{e9}",
        "/{n}?a=b?c=d/e&f[]=g|h",
        "/{n}%0d%0aX:%20y",
        "/{n};a=b",
        "/%2e%2e/{n}",
    ] {
        let asked = request("GET", &format!("{{U}}{target}"), "", "");
        let arrives = request("GET", target, "via: 1.1 paceline\r\n", "");
        rows.push(row("D24", target, asked, Reply::Passes(&[404])).arrives(&[&arrives]));
    }
    rows
}

#[test]
fn ambiguous_codings_and_lengths_are_refused() {
    let mut rows = codings();
    rows.extend(lengths());
    Scene::new().play(&both(rows));
}

#[test]
fn lines_and_fields_that_parsers_differ_about_are_refused() {
    let mut rows = lines();
    rows.extend(request_lines());
    rows.extend(sizes());
    Scene::new().play(&both(rows));
}

#[test]
fn chunks_that_parsers_differ_about_are_refused_and_what_passes_has_one_form() {
    let mut rows = both(chunks());
    rows.extend(both(passed()));
    Scene::new().play(&rows);
}

#[test]
fn a_body_that_stops_short_ends_at_the_origin_as_it_came_and_not_as_a_whole() {
    // D10
    let mut scene = Scene::new();
    for way in BOTH {
        let asked = row(
            "D10",
            "a body shorter than its length",
            post("Content-Length: 50\r\n", "hello"),
            Reply::Broken,
        )
        .way(way);
        let origin = if way == BOTH[0] {
            &scene.clear
        } else {
            &scene.tls
        };
        origin.script("/short?key=s3cret-query", vec![Step::Hear(b"never")]);
        let mut session = scene.open(way).expect("an ordinary tunnel");
        session
            .send(&asked.fill(&asked.sends, "short"))
            .expect("the proxy reads");
        let begun = origin.await_asked("/short?key=s3cret-query");
        session
            .socket()
            .shutdown(Shutdown::Write)
            .expect("a socket");
        origin.await_end(begun.connection);
        let heard = origin.heard_text(begun.connection);
        assert!(heard.ends_with("\r\n\r\nhello"), "{heard}");
        let answer = session.hear(17, Duration::from_secs(5));
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 400 "),
            "{:?}",
            String::from_utf8_lossy(&answer)
        );
    }
    let faults = scene.aftermath();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
