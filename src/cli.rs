//! The command line: what may be typed. Each subcommand other than `run` has a file of its own.
//!
//! Exit codes: 0 fine, 1 failed, 2 usage or configuration (clap ends the process with 2 by itself).

use std::{path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use http::Uri;
use thiserror::Error;

use crate::admin::PAUSES;

pub mod admin;
pub mod ca;
pub mod check;
pub mod demo;
pub mod doctor;
pub mod env;
pub mod health;
pub mod status;

/// Something typed that cannot be meant, beyond what clap sees; the exit code is 2.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Everything that may be typed after `paceline`.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(
    name = "paceline",
    version,
    about = "A forward proxy that paces requests per destination, globally, through one Postgres cursor"
)]
pub struct Cli {
    /// The configuration file; else PACELINE_CONFIG names it, else the built-in defaults are used
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What to do; nothing typed means `run`.
    #[command(subcommand)]
    command: Option<Command>,
}

impl Cli {
    /// The command that was typed, or `run`.
    pub fn chosen(&self) -> Command {
        self.command.clone().unwrap_or(Command::Run)
    }
}

/// The subcommands.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    /// Serve (the default); Ctrl-C or SIGTERM drains
    Run,
    /// Read the configuration, explain every mistake with its line, try the store; exit 0 or 1
    Check,
    /// Create or print the certificate authority
    #[command(subcommand)]
    Ca(CaCommand),
    /// Print the export lines for a worker's shell
    Env,
    /// Ask a running replica whether it is ready; exit 0 if it is, for the health checks of containers
    Health {
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
    /// What a running replica is asked for, by its admin listener
    #[command(flatten)]
    Operate(Operate),
    /// What needs no configuration
    #[command(flatten)]
    Alone(Alone),
}

impl Command {
    /// Which replica is asked, by those that ask one.
    pub fn at(&self) -> Option<&At> {
        match self {
            Command::Health { at } => Some(at),
            Command::Operate(operate) => Some(operate.at()),
            _ => None,
        }
    }
}

/// The subcommands that a running replica carries out. They mean all replicas, whichever is asked.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Operate {
    /// Show destinations, pace, queue, throttle, lockouts and replicas
    Status {
        /// The whole of /status, as JSON
        #[arg(long)]
        json: bool,
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
    /// End the lockout of a destination, for all replicas
    Unlock {
        /// The destination's name
        #[arg(value_name = "DEST")]
        destination: String,
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
    /// Send nothing to a destination for a while, from all replicas; its requests are refused meanwhile
    Pause {
        /// The destination's name
        #[arg(value_name = "DEST")]
        destination: String,
        /// For how long, such as 90s or "1h 30m"
        #[arg(value_name = "DURATION", value_parser = span)]
        duration: Duration,
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
    /// End a pause before its time
    Resume {
        /// The destination's name
        #[arg(value_name = "DEST")]
        destination: String,
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
    /// Free the number of a dead replica, for another to take
    Forget {
        /// The replica's name, as in its store.replica
        #[arg(value_name = "REPLICA")]
        replica: String,
        /// Whom to ask
        #[command(flatten)]
        at: At,
    },
}

/// How long a pause is to last; the listener would refuse the same.
fn span(text: &str) -> Result<Duration, String> {
    let span = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    match PAUSES.contains(&span) {
        true => Ok(span),
        false => Err("a pause lasts from 1 s to 30 days".to_owned()),
    }
}

/// The URL of an admin listener, which is spoken to in clear text and has no path.
fn listener(text: &str) -> Result<Uri, &'static str> {
    const FORM: &str = "write it as http://HOST:PORT";
    let uri: Uri = text.parse().map_err(|_| FORM)?;
    let is_whole = uri.scheme_str() == Some("http") && uri.authority().is_some();
    (is_whole && matches!(uri.path(), "" | "/"))
        .then_some(uri)
        .ok_or(FORM)
}

/// Which replica is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct At {
    /// The admin listener of any running replica, as http://HOST:PORT; else the one in the configuration
    #[arg(long, value_name = "URL", value_parser = listener)]
    pub admin: Option<Uri>,
}

impl Operate {
    /// Which replica is asked.
    pub fn at(&self) -> &At {
        match self {
            Operate::Status { at, .. }
            | Operate::Unlock { at, .. }
            | Operate::Pause { at, .. }
            | Operate::Resume { at, .. }
            | Operate::Forget { at, .. } => at,
        }
    }
}

/// The subcommands that read no configuration.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Alone {
    /// Show what it is for: replicas, workers and an origin on this machine, with paceline and without
    Demo(demo::Options),
    /// Run in a worker: which proxy and trust settings its clients will honour, and whether there is a way round
    Doctor(doctor::Options),
}

/// What `paceline ca` can do.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum CaCommand {
    /// Create the root and the issuer where they are missing
    Init {
        /// Let the issuer sign leaves for any host, not only for those of the destinations
        #[arg(long)]
        unconstrained: bool,
    },
    /// Print what the root and the issuer are
    Show,
    /// Print the root together with the system's roots, for SSL_CERT_FILE and REQUESTS_CA_BUNDLE
    Bundle {
        /// Write it there instead of printing it, for images that have no shell to do so
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, error::ErrorKind};

    use super::*;

    fn typed(line: &str) -> Result<(Command, Option<PathBuf>), clap::Error> {
        let cli = Cli::try_parse_from(line.split(' '))?;
        Ok((cli.chosen(), cli.config))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_is_the_default() {
        assert_eq!(typed("paceline").unwrap(), (Command::Run, None));
        assert_eq!(typed("paceline run").unwrap(), (Command::Run, None));
    }

    #[test]
    fn the_file_may_be_named_before_or_after_the_subcommand() {
        let file = Some(PathBuf::from("a.toml"));
        for (line, command) in [
            ("paceline --config a.toml", Command::Run),
            ("paceline run --config a.toml", Command::Run),
            ("paceline --config a.toml check", Command::Check),
            ("paceline check --config a.toml", Command::Check),
            ("paceline env --config=a.toml", Command::Env),
            (
                "paceline ca show --config a.toml",
                Command::Ca(CaCommand::Show),
            ),
            (
                "paceline --config a.toml ca bundle",
                Command::Ca(CaCommand::Bundle { output: None }),
            ),
        ] {
            assert_eq!(typed(line).unwrap(), (command, file.clone()), "{line}");
        }
    }

    #[test]
    fn ca_init_takes_unconstrained() {
        let init = |unconstrained| Command::Ca(CaCommand::Init { unconstrained });
        assert_eq!(typed("paceline ca init").unwrap().0, init(false));
        assert_eq!(
            typed("paceline ca init --unconstrained").unwrap().0,
            init(true)
        );
    }

    #[test]
    fn what_a_replica_is_asked_for_may_name_its_listener() {
        let at = |admin: Option<&str>| At {
            admin: admin.map(|url| url.parse().expect("a URL")),
        };
        let forget = |admin| {
            Command::Operate(Operate::Forget {
                replica: "r1".into(),
                at: at(admin),
            })
        };
        assert_eq!(typed("paceline forget r1").unwrap().0, forget(None));
        assert_eq!(
            typed("paceline forget r1 --admin http://h:1").unwrap().0,
            forget(Some("http://h:1"))
        );
        for (line, operate) in [
            (
                "paceline status",
                Operate::Status {
                    json: false,
                    at: at(None),
                },
            ),
            (
                "paceline status --json --admin http://h:1",
                Operate::Status {
                    json: true,
                    at: at(Some("http://h:1")),
                },
            ),
            (
                "paceline pause d 1h30m --admin http://h:1",
                Operate::Pause {
                    destination: "d".into(),
                    duration: Duration::from_secs(5400),
                    at: at(Some("http://h:1")),
                },
            ),
            (
                "paceline resume d",
                Operate::Resume {
                    destination: "d".into(),
                    at: at(None),
                },
            ),
            (
                "paceline unlock d --config a.toml",
                Operate::Unlock {
                    destination: "d".into(),
                    at: at(None),
                },
            ),
        ] {
            assert_eq!(typed(line).unwrap().0, Command::Operate(operate), "{line}");
        }
    }

    #[test]
    fn a_demo_is_kept_within_what_can_be_shown() {
        let Command::Alone(Alone::Demo(demo)) = typed("paceline demo").unwrap().0 else {
            panic!("not a demo");
        };
        assert_eq!((demo.rate.per_second, demo.seconds), (7.0, 10));
        assert_eq!((demo.replicas, demo.workers), (3, 12));
        let url = typed("paceline demo --store-url postgres://u:secret@h/d").unwrap();
        assert!(!format!("{url:?}").contains("secret"));
    }

    #[test]
    fn mistakes_of_usage_exit_with_2_and_help_with_0() {
        for line in [
            "paceline ca",
            "paceline --confg a.toml",
            "paceline serve",
            "paceline check a.toml",
            "paceline forget",
            "paceline unlock",
            "paceline pause d",
            "paceline pause d soon",
            "paceline pause d 0s",
            "paceline pause d 40days",
            "paceline resume",
            "paceline status d",
            "paceline --config",
            "paceline demo --seconds 0",
            "paceline demo --replicas 0",
            "paceline demo --workers 201",
            "paceline demo --rate 1000",
            "paceline demo 7",
            "paceline doctor --url http://a.test/",
            "paceline doctor a.test",
            "paceline status --admin 127.0.0.1:9128",
            "paceline status --admin https://127.0.0.1:9128",
            "paceline health --admin http://",
            "paceline unlock d --admin http://127.0.0.1:9128/status",
        ] {
            assert_eq!(typed(line).unwrap_err().exit_code(), 2, "{line}");
        }
        let version = typed("paceline --version").unwrap_err();
        assert_eq!(
            (version.kind(), version.exit_code()),
            (ErrorKind::DisplayVersion, 0)
        );
    }
}
