//! Connections to the origin: made before their slot, kept for the next request, no more than the pace needs, and never
//! in the way of others.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::bed::{
    await_until::await_until,
    client::Session,
    free_address,
    link::{Fault, Link},
    origin::{Manner, Origin},
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const OTHER: &str = "lh4.googleusercontent.com";

fn recipe(rate: &str) -> Recipe {
    Recipe::new().destination("google_image", &["*.googleusercontent.com"], rate)
}

#[test]
fn requests_of_many_clients_share_few_kept_connections() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe("200.0").origin(&origin));
    let browser = replica.browser(&site, HOST);
    for n in 0..20 {
        assert_eq!(browser.get(&format!("/b/1?id=p{n}")).unwrap().status(), 200);
    }
    assert!(
        origin.connections() <= 3,
        "{} connections for 20 requests in a row",
        origin.connections()
    );
}

#[test]
fn a_long_queue_opens_few_connections() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe("10.0").origin(&origin));
    let browser = replica.browser(&site, HOST);
    let mut tunnels: Vec<Session> = (0..60).map(|_| browser.tunnel().unwrap()).collect();
    for (n, tunnel) in tunnels.iter_mut().enumerate() {
        tunnel.ask("GET", &format!("/b/1?id=q{n}"), &[]).unwrap();
    }
    await_until("ten have been served", Duration::from_secs(10), || {
        (origin.timeline("q").count() >= 10).then_some(())
    });
    assert!(
        origin.connections() <= 12,
        "{} connections for a queue of 60",
        origin.connections()
    );
}

#[test]
fn a_connection_that_fails_spends_no_slot() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = recipe("1.0")
        .origin(&origin)
        .resolve(&format!("{OTHER}:443"), free_address());
    let replica = Replica::start(&site, "r0", &recipe);
    let (good, dead) = (replica.browser(&site, HOST), replica.browser(&site, OTHER));
    let began = Instant::now();
    assert_eq!(good.get("/b/1?id=g0").unwrap().status(), 200);
    for n in 0..5 {
        assert_eq!(dead.get(&format!("/b/1?id=d{n}")).unwrap().status(), 502);
    }
    assert_eq!(good.get("/b/1?id=g1").unwrap().status(), 200);
    assert!(
        began.elapsed() < Duration::from_millis(1_900),
        "five failures took slots: {:?}",
        began.elapsed()
    );
    assert!(
        origin.timeline("g").span() >= Duration::from_millis(970),
        "the pace itself is kept"
    );
}

#[test]
fn a_slow_dial_lets_the_next_pass_and_keeps_its_place() {
    let (origin, slow, site) = (Origin::tls(&[HOST]), Origin::tls(&[OTHER]), Site::new());
    let link = Link::to(slow.address());
    link.set(Fault::Stall);
    let recipe = recipe("10.0")
        .origin(&origin)
        .origin_at(&slow, link.address());
    let replica = Replica::start(&site, "r0", &recipe);
    let (good, stalled) = (replica.browser(&site, HOST), replica.browser(&site, OTHER));
    thread::scope(|scope| {
        let mut first = stalled.tunnel().unwrap();
        first.ask("GET", "/b/1?id=slow", &[]).unwrap();
        await_until("it is being dialled", Duration::from_secs(5), || {
            (slow.connections() > 0).then_some(())
        });
        let began = Instant::now();
        let others: Vec<_> = (0..8)
            .map(|n| {
                scope.spawn({
                    let good = &good;
                    move || good.get(&format!("/b/1?id=g{n}")).unwrap().status()
                })
            })
            .collect();
        assert!(others.into_iter().all(|other| other.join().unwrap() == 200));
        assert!(
            began.elapsed() < Duration::from_secs(3),
            "eight at 10/s took {:?}",
            began.elapsed()
        );
        link.set(Fault::Pass);
        assert_eq!(first.answer().unwrap().status(), 200);
    });
    assert_eq!(slow.timeline("slow").count(), 1);
}

/// Eighty requests for a host that accepts and never says a word stand before all others.
#[test]
fn a_host_that_never_answers_leaves_the_pace_to_the_others() {
    let (origin, hung, site) = (Origin::tls(&[HOST]), Origin::tls(&[OTHER]), Site::new());
    hung.behave(Manner::Silent);
    let recipe = recipe("20.0").origin(&origin).origin(&hung);
    let replica = Replica::start(&site, "r0", &recipe);
    let ask = |host: &str, id: &str, count: usize| -> Vec<Session> {
        let browser = replica.browser(&site, host);
        let tunnels = (0..count).map(|n| {
            let mut tunnel = browser.tunnel().unwrap();
            tunnel.ask("GET", &format!("/b/1?id={id}{n}"), &[]).unwrap();
            tunnel
        });
        tunnels.collect()
    };
    let _waiting = ask(OTHER, "h", 80);
    await_until("it is being dialled", Duration::from_secs(5), || {
        (hung.connections() > 0).then_some(())
    });
    let mut good = ask(HOST, "g", 80);
    for tunnel in &mut good {
        assert_eq!(tunnel.answer().unwrap().status(), 200);
    }
    // All were served before the first of the others was given up, and at the pace.
    let served = origin.timeline("g");
    assert!(served.rate() >= 0.97 * 20.0, "{:.2}/s of 20", served.rate());
    assert!(
        hung.connections() <= 20,
        "{} connections to a host that does not answer",
        hung.connections()
    );
}

/// An origin that closes each connection, behind a link that makes handshakes take a tenth of a second and more: at 40/s
/// several are made at a time.
#[test]
fn handshakes_that_take_longer_than_an_interval_cost_nothing() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let link = Link::to(origin.address());
    link.set(Fault::Delay(Duration::from_millis(60)));
    let recipe = recipe("40.0").origin_at(&origin, link.address());
    let replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    let mut tunnels: Vec<Session> = (0..200).map(|_| browser.tunnel().unwrap()).collect();
    for (n, tunnel) in tunnels.iter_mut().enumerate() {
        let target = format!("/b/1?id=c{n}&h=Connection:close");
        tunnel.ask("GET", &target, &[]).unwrap();
    }
    for tunnel in &mut tunnels {
        assert_eq!(tunnel.answer().unwrap().status(), 200);
    }
    // How long they take shows with the first.
    let all = origin.timeline("c");
    let steady = all.since(all.at()[40]);
    assert_eq!((all.count(), origin.connections()), (200, 200));
    assert!(steady.rate() >= 0.97 * 40.0, "{:.2}/s of 40", steady.rate());
}

/// Without TCP_NODELAY on all four ends, Nagle's algorithm meets delayed acknowledgement and each new tunnel costs 40 ms
/// more. The median keeps a busy machine out of it.
#[test]
fn a_new_tunnel_does_not_wait_for_a_delayed_acknowledgement() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe("1000.0").origin(&origin));
    let browser = replica.browser(&site, HOST);
    let mut took: Vec<Duration> = (0..21)
        .map(|n| {
            let began = Instant::now();
            assert_eq!(
                browser.get(&format!("/b/2000?id=t{n}")).unwrap().status(),
                200
            );
            began.elapsed()
        })
        .collect();
    took.sort();
    assert!(
        took[10] < Duration::from_millis(30),
        "half of the new tunnels took {:?} or more",
        took[10]
    );
}
