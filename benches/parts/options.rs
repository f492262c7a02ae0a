//! What is said on a bench's command line.

use std::{env, fmt::Display, process, str::FromStr, time::Duration};

/// Options that benches share.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often everything is measured.
    pub rounds: usize,
    /// How long each measurement takes.
    pub span: Duration,
    /// Numbers of clients.
    pub connections: Vec<usize>,
    only: Vec<String>,
}

impl Options {
    /// Reads `--rounds`, `--seconds`, `--connections` and `--only`; ends the program, with a line that says what to change, where
    /// something else is said.
    pub fn read(rounds: usize, seconds: f64, connections: &[usize]) -> Options {
        let mut options = Options {
            rounds,
            span: Duration::from_secs_f64(seconds),
            connections: connections.to_vec(),
            only: Vec::new(),
        };
        let mut words = env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_default();
            match word.as_str() {
                // By cargo.
                "--bench" => {}
                "--rounds" => options.rounds = parsed(&word, &value()),
                "--seconds" => options.span = Duration::from_secs_f64(parsed(&word, &value())),
                "--connections" => {
                    options.connections = value().split(',').map(|n| parsed(&word, n)).collect();
                }
                "--only" => options.only = value().split(',').map(str::to_owned).collect(),
                _ => wrong(
                    &word,
                    "use --rounds N, --seconds S, --connections N,N or --only NAME,NAME",
                ),
            }
        }
        options
    }

    /// Whether this table is wanted.
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// The value of an option.
pub fn parsed<T: FromStr>(option: &str, value: &str) -> T {
    value
        .parse()
        .unwrap_or_else(|_| wrong(option, format!("its value {value:?} should be a number")))
}

/// Ends the program for something that is wrong on its command line.
pub fn wrong(word: &str, what: impl Display) -> ! {
    eprintln!("{word}: {what}");
    process::exit(2)
}
