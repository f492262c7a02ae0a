//! The request line and the authority in it: what names no host and port, names two, or is meant for another parser.

use super::{
    HOST, INSIDE, OTHER, Reply, Row, STRANGER, Scene, Way, arrived, both, connect, get, request,
    row,
};

const MALFORMED: Reply = Reply::Ends(400, "http_request_error");
const DENIED: Reply = Reply::Ends(403, "http_request_denied");

fn authorities() -> Vec<Row> {
    let mut rows = vec![
        row(
            "A02",
            "no Host",
            "CONNECT gov.test:443 HTTP/1.1\r\n\r\n",
            Reply::Tunnel,
        ),
        row(
            "A02",
            "another Host",
            "CONNECT gov.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            Reply::Tunnel,
        ),
        row(
            "A02",
            "two Hosts",
            "CONNECT gov.test:443 HTTP/1.1\r\nHost: evil.test\r\nHost: x\r\n\r\n",
            Reply::Tunnel,
        ),
        row(
            "A02",
            "HTTP/1.0",
            "CONNECT gov.test:443 HTTP/1.0\r\n\r\n",
            Reply::Tunnel,
        ),
        row("A03", "no port", connect(HOST), MALFORMED),
        row("A04", "no host", connect(":443"), MALFORMED),
        row(
            "A06",
            "a port with zeros before it",
            connect("gov.test:00443"),
            MALFORMED,
        ),
        row(
            "A08",
            "user and password",
            connect("u:p@gov.test:443"),
            MALFORMED,
        ),
        row(
            "A08",
            "a user that looks like the host",
            connect("gov.test:443@evil.test:443"),
            MALFORMED,
        ),
        row(
            "A08",
            "a user alone",
            connect("gov.test@evil.test:443"),
            MALFORMED,
        ),
        row("A09", "a path", connect("gov.test:443/x"), MALFORMED),
        row("A09", "a query", connect("gov.test:443?x"), MALFORMED),
        row(
            "A09",
            "a query before the port",
            connect("gov.test?x:443"),
            MALFORMED,
        ),
        row(
            "A09",
            "a fragment",
            connect("gov.test#evil.test:443"),
            MALFORMED,
        ),
        row(
            "A10",
            "an https URL",
            connect("https://gov.test:443"),
            MALFORMED,
        ),
        row(
            "A10",
            "an http URL with a path",
            connect("http://gov.test:443/"),
            MALFORMED,
        ),
        row(
            "A10",
            "a reference without scheme",
            connect("//gov.test:443"),
            MALFORMED,
        ),
        row("A11", "a wildcard", connect("*:443"), MALFORMED),
        row(
            "A11",
            "a wildcard below a name",
            connect("*.gov.test:443"),
            MALFORMED,
        ),
        row("A11", "an asterisk alone", connect("*"), MALFORMED),
        row(
            "A19",
            "an underscore, governed by nobody",
            connect("a_b.test:443"),
            Reply::Ends(502, "dns_error"),
        ),
        row(
            "A19",
            "an underscore, governed",
            connect("a_b.wild.test:443"),
            Reply::Tunnel,
        ),
        row(
            "A20",
            "a name in brackets",
            connect("[gov.test]:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "brackets in brackets",
            connect("[[::1]]:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "a bracket that is not closed",
            connect("[::1"),
            MALFORMED,
        ),
        row(
            "A20",
            "a bracket that is not closed, with a port",
            connect("[::1:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "an IPv6 address without brackets",
            connect("::1:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "text behind the bracket",
            connect("[::1]x:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "an empty pair of brackets",
            connect("[]:443"),
            MALFORMED,
        ),
        row(
            "A20",
            "an IPv4 address in brackets",
            connect("[127.0.0.1]:443"),
            MALFORMED,
        ),
        row("A21", "an empty label", connect("gov..test:443"), MALFORMED),
        row(
            "A21",
            "a dot before the name",
            connect(".gov.test:443"),
            MALFORMED,
        ),
        row(
            "A21",
            "two dots behind it",
            connect("gov.test..:443"),
            MALFORMED,
        ),
        row("A21", "a dot alone", connect(".:443"), MALFORMED),
        row(
            "A21",
            "a label of 64 bytes",
            connect(&format!("{}.test:443", "a".repeat(64))),
            MALFORMED,
        ),
        row(
            "A21",
            "a name of 254 bytes",
            connect(&format!("{}test:443", "a.".repeat(125))),
            MALFORMED,
        ),
        row(
            "A21",
            "punycode of plain letters",
            connect("xn--gov-.test:443"),
            MALFORMED,
        ),
        row(
            "A21",
            "punycode that is none",
            connect("xn--\u{e9}.test:443"),
            MALFORMED,
        ),
    ];
    for port in [
        "0",
        "65536",
        "99999",
        "-1",
        "+443",
        "0x1bb",
        "443 ",
        "https",
        "",
        "443:443",
        "4294967739",
    ] {
        rows.push(row(
            "A05",
            format!("port {port:?}"),
            connect(&format!("gov.test:{port}")),
            MALFORMED,
        ));
    }
    for port in [22, 25, 6379, 5432] {
        for host in [STRANGER, HOST] {
            let asked = format!("{host}:{port}");
            rows.push(row(
                "A07",
                format!("port {port} of {host}"),
                connect(&asked),
                DENIED,
            ));
        }
        let asked = request("GET", &format!("http://{STRANGER}:{port}/{{n}}"), "", "");
        rows.push(row(
            "A07",
            format!("port {port} by URL"),
            asked,
            Reply::Refused(403, "http_request_denied"),
        ));
        let asked = request("GET", &format!("https://{STRANGER}:{port}/{{n}}"), "", "");
        rows.push(row(
            "A07",
            format!("port {port} by https URL"),
            asked,
            Reply::Refused(403, "http_request_denied"),
        ));
    }
    for c in [
        "\0", "\t", "\r", "\n", "\x7f", "%00", "%2e", "\\", "\"", "$", "'", " ", "<script>", "`",
        "{", "|", "^", ";", ",", "\u{ff47}",
    ] {
        rows.push(row(
            "A12",
            format!("{c:?} in the name"),
            connect(&format!("gov{c}.evil.test:443")),
            MALFORMED,
        ));
    }
    rows
}

fn versions() -> Vec<Row> {
    let line = |id, what, line: &str| {
        row(
            id,
            what,
            format!("{line}\r\nHost: gov.test\r\n\r\n"),
            MALFORMED,
        )
    };
    let mut rows = vec![
        line("A22", "no version", "CONNECT gov.test:443"),
        line(
            "A22",
            "a lower-case method",
            "connect gov.test:443 HTTP/1.1",
        ),
        line(
            "A22",
            "a space before the method",
            " CONNECT gov.test:443 HTTP/1.1",
        ),
        line("A22", "two spaces", "CONNECT  gov.test:443 HTTP/1.1"),
        line("A22", "a tab for a space", "CONNECT\tgov.test:443 HTTP/1.1"),
    ];
    for version in [
        "HTTP/2.0",
        "HTTP/1.2",
        "HTTP/0.9",
        "HTTP/1.1x",
        "HTTP/1",
        "http/1.1",
        "HTTP/1.1 ",
        "HTTP/11",
        "HTTPS/1.1",
        "ICY/1.1",
    ] {
        rows.push(line(
            "A22",
            "another version",
            &format!("CONNECT gov.test:443 {version}"),
        ));
    }
    rows
}

fn bodies() -> Vec<Row> {
    let with = |id, what, fields: &str, body: &str| {
        row(
            id,
            what,
            format!("CONNECT gov.test:443 HTTP/1.1\r\nHost: gov.test:443\r\n{fields}\r\n{body}"),
            MALFORMED,
        )
    };
    vec![
        with("A24", "a length", "Content-Length: 50\r\n", &"x".repeat(50)),
        with("A24", "a length of none", "Content-Length: 0\r\n", ""),
        with(
            "A24",
            "two lengths",
            "Content-Length: 0\r\nContent-Length: 5\r\n",
            "hello",
        ),
        with(
            "A25",
            "chunks",
            "Transfer-Encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        with(
            "A25",
            "chunks and a length",
            "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
            "0\r\n\r\n",
        ),
    ]
}

fn long() -> Vec<Row> {
    let much = "a".repeat(1_000_000);
    vec![
        row(
            "A23",
            "a CONNECT of 1 MB",
            format!("CONNECT {much}"),
            Reply::Ends(414, "http_request_error"),
        ),
        row(
            "A23",
            "a CONNECT of 17 KB, whole",
            connect(&format!("{}.test:443", &much[..17_000])),
            Reply::Ends(414, "http_request_error"),
        ),
        row(
            "A23",
            "a CONNECT of 8 KB, whole",
            connect(&format!("{}.test:443", &much[..8_000])),
            MALFORMED,
        ),
        row(
            "A23",
            "a method of 1 MB",
            much.clone(),
            Reply::Ends(414, "http_request_error"),
        ),
        row(
            "A23",
            "a head of 1 MB",
            format!("CONNECT gov.test:443 HTTP/1.1\r\nX-Key: s3cret-field\r\nX: {much}"),
            Reply::Ends(431, "http_request_error"),
        ),
    ]
}

fn behind_a_refusal() -> Vec<Row> {
    let evil = request("GET", "http://gov.test/evil-{n}", "", "");
    vec![
        // RFC 9931: what comes behind a refused CONNECT was meant for somebody else.
        row(
            "A26",
            "a request behind a refused CONNECT",
            connect("tun.test:25") + &evil,
            DENIED,
        ),
        row(
            "A26",
            "a request behind a malformed CONNECT",
            connect("gov.test") + &evil,
            MALFORMED,
        ),
        row(
            "A26",
            "a request behind a CONNECT to nowhere",
            connect("nowhere.test:443") + &evil,
            Reply::Ends(502, "dns_error"),
        ),
    ]
}

fn forms() -> Vec<Row> {
    let url = |id, what: &str, url: &str, reply| row(id, what, request("GET", url, "", ""), reply);
    let gone = Reply::Ends(400, "http_request_error");
    let mut rows = vec![
        row("A29", "a URL", get(""), Reply::Passes(&[200])).arrives(&[&arrived("")]),
        row(
            "A29",
            "a URL in capitals",
            request("GET", "HTTP://GOV.TEST:80/{n}?key=s3cret-query", "", ""),
            Reply::Passes(&[200]),
        )
        .arrives(&[&arrived("")]),
        row(
            "A29",
            "a URL whose host is not the Host",
            get("").replace("Host: {H}", "Host: evil.test"),
            Reply::Passes(&[200]),
        )
        .arrives(&[&arrived("")]),
        row(
            "A30",
            "a path alone",
            request("GET", "/{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "an authority alone",
            request("GET", "gov.test:80", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "a URL without host",
            request("GET", "http:///{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "a URL with a user",
            request("GET", "http://u:s3cret-password@gov.test/{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "a URL with a backslash before the host",
            request("GET", "http://evil.test\\@gov.test/{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "a URL whose port is none",
            request("GET", "http://gov.test:x/{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A30",
            "a URL whose port is 0",
            request("GET", "http://gov.test:0/{n}", "", ""),
            gone.clone(),
        ),
        row(
            "A33",
            "OPTIONS of the proxy",
            request("OPTIONS", "*", "", ""),
            Reply::Ours,
        ),
        row(
            "A33",
            "OPTIONS of the origin",
            request("OPTIONS", "*", "X-N: {n}\r\n", ""),
            Reply::Passes(&[404]),
        )
        .way(INSIDE),
        row(
            "A33",
            "the preface of HTTP/2",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            gone.clone(),
        ),
    ];
    for target in [
        "ftp://gov.test/{n}",
        "file:///etc/passwd",
        "ws://gov.test/{n}",
        "wss://gov.test/{n}",
        "urn:x:{n}",
        "gopher://gov.test:70/_x",
        "javascript:alert(1)",
        "data:,x",
        "unix:/run/x",
    ] {
        rows.push(url("A31", target, target, gone.clone()));
    }
    let trace = |method: &str| {
        row(
            "A33",
            method,
            request(method, "{U}/{n}", "", ""),
            gone.clone(),
        )
    };
    rows.extend(both(vec![trace("TRACE")]));
    rows
}

fn not_http() -> Vec<Row> {
    let hello: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    let mut rows = vec![
        row("A34", "a ClientHello", hello, MALFORMED),
        row(
            "A34",
            "a ClientHello in the form of SSL 2",
            b"\x80\x2e\x01\x03\x01\x00\x15",
            MALFORMED,
        ),
    ];
    for (what, bytes) in [
        ("SOCKS 5", &b"\x05\x01\x00"[..]),
        ("SOCKS 4", b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00"),
        ("SSH", b"SSH-2.0-OpenSSH_9.2\r\n"),
        ("PROXY v1", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET http://gov.test/{n} HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("PROXY v2", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"),
        ("SMTP", b"EHLO evil.test\r\n"),
        ("Redis", b"*1\r\n$4\r\nPING\r\n"),
        ("Postgres", b"\0\0\0\x08\x04\xd2\x16\x2f"),
        ("RTSP", b"OPTIONS rtsp://gov.test/{n} RTSP/1.0\r\nCSeq: 1\r\n\r\n"),
        ("SIP", b"INVITE sip:x@gov.test SIP/2.0\r\n\r\n"),
        ("FastCGI", b"\x01\x01\x00\x01\x00\x08\x00\x00"),
        ("zeros", &[0; 64]),
    ] {
        rows.push(row("A35", what, bytes, MALFORMED));
    }
    rows
}

#[test]
fn no_request_line_leads_anywhere_but_where_it_says() {
    let mut rows = authorities();
    rows.extend(versions());
    rows.extend(bodies());
    rows.extend(long());
    rows.extend(behind_a_refusal());
    rows.extend(forms());
    rows.extend(not_http());
    // One host, however it is spelled: the same leaf is shown, and the same origin answers.
    for spelling in ["gov.test.:443", "GOV.TEST:443", "Gov.Test.:443"] {
        rows.push(
            row("A13", spelling, get(""), Reply::Passes(&[200]))
                .way(Way::Inside(spelling, Some(HOST)))
                .arrives(&[&arrived("")]),
        );
    }
    rows.push(row(
        "A13",
        "another governed host",
        connect(&format!("{OTHER}.:443")),
        Reply::Tunnel,
    ));
    let mut scene = Scene::new();
    scene.play(&rows);
    assert!(
        scene.replica.stderr().contains("tls_to_plain_port"),
        "A34: the log does not say what came"
    );
}
