//! Reservations while a transaction is held open on the database, so that no dead version of the cursor's row can be
//! removed: what they read, counted in pages, and that each takes its slots once, wherever the row has gone meanwhile.

use std::{
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use paceline::{
    config::Config,
    metrics::Metrics,
    pacing::{
        cursor::{Ask, Granted, horizon},
        throttle::NO_ROW,
        time::{MILLISECOND, Nanos, SECOND, StoreTime},
    },
    store::postgres::{
        Postgres as SharedStore,
        address::Address,
        error::StoreError,
        session::{self, Prepared, Reply, Session},
        sql::{self, Table},
        trail::Place,
    },
};

use crate::{
    bed::{await_until::await_until, postgres::Postgres, runtime, sql::Sql},
    shared_cache::make_table,
};

/// A throttle's row that nobody writes, and the word of a row that is not there.
const THROTTLE: (&str, &str) = ("throttle:nobody", NO_ROW);
const KEY: &str = "harvest-rate-cursor:google_image";
/// What a statement near a place may touch: eight pages and the ways to the throttle's row and to the free space.
const FEW_PAGES: i64 = 20;

/// A cluster, a table as Django makes it, and a transaction that stays open until this is dropped.
struct Held {
    sql: Sql,
    _transaction: Sql,
    postgres: Postgres,
}

impl Held {
    fn new() -> Held {
        let postgres = Postgres::start();
        let sql = postgres.sql();
        make_table(&sql);
        // A table that is small when the statements are planned.
        sql.run("VACUUM ANALYZE shared_cache");
        let transaction = postgres.sql();
        // It takes its snapshot, and no lock on our table, which would stand in the way of a rewrite.
        transaction.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()");
        Held {
            sql,
            _transaction: transaction,
            postgres,
        }
    }

    fn open(&self, pooled: bool) -> Session {
        open(&self.postgres.url(), "shared_cache", pooled)
    }

    /// Somebody else updates the cursor's row so many times, and leaves what it says as it is.
    fn update(&self, times: u32) {
        self.sql.run(&format!(
            "DO $$ BEGIN FOR n IN 1..{times} LOOP
               UPDATE shared_cache SET value = value WHERE cache_key = '{KEY}'; END LOOP; END $$"
        ));
    }

    /// Puts the cursor ten seconds from now, and says where.
    fn put_ahead(&self) -> StoreTime {
        self.sql.run(&format!(
            "UPDATE shared_cache SET value = (extract(epoch FROM clock_timestamp()) + 10)::text WHERE cache_key = '{KEY}'"
        ));
        self.cursor()
    }

    fn cursor(&self) -> StoreTime {
        StoreTime(self.sql.number(&format!(
            "SELECT (value::numeric * 1000000000)::int8 FROM shared_cache WHERE cache_key = '{KEY}'"
        )))
    }
}

fn open(url: &str, table: &str, pooled: bool) -> Session {
    let address = Address::parse(url).expect("the bed's URL");
    let table = Table::new(table);
    let plan = Arc::new(session::Plan {
        address,
        table: table.clone(),
        key_prefix: String::new(),
        missing: session::Missing::IsLeft,
    });
    let opened = runtime().block_on(session::open(&plan));
    let mut session = opened.expect("the cluster runs").session;
    assert!(
        matches!(session.reserve, Prepared::Named(_)),
        "a direct connection is not known as such"
    );
    if pooled {
        session.reserve = Prepared::Unnamed(sql::reserve(&table, true, true));
        session.reserve_near = Some(Prepared::Unnamed(sql::reserve_near(&table, true)));
    }
    session
}

fn ask(slots: u32, interval: Nanos) -> Ask {
    Ask {
        slots,
        interval,
        lead: 0,
        floor: None,
        held: 0,
        horizon: horizon(interval, 3),
        disbelieved: None,
    }
}

fn by_key(session: &Session, ask: &Ask) -> Reply {
    runtime()
        .block_on(session.reserve(KEY, THROTTLE, ask))
        .expect("a reply")
        .expect("within the horizon")
}

fn near(session: &Session, place: Place, ask: &Ask) -> Option<Reply> {
    call_near(session, place, THROTTLE, ask).expect("a reply")
}

fn call_near(
    session: &Session,
    place: Place,
    throttle: (&str, &str),
    ask: &Ask,
) -> Result<Option<Reply>, StoreError> {
    runtime().block_on(session.reserve_near(&around(place), KEY, throttle, ask))
}

fn around(place: Place) -> Range<Place> {
    let at = |page| Place { page, item: 0 };
    at(place.page)..at(place.page + 8)
}

fn place(reply: &Reply) -> Place {
    reply.place.expect("a table has places")
}

fn granted(reply: Reply) -> Granted {
    reply.granted.expect("the pace is as it was thought to be")
}

/// The pages that a named statement touches, the fewer of two: one of them may fill a page. And its plan.
fn touched(session: &Session, statement: &str, places: &str) -> (i64, String) {
    let one = || {
        let text = format!(
            "SELECT name FROM pg_prepared_statements WHERE statement LIKE 'WITH throttle %{statement} \"shared_cache\"%'"
        );
        let names = runtime()
            .block_on(session.client.query(&text, &[]))
            .expect("names");
        let [name] = &names[..] else {
            panic!("{} statements like {statement}", names.len());
        };
        let text = format!(
            "EXPLAIN (ANALYZE, BUFFERS) EXECUTE {}('{KEY}', 1000, 0, NULL, 60000000000, 0, '{}', '{}'{places})",
            name.get::<_, String>(0),
            THROTTLE.0,
            THROTTLE.1
        );
        let rows = runtime()
            .block_on(session.client.query(&text, &[]))
            .expect("a plan");
        let lines: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        // The first line of its kind is of the whole statement.
        let buffers = lines
            .iter()
            .find(|line| line.trim_start().starts_with("Buffers:"))
            .expect("buffers were touched");
        let pages = buffers
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("hit=").or(word.strip_prefix("read=")))
            .map(|count| count.parse::<i64>().expect("a count"))
            .sum();
        (pages, lines.join("\n"))
    };
    one().min(one())
}

#[test]
fn what_a_reservation_reads_does_not_grow_with_the_versions_that_cannot_be_removed() {
    let held = Held::new();
    let session = held.open(false);
    let mut seen = place(&by_key(&session, &ask(1, 1_000)));
    for grown in [1_000, 6_000] {
        held.update(grown);
        assert_eq!(
            near(&session, seen, &ask(1, 1_000)),
            None,
            "it is still there"
        );
        seen = place(&by_key(&session, &ask(1, 1_000)));
        let (pages, plan) = touched(&session, "INSERT INTO", "");
        assert!(
            pages > i64::from(grown) / 120,
            "by its key only {pages} pages: is the transaction open?\n{plan}"
        );
        let places = around(seen);
        let (pages, plan) = touched(
            &session,
            "UPDATE",
            &format!(", '({},0)', '({},0)'", places.start.page, places.end.page),
        );
        assert!(plan.contains("Tid Range Scan"), "{plan}");
        assert!(pages <= FEW_PAGES, "{pages} pages after {grown}\n{plan}");
    }
}

#[test]
fn a_reservation_near_a_place_takes_its_slots_once_or_not_at_all() {
    let held = Held::new();
    for pooled in [false, true] {
        let session = held.open(pooled);
        let ask = ask(3, MILLISECOND);
        let found = |case: &str, before: Place| {
            let cursor = held.put_ahead();
            let reply = near(&session, before, &ask).unwrap_or_else(|| panic!("{case}: a miss"));
            let after = place(&reply);
            let granted = granted(reply);
            assert_eq!(
                (granted.start, granted.end()),
                (cursor, held.cursor()),
                "{case}"
            );
            after
        };
        let lost = |case: &str, before: Place, cursor: Option<StoreTime>| {
            assert_eq!(near(&session, before, &ask), None, "{case}");
            let count = "SELECT count(*) FROM shared_cache";
            assert_eq!(
                held.sql.number(count),
                i64::from(cursor.is_some()),
                "{case}"
            );
            assert!(
                cursor.is_none_or(|c| c == held.cursor()),
                "{case}: it moved"
            );
            let reply = by_key(&session, &ask);
            let after = place(&reply);
            let granted = granted(reply);
            assert!(cursor.is_none_or(|c| c == granted.start), "{case}");
            assert_eq!(granted.end(), held.cursor(), "{case}");
            assert_eq!(held.sql.number(count), 1, "{case}");
            after
        };
        let mut at = place(&by_key(&session, &ask));
        at = found("as it was", at);
        held.update(150);
        at = found("one page on", at);
        held.update(2_000);
        at = lost("moved on", at, Some(held.put_ahead()));
        held.sql.run("VACUUM FULL shared_cache");
        // The new file begins with the versions that cannot be removed; the old place means nothing in it.
        at = lost(
            "rewritten",
            Place {
                page: at.page + 100,
                item: 1,
            },
            Some(held.put_ahead()),
        );
        held.sql.run("DELETE FROM shared_cache");
        at = lost("deleted", at, None);
        held.sql.run("DROP TABLE shared_cache");
        make_table(&held.sql);
        at = lost("made anew", at, None);
        // Another row at that place.
        held.sql.run("TRUNCATE shared_cache");
        held.sql
            .run("INSERT INTO shared_cache VALUES ('other', '1', now())");
        assert_eq!(near(&session, at, &ask), None);
        assert_eq!(
            held.sql
                .texts("SELECT cache_key || value FROM shared_cache"),
            ["other1"]
        );
        held.sql.run("TRUNCATE shared_cache");
        // A pace that is not as it was thought to be.
        let reply = by_key(&session, &ask);
        let ignorant = call_near(&session, place(&reply), (THROTTLE.0, "2"), &ask);
        let ignorant = ignorant.expect("a reply").expect("a row");
        assert_eq!(ignorant.granted, None);
        assert_eq!(held.cursor(), granted(reply).end(), "it moved");
    }
}

#[test]
fn a_reservation_near_a_place_goes_by_what_the_row_says_when_it_is_unlocked() {
    let held = Held::new();
    for pooled in [false, true] {
        let session = held.open(pooled);
        // A change that stays on the page, one that leaves it for another, one that leaves the range, a deletion.
        for (case, updates, hit) in [
            ("here", 1, true),
            ("away", 1_500, false),
            ("gone", 0, false),
        ] {
            let at = place(&by_key(&session, &ask(1, MILLISECOND)));
            let cursor = held.put_ahead();
            held.sql.run("BEGIN");
            match updates {
                0 => held.sql.run("DELETE FROM shared_cache"),
                n => held.update(n),
            }
            held.sql
                .run("UPDATE shared_cache SET value = (value::numeric + 1)::text");
            let reply = thread::scope(|scope| {
                let waiting = scope.spawn(|| near(&session, at, &ask(1, MILLISECOND)));
                let watch = held.postgres.sql();
                await_until("the reservation waits", Duration::from_secs(5), || {
                    let waits =
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
                    (watch.number(waits) == 1 || waiting.is_finished()).then_some(())
                });
                held.sql.run("COMMIT");
                waiting.join().expect("no fault")
            });
            match reply.map(granted) {
                Some(slot) => assert_eq!(
                    (slot.start, slot.end()),
                    (cursor.plus(SECOND), held.cursor()),
                    "{case}"
                ),
                None => assert!(!hit, "{case}: a miss"),
            }
            if updates == 0 {
                let rows = held.sql.number("SELECT count(*) FROM shared_cache");
                assert_eq!(rows, 0, "the row was made anew");
            }
        }
        // A lock that stays.
        let at = place(&by_key(&session, &ask(1, MILLISECOND)));
        let cursor = held.put_ahead();
        held.sql.run("BEGIN; UPDATE shared_cache SET value = value");
        let refused = call_near(&session, at, THROTTLE, &ask(20, SECOND));
        held.sql.run("ROLLBACK");
        assert!(refused.is_err());
        assert_eq!(held.cursor(), cursor);
    }
}

#[test]
fn replicas_and_a_foreign_program_advance_the_cursor_by_just_what_they_took() {
    const EACH: u32 = 500;
    const INTERVAL: Nanos = 5 * MILLISECOND;
    let held = Held::new();
    by_key(&held.open(false), &ask(1, 1));
    let first = held.put_ahead();
    let (hits, misses, done) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let sessions = [held.open(false), held.open(false), held.open(true)];
    let (mut slots, foreign): (Vec<Granted>, i64) = thread::scope(|scope| {
        let follow = |session: &Session| {
            let mut at = None;
            let take = |n| {
                let ask = ask(1 + n % 3, INTERVAL);
                let reply = at.and_then(|at| near(session, at, &ask));
                let count = if reply.is_some() { &hits } else { &misses };
                count.fetch_add(1, Relaxed);
                let reply = reply.unwrap_or_else(|| by_key(session, &ask));
                at = Some(place(&reply));
                granted(reply)
            };
            (0..EACH).map(take).collect::<Vec<_>>()
        };
        let stranger = scope.spawn(|| {
            let sql = held.postgres.sql();
            let mut moves = 0;
            while !done.load(Relaxed) {
                sql.run(&format!(
                    "UPDATE shared_cache SET value = (greatest(extract(epoch FROM clock_timestamp()), value::numeric) + 0.001)::text
                     WHERE cache_key = '{KEY}'"
                ));
                moves += 1;
            }
            moves
        });
        let takers: Vec<_> = sessions
            .iter()
            .map(|session| scope.spawn(move || follow(session)))
            .collect();
        let taken = takers.into_iter().map(|t| t.join());
        let slots = taken.flat_map(|t| t.expect("no fault")).collect();
        done.store(true, Relaxed);
        (slots, stranger.join().expect("no fault"))
    });
    let taken: Nanos = slots.iter().map(|g| g.end().since(g.start)).sum();
    assert_eq!(
        held.cursor().since(first),
        taken + foreign * MILLISECOND,
        "{foreign} foreign moves"
    );
    slots.sort_by_key(|g| g.start);
    for pair in slots.windows(2) {
        assert!(pair[1].start >= pair[0].end(), "{pair:?} overlap");
    }
    let (hits, misses) = (hits.into_inner(), misses.into_inner());
    assert!(
        hits > 9 * misses,
        "{hits} found near their place, {misses} by key"
    );
}

#[test]
fn the_store_follows_the_row_so_that_thousands_of_reservations_read_few_pages() {
    const EACH: u32 = 2_500;
    let held = Held::new();
    let stores = ["a", "b"].map(|name| {
        let text = format!(
            "[store]\nurl = \"{}\"\ntable = \"shared_cache\"\nreplica = \"{name}\"\n\
             [[destination]]\nname = \"d\"\nhosts = [\"d.test\"]\nrate = 1.0\n",
            held.postgres.url()
        );
        let config = Config::parse(&text, Path::new("held.toml"), &|_| None).expect("valid");
        let _context = runtime().enter();
        let store = SharedStore::start(
            &config.store.expect("a store"),
            [("d".to_owned(), 1.0)].into(),
            Metrics::new(),
        );
        store.expect("a URL")
    });
    by_key(&held.open(false), &ask(1, 1));
    let first = held.put_ahead();
    let take = |store: Arc<SharedStore>| async move {
        assert!(store.wait_until_up(Duration::from_secs(10)).await);
        let mut taken = Vec::new();
        for _ in 0..EACH {
            let reply = store.reserve(KEY, THROTTLE, ask(1, 1_000), false).await;
            taken.push(granted(reply.expect("a reply")));
        }
        taken
    };
    let tasks = stores.map(|store| runtime().spawn(take(store)));
    let mut slots = Vec::new();
    for task in tasks {
        slots.extend(runtime().block_on(task).expect("no fault"));
    }
    slots.sort_by_key(|g| g.start);
    assert!(slots.windows(2).all(|w| w[1].start >= w[0].end()));
    let taken: Nanos = slots.iter().map(|g| g.end().since(g.start)).sum();
    assert_eq!(held.cursor().since(first), taken, "slots were lost");
    // The last owner of a store is gone, so its connections end, and a server process tells its counts as it ends.
    let count = |what: &str| {
        held.sql.number(&format!(
            "SELECT ({what})::int8 FROM pg_statio_user_tables JOIN pg_stat_user_tables USING (relid)"
        ))
    };
    await_until("the updates are counted", Duration::from_secs(20), || {
        (count("n_tup_upd") >= i64::from(2 * EACH - 1)).then_some(())
    });
    let pages = count("heap_blks_hit + heap_blks_read");
    let each = pages as f64 / f64::from(2 * EACH);
    assert!(each < 12.0, "{each:.1} pages for each reservation");
}

#[test]
fn what_has_no_places_is_reserved_from_by_key() {
    let held = Held::new();
    held.sql.run(
        "CREATE VIEW pane AS SELECT * FROM shared_cache;
         CREATE ROLE lodger LOGIN;
         GRANT INSERT, UPDATE, SELECT (cache_key, value, expires) ON shared_cache TO lodger",
    );
    let lodger = held.postgres.url().replacen("postgres@", "lodger@", 1);
    for (url, table) in [(held.postgres.url(), "pane"), (lodger, "shared_cache")] {
        let session = open(&url, table, false);
        let reply = by_key(&session, &ask(1, 1_000));
        assert_eq!(reply.place, None, "{table}");
        assert!(reply.granted.is_some(), "{table}");
        let start = Place { page: 0, item: 0 };
        assert_eq!(near(&session, start, &ask(1, 1)), None);
    }
}
