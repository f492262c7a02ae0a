//! How often the main paths allocate: a guard against getting slower that needs no quiet machine.
//!
//! The proxy runs on the thread of the test, where each allocation is counted; clients and origins run on others. The
//! figures were counted in the tests' own profile, so they say nothing about time: `benches/run compare` does.
//!
//! A figure that is wrong by more than the slack fails either way. More means that a request got dearer: find out where
//! (`heaptrack` on the program shows each place) and whether it must. Less is a gain that the next change could lose
//! unseen. Either way, what is meant to stay goes into [`RECORDED`].
#![allow(
    clippy::disallowed_methods,
    reason = "clients and origins here are plain blocking threads"
)]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{Arc, mpsc},
    thread,
};

use allocation_counter::measure;
use paceline::{app::App, config::Config};
use rustls::{
    ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned,
    pki_types::ServerName,
};
use tokio::runtime::{Builder, Runtime};

/// Of the tests' bed, the certificates of origins.
#[path = "it/bed"]
#[allow(dead_code, reason = "the other tests use more of it than this does")]
mod bed {
    pub mod certs;
}

use bed::certs::{TestCa, client_tls, server_tls};

/// What each path costs: allocations for a request (for the tunnel: for a MiB), and the KiB that they come to.
#[rustfmt::skip] // as the test prints them
const RECORDED: [(Way, f64, f64); 4] = [
    (Way::Absolute, 14.0, 5.3),
    (Way::Intercepted, 17.0, 7.6),
    (Way::NewTunnel, 181.0, 44.7),
    (Way::Tunnelled, 0.1, 0.0),
];
/// KiB that each way holds for as long as a client keeps it open and says nothing.
#[rustfmt::skip] // as the test prints them
const RECORDED_HELD: [(Way, f64); 2] = [
    (Way::HeldConnect, 2.2),
    (Way::HeldTunnel, 3.3),
];
/// How far a figure may be from what is recorded, as a share of it; and the least of that, for figures about nought. The
/// counts themselves do not vary from run to run; the slack is for other versions of what we stand on.
const SLACK: f64 = 0.05;
const SLACK_NEAR_NOUGHT: f64 = 0.5;

const HOST: &str = "bench.test";
/// The host that no destination governs.
const FREE_HOST: &str = "free.test";
const BODY: usize = 1024;
const WARM_UP: usize = 50;
const COUNTED: usize = 500;
/// Each has threads and files of its own.
const HELD: usize = 100;
const MIB: usize = 1 << 20;

/// A way through the proxy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// `GET http://HOST/`, one connection, paced.
    Absolute,
    /// `GET /` within one intercepted tunnel, paced.
    Intercepted,
    /// As before, each request within a tunnel of its own, the session resumed.
    NewTunnel,
    /// Bytes through a tunnel that is not looked into.
    Tunnelled,
    /// A tunnel to be intercepted, in which the client has said nothing yet.
    HeldConnect,
    /// A tunnel that is not looked into, through which nothing goes.
    HeldTunnel,
}

impl Way {
    fn is_held(self) -> bool {
        matches!(self, Way::HeldConnect | Way::HeldTunnel)
    }
}

#[test]
fn a_request_allocates_no_more_than_is_recorded_on_each_path() {
    let mut faults = Vec::new();
    for (way, count, kib) in RECORDED {
        let counted = counted(way);
        println!("(Way::{way:?}, {:.1}, {:.1}),", counted.count, counted.kib);
        faults.extend(fault(way, "allocations", counted.count, count));
        faults.extend(fault(way, "KiB allocated", counted.kib, kib));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_tunnel_that_waits_holds_no_more_than_is_recorded() {
    let mut faults = Vec::new();
    for (way, kib) in RECORDED_HELD {
        let held = counted(way).held;
        println!("(Way::{way:?}, {held:.1}),");
        faults.extend(fault(way, "KiB held", held, kib));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_figure_that_is_off_either_way_is_told_with_what_to_do() {
    let said = |counted| fault(Way::Absolute, "allocations", counted, 40.0);
    assert_eq!(said(42.0), None);
    assert_eq!(said(38.0), None);
    assert!(said(42.1).is_some_and(|text| text.contains("dearer")));
    assert!(said(37.9).is_some_and(|text| text.contains("cheaper")));
    assert_eq!(fault(Way::Tunnelled, "allocations", 0.5, 0.0), None);
    assert!(fault(Way::Tunnelled, "allocations", 0.6, 0.0).is_some());
}

/// What is to be said about a figure that is not as recorded.
fn fault(way: Way, what: &str, counted: f64, recorded: f64) -> Option<String> {
    let slack = (recorded * SLACK).max(SLACK_NEAR_NOUGHT);
    let unit = match way {
        Way::Tunnelled => "MiB",
        _ if way.is_held() => "tunnel",
        _ => "request",
    };
    if (counted - recorded).abs() <= slack {
        return None;
    }
    let advice = if counted > recorded {
        "a change made this path dearer: take out what it allocates, or, if it must, record the new figure"
    } else {
        "a change made this path cheaper: record the new figure, so that the gain can't be lost unseen"
    };
    Some(format!(
        "{way:?}: {counted:.1} {what} for each {unit}, recorded are {recorded:.1}; {advice} in RECORDED of \
         tests/allocations.rs"
    ))
}

struct Counted {
    count: f64,
    kib: f64,
    /// KiB that were not freed again.
    held: f64,
}

/// Allocations of the proxy while a client goes this way.
fn counted(way: Way) -> Counted {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let ca = TestCa::new();
    let tls = server_tls(&ca.issue(&[HOST]));
    let (http, https) = (serve(None), serve(Some(tls)));
    let config = configuration(dir.path(), &ca, http, https);
    // One thread: whatever the proxy allocates is allocated on this one.
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    // Access lines are written, as an operator has them by default; where to makes no difference.
    let log = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(std::io::sink)
        .finish();
    let _log = tracing::subscriber::set_default(log);
    let app = runtime.block_on(App::new(config)).expect("a replica");
    let proxy = app.proxy_address;
    let root = std::fs::read(dir.path().join("certs/ca.pem")).expect("the root that it made");
    let serving = runtime.spawn(app.run(|_| None));
    let mut client = Client::start(way, proxy, client_tls(&root));
    client.await_round(&runtime);
    let info = measure(|| client.await_round(&runtime));
    serving.abort();
    let per = match way {
        Way::Tunnelled => 16,
        _ if way.is_held() => HELD,
        _ => COUNTED,
    } as f64;
    Counted {
        held: info.bytes_current as f64 / per / 1024.0,
        count: info.count_total as f64 / per,
        kib: info.bytes_total as f64 / per / 1024.0,
    }
}

fn configuration(dir: &Path, ca: &TestCa, http: SocketAddr, https: SocketAddr) -> Config {
    let roots = dir.join("roots.pem");
    std::fs::write(&roots, ca.root()).expect("our own folder");
    let text = format!(
        r#"
        [proxy]
        listen = "127.0.0.1:0"
        [admin]
        listen = "127.0.0.1:0"
        [ca]
        dir = {certs:?}
        [upstream]
        extra_roots = {roots:?}
        resolve = {{ "{HOST}:80" = "{http}", "{HOST}:443" = "{https}", "{FREE_HOST}:443" = "{http}" }}
        [[destination]]
        name = "bench"
        hosts = ["{HOST}"]
        rate = 1000000.0
        "#,
        certs = dir.join("certs")
    );
    Config::parse(&text, Path::new("bench.toml"), &|_| None).expect("a configuration")
}

/// A client on a thread of its own: a round to warm up, and one to count.
struct Client {
    go: mpsc::Sender<()>,
    done: tokio::sync::mpsc::UnboundedReceiver<()>,
}

impl Client {
    fn start(way: Way, proxy: SocketAddr, tls: Arc<ClientConfig>) -> Client {
        let (go, may_go) = mpsc::channel();
        let (is_done, done) = tokio::sync::mpsc::unbounded_channel();
        thread::spawn(move || {
            let mut trip = Trip::new(way, proxy, tls);
            let counted = if way.is_held() { HELD } else { COUNTED };
            for times in [WARM_UP, counted] {
                may_go.recv().expect("the test goes on");
                trip.make(times);
                is_done.send(()).expect("the test goes on");
            }
        });
        Client { go, done }
    }

    /// Runs the proxy until the client is through its round.
    fn await_round(&mut self, runtime: &Runtime) {
        self.go.send(()).expect("the client goes on");
        runtime
            .block_on(self.done.recv())
            .expect("a client that got its answers");
    }
}

trait Wire: Read + Write {}

impl<T: Read + Write> Wire for T {}

/// A client's way, travelled again and again.
struct Trip {
    way: Way,
    proxy: SocketAddr,
    tls: Arc<ClientConfig>,
    wire: Option<Box<dyn Wire>>,
    held: Vec<Box<dyn Wire>>,
    buffer: Vec<u8>,
}

impl Trip {
    fn new(way: Way, proxy: SocketAddr, tls: Arc<ClientConfig>) -> Trip {
        Trip {
            way,
            proxy,
            tls,
            wire: None,
            held: Vec::new(),
            buffer: vec![0; MIB],
        }
    }

    fn make(&mut self, times: usize) {
        if self.way.is_held() {
            for _ in 0..times {
                let wire = self.open();
                self.held.push(wire);
            }
            return;
        }
        let request = match self.way {
            Way::Absolute => request(&format!("http://{HOST}/{BODY}"), HOST),
            Way::Intercepted | Way::NewTunnel => request(&format!("/{BODY}"), HOST),
            // One answer of so many bytes, counted by the MiB.
            Way::HeldConnect | Way::HeldTunnel => unreachable!("nothing is said there"),
            Way::Tunnelled => request(&format!("/{}", 16 * MIB), FREE_HOST),
        };
        let times = if self.way == Way::Tunnelled { 1 } else { times };
        for _ in 0..times {
            let mut wire = self.wire.take().unwrap_or_else(|| self.open());
            wire.write_all(&request).expect("a proxy that reads");
            read_answer(&mut *wire, &mut self.buffer);
            if self.way != Way::NewTunnel {
                self.wire = Some(wire);
            }
        }
    }

    fn open(&mut self) -> Box<dyn Wire> {
        let mut stream = TcpStream::connect(self.proxy).expect("a proxy that accepts");
        stream.set_nodelay(true).expect("a TCP socket");
        let host = match self.way {
            Way::Absolute => return Box::new(stream),
            Way::Tunnelled | Way::HeldTunnel => FREE_HOST,
            Way::HeldConnect => HOST,
            Way::Intercepted | Way::NewTunnel => HOST,
        };
        let connect = format!("CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n");
        stream
            .write_all(connect.as_bytes())
            .expect("a proxy that reads");
        read_answer(&mut stream, &mut self.buffer);
        if self.way == Way::Tunnelled || self.way.is_held() {
            return Box::new(stream);
        }
        let name = ServerName::try_from(HOST).expect("a name");
        let session = ClientConnection::new(self.tls.clone(), name).expect("a client");
        Box::new(StreamOwned::new(session, stream))
    }
}

fn request(target: &str, host: &str) -> Vec<u8> {
    format!(
        "GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: paceline-test/1\r\nAccept: */*\r\n\r\n"
    )
    .into_bytes()
}

/// Reads an answer of 200 to its end.
fn read_answer(wire: &mut (impl Wire + ?Sized), buffer: &mut [u8]) {
    let mut filled = 0;
    let head = loop {
        let n = wire.read(&mut buffer[filled..]).expect("an answer");
        assert!(n > 0, "the answer broke off");
        filled += n;
        if let Some(end) = end_of_head(&buffer[..filled]) {
            break end;
        }
    };
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    assert!(text.starts_with("http/1.1 200"), "{text}");
    let length = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let length = length.map_or(0, |n| n.parse().expect("a length"));
    let mut left = length - (filled - head);
    while left > 0 {
        let n = wire.read(buffer).expect("a body");
        assert!(n > 0, "the body broke off");
        left -= n;
    }
}

fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let at = bytes.windows(4).position(|w| w == b"\r\n\r\n")?;
    Some(at + 4)
}

/// An origin that answers `GET /N` with N bytes, each connection on a thread of its own, until the process ends.
fn serve(tls: Option<Arc<ServerConfig>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
    let address = listener.local_addr().expect("a bound socket");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            stream.set_nodelay(true).expect("a TCP socket");
            let tls = tls.clone();
            thread::spawn(move || match tls {
                Some(tls) => {
                    let session = ServerConnection::new(tls).expect("a server");
                    answer_all(StreamOwned::new(session, stream));
                }
                None => answer_all(stream),
            });
        }
    });
    address
}

fn answer_all(mut wire: impl Wire) {
    let (mut buffer, mut filled) = (vec![0; 8192], 0);
    loop {
        // The proxy closes when it ends; there is nobody to tell then.
        let Ok(n @ 1..) = wire.read(&mut buffer[filled..]) else {
            return;
        };
        filled += n;
        let Some(end) = end_of_head(&buffer[..filled]) else {
            continue;
        };
        let head = String::from_utf8_lossy(&buffer[..end]);
        let path = head.split(' ').nth(1).expect("a request line");
        let length: usize = path[1..].parse().expect("a number for a path");
        let mut answer =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").into_bytes();
        answer.resize(answer.len() + length, b'x');
        filled = 0;
        if wire.write_all(&answer).is_err() {
            return;
        }
    }
}
