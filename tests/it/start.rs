//! The first minute: no file, no CA, no store; then mistakes in a file.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

use rustix::process::Signal;

use crate::bed::{
    process::run_to_end,
    recipe::{Recipe, Site},
    replica::{Replica, paceline, run_paceline},
    worker::bare,
};

/// What `paceline` makes in `certs/`.
const CERTS: [&str; 4] = ["ca.pem", "ca.key", "issuer.pem", "issuer.key"];

fn certs(site: &Site) -> Vec<Vec<u8>> {
    CERTS
        .iter()
        .map(|name| read(&site.path().join("certs").join(name)))
        .collect()
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()))
}

/// Listens on the ports of the defaults, 3128 and 9128, because that is the claim; they must be free.
#[test]
fn with_nothing_at_all_it_serves_makes_a_ca_and_prints_the_export_lines() {
    let site = Site::new();
    let mut replica = Replica::spawn(&site, "first", paceline(&[]));
    replica.await_ready();
    assert_eq!(replica.proxy().to_string(), "127.0.0.1:3128");

    for key in ["ca.key", "issuer.key"] {
        let mode = fs::metadata(site.path().join("certs").join(key))
            .expect("a key was made")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
    let mut shell: Command = bare("/bin/sh");
    shell.args([
        "-c",
        r#"eval "$1"; printf '%s %s' "$HTTPS_PROXY" "$REQUESTS_CA_BUNDLE""#,
        "sh",
        &replica.stdout(),
    ]);
    let said = run_to_end(shell, Duration::from_secs(10)).text();
    let (proxy, bundle) = said.split_once(' ').expect("two values");
    assert_eq!(proxy, "http://127.0.0.1:3128");
    assert!(
        Path::new(bundle).is_absolute() && !read(Path::new(bundle)).is_empty(),
        "{bundle:?}"
    );

    // The tunnel ends in TLS with our leaf before any look at DNS: this needs no internet and reaches no Google.
    replica
        .browser(&site, "lh3.googleusercontent.com")
        .tunnel()
        .expect("a leaf that hangs from certs/ca.pem");
    assert_eq!(
        replica.scrape().sum("paceline_ceiling_rate", &[]),
        Some(7.0)
    );

    let first = certs(&site);
    replica.signal(Signal::TERM);
    assert_eq!(replica.await_end(Duration::from_secs(5)).code(), Some(0));
    let second = Replica::spawn(&site, "second", paceline(&["run"]));
    second.await_ready();
    assert_eq!(certs(&site), first, "a second start made a new CA");
    second
        .browser(&site, "drive.google.com")
        .tunnel()
        .expect("a leaf for the other default host");
}

#[test]
fn ca_init_never_overwrites_and_show_and_bundle_print_the_root() {
    let site = Site::new();
    let config = Recipe::new()
        .destination("d", &["*.googleusercontent.com"], "7.0")
        .write(&site, "c");
    let config = config.to_string_lossy();
    let ca = |what: &str| run_paceline(site.path(), &["ca", what, "--config", &config]);
    assert!(ca("init").status.success());
    let first = certs(&site);
    ca("init");
    assert_eq!(certs(&site), first);
    let root = String::from_utf8(first[0].clone()).expect("PEM");
    let shown = ca("show").text();
    assert!(shown.contains(root.trim()), "{shown}");
    let bundle = ca("bundle").text();
    assert!(
        bundle.contains(root.trim()) && bundle.matches("BEGIN CERTIFICATE").count() > 20,
        "no system roots"
    );
    assert!(!bundle.contains("PRIVATE KEY") && !shown.contains("PRIVATE KEY"));
}

#[test]
fn every_mistake_is_reported_at_once_with_its_line() {
    let site = Site::new();
    let text = "[proxy]\nlisten = \"127.0.0.1:0\"\nmax_wait = \"soon\"\nmax_weight = 3\n[[destination]]\nname = \"d\"\n\
                hosts = [\"*.test\"]\nrate = -1.0\n";
    let config = site.write("wrong.toml", text);
    for command in ["check", "run"] {
        let said = run_paceline(
            site.path(),
            &[command, "--config", &config.to_string_lossy()],
        );
        let stderr = said.stderr;
        let expected = if command == "check" { 1 } else { 2 };
        assert_eq!(said.status.code(), Some(expected), "{command}: {stderr}");
        for (key, line) in [("max_wait", "3"), ("max_weight", "4"), ("rate", "8")] {
            // As editors read it (`file:3:`) or as people do (`line 3`).
            let places = [format!(":{line}:"), format!("line {line}")];
            let names =
                |said: &str| said.contains(key) && places.iter().any(|place| said.contains(place));
            let found = stderr.lines().any(names);
            assert!(
                found,
                "{command} does not report {key} in line {line}:\n{stderr}"
            );
        }
    }
}

#[test]
fn a_fault_that_only_a_part_can_find_has_its_line_too_and_ends_the_start_with_2() {
    let site = Site::new();
    let text = "[store]\nurl = \"postgres://u:hunter2@h/d?sslmode=bogus\"\n[upstream]\nextra_roots = \"no.pem\"\n\
                [[destination]]\nname = \"d\"\nhosts = [\"*.test\"]\nrate = 1\ntls = \"opaque\"\n";
    let config = site.write("parts.toml", text);
    for (command, expected) in [("check", 1), ("run", 2)] {
        let said = run_paceline(
            site.path(),
            &[command, "--config", &config.to_string_lossy()],
        );
        let stderr = said.stderr;
        assert_eq!(said.status.code(), Some(expected), "{command}: {stderr}");
        for (line, words) in [
            (2, "store.url: sslmode has"),
            (4, "upstream.extra_roots: "),
            (9, "destination.tls: "),
        ] {
            let place = format!(":{line}: {words}");
            assert!(
                stderr.lines().any(|l| l.contains(&place)),
                "{place}: {stderr}"
            );
        }
        assert!(!stderr.contains("hunter2"), "{stderr}");
    }
}

#[test]
fn a_mistyped_filter_of_the_log_ends_the_start_with_2() {
    let site = Site::new();
    for (variable, value) in [("PACELINE_LOG", "inf"), ("PACELINE_LOG_FORMAT", "yaml")] {
        let mut command = paceline(&["run"]);
        command.current_dir(site.path()).env(variable, value);
        let ended = run_to_end(command, Duration::from_secs(10));
        assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.contains(&format!("{variable}: {value:?}")),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn a_port_in_use_ends_the_start_with_one_clear_line() {
    let (site, other) = (
        Site::new(),
        std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
    );
    let taken = other.local_addr().unwrap();
    let config = Recipe::new()
        .listen(taken)
        .destination("d", &["*.test"], "7.0")
        .write(&site, "c");
    let said = run_paceline(site.path(), &["run", "--config", &config.to_string_lossy()]);
    let stderr = said.stderr;
    assert_eq!(said.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&taken.to_string()), "{stderr}");
}
