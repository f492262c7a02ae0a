//! Where a request would go: addresses that nobody may reach through us, in every spelling, by number and as what a
//! resolver says for a name. What is listed is one address of a decoy that listens on all; so whoever gets past the guard
//! is seen there.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    sync::{Arc, Mutex},
    thread,
};

use super::{Reply, Row, STRANGER, Scene, connect, request, row};

/// The one address that the operator has listed.
const LISTED: &str = "127.0.0.9";

const PROHIBITED: Reply = Reply::Ends(403, "destination_ip_prohibited");
const MALFORMED: Reply = Reply::Ends(400, "http_request_error");

/// A listener on every address of this machine, and on which of them it was reached.
struct Decoy {
    port: u16,
    reached: Arc<Mutex<Vec<IpAddr>>>,
}

impl Decoy {
    fn open() -> Decoy {
        let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
        let port = listener.local_addr().expect("the bound address").port();
        let reached = Arc::<Mutex<Vec<IpAddr>>>::default();
        let seen = reached.clone();
        // Ends with the test's process.
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let ip = connection.local_addr().map(|a| a.ip());
                seen.lock().expect("no panic under the lock").extend(ip);
            }
        });
        Decoy { port, reached }
    }

    fn reached(&self) -> Vec<IpAddr> {
        let mut reached = self
            .reached
            .lock()
            .expect("no panic under the lock")
            .clone();
        reached.sort();
        reached.dedup();
        reached
    }
}

/// Addresses, each with the kind it is of, that are global for nobody or belong to somebody else.
const PROHIBITED_ADDRESSES: [(&str, &str); 63] = [
    ("B01", "127.0.0.1"),
    ("B01", "127.255.255.255"),
    ("B01", "127.0.0.8"),
    ("B01", "127.0.0.10"),
    ("B05", "0.0.0.0"),
    ("B05", "0.1.2.3"),
    ("B06", "10.0.0.1"),
    ("B06", "10.255.255.255"),
    ("B06", "172.16.0.1"),
    ("B06", "172.31.255.255"),
    ("B06", "192.168.0.1"),
    ("B06", "192.168.255.255"),
    ("B07", "100.64.0.1"),
    ("B07", "100.127.255.255"),
    ("B07", "192.0.0.1"),
    ("B07", "192.0.0.170"),
    ("B07", "192.0.2.1"),
    ("B07", "198.51.100.1"),
    ("B07", "203.0.113.1"),
    ("B07", "192.88.99.1"),
    ("B07", "198.18.0.1"),
    ("B07", "198.19.255.255"),
    ("B08", "169.254.169.254"),
    ("B08", "169.254.170.2"),
    ("B08", "169.254.0.1"),
    ("B08", "fd00:ec2::254"),
    ("B08", "100.100.100.200"),
    ("B08", "168.63.129.16"),
    ("B10", "224.0.0.1"),
    ("B10", "239.255.255.255"),
    ("B10", "240.0.0.1"),
    ("B10", "255.255.255.255"),
    ("B11", "::"),
    ("B11", "::1"),
    ("B11", "::2"),
    ("B12", "::ffff:127.0.0.1"),
    ("B12", "::ffff:7f00:1"),
    ("B12", "::ffff:10.0.0.1"),
    ("B12", "::ffff:169.254.169.254"),
    ("B12", "::ffff:0:127.0.0.1"),
    ("B14", "::127.0.0.1"),
    ("B14", "::a00:1"),
    ("B15", "64:ff9b::7f00:1"),
    ("B15", "64:ff9b::127.0.0.1"),
    ("B15", "64:ff9b::a9fe:a9fe"),
    ("B15", "64:ff9b:1::1"),
    ("B16", "2002:7f00:1::"),
    ("B16", "2002:a00:1::1"),
    ("B17", "2001::1"),
    ("B17", "2001:0:7f00:1::"),
    ("B17", "2001:10::1"),
    ("B17", "2001:20::1"),
    ("B17", "2001:db8::1"),
    ("B17", "3fff::1"),
    ("B17", "5f00::1"),
    ("B17", "100::1"),
    ("B18", "fe80::1"),
    ("B18", "fec0::1"),
    ("B18", "fc00::1"),
    ("B18", "fdff::1"),
    ("B18", "ff02::1"),
    ("B19", "2606:4700::5efe:127.0.0.1"),
    ("B19", "2606:4700::200:5efe:a00:1"),
];

fn bracketed(address: &str) -> String {
    if address.contains(':') {
        format!("[{address}]")
    } else {
        address.to_owned()
    }
}

/// By number, in a CONNECT and in a URL, to the decoy's port and to an ordinary one.
fn by_number(port: u16) -> Vec<Row> {
    let mut rows = Vec::new();
    for (id, address) in PROHIBITED_ADDRESSES {
        let host = bracketed(address);
        rows.push(row(
            id,
            address,
            connect(&format!("{host}:{port}")),
            PROHIBITED,
        ));
        let url = request("GET", &format!("http://{host}/{{n}}"), "", "");
        rows.push(row(
            id,
            format!("{address} by URL"),
            url,
            Reply::Refused(403, "destination_ip_prohibited"),
        ));
    }
    // Not listed, and so a way round a governed name: refused although anybody may reach it.
    for address in ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"] {
        rows.push(row(
            "B13",
            address,
            connect(&format!("{}:443", bracketed(address))),
            PROHIBITED,
        ));
    }
    for spelling in [
        "2130706433",
        "127.1",
        "127.0.1",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "0x0",
        "00",
        "1",
        "127.0.0.1.1",
        "127.0.0.256",
        "127.0.0.01",
        "127.0.0.0x1",
        "127..0.1",
        "4294967295",
        "0x",
        "\u{ff11}27.1",
    ] {
        let id = if spelling.bytes().all(|b| b.is_ascii_digit()) {
            "B02"
        } else {
            "B03"
        };
        rows.push(row(
            id,
            spelling,
            connect(&format!("{spelling}:{port}")),
            MALFORMED,
        ));
    }
    for zone in ["fe80::1%25eth0", "fe80::1%eth0", "::1%lo", "::1%251"] {
        rows.push(row(
            "B18",
            zone,
            connect(&format!("[{zone}]:{port}")),
            MALFORMED,
        ));
    }
    rows
}

/// What the resolver says for the names of the rows.
fn by_name(port: u16) -> (Vec<Row>, Vec<(String, String)>) {
    let (mut rows, mut names) = (Vec::new(), Vec::new());
    let mut say = |name: &str, said: &str| names.push((format!("{name}."), said.to_owned()));
    for (n, (id, address)) in PROHIBITED_ADDRESSES.into_iter().enumerate() {
        let name = format!("n{n}.rebind.test");
        say(&name, address);
        rows.push(row(
            id,
            format!("{address} by name"),
            connect(&format!("{name}:{port}")),
            PROHIBITED,
        ));
    }
    for name in [
        "localhost",
        "localhost.",
        "LOCALHOST",
        "foo.localhost",
        "a.b.localhost.",
    ] {
        // Whatever a resolver says, these are this machine (RFC 6761 section 6.3).
        rows.push(row(
            "B04",
            name,
            connect(&format!("{name}:{port}")),
            PROHIBITED,
        ));
    }
    say("localhost", LISTED);
    say("foo.localhost", LISTED);
    for (id, name, said) in [
        ("B04", "ip6-localhost", "::1"),
        ("B04", "127.0.0.1.nip.test", "127.0.0.1"),
        ("B08", "metadata.google.internal", "169.254.169.254"),
        ("B25", "thousand.test", &vec!["10.0.0.1"; 1_000].join(",")),
        ("B25", "mixed-families.test", "::1,127.0.0.1,fd00::1"),
    ] {
        say(name, said);
        rows.push(row(
            id,
            name,
            connect(&format!("{name}:{port}")),
            PROHIBITED,
        ));
        let url = request("GET", &format!("https://{name}/{{n}}"), "", "");
        rows.push(row(
            id,
            format!("{name} by URL"),
            url,
            Reply::Refused(403, "destination_ip_prohibited"),
        ));
    }
    say(
        "one-of-many.test",
        &(vec!["10.0.0.1"; 999].join(",") + "," + LISTED),
    );
    say("second.test", &format!("127.0.0.1,{LISTED}"));
    say("mapped.test", "::ffff:127.0.0.9");
    for (id, name) in [
        ("B25", "one-of-many.test"),
        ("B22", "second.test"),
        ("B12", "mapped.test"),
    ] {
        rows.push(row(
            id,
            name,
            connect(&format!("{name}:{port}")),
            Reply::Tunnel,
        ));
    }
    for (id, name, said, status, error) in [
        ("B26", "none.test", "!none", 502, "dns_error"),
        ("B26", "fail.test", "!fail", 502, "dns_error"),
        ("B26", "again.test", "!again", 502, "dns_error"),
        ("B26", "hang.test", "!hang", 504, "dns_timeout"),
        ("B26", "empty.test", "", 502, "dns_error"),
    ] {
        say(name, said);
        rows.push(row(
            id,
            name,
            connect(&format!("{name}:{port}")),
            Reply::Ends(status, error),
        ));
    }
    // Asked for as it is, the machine's search domains would be tried.
    names.push(("gov".to_owned(), LISTED.to_owned()));
    rows.push(row(
        "B28",
        "a name without dots",
        connect(&format!("gov:{port}")),
        Reply::Ends(502, "dns_error"),
    ));
    (rows, names)
}

/// What is listed is reached, in every spelling, at the ports that may be reached.
fn listed(port: u16) -> Vec<Row> {
    let mut rows = Vec::new();
    for spelling in [
        LISTED,
        "127.0.0.9.",
        "[::ffff:127.0.0.9]",
        "[::ffff:7f00:9]",
        "[0:0:0:0:0:FFFF:127.0.0.9]",
    ] {
        rows.push(row(
            "B31",
            spelling,
            connect(&format!("{spelling}:{port}")),
            Reply::Tunnel,
        ));
        rows.push(row(
            "B31",
            format!("{spelling}, another port"),
            connect(&format!("{spelling}:22")),
            Reply::Ends(403, "http_request_denied"),
        ));
    }
    let url = request("GET", &format!("http://{LISTED}:22/{{n}}"), "", "");
    rows.push(row(
        "B31",
        "another port by URL: tried, for the address is listed, and nobody listens",
        url,
        Reply::Refused(502, "connection_refused"),
    ));
    rows
}

/// Our own listeners, by every address that leads to them.
fn ourselves(own: [SocketAddr; 2], addresses: &[&str]) -> Vec<Row> {
    let mut rows = Vec::new();
    for listener in own {
        for address in addresses {
            let authority = format!("{}:{}", bracketed(address), listener.port());
            rows.push(row(
                "B20",
                authority.clone(),
                connect(&authority),
                Reply::Ends(502, "proxy_loop_detected"),
            ));
            let url = request("GET", &format!("http://{authority}/metrics?{{n}}"), "", "");
            rows.push(row(
                "J04",
                authority,
                url,
                Reply::Refused(502, "proxy_loop_detected"),
            ));
        }
        // Governed, so that only the address that is dialled can give it away.
        let url = request(
            "GET",
            &format!("http://self.wild.test:{}/{{n}}", listener.port()),
            "",
            "",
        );
        rows.push(row(
            "B20",
            "a name of ours",
            url,
            Reply::Refused(502, "proxy_loop_detected"),
        ));
        let url = request(
            "GET",
            &format!("http://self.test:{}/{{n}}", listener.port()),
            "",
            "",
        );
        rows.push(row(
            "B20",
            "a name of ours that nobody governs",
            url,
            Reply::Refused(403, "http_request_denied"),
        ));
    }
    rows
}

/// An address of this machine other than loopback, where it has one.
fn public_address() -> Option<IpAddr> {
    // Nothing is sent: connecting a datagram socket only chooses a route, and with it the address to send from.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[test]
fn no_spelling_and_no_resolver_leads_to_an_address_that_is_not_listed() {
    let decoy = Decoy::open();
    let port = decoy.port;
    let mut scene = Scene::with(|recipe, _| {
        recipe
            .proxy(&format!("allow_upstreams = [\"{LISTED}\"]"))
            .proxy(&format!("connect_ports = [80, 443, {port}]"))
    });
    let mut rows = by_number(port);
    let (named, mut names) = by_name(port);
    rows.extend(named);
    rows.extend(listed(port));
    names.push(("self.wild.test.".to_owned(), "127.0.0.1".to_owned()));
    names.push(("self.test.".to_owned(), "127.0.0.1".to_owned()));
    scene.names.say(&names);
    rows.extend(ourselves(
        scene.own(),
        &["127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::"],
    ));
    scene.play(&rows);
    assert_eq!(
        decoy.reached(),
        [LISTED.parse::<IpAddr>().expect("an address")],
        "somebody got past the guard, or nobody reached what is listed"
    );
}

#[test]
fn a_listener_on_every_address_knows_itself_by_each() {
    let public = public_address();
    let mut addresses = vec![
        "127.0.0.1".to_owned(),
        "127.0.0.77".to_owned(),
        "0.0.0.0".to_owned(),
    ];
    addresses.extend(public.map(|ip| ip.to_string()));
    let mut scene = Scene::with(|recipe, _| {
        let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        recipe
            .listen(everywhere)
            .proxy("allow_upstreams = [\"0.0.0.0/0\"]")
    });
    let said = public
        .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
        .to_string();
    scene.names.say(&[("self.wild.test.".to_owned(), said)]);
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut own = scene.own();
    // The admin listener is on loopback alone.
    own[1] = own[0];
    scene.play(&ourselves(own, &addresses));
}

#[test]
fn metadata_services_are_not_opened_by_the_range_around_them() {
    let mut scene =
        Scene::with(|recipe, _| recipe.proxy("allow_upstreams = [\"0.0.0.0/0\", \"::/0\"]"));
    scene.names.say(&[(
        "metadata.google.internal.".to_owned(),
        "169.254.169.254".to_owned(),
    )]);
    let rows: Vec<Row> = [
        "169.254.169.254",
        "169.254.170.2",
        "[fd00:ec2::254]",
        "100.100.100.200",
        "168.63.129.16",
        "[::ffff:169.254.169.254]",
        "metadata.google.internal",
    ]
    .iter()
    .flat_map(|host| {
        [
            row("B08", *host, connect(&format!("{host}:80")), PROHIBITED),
            row(
                "B08",
                format!("{host} by URL"),
                request("GET", &format!("http://{host}/{{n}}"), "", ""),
                Reply::Refused(403, "destination_ip_prohibited"),
            ),
        ]
    })
    .collect();
    scene.play(&rows);
}

#[test]
fn each_dial_is_checked_anew() {
    let decoy = Decoy::open();
    let mut scene = Scene::with(|recipe, _| {
        recipe
            .proxy(&format!("allow_upstreams = [\"{LISTED}\"]"))
            .proxy(&format!("connect_ports = [80, 443, {}]", decoy.port))
    });
    let asked = connect(&format!("rebind.test:{}", decoy.port));
    for (said, reply) in [
        (LISTED, Reply::Tunnel),
        ("127.0.0.1", PROHIBITED),
        (LISTED, Reply::Tunnel),
        ("::1,10.0.0.1", PROHIBITED),
    ] {
        scene
            .names
            .say(&[("rebind.test.".to_owned(), said.to_owned())]);
        scene.play(&[row("B21", format!("rebound to {said}"), &asked, reply)]);
    }
    assert_eq!(
        decoy.reached(),
        [LISTED.parse::<IpAddr>().expect("an address")]
    );
    assert_eq!(
        scene.stranger.heard().len(),
        0,
        "{STRANGER} is not asked for here"
    );
}
