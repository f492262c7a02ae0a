//! What stands around the replicas: load balancers, service managers, and every file in `deploy/`, run for real.

mod behind_nginx;
mod files;
mod manifests;
mod nginx;
mod prometheus;
mod proxy_protocol;
mod service;

use std::{path::PathBuf, process::Command, time::Duration};

use serde_json::Value;

use crate::bed::{
    process::{Outcome, run_to_end},
    replica::paceline,
};

/// The path of a shipped file.
fn shipped(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("deploy")
        .join(name)
}

/// The text of a shipped file.
fn shipped_text(name: &str) -> String {
    std::fs::read_to_string(shipped(name)).unwrap_or_else(|e| panic!("deploy/{name}: {e}"))
}

/// `text` with one thing in it replaced that must be there exactly once, as an operator's `sed` would.
fn replaced(text: &str, what: &str, with: &str) -> String {
    assert_eq!(
        text.matches(what).count(),
        1,
        "{what:?} in the shipped file"
    );
    text.replace(what, with)
}

/// Runs a tool that needs neither network nor time.
fn tool(command: Command) -> Outcome {
    run_to_end(command, Duration::from_secs(60))
}

/// All documents of a shipped YAML file.
fn yaml(name: &str) -> Vec<Value> {
    const TO_JSON: &str =
        "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", TO_JSON]).arg(shipped(name));
    let outcome = tool(python);
    assert!(outcome.status.success(), "{name}: {}", outcome.stderr);
    serde_json::from_slice(&outcome.stdout).expect("JSON, as Python writes it")
}

/// The path of the program under test.
fn program() -> String {
    paceline(&[]).get_program().to_string_lossy().into_owned()
}
