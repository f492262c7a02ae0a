//! What may stand in the table, or happen to it, while replicas are at work.

use crate::{
    bed::{postgres::Postgres, recipe::Recipe, replica::Replica},
    shared_cache::make_table,
};

use super::{
    all,
    fleet::{CEILING, CURSOR, Fleet, await_metric, pass},
    three,
};

#[test]
fn whatever_stands_in_the_cursors_row_the_pace_holds() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let sql = postgres.sql();
    let set =
        |value: &str| format!("UPDATE paceline SET value = {value} WHERE cache_key = '{CURSOR}'");
    let epoch = |offset: &str| set(&format!("(extract(epoch FROM now()) {offset})::text"));
    let poisons = [
        (
            "vanished row",
            format!("DELETE FROM paceline WHERE cache_key = '{CURSOR}'"),
        ),
        ("garbage", set("'pickled'")),
        ("no text", set("''")),
        ("not a number", set("'NaN'")),
        ("negative", set("'-1'")),
        ("huge", set("repeat('9', 400)")),
        ("too precise", set("'1.' || repeat('9', 4000)")),
        ("exponent", set("'1e300'")),
        ("an hour ahead", epoch("+ 3600")),
        ("ten years ahead", epoch("+ 3.2e8")),
        ("an hour behind", epoch("- 3600")),
        ("epoch", set("'0'")),
        ("all rows of ours", "DELETE FROM paceline".to_owned()),
        (
            "garbage in all rows",
            "UPDATE paceline SET value = 'pickled'".to_owned(),
        ),
        ("dropped table", "DROP TABLE paceline".to_owned()),
    ];
    let (spans, failures) = fleet.under_load(&all(&replicas), || {
        pass(2.0);
        poisons.each_ref().map(|(name, statement)| {
            let from = fleet.now();
            sql.run(statement);
            pass(5.0);
            (*name, from)
        })
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    for (name, from) in spans {
        let (rate, seen) = (
            fleet.rate(from + 3.0..from + 5.0),
            fleet.seen(from - 1.0..from + 5.0),
        );
        assert!(
            rate >= 0.9 * CEILING,
            "{name}: {rate:.2}/s after three seconds"
        );
        let excess = seen.excess(CEILING);
        assert!(excess <= 2.5, "{name}: {excess:.2} over the ceiling");
    }
    for replica in &replicas {
        assert_eq!(replica.readiness().ok(), Some(200));
    }
}

#[test]
fn a_dropped_adopted_table_is_a_store_away_until_it_is_back() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let sql = postgres.sql();
    make_table(&sql);
    let recipe = |fleet: &Fleet| -> Recipe {
        fleet
            .recipe(&postgres.url())
            .store_key("table = \"shared_cache\"")
    };
    let replicas: Vec<Replica> = (0..3)
        .map(|n| Replica::start(&fleet.site, &format!("r{n}"), &recipe(&fleet)))
        .collect();
    let ((away, back), failures) = fleet.under_load(&all(&replicas), || {
        pass(2.0);
        sql.run("DROP TABLE shared_cache");
        let dropped = fleet.now();
        pass(10.0);
        let made = fleet.now();
        make_table(&sql);
        pass(7.0);
        (
            dropped + super::WAITING..made,
            made + super::BACK..made + 7.0,
        )
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let rate = fleet.rate(away);
    assert!(rate >= 0.85 * CEILING, "{rate:.2}/s without the table");
    let rate = fleet.rate(back);
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s with it");
    for replica in &replicas {
        assert!(
            replica
                .scrape()
                .sum("paceline_store_errors_total", &["reason=\"table\""])
                > Some(0.0)
        );
        await_metric(replica, "paceline_store_up", &[], 1.0);
    }
}

#[test]
fn a_server_whose_clock_jumps_by_an_hour_stops_nobody() {
    let (mut postgres, fleet) = (Postgres::start_with_clock(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let (spans, failures) = fleet.under_load(&all(&replicas), || {
        pass(3.0);
        [3600, 0, -3600, 0].map(|ahead| {
            let stepped = fleet.now();
            postgres.set_clock(ahead);
            pass(6.0);
            (ahead, stepped)
        })
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    for (ahead, stepped) in spans {
        let rate = fleet.rate(stepped + 3.0..stepped + 6.0);
        assert!(rate >= 0.9 * CEILING, "{ahead} s ahead: {rate:.2}/s");
    }
    for replica in &replicas {
        assert!(replica.scrape().sum("paceline_clock_steps_total", &[]) >= Some(4.0));
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 3.0);
    }
}
