//! What a replica's sessions bear: rows that others have locked, servers that are far or frozen, links that die at the wrong
//! moment, roles with settings and limits of their own.

mod locks;
mod rows;

use std::{thread, time::Duration};

use crate::{
    bed::{
        await_until::await_until,
        link::{Fault, Link},
        postgres::{Postgres, url},
        replica::Replica,
    },
    outage::fleet::{CEILING, Fleet, await_metric, pass},
};

const PATIENCE: Duration = Duration::from_secs(15);

#[test]
fn three_replicas_300_ms_away_connect_and_keep_one_ceiling() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let link = Link::to(postgres.address());
    link.set(Fault::Delay(Duration::from_millis(150)));
    let stores = vec![url(link.address()); 3];
    let replicas = fleet.start_each(&stores);
    for replica in &replicas {
        await_metric(replica, "paceline_store_up", &[], 1.0);
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 3.0);
    }
    let all: Vec<&Replica> = replicas.iter().collect();
    let (span, failures) = fleet.under_load(&all, || {
        pass(6.0);
        let from = fleet.now();
        pass(10.0);
        from..fleet.now()
    });
    assert_eq!(failures, Vec::<String>::new());
    let (rate, busiest) = (fleet.rate(span.clone()), fleet.seen(span).busiest_second());
    assert!(
        (0.93 * CEILING..=1.01 * CEILING).contains(&rate),
        "{rate:.2}/s"
    );
    assert!(busiest <= 14, "{busiest} in a second");
    for replica in &replicas {
        assert!(
            !replica.stderr().contains("store lost"),
            "{}",
            replica.stderr()
        );
    }
}

#[test]
fn a_frozen_first_host_costs_no_more_than_four_seconds() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let (first, second) = (Link::to(postgres.address()), Link::to(postgres.address()));
    let store = format!(
        "postgres://postgres@{},{}/postgres",
        first.address(),
        second.address()
    );
    let replicas = fleet.start_each(&[store.clone(), store]);
    let all: Vec<&Replica> = replicas.iter().collect();
    let (frozen, failures) = fleet.under_load(&all, || {
        pass(3.0);
        let frozen = fleet.now();
        first.set(Fault::Stall);
        pass(10.0);
        frozen
    });
    assert_eq!(failures, Vec::<String>::new());
    let rate = fleet.rate(frozen + 4.0..frozen + 10.0);
    assert!(
        rate >= 0.95 * CEILING,
        "{rate:.2}/s from the fourth second on"
    );
    for replica in &replicas {
        let said = replica.stderr();
        assert_eq!(said.matches("store lost").count(), 1, "{said}");
    }
}

#[test]
fn a_link_that_dies_while_a_session_is_examined_keeps_nobody_out() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let sql = postgres.sql();
    // The first row that is tried holds its session up for a while, so that the link can be cut just then.
    sql.run(
        "CREATE TABLE paceline (cache_key varchar(255) PRIMARY KEY, value text NOT NULL, expires timestamptz NOT NULL);
         CREATE SEQUENCE tried;
         CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           IF NEW.cache_key LIKE '%rehearsal%' AND nextval('tried') = 1 THEN PERFORM pg_sleep(2); END IF;
           RETURN NEW; END $$;
         CREATE TRIGGER hold_up BEFORE INSERT ON paceline FOR EACH ROW EXECUTE FUNCTION hold_up()",
    );
    let link = Link::to(postgres.address());
    let asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    let cut = fleet.recipe(&url(link.address()));
    thread::scope(|scope| {
        // It listens once it has the store, or has waited for it for long enough.
        let cut = scope.spawn(|| Replica::start_unready(&fleet.site, "r0", &cut));
        await_until("it is being examined", PATIENCE, || {
            (sql.number(asleep) == 1).then_some(())
        });
        link.set(Fault::Stall);
        await_until("the row has been tried", PATIENCE, || {
            (sql.number(asleep) == 0).then_some(())
        });
        let open = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
        assert_eq!(sql.number(open), 0, "a transaction was left open");
        let other = Replica::start_unready(&fleet.site, "r1", &fleet.recipe(&postgres.url()));
        await_metric(&other, "paceline_store_up", &[], 1.0);
        let said = other.stderr();
        assert!(!said.contains("store away"), "{said}");
        drop(cut.join());
    });
}

/// A role that is not the superuser, and the URL for it.
fn lodger(postgres: &Postgres, statements: &str) -> String {
    let sql = postgres.sql();
    sql.run("CREATE ROLE lodger LOGIN; GRANT CREATE ON SCHEMA public TO lodger");
    sql.run(statements);
    postgres.url().replacen("postgres@", "lodger@", 1)
}

#[test]
fn what_an_administrator_takes_away_is_named_and_its_return_is_noticed() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let sql = postgres.sql();
    let store = lodger(&postgres, "");
    let replica = fleet.start("r0", &store);
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'lodger'";
    let hide = "ALTER TABLE paceline ENABLE ROW LEVEL SECURITY; ALTER TABLE paceline FORCE ROW LEVEL SECURITY";
    let show = "ALTER TABLE paceline DISABLE ROW LEVEL SECURITY";
    let cases = [
        (
            "too_many_connections",
            "ALTER ROLE lodger CONNECTION LIMIT 0",
            "ALTER ROLE lodger CONNECTION LIMIT -1",
        ),
        (
            "too_many_connections",
            "ALTER ROLE lodger CONNECTION LIMIT 2",
            "ALTER ROLE lodger CONNECTION LIMIT -1",
        ),
        (
            "privilege",
            "REVOKE UPDATE ON paceline FROM lodger",
            "GRANT UPDATE ON paceline TO lodger",
        ),
        ("privilege", hide, show),
        (
            "authentication",
            "ALTER ROLE lodger NOLOGIN",
            "ALTER ROLE lodger LOGIN",
        ),
    ];
    for (reason, take, give) in cases {
        let count = || {
            let label = format!("reason=\"{reason}\"");
            replica
                .scrape()
                .sum("paceline_store_errors_total", &[&label])
                .unwrap_or(0.0)
        };
        let before = count();
        sql.run(take);
        sql.rows(end);
        await_until(take, PATIENCE, || (count() >= before + 2.0).then_some(()));
        let served = fleet
            .browser(&replica)
            .get("/b/1?id=r0-alone")
            .map(|a| a.status());
        assert_eq!(served.ok(), Some(200), "{take}");
        sql.run(give);
        await_metric(&replica, "paceline_degraded", &[], 0.0);
    }
    let said = replica.stderr();
    let lines = said.matches("store away").count();
    assert!(lines <= 3 * cases.len(), "{lines} lines: {said}");
}

#[test]
fn sessions_that_are_ended_again_and_again_are_soon_made_again() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let sql = postgres.sql();
    sql.run("ALTER ROLE postgres SET idle_session_timeout = '300ms'");
    let replica = fleet.start("r0", &postgres.url());
    pass(3.0);
    assert!(
        !replica.stderr().contains("store lost"),
        "too idle: {}",
        replica.stderr()
    );
    let others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'paceline'";
    let up = || replica.scrape().sum("paceline_store_up", &[]) == Some(1.0);
    for _ in 0..6 {
        await_until("the store is up", PATIENCE, || up().then_some(()));
        pass(0.5);
        sql.rows(others);
        await_until("the loss is noticed", PATIENCE, || {
            (!up() || replica.stderr().contains("store lost")).then_some(())
        });
    }
    // Each loss costs no second.
    let lost = fleet.now();
    sql.rows(others);
    await_until("it is lost", PATIENCE, || (!up()).then_some(()));
    await_until("it is back", PATIENCE, || up().then_some(()));
    assert!(fleet.now() - lost < 0.9, "{:.2} s", fleet.now() - lost);
}
