//! The operator's commands, as an operator types them: what they do in every replica, what they print, how they end, and
//! who may give them.

use std::{
    net::SocketAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use paceline::pacing::{
    throttle::{Moment, Rules, Throttle},
    time::{LocalTime, nanos},
};

use crate::bed::{
    await_until::await_until,
    client::{Answer, Browser, Session},
    origin::Origin,
    postgres::Postgres,
    process::{Outcome, run_to_end},
    recipe::{Recipe, Site},
    replica::{Replica, paceline, run_paceline},
};

const HOST: &str = "lh3.googleusercontent.com";
const PATIENCE: Duration = Duration::from_secs(10);
/// From one heartbeat to the next, on a busy machine.
const SOON: Duration = Duration::from_millis(2_500);
const MULTIPLIER: &str = "paceline_throttle_multiplier";

fn recipe(origin: &Origin) -> Recipe {
    Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "50.0")
        .key("lockout_status = [403]")
        .destination("maps", &["maps.test"], "2.0")
        .origin(origin)
}

/// `paceline ARGUMENTS --admin` of that replica, run to its end.
fn order(site: &Site, to: &Replica, arguments: &[&str]) -> Outcome {
    let admin = format!("http://{}", to.admin_address());
    run_paceline(site.path(), &[arguments, &["--admin", &admin]].concat())
}

/// An order that must be carried out; returns what was printed.
fn done(site: &Site, to: &Replica, arguments: &[&str]) -> String {
    let outcome = order(site, to, arguments);
    let (code, said) = (outcome.status.code(), outcome.text());
    assert_eq!(code, Some(0), "{arguments:?}: {said}{}", outcome.stderr);
    said
}

/// An order that must fail, with one line that holds all of `words`.
fn refused(site: &Site, to: &Replica, arguments: &[&str], words: &[&str]) {
    let outcome = order(site, to, arguments);
    let said = outcome.stderr;
    assert_eq!(outcome.status.code(), Some(1), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    for word in words {
        assert!(said.contains(word), "{word} in {said}");
    }
}

fn get(browser: &Browser, id: &str) -> Answer {
    browser.get(&format!("/b/1?id={id}")).unwrap()
}

/// Seconds of a refusal's `Retry-After`.
fn retry_after(refusal: &Answer) -> u64 {
    assert_eq!(refusal.status(), 503, "{}", refusal.text());
    let status = refusal.field("proxy-status").unwrap_or_default();
    assert!(status.starts_with("paceline; error="), "{status}");
    let text = refusal.text();
    assert!(text.starts_with("paceline: google_image: "), "{text}");
    let seconds = refusal.field("retry-after");
    seconds.and_then(|s| s.parse().ok()).expect("whole seconds")
}

#[test]
fn what_one_replica_is_told_holds_for_all() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&origin).store(&postgres.url());
    let [first, second] = ["r0", "r1"].map(|name| Replica::start(&site, name, &recipe));
    let browsers = [&first, &second].map(|replica| replica.browser(&site, HOST));
    for browser in &browsers {
        assert_eq!(get(browser, "before").status(), 200);
    }

    // A command ends when the others can know; they do with their next heartbeat.
    done(&site, &first, &["pause", "google_image", "1h 30m"]);
    for browser in &browsers {
        let rest = await_until("it is paused everywhere", PATIENCE, || {
            let answer = get(browser, "pausing");
            (answer.status() != 200).then(|| retry_after(&answer))
        });
        assert!((5_380..=5_400).contains(&rest), "{rest} s");
    }
    // Each learns of the other with a heartbeat.
    await_until("status shows it, with all replicas", PATIENCE, || {
        let shown = done(&site, &second, &["status"]);
        let words = [
            "paused for 1h ",
            "maps",
            "r0",
            "r1 (asked)",
            "50.00/s",
            "ready",
        ];
        words.iter().all(|w| shown.contains(w)).then_some(())
    });
    done(&site, &second, &["resume", "google_image"]);
    for browser in &browsers {
        await_until("it goes on everywhere", PATIENCE, || {
            (get(browser, "resumed").status() == 200).then_some(())
        });
    }

    for n in 0..3 {
        let answer = browsers[0].get(&format!("/b/1?id=forbidden{n}&status=403"));
        assert_eq!(answer.unwrap().status(), 403);
    }
    for browser in &browsers {
        let rest = await_until("it is locked everywhere", PATIENCE, || {
            let answer = get(browser, "locking");
            (answer.status() != 200).then(|| retry_after(&answer))
        });
        assert!((880..=900).contains(&rest), "{rest} s");
    }
    let shown = done(&site, &second, &["status"]);
    for words in ["locked out for 1", "3 x 403, for 15m", "429 503"] {
        assert!(shown.contains(words), "{words} in {shown}");
    }
    done(&site, &second, &["unlock", "google_image"]);
    for browser in &browsers {
        await_until("it is open everywhere", PATIENCE, || {
            (get(browser, "unlocked").status() == 200).then_some(())
        });
    }
    // Of the other destination nothing was ever said.
    let shown = done(&site, &first, &["status"]);
    assert_eq!(shown.matches("  paced").count(), 2, "{shown}");
}

#[test]
fn of_two_orders_the_later_one_counts_whichever_replica_is_given_it() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&origin).store(&postgres.url());
    let replicas = ["r0", "r1"].map(|name| Replica::start(&site, name, &recipe));
    let browsers = [0, 1].map(|r| replicas[r].browser(&site, HOST));
    for browser in &browsers {
        assert_eq!(get(browser, "before").status(), 200);
    }
    let sql = postgres.sql();
    let ahead = || {
        sql.number(
            "SELECT (value::numeric - extract(epoch FROM clock_timestamp()))::int8 FROM paceline \
             WHERE cache_key = 'paceline:google_image'",
        )
    };
    let paused = |r: usize| replicas[r].scrape().sum("paceline_paused", &[]) == Some(1.0);
    // Three ways to the same: the second order to another replica, to the same one, and with a `resume` between.
    let ways: [&[(usize, &[&str])]; 3] = [
        &[(0, &["50s"]), (1, &["4s"])],
        &[(1, &["50s"]), (1, &["4s"])],
        &[(0, &["50s"]), (1, &[]), (0, &["4s"])],
    ];
    for way in ways {
        let mut given = origin.elapsed();
        for (to, span) in way {
            given = origin.elapsed();
            let verb = if span.is_empty() { "resume" } else { "pause" };
            done(
                &site,
                &replicas[*to],
                &[&[verb, "google_image"], *span].concat(),
            );
        }
        assert!(ahead() <= 4, "the cursor is {} s ahead", ahead());
        for (r, browser) in browsers.iter().enumerate() {
            await_until("the later order is in force", SOON, || {
                (paused(r) && retry_after(&get(browser, "paused")) <= 4).then_some(())
            });
        }
        for browser in &browsers {
            await_until("it goes on", PATIENCE, || {
                (get(browser, "on").status() == 200).then_some(())
            });
        }
        let took = origin.elapsed() - given;
        assert!(
            (4.0..9.0).contains(&took.as_secs_f64()),
            "{way:?}: after {took:?}"
        );
    }
}

/// Rows of throttles of hosts that nobody asks for now, as many as are read with several statements.
#[test]
fn thousands_of_throttled_hosts_keep_no_order_from_any_replica() {
    const HOSTS: usize = 1_500;
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = Recipe::new()
        .store(&postgres.url())
        .destination("all", &["*.example.com"], "50.0")
        .key("scope = \"host\"")
        .destination("google_image", &["*.googleusercontent.com"], "50.0")
        .origin(&origin);
    let [first, second] = ["r0", "r1"].map(|name| Replica::start(&site, name, &recipe));
    let mut throttle = Throttle::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("now");
    let at = Moment {
        now: LocalTime(nanos(now)),
        offset: Some(0),
    };
    throttle.throttled(at, 0, None, &Rules::default());
    postgres.sql().run(&format!(
        "INSERT INTO paceline SELECT 'paceline:throttle:all/h' || n || '.example.com', '{}', now() + interval '1 hour' \
         FROM generate_series(1, {HOSTS}) AS n",
        throttle.to_text(at)
    ));
    // An order in vain: there is no lockout, but each replica now goes by these rows.
    for replica in [&first, &second] {
        refused(&site, replica, &["unlock", "all"], &["not locked"]);
        let multiplier = replica.scrape().sum(MULTIPLIER, &["destination=\"all\""]);
        assert_eq!(multiplier, Some(2.0));
    }
    // The second replica has no request for it, and hears of it with a heartbeat or not at all.
    done(&site, &first, &["pause", "google_image", "1h"]);
    await_until("the pause is in force there", PATIENCE, || {
        let paused = "paceline_paused";
        (second
            .scrape()
            .sum(paused, &["destination=\"google_image\""])?
            == 1.0)
            .then_some(())
    });
    done(&site, &first, &["resume", "all"]);
    await_until("all hosts are let go there", PATIENCE, || {
        (second.scrape().sum(MULTIPLIER, &["destination=\"all\""])? == 1.0).then_some(())
    });
    let left = "SELECT count(*) FROM paceline WHERE cache_key LIKE 'paceline:throttle:all/%' AND value NOT LIKE '1 %'";
    assert_eq!(postgres.sql().number(left), 0);
    for replica in [&first, &second] {
        assert!(
            !replica.stderr().contains("store lost"),
            "the heart stopped"
        );
    }
}

#[test]
fn an_order_that_cannot_be_carried_out_says_what_to_change() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&origin));
    for verb in ["unlock", "resume", "pause"] {
        let mut arguments = vec![verb, "gogle_image"];
        arguments.extend((verb == "pause").then_some("1m"));
        refused(
            &site,
            &replica,
            &arguments,
            &["gogle_image", "google_image", "maps"],
        );
    }
    refused(
        &site,
        &replica,
        &["unlock", "maps"],
        &["maps", "not locked"],
    );
    refused(
        &site,
        &replica,
        &["resume", "maps"],
        &["maps", "not paused"],
    );
    for span in ["31days", "10ms"] {
        let outcome = order(&site, &replica, &["pause", "maps", span]);
        assert_eq!(outcome.status.code(), Some(2));
        assert!(
            outcome.stderr.contains("1 s to 30 days"),
            "{}",
            outcome.stderr
        );
    }
    done(&site, &replica, &["pause", "maps", "1h"]);
    refused(
        &site,
        &replica,
        &["unlock", "maps"],
        &["not locked", "`paceline resume maps`"],
    );
    done(&site, &replica, &["resume", "maps"]);
    let proxy = format!("http://{}", replica.proxy());
    let outcome = run_paceline(site.path(), &["status", "--admin", &proxy]);
    assert_eq!(outcome.status.code(), Some(1));
    for words in ["is the proxy's port", "admin.listen"] {
        assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
    }
    refused(&site, &replica, &["forget", "r9"], &["one replica"]);
    for mistyped in [
        &["pause", "maps", "soon"][..],
        &["unlock"],
        &["stop", "maps"],
    ] {
        assert_eq!(order(&site, &replica, mistyped).status.code(), Some(2));
    }
    // Nobody listens there; nobody there speaks HTTP as we do.
    let nobody = "http://127.0.0.1:9";
    let outcome = run_paceline(site.path(), &["status", "--admin", nobody]);
    assert_eq!(outcome.status.code(), Some(1));
    assert!(
        outcome.stderr.contains("check --admin"),
        "{}",
        outcome.stderr
    );
    // The store's URL is not for operators; other faults of the file are those of `check`.
    let here = format!("http://{}", replica.admin_address());
    site.write("no_url.toml", "[store]\n");
    site.write("faulty.toml", "[store]\ntable = 7\n");
    for (file, admin, code, word) in [
        ("no_url.toml", here.as_str(), 0, ""),
        ("no_url.toml", nobody, 1, "cannot reach"),
        ("faulty.toml", &here, 0, "going on without"),
    ] {
        let arguments = ["status", "--config", file, "--admin", admin];
        let outcome = run_paceline(site.path(), &arguments);
        assert_eq!(outcome.status.code(), Some(code), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
    let faulty = run_paceline(site.path(), &["status", "--config", "faulty.toml"]);
    assert_eq!(faulty.status.code(), Some(2));
    assert!(
        faulty.stderr.contains("store.table") && faulty.stderr.contains("--admin http://HOST:PORT"),
        "{}",
        faulty.stderr
    );
    for url in ["https://127.0.0.1:9", "127.0.0.1:9"] {
        let mistyped = run_paceline(site.path(), &["status", "--admin", url]);
        assert_eq!(mistyped.status.code(), Some(2), "{}", mistyped.stderr);
        assert!(
            mistyped.stderr.contains("http://HOST:PORT"),
            "{}",
            mistyped.stderr
        );
    }

    let json = done(&site, &replica, &["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let maps = &status["destinations"][1];
    assert_eq!(
        (&maps["name"], &maps["multiplier"]),
        (&"maps".into(), &1.into())
    );
    assert!(
        maps["locked_out"].is_null() && maps["paused"].is_null(),
        "{json}"
    );
    assert_eq!(
        (&maps["mode"], &status["ready"]),
        (&"embedded".into(), &true.into())
    );
    let page = replica.admin("/").unwrap().text();
    assert!(
        page.contains("embedded store") && page.contains(">maps</h2>"),
        "{page}"
    );
}

/// An address of this machine that is not loopback, if it has one. No packet is sent.
fn own_address() -> Option<std::net::IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[test]
fn changes_need_loopback_or_the_token_and_looking_needs_nothing() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let at = own_address();
    let listen = SocketAddr::new(at.unwrap_or([127, 0, 0, 1].into()), 0);
    let lines = format!("listen = \"{listen}\"\ntoken = \"right\"");
    let replica = Replica::start(&site, "r0", &recipe(&origin).admin(&lines));
    let admin = format!("http://{}", replica.admin_address());
    let pause = ["pause", "maps", "1s", "--admin", &admin];
    let with = |arguments: &[&str], token: Option<&str>| {
        let mut command = paceline(arguments);
        command.current_dir(site.path());
        token.map(|token| command.env("PACELINE_ADMIN_TOKEN", token));
        run_to_end(command, PATIENCE)
    };
    assert!(with(&["status", "--admin", &admin], None).status.success());
    let without = with(&pause, None);
    assert_eq!(without.status.success(), at.is_none(), "{}", without.stderr);
    let wrong = with(&pause, Some("left"));
    assert_eq!(wrong.status.code(), Some(1));
    assert!(
        wrong.stderr.contains("PACELINE_ADMIN_TOKEN"),
        "{}",
        wrong.stderr
    );
    assert!(
        wrong.stderr.contains("the token is wrong") && !wrong.stderr.contains("left"),
        "a secret: {}",
        wrong.stderr
    );
    assert!(at.is_none() || without.stderr.contains("the token is missing"));
    assert!(with(&pause, Some("right")).status.success());
    // The file of the replica has it too.
    let file = site.path().join("r0.toml");
    let config = ["--config", &file.to_string_lossy()].map(str::to_owned);
    let mut arguments = pause.to_vec();
    arguments.extend(config.iter().map(String::as_str));
    assert!(with(&arguments, None).status.success());
    assert!(!replica.stderr().contains("right"), "a secret in the log");
}

#[test]
fn each_path_takes_its_method_and_says_which() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&origin));
    let at = replica.admin_address();
    let ask = |method: &str, target: &str| {
        let mut session = Session::open(at, &at.to_string()).unwrap();
        session.ask(method, target, &["Connection: close"]).unwrap();
        let answer = session.answer().unwrap();
        (answer.status(), answer.field("allow").map(str::to_owned))
    };
    let allow = |what: &str| Some(what.to_owned());
    for (method, target, expected) in [
        ("GET", "/status", (200, None)),
        ("GET", "/healthz", (200, None)),
        ("POST", "/status", (405, allow("GET, HEAD"))),
        ("DELETE", "/metrics", (405, allow("GET, HEAD"))),
        (
            "GET",
            "/pause?destination=maps&for=1m",
            (405, allow("POST")),
        ),
        ("PUT", "/unlock?destination=maps", (405, allow("POST"))),
        ("GET", "/nothing", (404, None)),
        ("POST", "/nothing", (404, None)),
        ("POST", "/pause?destination=maps", (400, None)),
        ("POST", "/pause?destination=maps&for=soon", (400, None)),
        ("POST", "/pause?destination=maps&for=31days", (400, None)),
        ("POST", "/unlock", (400, None)),
        ("POST", "/unlock?destination=nothing", (404, None)),
    ] {
        assert_eq!(ask(method, target), expected, "{method} {target}");
    }
    assert!(
        done(&site, &replica, &["status"]).contains("paced"),
        "a GET changed something"
    );
}
