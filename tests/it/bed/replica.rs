//! A `paceline` process. What the tests know of it is what its operator knows: command line, files, sockets, signals.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    process::{Command, ExitStatus},
    time::Duration,
};

use rustix::process::Signal;

use super::{
    await_until::await_until,
    certs::client_tls_from,
    client::{Answer, Browser, Session},
    metrics::Scrape,
    process::{Outcome, Process, run_to_end},
    recipe::{Recipe, Site},
};

const PATIENCE: Duration = Duration::from_secs(15);

/// A running replica; dropped, it is killed.
pub struct Replica {
    process: Process,
    proxy: SocketAddr,
    admin: SocketAddr,
}

/// The command `paceline`, with an environment that says nothing about proxies or stores. `$PACELINE_TEST_BINARY` puts
/// another build (a release, say) in the place of the one that cargo made for the tests.
pub fn paceline(arguments: &[&str]) -> Command {
    let binary = std::env::var_os("PACELINE_TEST_BINARY");
    let mut command = Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_paceline").into()));
    command
        .args(arguments)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// Runs `paceline` to its end, in `dir`.
pub fn run_paceline(dir: &Path, arguments: &[&str]) -> Outcome {
    let mut command = paceline(arguments);
    command.current_dir(dir);
    run_to_end(command, PATIENCE)
}

impl Replica {
    /// Starts a replica and waits until it is ready.
    pub fn start(site: &Site, name: &str, recipe: &Recipe) -> Replica {
        let replica = Replica::start_unready(site, name, recipe);
        replica.await_ready();
        replica
    }

    /// Starts a replica and waits until it listens, ready or not.
    pub fn start_unready(site: &Site, name: &str, recipe: &Recipe) -> Replica {
        let config = recipe.write(site, name);
        Replica::spawn(
            site,
            name,
            paceline(&["run", "--config", &config.to_string_lossy()]),
        )
    }

    /// Runs a prepared command in `site` and waits until it listens.
    pub fn spawn(site: &Site, name: &str, mut command: Command) -> Replica {
        command.current_dir(site.path());
        let mut process =
            Process::start(name, site.path(), command).expect("the binary under test can be run");
        let (proxy, admin) = await_until(&format!("{name} listens"), PATIENCE, || {
            let log = process.stderr();
            let ended = process.ended();
            assert!(
                ended.is_none(),
                "{name} ended ({ended:?}) before it listened"
            );
            Some((
                address_after("proxy listening on ", &log)?,
                address_after("admin listening on ", &log)?,
            ))
        });
        Replica {
            process,
            proxy,
            admin,
        }
    }

    /// Waits for `/readyz` to say yes.
    pub fn await_ready(&self) {
        await_until("/readyz answers 200", PATIENCE, || {
            (self.readiness().ok()? == 200).then_some(())
        });
    }

    /// The status of `/readyz`.
    ///
    /// # Errors
    /// When the admin listener does not answer.
    pub fn readiness(&self) -> io::Result<u16> {
        self.admin("/readyz").map(|answer| answer.status())
    }

    /// One GET to the admin listener.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn admin(&self, target: &str) -> io::Result<Answer> {
        Session::open(self.admin, &self.admin.to_string())?.get_with(target, &["Connection: close"])
    }

    /// `/metrics`, now.
    pub fn scrape(&self) -> Scrape {
        let answer = self.admin("/metrics").expect("the admin listener answers");
        assert_eq!(answer.status(), 200, "{}", answer.text());
        Scrape::parse(&answer.text())
    }

    /// Where the operator looks.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// Where clients connect.
    pub fn proxy(&self) -> SocketAddr {
        self.proxy
    }

    /// A clear-text connection to the proxy, for `host`.
    pub fn session(&self, host: &str) -> Session {
        Session::open(self.proxy, host).expect("the proxy accepts")
    }

    /// A client of `https://HOST/` through this replica.
    pub fn browser(&self, site: &Site, host: &str) -> Browser {
        Browser::new(self.proxy, host, client_tls_from(&site.root()))
    }

    /// Sends a signal to the process.
    pub fn signal(&mut self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Gives it another configuration, sends SIGHUP, and waits until it has taken it, or has said that it cannot.
    pub fn reload(&mut self, site: &Site, name: &str, recipe: &Recipe) {
        recipe.write(site, name);
        self.read_again();
    }

    /// Sends SIGHUP, and waits until the file was read.
    pub fn read_again(&mut self) {
        let read = |log: &str| log.matches("reloaded").count();
        let before = read(&self.stderr());
        self.signal(Signal::HUP);
        await_until("the configuration is read again", PATIENCE, || {
            (read(&self.stderr()) > before).then_some(())
        });
    }

    /// Waits for its end.
    pub fn await_end(&mut self, patience: Duration) -> ExitStatus {
        self.process.await_end(patience)
    }

    /// What it has printed on stdout.
    pub fn stdout(&self) -> String {
        self.process.stdout()
    }

    /// What it has printed on stderr. Its log is written a moment after what it tells of, by a thread of its own: so it
    /// is read again until nothing more has come for that moment, or somebody writes on and on.
    pub fn stderr(&self) -> String {
        let mut log = self.process.stderr();
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.process.stderr();
            if now.len() == log.len() {
                break;
            }
            log = now;
        }
        log
    }

    /// Its process's number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The processor time that it has used, in seconds.
    pub fn processor_seconds(&self) -> f64 {
        let used = self.scrape().sum("process_cpu_seconds_total", &[]);
        used.expect("a counter of processor time")
    }

    /// Its end, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// The memory that it has resident, in bytes.
    pub fn memory(&self) -> u64 {
        self.process.memory()
    }

    /// The most memory it has had resident, in bytes.
    pub fn peak_memory(&self) -> u64 {
        self.process.peak_memory()
    }
}

fn address_after(words: &str, log: &str) -> Option<SocketAddr> {
    let rest = log.split_once(words)?.1;
    let end = rest.find(|c: char| !(c.is_ascii_hexdigit() || ".:[]".contains(c)))?;
    rest[..end].parse().ok()
}
