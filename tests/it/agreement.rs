//! Replicas that are configured differently, or are more than they were configured for: the slowest pace holds, for all.

use std::{
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::bed::{
    client::Browser,
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
    sql::Sql,
};

const HOST: &str = "lh3.googleusercontent.com";

fn recipe(postgres: &Postgres, origin: &Origin, rate: &str) -> Recipe {
    Recipe::new()
        .store(&postgres.url())
        .destination("google_image", &["*.googleusercontent.com"], rate)
        .origin(origin)
}

/// Clients of `browsers` that come back at once, whatever they are answered, until `span` has passed.
fn insist(browsers: &[Browser], span: Duration) {
    let until = Instant::now() + span;
    thread::scope(|scope| {
        for (n, browser) in browsers.iter().enumerate() {
            scope.spawn(move || {
                for m in 0.. {
                    if Instant::now() >= until {
                        return;
                    }
                    // Refused, most of the time: what counts is what reaches the origin.
                    let _ = browser.get(&format!("/b/1?id=c{n}-{m}"));
                    thread::sleep(Duration::from_millis(20));
                }
            });
        }
    });
}

#[test]
fn a_much_lower_rate_of_another_replica_holds_in_every_part_of_the_pace() {
    for rate in ["1/min", "100/day"] {
        let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
        let fast = Replica::start(&site, "fast", &recipe(&postgres, &origin, "7.0"));
        let slow = recipe(&postgres, &origin, &format!("{rate:?}"));
        let _slow = Replica::start(&site, "slow", &slow);
        crate::outage::await_disagreement(&fast);
        let browser = fast.browser(&site, HOST);
        insist(&vec![browser; 4], Duration::from_secs(8));
        let sent = origin.timeline("c").count();
        assert_eq!(sent, 1, "sent in 8 s at {rate}");
    }
}

#[test]
fn more_replicas_than_max_replicas_keep_a_slow_pace() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&postgres, &origin, "\"3/min\"").store_key("max_replicas = 1");
    let first = Replica::start(&site, "r0", &recipe);
    let others = (1..7).map(|n| Replica::start_unready(&site, &format!("r{n}"), &recipe));
    let replicas: Vec<Replica> = std::iter::once(first).chain(others).collect();
    let browsers: Vec<Browser> = replicas.iter().map(|r| r.browser(&site, HOST)).collect();
    insist(&browsers, Duration::from_secs(15));
    let sent = origin.timeline("c");
    let over = sent.excess(3.0 / 60.0);
    assert!(sent.count() >= 1 && over < 1.1, "{sent:?}");
}

#[test]
fn many_foreign_programs_and_a_replica_keep_a_slow_pace() {
    const PROGRAMS: usize = 8;
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&postgres, &origin, "\"3/min\"")
        .store_key("max_replicas = 1")
        .store_key("foreign_fetchers = 6");
    let replica = Replica::start(&site, "r0", &recipe);
    let sql = postgres.sql();
    let slots: Vec<f64> = (0..PROGRAMS).map(|_| foreign_slot(&sql)).collect();
    let browsers = vec![replica.browser(&site, HOST); 4];
    insist(&browsers, Duration::from_secs(6));
    assert_eq!(origin.timeline("c").count(), 0, "all slots were taken");
    // Whoever asks next still comes behind them all.
    let next = foreign_slot(&sql);
    let last = slots.iter().copied().fold(0.0, f64::max);
    assert!(next >= last + 20.0 - 0.001, "{next} is not behind {last}");
}

/// One move of the cursor as the manual tells other programs to make it, at 3/min; returns its slot.
fn foreign_slot(sql: &Sql) -> f64 {
    let rows = sql.rows(
        "INSERT INTO paceline AS c (cache_key, value, expires)
         VALUES ('paceline:google_image', (extract(epoch FROM clock_timestamp()) + 20)::text, now() + interval '1 hour')
         ON CONFLICT (cache_key) DO UPDATE
            SET value = (greatest(extract(epoch FROM clock_timestamp()), c.value::numeric) + 20)::text,
                expires = now() + interval '1 hour'
         RETURNING (value::numeric - 20)::float8 AS slot",
    );
    rows[0].get(0)
}

#[test]
fn a_false_cursor_at_a_slow_pace_heals_and_the_log_says_why() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&postgres, &origin, "\"3/min\""));
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock");
    postgres.sql().run(&format!(
        "INSERT INTO paceline VALUES ('paceline:google_image', '{}', now() + interval '1 day')",
        now.as_secs() + 86_400
    ));
    let answer = replica
        .browser(&site, HOST)
        .get("/b/1?id=c0")
        .expect("an answer");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let log = replica.stderr();
    assert!(
        log.contains("programs would have to hold a slot each"),
        "{log}"
    );
}
