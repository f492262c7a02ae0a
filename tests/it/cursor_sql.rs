//! The reservation in SQL against the rule it is to execute, `paceline::pacing::cursor::reserve`: the same histories
//! give the same slots, to the nanosecond, whatever stands in the row.
//!
//! For that the server's clock has to stand still: a function `clock_timestamp` in a schema that the search path names
//! before `pg_catalog` takes the place of the real one.

use std::{
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use paceline::{
    pacing::{
        cursor::{self, Ask, Doubt, Granted, settle},
        throttle::NO_ROW,
        time::{MILLISECOND, Nanos, SECOND, StoreTime, duration},
    },
    store::postgres::{
        address::Address,
        session::{self, Prepared, Session},
        sql::{self, Table},
    },
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};

use crate::{
    bed::{
        await_until::await_until,
        postgres::{Postgres, url},
        runtime,
        sql::Sql,
    },
    shared_cache::make_table,
};

/// A throttle's row that nobody writes, and the word of a row that is not there.
const THROTTLE: (&str, &str) = ("throttle:nobody", NO_ROW);
const KEY: &str = "harvest-rate-cursor:google_image";
/// Well before the year 2041, until which the statement reads its clock exactly, and after this was written.
const START: Nanos = 1_800_000_000 * SECOND;
/// Values that are no cursor. Half of them would raise an error if they were cast.
const POISONS: [&str; 35] = [
    "",
    " ",
    "x",
    "NaN",
    "nan",
    "Infinity",
    "-Infinity",
    "inf",
    "1e999",
    "1e9",
    "1.8e9",
    "-1",
    "-0",
    "-1800000000",
    "+1800000000",
    " 1800000000",
    "1800000000 ",
    "1800000000\n",
    "\n1800000000",
    "1800000000s",
    "1_800_000_000",
    "1,800,000,000",
    "1.8.0",
    ".",
    ".5",
    "0x6b49d200",
    "١٨٠٠٠٠٠٠٠٠",
    "9300000000",
    "99999999999",
    "18446744073709551616",
    "1800000000000000000000000000000",
    "gASVCgAAAAAAAABHQdZ3x1gAAAAu",
    "{\"next\": 1800000000}",
    "null",
    "'; DROP TABLE shared_cache; --",
];

/// A cluster whose clock stands where it is set, and a session with it.
struct Still {
    _postgres: Postgres,
    sql: Sql,
    direct: Session,
    pooled: Session,
}

impl Still {
    fn new() -> Still {
        let postgres = Postgres::start();
        let sql = postgres.sql();
        make_table(&sql);
        sql.run(&format!(
            "SET synchronous_commit = off;
             CREATE SCHEMA still;
             CREATE TABLE still.instant AS SELECT {} AS nanos;
             CREATE FUNCTION still.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
               $$ SELECT 'epoch'::timestamptz + make_interval(secs => nanos / 1000000000)
                    + make_interval(secs => (nanos % 1000000000) / 1e9) FROM still.instant $$;
             ALTER ROLE postgres SET search_path = still, pg_catalog, public",
            START
        ));
        let direct = open(&postgres.url());
        let mut pooled = open(&postgres.socket_url());
        assert!(
            matches!(direct.reserve, Prepared::Named(_))
                && matches!(pooled.reserve, Prepared::Named(_)),
            "a direct connection is not known as such"
        );
        pooled.reserve = Prepared::Unnamed(sql::reserve(&Table::new("shared_cache"), true, true));
        Still {
            _postgres: postgres,
            sql,
            direct,
            pooled,
        }
    }

    fn set_clock(&self, now: StoreTime) {
        self.sql
            .run(&format!("UPDATE still.instant SET nanos = {}", now.0));
    }

    /// Makes the row hold `value`, or removes it.
    fn set_value(&self, value: Option<&str>) {
        match value {
            None => self.sql.run("DELETE FROM shared_cache"),
            Some(value) => self.sql.run(&format!(
                "INSERT INTO shared_cache VALUES ('{KEY}', '{v}', still.clock_timestamp())
                 ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value",
                v = value.replace('\'', "''")
            )),
        }
    }

    fn session(&self, pooled: bool) -> &Session {
        if pooled { &self.pooled } else { &self.direct }
    }

    fn reserve(&self, pooled: bool, ask: &Ask) -> Granted {
        take(self.session(pooled), KEY, ask)
    }

    /// The value, and how long the row has yet to live.
    fn row(&self) -> (String, Nanos) {
        let rows = self.sql.rows(&format!(
            "SELECT value, (extract(epoch FROM expires) * 1000000000)::int8 - nanos
             FROM shared_cache, still.instant WHERE cache_key = '{KEY}'"
        ));
        (rows[0].get(0), rows[0].get(1))
    }
}

fn open(url: &str) -> Session {
    let address = Address::parse(url).expect("the bed's URL");
    let table = Table::new("shared_cache");
    let plan = Arc::new(session::Plan {
        address,
        table: table.clone(),
        key_prefix: String::new(),
        missing: session::Missing::IsLeft,
    });
    let opened = runtime().block_on(session::open(&plan));
    opened.expect("the cluster runs").session
}

fn take(session: &Session, key: &str, ask: &Ask) -> Granted {
    try_take(session, key, ask).expect("the cursor is within the horizon")
}

/// The slots; `None` when the cursor lies beyond the horizon.
fn try_take(session: &Session, key: &str, ask: &Ask) -> Option<Granted> {
    let reply = runtime().block_on(session.reserve(key, THROTTLE, ask));
    let reply = reply.expect("a reservation never fails for what stands in the row")?;
    Some(reply.granted.expect("the pace is as it was thought to be"))
}

/// A bare decimal in nanoseconds, rounded as Postgres rounds it.
fn nanoseconds(decimal: &str) -> Nanos {
    let (whole, fraction) = decimal.split_once('.').unwrap_or((decimal, ""));
    let digits = format!("{fraction:0<10}");
    let up = Nanos::from(digits.as_bytes()[9] >= b'5');
    whole.parse::<Nanos>().expect("digits") * SECOND
        + digits[..9].parse::<Nanos>().expect("digits")
        + up
}

fn ask(slots: u32, interval: Nanos) -> Ask {
    Ask {
        slots,
        interval,
        lead: 0,
        floor: None,
        held: 0,
        horizon: cursor::horizon(interval, 3),
        disbelieved: None,
    }
}

/// What happens to the row before a reservation.
#[derive(Clone, Debug)]
enum Meddling {
    Nothing,
    /// A cache clear.
    Vanished,
    /// A foreign program wrote the cursor this far from now, with more digits than ours have.
    Moved(Nanos, u32),
    Poisoned(usize),
}

fn meddling() -> impl Strategy<Value = Meddling> {
    prop_oneof![
        4 => Just(Meddling::Nothing),
        1 => Just(Meddling::Vanished),
        2 => (-100 * SECOND..100 * SECOND, any::<u32>()).prop_map(|(by, more)| Meddling::Moved(by, more)),
        1 => (-1_800_000_000 * SECOND..7_000_000_000 * SECOND, any::<u32>())
            .prop_map(|(by, more)| Meddling::Moved(by, more)),
        2 => (0..POISONS.len()).prop_map(Meddling::Poisoned),
    ]
}

/// Microseconds by which the clock goes on (or is set back), meddling, and what is asked: through a pooler, slots,
/// interval, lead, and the floor relative to now.
type Step = (i64, Meddling, (bool, u32, Nanos, Nanos, Option<Nanos>));

fn step() -> impl Strategy<Value = Step> {
    let pause = prop_oneof![6 => 0i64..2_000_000, 1 => -90_000_000i64..90_000_000];
    let interval = prop_oneof![4 => 1i64..2 * SECOND, 1 => SECOND..86_400 * SECOND];
    let floor = prop::option::of(-100 * SECOND..100 * SECOND);
    let asked = (any::<bool>(), 1u32..100, interval, 0..SECOND, floor);
    (pause, meddling(), asked)
}

#[test]
fn the_statement_and_the_rule_give_the_same_slots_over_any_history() {
    let still = Still::new();
    let history = prop::collection::vec(step(), 1..20);
    let mut runner = TestRunner::new(Config {
        cases: 150,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&history, |steps| same_slots(&still, &steps));
    outcome.unwrap_or_else(|fault| panic!("{fault}"));
}

fn same_slots(still: &Still, steps: &[Step]) -> Result<(), TestCaseError> {
    let (mut now, mut cursor) = (StoreTime(START), None);
    still.set_value(None);
    for (pause, meddling, (pooled, slots, interval, lead, floor)) in steps {
        now = now.plus(pause * 1_000);
        still.set_clock(now);
        match meddling {
            Meddling::Nothing => {}
            Meddling::Vanished => {
                cursor = None;
                still.set_value(None);
            }
            Meddling::Moved(by, more) => {
                let at = now.plus(*by).0.max(0);
                let value = format!("{}.{:09}{more}", at / SECOND, at % SECOND);
                still.set_value(Some(&value));
                cursor = Some(StoreTime(nanoseconds(&value)));
            }
            Meddling::Poisoned(which) => {
                cursor = None;
                still.set_value(Some(POISONS[*which]));
            }
        }
        let mut ask = Ask {
            lead: *lead,
            floor: floor.map(|by| now.plus(by)),
            held: cursor::held(*interval, *slots as usize % 4),
            ..ask(*slots, *interval)
        };
        let session = still.session(*pooled);
        if cursor::reserve(cursor, now, &ask).is_none() {
            prop_assert_eq!(try_take(session, KEY, &ask), None);
            let table = Table::new("shared_cache");
            let look = session.look(&table, KEY);
            let seen = runtime().block_on(look).expect("a look").expect("a cursor");
            prop_assert_eq!((seen.doubted, seen.now), (cursor, now));
            let cursor = cursor.expect("beyond the horizon");
            let doubt = Doubt {
                cursor,
                now,
                set_back: 0,
            };
            ask = settle(doubt, &ask).0;
            if let Some(cursor) = ask.disbelieved {
                let disbelieve = session.disbelieve(&table, KEY, cursor);
                runtime().block_on(disbelieve).expect("a write");
            }
        }
        let granted = still.reserve(*pooled, &ask);
        prop_assert_eq!(Some(granted), cursor::reserve(cursor, now, &ask));
        let (value, life) = still.row();
        let bare = |byte: u8| byte.is_ascii_digit() || byte == b'.';
        prop_assert!(value.bytes().all(bare), "{value}");
        prop_assert_eq!(nanoseconds(&value), granted.end().0);
        // A row must not be culled while its cursor is still ahead.
        prop_assert!(life >= 1_800 * SECOND + ask.horizon / SECOND * SECOND);
        cursor = Some(granted.end());
    }
    Ok(())
}

#[test]
fn a_value_that_is_no_cursor_counts_as_absent_and_heals() {
    let still = Still::new();
    let now = StoreTime(START);
    still.set_clock(now);
    for pooled in [false, true] {
        for poison in POISONS {
            still.set_value(Some(poison));
            let a = ask(2, 100 * MILLISECOND);
            let first = still.reserve(pooled, &a);
            assert_eq!((first.start, first.now), (now, now), "{poison:?}");
            let second = still.reserve(pooled, &a);
            assert_eq!(second.start, first.end(), "{poison:?} did not heal");
        }
    }
}

#[test]
fn two_sessions_at_once_never_take_one_slot_twice() {
    let postgres = Postgres::start();
    make_table(&postgres.sql());
    let table = Table::new("shared_cache");
    let mut sessions = [
        open(&postgres.url()),
        open(&postgres.url()),
        open(&postgres.socket_url()),
    ];
    sessions[1].reserve = Prepared::Unnamed(sql::reserve(&table, true, true));
    let mut granted: Vec<Granted> = thread::scope(|scope| {
        let takers: Vec<_> = sessions
            .iter()
            .map(|session| {
                scope.spawn(|| {
                    let wanted = (0..400).map(|n| ask(1 + n % 3, 20_000 + i64::from(n)));
                    wanted
                        .map(|ask| take(session, KEY, &ask))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let all = takers.into_iter().map(|taker| taker.join());
        all.flat_map(|taken| taken.expect("a taker that does not fail"))
            .collect()
    });
    granted.sort_by_key(|g| g.start);
    assert_eq!(granted.len(), 1_200);
    for pair in granted.windows(2) {
        assert!(pair[1].start >= pair[0].end(), "{pair:?} overlap");
    }
}

#[test]
fn the_clock_is_read_once_the_row_is_ours() {
    let postgres = Postgres::start();
    let (sql, mut session) = (postgres.sql(), open_after_table(&postgres));
    // However slow the machine, the wait ends with the lock and not by time-out.
    let limit = format!("'{}'", sql::LOCK_TIMEOUT_MS);
    let patient = sql::reserve(&Table::new("shared_cache"), true, true).replace(&limit, "'30s'");
    let settings = session.client.batch_execute("SET lock_timeout = '30s'");
    runtime().block_on(settings).expect("a setting");
    for pooled in [false, true] {
        if pooled {
            session.reserve = Prepared::Unnamed(patient.clone());
        }
        take(&session, KEY, &ask(1, 1));
        sql.run("BEGIN; UPDATE shared_cache SET value = value");
        let (granted, at) = thread::scope(|scope| {
            let waiting = scope.spawn(|| take(&session, KEY, &ask(1, 1)));
            let watch = postgres.sql();
            await_until("the reservation waits", Duration::from_secs(5), || {
                let waiting =
                    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
                (watch.number(waiting) == 1).then_some(())
            });
            let at: SystemTime = sql.rows("SELECT clock_timestamp()")[0].get(0);
            sql.run("COMMIT");
            (waiting.join().expect("a slot after the wait"), at)
        });
        let start = SystemTime::UNIX_EPOCH + duration(granted.start.0);
        assert!(
            start >= at,
            "a slot {:?} before the row was free",
            at.duration_since(start)
        );
    }
}

#[test]
fn a_row_that_stays_locked_fails_the_call_and_moves_nothing() {
    let postgres = Postgres::start();
    let (sql, mut session) = (postgres.sql(), open_after_table(&postgres));
    for pooled in [false, true] {
        if pooled {
            session.reserve =
                Prepared::Unnamed(sql::reserve(&Table::new("shared_cache"), true, true));
        }
        let before = take(&session, KEY, &ask(1, MILLISECOND));
        sql.run("BEGIN; UPDATE shared_cache SET value = value");
        let refused = runtime().block_on(session.reserve(KEY, THROTTLE, &ask(20, SECOND)));
        sql.run("ROLLBACK");
        assert!(refused.is_err());
        let after = take(&session, KEY, &ask(1, MILLISECOND));
        assert!(after.start.since(before.start) < 10 * SECOND);
    }
}

#[test]
fn a_reservation_in_ignorance_of_the_throttle_takes_no_slot_and_brings_its_row() {
    let postgres = Postgres::start();
    let (sql, mut session) = (postgres.sql(), open_after_table(&postgres));
    let ask = ask(20, SECOND);
    for pooled in [false, true] {
        if pooled {
            session.reserve =
                Prepared::Unnamed(sql::reserve(&Table::new("shared_cache"), true, true));
        }
        sql.run("DELETE FROM shared_cache");
        let before = take(&session, KEY, &ask);
        let cursor = sql.texts("SELECT value FROM shared_cache");
        let row = "2 {\"state\": 0}";
        sql.run(&format!(
            "INSERT INTO shared_cache VALUES ('{}', '{row}', now() + interval '1 hour')",
            THROTTLE.0
        ));
        let reply = |word| {
            let call = session.reserve(KEY, (THROTTLE.0, word), &ask);
            let reply = runtime().block_on(call).expect("a reply");
            reply.expect("within the horizon")
        };
        let ignorant = reply(NO_ROW);
        assert_eq!(
            (ignorant.granted, ignorant.throttle.as_deref()),
            (None, Some(row))
        );
        let kept = format!("SELECT value FROM shared_cache WHERE cache_key = '{KEY}'");
        assert_eq!(sql.texts(&kept), cursor, "the cursor moved");
        let knowing = reply("2");
        assert_eq!(knowing.granted.map(|g| g.start), Some(before.end()));
        assert_eq!(knowing.throttle.as_deref(), Some(row));
        // Without a cursor, too.
        sql.run(&format!(
            "DELETE FROM shared_cache WHERE cache_key = '{KEY}'"
        ));
        assert_eq!(reply("4").granted, None);
        let first = reply("2").granted.expect("slots");
        assert!(first.start.since(first.now) < SECOND, "slots were lost");
    }
}

fn open_after_table(postgres: &Postgres) -> Session {
    make_table(&postgres.sql());
    open(&url(postgres.address()))
}
