//! What a client finds: a replica with hosts that are paced in different ways, and the environment that `paceline env`
//! prints, whose way to the proxy leads through a link that counts connections.

use std::{os::unix::process::CommandExt, process::Command, time::Duration};

use crate::bed::{
    free_address,
    link::Link,
    origin::Origin,
    process::Process,
    recipe::{Recipe, Site},
    replica::{Replica, run_paceline},
    scripted::Scripted,
    worker::bare,
};

/// 20/s.
pub const HOST: &str = "lh3.googleusercontent.com";
/// One slot in four seconds.
pub const SLOW: &str = "slow.googleusercontent.com";
/// One slot a minute: the second request is refused at once.
pub const MINUTE: &str = "minute.googleusercontent.com";
/// Sends 103 before its answers, in bytes.
pub const HINTS: &str = "hints.googleusercontent.com";
/// Nobody listens.
pub const DOWN: &str = "down.googleusercontent.com";
/// Its certificate is from a CA that the proxy does not know.
pub const UNTRUSTED: &str = "untrusted.googleusercontent.com";
/// The same by http.
pub const CLEAR: &str = "clear.test";
/// Longer than any one run may take.
const PATIENCE: Duration = Duration::from_secs(40);

/// A program that speaks the clients' protocol.
#[derive(Clone, Copy)]
pub struct Program {
    /// The command, to which verb and arguments are added.
    pub command: fn() -> Vec<String>,
    /// Variables of its own.
    pub env: &'static [(&'static str, &'static str)],
    /// Whether it keeps its connection between the requests of one run.
    pub keeps_its_tunnel: bool,
    /// Whether it shows an application the fields of an answer.
    pub shows_fields: bool,
}

/// One answer, as a program told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The status.
    pub status: u16,
    /// `Retry-After`, if the program saw one.
    pub retry_after: Option<u64>,
    /// SHA-256 of the body, if the program tells it.
    pub digest: Option<String>,
}

/// The surroundings of one program.
pub struct Scene {
    /// The origin of all hosts that answer.
    pub origin: Origin,
    /// The origin that sends 103.
    pub hints: Scripted,
    /// Between the program and the replica.
    pub link: Link,
    /// The replica.
    pub replica: Replica,
    /// The folder.
    pub site: Site,
    exports: String,
    _untrusted: Origin,
    _clear: Origin,
}

impl Scene {
    /// Starts it all.
    pub fn new() -> Scene {
        let (origin, site) = (Origin::tls(&[HOST, SLOW, MINUTE]), Site::new());
        let (hints, untrusted, clear) = (
            Scripted::tls(HINTS),
            Origin::tls(&[UNTRUSTED]),
            Origin::plain(&[CLEAR]),
        );
        let recipe = Recipe::new()
            .proxy("ungoverned = \"deny\"")
            .destination("slow", &[SLOW], "0.25")
            .destination("minute", &[MINUTE], "\"1/min\"")
            .destination("fast", &[HOST, HINTS, DOWN, UNTRUSTED, CLEAR], "20.0")
            .origin(&origin)
            .origin(&clear)
            .scripted(&hints)
            .resolve(&format!("{DOWN}:443"), free_address())
            .resolve(&format!("{UNTRUSTED}:443"), untrusted.address());
        let replica = Replica::start(&site, "r0", &recipe);
        let link = Link::to(replica.proxy());
        // The replica took any port, and the program is to go by the link: `env` is told that port.
        let config = recipe.listen(link.address()).write(&site, "as-linked");
        let printed = run_paceline(site.path(), &["env", "--config", &config.to_string_lossy()]);
        assert!(printed.status.success(), "{}", printed.stderr);
        Scene {
            exports: printed.text(),
            origin,
            hints,
            link,
            replica,
            site,
            _untrusted: untrusted,
            _clear: clear,
        }
    }

    /// Starts a program in a shell that has evaluated the export lines and knows nothing else, in a process group of
    /// its own, so that it can be killed with all that it starts.
    pub fn start(&self, program: &Program, arguments: &[&str]) -> Process {
        self.start_with(&self.exports, program, arguments)
    }

    /// As [`Scene::start`], with a replica's port in the place of the link's.
    pub fn start_at_the_replica(&self, program: &Program, arguments: &[&str]) -> Process {
        let (link, replica) = (
            self.link.address().to_string(),
            self.replica.proxy().to_string(),
        );
        let port = |address: &str| format!("Port={}", address.rsplit(':').next().unwrap_or(""));
        let exports = self
            .exports
            .replace(&link, &replica)
            .replace(&port(&link), &port(&replica));
        self.start_with(&exports, program, arguments)
    }

    /// As [`Scene::start`], without the variables that name a file of roots.
    pub fn start_without_trust(&self, program: &Program, arguments: &[&str]) -> Process {
        let exports: String = self
            .exports
            .lines()
            .filter(|line| !line.contains("bundle"))
            .fold(String::new(), |lines, line| lines + line + "\n");
        self.start_with(&exports, program, arguments)
    }

    fn start_with(&self, exports: &str, program: &Program, arguments: &[&str]) -> Process {
        let mut shell: Command = bare("/bin/sh");
        shell.args(["-c", r#"eval "$1"; shift; exec "$@""#, "sh", exports]);
        shell.args((program.command)()).args(arguments);
        shell
            .envs(program.env.iter().copied())
            // Some programs keep things at home; it must be nobody's.
            .env("HOME", self.site.path())
            .current_dir(self.site.path())
            .process_group(0);
        Process::start("client", self.site.path(), shell).expect("a shell")
    }

    /// Runs a program to its end and reads what it tells.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, program: &Program, arguments: &[&str]) -> Vec<Told> {
        let mut process = self.start(program, arguments);
        let status = process.await_end(PATIENCE);
        let (stdout, stderr) = (process.stdout(), process.stderr());
        assert!(
            status.success(),
            "{arguments:?}: {status}\n{stdout}\n{stderr}\nwith\n{}",
            self.exports
        );
        told(&stdout)
    }
}

/// Reads the lines of a program.
pub fn told(stdout: &str) -> Vec<Told> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let mut word = || words.next().filter(|word| *word != "-");
        Told {
            status: word().and_then(|status| status.parse().ok()).unwrap_or(0),
            retry_after: word().map(|seconds| seconds.parse().expect("a number of seconds")),
            digest: word().map(str::to_owned),
        }
    };
    stdout.lines().map(line).collect()
}
