//! What a destination's settings change, and which requests are paced at all: every request form, and no tunnel that
//! nobody governs.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use crate::bed::{
    certs::client_tls,
    client::Browser,
    origin::Origin,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";

/// `count` requests at the same moment, each on a tunnel of its own, with ids `PREFIX0`, `PREFIX1`, ...
fn all_at_once(browser: &Browser, prefix: &str, count: usize, query: &str) {
    thread::scope(|scope| {
        for n in 0..count {
            scope.spawn(move || {
                let answer = browser.get(&format!("/b/1?id={prefix}{n}{query}")).unwrap();
                assert_eq!(answer.status(), 200, "{}", answer.text());
            });
        }
    });
}

#[test]
fn with_scope_host_each_host_has_the_ceiling_to_itself() {
    let names = ["a.googleusercontent.com", "b.googleusercontent.com"];
    let (origin, site) = (Origin::tls(&names), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "10.0")
        .key("scope = \"host\"")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let (a, b) = (
        replica.browser(&site, names[0]),
        replica.browser(&site, names[1]),
    );
    thread::scope(|scope| {
        scope.spawn(|| all_at_once(&a, "a", 16, ""));
        scope.spawn(|| all_at_once(&b, "b", 16, ""));
    });
    for prefix in ["a", "b"] {
        let timeline = origin.timeline(prefix);
        assert!(
            (9.5..=10.2).contains(&timeline.rate()),
            "{prefix}: {:.3}/s",
            timeline.rate()
        );
    }
    assert!(
        origin.timeline("").rate() > 15.0,
        "one cursor for both hosts"
    );
}

#[test]
fn no_more_than_max_in_flight_are_at_the_origin_at_once() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "100.0")
        .key("max_in_flight = 2")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    all_at_once(&replica.browser(&site, HOST), "f", 8, "&delay_ms=200");
    let mut arrivals: Vec<Instant> = origin.arrivals().iter().map(|arrival| arrival.at).collect();
    arrivals.sort();
    assert_eq!(arrivals.len(), 8);
    // Each third one had to wait until one of the two before it was answered.
    for three in arrivals.windows(3) {
        assert!(
            three[2] - three[0] >= Duration::from_millis(199),
            "three in flight: {:?}",
            three[2] - three[0]
        );
    }
}

#[test]
fn a_dry_run_forwards_at_once_and_records_the_waits_that_would_have_been() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "1.0")
        .key("dry_run = true")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    all_at_once(&replica.browser(&site, HOST), "d", 10, "");
    assert!(
        origin.timeline("d").span() < Duration::from_secs(2),
        "paced: {:?}",
        origin.timeline("d").span()
    );
    let scrape = replica.scrape();
    assert_eq!(
        scrape.sum("paceline_dispatches_total", &["mode=\"dry_run\""]),
        Some(10.0)
    );
    // 0 + 1 + ... + 9 s, less the time that the requests took to come.
    let waits = scrape.sum("paceline_wait_seconds_sum", &[]).unwrap_or(0.0);
    assert!((30.0..=46.0).contains(&waits), "waits of {waits} s in all");
}

#[test]
fn every_request_form_is_paced_on_the_one_cursor() {
    let (tls, plain, site) = (Origin::tls(&[HOST]), Origin::plain(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "10.0")
        .origin(&tls)
        .origin(&plain);
    let replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    let began = Instant::now();
    for n in 0..3 {
        // Inside an intercepted tunnel; absolute-form of both schemes; clear text inside a tunnel, as undici does it.
        assert_eq!(
            browser.get(&format!("/b/1?id=inside{n}")).unwrap().status(),
            200
        );
        let mut session = replica.session(HOST);
        assert_eq!(
            session
                .get(&format!("http://{HOST}/b/1?id=http{n}"))
                .unwrap()
                .status(),
            200
        );
        assert_eq!(
            session
                .get(&format!("https://{HOST}/b/1?id=https{n}"))
                .unwrap()
                .status(),
            200
        );
        let mut clear = replica.session(HOST);
        assert_eq!(clear.connect(&format!("{HOST}:80")).unwrap().status(), 200);
        assert_eq!(
            clear.get(&format!("/b/1?id=clear{n}")).unwrap().status(),
            200
        );
    }
    assert!(
        began.elapsed() >= Duration::from_millis(1_075),
        "twelve requests at 10/s took {:?}",
        began.elapsed()
    );
    assert_eq!(
        (tls.timeline("").count(), plain.timeline("").count()),
        (6, 6)
    );
    assert_eq!(
        replica
            .scrape()
            .sum("paceline_dispatches_total", &["mode=\"embedded\""]),
        Some(12.0)
    );
    let target = &plain.arrivals()[0].target;
    assert!(
        target.starts_with("/b/1"),
        "the origin was sent {target}, not the origin-form (RFC 9112 section 3.2.1)"
    );
}

#[test]
fn an_ungoverned_host_is_tunnelled_untouched_and_unpaced() {
    let (origin, site) = (Origin::tls(&["elsewhere.test"]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "1.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let own_root = client_tls(origin.root().expect("a TLS origin").as_bytes());
    let browser = Browser::new(replica.proxy(), "elsewhere.test", own_root);
    // TLS ends at the origin, whose root our replica's CA is not.
    all_at_once(&browser, "e", 10, "");
    assert!(origin.timeline("e").span() < Duration::from_secs(2));
}

#[test]
fn a_tunnel_carries_a_half_close() {
    let (site, listener) = (Site::new(), TcpListener::bind("127.0.0.1:0").unwrap());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "1.0")
        .resolve("elsewhere.test:443", listener.local_addr().unwrap());
    let replica = Replica::start(&site, "r0", &recipe);
    let answering = thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        peer.write_all(&all).unwrap();
    });
    let mut client = TcpStream::connect(replica.proxy()).unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    client
        .write_all(b"CONNECT elsewhere.test:443 HTTP/1.1\r\nHost: elsewhere.test:443\r\n\r\n")
        .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    client.write_all(b"a question without a length").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut echoed = Vec::new();
    client.read_to_end(&mut echoed).unwrap();
    assert_eq!(echoed, b"a question without a length");
    answering.join().unwrap();
}
