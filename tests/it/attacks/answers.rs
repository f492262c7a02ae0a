//! Hostile origins: answers that could be read in two ways, that are none, or that speak for somebody else. None is
//! repaired; the client's connection stays in step and the origin's is not used again.

use std::time::Instant;

use super::{Reply, Row, Scene, arrived, both, get, request, row, say};
use crate::bed::scripted::{Exchange, Step};

const BAD: Reply = Reply::Refused(502, "http_protocol_error");
const CUT: Reply = Reply::Refused(502, "connection_terminated");

/// A request that arrives as it should, whatever comes back.
fn asks(id: &'static str, what: &str, reply: Reply, steps: Vec<Step>) -> Row {
    row(id, what, get(""), reply)
        .origin(steps)
        .arrives(&[&arrived("")])
}

/// An answer that cannot be trusted.
fn bad(id: &'static str, what: &str, said: impl AsRef<[u8]>) -> Row {
    asks(id, what, BAD, vec![say(said)])
}

fn framing() -> Vec<Row> {
    let ok = |fields: &str, body: &str| format!("HTTP/1.1 200 OK\r\n{fields}\r\n{body}");
    let chunks = "2\r\nok\r\n0\r\n\r\n";
    let mut rows = vec![
        bad(
            "D39",
            "a length and chunks",
            ok(
                "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
                chunks,
            ),
        ),
        bad(
            "D39",
            "chunks and a length",
            ok(
                "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
                chunks,
            ),
        ),
        bad(
            "D39",
            "two lengths",
            ok("Content-Length: 2\r\nContent-Length: 3\r\n", "abc"),
        ),
        bad(
            "D39",
            "two equal lengths",
            ok("Content-Length: 2\r\nContent-Length: 2\r\n", "ab"),
        ),
        bad(
            "D39",
            "two codings",
            ok(
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                chunks,
            ),
        ),
        bad(
            "D39",
            "chunks in HTTP/1.0",
            ok("Transfer-Encoding: chunked\r\n", chunks).replace("1.1", "1.0"),
        ),
        bad(
            "D39",
            "chunks on 204",
            ok("Transfer-Encoding: chunked\r\n", chunks).replace("200 OK", "204 No Content"),
        ),
        bad(
            "D39",
            "a folded field",
            ok("X: a\r\n b\r\nContent-Length: 0\r\n", ""),
        ),
        bad(
            "D39",
            "a NUL in a value",
            ok("X: a\0b\r\nContent-Length: 0\r\n", ""),
        ),
        bad(
            "D39",
            "a space in a name",
            ok("X y: a\r\nContent-Length: 0\r\n", ""),
        ),
        bad("D39", "no colon", ok("X\r\nContent-Length: 0\r\n", "")),
        bad(
            "D39",
            "a CR in a value",
            ok("X: a\rb\r\nContent-Length: 0\r\n", ""),
        ),
        bad(
            "D39",
            "a head of 1 MB",
            ok(&format!("X: {}\r\n", "x".repeat(1 << 20)), ""),
        ),
        bad("D39", "1,000 fields", ok(&"X: y\r\n".repeat(1_000), "")),
        asks(
            "D39",
            "a coding that nobody knows",
            BAD,
            vec![
                say(ok("Transfer-Encoding: xchunked\r\n", "ok")),
                Step::Close,
            ],
        ),
        asks(
            "D39",
            "gzip below chunked",
            BAD,
            vec![
                say(ok("Transfer-Encoding: gzip, chunked\r\n", chunks)),
                Step::Close,
            ],
        ),
    ];
    for length in [
        "0x2",
        "-2",
        "+2",
        "2, 2",
        "2,3",
        "",
        "2 2",
        "2.0",
        "99999999999999999999999",
        "\u{ff12}",
    ] {
        rows.push(bad(
            "D39",
            &format!("length {length:?}"),
            ok(&format!("Content-Length: {length}\r\n"), "ok"),
        ));
    }
    rows
}

fn status_lines() -> Vec<Row> {
    let mut rows = Vec::new();
    for line in [
        "HTTP/1.1 99 X",
        "HTTP/1.1 1000 X",
        "HTTP/1.1 2xx OK",
        "HTTP/1.1 -20 OK",
        "HTTP/1.1 OK",
        "HTTP/1.1",
        "HTTP/2.0 200 OK",
        "HTTP/1.2 200 OK",
        "HTTP/3 200 OK",
        "ICY 200 OK",
        "SSH-2.0-OpenSSH_9.2",
        "<html>",
        "HTTP/1.1\t200 OK",
        "HTTP/1.1 200\0OK",
    ] {
        rows.push(bad(
            "D44",
            line,
            format!("{line}\r\nContent-Length: 0\r\n\r\n"),
        ));
    }
    for line in ["HTTP/1.1 200", "HTTP/1.1 200 ", "HTTP/1.1 299 \u{e9}"] {
        let said = say(format!("{line}\r\nContent-Length: 2\r\n\r\nok"));
        let status: &'static [u16] = if line.contains("299") { &[299] } else { &[200] };
        rows.push(row("D44", line, get(""), Reply::Passes(status)).origin(vec![said]));
    }
    rows
}

fn interim() -> Vec<Row> {
    let last = say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let many = |said: &str, times| Step::Repeat(said.as_bytes().to_vec(), times);
    let hint = "HTTP/1.1 103 Early Hints\r\nLink: </evil>\r\n\r\n";
    vec![
        bad(
            "D43",
            "101 that nobody asked for",
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        ),
        asks(
            "D43",
            "50 times 100",
            BAD,
            vec![many("HTTP/1.1 100 Continue\r\n\r\n", 50), last.clone()],
        ),
        asks(
            "D43",
            "a million times 103",
            BAD,
            vec![many(hint, 1_000_000)],
        ),
        row("D43", "16 times 103", get(""), Reply::Passes(&[200]))
            .origin(vec![many(hint, 16), last.clone()]),
        row(
            "D43",
            "100 without being asked",
            get(""),
            Reply::Passes(&[200]),
        )
        .origin(vec![say("HTTP/1.1 100 Continue\r\n\r\n"), last]),
    ]
}

fn ends() -> Vec<Row> {
    let cut = |what: &str, steps: Vec<Step>| asks("P44", what, CUT, steps);
    let broken = |what: &str, steps: Vec<Step>| asks("P44", what, Reply::Broken, steps);
    let half = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf.";
    let chunk = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf.\r\n";
    vec![
        cut("nothing", vec![Step::Close]),
        cut("a reset", vec![Step::Reset]),
        cut("half a status line", vec![say("HTTP/1.1 20"), Step::Close]),
        cut(
            "half a head",
            vec![say("HTTP/1.1 200 OK\r\nContent-"), Step::Close],
        ),
        broken("half a body", vec![say(half), Step::Close]),
        broken("no last chunk", vec![say(chunk), Step::Close]),
        broken(
            "a chunk that has no size",
            vec![say(format!("{chunk}zz\r\nmore\r\n0\r\n\r\n"))],
        ),
        broken(
            "a chunk that does not end",
            vec![say(format!("{chunk}5\r\nevil.XX0\r\n\r\n"))],
        ),
        broken(
            "a chunk of 2^64",
            vec![say(format!("{chunk}FFFFFFFFFFFFFFFFF\r\n"))],
        ),
        broken(
            "LF in an extension",
            vec![
                say(format!("{chunk}5;\n\r\nevil.\r\n0\r\n\r\n")),
                Step::Close,
            ],
        ),
        broken(
            "extensions without end",
            vec![
                say(chunk),
                say("1;"),
                Step::Repeat(vec![b'x'; 1024], 64),
                Step::Close,
            ],
        ),
        broken(
            "trailers without end",
            vec![
                say(format!("{chunk}0\r\n")),
                Step::Repeat(b"X: y\r\n".to_vec(), 5_000),
                Step::Close,
            ],
        ),
    ]
}

/// Bodies where none may be, and what comes behind an answer: dropped, and nothing is shifted by it.
fn surplus() -> Vec<Row> {
    let evil = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad";
    let head = request("HEAD", "{U}/{n}", "", "");
    vec![
        row("D41", "a body to HEAD", head, Reply::Passes(&[200])).origin(vec![say(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{evil}",
            evil.len()
        ))]),
        row("D41", "a body to 204", get(""), Reply::Passes(&[204]))
            .origin(vec![say(format!("HTTP/1.1 204 No Content\r\n\r\n{evil}"))]),
        row("D41", "a body to 304", get(""), Reply::Passes(&[304])).origin(vec![say(format!(
            "HTTP/1.1 304 Not Modified\r\nContent-Length: {}\r\n\r\n{evil}",
            evil.len()
        ))]),
        row("D42", "more than was said", get(""), Reply::Passes(&[200])).origin(vec![say(
            format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok{evil}"),
        )]),
        row(
            "D42",
            "a second answer behind chunks",
            get(""),
            Reply::Passes(&[200]),
        )
        .origin(vec![say(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n{evil}"
        ))]),
    ]
}

/// What an origin may say, but not to us.
fn words() -> Vec<Row> {
    let said = |fields: &str| {
        vec![say(format!(
            "HTTP/1.1 302 Found\r\n{fields}Content-Length: 0\r\n\r\n"
        ))]
    };
    let passes = |id, what: &str, fields: &str| {
        row(id, what, get(""), Reply::Passes(&[302])).origin(said(fields))
    };
    vec![
        passes(
            "B29",
            "a redirect to a metadata service",
            "Location: http://169.254.169.254/latest/\r\n",
        ),
        passes(
            "E17",
            "a redirect to another host",
            "Location: https://evil.test/{n}\r\n",
        ),
        passes(
            "B30",
            "another service",
            "Alt-Svc: h3=\"127.0.0.1:22\", h2=\"evil.test:443\"\r\n",
        ),
        passes(
            "E10",
            "a date that is none",
            "Date: Mon, 99 Foo 9999 99:99:99 XYZ\r\nRetry-After: -1\r\nExpires: 0\r\n",
        ),
        // [`Reply::Passes`] wants no Proxy-Status: only we speak as `paceline`.
        passes(
            "E07",
            "a refusal in our name",
            "Proxy-Status: paceline; error=dns_error\r\n",
        ),
        passes(
            "E07",
            "a refusal in our name, among others",
            "Proxy-Status: x, Paceline; error=dns_error\r\n",
        ),
        passes(
            "E07",
            "a field of ours",
            "Paceline-Max-Wait: 1s\r\nProxy-Authenticate: Basic realm=\"evil\"\r\n",
        ),
    ]
}

#[test]
fn no_answer_of_an_origin_puts_a_client_out_of_step() {
    let mut rows = framing();
    rows.extend(status_lines());
    rows.extend(interim());
    rows.extend(ends());
    rows.extend(surplus());
    rows.extend(words());
    let rows = both(rows);
    let mut scene = Scene::new();
    scene.play(&rows);
    let names = super::names_of(&rows);
    let bad = |text: &str| {
        let row = rows
            .iter()
            .zip(&names)
            .find(|(_, name)| text.contains(*name) && !text.contains("/step"));
        row.is_some_and(|(row, _)| !matches!(row.reply, Reply::Passes(_)))
    };
    for origin in scene.origins() {
        let exchanges = origin.exchanges();
        for one in exchanges.iter().filter(|one| bad(&one.text)) {
            let again = |other: &&Exchange| other.connection == one.connection && other.at > one.at;
            let again = exchanges.iter().find(again);
            assert!(
                again.is_none(),
                "the connection of {:?} was used again by {again:?}",
                one.text
            );
        }
    }
}

#[test]
fn a_bomb_is_passed_on_as_it_is() {
    let mut scene = Scene::new();
    let began = Instant::now();
    let said =
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip, br\r\nContent-Length: 1048576\r\n\r\n";
    let steps = vec![say(said), Step::Repeat(vec![0x1f; 16 * 1024], 64)];
    let rows: Vec<Row> = (0..32)
        .map(|_| {
            row(
                "E15",
                "a bomb",
                get("Accept-Encoding: gzip\r\n"),
                Reply::Passes(&[200]),
            )
            .origin(steps.clone())
        })
        .collect();
    scene.play(&both(rows));
    assert!(
        began.elapsed().as_secs() < 30,
        "unpacked, it would take longer"
    );
}
