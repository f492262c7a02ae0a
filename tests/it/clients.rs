//! Real clients, unchanged, with nothing but the environment that `paceline env` prints.

use std::{process::Command, time::Duration};

use crate::bed::{
    origin::Origin,
    pattern::pattern,
    process::{Outcome, run_to_end},
    recipe::{Recipe, Site},
    replica::{Replica, run_paceline},
    worker::{bare, node_folder, python_script},
};

const HOST: &str = "lh3.googleusercontent.com";
/// For one fetch by one program, which has a start-up to get through.
const PATIENCE: Duration = Duration::from_secs(30);

/// A replica, and the text that its operator would paste into a worker's shell.
struct Scene {
    origin: Origin,
    exports: String,
    site: Site,
    _replica: Replica,
}

impl Scene {
    fn new() -> Scene {
        let (origin, site) = (Origin::tls(&[HOST]), Site::new());
        let recipe = Recipe::new()
            .destination("google_image", &["*.googleusercontent.com"], "50.0")
            .origin(&origin);
        let replica = Replica::start(&site, "r0", &recipe);
        // The replica took any port; `env` reads the port from the file.
        let config = recipe.listen(replica.proxy()).write(&site, "as-bound");
        let printed = run_paceline(site.path(), &["env", "--config", &config.to_string_lossy()]);
        assert!(printed.status.success(), "{}", printed.stderr);
        let exports = printed.text();
        Scene {
            origin,
            exports,
            site,
            _replica: replica,
        }
    }

    /// Runs a program in a shell that has evaluated the export lines and knows nothing else.
    fn run(&self, program: &[&str]) -> Outcome {
        let mut shell: Command = bare("/bin/sh");
        shell.args(["-c", r#"eval "$1"; shift; exec "$@""#, "sh", &self.exports]);
        shell.args(program).current_dir(self.site.path());
        run_to_end(shell, PATIENCE)
    }

    fn expect_pattern(&self, output: &Outcome, length: usize) {
        let (status, said) = (output.status, &output.stderr);
        assert!(status.success(), "{status}: {said}\nwith\n{}", self.exports);
        let expected: Vec<u8> = pattern(length as u64).flatten().collect();
        assert_eq!(output.stdout, expected, "{said}");
    }
}

#[test]
fn curl_fetches_with_the_printed_environment_alone() {
    let scene = Scene::new();
    let fetched = scene.run(&[
        "curl",
        "-sS",
        "--fail",
        &format!("https://{HOST}/b/1000?id=curl"),
    ]);
    scene.expect_pattern(&fetched, 1000);
    assert_eq!(scene.origin.timeline("curl").count(), 1);
}

#[test]
fn python_requests_fetches_with_the_printed_environment_alone() {
    let scene = Scene::new();
    let script = python_script("get.py");
    let fetched = scene.run(&[
        "/usr/bin/python3",
        &script,
        &format!("https://{HOST}/b/1000?id=python"),
    ]);
    scene.expect_pattern(&fetched, 1000);
    assert_eq!(scene.origin.timeline("python").count(), 1);
}

#[test]
fn node_undici_fetches_with_the_printed_environment_alone() {
    let scene = Scene::new();
    let script = format!("{}/tests/node/get.mjs", env!("CARGO_MANIFEST_DIR"));
    let packages = node_folder();
    let url = format!("https://{HOST}/b/1000?id=node");
    let fetched = scene.run(&["node", &script, &packages.to_string_lossy(), &url]);
    scene.expect_pattern(&fetched, 1000);
    assert_eq!(scene.origin.timeline("node").count(), 1);
}

#[test]
fn a_client_that_does_not_trust_the_ca_gets_nothing_and_takes_no_slot() {
    let scene = Scene::new();
    let without_ca: String = scene
        .exports
        .lines()
        .filter(|line| line.contains("PROXY") || line.contains("proxy"))
        .fold(String::new(), |lines, line| lines + line + "\n");
    let mut shell = bare("/bin/sh");
    shell.args([
        "-c",
        r#"eval "$1"; exec curl -sS "$2""#,
        "sh",
        &without_ca,
        &format!("https://{HOST}/b/1?id=x"),
    ]);
    let refused = run_to_end(shell, PATIENCE);
    assert_eq!(
        refused.status.code(),
        Some(60),
        "curl's code for an untrusted certificate"
    );
    assert_eq!(scene.origin.timeline("").count(), 0);
}
