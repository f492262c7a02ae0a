//! What one client may hold, how long it may take, and that nothing it does to itself is felt by others.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};

use crate::bed::{
    await_until::await_until,
    client::Session,
    crowd::{address, connect_from, hear_all, say},
    http_text::Head,
    metrics::Scrape,
    origin::Origin,
    postgres::faketime,
    recipe::{Recipe, Site},
    replica::{Replica, paceline},
};

const HOST: &str = "lh3.googleusercontent.com";
const PLAIN: &str = "plain.test";
/// SHA-256 of "secret"; "d29ya2VyOnNlY3JldA==" is worker:secret.
const WORKER: &str = "[proxy.auth.users]\n\
    worker = \"sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"";
const CREDENTIALS: &str = "Proxy-Authorization: Basic d29ya2VyOnNlY3JldA==\r\n";

fn recipe() -> Recipe {
    Recipe::new().destination(
        "google_image",
        &["*.googleusercontent.com", PLAIN],
        "1000.0",
    )
}

/// A complete answer by which a client knows when to come back.
fn expect_share(answer: &str) {
    let head = Head::parse(answer.as_bytes());
    assert_eq!(head.status().ok(), Some(503), "{answer}");
    assert_eq!(head.field("retry-after"), Some("1"), "{answer}");
    assert_eq!(
        head.field("proxy-status"),
        Some("paceline; error=connection_limit_reached"),
        "{answer}"
    );
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert_eq!(
        head.field("content-length"),
        Some(body.len().to_string().as_str()),
        "{answer}"
    );
    assert!(body.contains("max_connections_per_client"), "{answer}");
}

fn get(stream: &TcpStream, url: &str) {
    say(
        stream,
        &format!("GET {url} HTTP/1.1\r\nHost: {PLAIN}\r\nConnection: close\r\n\r\n"),
    );
}

#[test]
fn an_address_with_its_share_of_connections_is_told_so_and_others_come_in() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let recipe = recipe()
        .proxy("max_connections_per_client = 3")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let url = format!("http://{PLAIN}/b/1");
    let held: Vec<_> = (0..3)
        .map(|_| connect_from(address(1), replica.proxy()))
        .collect();
    let fourth = connect_from(address(1), replica.proxy());
    get(&fourth, &url);
    expect_share(&hear_all(&fourth));

    let other = connect_from(address(2), replica.proxy());
    get(&other, &url);
    assert!(hear_all(&other).starts_with("HTTP/1.1 200"));
    assert_eq!(origin.timeline("").count(), 1);

    drop(held);
    await_until("there is room again", Duration::from_secs(5), || {
        let again = connect_from(address(1), replica.proxy());
        get(&again, &url);
        hear_all(&again).starts_with("HTTP/1.1 200").then_some(())
    });
    let scrape = replica.scrape();
    let limit = |of: &str| scrape.sum("paceline_limit", &[&format!("of=\"{of}\"")]);
    assert_eq!(limit("connections_per_client"), Some(3.0));
    assert!(limit("connections") > Some(3.0) && limit("queued") > limit("queued_per_client"));
    assert!(scrape.sum("paceline_requests_total", &["outcome=\"share\""]) >= Some(1.0));
}

#[test]
fn a_user_with_its_share_of_tunnels_is_told_so_from_whichever_address() {
    let site = Site::new();
    let recipe = recipe()
        .proxy("max_connections_per_client = 3")
        .proxy(WORKER);
    let replica = Replica::start(&site, "r0", &recipe);
    let connect = |from: Ipv4Addr| {
        let stream = connect_from(from, replica.proxy());
        say(
            &stream,
            &format!("CONNECT {HOST}:443 HTTP/1.1\r\n{CREDENTIALS}\r\n"),
        );
        stream
    };
    let held: Vec<_> = (1..4).map(|n| connect(address(n))).collect();
    for stream in &held {
        let head = Head::read(&mut BufReader::new(stream)).expect("an answer");
        assert_eq!(head.status().ok(), Some(200));
    }
    expect_share(&hear_all(&connect(address(4))));
    drop(held);
    await_until("there is room again", Duration::from_secs(5), || {
        let again = connect(address(4));
        let head = Head::read(&mut BufReader::new(&again)).ok()?;
        (head.status().ok()? == 200).then_some(())
    });
}

#[test]
fn who_guesses_passwords_waits_and_nobody_else_does() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().proxy(WORKER).origin(&origin));
    let url = format!("http://{PLAIN}/b/1");
    let ask = |from: Ipv4Addr, credentials: &str| {
        let stream = connect_from(from, replica.proxy());
        say(
            &stream,
            &format!(
                "GET {url} HTTP/1.1\r\nHost: {PLAIN}\r\n{credentials}Connection: close\r\n\r\n"
            ),
        );
        let answer = hear_all(&stream);
        Head::parse(answer.as_bytes())
    };
    let mut seen = [0, 0];
    for n in 0..200 {
        let guess = STANDARD.encode(format!("worker:guess{n}"));
        let head = ask(
            address(1),
            &format!("Proxy-Authorization: Basic {guess}\r\n"),
        );
        match head.status().ok() {
            Some(407) => seen[0] += 1,
            Some(429) => {
                seen[1] += 1;
                let wait = head
                    .field("retry-after")
                    .and_then(|s| s.parse::<u64>().ok());
                assert!(wait >= Some(1), "{head:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(seen[0] >= 10 && seen[1] > 150, "{seen:?}");
    assert_eq!(ask(address(2), CREDENTIALS).status().ok(), Some(200));
    assert_eq!(origin.timeline("").count(), 1, "a guess reached the origin");
}

/// Takes half a minute, nearly all of it waiting; the three clients wait at once.
#[test]
fn a_client_that_does_not_go_on_is_told_so_and_let_go() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let url = format!("http://{PLAIN}/up?id=stalled");
    let at = |beginning: &str| {
        let stream = connect_from(address(1), replica.proxy());
        say(&stream, beginning);
        let began = Instant::now();
        (hear_all(&stream), began.elapsed())
    };
    thread::scope(|scope| {
        let silent = scope.spawn(|| at(""));
        let head = scope.spawn(|| at(&format!("GET {url} HTTP/1.1\r\nHost: ")));
        let handshake =
            scope.spawn(|| at(&format!("CONNECT {HOST}:443 HTTP/1.1\r\n\r\n\x16\x03\x01")));
        let body = scope.spawn(|| {
            at(&format!(
                "POST {url} HTTP/1.1\r\nHost: {PLAIN}\r\nContent-Length: 10\r\n\r\n12345"
            ))
        });
        let within = |took: Duration, seconds: u64| {
            let limit = Duration::from_secs(seconds);
            assert!(
                took >= limit - Duration::from_millis(50),
                "let go after {took:?}"
            );
            assert!(
                took < limit + Duration::from_secs(4),
                "let go after {took:?}"
            );
        };
        let (answer, took) = silent.join().expect("a client");
        assert_eq!(answer, "", "nothing was asked");
        within(took, 10);
        let (answer, took) = head.join().expect("a client");
        assert!(
            answer.starts_with("HTTP/1.1 408") && answer.contains("proxy-status"),
            "{answer}"
        );
        within(took, 10);
        let (answer, took) = handshake.join().expect("a client");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        within(took, 10);
        let (answer, took) = body.join().expect("a client");
        assert!(
            answer.starts_with("HTTP/1.1 408") && answer.contains("30 s"),
            "{answer}"
        );
        within(took, 30);
    });
    let scrape = replica.scrape();
    assert_eq!(
        scrape.sum("paceline_requests_total", &["outcome=\"body_timeout\""]),
        Some(1.0)
    );
}

/// A replica whose log nobody reads once it listens.
struct Unread {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    proxy: SocketAddr,
    admin: SocketAddr,
}

impl Unread {
    fn start(site: &Site, recipe: &Recipe) -> Unread {
        let config = recipe.write(site, "r0");
        let mut command = paceline(&["run", "--config", &config.to_string_lossy()]);
        command.current_dir(site.path());
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary under test can be run");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut address = |words: &str| loop {
            let mut line = String::new();
            let read = stderr.read_line(&mut line).expect("the log can be read");
            assert!(read > 0, "paceline ended before it listened");
            if let Some((_, address)) = line.trim().split_once(words) {
                return address.parse().expect("an address");
            }
        };
        let proxy = address("proxy listening on ");
        let admin = address("admin listening on ");
        Unread {
            child,
            stderr,
            proxy,
            admin,
        }
    }

    fn dropped(&self) -> f64 {
        let mut admin = Session::open(self.admin, "admin").expect("the admin listener accepts");
        let answer = admin
            .get_with("/metrics", &["Connection: close"])
            .expect("metrics");
        let scrape = Scrape::parse(&answer.text());
        scrape
            .sum("paceline_log_lines_dropped_total", &[])
            .expect("a count")
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_log_that_nobody_reads_holds_up_no_request_and_what_is_lost_is_counted() {
    const REQUESTS: usize = 12_000;
    let site = Site::new();
    let mut replica = Unread::start(&site, &recipe().proxy("ungoverned = \"deny\""));
    let mut session = Session::open(replica.proxy, "denied.test").expect("the proxy accepts");
    let mut slowest = Duration::ZERO;
    for _ in 0..REQUESTS {
        let began = Instant::now();
        assert_eq!(
            session
                .get("http://denied.test/")
                .expect("an answer")
                .status(),
            403
        );
        slowest = slowest.max(began.elapsed());
    }
    assert!(
        slowest < Duration::from_secs(2),
        "one request took {slowest:?}"
    );
    let dropped = replica.dropped();
    assert!(
        dropped > 100.0,
        "only {dropped} lines were dropped: the log was not full"
    );

    // Once it is read again, it says what is missing, once.
    let pipe = replica.child.id();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pipe.cast_signed()).expect("a process"),
        rustix::process::Signal::TERM,
    )
    .expect("it runs");
    let mut log = String::new();
    replica.stderr.read_to_string(&mut log).expect("text");
    assert_eq!(
        log.matches(" lines were dropped").count(),
        1,
        "{} bytes of log",
        log.len()
    );
    let lines = log
        .lines()
        .filter(|line| line.contains("host_denied"))
        .count();
    assert!(
        lines + dropped as usize >= REQUESTS - 10,
        "{lines} lines and {dropped} dropped"
    );
}

#[test]
fn a_line_of_the_log_is_short_and_one_whatever_a_client_sends() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let replica = Replica::start(&site, "r0", &recipe().origin(&origin));
    let method = "M".repeat(4_000);
    let path = "\u{1b}[31m\"%0d%0a'\\".replace('\u{1b}', "%1b").repeat(400);
    let stream = connect_from(address(1), replica.proxy());
    say(
        &stream,
        &format!(
            "{method} http://{PLAIN}/{path}?key=hunter2 HTTP/1.1\r\nHost: {PLAIN}\r\nConnection: close\r\n\r\n"
        ),
    );
    hear_all(&stream);
    let log = await_until("the request is logged", Duration::from_secs(5), || {
        let log = replica.stderr();
        log.contains("MMMM").then_some(log)
    });
    assert!(log.lines().all(|line| line.len() <= 4_096));
    assert!(!log.contains("hunter2") && !log.contains('\u{1b}'));
}

#[test]
fn an_issuer_that_expires_while_it_serves_signs_nothing_more_and_says_why() {
    let (site, origin) = (Site::new(), Origin::plain(&[PLAIN]));
    let recipe = recipe().origin(&origin);
    let expiry = Replica::start(&site, "maker", &recipe)
        .scrape()
        .sum(
            "paceline_ca_expiry_timestamp_seconds",
            &["certificate=\"issuer\""],
        )
        .expect("an issuer");
    let config = recipe.write(&site, "late");
    let mut command = paceline(&["run", "--config", &config.to_string_lossy()]);
    // The system's time alone is moved, to a few seconds before the end; the pace is on another clock.
    let clock = site.write("clock", &format!("@{}", date(expiry - 3.0)));
    command
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME_TIMESTAMP_FILE", clock)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("TZ", "UTC");
    let replica = Replica::spawn(&site, "late", command);
    let connect = |name: &str| {
        replica
            .session(name)
            .connect(&format!("{name}:443"))
            .expect("an answer")
    };
    assert_eq!(connect(HOST).status(), 200, "it is still valid");
    let refused = await_until("the issuer ends", Duration::from_secs(15), || {
        let answer = connect(HOST);
        (answer.status() != 200).then_some(answer)
    });
    assert_eq!(refused.status(), 503, "{:?}", refused.head);
    assert!(
        refused.head.start_line.contains("issuer has expired"),
        "{:?}",
        refused.head
    );
    assert_eq!(
        refused.field("proxy-status"),
        Some("paceline; error=proxy_configuration_error")
    );
    assert!(refused.field("retry-after").is_some());
    // What needs no leaf goes on.
    let plain = replica
        .session(PLAIN)
        .get(&format!("http://{PLAIN}/b/1"))
        .expect("an answer");
    assert_eq!(plain.status(), 200);
}

/// As libfaketime wants it: `2028-11-29 02:15:09`.
fn date(seconds: f64) -> String {
    let at = std::time::UNIX_EPOCH + Duration::from_secs_f64(seconds);
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.trim_end_matches('Z').replace('T', " ")
}

#[test]
fn the_process_leaves_no_core_file_and_keys_are_not_in_its_environment() {
    let site = Site::new();
    let replica = Replica::start(&site, "r0", &recipe());
    let proc = PathBuf::from(format!("/proc/{}", replica.id()));
    let limits = fs::read_to_string(proc.join("limits")).expect("limits");
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    let core: Vec<_> = core
        .expect("a limit of core files")
        .split_whitespace()
        .collect();
    assert_eq!(core[4..6], ["0", "0"], "{core:?}");
    for file in ["environ", "cmdline"] {
        let bytes = fs::read(proc.join(file)).expect("readable to root");
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains("PRIVATE KEY"), "{file}");
    }
}

#[test]
fn an_admin_listener_that_others_reach_without_a_token_is_told_of_and_takes_no_change() {
    let site = Site::new();
    let config = recipe().write(&site, "r0");
    let text = fs::read_to_string(&config).expect("our own file");
    let open = text.replace(
        "[admin]\nlisten = \"127.0.0.1:0\"",
        "[admin]\nlisten = \"0.0.0.0:0\"",
    );
    assert_ne!(text, open);
    let config = site.write("open.toml", &open);
    let command = paceline(&["run", "--config", &config.to_string_lossy()]);
    let replica = Replica::spawn(&site, "open", command);
    let log = replica.stderr();
    assert!(
        log.contains("WARN") && log.contains("whoever reaches 0.0.0.0:0 can read metrics"),
        "{log}"
    );
}
