//! git, which fetches and does no more than fetch, and tells of an error its status alone.

use std::{fs, path::Path, process::Command, time::Duration};

use super::{
    claims,
    scene::{Program, Scene},
};
use crate::bed::{
    process::run_to_end,
    scripted::{Scripted, say},
    worker::bare,
};

const PROGRAM: Program = Program {
    command: || {
        vec![format!(
            "{}/tests/it/sh/client_git",
            env!("CARGO_MANIFEST_DIR")
        )]
    },
    env: &[("GIT_TERMINAL_PROMPT", "0")],
    keeps_its_tunnel: false,
    shows_fields: false,
};

#[test]
fn it_waits_four_seconds_in_the_queue() {
    claims::waits_four_seconds(&PROGRAM);
}

#[test]
fn it_sees_a_refusal_and_is_not_confused_by_hints() {
    claims::sees_refusals_and_not_hints(&PROGRAM);
}

#[test]
fn killed_in_the_queue_it_takes_no_slot() {
    claims::killed_in_the_queue_is_never_sent(&PROGRAM);
}

#[test]
fn without_the_ca_it_gets_nothing() {
    claims::is_rejected_without_the_ca(&PROGRAM);
}

#[test]
fn no_failure_makes_it_storm() {
    claims::does_not_storm(&PROGRAM);
}

/// By the protocol of plain files, in which each object is a GET.
#[test]
fn a_clone_is_many_paced_requests_on_one_tunnel() {
    let scene = Scene::new();
    let work = scene.site.path().join("work");
    let git = |arguments: &[&str]| {
        let mut git: Command = bare("git");
        git.args([
            "-C",
            &work.to_string_lossy(),
            "-c",
            "user.name=x",
            "-c",
            "user.email=x@x.test",
        ]);
        git.args(arguments).env("HOME", scene.site.path());
        let done = run_to_end(git, Duration::from_secs(10));
        assert!(done.status.success(), "{arguments:?}: {}", done.stderr);
    };
    fs::create_dir(&work).unwrap();
    git(&["init", "-q", "-b", "main"]);
    fs::write(work.join("file"), "content\n").unwrap();
    git(&["add", "file"]);
    git(&["commit", "-q", "-m", "first"]);
    git(&["update-server-info"]);
    serve(&scene.hints, &work.join(".git"), "/repo.git");

    const CLONE: Program = Program {
        command: || ["git", "clone", "-q"].map(str::to_owned).to_vec(),
        ..PROGRAM
    };
    let url = format!("https://{}/repo.git", scene.hints.name());
    scene.run(&CLONE, &[&url, "copy"]);
    let copied = fs::read_to_string(scene.site.path().join("copy/file")).unwrap();
    assert_eq!(copied, "content\n");
    let exchanges = scene.hints.exchanges();
    assert!(
        exchanges.len() >= 5,
        "references, head, commit, tree, file: {exchanges:?}"
    );
    for pair in exchanges.windows(2) {
        let gap = pair[1].at - pair[0].at;
        assert!(gap >= Duration::from_millis(25), "{gap:?} at 20/s");
    }
    assert_eq!(scene.link.accepted(), 1);
}

/// Puts a folder's files at `prefix`, as a server of files would.
fn serve(origin: &Scripted, folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{prefix}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            serve(origin, &entry.path(), &path);
            continue;
        }
        let content = fs::read(entry.path()).unwrap();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n",
            content.len()
        );
        let steps = vec![say(head), say(content)];
        origin.script(&format!("{path}?service=git-upload-pack"), steps.clone());
        origin.script(&path, steps);
    }
}
