//! A Postgres cluster of the test's own, on a free port of loopback, with stock settings. Dropped, it is gone.
//!
//! Each test that needs a store has a cluster to itself: making one costs under a second, and a test that stops,
//! freezes or floods its store then disturbs no other.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use tempfile::TempDir;

use super::{
    await_until::await_until,
    certs::Identity,
    free_address,
    process::{Process, Unprivileged},
    sql::Sql,
};

const PATIENCE: Duration = Duration::from_secs(30);

/// A cluster; its superuser is `postgres`, without a password.
pub struct Postgres {
    // Before `dir`: the server must be gone when its files go.
    server: Option<Process>,
    address: SocketAddr,
    user: Option<Unprivileged>,
    /// Whether its clock can be set; see [`Postgres::set_clock`].
    clock: bool,
    dir: TempDir,
}

impl Postgres {
    /// A running cluster whose clock can be set.
    pub fn start_with_clock() -> Postgres {
        let mut cluster = Postgres::init();
        cluster.clock = true;
        cluster.set_clock(0);
        cluster.resume();
        cluster
    }

    /// Sets the server's clock so many seconds ahead of the machine's, from one statement to the next.
    pub fn set_clock(&mut self, ahead: i64) {
        let path = self.dir.path().join("clock");
        let new = self.dir.path().join("clock.new");
        fs::write(&new, format!("{ahead:+}\n")).expect("our own folder");
        // Never half written: the server reads it at each look at its clock.
        fs::rename(new, path).expect("our own folder");
    }

    /// A running cluster.
    pub fn start() -> Postgres {
        let mut cluster = Postgres::init();
        cluster.resume();
        cluster
    }

    /// A running cluster that also answers TLS, with the given certificate.
    pub fn start_with_tls(identity: &Identity) -> Postgres {
        let mut cluster = Postgres::init();
        cluster.write("server.crt", &identity.certificate);
        // Postgres refuses a key that others can read.
        let key = cluster.write("server.key", &identity.key);
        fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .expect("our own file");
        cluster.configure("ssl = on\nssl_cert_file = 'server.crt'\nssl_key_file = 'server.key'\n");
        cluster.resume();
        cluster
    }

    fn init() -> Postgres {
        let dir = tempfile::Builder::new()
            .prefix("paceline-pg-")
            .tempdir()
            .expect("a temporary folder");
        let user = Unprivileged::needed();
        if let Some(user) = &user {
            user.own(dir.path());
        }
        let cluster = Postgres {
            server: None,
            address: free_address(),
            user,
            clock: false,
            dir,
        };
        let mut initdb = cluster.command("initdb");
        initdb.args([
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
            "-D",
        ]);
        let made = initdb
            .arg(cluster.data())
            .stdout(Stdio::null())
            .output()
            .expect("initdb can be run");
        assert!(
            made.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        cluster.configure("listen_addresses = '127.0.0.1'\nmax_connections = 100\n");
        cluster
    }

    fn configure(&self, lines: &str) {
        let path = self.data().join("postgresql.conf");
        let stock = fs::read_to_string(&path).expect("what initdb wrote");
        fs::write(path, stock + lines).expect("our own file");
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.data().join(name);
        fs::write(&path, text).expect("our own folder");
        if let Some(user) = &self.user {
            user.own(&path);
        }
        path
    }

    /// Starts the server (again) and waits until it answers.
    ///
    /// # Panics
    /// When it does not, with the end of its log.
    pub fn resume(&mut self) {
        for attempt in 1.. {
            let mut command = self.command("postgres");
            command
                .arg("-D")
                .arg(self.data())
                .arg("-k")
                .arg(self.dir.path());
            command.args(["-p", &self.address.port().to_string()]);
            if self.clock {
                command
                    .env("LD_PRELOAD", faketime())
                    .env("FAKETIME_TIMESTAMP_FILE", self.dir.path().join("clock"))
                    .env("FAKETIME_NO_CACHE", "1")
                    // Time-outs go on by the real clock.
                    .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            }
            let mut server =
                Process::start("postgres", self.dir.path(), command).expect("postgres can be run");
            let answers = await_until("postgres answers or ends", PATIENCE, || {
                match server.ended() {
                    Some(_) => Some(false),
                    None => Sql::connect(&self.url()).is_ok().then_some(true),
                }
            });
            if answers {
                self.server = Some(server);
                return;
            }
            // Somebody took the port between our look and the bind. The port may move: nobody knows it yet.
            assert!(
                attempt < 5 && server.stderr().contains("in use"),
                "postgres: {}",
                server.stderr()
            );
            self.address = free_address();
        }
    }

    /// Stops the server as `pg_ctl stop -m fast` does, and waits until it is gone.
    pub fn stop(&mut self) {
        self.end(Signal::INT);
    }

    /// Ends the server as a crash of its machine would: nothing is flushed, no connection is told.
    pub fn stop_hard(&mut self) {
        self.end(Signal::QUIT);
    }

    /// Stops all its processes where they are, until [`Postgres::thaw`]. Its connections stay open.
    pub fn freeze(&mut self) {
        if let Some(server) = &mut self.server {
            server.signal_family(Signal::STOP);
        }
    }

    /// Lets a frozen server go on.
    pub fn thaw(&mut self) {
        if let Some(server) = &mut self.server {
            server.signal_family(Signal::CONT);
        }
    }

    /// A running standby that follows this server by streaming replication.
    pub fn standby(&self) -> Postgres {
        let dir = tempfile::Builder::new()
            .prefix("paceline-pg-")
            .tempdir()
            .expect("a temporary folder");
        if let Some(user) = &self.user {
            user.own(dir.path());
        }
        let mut standby = Postgres {
            server: None,
            address: free_address(),
            user: self.user,
            clock: false,
            dir,
        };
        let mut copy = standby.command("pg_basebackup");
        copy.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync"])
            .args(["-d", &self.url(), "-D"])
            .arg(standby.data());
        let made = copy.output().expect("pg_basebackup can be run");
        assert!(
            made.status.success(),
            "pg_basebackup: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        standby.resume();
        standby
    }

    fn end(&mut self, signal: Signal) {
        if let Some(mut server) = self.server.take() {
            server.signal(signal);
            server.await_end(PATIENCE);
        }
    }

    /// Where it listens, also while it is stopped.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A URL for the superuser.
    pub fn url(&self) -> String {
        url(self.address)
    }

    /// The same by way of the Unix socket.
    pub fn socket_url(&self) -> String {
        let dir = self.dir.path().to_string_lossy().replace('/', "%2F");
        format!("postgres://postgres@{dir}:{}/postgres", self.address.port())
    }

    /// A connection for the superuser.
    pub fn sql(&self) -> Sql {
        Sql::connect(&self.url()).expect("the cluster runs")
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(programs().join(program));
        command
            .current_dir(self.dir.path())
            .env_remove("PGDATA")
            .env("LC_ALL", "C");
        if let Some(user) = &self.user {
            user.run(&mut command);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.thaw();
        // SIGQUIT is immediate shutdown; SIGKILL alone would leave the server's own children behind.
        self.end(Signal::QUIT);
    }
}

/// A URL for the superuser of a cluster, or of what stands before it.
pub fn url(address: SocketAddr) -> String {
    format!("postgres://postgres@{address}/postgres")
}

/// The folder of the newest installed server's programs; Debian does not put it on the path.
fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").unwrap_or_else(|fault: io::Error| {
        panic!("no /usr/lib/postgresql ({fault}): install postgresql, as tests/run does")
    });
    let version = |path: &Path| {
        path.file_name()
            .and_then(|name| name.to_str()?.parse::<u32>().ok())
    };
    let newest = versions
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("bin/initdb").exists());
    newest
        .max_by_key(|path| version(path))
        .expect("a Postgres server: install postgresql, as tests/run does")
        .join("bin")
}

/// The library that shows a process another time.
pub fn faketime() -> PathBuf {
    let folders = fs::read_dir("/usr/lib").expect("/usr/lib");
    let library = folders
        .flatten()
        .map(|folder| folder.path().join("faketime/libfaketime.so.1"))
        .find(|path| path.exists());
    library.expect("libfaketime: install it, as tests/run does")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_answers_survives_a_restart_and_leaves_nothing_behind() {
        let mut cluster = Postgres::start();
        cluster.sql().run("CREATE TABLE kept AS SELECT 1");
        cluster.stop();
        assert!(Sql::connect(&cluster.url()).is_err());
        cluster.resume();
        assert_eq!(cluster.sql().number("SELECT count(*) FROM kept"), 1);
        let dir = cluster.dir.path().to_owned();
        drop(cluster);
        assert!(!dir.exists());
    }
}
