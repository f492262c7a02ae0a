//! What stands in the table: what is swept and what is not, and values that no honest program writes.

use crate::{
    bed::{await_until::await_until, postgres::Postgres, replica::Replica, sql::Sql},
    outage::fleet::{CURSOR, Fleet, await_metric, pass},
    shared_cache::make_table,
};

use super::PATIENCE;

/// Rows, with whether they are dead: key behind the prefix, value, seconds until `expires`.
const ROWS: [(&str, &str, &str, bool); 17] = [
    // A cursor that others move and whose `expires` they never touch.
    ("google_image", "ahead(4000)", "-7200", false),
    ("quiet", "ahead(-9000)", "-7200", false),
    ("not_ours", "ahead(-9000)", "-7200", false),
    ("not_ours/a.test", "ahead(-9000)", "-7200", false),
    ("quiet/passed.test", "ahead(-9000)", "-7200", true),
    ("quiet/kept.test", "ahead(-9000)", "600", false),
    ("quiet/lately.test", "ahead(-1800)", "-7200", false),
    ("quiet/ahead.test", "ahead(4000)", "-7200", false),
    ("quiet/garbage.test", "'pickled'", "-7200", false),
    ("lease:900", "'1 run {}'", "-7200", true),
    ("lease:901", "'free'", "-7200", true),
    ("lease:902", "nanos() || ' run {}'", "-7200", false),
    ("lease:903", "'1 run {}'", "600", false),
    ("throttle:quiet", NEUTRAL, "-7200", true),
    ("throttle:other", "'4 {}'", "-7200", true),
    ("throttle:google_image", "'4 {}'", "600", false),
    ("unknown:row", "'1'", "-7200", false),
];

/// The throttle of a destination that nothing holds back. (One that nobody can read is written anew by whoever goes by it.)
const NEUTRAL: &str = "'1 {\"version\":0,\"multiplier\":1,\"episode\":0,\"clean\":0,\"hold\":{\"at\":0},\"lockout\":{\"at\":0},\
                       \"pause\":{\"at\":0},\"evidence\":[]}'";

fn put(sql: &Sql, table: &str, prefix: &str) {
    sql.run(
        "CREATE OR REPLACE FUNCTION ahead(by numeric) RETURNS text LANGUAGE sql AS
           $$ SELECT (extract(epoch FROM clock_timestamp()) + by)::text $$;
         CREATE OR REPLACE FUNCTION nanos() RETURNS text LANGUAGE sql AS
           $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::int8::text $$",
    );
    for (key, value, expires, _) in ROWS {
        sql.run(&format!(
            "INSERT INTO {table} VALUES ('{prefix}{key}', {value}, now() + {expires} * interval '1 second')"
        ));
    }
}

fn missing(sql: &Sql, table: &str, prefix: &str, dead: bool) -> Vec<&'static str> {
    let there = sql.texts(&format!("SELECT cache_key FROM {table}"));
    let keys = ROWS.iter().filter(|row| row.3 == dead).map(|row| row.0);
    keys.filter(|key| !there.contains(&format!("{prefix}{key}")))
        .collect()
}

#[test]
fn only_what_is_dead_for_sure_is_swept_at_a_start_a_reload_and_a_restart() {
    for (table, prefix) in [("paceline", "paceline:"), ("shared_cache", "rate-cursor:")] {
        let (postgres, fleet) = (Postgres::start(), Fleet::new());
        let sql = postgres.sql();
        make_table(&sql);
        sql.run(
            "CREATE TABLE paceline (cache_key varchar(255) PRIMARY KEY, value text NOT NULL, expires timestamptz NOT NULL)",
        );
        put(&sql, table, prefix);
        let recipe = |rate: f64| {
            fleet
                .recipe_at(&postgres.url(), rate)
                .destination("quiet", &["*.quiet.test"], "\"10/day\"")
                .key("scope = \"host\"")
                .store_key(&format!("table = {table:?}\nkey_prefix = {prefix:?}"))
        };
        let swept = |what: &str| {
            let dead = ROWS.iter().filter(|row| row.3).count();
            await_until(what, PATIENCE, || {
                (missing(&sql, table, prefix, true).len() == dead).then_some(())
            });
            assert_eq!(
                missing(&sql, table, prefix, false),
                Vec::<&str>::new(),
                "{what}"
            );
        };
        let mut replica = Replica::start(&fleet.site, "r0", &recipe(10.0));
        swept("the start");
        replica.reload(&fleet.site, "r0", &recipe(11.0));
        // A sweep comes with each session.
        sql.run(&format!("DELETE FROM {table} WHERE cache_key LIKE '{prefix}%' AND cache_key NOT LIKE '{prefix}lease:_'"));
        put(&sql, table, prefix);
        sql.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'paceline'");
        swept("a new session");
        drop(replica);
        let replica = Replica::start(&fleet.site, "r0", &recipe(11.0));
        await_metric(&replica, "paceline_store_up", &[], 1.0);
        pass(1.0);
        swept("the restart");
    }
}

#[test]
fn rows_of_null_heal() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let sql = postgres.sql();
    sql.run("CREATE TABLE paceline (cache_key varchar(255) PRIMARY KEY, value text, expires timestamptz)");
    sql.run(&format!(
        "INSERT INTO paceline VALUES ('{CURSOR}', NULL, NULL)"
    ));
    let replica = fleet.start("r0", &postgres.url());
    let browser = fleet.browser(&replica);
    for (n, value) in ["value", "NULL", "value"].into_iter().enumerate() {
        sql.run(&format!(
            "UPDATE paceline SET value = {value}, expires = NULL WHERE cache_key = '{CURSOR}'"
        ));
        assert_eq!(
            browser.get(&format!("/b/1?id=r0-{n}")).unwrap().status(),
            200
        );
        let healed = format!(
            "SELECT count(*) FROM paceline WHERE cache_key = '{CURSOR}' AND value ~ '^[0-9.]+$'"
        );
        assert_eq!(sql.number(&healed), 1);
    }
    assert!(
        !replica.stderr().contains("store lost"),
        "{}",
        replica.stderr()
    );
}

#[test]
fn bytes_that_are_no_text_are_garbage_and_no_reason_to_give_up_a_session() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    postgres
        .sql()
        .run("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0");
    let url = postgres
        .url()
        .replace("/postgres", "/ascii")
        .replacen("//ascii", "//postgres", 1);
    let sql = Sql::connect(&url).expect("the database");
    let replica = fleet.start("r0", &url);
    let browser = fleet.browser(&replica);
    assert_eq!(browser.get("/b/1?id=r0-before").unwrap().status(), 200);
    sql.run(
        "INSERT INTO paceline VALUES ('paceline:throttle:google_image', E'2 \\377\\376', now() + interval '1 day'),
           ('paceline:lease:1', E'1 run \\377\\376', now() + interval '1 day')
         ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value;
         UPDATE paceline SET value = E'\\377\\376' WHERE cache_key = 'paceline:google_image'",
    );
    for n in 0..5 {
        assert_eq!(
            browser.get(&format!("/b/1?id=r0-{n}")).unwrap().status(),
            200
        );
        pass(0.5);
    }
    let said = replica.stderr();
    assert!(!said.contains("store lost"), "{said}");
    let dispatched = replica
        .scrape()
        .sum("paceline_dispatches_total", &["mode=\"shared\""]);
    assert_eq!(dispatched, Some(6.0), "{said}");
}
