//! Who asks, and for whom: credentials in every wrong form, and requests in a tunnel that are for somebody else than the
//! tunnel, or the name in its ClientHello, says.

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{
    BOTH, HOST, INSIDE, OTHER, Reply, Row, Scene, Way, arrived, connect, get, request, row,
};

const NEEDED: Reply = Reply::Ends(407, "http_request_denied");
const MISDIRECTED: Reply = Reply::Refused(421, "http_request_error");
const MALFORMED: Reply = Reply::Ends(400, "http_request_error");

/// SHA-256 of `s3cret-password` for `worker`, of `s3cret:with:colons` for `colon`, and an argon2 hash of the first for `slow`.
const USERS: &str = "[proxy.auth.users]\n\
    worker = \"sha256:WORKER\"\n\
    colon = \"sha256:COLON\"\n\
    slow = \"$argon2id$v=19$m=64,t=1,p=1$c2FsdHNhbHRzYWx0$XHmEL/yUoKQ0xZRhmoKlkZ6Zn7xIkfgdYR3tTMvvQ+M\"";

fn users() -> String {
    use sha2::{Digest as _, Sha256};
    let digest = |password: &str| crate::bed::pattern::hex(&Sha256::digest(password));
    USERS
        .replace("WORKER", &digest("s3cret-password"))
        .replace("COLON", &digest("s3cret:with:colons"))
}

fn basic(login: &str) -> String {
    format!("Proxy-Authorization: Basic {}\r\n", STANDARD.encode(login))
}

fn logins() -> Vec<Row> {
    let right = basic("worker:s3cret-password");
    let wrong: Vec<(&str, &str, String)> = vec![
        ("C01", "none", String::new()),
        (
            "C01",
            "the origin's instead of ours",
            right.replace("Proxy-", ""),
        ),
        ("C02", "a wrong password", basic("worker:s3cret-wrong")),
        (
            "C02",
            "a user that there is not",
            basic("nobody:s3cret-password"),
        ),
        ("C02", "a user in capitals", basic("WORKER:s3cret-password")),
        (
            "C02",
            "the hash for the password",
            basic(&format!(
                "worker:{}",
                users().split(':').nth(1).unwrap_or_default()
            )),
        ),
        (
            "C02",
            "a wrong password for a slow hash",
            basic("slow:s3cret-wrong"),
        ),
        (
            "C02",
            "a password that goes on",
            basic("worker:s3cret-password\0"),
        ),
        ("C04", "Bearer", right.replace("Basic", "Bearer")),
        (
            "C04",
            "Digest",
            "Proxy-Authorization: Digest username=\"worker\", response=\"s3cret\"\r\n".to_owned(),
        ),
        (
            "C04",
            "NTLM",
            "Proxy-Authorization: NTLM TlRMTVNTUAABAAAA\r\n".to_owned(),
        ),
        (
            "C04",
            "Negotiate",
            "Proxy-Authorization: Negotiate YII=\r\n".to_owned(),
        ),
        ("C04", "no scheme", right.replace("Basic ", "")),
        (
            "C04",
            "Basic alone",
            "Proxy-Authorization: Basic\r\n".to_owned(),
        ),
        ("C05", "an empty password", basic("worker:")),
        ("C05", "no colon", basic("worker")),
        ("C05", "no user", basic(":s3cret-password")),
        (
            "C06",
            "parameters behind the user",
            basic("worker;max_wait=4:s3cret-password"),
        ),
        (
            "C06",
            "no base64",
            "Proxy-Authorization: Basic ###s3cret\r\n".to_owned(),
        ),
        (
            "C06",
            "no UTF-8",
            format!(
                "Proxy-Authorization: Basic {}\r\n",
                STANDARD.encode([0xff, b':', 0xfe])
            ),
        ),
        (
            "C06",
            "10 KB",
            basic(&format!("worker:s3cret{}", "x".repeat(10_000))),
        ),
        ("C06", "two", format!("{right}{right}")),
        (
            "C06",
            "two in one",
            right.replace("\r\n", ", Basic d29ya2VyOnNlY3JldA==\r\n"),
        ),
        (
            "C06",
            "a user that is a statement",
            basic("'; drop table paceline; --:s3cret"),
        ),
    ];
    let mut rows = Vec::new();
    for (id, what, fields) in wrong {
        let tunnel = format!("CONNECT gov.test:443 HTTP/1.1\r\nHost: gov.test:443\r\n{fields}\r\n");
        // What was sent ahead must not pass behind the refusal, whoever asks then.
        let ahead = request("GET", "http://gov.test/{n}", &right, "");
        rows.push(row(id, what, tunnel.clone(), NEEDED));
        rows.push(row(
            "A27",
            format!("{what}, and a request behind"),
            tunnel + &ahead,
            NEEDED,
        ));
        rows.push(row(
            id,
            format!("{what}, by URL"),
            get(&fields) + &ahead,
            NEEDED,
        ));
    }
    for (id, what, login) in [
        ("C03", "right", "worker:s3cret-password"),
        ("C05", "a password with colons", "colon:s3cret:with:colons"),
    ] {
        // Ours end here; the origin's own pass.
        let fields = basic(login) + "Connection: close\r\nAuthorization: Basic s3cret\r\n";
        rows.push(
            row(id, what, get(&fields), Reply::Last(&[200]))
                .arrives(&[&arrived("Authorization: Basic s3cret\r\n")]),
        );
    }
    rows
}

#[test]
fn nobody_gets_past_the_credentials() {
    let (rows, users) = (logins(), users());
    let mut scene = Scene::with(|recipe, _| {
        recipe
            .proxy(&users)
            .store("postgres://u:s3cret-store@127.0.0.1:1/x")
    });
    scene.play(&rows);
    let log = scene.replica.stderr();
    assert!(
        !log.contains(&STANDARD.encode("worker:s3cret-password")),
        "credentials in the log"
    );
}

fn inside() -> Vec<Row> {
    let to = |host: &str| get("").replace("Host: {H}", &format!("Host: {host}"));
    let as_sent = |host: &str| arrived("").replace("Host: {H}", &format!("Host: {host}"));
    let mut rows = Vec::new();
    for host in [
        "gov.test:443",
        "gov.test.",
        "GOV.TEST",
        "gov.test.:443",
        "Gov.Test.:443",
    ] {
        rows.push(
            row("C12", host, to(host), Reply::Passes(&[200]))
                .way(INSIDE)
                .arrives(&[&as_sent(host)]),
        );
    }
    for host in [
        "gov.test:8443",
        "gov.test:80",
        OTHER,
        "evil.test",
        "gov.test.evil.test",
        "127.0.0.1",
        "[::1]",
        "xgov.test",
        "gov.test-",
    ] {
        rows.push(row("C12", host, to(host), MISDIRECTED).way(INSIDE));
    }
    for host in [
        "",
        "gov.test:0443",
        "gov.test:",
        "gov.test:0",
        "gov.test:99999",
        "gov.test/x",
        "u@gov.test",
        "gov.test, gov.test",
        "*",
    ] {
        let reply = MALFORMED;
        rows.push(row("C13", format!("{host:?}"), to(host), reply).way(INSIDE));
    }
    rows.extend([
        row(
            "C14",
            "a URL of the tunnel's",
            request("GET", "https://gov.test/{n}?key=s3cret-query", "", ""),
            Reply::Passes(&[200]),
        )
        .way(INSIDE)
        .arrives(&[&arrived("")]),
        row(
            "C14",
            "a URL of the tunnel's, and another Host",
            request("GET", "https://gov.test/{n}?key=s3cret-query", "", "")
                .replace("Host: {H}", "Host: evil.test"),
            Reply::Passes(&[200]),
        )
        .way(INSIDE)
        .arrives(&[&arrived("")]),
        row(
            "C14",
            "a URL of another",
            request("GET", "https://gov2.test/{n}", "", ""),
            MISDIRECTED,
        )
        .way(INSIDE),
        row(
            "C14",
            "a URL of another, and the tunnel's Host",
            request("GET", "https://evil.test/{n}", "", ""),
            MISDIRECTED,
        )
        .way(INSIDE),
        row(
            "C14",
            "http in TLS",
            request("GET", "http://gov.test/{n}", "", ""),
            MISDIRECTED,
        )
        .way(INSIDE),
        row(
            "C14",
            "another port",
            request("GET", "https://gov.test:8443/{n}", "", ""),
            MISDIRECTED,
        )
        .way(INSIDE),
        row(
            "C14",
            "another scheme",
            request("GET", "ftp://gov.test/{n}", "", ""),
            MALFORMED,
        )
        .way(INSIDE),
        row(
            "C15",
            "CONNECT in a tunnel",
            connect("gov.test:443"),
            MALFORMED,
        )
        .way(INSIDE),
        row(
            "C15",
            "CONNECT in a tunnel, to another",
            connect("evil.test:443"),
            MALFORMED,
        )
        .way(INSIDE),
        row(
            "C15",
            "CONNECT in clear text in a tunnel",
            connect("gov.test:80"),
            MALFORMED,
        )
        .way(Way::Bare("gov.test:80")),
    ]);
    rows
}

fn names_in_hellos() -> Vec<Row> {
    let mut rows = Vec::new();
    for sni in [OTHER, "evil.test", "xgov.test", "gov.test.evil.test"] {
        let way = Way::Inside("gov.test:443", Some(sni));
        let both_ways =
            [HOST, sni].map(|host| get("").replace("Host: {H}", &format!("Host: {host}")));
        rows.extend(both_ways.map(|asked| row("C08", sni, asked, MISDIRECTED).way(way)));
    }
    for (authority, sni) in [("gov2.test:443", Some(HOST)), ("gov.test:80", Some(OTHER))] {
        rows.push(row("C08", authority, get(""), MISDIRECTED).way(Way::Inside(authority, sni)));
    }
    rows.push(
        row("C09", "no name", get(""), Reply::Passes(&[200]))
            .way(Way::Inside("gov.test:443", None))
            .arrives(&[&arrived("")]),
    );
    rows.push(
        row(
            "C09",
            "no name, and another Host",
            get("").replace("Host: {H}", "Host: gov2.test"),
            MISDIRECTED,
        )
        .way(Way::Inside("gov.test:443", None)),
    );
    rows
}

fn clear_text() -> Vec<Row> {
    let bare = Way::Bare("gov.test:80");
    let mut rows = vec![
        row(
            "C16",
            "clear text in a tunnel",
            get(""),
            Reply::Passes(&[200]),
        )
        .way(bare)
        .arrives(&[&arrived("")]),
        row(
            "C16",
            "another Host",
            get("").replace("Host: {H}", "Host: gov2.test"),
            MISDIRECTED,
        )
        .way(bare),
        row(
            "C16",
            "an https URL",
            request("GET", "https://gov.test/{n}", "", ""),
            MISDIRECTED,
        )
        .way(bare),
        row(
            "C16",
            "a URL of another",
            request("GET", "http://gov2.test/{n}", "", ""),
            MISDIRECTED,
        )
        .way(bare),
        row(
            "C16",
            "a malformed request",
            request("GET", "{n} /{n}", "", ""),
            MALFORMED,
        )
        .way(bare),
        row(
            "C16",
            "no HTTP",
            "\x05\x01\0",
            Reply::Ends(400, "http_request_error"),
        )
        .way(bare),
    ];
    // HTTP/1.0 may leave the host out, and then means the tunnel's.
    for way in BOTH {
        let old = "GET {U}/{n} HTTP/1.0\r\n\r\n";
        rows.push(row("C17", "HTTP/1.0 without Host", old, Reply::Last(&[200])).way(way));
    }
    rows
}

#[test]
fn a_tunnel_carries_nothing_but_what_it_was_opened_for() {
    let mut rows = inside();
    rows.extend(names_in_hellos());
    rows.extend(clear_text());
    Scene::new().play(&rows);
}
