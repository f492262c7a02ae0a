//! `paceline doctor`: run with the lines that a replica prints for workers, and with each of them spoilt.

use std::{process::Command, time::Duration};

use crate::bed::{
    origin::Origin,
    process::{Outcome, run_to_end},
    recipe::{Recipe, Site},
    replica::{Replica, paceline},
};

const HOST: &str = "images.test";
const URL: &str = "https://images.test/";

struct Scene {
    site: Site,
    origin: Origin,
    replica: Replica,
}

fn recipe(origin: &Origin) -> Recipe {
    Recipe::new()
        .destination("d", &[HOST], "7.0")
        .origin(origin)
}

fn scene() -> Scene {
    scene_of(recipe)
}

fn scene_of(recipe: impl Fn(&Origin) -> Recipe) -> Scene {
    let (site, origin) = (Site::new(), Origin::tls(&[HOST, "ungoverned.test"]));
    let replica = Replica::start(&site, "r", &recipe(&origin));
    let scene = Scene {
        site,
        origin,
        replica,
    };
    scene.put_node("24.9.0");
    scene
}

impl Scene {
    /// The doctor in a shell that has evaluated the replica's lines, and then `change`.
    fn doctor(&self, change: &str, arguments: &[&str]) -> Outcome {
        let doctor = paceline(&[]);
        let mut shell = Command::new("/bin/sh");
        shell
            .args(["-c", r#"eval "$1"; eval "$2"; shift 2; exec "$@""#, "sh"])
            .args([&self.replica.stdout(), change])
            .arg(doctor.get_program())
            .arg("doctor")
            .args(arguments)
            .current_dir(self.site.path())
            .env_clear()
            .env("PATH", self.path());
        run_to_end(shell, Duration::from_secs(30))
    }

    fn path(&self) -> String {
        let usual = std::env::var("PATH").unwrap_or_default();
        format!("{}:{usual}", self.site.path().display())
    }

    /// Puts a `node` of that version where the doctor finds it before any other.
    fn put_node(&self, version: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let says = format!("#!/bin/sh\necho v{version}\n");
        let node = self.site.write("node", &says);
        std::fs::set_permissions(&node, std::fs::Permissions::from_mode(0o755)).expect("ours");
    }

    /// Asserts that there are problems, that one of them is that of `check`, and that its line has `word`.
    fn expect_problem(&self, change: &str, arguments: &[&str], check: &str, word: &str) {
        let ended = self.doctor(change, arguments);
        let text = ended.text();
        assert_eq!(ended.status.code(), Some(1), "{text}{}", ended.stderr);
        let found = problems(&text)
            .iter()
            .any(|l| l.contains(check) && l.contains(word));
        assert!(found, "no problem of {check:?} with {word:?} in\n{text}");
    }
}

fn problems(text: &str) -> Vec<&str> {
    text.lines().filter(|l| l.starts_with("PROBLEM ")).collect()
}

#[test]
fn what_a_replica_prints_for_workers_is_well_and_costs_no_slot() {
    let scene = scene();
    let root = scene.site.root();
    for arguments in [
        &["--url", URL] as &[_],
        &["--url", URL, "--ca", &root.to_string_lossy()],
    ] {
        let ended = scene.doctor("", arguments);
        let text = ended.text();
        assert_eq!(problems(&text), [""; 0], "{text}");
        assert_eq!(ended.status.code(), Some(0), "{text}{}", ended.stderr);
        for line in [
            "ok       paceline answers",
            "ok       intercepted",
            "ok       no other way out",
            "ok       Python requests: proxy",
            "ok       Python requests: trust",
            "ok       Node: proxy",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
    assert_eq!(scene.origin.connections(), 0, "the origin was asked");
    let log = scene.replica.stderr();
    let asked: Vec<_> = log
        .lines()
        .filter(|l| l.contains("method=OPTIONS"))
        .collect();
    assert_eq!(asked.len(), 2, "{log}");
    assert!(asked.iter().all(|l| l.contains("outcome=\"ok\"")), "{log}");
    assert!(!log.contains("malformed"), "{log}");
}

#[test]
fn a_spoilt_setting_is_a_problem_that_names_it() {
    let scene = scene();
    scene
        .site
        .write("other.pem", scene.origin.root().expect("a TLS origin"));
    for (change, check, word) in [
        ("unset SSL_CERT_FILE", "Go: trust", "SSL_CERT_FILE"),
        ("export SSL_CERT_FILE=other.pem", "Go: trust", "other.pem"),
        ("export SSL_CERT_FILE=gone.pem", "Go: trust", "gone.pem"),
        ("unset HTTPS_PROXY https_proxy", "Go: proxy", "HTTPS_PROXY"),
        ("export NO_PROXY=.images.test", "NO_PROXY", ".images.test"),
        ("export HTTPS_PROXY=127.0.0.1:9", "HTTPS_PROXY", "scheme"),
    ] {
        scene.expect_problem(change, &["--url", URL], check, word);
    }
    scene.put_node("20.19.2");
    scene.expect_problem("", &["--url", URL], "Node: proxy", "too old");
    // Whether Python is on the machine or not: without any program to be found, every client counts.
    let change = "unset REQUESTS_CA_BUNDLE CURL_CA_BUNDLE; PATH=/nowhere";
    scene.expect_problem(
        change,
        &["--url", URL],
        "Python requests: trust",
        "REQUESTS_CA_BUNDLE",
    );
}

#[test]
fn a_proxy_that_does_not_answer_is_a_problem_and_so_is_something_else_there() {
    let (mut scene, plain) = (scene(), Origin::plain(&["other.test"]));
    let other = format!("http://{}", plain.address());
    scene.expect_problem(
        "",
        &["--url", URL, "--proxy", &other],
        "paceline answers",
        "something else",
    );
    scene.replica.signal(rustix::process::Signal::TERM);
    scene.replica.await_end(Duration::from_secs(10));
    scene.expect_problem("", &["--url", URL], "paceline answers", "start paceline");
}

#[test]
fn a_host_that_is_not_governed_or_another_ca_is_a_problem() {
    let scene = scene();
    let ungoverned = ["--url", "https://ungoverned.test/"];
    scene.expect_problem("", &ungoverned, "intercepted", "does not govern");
    let foreign = scene
        .site
        .write("foreign.pem", scene.origin.root().expect("a TLS origin"));
    let foreign = foreign.to_string_lossy();
    scene.expect_problem(
        "",
        &["--url", URL, "--ca", &foreign],
        "intercepted",
        "not of the CA",
    );
}

#[test]
fn a_way_round_the_proxy_is_a_problem() {
    let scene = scene_of(|origin| {
        let port = origin.address().port();
        recipe(origin)
            .destination("local", &["localhost"], "7.0")
            .proxy(&format!("connect_ports = [443, {port}]"))
            .resolve(&format!("localhost:{port}"), origin.address())
    });
    let url = format!("https://localhost:{}/", scene.origin.address().port());
    let change = "unset NO_PROXY no_proxy";
    scene.expect_problem(
        change,
        &["--url", &url],
        "no other way out",
        "was reached at 127.0.0.1",
    );
    let text = scene.doctor(change, &["--url", &url]).text();
    assert_eq!(problems(&text).len(), 1, "{text}");
}

#[test]
fn missing_credentials_are_a_problem_and_right_ones_are_not_shown() {
    let scene = scene_of(|origin| {
        // Of "wonderland".
        let hash = "sha256:a71a7c7011f53a1bab3642ec2ce12593f05230ace8de1e3e7645f69efac1443d";
        recipe(origin).proxy(&format!("[proxy.auth.users]\nalice = {hash:?}"))
    });
    scene.expect_problem("", &["--url", URL], "intercepted", "credentials");
    let change = r#"
        for name in HTTPS_PROXY https_proxy HTTP_PROXY http_proxy; do
            eval "export $name=\"\$(echo \$$name | sed s/USER:PASSWORD/alice:wonderland/)\""
        done"#;
    let ended = scene.doctor(change, &["--url", URL]);
    let text = ended.text();
    assert_eq!(ended.status.code(), Some(0), "{text}{}", ended.stderr);
    assert!(!text.contains("wonderland"), "{text}");
}

#[test]
fn what_cannot_be_meant_ends_with_2() {
    let scene = scene();
    let empty = scene.site.write("empty.pem", "");
    for arguments in [
        &["--url", "http://images.test/"] as &[_],
        &["--proxy", "http://u:pa55word@"],
        &["--ca", &empty.to_string_lossy()],
        &["--ca", "nowhere.pem"],
        &["--config", "paceline.toml"],
    ] {
        let ended = scene.doctor("", arguments);
        assert_eq!(
            ended.status.code(),
            Some(2),
            "{arguments:?}: {}",
            ended.stderr
        );
        assert!(!ended.stderr.contains("pa55word"), "{}", ended.stderr);
    }
}
