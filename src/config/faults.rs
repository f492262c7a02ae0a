//! Mistakes in a configuration: where each is, what is wrong, and what to change.
//!
//! A fault never holds the value of a key that may be secret; the parsers see to that by not passing it in.

use std::fmt;

use std::error::Error;

/// Where a fault is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The file as a whole.
    File(String),
    /// A line of the file, counted from 1.
    Line(String, usize),
    /// An environment variable.
    Variable(&'static str),
}

/// One mistake. Its `Display` is one line: `file:line: key: what is wrong; what to change`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Where it is.
    pub place: Place,
    /// The full key, as `proxy.listen`; empty where no key is concerned.
    pub key: String,
    /// What is wrong and what to change.
    pub complaint: Complaint,
}

/// What is wrong with a value, and what to change: two clauses without a full stop.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Complaint {
    /// What is wrong.
    pub wrong: String,
    /// What to change.
    pub fix: String,
}

impl Complaint {
    /// A complaint of its two clauses.
    pub fn new(wrong: impl Into<String>, fix: impl Into<String>) -> Self {
        Complaint {
            wrong: wrong.into(),
            fix: fix.into(),
        }
    }

    /// From the message of an error that already has the form `what is wrong; what to change`.
    pub fn from_message(error: &dyn Error) -> Self {
        let message = error.to_string();
        match message.split_once("; ") {
            Some((wrong, fix)) => Complaint::new(wrong, fix),
            None => Complaint::new(message, "correct it"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::File(file) => write!(f, "{}: ", file.escape_debug())?,
            Place::Line(file, line) => write!(f, "{}:{line}: ", file.escape_debug())?,
            Place::Variable(name) => write!(f, "{name}: ")?,
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "{}; {}", self.complaint.wrong, self.complaint.fix)
    }
}

/// All mistakes of a configuration, in the order of the file; never empty as an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// Sorts the faults by their place.
    pub fn new(mut faults: Vec<Fault>) -> Self {
        faults.sort();
        faults.dedup();
        Faults(faults)
    }

    /// The faults, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter()
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl Error for Faults {}

/// A text as a message shows it: quoted, escaped, and cut where it is long.
pub(super) fn shown(text: &str) -> String {
    format!("{:?}", cut(text))
}

/// The beginning of a text, as long as a message has room for.
pub(super) fn cut(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: usize) -> Fault {
        Fault {
            place: Place::Line("a.toml".into(), line),
            key: "proxy.listen".into(),
            complaint: Complaint::new("bad", "change it"),
        }
    }

    #[test]
    fn faults_print_one_a_line_in_the_order_of_the_file() {
        let faults = Faults::new(vec![at(10), at(9), at(9)]);
        assert_eq!(
            faults.to_string(),
            "a.toml:9: proxy.listen: bad; change it\na.toml:10: proxy.listen: bad; change it"
        );
    }

    #[test]
    fn a_shown_value_stays_on_one_short_line() {
        let text = shown(&"\n".repeat(500));
        assert!(!text.contains('\n') && text.len() < 200, "{text}");
    }
}
