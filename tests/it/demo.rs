//! `paceline demo`: it judges by what its origin saw, and leaves nothing behind.

use std::{fs, path::Path, process::Command, time::Duration};

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    postgres::Postgres,
    process::{Outcome, Process, run_to_end},
    recipe::Site,
    replica::paceline,
};

const PATIENCE: Duration = Duration::from_secs(30);

/// The command, with its temporary files in the folder of the test.
fn demo(site: &Site, arguments: &str) -> Command {
    let arguments: Vec<&str> = ["demo"].into_iter().chain(arguments.split(' ')).collect();
    let mut command = paceline(&arguments);
    command.current_dir(site.path()).env("TMPDIR", site.path());
    command
}

fn run(site: &Site, arguments: &str) -> Outcome {
    run_to_end(demo(site, arguments), PATIENCE)
}

fn verdict(text: &str) -> [&str; 2] {
    let lines: Vec<&str> = text.lines().collect();
    let [.., with, without] = lines[..] else {
        panic!("no verdict in {text}");
    };
    [with, without]
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("our own folder").count() == 0
}

#[test]
fn replicas_with_one_cursor_in_this_process_hold_the_ceiling() {
    let site = Site::new();
    let ended = run(&site, "--rate 20 --seconds 2");
    let text = ended.text();
    assert_eq!(ended.status.code(), Some(0), "{text}{}", ended.stderr);
    let [with, without] = verdict(&text);
    assert!(
        with.starts_with("with paceline: ") && with.ends_with("the ceiling of 20/s held"),
        "{text}"
    );
    assert!(
        without.starts_with("without: ") && without.ends_with("times the ceiling"),
        "{text}"
    );
    // A line a second, and nothing that only a terminal understands.
    assert_eq!(
        text.lines().filter(|l| l.starts_with("with      ")).count(),
        2,
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
    assert!(is_empty(site.path()), "files were left behind");
}

#[test]
fn replicas_with_one_cursor_in_postgres_hold_the_ceiling_and_give_their_places_back() {
    let (site, postgres) = (Site::new(), Postgres::start());
    let ended = run(
        &site,
        &format!("--rate 20 --seconds 2 --store-url {}", postgres.url()),
    );
    let text = ended.text();
    assert_eq!(ended.status.code(), Some(0), "{text}{}", ended.stderr);
    assert!(
        verdict(&text)[0].ends_with("the ceiling of 20/s held"),
        "{text}"
    );
    let keys = postgres.sql().texts("SELECT cache_key FROM paceline");
    assert!(keys.iter().any(|k| k == "paceline-demo:demo"), "{keys:?}");
    assert!(
        keys.iter().all(|k| k.starts_with("paceline-demo:")),
        "{keys:?}"
    );
    let held = "SELECT count(*) FROM paceline WHERE cache_key LIKE '%:lease:%' AND value <> 'free'";
    assert_eq!(postgres.sql().number(held), 0);
}

#[test]
fn replicas_that_share_no_cursor_are_found_out() {
    let ended = run(&Site::new(), "--rate 20 --seconds 1 --unshared");
    let text = ended.text();
    assert_eq!(ended.status.code(), Some(1), "{text}{}", ended.stderr);
    assert!(
        verdict(&text)[0].ends_with("the ceiling of 20/s did NOT hold"),
        "{text}"
    );
}

#[test]
fn asked_to_stop_it_ends_at_once_with_a_verdict_on_what_it_saw() {
    let site = Site::new();
    let logs = Site::new();
    let mut process =
        Process::start("demo", logs.path(), demo(&site, "--seconds 300")).expect("a process");
    await_until("a line about the origin", PATIENCE, || {
        process.stdout().contains("served").then_some(())
    });
    process.signal(Signal::INT);
    let ended = process.await_end(Duration::from_secs(5));
    let text = process.stdout();
    assert_eq!(ended.code(), Some(0), "{text}{}", process.stderr());
    let [with, without] = verdict(&text);
    assert!(
        with.ends_with("held") && without.ends_with("not run, for the demo was stopped"),
        "{text}"
    );
    assert!(is_empty(site.path()), "files were left behind");
}

#[test]
fn what_it_cannot_use_is_one_line_without_a_password() {
    let site = Site::new();
    let ended = run(&site, "--store-url postgres://u:pa55word@127.0.0.1:1/d");
    assert_eq!(ended.status.code(), Some(1));
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    assert!(!ended.stderr.contains("pa55word"), "{}", ended.stderr);
    assert!(is_empty(site.path()), "files were left behind");
    let ended = run(&site, "--config none.toml");
    assert_eq!(ended.status.code(), Some(2), "{}", ended.stderr);
}
