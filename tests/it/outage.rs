//! The ceiling while Postgres is away: for all, for some, for one cursor; and the way back.
//!
//! Three replicas at 12/s have 4/s each for their own. A replica that loses the store sends nothing for about four
//! seconds, until the others must have noticed: the spans below leave that out.

pub mod fleet;
mod members;
mod poisons;
mod uneven;

use std::time::Duration;

use crate::bed::{
    await_until::await_until,
    link::{Fault, Link},
    postgres::{Postgres, url},
    replica::Replica,
};

use self::fleet::{CEILING, CURSOR, Fleet, await_metric, pass};

/// From the loss of the store until all must be sending on their shares: a heartbeat may have been under way.
const WAITING: f64 = 6.3;
/// From the return until the pace is full again.
const BACK: f64 = 4.0;

/// Waits until a replica shows that another is configured otherwise.
pub fn await_disagreement(replica: &Replica) {
    let labels = &["destination=\"google_image\""];
    await_metric(replica, "paceline_config_disagreement", labels, 1.0);
}

fn three(store: &str) -> Vec<String> {
    vec![store.to_owned(); 3]
}

fn all(replicas: &[Replica]) -> Vec<&Replica> {
    replicas.iter().collect()
}

#[test]
fn stopped_and_frozen_postgres_costs_neither_the_ceiling_nor_the_pace_nor_a_fetch() {
    let (mut postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let ((away, back), failures) = fleet.under_load(&all(&replicas), || {
        pass(4.0);
        let stopped = fleet.now();
        postgres.stop_hard();
        pass(18.0);
        let started = fleet.now();
        postgres.resume();
        let answered = fleet.now();
        pass(8.0);
        let frozen = fleet.now();
        postgres.freeze();
        pass(14.0);
        let thawed = fleet.now();
        postgres.thaw();
        pass(8.0);
        let end = fleet.now();
        let away = [stopped + WAITING..started, frozen + WAITING..thawed];
        (away, [answered + BACK..frozen, thawed + BACK..end])
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    for span in away {
        let (rate, seen) = (fleet.rate(span.clone()), fleet.seen(span));
        assert!(rate >= 0.85 * CEILING, "{rate:.2}/s without the store");
        assert!(seen.busiest_second() <= 13, "{}", seen.busiest_second());
    }
    for span in back {
        let (rate, seen) = (fleet.rate(span.clone()), fleet.seen(span));
        assert!(rate >= 0.95 * CEILING, "{rate:.2}/s after the return");
        assert!(seen.busiest_second() <= 13, "{}", seen.busiest_second());
    }
    for replica in &replicas {
        let lines = replica.stderr();
        let away = lines
            .lines()
            .filter(|l| l.contains("store lost") || l.contains("store away"))
            .count();
        assert!(
            (2..=8).contains(&away),
            "{away} lines about two losses: {lines}"
        );
        assert!(
            replica
                .scrape()
                .sum("paceline_dispatches_total", &["mode=\"degraded\""])
                > Some(60.0)
        );
    }
}

#[test]
fn one_of_three_cut_off_keeps_sending_and_the_others_leave_it_room() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let link = Link::to(postgres.address());
    let stores = [postgres.url(), postgres.url(), url(link.address())];
    let replicas = fleet.start_each(&stores);
    let (spans, failures) = fleet.under_load(&all(&replicas), || {
        pass(3.0);
        [Fault::Reset, Fault::Stall].map(|fault| {
            let cut = fleet.now();
            link.set(fault);
            pass(15.0);
            let healed = fleet.now();
            link.set(Fault::Pass);
            pass(7.0);
            (cut + WAITING..healed, healed + BACK..healed + 7.0)
        })
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    for (cut, healed) in spans {
        let (lone, together) = (fleet.rate_of("r2", cut.clone()), fleet.rate(cut));
        assert!(
            lone >= 0.85 * CEILING / 3.0,
            "the lone one sent {lone:.2}/s"
        );
        assert!(
            (0.85 * CEILING..=1.02 * CEILING).contains(&together),
            "{together:.2}/s together"
        );
        let rate = fleet.rate(healed);
        assert!(rate >= 0.95 * CEILING, "{rate:.2}/s after healing");
    }
}

#[test]
fn replicas_started_without_the_store_serve_on_their_share_and_join_when_it_comes() {
    let (mut postgres, fleet) = (Postgres::start(), Fleet::new());
    postgres.stop();
    let replicas: Vec<Replica> = (0..3)
        .map(|n| {
            Replica::start_unready(
                &fleet.site,
                &format!("r{n}"),
                &fleet.recipe(&postgres.url()),
            )
        })
        .collect();
    let ((away, back), failures) = fleet.under_load(&all(&replicas), || {
        for replica in &replicas {
            replica.await_ready();
            await_metric(replica, "paceline_degraded", &[], 1.0);
        }
        pass(5.0);
        let from = fleet.now();
        pass(8.0);
        let started = fleet.now();
        postgres.resume();
        let answered = fleet.now();
        pass(7.0);
        (from..started, answered + BACK..answered + 7.0)
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let rate = fleet.rate(away);
    assert!(
        (0.85 * CEILING..=1.02 * CEILING).contains(&rate),
        "{rate:.2}/s without the store"
    );
    let rate = fleet.rate(back);
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s with it");
    for replica in &replicas {
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 3.0);
    }
}

#[test]
fn a_killed_replica_hurts_no_clients_of_others_and_is_soon_back_under_its_name() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let mut replicas = fleet.start_each(&three(&postgres.url()));
    let victim = replicas.pop().expect("three replicas");
    let (victims, survivors) = (fleet.browser(&victim), all(&replicas));
    let (restarted, failures) = fleet.under_load(&survivors, || {
        // A full queue, whose clients see it die.
        let mut queue: Vec<_> = (0..40).map(|_| victims.tunnel().unwrap()).collect();
        for (n, tunnel) in queue.iter_mut().enumerate() {
            tunnel
                .ask("GET", &format!("/b/1?id=r2-q-{n}"), &[])
                .unwrap();
        }
        pass(3.0);
        drop(victim);
        pass(1.0);
        let restarted = fleet.now();
        let back = fleet.start("r2", &postgres.url());
        // Its clients come back too.
        let browser = fleet.browser(&back);
        let mut queue: Vec<_> = (0..30).map(|_| browser.tunnel().unwrap()).collect();
        for (n, tunnel) in queue.iter_mut().enumerate() {
            tunnel
                .ask("GET", &format!("/b/1?id=r2-b-{n}"), &[])
                .unwrap();
        }
        pass((restarted + 6.0 - fleet.now()).max(0.0));
        await_metric(&back, "paceline_replicas", &["state=\"live\""], 3.0);
        await_metric(&back, "paceline_replicas", &["state=\"silent\""], 0.0);
        restarted
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let span = restarted + 3.0..restarted + 6.0;
    let (rate, own) = (fleet.rate(span.clone()), fleet.rate_of("r2", span));
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s in all");
    assert!(own >= 0.25 * CEILING, "{own:.2}/s by the one that is back");
}

#[test]
fn a_promoted_standby_takes_over_without_a_failure_or_a_burst() {
    let (mut primary, fleet) = (Postgres::start(), Fleet::new());
    let standby = primary.standby();
    // The standby first: while it only reads, it has to be passed over.
    let store = format!(
        "postgres://postgres@{},{}/postgres?target_session_attrs=read-write",
        standby.address(),
        primary.address()
    );
    let replicas = fleet.start_each(&three(&store));
    for replica in &replicas {
        await_metric(replica, "paceline_degraded", &[], 0.0);
    }
    let (promoted, failures) = fleet.under_load(&all(&replicas), || {
        pass(4.0);
        primary.stop_hard();
        standby.sql().run("SELECT pg_promote()");
        let promoted = fleet.now();
        pass(8.0);
        promoted
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let rate = fleet.rate(promoted + BACK..promoted + 8.0);
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s after the failover");
    for replica in &replicas {
        await_metric(replica, "paceline_replicas", &["state=\"live\""], 3.0);
    }
}

#[test]
fn a_store_200_ms_away_yields_all_of_the_ceiling() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let link = Link::to(postgres.address());
    let replicas = fleet.start_each(&three(&url(link.address())));
    link.set(Fault::Delay(Duration::from_millis(100)));
    // By three, and by one: its own slots must bridge the round trip.
    for busy in [all(&replicas), vec![&replicas[0]]] {
        let (span, failures) = fleet.under_load(&busy, || {
            // The round trip is smoothed over some calls.
            pass(6.0);
            let from = fleet.now();
            pass(12.0);
            from..fleet.now()
        });
        assert_eq!(failures, Vec::<String>::new());
        let (rate, seen, by) = (fleet.rate(span.clone()), fleet.seen(span), busy.len());
        assert!(rate >= 0.95 * CEILING, "{rate:.2}/s by {by}");
        assert!(
            seen.busiest_second() <= 13,
            "{} by {by}",
            seen.busiest_second()
        );
    }
}

#[test]
fn a_cursor_locked_by_another_session_is_left_for_the_shares() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let (holder, watcher) = (postgres.sql(), postgres.sql());
    let ((locked, freed), failures) = fleet.under_load(&all(&replicas), || {
        pass(3.0);
        holder.run(&format!(
            "BEGIN; SELECT 1 FROM paceline WHERE cache_key = '{CURSOR}' FOR UPDATE"
        ));
        let locked = fleet.now();
        let mut most = 0;
        while fleet.now() < locked + 12.0 {
            let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
            most = most.max(watcher.number(waiting));
            pass(0.1);
        }
        holder.run("ROLLBACK");
        let freed = fleet.now();
        assert!((1..=3).contains(&most), "{most} statements waited at once");
        pass(7.0);
        (locked, freed)
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    // A second until it is told, one until it is heard, and the waiting time.
    let rate = fleet.rate(locked + 7.5..freed);
    assert!(rate >= 0.8 * CEILING, "{rate:.2}/s while locked");
    let rate = fleet.rate(freed + BACK..freed + 7.0);
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s after the lock");
}

#[test]
fn a_locked_table_is_a_store_away() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let replicas = fleet.start_each(&three(&postgres.url()));
    let holder = postgres.sql();
    let ((locked, freed), failures) = fleet.under_load(&all(&replicas), || {
        pass(3.0);
        holder.run("BEGIN; LOCK TABLE paceline");
        let locked = fleet.now();
        pass(12.0);
        holder.run("ROLLBACK");
        let freed = fleet.now();
        pass(7.0);
        (locked, freed)
    });
    assert_eq!(failures, Vec::<String>::new());
    fleet.check_the_ceiling();
    let rate = fleet.rate(locked + 7.5..freed);
    assert!(rate >= 0.8 * CEILING, "{rate:.2}/s while locked");
    let rate = fleet.rate(freed + BACK..freed + 7.0);
    assert!(rate >= 0.95 * CEILING, "{rate:.2}/s after the lock");
}

#[test]
fn a_flood_during_an_outage_costs_one_connection_attempt_a_second() {
    let (postgres, fleet) = (Postgres::start(), Fleet::new());
    let link = Link::to(postgres.address());
    let recipe = fleet
        .recipe(&url(link.address()))
        .proxy("max_wait = \"10m\"");
    let replica = Replica::start(&fleet.site, "r0", &recipe);
    // This process holds 2,000 connections.
    paceline::app::raise_file_limit();
    link.set(Fault::Reset);
    let (before, from) = (link.accepted(), fleet.now());
    let target = format!("https://{}/b/1", fleet::HOST);
    let waiting: Vec<_> = (0..2_000)
        .map(|_| {
            let mut session = replica.session(fleet::HOST);
            session.ask("GET", &target, &[]).unwrap();
            session
        })
        .collect();
    let queue = || replica.scrape().sum("paceline_queue_depth", &[]);
    await_until("2,000 wait", Duration::from_secs(20), || {
        (queue() >= Some(1_900.0)).then_some(())
    });
    pass((from + 10.0 - fleet.now()).max(0.0));
    let (attempts, span) = (link.accepted() - before, fleet.now() - from);
    assert!(
        attempts as f64 <= span + 1.0,
        "{attempts} attempts in {span:.1} s"
    );
    assert!(attempts >= 5, "only {attempts} attempts in {span:.1} s");
    drop(waiting);
}
