//! Workers as their owners run them: programs of other languages, in processes of their own, that know of the proxy
//! through the environment alone.

use std::{net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use super::{await_until::await_until, process::Process, recipe::Site};

const PATIENCE: Duration = Duration::from_secs(60);

/// A Python `requests` worker that fetches with one session, one fetch after the other.
pub struct Worker {
    process: Process,
}

impl Worker {
    /// Starts a worker that will fetch `count` times with ids `NAME-0`, `NAME-1`, ... and waits until it is ready to.
    pub fn start(site: &Site, name: &str, proxy: SocketAddr, url: &str, count: usize) -> Worker {
        let mut command = bare("/usr/bin/python3");
        command
            .arg(python_script("fetch.py"))
            .args([name, &count.to_string(), url]);
        command
            .env("HTTPS_PROXY", format!("http://{proxy}"))
            .env("REQUESTS_CA_BUNDLE", site.root());
        let mut process =
            Process::start(name, site.path(), command).expect("/usr/bin/python3 can be run");
        await_until(&format!("{name} is ready"), PATIENCE, || {
            assert!(
                process.ended().is_none(),
                "{name} ended early: {}",
                process.stderr()
            );
            process.stdout().starts_with("ready\n").then_some(())
        });
        Worker { process }
    }

    /// Lets it fetch.
    pub fn go(&mut self) {
        self.process.tell("go\n");
    }

    /// Waits for its end and returns the status of each fetch.
    pub fn statuses(mut self) -> Vec<u16> {
        let end = self.process.await_end(PATIENCE);
        assert!(end.success(), "worker: {end}: {}", self.process.stderr());
        self.process
            .stdout()
            .lines()
            .skip(1)
            .map(|line| line.parse().expect("a status per line"))
            .collect()
    }
}

/// A script under `tests/it/py`. To be run by Debian's own Python, for which `tests/run` installs the libraries.
pub fn python_script(name: &str) -> String {
    format!("{}/tests/it/py/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A command with nothing in its environment but the search path.
pub fn bare(program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// What `tests/run` has put in `test-env/NAME` of the target folder: where the variable says, or by where the test
/// binary lies.
fn test_env(variable: &str, name: &str) -> PathBuf {
    let beside_binary = || {
        let binary = std::env::current_exe().ok()?;
        Some(binary.ancestors().nth(3)?.join("test-env").join(name))
    };
    std::env::var_os(variable)
        .map(PathBuf::from)
        .or_else(beside_binary)
        .expect("the test binary has a path")
}

/// The folder with the Node packages that `tests/run` installs.
pub fn node_folder() -> PathBuf {
    let folder = test_env("PACELINE_TEST_NODE", "node");
    assert!(
        folder.join("node_modules/undici").exists() && folder.join("node_modules/axios").exists(),
        "no undici or axios in {}: run tests/run",
        folder.display()
    );
    folder
}

/// The interpreter of the Python environment that `tests/run` makes, with urllib3 2 in it.
pub fn python_environment() -> String {
    let interpreter = test_env("PACELINE_TEST_PYTHON", "python").join("bin/python");
    assert!(
        interpreter.exists(),
        "no {}: run tests/run",
        interpreter.display()
    );
    interpreter.to_string_lossy().into_owned()
}

/// The folder with the programs that `tests/run --all` builds.
#[cfg(feature = "extended")]
pub fn extended_folder() -> PathBuf {
    let folder = test_env("PACELINE_TEST_EXTENDED", "extended");
    assert!(
        folder.join("client_go").exists() && folder.join("Client.class").exists(),
        "no programs in {}: run tests/run --all",
        folder.display()
    );
    folder
}
