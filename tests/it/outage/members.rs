//! Who is a member: numbers taken, held, given back, freed; what members agree on and add up to.

use std::time::Duration;

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    client::Session,
    postgres::Postgres,
    replica::{Replica, run_paceline},
};

use super::{
    all,
    fleet::{CEILING, Fleet, await_metric, pass},
    three,
};

const LEASES: &str = "SELECT cache_key || ' ' || value FROM paceline
                      WHERE cache_key LIKE 'paceline:lease:%' AND value <> 'free' ORDER BY 1";

#[test]
fn one_replica_too_many_says_so_and_takes_the_number_that_a_clean_stop_gives_back() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let mut replicas = fleet.start_each(&three(&postgres.url()));
    let leases = postgres.sql().texts(LEASES);
    assert_eq!(leases.len(), 3, "{leases:?}");
    let extra = Replica::start_unready(&fleet.site, "r3", &fleet.recipe(&postgres.url()));
    await_until("it says why", Duration::from_secs(10), || {
        let said = extra.admin("/readyz").ok()?;
        (said.status() == 503 && said.text().contains("all_numbers_held")).then_some(())
    });
    await_until("the log names the holders", Duration::from_secs(5), || {
        let log = extra.stderr();
        let named = ["r0 holds 0", "r1 holds 1", "r2 holds 2", "paceline forget"];
        named.iter().all(|n| log.contains(n)).then_some(())
    });
    replicas[1].signal(Signal::TERM);
    assert!(replicas[1].await_end(Duration::from_secs(10)).success());
    extra.await_ready();
    await_metric(&replicas[0], "paceline_replicas", &["state=\"live\""], 3.0);
    await_metric(
        &replicas[0],
        "paceline_replicas",
        &["state=\"silent\""],
        0.0,
    );
}

#[test]
fn a_dead_replica_is_forgotten_on_demand_and_only_then_makes_room() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let mut replicas = fleet.start_each(&three(&postgres.url()));
    let forget = |at: &Replica, name: &str| {
        let admin = format!("http://{}", at.admin_address());
        run_paceline(fleet.site.path(), &["forget", name, "--admin", &admin])
    };
    await_metric(&replicas[0], "paceline_replicas", &["state=\"live\""], 3.0);
    let lives = forget(&replicas[0], "r2");
    assert_eq!(lives.status.code(), Some(1));
    assert!(lives.stderr.contains("r2 lives"), "{}", lives.stderr);
    let unknown = forget(&replicas[0], "r9");
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        unknown.stderr.contains("no replica is called r9"),
        "{}",
        unknown.stderr
    );

    // What a web page makes a browser on this machine send carries its origin.
    let at = replicas[0].admin_address();
    for field in ["Origin: http://page.test", "Authorization: Bearer guess"] {
        let mut session = Session::open(at, &at.to_string()).unwrap();
        session.ask("POST", "/forget?replica=r2", &[field]).unwrap();
        assert_eq!(session.answer().unwrap().status(), 403, "{field}");
    }

    replicas.pop();
    let extra = Replica::start_unready(&fleet.site, "r3", &fleet.recipe(&postgres.url()));
    await_metric(
        &replicas[0],
        "paceline_replicas",
        &["state=\"silent\""],
        1.0,
    );
    assert_eq!(extra.readiness().ok(), Some(503));
    let forgotten = forget(&replicas[0], "r2");
    assert!(forgotten.status.success(), "{}", forgotten.stderr);
    extra.await_ready();
    await_metric(
        &replicas[1],
        "paceline_replicas",
        &["state=\"silent\""],
        0.0,
    );
    await_metric(&replicas[1], "paceline_replicas", &["state=\"live\""], 3.0);
}

#[test]
fn the_smallest_ceiling_is_in_force_and_the_disagreement_shows() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let fast = Replica::start(&fleet.site, "r0", &fleet.recipe_at(&postgres.url(), 30.0));
    let slow = fleet.start("r1", &postgres.url());
    for replica in [&fast, &slow] {
        await_metric(replica, "paceline_config_disagreement", &[], 1.0);
        await_metric(replica, "paceline_effective_rate", &[], CEILING);
        let said = replica.stderr();
        let lines = said.matches("configured with different rates").count();
        assert_eq!(lines, 1, "{said}");
    }
    let (span, failures) = fleet.under_load(&[&fast, &slow], || {
        pass(1.0);
        let from = fleet.now();
        pass(5.0);
        from..fleet.now()
    });
    assert_eq!(failures, Vec::<String>::new());
    let (rate, seen) = (fleet.rate(span.clone()), fleet.seen(span));
    assert!((11.4..=12.3).contains(&rate), "{rate:.2}/s");
    assert!(seen.busiest_second() <= 13);
}

#[test]
fn every_replica_shows_what_the_origin_saw_from_all() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let ((), failures) = fleet.under_load(&all(&replicas), || pass(14.0));
    assert_eq!(failures, Vec::<String>::new());
    let seen = fleet.origin.timeline("r");
    for replica in &replicas {
        await_metric(
            replica,
            "paceline_cluster_dispatches_total",
            &[],
            seen.count() as f64,
        );
        let busiest = replica
            .scrape()
            .sum("paceline_cluster_busiest_second", &[])
            .unwrap_or_default();
        // Whole seconds of the store's clock, against any second: the latter may hold one more.
        let most = seen.busiest_second() as f64;
        assert!(
            (CEILING - 1.0..=most).contains(&busiest),
            "{busiest}, the origin saw {most}"
        );
    }
}
