//! The page at `/` of the admin listener: the figures are there for whoever can load one document and nothing else.

use std::time::Duration;

use crate::bed::{
    await_until::await_until,
    origin::Origin,
    postgres::Postgres,
    recipe::{Recipe, Site},
    replica::Replica,
};

const HOST: &str = "lh3.googleusercontent.com";
const PATIENCE: Duration = Duration::from_secs(20);

/// The text of a page, without its marks, scripts and styles.
fn words(page: &str) -> String {
    let main = page.split_once("<main>").expect("the page has a main part");
    let main = main.1.split_once("</main>").expect("that ends").0;
    let pieces = main.split('<').filter_map(|piece| piece.split_once('>'));
    let text: Vec<_> = pieces.map(|(_, text)| text.trim()).collect();
    text.join(" ")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

fn recipe(origin: &Origin) -> Recipe {
    Recipe::new()
        .destination("google_image", &["*.googleusercontent.com"], "20.0")
        .key("lockout_status = [403]")
        .key("lockout_after = 2")
        .destination("maps", &["maps.test"], "\"30/min\"")
        .origin(origin)
}

#[test]
fn one_get_has_the_figures_of_all_replicas_and_no_reason_for_another_request() {
    let (postgres, origin, site) = (Postgres::start(), Origin::tls(&[HOST]), Site::new());
    let recipe = recipe(&origin).store(&postgres.url());
    let [first, second] = ["r0", "r1"].map(|name| Replica::start(&site, name, &recipe));
    for replica in [&first, &second] {
        let browser = replica.browser(&site, HOST);
        for n in 0..15 {
            assert_eq!(browser.get(&format!("/b/1?id={n}")).unwrap().status(), 200);
        }
    }

    // What the origin saw, the history of either replica has, once all have told of it.
    for replica in [&first, &second] {
        await_until("the history has all dispatches", PATIENCE, || {
            let answer = replica.admin("/status?history=1").unwrap();
            let status: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
            let sent = &status["destinations"][0]["per_second"];
            let sum = |key: &str| {
                let counts = sent[key].as_array().expect("a list");
                assert_eq!(counts.len(), 300, "{sent}");
                counts
                    .iter()
                    .filter_map(serde_json::Value::as_u64)
                    .sum::<u64>()
            };
            let known = (sum("all_replicas"), sum("this_replica"));
            (known == (30, 15)).then_some(())
        });
    }
    let brief = first.admin("/status").unwrap().text();
    assert!(!brief.contains("per_second"), "nobody asked for it");

    let answer = first.admin("/").unwrap();
    let policy = answer.field("content-security-policy").unwrap_or_default();
    for part in [
        "default-src 'none'",
        "script-src 'sha256-",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{part} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    let page = answer.text();
    for outside in [
        "http://",
        "https://",
        "url(",
        "@import",
        "<link rel=\"style",
    ] {
        assert!(!page.contains(outside), "{outside} in {page}");
    }
    let shown = words(&page);
    for part in [
        "ready; the store is there",
        "google_image paced",
        "of 20/s all replicas, mean of 10 s",
        "Waiting here 0 requests",
        "Smallest gap here",
        "maps paced",
        "of 30/min",
        "r0 (this one) 0 live",
        "r1 1 live",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(page.contains("<svg viewBox"), "{page}");
}

#[test]
fn a_lockout_stands_there_with_its_reason_and_the_way_out() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&origin));
    let browser = replica.browser(&site, HOST);
    for n in 0..2 {
        let answer = browser.get(&format!("/b/1?id={n}&status=403")).unwrap();
        assert_eq!(answer.status(), 403);
    }
    let shown = words(&replica.admin("/").unwrap().text());
    for part in [
        "google_image locked out locked out for 1",
        "answered 403",
        "paceline unlock google_image",
        "Allowed now nothing",
        "This one alone",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
}

/// Headless Chromium at the page of a replica, for some seconds of its own time: what it printed, and its complaints.
#[cfg(feature = "extended")]
fn in_chromium(site: &Site, replica: &Replica, more: &[&str]) -> (String, String) {
    let mut command = std::process::Command::new("chromium");
    let profile = format!("--user-data-dir={}", site.path().join("chromium").display());
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ]);
    command.args([
        "--disable-background-networking",
        "--enable-logging=stderr",
        &profile,
    ]);
    command.args(more).arg("--virtual-time-budget=7000");
    command.arg(format!("http://{}/", replica.admin_address()));
    let outcome = crate::bed::process::run_to_end(command, Duration::from_secs(60));
    assert!(outcome.status.success(), "{}", outcome.stderr);
    (outcome.text(), outcome.stderr)
}

#[cfg(feature = "extended")]
#[test]
fn chromium_keeps_the_page_fresh_and_finds_nothing_that_its_policy_forbids() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&origin));
    let (document, complaints) = in_chromium(&site, &replica, &["--dump-dom"]);
    assert!(document.contains(">live</p>"), "{document}\n{complaints}");
    assert!(
        words(&document).contains("google_image paced"),
        "{document}"
    );
    for complaint in ["Content Security Policy", "Uncaught", "Failed to load"] {
        assert!(!complaints.contains(complaint), "{complaints}");
    }
}

/// What it draws can only be weighed here: an empty picture of this size has some 5 kB.
#[cfg(feature = "extended")]
#[test]
fn chromium_draws_the_page_on_a_phone() {
    let (origin, site) = (Origin::tls(&[HOST]), Site::new());
    let replica = Replica::start(&site, "r0", &recipe(&origin));
    let picture = site.path().join("page.png");
    let screenshot = format!("--screenshot={}", picture.display());
    let phone = ["--window-size=390,1600", &screenshot];
    let (_, complaints) = in_chromium(&site, &replica, &phone);
    let size = std::fs::metadata(picture).expect("a picture").len();
    assert!(size > 40_000, "{size} bytes: {complaints}");
}
