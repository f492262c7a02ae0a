//! SIGHUP: what changes in a running replica, what does not, and what becomes of the requests and tunnels that are open
//! meanwhile.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use crate::bed::{
    await_until::await_until,
    certs::client_tls,
    client::{Browser, Session},
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::{Replica, run_paceline},
    timeline::Timeline,
};

const HOST: &str = "lh3.googleusercontent.com";
const PATIENCE: Duration = Duration::from_secs(10);
/// A tunnel that new rules do not allow is closed within this time.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

fn recipe(origin: &Origin, rate: &str) -> Recipe {
    Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], rate)
        .origin(origin)
}

fn metric(replica: &Replica, name: &str) -> Option<f64> {
    replica.scrape().sum(name, &[])
}

/// Keeps the browsers' replicas busy with so many clients each while `act` runs; whatever was answered that is not 200
/// is returned.
fn under_load<T>(
    browsers: &[Browser],
    clients: usize,
    act: impl FnOnce() -> T,
) -> (T, Vec<String>) {
    let (done, ids) = (AtomicBool::new(false), AtomicUsize::new(0));
    let fetch = |browser: &Browser| -> Result<(), String> {
        let mut tunnel = browser.tunnel().map_err(|e| e.to_string())?;
        while !done.load(Relaxed) {
            let id = ids.fetch_add(1, Relaxed);
            let answer = tunnel.get(&format!("/b/1?id=load{id}"));
            let answer = answer.map_err(|e| e.to_string())?;
            if answer.status() != 200 {
                return Err(format!("{} {}", answer.status(), answer.text()));
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let (fetch, each) = (&fetch, |b| (0..clients).map(move |_| b));
        let threads: Vec<_> = browsers
            .iter()
            .flat_map(each)
            .map(|browser| scope.spawn(move || fetch(browser)))
            .collect();
        // A failed claim must not leave the clients running, or the scope would wait for them for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        done.store(true, Relaxed);
        let failures = threads.into_iter().filter_map(|t| t.join().ok()?.err());
        let failures = failures.collect();
        match outcome {
            Ok(value) => (value, failures),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Waits until the origin has seen so many more requests; returns what it saw from `from` on.
fn await_arrivals(origin: &Origin, from: Duration, more: usize) -> Timeline {
    await_until("the origin is asked", PATIENCE, || {
        let seen = origin.timeline("load").since(from);
        (seen.count() >= more).then_some(seen)
    })
}

/// How long the peer keeps the connection open from now on.
fn closed_after(mut session: Session) -> Duration {
    let began = Instant::now();
    match session.rest() {
        // Of a tunnel that is not read, nobody but the origin could end the TLS in good order.
        Err(e) if e.kind() != io::ErrorKind::UnexpectedEof => panic!("not closed in time: {e}"),
        _ => {}
    }
    began.elapsed()
}

#[test]
fn a_new_rate_is_in_force_within_two_intervals_both_ways_and_no_request_fails() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let mut replica = Replica::start(&site, "r0", &recipe(&origin, "7.0"));
    let browsers = [replica.browser(&site, HOST)];
    let ((), failures) = under_load(&browsers, 6, || {
        await_arrivals(&origin, origin.elapsed(), 8);
        let asked = origin.elapsed();
        replica.reload(&site, "r0", &recipe(&origin, "3.0"));
        let slower = origin.elapsed() + Duration::from_secs_f64(2.0 / 3.0);
        let seen = await_arrivals(&origin, slower, 8);
        let gap = seen.gap(0.0).unwrap();
        assert!(gap >= Duration::from_millis(300), "3/s after {gap:?}");
        assert!(seen.rate() >= 2.9, "{:.2}/s", seen.rate());

        replica.reload(&site, "r0", &recipe(&origin, "7.0"));
        let faster = origin.elapsed() + Duration::from_secs_f64(2.0 / 3.0);
        let seen = await_arrivals(&origin, faster, 15);
        assert!((6.8..=7.2).contains(&seen.rate()), "{:.2}/s", seen.rate());
        // Nothing was made up for: not at the change, and not after it.
        let excess = origin.timeline("load").since(asked).excess(7.0);
        assert!(excess <= 1.3, "{excess:.2} requests at once");
    });
    assert_eq!(failures, Vec::<String>::new());
    assert_eq!(metric(&replica, "paceline_ceiling_rate"), Some(7.0));
    let log = replica.stderr();
    assert!(
        log.contains("destination google_image: rate 7/s -> 3/s"),
        "{log}"
    );
}

#[test]
fn the_others_hold_to_a_lower_rate_before_they_have_read_the_file_and_to_a_higher_one_once_all_have()
 {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let at = |rate| recipe(&origin, rate).store(&postgres.url());
    let mut replicas = ["r0", "r1"].map(|name| Replica::start(&site, name, &at("16.0")));
    let browsers = [0, 1].map(|n: usize| replicas[n].browser(&site, HOST));
    let ((), failures) = under_load(&browsers, 8, || {
        await_arrivals(&origin, origin.elapsed(), 16);
        replicas[0].reload(&site, "r0", &at("8.0"));
        for replica in &replicas {
            await_until("both hold to the lower rate", PATIENCE, || {
                (metric(replica, "paceline_effective_rate") == Some(8.0)).then_some(())
            });
        }
        assert_eq!(
            metric(&replicas[1], "paceline_config_disagreement"),
            Some(1.0)
        );
        let settled = origin.elapsed() + Duration::from_millis(250);
        let seen = await_arrivals(&origin, settled, 17);
        assert!((7.7..=8.15).contains(&seen.rate()), "{:.2}/s", seen.rate());

        replicas[0].reload(&site, "r0", &at("16.0"));
        for replica in &replicas {
            await_until("both are back", PATIENCE, || {
                let agreed = metric(replica, "paceline_config_disagreement") == Some(0.0);
                (agreed && metric(replica, "paceline_effective_rate") == Some(16.0)).then_some(())
            });
        }
        let settled = origin.elapsed() + Duration::from_millis(250);
        let seen = await_arrivals(&origin, settled, 33);
        assert!((15.2..=16.3).contains(&seen.rate()), "{:.2}/s", seen.rate());
    });
    assert_eq!(failures, Vec::<String>::new());
}

#[test]
fn the_cursor_in_memory_outlives_a_reload_and_even_the_destinations_absence() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let with = recipe(&origin, "\"30/min\"");
    let without = Recipe::new()
        .destination("other", &["other.test"], "7.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &with);
    let browser = replica.browser(&site, HOST);
    assert_eq!(browser.get("/b/1?id=load1").unwrap().status(), 200);
    replica.read_again();
    replica.reload(&site, "r0", &without);
    let gone = &["destination=\"google_image\""];
    assert_eq!(replica.scrape().sum("paceline_ceiling_rate", gone), None);
    replica.reload(&site, "r0", &with);
    assert_eq!(browser.get("/b/1?id=load2").unwrap().status(), 200);
    let gap = origin.timeline("load").span();
    assert!(
        gap >= Duration::from_millis(1_950),
        "the next one after {gap:?}"
    );
}

#[test]
fn a_bad_file_changes_nothing_and_each_fault_is_in_the_log_with_its_line() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let good = recipe(&origin, "50.0");
    let mut replica = Replica::start(&site, "r0", &good);
    let read_at = metric(
        &replica,
        "paceline_config_last_reload_success_timestamp_seconds",
    );
    let browser = replica.browser(&site, HOST);
    for (bad, faults) in [
        (
            recipe(&origin, "-1.0").key("colour = 1"),
            &[".rate", "colour"][..],
        ),
        (recipe(&origin, "9.0").proxy("max_wait = 25"), &["max_wait"]),
        (recipe(&origin, "9.0").key("tls = \"opaque\""), &["opaque"]),
    ] {
        let before = replica.stderr().len();
        replica.reload(&site, "r0", &bad);
        let said = replica.stderr().split_off(before);
        assert!(said.contains("configuration not reloaded"), "{said}");
        for fault in faults {
            let found = said
                .lines()
                .any(|l| l.contains("ERROR") && l.contains(fault));
            assert!(found, "no line on {fault}: {said}");
        }
        assert_eq!(metric(&replica, "paceline_ceiling_rate"), Some(50.0));
        assert_eq!(
            metric(&replica, "paceline_config_last_reload_successful"),
            Some(0.0)
        );
        assert_eq!(browser.get("/b/1?id=still").unwrap().status(), 200);
    }
    assert_eq!(
        metric(
            &replica,
            "paceline_config_last_reload_success_timestamp_seconds"
        ),
        read_at
    );
    let before = replica.stderr().len();
    std::fs::remove_file(site.path().join("r0.toml")).expect("the file was there");
    replica.read_again();
    let said = replica.stderr().split_off(before);
    assert!(
        said.contains("r0.toml: is not there") && said.contains("stays in force"),
        "{said}"
    );
    assert_eq!(metric(&replica, "paceline_ceiling_rate"), Some(50.0));
    let before = replica.stderr().len();
    replica.reload(&site, "r0", &good);
    let said = replica.stderr().split_off(before);
    assert!(said.contains("nothing in it has changed"), "{said}");
    assert_eq!(
        metric(&replica, "paceline_config_last_reload_successful"),
        Some(1.0)
    );
    assert!(
        metric(
            &replica,
            "paceline_config_last_reload_success_timestamp_seconds"
        ) > read_at
    );
}

#[test]
fn a_destination_that_is_added_governs_new_tunnels_and_old_ones_are_closed() {
    let (origin, site) = (Origin::tls(&[HOST, "added.test"]), Site::new());
    let before = recipe(&origin, "50.0");
    let after = before.clone().destination("added", &["added.test"], "5.0");
    let mut replica = Replica::start(&site, "r0", &before);
    let origins_own = client_tls(origin.root().unwrap().as_bytes());
    let blind = Browser::new(replica.proxy(), "added.test", origins_own);
    let mut unread = blind.tunnel().unwrap();
    assert_eq!(unread.get("/b/1?id=unread").unwrap().status(), 200);
    let mut kept = replica.browser(&site, HOST).tunnel().unwrap();
    assert_eq!(kept.get("/b/1?id=kept1").unwrap().status(), 200);

    // The issuer may sign for the destinations that it was made for; a new one needs a new issuer, made beside the
    // running replica.
    let config = after.write(&site, "r0");
    let made = run_paceline(
        site.path(),
        &["ca", "init", "--config", &config.to_string_lossy()],
    );
    assert!(made.status.success(), "{}", made.stderr);
    replica.read_again();
    assert!(
        replica.stderr().contains("destination added: added, "),
        "{}",
        replica.stderr()
    );
    // Only our own root is trusted here: this is a leaf of the new issuer.
    let governed = replica.browser(&site, "added.test");
    for n in 0..3 {
        assert_eq!(
            governed.get(&format!("/b/1?id=load{n}")).unwrap().status(),
            200
        );
    }
    assert!(
        origin.timeline("load").span() >= Duration::from_millis(380),
        "not paced"
    );
    let open = closed_after(unread);
    assert!(open <= CLOSED_WITHIN, "unpaced for {open:?}");
    assert_eq!(
        kept.get("/b/1?id=kept2").unwrap().status(),
        200,
        "a tunnel of another host"
    );
}

#[test]
fn what_waits_for_a_destination_that_is_removed_keeps_its_pace_and_its_tunnels_end_in_good_order() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let without = Recipe::new()
        .destination("other", &["other.test"], "7.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &recipe(&origin, "5.0"));
    let browser = replica.browser(&site, HOST);
    let mut tunnels: Vec<_> = (0..10).map(|_| browser.tunnel().unwrap()).collect();
    for (n, tunnel) in tunnels.iter_mut().enumerate() {
        tunnel.ask("GET", &format!("/b/1?id=load{n}"), &[]).unwrap();
    }
    let mut idle = browser.tunnel().unwrap();
    await_arrivals(&origin, Duration::ZERO, 2);
    replica.reload(&site, "r0", &without);
    // It would be tunnelled unread by now, so what it asks for is allowed; the next one goes on a new tunnel.
    let last = idle.get("/b/1?id=unpaced").unwrap();
    assert_eq!(
        (last.status(), last.field("connection")),
        (200, Some("close"))
    );
    for tunnel in &mut tunnels {
        assert_eq!(tunnel.answer().unwrap().status(), 200);
    }
    let (seen, gap) = (origin.timeline("load"), origin.timeline("load").gap(0.0));
    assert_eq!(seen.count(), 10);
    assert!(gap >= Some(Duration::from_millis(170)), "{gap:?}");
    for tunnel in tunnels {
        assert!(closed_after(tunnel) <= CLOSED_WITHIN);
    }
}

#[test]
fn a_tunnel_to_a_host_that_is_denied_by_now_is_refused_its_next_request_and_closed() {
    let (origin, site) = (Origin::tls(&[HOST, "elsewhere.test"]), Site::new());
    let allowing = recipe(&origin, "50.0");
    let denying = Recipe::new()
        .proxy("ungoverned = \"deny\"")
        .destination("other", &["other.test"], "7.0")
        .origin(&origin);
    let mut replica = Replica::start(&site, "r0", &allowing);
    let browser = replica.browser(&site, HOST);
    let origins_own = client_tls(origin.root().unwrap().as_bytes());
    let blind = Browser::new(replica.proxy(), "elsewhere.test", origins_own);
    let (mut asking, mut silent, mut unread) = (
        browser.tunnel().unwrap(),
        browser.tunnel().unwrap(),
        blind.tunnel().unwrap(),
    );
    for tunnel in [&mut asking, &mut silent, &mut unread] {
        assert_eq!(tunnel.get("/b/1?id=before").unwrap().status(), 200);
    }
    replica.reload(&site, "r0", &denying);
    let refused = asking.get("/b/1?id=after").unwrap();
    assert_eq!(refused.status(), 403);
    assert_eq!(refused.field("connection"), Some("close"));
    assert!(
        refused
            .field("proxy-status")
            .unwrap()
            .contains("http_request_denied")
    );
    thread::scope(|scope| {
        for tunnel in [asking, silent, unread] {
            scope.spawn(move || assert!(closed_after(tunnel) <= CLOSED_WITHIN));
        }
    });
    let fault = browser.tunnel().err().expect("refused").to_string();
    assert!(fault.contains("403"), "{fault}");
    assert_eq!(origin.timeline("after").count(), 0);
}

#[test]
fn who_may_use_the_proxy_and_for_what_changes_on_open_connections_too() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    // SHA-256 of `secret`, and of `other`.
    let hash = |password: &str| {
        use sha2::Digest as _;
        let digest = sha2::Sha256::digest(password.as_bytes());
        digest
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    let users = |users: &str| {
        recipe(&origin, "50.0").proxy(&format!("[proxy.auth]\nusers = {{ {users} }}"))
    };
    let both = users(&format!("ann = {:?}, bob = {:?}", hash("a1"), hash("b1")));
    let mut replica = Replica::start(&site, "r0", &both);
    let tls = crate::bed::certs::client_tls_from(&site.root());
    let tunnel = |replica: &Replica, login: &str| {
        use base64::Engine as _;
        let mut session = replica.session(HOST);
        let login = base64::engine::general_purpose::STANDARD.encode(login);
        let head =
            format!("CONNECT {HOST}:443 HTTP/1.1\r\nProxy-Authorization: Basic {login}\r\n\r\n");
        session.send(head.as_bytes()).unwrap();
        match session.head().unwrap().status().unwrap() {
            200 => Ok(session.start_tls(&tls, HOST).unwrap()),
            status => Err(status),
        }
    };
    let mut ann = tunnel(&replica, "ann:a1").unwrap_or_else(|s| panic!("{s}"));
    let mut bob = tunnel(&replica, "bob:b1").unwrap_or_else(|s| panic!("{s}"));
    assert_eq!(tunnel(&replica, "cat:c1").err(), Some(407));

    let changed = users(&format!(
        "ann = {:?}, bob = {:?}, cat = {:?}",
        hash("a1"),
        hash("b2"),
        hash("c1")
    ));
    replica.reload(&site, "r0", &changed);
    assert_eq!(ann.get("/b/1?id=ann").unwrap().status(), 200);
    let refused = bob.get("/b/1?id=bob").unwrap();
    assert_eq!(refused.status(), 403, "{}", refused.text());
    assert_eq!(tunnel(&replica, "bob:b1").err(), Some(407));
    for login in ["bob:b2", "cat:c1", "ann:a1"] {
        assert!(tunnel(&replica, login).is_ok(), "{login}");
    }

    // Without credentials, but for no port that HTTPS has, and for nobody on this machine in the end.
    replica.reload(
        &site,
        "r0",
        &recipe(&origin, "50.0").proxy("connect_ports = [80]"),
    );
    assert_eq!(ann.get("/b/1?id=ann").unwrap().status(), 403);
    assert_eq!(
        replica
            .session(HOST)
            .connect(&format!("{HOST}:443"))
            .unwrap()
            .status(),
        403
    );
    let mut open = replica.session(HOST);
    let url = format!("http://{HOST}/b/1");
    assert_ne!(open.get(&url).unwrap().status(), 403);
    let nobody =
        recipe(&origin, "50.0").proxy("allow_clients = [\"192.0.2.1\"]\nrefusal_status = 429");
    replica.reload(&site, "r0", &nobody);
    assert_eq!(open.get(&url).unwrap().status(), 403);
    let mut stranger = replica.session(HOST);
    assert_eq!(stranger.get(&url).unwrap().status(), 403);
    assert_eq!(origin.timeline("bob").count(), 0);
}

#[test]
fn what_cannot_change_is_named_and_stays_while_the_rest_of_the_file_is_adopted() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let at = |rate| recipe(&origin, rate).store(&postgres.url());
    let mut replica = Replica::start(&site, "r0", &at("50.0"));
    let browser = replica.browser(&site, HOST);
    let other = at("40.0")
        .listen("127.0.0.2:0".parse().unwrap())
        .admin("listen = \"127.0.0.2:0\"\ntoken = \"new\"")
        .store_key("max_replicas = 5\ntable = \"elsewhere\"")
        .proxy("max_connections = 7");
    replica.reload(&site, "r0", &other);
    let log = replica.stderr();
    for key in [
        "proxy.listen 127.0.0.1:0 -> 127.0.0.2:0",
        "proxy.max_connections 10000 -> 7",
        "admin.listen 127.0.0.1:0 -> 127.0.0.2:0",
        "store.max_replicas 3 -> 5",
        "store.table paceline -> elsewhere",
    ] {
        assert!(
            log.contains(&format!("{key}: takes effect at the next start")),
            "{key}: {log}"
        );
    }
    assert!(
        log.contains(
            "reloaded: admin.token none -> ***; destination google_image: rate 50/s -> 40/s"
        ),
        "{log}"
    );
    assert_eq!(
        log.matches("takes effect at the next start").count(),
        5,
        "{log}"
    );
    assert_eq!(metric(&replica, "paceline_ceiling_rate"), Some(40.0));
    assert_eq!(browser.get("/b/1?id=load").unwrap().status(), 200);
    assert_eq!(replica.readiness().unwrap(), 200);
}

#[test]
fn a_scope_that_changes_gives_each_host_its_pace_and_takes_it_back() {
    let names = ["a.googleusercontent.com", "b.googleusercontent.com"];
    let (origin, site) = (Origin::tls(&names), Site::new());
    let whole = recipe(&origin, "10.0");
    let each = recipe(&origin, "10.0").key("scope = \"host\"");
    let mut replica = Replica::start(&site, "r0", &whole);
    let browsers = names.map(|name| replica.browser(&site, name));
    let ((), failures) = under_load(&browsers, 3, || {
        let together = await_arrivals(&origin, origin.elapsed(), 8).rate();
        replica.reload(&site, "r0", &each);
        // Six wait for the one cursor, and are served by it.
        let settled = origin.elapsed() + Duration::from_millis(700);
        let apart = await_arrivals(&origin, settled, 40).rate();
        replica.reload(&site, "r0", &whole);
        // Three wait for each host's, and are too.
        let settled = origin.elapsed() + Duration::from_millis(600);
        let again = await_arrivals(&origin, settled, 12).rate();
        assert!(
            together < 10.5 && again < 10.5,
            "{together:.1}/s, {again:.1}/s"
        );
        assert!((18.0..21.5).contains(&apart), "{apart:.1}/s for two hosts");
    });
    assert_eq!(failures, Vec::<String>::new());
}

#[test]
fn an_issuer_that_is_replaced_on_disk_signs_from_then_on_and_no_tunnel_fails() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&origin, "500.0");
    let mut replica = Replica::start(&site, "r0", &recipe);
    let (browser, done) = (replica.browser(&site, HOST), AtomicBool::new(false));
    let certs = site.path().join("certs");
    let read = |name: &str| std::fs::read(certs.join(name)).expect("a file of the CA");
    let before = (read("ca.pem"), read("issuer.pem"));
    let served = thread::scope(|scope| {
        // Each request on a tunnel of its own, so that each has a handshake.
        let fetch = || {
            let mut served = 0;
            while !done.load(Relaxed) {
                assert_eq!(browser.get("/b/1?id=load").unwrap().status(), 200);
                served += 1;
            }
            served
        };
        let clients: Vec<_> = (0..3).map(|_| scope.spawn(fetch)).collect();
        await_arrivals(&origin, origin.elapsed(), 20);
        for name in ["issuer.pem", "issuer.key"] {
            std::fs::remove_file(certs.join(name)).expect("a file of the CA");
        }
        let config = site.path().join("r0.toml").to_string_lossy().into_owned();
        let made = run_paceline(site.path(), &["ca", "init", "--config", &config]);
        let changed = made.status.success().then(|| replica.read_again());
        let ended = origin.elapsed();
        if changed.is_some() {
            await_arrivals(&origin, ended, 20);
        }
        done.store(true, Relaxed);
        assert!(changed.is_some(), "{}", made.stderr);
        clients
            .into_iter()
            .map(|c| c.join().unwrap())
            .sum::<usize>()
    });
    let after = (read("ca.pem"), read("issuer.pem"));
    assert_eq!(before.0, after.0, "the root is another");
    assert_ne!(before.1, after.1, "the issuer is the same");
    let log = replica.stderr();
    assert!(log.contains("the issuer of the CA is another"), "{log}");
    assert!(
        !log.contains("broke off TLS") && served >= 40,
        "{served}\n{log}"
    );
}
