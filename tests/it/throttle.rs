//! An origin that asks for less is given less, by all replicas at once; one that forbids us is left alone.

use std::{thread, time::Duration};

use crate::bed::{
    await_until::await_until,
    client::{Answer, Browser},
    link::{Fault, Link},
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::{Replica, run_paceline},
};

const HOST: &str = "lh3.googleusercontent.com";
/// What others may take to know: a heartbeat, and a busy machine.
const SOON: Duration = Duration::from_millis(2_500);

/// Two replicas of one destination; with no store each is for itself.
struct Pair {
    origin: Origin,
    site: Site,
    postgres: Option<Postgres>,
    replicas: Vec<Replica>,
}

impl Pair {
    fn start(rate: &str, shared: bool, keys: &[&str]) -> Pair {
        Pair::in_store(rate, shared.then(Postgres::start), keys)
    }

    fn in_store(rate: &str, postgres: Option<Postgres>, keys: &[&str]) -> Pair {
        let (origin, site) = (Origin::tls(&[HOST]), Site::new());
        let mut recipe = Recipe::new();
        if let Some(postgres) = &postgres {
            recipe = recipe.store(&postgres.url());
        }
        recipe = recipe.destination("google_image", &["*.googleusercontent.com"], rate);
        for key in keys {
            recipe = recipe.key(key);
        }
        let recipe = recipe.origin(&origin);
        let replicas = ["r0", "r1"].map(|name| Replica::start(&site, name, &recipe));
        Pair {
            origin,
            site,
            postgres,
            replicas: replicas.into(),
        }
    }

    fn browser(&self, replica: usize) -> Browser {
        self.replicas[replica].browser(&self.site, HOST)
    }

    fn get(&self, replica: usize, target: &str) -> Answer {
        self.browser(replica).get(target).unwrap()
    }

    fn figure(&self, replica: usize, name: &str) -> Option<f64> {
        self.replicas[replica].scrape().sum(name, &[])
    }

    fn multipliers(&self) -> [Option<f64>; 2] {
        [0, 1].map(|r| self.figure(r, "paceline_throttle_multiplier"))
    }

    fn await_multipliers(&self, wanted: f64) {
        await_until(&format!("both widen by {wanted}"), SOON, || {
            (self.multipliers() == [Some(wanted); 2]).then_some(())
        });
    }

    /// Eight requests, all sent before the first is answered 429, by the replicas in turn.
    fn protest(&self, by: &[usize]) {
        let tunnels = (0..8).map(|n| self.browser(by[n % by.len()]).tunnel().unwrap());
        let tunnels: Vec<_> = tunnels.collect();
        thread::scope(|scope| {
            for (n, mut tunnel) in tunnels.into_iter().enumerate() {
                scope.spawn(move || {
                    let target = format!("/b/1?id=p{n}&status=429&delay_ms=1500");
                    assert_eq!(tunnel.get(&target).unwrap().status(), 429);
                });
            }
        });
        let volley = self.origin.timeline("p");
        assert!(
            volley.span() < Duration::from_millis(1_400),
            "the first answer came too soon"
        );
    }

    /// `count` fetches by each of `by`, eight clients each, answered 200.
    fn load(&self, name: &str, by: &[usize], count: usize) {
        thread::scope(|scope| {
            for client in 0..8 * by.len() {
                let browser = self.browser(by[client % by.len()]);
                scope.spawn(move || {
                    let mut tunnel = browser.tunnel().unwrap();
                    for n in 0..count / 8 {
                        let answer = tunnel.get(&format!("/b/1?id={name}{client}-{n}")).unwrap();
                        assert_eq!(answer.status(), 200, "{}", answer.text());
                    }
                });
            }
        });
    }
}

/// A volley of eight 429s slows both replicas to half, and twenty clean answers bring the full pace back.
fn slows_both_down_and_lets_go(by: &[usize]) {
    let pair = Pair::start("20.0", true, &["recovery_after = 20"]);
    pair.protest(by);
    pair.await_multipliers(2.0);
    // All eight were of one episode: it stays at two.
    pair.load("s", &[1], 16);
    let slowed = pair.origin.timeline("s");
    assert!(
        slowed.excess(10.0) <= 1.5,
        "{:.1} requests above 10/s",
        slowed.excess(10.0)
    );
    assert_eq!(pair.multipliers(), [Some(2.0); 2]);
    pair.load("t", &[0, 1], 8);
    pair.await_multipliers(1.0);
    pair.load("u", &[0, 1], 24);
    let again = pair.origin.timeline("u");
    assert!(
        again.rate() > 17.0,
        "{:.1}/s after the recovery",
        again.rate()
    );
    let all = pair.origin.timeline("");
    assert!(
        all.excess(20.0) <= 1.8,
        "{:.1} requests above 20/s",
        all.excess(20.0)
    );
}

#[test]
fn a_volley_of_429s_on_one_replica_slows_both_down_once_and_lets_go() {
    slows_both_down_and_lets_go(&[0]);
}

#[test]
fn a_volley_of_429s_spread_over_both_replicas_widens_once() {
    slows_both_down_and_lets_go(&[0, 1]);
}

#[test]
fn without_a_shared_store_the_other_replica_is_not_slowed_down() {
    let pair = Pair::start("20.0", false, &[]);
    pair.protest(&[0]);
    await_until("the one widens", SOON, || {
        (pair.multipliers()[0] == Some(2.0)).then_some(())
    });
    pair.load("s", &[1], 24);
    let rate = pair.origin.timeline("s").rate();
    assert!(rate > 17.0, "{rate:.1}/s: the other was slowed down");
    assert_eq!(pair.multipliers()[1], Some(1.0));
}

#[test]
fn retry_after_pauses_every_replica_and_foreign_programs_and_what_is_queued_waits_on() {
    let pair = Pair::start("20.0", true, &[]);
    // The other replica has a tunnel, and a connection to the origin.
    let mut other = pair.browser(1).tunnel().unwrap();
    assert_eq!(other.get("/b/1?id=first").unwrap().status(), 200);
    let asked = pair.get(0, "/b/1?id=stop&status=429&h=Retry-After:3");
    assert_eq!(asked.status(), 429);
    let cursor = pair.postgres.as_ref().expect("shared").sql().number(
        "SELECT ((value::numeric - extract(epoch FROM clock_timestamp())) * 1000)::int8 FROM paceline \
         WHERE cache_key = 'paceline:google_image'",
    );
    assert!(
        (2_000..=3_000).contains(&cursor),
        "the cursor is {cursor} ms ahead"
    );
    assert_eq!(other.get("/b/1?id=next").unwrap().status(), 200);
    let gap = pair.origin.timeline("next").at()[0] - pair.origin.timeline("stop").at()[0];
    assert!(
        (3.0..4.0).contains(&gap.as_secs_f64()),
        "the next request went out {gap:?} later"
    );
}

#[test]
fn nonsense_in_retry_after_is_ignored_and_a_date_counts_from_the_answers_own() {
    let pair = Pair::start("20.0", false, &["retry_after_cap = \"2s\""]);
    for (n, nonsense) in [
        "-5",
        "soon",
        "1e3",
        "Thu,%2031%20Feb%202030%2000:00:00%20GMT",
        "0",
    ]
    .iter()
    .enumerate()
    {
        let target = format!("/b/1?id=n{n}&status=503&h=Retry-After:{nonsense}");
        assert_eq!(pair.get(0, &target).status(), 503);
        assert_eq!(pair.figure(0, "paceline_paused"), Some(0.0), "{nonsense}");
    }
    // An hour, by a clock that is decades off; the cap makes two seconds of it.
    let answer = pair.get(
        0,
        "/b/1?id=d0&status=429&h=Retry-After:Tue,%2001%20Jan%202030%2001:00:00%20GMT&date=Tue,%2001%20Jan%202030%2000:00:00%20GMT",
    );
    assert_eq!(answer.status(), 429);
    assert_eq!(pair.figure(0, "paceline_paused"), Some(1.0));
    assert_eq!(pair.get(0, "/b/1?id=d1").status(), 200);
    let gap = pair.origin.timeline("d1").at()[0] - pair.origin.timeline("d0").at()[0];
    assert!((2.0..3.5).contains(&gap.as_secs_f64()), "{gap:?}");
}

#[test]
fn a_request_that_met_a_429_is_sent_again_on_a_new_slot_and_the_worker_sees_a_slow_success() {
    let pair = Pair::start("100.0", true, &["retry_throttled = 3"]);
    let browsers = [pair.browser(0), pair.browser(1)];
    thread::scope(|scope| {
        for client in 0..6 {
            let browser = &browsers[client % 2];
            scope.spawn(move || {
                let mut tunnel = browser.tunnel().unwrap();
                for n in 0..4 {
                    let answer = tunnel
                        .get(&format!("/b/1?id=c{client}-{n}&protest_every=3"))
                        .unwrap();
                    assert_eq!(answer.status(), 200, "{}", answer.text());
                }
            });
        }
    });
    let all = pair.origin.timeline("c");
    assert!(all.count() >= 24 + 24 / 3, "nothing was sent again");
    // By then every third answer has widened the pace to its sixteenth.
    let settled = all.since(all.at()[18]);
    let gap = settled.gap(0.0).expect("gaps");
    assert!(
        gap >= Duration::from_millis(145),
        "{gap:?} at a sixteenth of 100/s"
    );
    for r in [0, 1] {
        let scrape = pair.replicas[r].scrape();
        let failed = scrape.sum("paceline_requests_total", &["outcome=\"ok\""]);
        assert_eq!(failed, Some(12.0));
    }
}

#[test]
fn a_post_is_not_sent_again() {
    let pair = Pair::start("50.0", false, &["retry_throttled = 3"]);
    let mut tunnel = pair.browser(0).tunnel().unwrap();
    let answer = tunnel.upload("/b/1?id=post&status=429", 100).unwrap();
    assert_eq!(
        (answer.status(), pair.origin.timeline("post").count()),
        (429, 1)
    );
    // Nor is a GET for ever, nor beyond its deadline.
    assert_eq!(tunnel.get("/b/1?id=get&status=429").unwrap().status(), 429);
    assert_eq!(pair.origin.timeline("get").count(), 4);
    let impatient = tunnel.get_with(
        "/b/1?id=late&status=429&h=Retry-After:5",
        &["Paceline-Max-Wait: 2s"],
    );
    assert_eq!(
        impatient.unwrap().status(),
        429,
        "the origin's own answer is passed on"
    );
    assert_eq!(pair.origin.timeline("late").count(), 1);
}

#[test]
fn three_forbidden_urls_lock_the_destination_everywhere_and_one_command_opens_it() {
    let keys = ["lockout_status = [403]", "lockout_for = \"10m\""];
    let pair = Pair::start("4.0", true, &keys);
    for n in 0..6 {
        let answer = pair.get(n % 2, "/b/1?id=same&status=403");
        assert_eq!(answer.status(), 403);
    }
    assert_eq!(pair.get(1, "/b/1?id=after").status(), 200);
    // The other replica has a queue when the third URL is forbidden; it is told by two replicas, two and one.
    let began = pair.origin.elapsed();
    let waiting: Vec<Answer> = thread::scope(|scope| {
        let clients: Vec<_> = (0..40)
            .map(|n| {
                let browser = pair.browser(1);
                scope.spawn(move || browser.get(&format!("/b/1?id=w{n}")).unwrap())
            })
            .collect();
        await_until("a queue", SOON, || {
            (pair.figure(1, "paceline_queue_depth")? >= 30.0).then_some(())
        });
        let urgent = |replica: usize, url: &str| {
            let target = format!("/b/1?id={url}&status=403");
            let mut tunnel = pair.browser(replica).tunnel().unwrap();
            tunnel.get_with(&target, &["Priority: u=0"]).unwrap()
        };
        assert_eq!(urgent(0, "one").status(), 403);
        assert_eq!(urgent(1, "two").status(), 403);
        clients.into_iter().map(|c| c.join().unwrap()).collect()
    });
    let refused: Vec<&Answer> = waiting.iter().filter(|a| a.status() != 200).collect();
    assert!(
        refused.len() >= 20,
        "only {} of 40 were refused",
        refused.len()
    );
    // At once: all 40 would have taken ten seconds.
    assert!(pair.origin.elapsed() - began < Duration::from_secs(8));
    for refusal in refused {
        assert_locked(refusal);
    }
    for replica in [0, 1] {
        assert_locked(&pair.get(replica, "/b/1?id=locked"));
    }
    assert_eq!(pair.origin.timeline("locked").count(), 0);
    await_until("both show it", SOON, || {
        let locked = [0, 1].map(|r| pair.figure(r, "paceline_locked_out"));
        (locked == [Some(1.0); 2]).then_some(())
    });

    // A row that vanishes, or is overwritten, opens nothing, and is put back.
    let sql = pair.postgres.as_ref().expect("shared").sql();
    for harm in [
        "DELETE FROM paceline WHERE cache_key = 'paceline:throttle:google_image'",
        "UPDATE paceline SET value = 'garbage' WHERE cache_key = 'paceline:throttle:google_image'",
    ] {
        sql.run(harm);
        await_until("it is put back", SOON, || {
            let rows = sql.number(
                "SELECT count(*) FROM paceline WHERE cache_key = 'paceline:throttle:google_image' AND value LIKE '0.%lockout%'",
            );
            (rows == 1).then_some(())
        });
        assert_locked(&pair.get(0, "/b/1?id=locked"));
    }

    let admin = format!("http://{}", pair.replicas[0].admin_address());
    let unlocked = run_paceline(
        pair.site.path(),
        &["unlock", "google_image", "--admin", &admin],
    );
    assert!(unlocked.status.success(), "{}", unlocked.stderr);
    await_until("both are open", SOON, || {
        [0, 1]
            .iter()
            .all(|r| pair.get(*r, "/b/1?id=open").status() == 200)
            .then_some(())
    });
}

fn assert_locked(refusal: &Answer) {
    assert_eq!(refusal.status(), 503, "{}", refusal.text());
    let status = refusal.field("proxy-status").unwrap_or_default();
    assert!(status.contains("destination_unavailable"), "{status}");
    let rest: u64 = refusal
        .field("retry-after")
        .and_then(|s| s.parse().ok())
        .expect("whole seconds");
    assert!((540..=600).contains(&rest), "{rest} s");
    assert!(refusal.text().contains("403"), "{}", refusal.text());
}

#[test]
fn a_lockout_ends_by_itself_and_each_host_has_its_own_where_each_has_a_cursor() {
    let keys = [
        "scope = \"host\"",
        "lockout_status = [403]",
        "lockout_after = 2",
        "lockout_for = \"2s\"",
    ];
    let (postgres, origin, site) = (
        Postgres::start(),
        Origin::tls(&[HOST, "lh4.googleusercontent.com"]),
        Site::new(),
    );
    let mut recipe = Recipe::new().store(&postgres.url()).destination(
        "google_image",
        &["*.googleusercontent.com"],
        "20.0",
    );
    for key in keys {
        recipe = recipe.key(key);
    }
    let replica = Replica::start(&site, "r0", &recipe.origin(&origin));
    let one = replica.browser(&site, HOST);
    let other = replica.browser(&site, "lh4.googleusercontent.com");
    for n in 0..2 {
        let answer = one.get(&format!("/b/1?id=f{n}&status=403")).unwrap();
        assert_eq!(answer.status(), 403);
    }
    assert_eq!(one.get("/b/1?id=locked").unwrap().status(), 503);
    assert_eq!(other.get("/b/1?id=other").unwrap().status(), 200);
    await_until("it ends", Duration::from_secs(6), || {
        (one.get("/b/1?id=open").unwrap().status() == 200).then_some(())
    });
    let gap = origin.timeline("open").at()[0] - origin.timeline("f1").at()[0];
    assert!(gap >= Duration::from_secs(2), "after {gap:?}");
    // A pause is the whole destination's.
    let admin = format!("http://{}", replica.admin_address());
    let order = |words: &[&str]| {
        let outcome = run_paceline(site.path(), &[words, &["--admin", &admin]].concat());
        assert!(outcome.status.success(), "{}", outcome.stderr);
    };
    order(&["pause", "google_image", "1h"]);
    for browser in [&one, &other] {
        assert_eq!(browser.get("/b/1?id=paused").unwrap().status(), 503);
    }
    order(&["resume", "google_image"]);
    for browser in [&one, &other] {
        assert_eq!(browser.get("/b/1?id=resumed").unwrap().status(), 200);
    }
}

#[test]
fn a_replica_that_is_cut_off_throttles_alone_and_tells_when_it_is_back() {
    let (origin, site, postgres) = (Origin::tls(&[HOST]), Site::new(), Postgres::start());
    let link = Link::to(postgres.address());
    let recipe = |store: &str| {
        Recipe::new()
            .store(store)
            .destination("google_image", &["*.googleusercontent.com"], "20.0")
            .origin(&origin)
    };
    let near = Replica::start(&site, "r0", &recipe(&postgres.url()));
    let far = crate::bed::postgres::url(link.address());
    let far = Replica::start(&site, "r1", &recipe(&far));
    link.set(Fault::Reset);
    await_until("r1 is degraded", Duration::from_secs(5), || {
        (far.scrape().sum("paceline_degraded", &[]) == Some(1.0)).then_some(())
    });
    let answer = far
        .browser(&site, HOST)
        .get("/b/1?id=p&status=429")
        .unwrap();
    assert_eq!(answer.status(), 429);
    let multiplier = |r: &Replica| r.scrape().sum("paceline_throttle_multiplier", &[]);
    assert_eq!(
        (multiplier(&far), multiplier(&near)),
        (Some(2.0), Some(1.0))
    );
    link.set(Fault::Pass);
    await_until("r0 hears of it", Duration::from_secs(10), || {
        (multiplier(&near) == Some(2.0)).then_some(())
    });
    assert_eq!(multiplier(&far), Some(2.0));
}

const ROW: &str = "paceline:throttle:google_image";

/// A table of before the replicas, in which the throttle's row holds NULL and `trigger` does what it does at each write.
fn odd_pair(trigger: &str) -> Pair {
    let postgres = Postgres::start();
    postgres.sql().run(&format!(
        "CREATE TABLE paceline (cache_key varchar(255) PRIMARY KEY, value text, expires timestamptz);
         INSERT INTO paceline VALUES ('{ROW}', NULL, NULL);
         CREATE SEQUENCE writes;
         CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN IF NEW.cache_key = '{ROW}' THEN PERFORM nextval('writes'); {trigger} END IF; RETURN NEW; END $$;
         CREATE TRIGGER odd BEFORE INSERT OR UPDATE ON paceline FOR EACH ROW EXECUTE FUNCTION odd()"
    ));
    Pair::in_store("20.0", Some(postgres), &[])
}

impl Pair {
    /// Transactions in the store while both replicas are kept busy for a second and a half or longer.
    fn transactions(&self, name: &str) -> i64 {
        let sql = self.postgres.as_ref().expect("shared").sql();
        let count = || {
            sql.run("SELECT pg_stat_clear_snapshot()");
            sql.number("SELECT xact_commit FROM pg_stat_database WHERE datname = 'postgres'")
        };
        let before = count();
        self.load(name, &[0, 1], 8);
        count() - before
    }
}

#[test]
fn a_row_that_holds_null_counts_as_absent_and_heals() {
    let pair = odd_pair("");
    assert_eq!(pair.get(0, "/b/1?id=p&status=429").status(), 429);
    pair.await_multipliers(2.0);
    let sql = pair.postgres.as_ref().expect("shared").sql();
    let healed =
        format!("SELECT count(*) FROM paceline WHERE cache_key = '{ROW}' AND value LIKE '2 %'");
    assert_eq!(sql.number(&healed), 1);
    let calls = pair.transactions("s");
    assert!(calls < 400, "{calls} transactions for 16 requests");
    let writes = sql.number("SELECT last_value FROM writes");
    assert!(writes <= 40, "{writes} writes");
}

#[test]
fn whatever_becomes_of_a_write_it_is_not_made_all_the_time() {
    for trigger in [
        "NEW.value := NULL;",
        "NEW.value := 'garbage ' || nextval('writes');",
        "NEW.value := NEW.value || ' ';",
        "RETURN NULL;",
    ] {
        let pair = odd_pair(trigger);
        assert_eq!(pair.get(0, "/b/1?id=p&status=429").status(), 429);
        let sql = pair.postgres.as_ref().expect("shared").sql();
        let before = sql.number("SELECT last_value FROM writes");
        let calls = pair.transactions("s");
        let writes = sql.number("SELECT last_value FROM writes") - before;
        // Two replicas, two seconds and more; a busy machine takes longer and writes more.
        assert!(
            writes <= 120 && calls < 600,
            "{trigger} {writes} writes, {calls} transactions"
        );
    }
}
