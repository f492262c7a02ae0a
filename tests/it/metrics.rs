//! `/metrics` and its neighbours: every name of the contract is there, moves with the traffic, and names no host.

use std::time::Duration;

use crate::bed::{
    await_until::await_until,
    certs::client_tls,
    client::Browser,
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";

/// The label of what these tests send.
const HERE: &str = "destination=\"google_image\"";

/// What the contract promises at any time after the first request.
const NAMES: &[&str] = &[
    "paceline_dispatches_total",
    "paceline_requests_total",
    "paceline_upstream_responses_total",
    "paceline_ceiling_rate",
    "paceline_effective_rate",
    "paceline_observed_rate",
    "paceline_cluster_dispatches_total",
    "paceline_cluster_observed_rate",
    "paceline_cluster_busiest_second",
    "paceline_busiest_second",
    "paceline_smallest_gap_seconds",
    "paceline_queue_depth",
    "paceline_wait_seconds",
    "paceline_slot_lateness_seconds",
    "paceline_slots_void_total",
    "paceline_reservation_seconds",
    "paceline_store_up",
    "paceline_degraded",
    "paceline_replicas",
    "paceline_throttle_multiplier",
    "paceline_locked_out",
    "paceline_clock_steps_total",
    "paceline_config_disagreement",
    "paceline_tunnels",
    "paceline_build_info",
    "process_resident_memory_bytes",
];

#[test]
fn every_name_of_the_contract_is_there_and_counts_what_happened() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let elsewhere = Origin::tls(&["elsewhere.test"]);
    let recipe = Recipe::new()
        .store(&postgres.url())
        .destination("google_image", &["*.googleusercontent.com"], "20.0")
        .origin(&origin)
        .origin(&elsewhere);
    let replica = Replica::start(&site, "r0", &recipe);
    let before = replica.scrape();
    let mut tunnel = replica.browser(&site, HOST).tunnel().unwrap();
    for n in 0..10 {
        let status = if n == 9 { 404 } else { 200 };
        assert_eq!(
            tunnel
                .get(&format!("/b/1?id=m{n}&status={status}"))
                .unwrap()
                .status(),
            status
        );
    }
    // An ungoverned tunnel, open while we look.
    let root = client_tls(elsewhere.root().expect("a TLS origin").as_bytes());
    let mut passing = Browser::new(replica.proxy(), "elsewhere.test", root)
        .tunnel()
        .unwrap();
    assert_eq!(passing.get("/b/1").unwrap().status(), 200);
    // A request is counted when its body has ended, which the client may see a moment earlier.
    let after = await_until("ten requests are counted", Duration::from_secs(5), || {
        let scrape = replica.scrape();
        (scrape.sum("paceline_requests_total", &[HERE])? >= 10.0).then_some(scrape)
    });

    let missing: Vec<_> = NAMES.iter().filter(|name| !after.has(name)).collect();
    assert!(missing.is_empty(), "missing: {missing:?}");

    let moved = |name: &str, labels: &[&str]| {
        let labels: Vec<&str> = labels.iter().copied().chain([HERE]).collect();
        after.sum(name, &labels).unwrap_or(0.0) - before.sum(name, &labels).unwrap_or(0.0)
    };
    assert_eq!(moved("paceline_requests_total", &[]), 10.0);
    assert_eq!(
        moved("paceline_dispatches_total", &["mode=\"shared\""]),
        10.0
    );
    assert_eq!(
        moved("paceline_upstream_responses_total", &["code=\"200\""]),
        9.0
    );
    assert_eq!(
        moved("paceline_upstream_responses_total", &["code=\"404\""]),
        1.0
    );
    assert_eq!(moved("paceline_wait_seconds_count", &[]), 10.0);
    assert_eq!(moved("paceline_slot_lateness_seconds_count", &[]), 10.0);
    assert_eq!(after.sum("paceline_ceiling_rate", &[HERE]), Some(20.0));
    assert_eq!(after.sum("paceline_queue_depth", &[HERE]), Some(0.0));
    let gap = after
        .sum("paceline_smallest_gap_seconds", &[HERE])
        .unwrap_or(0.0);
    assert!(
        (0.030..=0.100).contains(&gap),
        "a smallest gap of {gap} s at 20/s"
    );
    let busiest = after.sum("paceline_busiest_second", &[HERE]).unwrap_or(0.0);
    assert!(
        (9.0..=21.0).contains(&busiest),
        "a busiest second of {busiest} after ten requests"
    );
    assert_eq!(after.sum("paceline_store_up", &[]), Some(1.0));
    assert_eq!(after.sum("paceline_tunnels", &[]), Some(1.0));

    // Whoever picks the hosts could otherwise fill the memory of every scraper with labels.
    let page = replica.admin("/metrics").unwrap().text();
    assert!(
        !page.contains(HOST) && !page.contains("elsewhere.test"),
        "a requested host became a label"
    );
    let labels = after.label_values("destination");
    assert!(
        labels.contains(&"google_image") && labels.len() < 100,
        "{labels:?}"
    );
}

#[test]
fn health_readiness_and_status_answer() {
    let site = Site::new();
    let recipe = Recipe::new().destination("google_image", &["*.googleusercontent.com"], "20.0");
    let replica = Replica::start(&site, "r0", &recipe);
    assert_eq!(replica.admin("/healthz").unwrap().status(), 200);
    let status = replica.admin("/status").unwrap();
    let parsed: serde_json::Value = serde_json::from_slice(&status.body).expect("/status is JSON");
    assert!(parsed.to_string().contains("google_image"), "{parsed}");
    assert_eq!(replica.admin("/nothing-here").unwrap().status(), 404);
}
