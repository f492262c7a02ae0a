//! Replicas that differ, rows that nobody expects, heartbeats that fail alone: counted at the origin.

use std::time::Duration;

use crate::bed::{
    await_until::await_until,
    link::{Fault, Link},
    postgres::{Postgres, url},
    replica::Replica,
};

use super::{
    WAITING, all,
    fleet::{CEILING, CURSOR, Fleet, HOST, await_metric, pass},
    three,
};

#[test]
fn replicas_with_different_numbers_and_rates_keep_to_the_largest_and_the_smallest() {
    let (mut postgres, fleet) = (Postgres::start(), Fleet::new());
    let store = postgres.url();
    let small = fleet.recipe_at(&store, 600.0).store_key("max_replicas = 1");
    let small = Replica::start(&fleet.site, "r0", &small);
    let large: Vec<Replica> = ["r1", "r2"].map(|r| fleet.start(r, &store)).into();
    for replica in [&small, &large[0]] {
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 3.0);
        await_metric(replica, "paceline_effective_rate", &[], CEILING);
        await_metric(replica, "paceline_config_disagreement", &[], 1.0);
    }
    let status = small.admin("/status").unwrap().text();
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    let whose = &status["destinations"][0]["ceiling_of"];
    assert_eq!(
        (&whose["rate"], &whose["replica"]),
        (&12.0.into(), &"r1".into()),
        "{status}"
    );
    let (away, failures) = fleet.under_load(&[&small, &large[0], &large[1]], || {
        pass(3.0);
        let stopped = fleet.now();
        postgres.stop_hard();
        pass(16.0);
        stopped + WAITING..fleet.now()
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let (rate, seen) = (fleet.rate(away.clone()), fleet.seen(away));
    assert!(rate >= 0.85 * CEILING, "{rate:.2}/s without the store");
    assert!(seen.busiest_second() <= 13, "{}", seen.busiest_second());
}

#[test]
fn a_replica_with_a_great_many_destinations_is_seen_and_left_its_room() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let link = Link::to(postgres.address());
    let mut many = fleet.recipe(&url(link.address()));
    for n in 0..750 {
        let host = format!("h{n}.test");
        many = many.destination(&format!("{n:064}"), &[&host], "7.0");
    }
    let many = Replica::start(&fleet.site, "r0", &many);
    let few = fleet.start("r1", &postgres.url());
    for replica in [&many, &few] {
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 2.0);
    }
    let (cut, failures) = fleet.under_load(&[&many, &few], || {
        pass(3.0);
        link.set(Fault::Reset);
        let cut = fleet.now();
        pass(14.0);
        cut + WAITING..fleet.now()
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let (lone, together) = (fleet.rate_of("r0", cut.clone()), fleet.rate(cut));
    assert!(
        lone >= 0.85 * CEILING / 3.0,
        "the lone one sent {lone:.2}/s"
    );
    assert!(together <= 1.02 * CEILING, "{together:.2}/s together");
}

#[test]
fn heartbeats_that_fail_for_good_cost_the_cursor_and_not_the_share() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let sql = postgres.sql();
    let (spans, failures) = fleet.under_load(&all(&replicas), || {
        pass(3.0);
        ["RAISE EXCEPTION 'no heartbeats today'", "PERFORM pg_sleep(5)"].map(|act| {
            sql.run(&format!(
                "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                   IF NEW.cache_key LIKE 'paceline:lease:%' THEN {act}; END IF; RETURN NEW; END $$;
                 CREATE TRIGGER stop BEFORE INSERT OR UPDATE ON paceline FOR EACH ROW EXECUTE FUNCTION stop()"
            ));
            let from = fleet.now();
            pass(16.0);
            let until = fleet.now();
            sql.run("DROP TRIGGER stop ON paceline; DROP FUNCTION stop");
            let mended = fleet.now();
            // What sleeps in the server holds the drop up, and then the row.
            pass(11.0);
            (from + WAITING + 1.0..until, mended + 8.0..mended + 11.0)
        })
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    for (failing, mended) in spans {
        let rate = fleet.rate(failing);
        assert!(rate >= 0.8 * CEILING, "{rate:.2}/s without heartbeats");
        let rate = fleet.rate(mended);
        assert!(rate >= 0.9 * CEILING, "{rate:.2}/s with them");
    }
}

#[test]
fn a_lock_that_everybody_gave_up_on_leaves_no_room_for_anybody() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas: Vec<Replica> = ["r0", "r1"].map(|r| fleet.start(r, &postgres.url())).into();
    await_metric(&replicas[1], "paceline_replicas", &["state=\"live\""], 2.0);
    let mut tunnel = fleet.browser(&replicas[0]).tunnel().unwrap();
    assert_eq!(tunnel.get("/b/1?id=r0-first").unwrap().status(), 200);
    let holder = postgres.sql();
    holder.run(&format!(
        "BEGIN; SELECT 1 FROM paceline WHERE cache_key = '{CURSOR}' FOR UPDATE"
    ));
    let mut session = replicas[0].session(HOST);
    session
        .ask(
            "GET",
            &format!("https://{HOST}/b/1?id=r0-given-up"),
            &["Paceline-Max-Wait: 4s"],
        )
        .unwrap();
    // The one that is asked says so, and the other leaves it its share.
    await_metric(
        &replicas[1],
        "paceline_effective_rate",
        &[],
        CEILING * 2.0 / 3.0,
    );
    assert_eq!(session.answer().unwrap().status(), 503);
    holder.run("ROLLBACK");
    await_metric(&replicas[1], "paceline_effective_rate", &[], CEILING);
}

#[test]
fn lease_rows_without_a_value_are_taken_like_any_that_are_free() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let first = fleet.start("r0", &postgres.url());
    let sql = postgres.sql();
    sql.run("ALTER TABLE paceline ALTER value DROP NOT NULL");
    sql.run(
        "INSERT INTO paceline SELECT 'paceline:lease:' || n, NULL, now() + interval '1 hour' FROM generate_series(1, 2) n",
    );
    let second = fleet.start("r1", &postgres.url());
    sql.run("UPDATE paceline SET value = NULL WHERE cache_key LIKE 'paceline:lease:%'");
    await_until("both have written again", Duration::from_secs(5), || {
        let held = "SELECT count(*) FROM paceline WHERE cache_key LIKE 'paceline:lease:%' AND value LIKE '%alone\":false%'";
        (sql.number(held) == 2).then_some(())
    });
    for replica in [&first, &second] {
        assert_eq!(replica.readiness().ok(), Some(200));
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 2.0);
    }
}

#[test]
fn rates_that_no_binary_fraction_holds_are_one_in_all_replicas() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let rates = ["7/min", "1000/day", "3/s", "11/hour", "0.3/s"];
    let replicas = ["r0", "r1"].map(|name| {
        let mut recipe = fleet.recipe(&postgres.url());
        for (n, rate) in rates.iter().enumerate() {
            let host = format!("h{n}.test");
            recipe = recipe.destination(&format!("d{n}"), &[&host], &format!("{rate:?}"));
        }
        Replica::start(&fleet.site, name, &recipe)
    });
    for replica in &replicas {
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 2.0);
        let scrape = replica.scrape();
        assert_eq!(scrape.sum("paceline_config_disagreement", &[]), Some(0.0));
    }
}

#[test]
fn the_figures_of_all_replicas_are_right_soon_after_the_stores_clock_went_back() {
    let (mut postgres, fleet) = (Postgres::start_with_clock(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let ((), failures) = fleet.under_load(&all(&replicas), || {
        pass(4.0);
        postgres.set_clock(-3_600);
        pass(18.0);
        for replica in &replicas {
            let scrape = replica.scrape();
            let rate = scrape
                .sum("paceline_cluster_observed_rate", &[])
                .unwrap_or(0.0);
            assert!((0.85 * CEILING..=1.05 * CEILING).contains(&rate), "{rate}");
            let busiest = scrape
                .sum("paceline_cluster_busiest_second", &[])
                .unwrap_or(0.0);
            assert!(
                (CEILING - 2.0..=CEILING + 2.0).contains(&busiest),
                "{busiest}"
            );
        }
    });
    assert_eq!(failures, Vec::<String>::new());
}
