//! Replicas at different distances from the store: what the origin sees from all of them together.

use std::{thread, time::Duration};

use crate::bed::{
    await_until::await_until,
    link::{Fault, Link},
    origin::Origin,
    postgres::{Postgres, url},
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const RATE: f64 = 50.0;

/// One replica beside the store, and one behind a link that takes 45 ms each way: where a slot begins is the same instant
/// to both. (With a clock that is mapped as late as it could be, the far one is late by its whole way back, and a second
/// holds two requests more than it should, or three.)
#[test]
fn a_near_and_a_far_replica_keep_one_pace() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let link = Link::to(postgres.address());
    let recipe = |store: &str| {
        Recipe::new()
            .store(store)
            .destination(
                "google_image",
                &["*.googleusercontent.com"],
                &format!("{RATE:?}"),
            )
            .origin(&origin)
    };
    let near = Replica::start(&site, "near", &recipe(&postgres.url()));
    link.set(Fault::Delay(Duration::from_millis(45)));
    let far = Replica::start(&site, "far", &recipe(&url(link.address())));
    // More than either can send by itself: both always have some that wait.
    thread::scope(|scope| {
        for (n, replica) in [&near, &far].into_iter().cycle().take(40).enumerate() {
            let browser = replica.browser(&site, HOST);
            scope.spawn(move || {
                let mut tunnel = browser.tunnel().unwrap();
                for i in 0..15 {
                    let id = format!("/b/1?id=w{n}x{i}");
                    assert_eq!(tunnel.get(&id).unwrap().status(), 200);
                }
            });
        }
    });
    // The far one learns in its first calls how far away it is; the end is left out, where one alone has some that wait.
    let all = origin.timeline("w");
    assert_eq!(all.count(), 600);
    let (from, to) = (all.at()[100], all.at()[400]);
    let steady = all.between(from, to);
    let (rate, excess) = (steady.rate(), steady.excess(RATE));
    assert!((0.98 * RATE..=1.01 * RATE).contains(&rate), "{rate:.2}/s");
    println!("{rate:.2}/s, {excess:.2} above");
    // An exact pace gives 1; the grace of a slot is half an interval here, and sockets and processes take their time.
    assert!(
        excess <= 2.0,
        "{excess:.2} requests above {RATE}/s, {} in a second",
        steady.busiest_second()
    );
    // What the replicas tell of it is what was sent: within the settled seconds of both.
    await_until("both have told", Duration::from_secs(10), || {
        let busiest = near
            .scrape()
            .sum("paceline_cluster_busiest_second", &[])
            .unwrap_or(0.0);
        (RATE - 1.0..=RATE + 2.0).contains(&busiest).then_some(())
    });
}
