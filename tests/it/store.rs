//! Postgres as it is found: TLS, several hosts, a pooler in between, replies that get lost, a server that is away.

use std::{thread, time::Duration};

use crate::{
    bed::{
        await_until::await_until,
        bouncer::Bouncer,
        certs::TestCa,
        client::Browser,
        free_address,
        link::{Fault, Link},
        origin::Origin,
        postgres::{Postgres, url},
        recipe::{Recipe, Site},
        replica::{Replica, run_paceline},
    },
    shared_cache::make_table,
};

const HOST: &str = "lh3.googleusercontent.com";

fn recipe(origin: &Origin, store: &str, rate: &str) -> Recipe {
    Recipe::new()
        .store(store)
        .destination("google_image", &["*.googleusercontent.com"], rate)
        .origin(origin)
}

/// `workers` clients, each with one tunnel and `count` fetches one after the other, all of which must be answered 200.
fn fetch(browsers: &[Browser], workers: usize, count: usize) {
    thread::scope(|scope| {
        for n in 0..workers {
            let browser = &browsers[n % browsers.len()];
            scope.spawn(move || {
                let mut tunnel = browser.tunnel().unwrap();
                for m in 0..count {
                    let answer = tunnel.get(&format!("/b/1?id=w{n}-{m}")).unwrap();
                    assert_eq!(answer.status(), 200, "{}", answer.text());
                }
            });
        }
    });
}

#[test]
fn nearly_all_updates_are_hot_in_a_table_with_an_index_on_expires() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let sql = postgres.sql();
    make_table(&sql);
    let recipe = recipe(&origin, &postgres.url(), "200.0")
        .store_key("table = \"shared_cache\"\nkey_prefix = \"harvest-rate-cursor:\"");
    let replica = Replica::start(&site, "r0", &recipe);
    fetch(&[replica.browser(&site, HOST)], 8, 75);
    assert_eq!(origin.timeline("w").count(), 600);
    // Postgres reports its counts about once a second. At this rate a reservation may take several slots, so there may
    // be fewer writes than fetches; the first one inserts.
    let (updates, hot) = await_until("the updates are counted", Duration::from_secs(10), || {
        let count = |what: &str| sql.number(&format!("SELECT {what} FROM pg_stat_user_tables"));
        let (updates, hot) = (count("n_tup_upd"), count("n_tup_hot_upd"));
        let writes = (updates + count("n_tup_ins")) as f64;
        let reservations = replica
            .scrape()
            .sum("paceline_reservation_seconds_count", &[])?;
        (writes >= reservations).then_some((updates, hot))
    });
    assert!(updates >= 100, "only {updates} updates: too few to tell");
    assert!(
        hot as f64 >= 0.99 * updates as f64,
        "{hot} of {updates} updates were HOT"
    );
}

#[test]
fn verify_full_encrypts_and_refuses_a_server_that_cannot_prove_its_name() {
    let ca = TestCa::new();
    let postgres = Postgres::start_with_tls(&ca.issue(&["localhost"]));
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let right = site.write("right.pem", ca.root());
    let wrong = site.write("wrong.pem", TestCa::new().root());
    let port = postgres.address().port();
    let store = |host: &str, root: &std::path::Path| {
        format!(
            "postgres://postgres@{host}:{port}/postgres?sslmode=verify-full&sslrootcert={}",
            root.display()
        )
    };

    let replica = Replica::start(
        &site,
        "r0",
        &recipe(&origin, &store("localhost", &right), "50.0"),
    );
    fetch(&[replica.browser(&site, HOST)], 2, 5);
    assert!(
        postgres
            .sql()
            .number("SELECT count(*) FROM pg_stat_ssl WHERE ssl")
            > 0,
        "the connection is in clear text"
    );

    for (case, url) in [
        ("wrong root", store("localhost", &wrong)),
        ("wrong name", store("127.0.0.1", &right)),
    ] {
        let config = recipe(&origin, &url, "50.0").write(&site, "refused");
        let check = run_paceline(
            site.path(),
            &["check", "--config", &config.to_string_lossy()],
        );
        let said = check.stderr;
        assert_eq!(check.status.code(), Some(1), "{case}: {said}");
        assert!(said.contains("certificate"), "{case}: {said}");
    }
}

#[test]
fn a_dead_host_in_the_url_is_passed_over() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let store = format!(
        "postgres://postgres@{},{}/postgres",
        free_address(),
        postgres.address()
    );
    let replica = Replica::start(&site, "r0", &recipe(&origin, &store, "50.0"));
    fetch(&[replica.browser(&site, HOST)], 2, 5);
    assert_eq!(
        replica
            .scrape()
            .sum("paceline_dispatches_total", &["mode=\"shared\""]),
        Some(10.0)
    );
}

#[test]
fn two_replicas_behind_a_transaction_pooler_keep_one_ceiling() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let bouncer = Bouncer::before(&postgres);
    let recipe = recipe(&origin, &bouncer.url(), "20.0");
    let replicas: Vec<Replica> = (0..2)
        .map(|n| Replica::start(&site, &format!("r{n}"), &recipe))
        .collect();
    let browsers: Vec<Browser> = replicas
        .iter()
        .map(|replica| replica.browser(&site, HOST))
        .collect();
    fetch(&browsers, 6, 14);
    let timeline = origin.timeline("w");
    assert!(
        (19.5..=20.1).contains(&timeline.rate()),
        "{:.3}/s",
        timeline.rate()
    );
    assert!(timeline.busiest_second() <= 21);
    for replica in &replicas {
        let scrape = replica.scrape();
        assert_eq!(
            scrape
                .sum("paceline_store_errors_total", &[])
                .unwrap_or(0.0),
            0.0,
            "{}",
            replica.stderr()
        );
    }
}

#[test]
fn a_lost_reply_never_yields_a_slot_used_twice() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let link = Link::to(postgres.address());
    let replica = Replica::start(&site, "r0", &recipe(&origin, &url(link.address()), "10.0"));
    let browser = [replica.browser(&site, HOST)];
    thread::scope(|scope| {
        let fetching = scope.spawn(|| fetch(&browser, 4, 15));
        for served in [10, 25, 40] {
            await_until("fetches go on", Duration::from_secs(20), || {
                (origin.timeline("w").count() >= served || fetching.is_finished()).then_some(())
            });
            // Long enough for the next reservations to be made, their replies to be lost, and the loss to be noticed.
            link.set(Fault::LoseReplies);
            thread::sleep(Duration::from_millis(300));
            link.set(Fault::Reset);
            thread::sleep(Duration::from_millis(50));
            link.set(Fault::Pass);
        }
    });
    assert!(
        replica.scrape().sum("paceline_store_errors_total", &[]) > Some(0.0),
        "no reply was lost"
    );
    let timeline = origin.timeline("w");
    assert_eq!((timeline.count(), origin.duplicates()), (60, vec![]));
    // Two requests on one slot would be a gap of next to nothing. What shortens an honest gap of 100 ms is the grace
    // (25 ms) and a new session's first, wider bounds of the store's clock.
    let smallest = timeline.gap(0.0).unwrap_or_default();
    assert!(
        smallest >= Duration::from_millis(45),
        "two dispatches {smallest:?} apart"
    );
}

#[test]
fn without_its_store_a_replica_serves_on_its_share_and_joins_when_the_store_comes() {
    let mut postgres = Postgres::start();
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    postgres.stop();
    let store = postgres.url().replace("postgres@", "postgres:hunter2@");
    let recipe = recipe(&origin, &store, "12.0");

    let config = recipe.write(&site, "checked");
    let check = run_paceline(
        site.path(),
        &["check", "--config", &config.to_string_lossy()],
    );
    let said = check.stderr;
    assert_eq!(check.status.code(), Some(1), "{said}");
    assert!(
        said.contains("store.url") && !said.contains("hunter2"),
        "{said}"
    );

    let replica = Replica::start(&site, "r0", &recipe);
    let browser = [replica.browser(&site, HOST)];
    fetch(&browser, 4, 3);
    // One of three shares of 12/s.
    let rate = origin.timeline("w").rate();
    assert!(
        (3.8..=4.05).contains(&rate),
        "{rate:.3}/s on a third of 12/s"
    );
    let scrape = replica.scrape();
    assert_eq!(scrape.sum("paceline_degraded", &[]), Some(1.0));
    assert_eq!(scrape.sum("paceline_store_up", &[]), Some(0.0));
    assert_eq!(
        scrape.sum("paceline_dispatches_total", &["mode=\"degraded\""]),
        Some(12.0)
    );

    postgres.resume();
    await_until("the store is used", Duration::from_secs(5), || {
        (replica.scrape().sum("paceline_degraded", &[]) == Some(0.0)).then_some(())
    });
    assert_eq!(browser[0].get("/b/1?id=late").unwrap().status(), 200);
    assert!(
        replica
            .scrape()
            .sum("paceline_dispatches_total", &["mode=\"shared\""])
            >= Some(1.0)
    );
    assert!(
        !replica.stderr().contains("hunter2"),
        "the password is in the log"
    );
}

#[test]
fn a_user_that_may_not_make_the_table_is_told_what_to_grant() {
    let (postgres, site, origin) = (Postgres::start(), Site::new(), Origin::tls(&[HOST]));
    let sql = postgres.sql();
    sql.run("CREATE ROLE lodger LOGIN");
    sql.run("REVOKE CREATE ON SCHEMA public FROM PUBLIC");
    let url = postgres.url().replacen("postgres@", "lodger@", 1);
    let config = recipe(&origin, &url, "7.0").write(&site, "r");
    let config = config.to_string_lossy();
    let check = |code| {
        let ended = run_paceline(site.path(), &["check", "--config", &config]);
        let said = ended.text() + &ended.stderr;
        assert_eq!(ended.status.code(), Some(code), "{said}");
        said
    };
    let said = check(1);
    for words in [
        "\"lodger\" may not make it",
        "CREATE ON SCHEMA public",
        "OWNER",
    ] {
        assert!(said.contains(words), "{words} in {said}");
    }
    sql.run("REVOKE ALL ON SCHEMA public FROM PUBLIC");
    assert!(check(1).contains("no schema"));
    sql.run("GRANT USAGE, CREATE ON SCHEMA public TO lodger");
    assert!(check(0).contains("will be made at the first start"));
}
