//! What is claimed of every client, each claim once.

use std::{
    fs,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use sha2::{Digest, Sha256};

use super::scene::{CLEAR, DOWN, HINTS, HOST, MINUTE, Program, SLOW, Scene, Told, UNTRUSTED};
use crate::bed::{
    await_until::await_until,
    pattern::{hex, pattern_digest},
    scripted::say,
};

/// A program that has lost must have given up by now.
const GIVES_UP: Duration = Duration::from_secs(5);
/// More connections than this for one fetch are a storm.
const STORM: usize = 10;

fn url(host: &str, path: &str) -> String {
    format!("https://{host}{path}")
}

/// The answers must be these statuses, with these bodies where the program tells of them.
fn expect(told: &[Told], expected: &[(u16, String)]) {
    let statuses: Vec<u16> = told.iter().map(|one| one.status).collect();
    let wanted: Vec<u16> = expected.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, wanted, "{told:?}");
    for (one, (_, digest)) in told.iter().zip(expected) {
        if let Some(told) = &one.digest {
            assert_eq!(told, digest, "another body than was sent");
        }
    }
}

/// Three GETs are three slots, whatever the number of tunnels; by https and, in absolute form or through a tunnel as the
/// program likes, by http.
pub fn paces_each_request(program: &Program) {
    let scene = Scene::new();
    let urls: Vec<String> = (0..3)
        .map(|n| url(HOST, &format!("/b/{}?id=paced{n}", 1000 + n)))
        .collect();
    let mut arguments = vec!["get"];
    arguments.extend(urls.iter().map(String::as_str));
    let told = scene.run(program, &arguments);
    expect(
        &told,
        &[1000, 1001, 1002].map(|length| (200, pattern_digest(length))),
    );
    let timeline = scene.origin.timeline("paced");
    assert!(timeline.count() >= 3);
    let gap = timeline.gap(0.0).expect("three arrivals");
    // A slot may be used a quarter of an interval late, and a busy machine notes an arrival late.
    assert!(gap >= Duration::from_millis(25), "{gap:?} at 20/s");
    assert!(
        timeline.span() >= Duration::from_millis(75),
        "three in {:?} at 20/s",
        timeline.span()
    );
    let tunnels = scene.link.accepted();
    if program.keeps_its_tunnel {
        assert_eq!(tunnels, 1, "three fetches by one session");
    }
    let told = scene.run(program, &["get", &format!("http://{CLEAR}/b/77?id=clear")]);
    expect(&told, &[(200, pattern_digest(77))]);
}

/// A small and a large upload arrive whole.
pub fn uploads_whole(program: &Program) {
    let scene = Scene::new();
    for length in [100, 2_000_000] {
        let told = scene.run(
            program,
            &["post", &url(HOST, "/up?id=up"), &length.to_string()],
        );
        let summary = format!("{length} {}", pattern_digest(length));
        expect(&told, &[(200, hex(&Sha256::digest(summary)))]);
        assert!(
            told[0].digest.is_some(),
            "a single answer has its digest told"
        );
    }
    assert_eq!(scene.origin.timeline("up").count(), 2);
}

/// A wait of four seconds is inside every time-out that a client has by itself.
pub fn waits_four_seconds(program: &Program) {
    let scene = Scene::new();
    let (first, second) = (url(SLOW, "/b/5?id=wait0"), url(SLOW, "/b/6?id=wait1"));
    let began = Instant::now();
    let told = scene.run(program, &["get", &first, &second]);
    expect(&told, &[5, 6].map(|length| (200, pattern_digest(length))));
    assert!(
        began.elapsed() >= Duration::from_millis(3_900),
        "{:?}",
        began.elapsed()
    );
}

/// A refusal of the proxy's reaches the application as an answer; so do the answers after a 103.
pub fn sees_refusals_and_not_hints(program: &Program) {
    let scene = Scene::new();
    let browser = scene.replica.browser(&scene.site, MINUTE);
    assert_eq!(browser.get("/b/1?id=first").unwrap().status(), 200);
    let told = scene.run(program, &["get", &url(MINUTE, "/b/1?id=refused")]);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].status, 503);
    if program.shows_fields {
        let seconds = told[0].retry_after.expect("Retry-After");
        assert!((30..=60).contains(&seconds), "{seconds} of a minute");
    }
    assert_eq!(scene.origin.timeline("refused").count(), 0);

    const HINT: &str = "HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: ";
    let suffix = if program.shows_fields {
        ""
    } else {
        "/info/refs?service=git-upload-pack"
    };
    for (path, body) in [("/one", "first"), ("/two", "second!")] {
        let body = if program.shows_fields { body } else { "" };
        let said = say(format!("{HINT}{}\r\n\r\n{body}", body.len()));
        scene.hints.script(&format!("{path}{suffix}"), vec![said]);
    }
    let told = scene.run(program, &["get", &url(HINTS, "/one"), &url(HINTS, "/two")]);
    expect(
        &told,
        &["first", "second!"].map(|body| (200, hex(&Sha256::digest(body)))),
    );
}

/// A program that is killed while its request queues takes no slot, and the origin never hears of it.
pub fn killed_in_the_queue_is_never_sent(program: &Program) {
    let scene = Scene::new();
    let browser = scene.replica.browser(&scene.site, SLOW);
    let depth = || scene.replica.scrape().sum("paceline_queue_depth", &[]);
    assert_eq!(browser.get("/b/1?id=before").unwrap().status(), 200);
    let mut client = scene.start(program, &["get", &url(SLOW, "/b/1?id=killed")]);
    await_until("its request queues", Duration::from_secs(3), || {
        (depth()? == 1.0).then_some(())
    });
    client.kill_group();
    await_until("the queue is empty", Duration::from_secs(1), || {
        (depth()? == 0.0).then_some(())
    });
    assert_eq!(browser.get("/b/1?id=after").unwrap().status(), 200);
    assert_eq!(scene.origin.timeline("killed").count(), 0);
    let span = scene.origin.timeline("").span();
    assert!(
        span < Duration::from_millis(4_500),
        "the slot went to nobody: {span:?}"
    );
}

/// Without the CA a program gets nothing, takes no slot, and says why.
pub fn is_rejected_without_the_ca(program: &Program) {
    let scene = Scene::new();
    let mut client = scene.start_without_trust(program, &["get", &url(HOST, "/b/1?id=distrust")]);
    let end = client.await_end(Duration::from_secs(20));
    assert!(!end.success(), "{}", client.stdout());
    let said = client.stderr().to_lowercase();
    assert!(
        said.contains("certificate") || said.contains("issuer"),
        "{said}"
    );
    assert_eq!(scene.origin.timeline("").count(), 0);
    assert!(
        scene.link.accepted() < STORM,
        "{} connections",
        scene.link.accepted()
    );
}

/// Whatever fails, one fetch makes few connections. The proxy's listener is closed while it drains and when it is down;
/// who is refused there is counted by the kernel.
pub fn does_not_storm(program: &Program) {
    let mut scene = Scene::new();
    let browser = scene.replica.browser(&scene.site, MINUTE);
    assert_eq!(browser.get("/b/1?id=first").unwrap().status(), 200);
    let mut faults = Vec::new();
    for (failure, host) in [
        ("refused CONNECT", "ungoverned.test"),
        ("origin down", DOWN),
        ("no room in the queue", MINUTE),
        ("TLS failure upstream", UNTRUSTED),
    ] {
        let before = scene.link.accepted();
        let mut client = scene.start(program, &["get", &url(host, "/b/1")]);
        let ended = ends(&mut client);
        client.kill_group();
        let connections = scene.link.accepted() - before;
        if connections >= STORM || !ended {
            faults.push(format!(
                "{failure}: {connections} connections, gave up: {ended}"
            ));
        }
    }
    let mut flight = scene.replica.browser(&scene.site, HOST).tunnel().unwrap();
    flight
        .ask("GET", "/b/1?id=flight&delay_ms=60000", &[])
        .unwrap();
    await_until("one is in flight", Duration::from_secs(5), || {
        (scene.origin.timeline("flight").count() == 1).then_some(())
    });
    scene.replica.signal(Signal::TERM);
    await_until("nothing new is taken", Duration::from_secs(5), || {
        std::net::TcpStream::connect(scene.replica.proxy())
            .is_err()
            .then_some(())
    });
    faults.extend(refused_storm(&scene, program, "draining"));
    scene.replica.signal(Signal::KILL);
    scene.replica.await_end(Duration::from_secs(5));
    faults.extend(refused_storm(&scene, program, "paceline down"));
    assert!(faults.is_empty(), "{faults:#?}");
}

fn ends(client: &mut crate::bed::process::Process) -> bool {
    let give_up = Instant::now() + GIVES_UP;
    while Instant::now() < give_up {
        if client.ended().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// A fetch while nobody listens. The kernel counts for the whole machine, so that a neighbour may spoil one try.
fn refused_storm(scene: &Scene, program: &Program, failure: &str) -> Option<String> {
    let mut worst = String::new();
    for _ in 0..3 {
        let before = refused_connects();
        let mut client = scene.start_at_the_replica(program, &["get", &url(HOST, "/b/1")]);
        let ended = ends(&mut client);
        client.kill_group();
        let connections = refused_connects() - before;
        if connections < STORM as u64 && ended {
            return None;
        }
        worst = format!("{failure}: {connections} connections, gave up: {ended}");
    }
    Some(worst)
}

/// Connections that were refused to anybody on this machine so far (`AttemptFails` of RFC 4022).
fn refused_connects() -> u64 {
    let text = fs::read_to_string("/proc/net/snmp").expect("/proc/net/snmp");
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    names
        .split(' ')
        .zip(values.split(' '))
        .find(|(name, _)| *name == "AttemptFails")
        .and_then(|(_, value)| value.parse().ok())
        .expect("AttemptFails")
}
