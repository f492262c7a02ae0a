//! The queue as clients meet it: those who leave cost nothing, waits that cannot end in time are refused at once, and
//! a replica that slept does not make up for it.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    client::{Answer, Browser},
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";

/// One replica at 10/s on a store of its own, with extra lines for `[proxy]`.
struct Scene {
    replica: Replica,
    origin: Origin,
    site: Site,
    _postgres: Postgres,
}

impl Scene {
    fn new(proxy: &str) -> Scene {
        let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
        let recipe = Recipe::new()
            .proxy(proxy)
            .store(&postgres.url())
            .destination("google_image", &["*.googleusercontent.com"], "10.0")
            .origin(&origin);
        Scene {
            replica: Replica::start(&site, "r0", &recipe),
            origin,
            site,
            _postgres: postgres,
        }
    }

    fn browser(&self) -> Browser {
        self.replica.browser(&self.site, HOST)
    }

    fn await_queue(&self, depth: usize) {
        await_until(
            &format!("{depth} requests queue"),
            Duration::from_secs(10),
            || {
                let waiting = self
                    .replica
                    .scrape()
                    .sum("paceline_queue_depth", &[])
                    .unwrap_or(0.0);
                (waiting >= depth as f64).then_some(())
            },
        );
    }
}

/// `count` requests sent at the same moment, each on a tunnel that stood ready; answers with the time each took.
fn all_at_once(browser: &Browser, prefix: &str, count: usize) -> Vec<(Answer, Duration)> {
    thread::scope(|scope| {
        let opened: Vec<_> = (0..count)
            .map(|_| scope.spawn(|| browser.tunnel().unwrap()))
            .collect();
        let tunnels: Vec<_> = opened
            .into_iter()
            .map(|opened| opened.join().unwrap())
            .collect();
        let asked: Vec<_> = tunnels
            .into_iter()
            .enumerate()
            .map(|(n, mut tunnel)| {
                scope.spawn(move || {
                    let sent = Instant::now();
                    (
                        tunnel.get(&format!("/b/1?id={prefix}{n}")).unwrap(),
                        sent.elapsed(),
                    )
                })
            })
            .collect();
        asked
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect()
    })
}

#[test]
fn clients_that_leave_cost_those_that_stay_nothing() {
    let scene = Scene::new("");
    let browser = scene.browser();
    let done = AtomicBool::new(false);
    let left = thread::scope(|scope| {
        let stayers: Vec<_> = (0..6)
            .map(|n| {
                let browser = &browser;
                scope.spawn(move || {
                    let mut tunnel = browser.tunnel().unwrap();
                    for m in 0..14 {
                        assert_eq!(
                            tunnel
                                .get(&format!("/b/1?id=stayer{n}-{m}"))
                                .unwrap()
                                .status(),
                            200
                        );
                    }
                })
            })
            .collect();
        // The stayers queue first: behind six of them, at 10/s, nobody is served within 0.4 s.
        scene.await_queue(5);
        let leavers: Vec<_> = (0..25)
            .map(|n| {
                let (browser, done) = (&browser, &done);
                scope.spawn(move || {
                    let mut left = 0;
                    while !done.load(Ordering::Relaxed) {
                        let mut tunnel = browser.tunnel().unwrap();
                        tunnel
                            .ask("GET", &format!("/b/1?id=leaver{n}-{left}"), &[])
                            .unwrap();
                        // The client's patience, not a wait for a state.
                        thread::sleep(Duration::from_millis(400));
                        left += 1;
                    }
                    left
                })
            })
            .collect();
        let clean = stayers
            .into_iter()
            .map(|stayer| stayer.join().is_ok())
            .fold(true, |all, one| all & one);
        done.store(true, Ordering::Relaxed);
        let left: usize = leavers
            .into_iter()
            .map(|leaver| leaver.join().unwrap())
            .sum();
        assert!(clean, "a stayer failed");
        left
    });
    assert!(left > 200, "only {left} requests were given up");
    await_until(
        "nobody is left in the queue",
        Duration::from_secs(5),
        || (scene.replica.scrape().sum("paceline_queue_depth", &[])? == 0.0).then_some(()),
    );
    let stayers = scene.origin.timeline("stayer");
    assert_eq!(stayers.count(), 84);
    assert!(
        (9.8..=10.05).contains(&stayers.rate()),
        "the stayers got {:.3}/s of 10/s",
        stayers.rate()
    );
    assert!(scene.origin.timeline("").busiest_second() <= 11);
}

#[test]
fn what_cannot_be_served_in_time_is_refused_at_once_with_a_true_retry_after() {
    let scene = Scene::new("max_wait = \"4s\"");
    let browser = scene.browser();
    let answers = all_at_once(&browser, "many", 80);
    let (served, refused): (Vec<_>, Vec<_>) = answers
        .iter()
        .partition(|(answer, _)| answer.status() == 200);
    assert!(
        (38..=42).contains(&served.len()),
        "{} of 80 were served",
        served.len()
    );
    assert!(
        served
            .iter()
            .all(|(_, took)| *took < Duration::from_millis(4_200)),
        "served after the deadline"
    );
    for (answer, took) in &refused {
        assert_eq!(answer.status(), 503, "{}", answer.text());
        assert!(*took < Duration::from_secs(1), "refused after {took:?}");
        let proxy_status = answer.field("proxy-status").unwrap_or_default();
        assert!(
            proxy_status.starts_with("paceline")
                && proxy_status.contains("error=connection_limit_reached")
        );
        retry_after(answer);
    }
    assert!(scene.origin.timeline("many").busiest_second() <= 11);
}

#[test]
fn retry_after_names_a_time_at_which_a_request_is_served() {
    let scene = Scene::new("max_wait = \"2s\"");
    let browser = scene.browser();
    let (answered, answers) = mpsc::channel();
    thread::scope(|scope| {
        for n in 0..40 {
            let (mut tunnel, answered) = (browser.tunnel().unwrap(), answered.clone());
            scope.spawn(move || {
                let answer = tunnel.get(&format!("/b/1?id=full{n}")).unwrap();
                // Nobody listens once a refusal has been found.
                let _ = answered.send((answer, tunnel));
            });
        }
        let refusal = answers
            .iter()
            .take(40)
            .find(|(answer, _)| answer.status() == 503);
        let (refused, mut tunnel) = refusal.expect("forty at 10/s do not fit in 2 s");
        thread::sleep(Duration::from_secs(retry_after(&refused)));
        let again = tunnel.get("/b/1?id=again").unwrap();
        assert_eq!(
            again.status(),
            200,
            "came back after Retry-After, and was refused again: {}",
            again.text()
        );
    });
}

#[test]
fn a_client_may_ask_for_a_shorter_wait_but_not_for_a_longer_one() {
    let scene = Scene::new("max_wait = \"4s\"");
    let browser = scene.browser();
    thread::scope(|scope| {
        let queued = scope.spawn(|| all_at_once(&browser, "queued", 30));
        scene.await_queue(20);
        let sent = Instant::now();
        let hasty = browser
            .tunnel()
            .unwrap()
            .get_with("/b/1?id=hasty", &["Paceline-Max-Wait: 1s"])
            .unwrap();
        assert_eq!(
            hasty.status(),
            503,
            "a wait of about 3 s was said to be no more than 1 s"
        );
        assert!(
            sent.elapsed() < Duration::from_millis(700),
            "refused after {:?}",
            sent.elapsed()
        );
        let patient = browser
            .tunnel()
            .unwrap()
            .get_with("/b/1?id=patient", &["Paceline-Max-Wait: 600s"])
            .unwrap();
        assert_eq!(patient.status(), 200);
        assert!(
            queued
                .join()
                .unwrap()
                .iter()
                .all(|(answer, _)| answer.status() == 200)
        );
    });
    let arrivals = scene.origin.arrivals();
    assert!(
        arrivals
            .iter()
            .all(|arrival| arrival.id.as_deref() != Some("hasty")),
        "a refused request was sent"
    );
    assert!(
        arrivals
            .iter()
            .all(|arrival| arrival.field("paceline-max-wait").is_none()),
        "a field for the proxy reached the origin"
    );
    let longer = all_at_once(&browser, "longer", 60);
    assert!(
        longer.iter().any(|(answer, _)| answer.status() == 503),
        "60 at 10/s do not fit in 4 s"
    );
}

#[test]
fn a_replica_that_was_suspended_does_not_make_up_for_the_slots_it_missed() {
    let mut scene = Scene::new("");
    let browser = scene.browser();
    let woken = thread::scope(|scope| {
        let all = scope.spawn(|| all_at_once(&browser, "held", 60));
        scene.await_queue(50);
        scene.replica.signal(Signal::STOP);
        thread::sleep(Duration::from_secs(5));
        let woken = scene.origin.elapsed();
        scene.replica.signal(Signal::CONT);
        let answers = all.join().unwrap();
        assert!(
            answers.iter().all(|(answer, _)| answer.status() == 200),
            "a queued request was lost in the pause"
        );
        woken
    });
    let after = scene.origin.timeline("held").since(woken);
    assert!(
        after.count() >= 40,
        "only {} were left to send",
        after.count()
    );
    assert!(
        after.busiest_second() <= 11,
        "{} in a second after the pause",
        after.busiest_second()
    );
    assert!(
        after.rate() <= 10.15,
        "{:.3}/s after the pause",
        after.rate()
    );
    assert!(scene.origin.timeline("held").busiest_second() <= 11);
}

/// The whole seconds of `Retry-After`.
fn retry_after(answer: &Answer) -> u64 {
    let value = answer
        .field("retry-after")
        .expect("a refusal says when to come back");
    let seconds = value
        .parse()
        .unwrap_or_else(|_| panic!("Retry-After: {value} is no number of seconds"));
    assert!(
        (1..=5).contains(&seconds),
        "Retry-After: {seconds} for a queue of a few seconds"
    );
    seconds
}
