//! A table that is not ours: replicas and a foreign program move one cursor in it, and nothing else in it changes.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::bed::{
    certs::client_tls,
    client::Session,
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::{Replica, run_paceline},
    sql::Sql,
    timeline::Pace,
};

const HOST: &str = "lh3.googleusercontent.com";
/// The statement of a program that has paced itself for years and is not going to change.
const FOREIGN: &str = "
    INSERT INTO shared_cache AS c (cache_key, value, expires)
    VALUES ('harvest-rate-cursor:google_image', (extract(epoch FROM clock_timestamp()) + 0.1)::text,
            now() + interval '1 hour')
    ON CONFLICT (cache_key) DO UPDATE
    SET value = (GREATEST(extract(epoch FROM clock_timestamp())::float8, c.value::float8) + 0.1)::text
    RETURNING value::float8 - 0.1";
const TEN_PER_SECOND: Pace = Pace {
    slowest: 9.9,
    fastest: 10.05,
    busiest_second: 11,
    first_percentile_gap: Duration::from_millis(80),
};

/// Everything that a migration could have added: relations, columns, indexes, functions, triggers, types, extensions.
const CATALOG: &str = "
    SELECT 'relation ' || oid || ' ' || relname || ' ' || relkind::text || ' ' || relnatts FROM pg_class
      WHERE relnamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname LIKE 'pg\\_%' OR nspname = 'information_schema')
    UNION ALL SELECT 'column ' || attrelid || ' ' || attname || ' ' || atttypid || ' ' || attnotnull FROM pg_attribute
      WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)
    UNION ALL SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL SELECT 'function ' || oid || ' ' || proname FROM pg_proc
    UNION ALL SELECT 'trigger ' || oid || ' ' || tgname FROM pg_trigger
    UNION ALL SELECT 'type ' || oid || ' ' || typname FROM pg_type
    UNION ALL SELECT 'schema ' || nspname FROM pg_namespace
      WHERE nspname NOT LIKE 'pg\\_temp%' AND nspname NOT LIKE 'pg\\_toast\\_temp%'
    UNION ALL SELECT 'extension ' || extname FROM pg_extension
    UNION ALL SELECT 'option ' || oid || ' ' || reloptions::text FROM pg_class WHERE reloptions IS NOT NULL
    ORDER BY 1";

/// The rows that are nobody's business, with the transaction that wrote them: even a rewrite of the same value shows.
const OTHERS: &str =
    "SELECT cache_key || ' ' || value || ' ' || expires || ' ' || xmin::text || ' ' || ctid::text
    FROM shared_cache WHERE left(cache_key, 20) <> 'harvest-rate-cursor:' ORDER BY 1";

/// The table as Django makes it for its database cache.
pub fn make_table(sql: &Sql) {
    sql.run(
        "CREATE TABLE shared_cache (cache_key varchar(255) NOT NULL PRIMARY KEY, value text NOT NULL,
                                    expires timestamptz NOT NULL);
         CREATE INDEX shared_cache_expires ON shared_cache (expires)",
    );
}

#[test]
fn a_foreign_program_and_two_replicas_share_one_ceiling_in_a_table_left_as_it_was() {
    let postgres = Postgres::start();
    let sql = postgres.sql();
    make_table(&sql);
    // Expired rows, a near miss of the prefix, a pattern that LIKE would take for the prefix: none of them is ours.
    sql.run(
        "INSERT INTO shared_cache VALUES
         ('session:1', 'gASVCgAAAA==', now() + interval '1 day'), ('session:old', 'x', now() - interval '1 day'),
         ('harvest-rate-cursor', '1', now() - interval '1 day'), ('harvest-rate-cursors:x', '1', now() - interval '1 day'),
         ('harvest_rate_cursor:google_image', '1', now() - interval '1 day')",
    );
    let (catalog, others) = (sql.texts(CATALOG), sql.texts(OTHERS));
    assert!(
        catalog
            .iter()
            .any(|line| line.contains("shared_cache_expires")),
        "the catalog is looked at"
    );
    assert_eq!(others.len(), 5);

    let origin = Origin::tls(&[HOST]);
    let site = Site::new();
    let recipe = Recipe::new()
        .store(&postgres.url())
        .store_key(
            "table = \"shared_cache\"\nkey_prefix = \"harvest-rate-cursor:\"\nforeign_fetchers = 1",
        )
        .destination("google_image", &["*.googleusercontent.com"], "10.0")
        .origin(&origin);
    let replicas: Vec<Replica> = (0..2)
        .map(|n| Replica::start(&site, &format!("r{n}"), &recipe))
        .collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let foreign = scope.spawn(|| fetch_on_own_slots(&postgres, &origin, &done));
        let workers: Vec<_> = (0..6)
            .map(|n| {
                let browser = replicas[n % 2].browser(&site, HOST);
                scope.spawn(move || {
                    let mut session = browser.tunnel().unwrap();
                    for m in 0..12 {
                        assert_eq!(
                            session.get(&format!("/b/1?id=w{n}-{m}")).unwrap().status(),
                            200
                        );
                    }
                })
            })
            .collect();
        let clean = workers
            .into_iter()
            .map(|worker| worker.join().is_ok())
            .fold(true, |all, one| all & one);
        done.store(true, Ordering::Relaxed);
        foreign.join().expect("the foreign program keeps fetching");
        assert!(clean, "a worker failed");
    });

    assert_eq!(origin.timeline("w").count(), 72);
    let foreign = origin.timeline("foreign").count();
    assert!(
        foreign >= 10,
        "the foreign program got only {foreign} slots"
    );
    assert_eq!(
        TEN_PER_SECOND.faults(&origin.timeline("")),
        Vec::<String>::new()
    );

    let cursor = sql.texts(
        "SELECT value FROM shared_cache WHERE cache_key = 'harvest-rate-cursor:google_image'",
    );
    assert!(
        cursor.len() == 1
            && cursor[0]
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'.'),
        "{cursor:?}"
    );
    assert_eq!(sql.texts(CATALOG), catalog);
    assert_eq!(sql.texts(OTHERS), others);
}

/// Takes slots with its own statement, waits for each, and fetches past the proxy. One slot at a time, as a worker that
/// computes in between: so the replicas, not this program, fill the ceiling.
fn fetch_on_own_slots(postgres: &Postgres, origin: &Origin, done: &AtomicBool) {
    let sql = postgres.sql();
    let tls = client_tls(origin.root().expect("a TLS origin").as_bytes());
    let mut session = Session::open(origin.address(), HOST)
        .unwrap()
        .start_tls(&tls, HOST)
        .unwrap();
    for n in 0.. {
        if done.load(Ordering::Relaxed) {
            return;
        }
        let slot: f64 = sql.rows(FOREIGN)[0].get(0);
        // Server and program share this machine's clock.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs_f64();
        thread::sleep(Duration::from_secs_f64((slot - now).max(0.0)));
        assert_eq!(
            session
                .get(&format!("/b/1?id=foreign-{n}"))
                .unwrap()
                .status(),
            200
        );
    }
}

#[test]
fn check_and_the_start_say_whether_somebody_moves_the_cursor() {
    let postgres = Postgres::start();
    let sql = postgres.sql();
    make_table(&sql);
    sql.run(FOREIGN);
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = |prefix: &str| {
        Recipe::new()
            .store(&postgres.url())
            .store_key(&format!(
                "table = \"shared_cache\"\nkey_prefix = \"{prefix}\"\nforeign_fetchers = 1"
            ))
            .destination("google_image", &["*.googleusercontent.com"], "10.0")
            .origin(&origin)
    };
    let check = |prefix: &str| {
        let file = recipe(prefix).write(&site, "check");
        run_paceline(site.path(), &["check", "--config", &file.to_string_lossy()])
    };
    let (right, wrong) = (
        check("harvest-rate-cursor:"),
        check("harvest-rate-cursors:"),
    );
    assert!(right.status.success() && wrong.status.success());
    let (right, wrong) = (right.text(), wrong.text());
    let line = "cursor harvest-rate-cursor:google_image: moved ";
    assert!(right.contains(line), "{}", right);
    assert!(
        right.contains("so each must fall back to 1/4 or less (google_image: 2.500/s)"),
        "{}",
        right
    );
    let line = "cursor harvest-rate-cursors:google_image: no row, so nobody moves it yet";
    assert!(wrong.contains(line), "{}", wrong);
    let replica = Replica::start(&site, "r0", &recipe("harvest-rate-cursor:"));
    let log = replica.stderr();
    assert!(
        log.contains("cursor harvest-rate-cursor:google_image: moved "),
        "{log}"
    );
}
