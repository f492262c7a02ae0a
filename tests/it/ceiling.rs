//! The main claim: what the origin sees from all replicas together keeps one ceiling, and does not without the store.

use std::{thread, time::Duration};

use crate::bed::{
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
    timeline::Pace,
    worker::Worker,
};

const HOST: &str = "lh3.googleusercontent.com";
const FETCHES: usize = 300;
const WORKERS: usize = 6;

/// 20/s: an interval of 50 ms.
const TWENTY_PER_SECOND: Pace = Pace {
    slowest: 19.8,
    fastest: 20.02,
    busiest_second: 21,
    first_percentile_gap: Duration::from_millis(40),
};

/// Six Python workers fetch through three replicas; returns what the origin saw.
fn fetch_through_three_replicas(recipe: Recipe) -> Origin {
    let origin = Origin::tls(&[HOST]);
    let site = Site::new();
    let recipe = recipe
        .destination("google_image", &["*.googleusercontent.com"], "20.0")
        .origin(&origin);
    // One after the other, so that the first makes the CA that all share.
    let replicas: Vec<Replica> = (0..3)
        .map(|n| Replica::start(&site, &format!("r{n}"), &recipe))
        .collect();
    let url = format!("https://{HOST}/b/100");
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|n| {
            Worker::start(
                &site,
                &format!("w{n}"),
                replicas[n % 3].proxy(),
                &url,
                FETCHES / WORKERS,
            )
        })
        .collect();
    workers.iter_mut().for_each(Worker::go);
    let statuses: Vec<u16> = workers.into_iter().flat_map(Worker::statuses).collect();
    assert_eq!(statuses, vec![200; FETCHES]);
    assert_eq!(origin.duplicates(), Vec::<String>::new());
    assert_eq!(origin.timeline("w").count(), FETCHES);
    origin
}

#[test]
fn three_replicas_and_six_workers_keep_one_ceiling() {
    let postgres = Postgres::start();
    let timeline = fetch_through_three_replicas(Recipe::new().store(&postgres.url())).timeline("w");
    assert_eq!(TWENTY_PER_SECOND.faults(&timeline), Vec::<String>::new());
}

#[test]
fn without_the_shared_store_three_replicas_send_three_times_the_ceiling() {
    let timeline = fetch_through_three_replicas(Recipe::new()).timeline("w");
    let rate = timeline.rate();
    assert!(
        (54.0..=60.5).contains(&rate),
        "three embedded stores of 20/s each gave {rate:.2}/s"
    );
    assert_eq!(
        TWENTY_PER_SECOND.faults(&timeline).len(),
        3,
        "the claim above would pass without a shared store"
    );
}

#[test]
fn eight_fetches_at_seven_per_second_span_one_second() {
    let postgres = Postgres::start();
    let origin = Origin::tls(&[HOST]);
    let site = Site::new();
    let recipe = Recipe::new()
        .store(&postgres.url())
        .destination("google_image", &["*.googleusercontent.com"], "7.0")
        .origin(&origin);
    let replica = Replica::start(&site, "r0", &recipe);
    let browser = replica.browser(&site, HOST);
    thread::scope(|scope| {
        for n in 0..8 {
            let browser = &browser;
            scope.spawn(move || {
                assert_eq!(browser.get(&format!("/b/1?id=e{n}")).unwrap().status(), 200)
            });
        }
    });
    let timeline = origin.timeline("e");
    assert_eq!(timeline.count(), 8);
    let span = timeline.span().as_secs_f64();
    assert!(
        (0.995..=1.005).contains(&span),
        "seven intervals of 1/7 s took {span:.4} s"
    );
}
