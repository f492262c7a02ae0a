//! A child process that cannot outlive its test, with what it prints kept in files. Knows no program in particular.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::await_until::await_until;

/// A running child; dropped, it is killed, and when the test fails its last lines are printed.
pub struct Process {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    /// Starts `command` with its output in `NAME.out` and `NAME.err` under `logs`.
    ///
    /// # Errors
    /// When the program is missing or cannot be run.
    pub fn start(name: &str, logs: &Path, mut command: Command) -> io::Result<Process> {
        let (stdout, stderr) = (
            logs.join(format!("{name}.out")),
            logs.join(format!("{name}.err")),
        );
        let child = command
            .stdin(Stdio::piped())
            .stdout(File::create(&stdout)?)
            .stderr(File::create(&stderr)?)
            .spawn()
            .map_err(|fault| {
                io::Error::new(
                    fault.kind(),
                    format!("{:?}: {fault}", command.get_program()),
                )
            })?;
        Ok(Process {
            name: name.to_owned(),
            child,
            stdout,
            stderr,
        })
    }

    /// What it has printed on stdout.
    pub fn stdout(&self) -> String {
        read_lossy(&self.stdout)
    }

    /// What it has printed on stderr.
    pub fn stderr(&self) -> String {
        read_lossy(&self.stderr)
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes to its stdin.
    pub fn tell(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().expect("stdin is a pipe");
        // A child that has ended already is found by whoever looks at its output.
        let _ = stdin
            .write_all(text.as_bytes())
            .and_then(|()| stdin.flush());
    }

    /// Sends a signal to this process alone.
    pub fn signal(&mut self, signal: Signal) {
        // Already gone is fine: some tests race with an end that they ask for.
        let _ = kill_process(pid(&self.child), signal);
    }

    /// Sends a signal to this process and to all its children; to it first, so that it makes no more of them.
    pub fn signal_family(&mut self, signal: Signal) {
        self.signal(signal);
        let id = self.id();
        let children = format!("/proc/{id}/task/{id}/children");
        let children = read_lossy(Path::new(&children));
        for child in children.split_whitespace().filter_map(|n| n.parse().ok()) {
            if let Some(child) = Pid::from_raw(child) {
                let _ = kill_process(child, signal);
            }
        }
    }

    /// Kills the group that it leads, as a supervisor kills a worker with all that it has started. Only for a command
    /// that was given a group of its own.
    pub fn kill_group(&mut self) {
        // Already gone is fine here too.
        let _ = kill_process_group(pid(&self.child), Signal::KILL);
    }

    /// Its end, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child
            .try_wait()
            .expect("a child that is ours to wait for")
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it has not ended within `patience`.
    pub fn await_end(&mut self, patience: Duration) -> ExitStatus {
        let what = format!("{} ends", self.name);
        await_until(&what, patience, || self.ended())
    }

    /// The most memory it has had resident, in bytes (`VmHWM`).
    pub fn peak_memory(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    /// The memory that it has resident, in bytes (`VmRSS`).
    pub fn memory(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    fn status_bytes(&self, name: &str) -> u64 {
        let status = read_lossy(Path::new(&format!("/proc/{}/status", self.id())));
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kibibytes =
            line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        kibibytes.expect("the memory of a process that runs") * 1024
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let stderr = self.stderr();
            let lines: Vec<&str> = stderr.lines().collect();
            let tail = &lines[lines.len().saturating_sub(60)..];
            eprintln!(
                "---- {}, last lines of stderr\n{}\n----",
                self.name,
                tail.join("\n")
            );
        }
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn read_lossy(path: &Path) -> String {
    std::fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default()
}

/// What a program that has ended leaves behind.
pub struct Outcome {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to stdout, as it is.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr, as text.
    pub stderr: String,
}

impl Outcome {
    /// Its stdout as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Runs a program to its end.
///
/// # Panics
/// When it is missing or has not ended within `patience`.
pub fn run_to_end(command: Command, patience: Duration) -> Outcome {
    let logs = tempfile::tempdir().expect("a temporary folder");
    let name = command
        .get_program()
        .to_string_lossy()
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_owned();
    let mut process =
        Process::start(&name, logs.path(), command).unwrap_or_else(|fault| panic!("{fault}"));
    let status = process.await_end(patience);
    let stdout = std::fs::read(&process.stdout).expect("a file of our own");
    Outcome {
        status,
        stdout,
        stderr: process.stderr(),
    }
}

/// The user that Postgres and pgbouncer run as when the test runs as root, which both refuse to be.
#[derive(Clone, Copy)]
pub struct Unprivileged {
    uid: u32,
    gid: u32,
}

impl Unprivileged {
    /// The user `postgres` when we are root; `None` when we are somebody else already.
    pub fn needed() -> Option<Unprivileged> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let passwd = std::fs::read_to_string("/etc/passwd").expect("/etc/passwd");
        let line = passwd.lines().find(|line| line.starts_with("postgres:"));
        let mut fields = line
            .expect("a user postgres: install postgresql, as tests/run does")
            .split(':')
            .skip(2);
        let mut next = || {
            fields
                .next()
                .and_then(|id| id.parse().ok())
                .expect("a numeric id in /etc/passwd")
        };
        Some(Unprivileged {
            uid: next(),
            gid: next(),
        })
    }

    /// Gives a file or folder to that user.
    pub fn own(&self, path: &Path) {
        std::os::unix::fs::chown(path, Some(self.uid), Some(self.gid))
            .expect("root may give files away");
    }

    /// Makes a command run as that user.
    pub fn run(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }
}
