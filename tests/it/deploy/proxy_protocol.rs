//! The PROXY protocol: whom a trusted balancer names is the client, for access, fairness and the log; nobody else is
//! believed.

use std::{
    net::Shutdown,
    thread,
    time::{Duration, Instant},
};

use crate::bed::{
    await_until::await_until,
    client::Session,
    origin::Origin,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "plain.test";
const PATIENCE: Duration = Duration::from_secs(5);

/// A replica whose clients on loopback are balancers.
fn behind_balancers(origin: &Origin, site: &Site, rate: &str) -> Replica {
    let recipe = Recipe::new()
        .proxy("proxy_protocol_from = [\"127.0.0.1\"]")
        .proxy("allow_clients = [\"loopback\", \"192.0.2.0/24\", \"2001:db8::/32\"]")
        .destination("plain", &[HOST], rate)
        .origin(origin);
    Replica::start(site, "r0", &recipe)
}

fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
    [
        b"\r\n\r\n\0\r\nQUIT\n",
        &[command, family][..],
        &length,
        rest,
    ]
    .concat()
}

/// Sends a header and a request in one piece, and returns the status of the answer.
fn fetch(replica: &Replica, header: &[u8], id: &str) -> u16 {
    let mut session = replica.session(HOST);
    let request = format!("GET http://{HOST}/b/1?id={id} HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    session
        .send(&[header, request.as_bytes()].concat())
        .expect("the proxy accepts");
    session.answer().expect("an answer").status()
}

#[test]
fn whom_a_balancer_names_is_the_client() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let replica = behind_balancers(&origin, &site, "200.0");
    let four = [192, 0, 2, 8, 10, 0, 0, 1, 200, 1, 12, 56];
    let six = {
        let mut bytes = [0; 36];
        bytes[..4].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
        bytes[15] = 9;
        bytes
    };
    let with_tlvs = [&four[..], b"\x04\0\x02..\xea\0\x05vpce-\x02\0\x01h"].concat();
    for (id, header, client) in [
        (
            "v1four",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\r\n".to_vec(),
            "192.0.2.7",
        ),
        (
            "v1six",
            b"PROXY TCP6 2001:db8::7 ::1 51000 3128\r\n".to_vec(),
            "2001:db8::7",
        ),
        ("v1unknown", b"PROXY UNKNOWN\r\n".to_vec(), "127.0.0.1"),
        ("v2four", v2(0x21, 0x11, &four), "192.0.2.8"),
        ("v2six", v2(0x21, 0x21, &six), "2001:db8::9"),
        ("v2tlvs", v2(0x21, 0x11, &with_tlvs), "192.0.2.8"),
        ("v2local", v2(0x20, 0x00, b""), "127.0.0.1"),
        ("v2unspecified", v2(0x21, 0x00, b""), "127.0.0.1"),
    ] {
        assert_eq!(fetch(&replica, &header, id), 200, "{id}");
        let lines = || {
            let log = replica.stderr();
            let lines = log.lines().filter(|line| line.contains("access: "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let line = await_until("the access line is written", PATIENCE, || {
            (lines().len() == origin.arrivals().len()).then(|| lines().pop())?
        });
        assert!(line.contains(&format!("client={client} ")), "{id}: {line}");
    }
}

#[test]
fn a_client_that_may_not_connect_may_not_by_way_of_a_balancer_either() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let replica = behind_balancers(&origin, &site, "200.0");
    let stranger = b"PROXY TCP4 198.51.100.1 10.0.0.1 51000 3128\r\n";
    assert_eq!(fetch(&replica, stranger, "stranger"), 403);
    let denied = ["outcome=\"client_denied\""];
    assert_eq!(
        replica.scrape().sum("paceline_requests_total", &denied),
        Some(1.0)
    );
    assert_eq!(origin.arrivals().len(), 0);
}

#[test]
fn a_balancer_that_sends_no_header_is_told_so_and_not_served() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let replica = behind_balancers(&origin, &site, "200.0");
    let too_long = [b"PROXY TCP4 ".as_slice(), &[b'1'; 200]].concat();
    let faulty: [&[u8]; 5] = [
        b"",
        b"PROXY TCP4 nonsense\r\n",
        &too_long,
        &v2(0x21, 0x12, &[0; 12]),
        &v2(0x21, 0x11, &[0; 5000])[..16],
    ];
    for header in faulty {
        assert_eq!(fetch(&replica, header, "none"), 400, "{header:?}");
    }
    let counted = ["outcome=\"proxy_header\""];
    assert_eq!(
        replica.scrape().sum("paceline_requests_total", &counted),
        Some(5.0)
    );
    let line = "no PROXY header from a peer in proxy_protocol_from: it begins with something else";
    assert_eq!(replica.stderr().matches(line).count(), 1);
    assert_eq!(origin.arrivals().len(), 0);

    // As health checks do: to connect and leave is no fault.
    for begun in [&b""[..], b"PROXY TC"] {
        let mut session = replica.session(HOST);
        session.send(begun).expect("sent");
        session.socket().shutdown(Shutdown::Write).expect("open");
        assert_eq!(session.rest().expect("it ends"), b"");
    }
    assert_eq!(
        replica.scrape().sum("paceline_requests_total", &counted),
        Some(5.0)
    );
}

#[test]
fn a_header_that_does_not_come_to_an_end_is_waited_for_ten_seconds() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let replica = behind_balancers(&origin, &site, "200.0");
    let mut sessions = [
        &b""[..],
        b"PROXY TCP4 192.0.2.7",
        &v2(0x21, 0x11, &[0; 4000])[..900],
    ]
    .map(|begun| {
        let mut session = replica.session(HOST);
        session.send(begun).expect("sent");
        session
    });
    let began = Instant::now();
    for session in &mut sessions {
        assert_eq!(session.answer().expect("an answer").status(), 400);
    }
    let took = began.elapsed().as_secs_f64();
    assert!((9.0..14.0).contains(&took), "it took {took:.1} s");
}

#[test]
fn a_header_of_somebody_who_is_not_listed_is_no_request() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .proxy("proxy_protocol_from = [\"127.0.0.9\"]")
        .destination("plain", &[HOST], "200.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let v1 = b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\r\n";
    assert_eq!(fetch(&replica, v1, "v1"), 400);
    let four = [192, 0, 2, 7, 10, 0, 0, 1, 200, 1, 12, 56];
    assert_eq!(fetch(&replica, &v2(0x21, 0x11, &four), "v2"), 400);
    assert_eq!(fetch(&replica, b"", "none"), 200);
    assert_eq!(origin.arrivals().len(), 1);
}

#[test]
fn bytes_behind_the_header_are_the_clients_and_its_leaving_is_seen() {
    let (origin, site) = (Origin::tls(&["img.test"]), Site::new());
    let recipe = Recipe::new()
        .proxy("proxy_protocol_from = [\"127.0.0.1\"]\nallow_clients = [\"192.0.2.0/24\"]")
        .destination("img", &["img.test"], "1.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let tls = crate::bed::certs::client_tls_from(&site.root());
    let tunnel = || {
        let mut session = replica.session("img.test");
        session
            .send(b"PROXY TCP4 192.0.2.7 10.0.0.1 51000 3128\r\n")
            .expect("sent");
        let answer = session.connect("img.test:443").expect("an answer");
        assert_eq!(answer.status(), 200);
        session.start_tls(&tls, "img.test").expect("a handshake")
    };
    assert_eq!(
        tunnel().get("/b/1?id=first").expect("an answer").status(),
        200
    );
    let mut waiting = tunnel();
    waiting.ask("GET", "/b/1?id=second", &[]).expect("sent");
    let mut leaving = tunnel();
    leaving.ask("GET", "/b/1?id=gone", &[]).expect("sent");
    drop(leaving);
    assert_eq!(waiting.answer().expect("an answer").status(), 200);
    assert_eq!(
        tunnel().get("/b/1?id=third").expect("an answer").status(),
        200
    );
    assert_eq!(origin.timeline("gone").count(), 0);
}

#[test]
fn two_clients_behind_one_balancer_take_turns() {
    let (origin, site) = (Origin::plain(&[HOST]), Site::new());
    let replica = behind_balancers(&origin, &site, "4.0");
    let ask = |client: u8, id: String| -> Session {
        let mut session = replica.session(HOST);
        let header = format!("PROXY TCP4 192.0.2.{client} 10.0.0.1 51000 3128\r\n");
        session.send(header.as_bytes()).expect("sent");
        session
            .ask("GET", &format!("http://{HOST}/b/1?id={id}"), &[])
            .expect("sent");
        session
    };
    let mut greedy: Vec<_> = (0..8).map(|n| ask(1, format!("greedy{n}"))).collect();
    await_until("the greedy client's are queued", PATIENCE, || {
        (replica.scrape().sum("paceline_queue_depth", &[])? >= 5.0).then_some(())
    });
    let mut modest = ask(2, "modest".to_owned());
    thread::scope(|scope| {
        for session in &mut greedy {
            scope.spawn(|| assert_eq!(session.answer().expect("an answer").status(), 200));
        }
        assert_eq!(modest.answer().expect("an answer").status(), 200);
    });
    let order: Vec<_> = origin.arrivals().into_iter().filter_map(|a| a.id).collect();
    let place = order.iter().position(|id| id == "modest").expect("it came");
    // By arrival alone it would be the last of nine. Three are served before it came, and one may have had its slot.
    assert!(
        place < 7,
        "the modest client's came as number {place}: {order:?}"
    );
}
