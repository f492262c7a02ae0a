//! `paceline check`: what is wrong with a configuration, or what it means.
//!
//! The report here is pure: it is made from a configuration that was read, and is added to by whoever tries the CA and
//! the store. It doesn't try them itself.

use crate::config::{Config, Faults};

/// What `check` found out, and how it ends.
#[derive(Debug)]
pub struct CheckReport {
    /// The configuration, if it could be read; further checks need it.
    pub config: Option<Config>,
    faults: Vec<String>,
    notes: Vec<String>,
}

/// Begins a report with the configuration as it was read: its faults, or its meaning in a few lines.
pub fn check(config: Result<Config, Faults>) -> CheckReport {
    match config {
        Ok(config) => CheckReport {
            notes: vec![config.summary().to_string()],
            faults: Vec::new(),
            config: Some(config),
        },
        Err(faults) => CheckReport {
            config: None,
            faults: faults.iter().map(ToString::to_string).collect(),
            notes: Vec::new(),
        },
    }
}

impl CheckReport {
    /// Adds something that makes the configuration unusable: one line, what is wrong and what to change.
    pub fn add_fault(&mut self, line: impl Into<String>) {
        self.faults.push(line.into());
    }

    /// Adds something worth knowing: one line, for standard output.
    pub fn add_note(&mut self, line: impl Into<String>) {
        self.notes.push(line.into());
    }

    /// What goes to standard output.
    pub fn stdout(&self) -> String {
        lines(&self.notes)
    }

    /// What goes to standard error: one fault a line.
    pub fn stderr(&self) -> String {
        lines(&self.faults)
    }

    /// 0, or 1 when there is any fault.
    pub fn exit_code(&self) -> u8 {
        u8::from(!self.faults.is_empty())
    }
}

fn lines(texts: &[String]) -> String {
    texts.iter().map(|text| format!("{text}\n")).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Result<Config, Faults> {
        Config::parse(text, Path::new("a.toml"), &|_| None)
    }

    #[test]
    fn a_valid_configuration_is_summed_up_and_exits_with_0() {
        let report = check(Config::load(None, &|_| None));
        assert_eq!((report.exit_code(), report.stderr().as_str()), (0, ""));
        let stdout = report.stdout();
        for part in [
            "127.0.0.1:3128",
            "127.0.0.1:9128",
            "google_image: 7/s",
            "embedded",
        ] {
            assert!(stdout.contains(part), "{part} in {stdout}");
        }
    }

    #[test]
    fn each_fault_is_one_line_on_stderr_and_the_exit_is_1() {
        let report = check(parse("[proxy]\nlisen = 1\nmax_wait = 25\n"));
        assert_eq!((report.exit_code(), report.stdout().as_str()), (1, ""));
        assert!(report.config.is_none());
        let stderr = report.stderr();
        let places: Vec<_> = stderr
            .lines()
            .map(|l| l.split(": ").next().unwrap_or_default())
            .collect();
        assert_eq!(places, ["a.toml:1", "a.toml:2", "a.toml:3"], "{stderr}");
    }

    #[test]
    fn a_later_finding_fails_a_valid_configuration() {
        let mut report = check(Config::load(None, &|_| None));
        report.add_note("store: reached");
        assert_eq!(report.exit_code(), 0);
        report.add_fault("store: refused the connection; start it");
        assert_eq!(report.exit_code(), 1);
        assert!(report.stdout().ends_with("store: reached\n"));
        assert_eq!(report.stderr(), "store: refused the connection; start it\n");
    }
}
