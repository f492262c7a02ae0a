//! Fields and what becomes of them: what ends here, what is ours to read, what must not be echoed, and what a log makes of
//! it all.

use super::{BOTH, Reply, Row, STRANGER, Scene, arrived, both, get, post, request, row};

fn bad(id: &'static str, what: &str, sends: impl AsRef<[u8]>) -> Row {
    row(id, what, sends, Reply::Ends(400, "http_request_error"))
}

/// A GET with these fields, of which those arrive.
fn becomes(id: &'static str, what: &str, fields: &str, left: &str) -> Row {
    row(id, what, get(fields), Reply::Passes(&[200])).arrives(&[&arrived(left)])
}

fn hop_by_hop() -> Vec<Row> {
    vec![
        becomes(
            "E02",
            "Proxy-Connection",
            "Proxy-Connection: keep-alive\r\n",
            "",
        ),
        becomes("E02", "Keep-Alive", "Keep-Alive: timeout=5\r\n", ""),
        becomes("E02", "TE", "TE: gzip, deflate;q=0.5\r\n", ""),
        becomes(
            "E02",
            "Upgrade",
            "Upgrade: HTTP/3.0, x/1\r\nConnection: upgrade\r\n",
            "",
        ),
        becomes(
            "E02",
            "Proxy-Authenticate",
            "Proxy-Authenticate: Basic realm=\"s3cret\"\r\n",
            "",
        ),
        becomes(
            "E02",
            "Proxy-Authorization",
            "Proxy-Authorization: Basic s3cret\r\n",
            "",
        ),
        becomes(
            "E02",
            "Proxy-Authorization twice",
            "Proxy-Authorization: Basic s3cret\r\npROXY-aUTHORIZATION: x\r\n",
            "",
        ),
        becomes(
            "E03",
            "what Connection names",
            "Connection: X-Secret\r\nX-Secret: s3cret\r\n",
            "",
        ),
        becomes(
            "E03",
            "what two Connections name",
            "Connection: X-Secret\r\nconnection: , x-other,,\r\nX-Secret: s3cret\r\nX-Other: 1\r\nX-SECRET: 2\r\n",
            "",
        ),
        becomes(
            "E03",
            "Connection names credentials",
            "Connection: Authorization, Cookie2\r\nAuthorization: Bearer s3cret\r\n",
            "",
        ),
        becomes(
            "E03",
            "Connection names itself",
            "Connection: connection, keep-alive\r\n",
            "",
        ),
        becomes(
            "E03",
            "Connection names what is no name",
            "Connection: \"x\", x y, (z)\r\nX: y\r\n",
            "X: y\r\n",
        ),
        becomes(
            "E04",
            "X-Forwarded-For",
            "X-Forwarded-For: 10.0.0.1\r\n",
            "X-Forwarded-For: 10.0.0.1\r\n",
        ),
        becomes(
            "E04",
            "Forwarded",
            "Forwarded: for=10.0.0.1\r\n",
            "Forwarded: for=10.0.0.1\r\n",
        ),
        becomes(
            "E16",
            "order, case, repeats and empty values",
            "b: 1\r\nb:\r\nA: 2\r\nX-EMPTY: \r\nAccept-Encoding: gzip\r\n",
            "b: 1\r\nb:\r\nA: 2\r\nX-EMPTY:\r\nAccept-Encoding: gzip\r\n",
        ),
        becomes(
            "E16",
            "many cookies",
            &"Cookie: a=s3cret\r\n".repeat(64),
            &"Cookie: a=s3cret\r\n".repeat(64),
        ),
        becomes(
            "E16",
            "a value of 15 KiB",
            &format!("X: {}\r\n", "y".repeat(15 * 1024)),
            &format!("X: {}\r\n", "y".repeat(15 * 1024)),
        ),
    ]
}

fn ours() -> Vec<Row> {
    let wait = |value: &str| format!("Paceline-Max-Wait: {value}\r\n");
    let mut rows = vec![
        becomes("E06", "a wait in seconds", &wait("4"), ""),
        becomes("E06", "a wait with a unit", &wait("4s"), ""),
        becomes("E06", "a wait beyond any", &wait("1000000000"), ""),
        becomes(
            "E06",
            "a field of ours that there is not",
            "Paceline-Admin: s3cret\r\npaceline-x: y\r\n",
            "",
        ),
        bad("E06", "two waits", get(&(wait("4s") + &wait("5s")))),
    ];
    for value in [
        "-4",
        "NaN",
        "inf",
        "1e9",
        "soon",
        "",
        "4 s3cret",
        "99999999999999999999999999",
        "0x4",
        "4s, 5s",
        "\u{664}",
    ] {
        rows.push(bad(
            "E06",
            &format!("a wait of {value:?}"),
            get(&wait(value)),
        ));
    }
    rows
}

/// Loops, and what only looks like one.
fn via() -> Vec<Row> {
    let looped = |via: &str| {
        row(
            "E05",
            via,
            get(&format!("Via: {via}\r\n")),
            Reply::Refused(502, "proxy_loop_detected"),
        )
    };
    vec![
        looped("1.1 paceline"),
        looped("1.1 evil, 1.0 PaceLine (x), 1.1 z"),
        looped("HTTP/1.1   paceline"),
        becomes(
            "E05",
            "another proxy",
            "Via: 1.1 evil (paceline)\r\n",
            "Via: 1.1 evil (paceline)\r\n",
        ),
    ]
}

fn reflections() -> Vec<Row> {
    let mut rows = Vec::new();
    for payload in [
        "<script>alert(1)</script>",
        "%0d%0aX-Evil:%20evil",
        "\u{1b}[31mevil",
        "evil\" onload=\"x",
        "x\u{2028}evil",
        "${jndi:ldap://evil}",
        "{{7*7}}evil",
        "';evil--",
    ] {
        let target = format!("http://evil.test:25/{payload}");
        let malformed = payload.contains(['<', '\u{1b}', ' ']);
        let reply = if malformed {
            Reply::Ends(400, "http_request_error")
        } else {
            Reply::Refused(403, "http_request_denied")
        };
        rows.push(row("E12", payload, request("GET", &target, "", ""), reply));
        let asked = format!(
            "CONNECT evil.test:25 HTTP/1.1\r\nHost: evil.test\r\nX: {}\r\n\r\n",
            payload.replace('\u{1b}', "")
        );
        rows.push(row(
            "E12",
            format!("{payload}, CONNECT"),
            asked,
            Reply::Ends(403, "http_request_denied"),
        ));
    }
    let host = request("GET", "{U}/{n}", "", "").replace("Host: {H}", "Host: evil<script>.test");
    rows.push(bad("E12", "in Host", host));
    rows
}

/// What reaches the log: one line each, escaped, without queries. [`Scene::play`] looks at all of them.
fn log_lines() -> Vec<Row> {
    let mut rows = Vec::new();
    for target in [
        "/{n}/%0a%0dINFO%20access:%20forged",
        "/{n}/\u{85}\u{2028}x",
        "/{n}/\u{202e}evil",
        "/{n}/\"quoted\"=1",
        "/{n}?api_key=s3cret&token=s3cret",
        "/{n}?s3cret",
    ] {
        rows.push(row(
            "E13",
            target,
            request("GET", &format!("{{U}}{target}"), "", ""),
            Reply::Passes(&[404]),
        ));
    }
    let long = format!("/{{n}}/{}", "\u{e9}x".repeat(5_000));
    rows.push(row(
        "E13",
        "a path of 15 KB",
        request("GET", &format!("{{U}}{long}"), "", ""),
        Reply::Passes(&[404]),
    ));
    for (what, field) in [
        (
            "a User-Agent that is no UTF-8",
            &b"User-Agent: \xff\xfe\r\n"[..],
        ),
        (
            "a User-Agent of 20 KB",
            &[&b"User-Agent: "[..], &[b'x'; 20_000], b"\r\n"].concat(),
        ),
        ("colours in a field", b"Referer: https://x/?s3cret=\"\r\n"),
    ] {
        let sends = [b"GET {U}/{n} HTTP/1.1\r\nHost: {H}\r\n", field, b"\r\n"].concat();
        rows.push(row("E13", what, sends, Reply::Passes(&[200])));
    }
    rows.push(bad(
        "E13",
        "a Host that is no UTF-8",
        b"GET {U}/{n} HTTP/1.1\r\nHost: gov\xff.test\r\n\r\n",
    ));
    rows.push(bad(
        "E13",
        "a method of 4 KB",
        format!("{}\x01 {{U}}/{{n}} HTTP/1.1\r\n\r\n", "X".repeat(4_096)),
    ));
    rows.push(row(
        "E13",
        "a method of 2 KB",
        get("").replace("GET", &"X".repeat(2_000)),
        Reply::Passes(&[200]),
    ));
    rows
}

#[test]
fn fields_end_or_pass_as_they_must_and_leave_no_trace() {
    let mut rows = both(hop_by_hop());
    rows.extend(both(ours()));
    rows.extend(both(via()));
    rows.extend(both(log_lines()));
    rows.extend(reflections());
    // An expectation that nobody knows passes, since it is the origin's to refuse (RFC 9110 section 10.1.1).
    rows.push(
        row(
            "E17",
            "an unknown expectation",
            post("Expect: s3cret\r\nContent-Length: 5\r\n", "hello"),
            Reply::Passes(&[200]),
        )
        .heard(b"hello"),
    );
    Scene::new().play(&rows);
}

#[test]
fn a_flood_of_new_names_leaves_no_trace_but_lines_in_the_log() {
    let names = 1_000;
    let mut scene = Scene::with(|recipe, _| recipe.proxy("ungoverned = \"deny\""));
    let mut rows: Vec<Row> = (0..names)
        .map(|n| {
            row(
                "G11",
                "a new name",
                format!("CONNECT s{n}.{STRANGER}:443 HTTP/1.1\r\n\r\n"),
                Reply::Ends(403, "http_request_denied"),
            )
        })
        .collect();
    rows.extend((0..100).map(|n| {
        let sends = format!("CONNECT s{n}.wild.test:443 HTTP/1.1\r\n\r\n");
        row("F19", "a new name to sign for", sends, Reply::Tunnel)
    }));
    rows.extend(
        BOTH.map(|way| row("G11", "an ordinary request", get(""), Reply::Passes(&[200])).way(way)),
    );
    scene.play(&rows);
    let hosts = scene
        .replica
        .admin("/status")
        .expect("the admin listener answers")
        .text();
    assert!(!hosts.contains(STRANGER), "{hosts}");
}
