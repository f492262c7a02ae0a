//! SIGTERM: what is queued and in flight finishes, nothing new is taken, and the process ends with 0.

use std::{net::TcpStream, thread, time::Duration};

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    origin::Origin,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";

#[test]
fn a_stopped_replica_finishes_its_queue_and_its_flights_and_ends_with_zero() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "10.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    let patience = Duration::from_secs(5);

    // Tunnels with nothing on them must not hold the drain up.
    let _idle_after_one = {
        let mut tunnel = browser.tunnel().unwrap();
        tunnel.get("/b/1?id=warm").unwrap();
        tunnel
    };
    let _idle_from_the_start = browser.tunnel().unwrap();

    thread::scope(|scope| {
        let in_flight = scope.spawn(|| {
            browser
                .get("/b/1?id=flight&delay_ms=1500")
                .unwrap()
                .status()
        });
        await_until("one is in flight", patience, || {
            (origin.timeline("flight").count() == 1).then_some(())
        });
        let mut queued: Vec<_> = (0..20).map(|_| browser.tunnel().unwrap()).collect();
        for (n, tunnel) in queued.iter_mut().enumerate() {
            tunnel
                .ask("GET", &format!("/b/1?id=queued{n}"), &[])
                .unwrap();
        }
        await_until("all are queued or served", patience, || {
            let depth = replica.scrape().sum("paceline_queue_depth", &[])? as usize;
            (depth + origin.timeline("queued").count() >= 20).then_some(())
        });

        replica.signal(Signal::TERM);
        await_until("/readyz says no", patience, || {
            (replica.readiness().ok()? == 503).then_some(())
        });
        await_until("nothing new is taken", patience, || {
            TcpStream::connect(replica.proxy()).is_err().then_some(())
        });
        assert!(
            origin.timeline("queued").count() < 20,
            "the drain was over before it was looked at"
        );

        assert_eq!(in_flight.join().unwrap(), 200);
        let statuses: Vec<u16> = queued
            .iter_mut()
            .map(|tunnel| tunnel.answer().unwrap().status())
            .collect();
        assert_eq!(statuses, vec![200; 20]);
    });
    let end = replica.await_end(Duration::from_secs(10));
    assert_eq!(end.code(), Some(0), "{end}");
    assert!(
        origin.timeline("").busiest_second() <= 11,
        "a drain is no reason to hurry"
    );
}

#[test]
fn a_request_that_was_on_its_way_when_the_drain_began_is_answered_and_told_that_it_is_the_last() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "100.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    let patience = Duration::from_secs(5);
    let fresh = TcpStream::connect(replica.proxy()).unwrap();
    let mut sessions = [browser.tunnel().unwrap(), browser.tunnel().unwrap()];
    assert_eq!(sessions[1].get("/b/1?id=before").unwrap().status(), 200);
    replica.signal(Signal::TERM);
    await_until("/readyz says no", patience, || {
        (replica.readiness().ok()? == 503).then_some(())
    });
    for session in &mut sessions {
        let answer = session.get("/b/1?id=late").unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.field("connection"), Some("close"));
    }
    // One on which nothing was ever said holds nothing up.
    assert_eq!(replica.await_end(patience).code(), Some(0));
    drop(fresh);
}

#[test]
fn an_idle_replica_ends_at_once_on_sigterm_and_on_sigint() {
    for signal in [Signal::TERM, Signal::INT] {
        let site = Site::new();
        let recipe =
            Recipe::new().destination("google_image", &["*.googleusercontent.com"], "10.0");
        let mut replica = Replica::start(&site, "r0", &recipe);
        replica.signal(signal);
        assert_eq!(replica.await_end(Duration::from_secs(5)).code(), Some(0));
    }
}

#[test]
fn a_drain_ends_at_its_limit_when_a_flight_does_not() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .proxy("drain = \"1s\"")
        .destination("google_image", &["*.googleusercontent.com"], "10.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &recipe);
    let mut tunnel = replica.browser(&site, HOST).tunnel().unwrap();
    tunnel
        .ask("GET", "/b/1?id=endless&delay_ms=60000", &[])
        .unwrap();
    let patience = Duration::from_secs(5);
    await_until("one is in flight", patience, || {
        (origin.timeline("endless").count() == 1).then_some(())
    });
    replica.signal(Signal::TERM);
    replica.await_end(patience);
}

#[test]
fn what_still_waits_when_the_time_to_drain_is_up_is_refused_and_not_dropped() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .proxy("drain = \"1s\"")
        .destination("google_image", &["*.googleusercontent.com"], "2.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    let patience = Duration::from_secs(5);
    let mut queued: Vec<_> = (0..12).map(|_| browser.tunnel().unwrap()).collect();
    for (n, tunnel) in queued.iter_mut().enumerate() {
        tunnel
            .ask("GET", &format!("/b/1?id=queued{n}"), &[])
            .unwrap();
    }
    await_until("they are queued", patience, || {
        (replica.scrape().sum("paceline_queue_depth", &[])? >= 9.0).then_some(())
    });
    replica.signal(Signal::TERM);
    let answers: Vec<_> = queued
        .iter_mut()
        .map(|tunnel| tunnel.answer().unwrap())
        .collect();
    let refused: Vec<_> = answers.iter().filter(|a| a.status() == 503).collect();
    assert!(refused.len() >= 6, "only {} were refused", refused.len());
    for answer in &refused {
        assert!(answer.field("retry-after").is_some());
        assert!(answer.field("proxy-status").is_some());
    }
    let served = answers.iter().filter(|a| a.status() == 200).count();
    assert_eq!(served + refused.len(), 12);
    assert_eq!(origin.timeline("queued").count(), served);
    assert_eq!(
        replica.await_end(Duration::from_secs(10)).code(),
        Some(0),
        "a drain that had to refuse is still an orderly end"
    );
}
