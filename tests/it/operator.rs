//! The operator's commands, as an operator types them: what they do in every replica, what they print, how they end, and
//! who may give them.

use std::{net::SocketAddr, time::Duration};

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
