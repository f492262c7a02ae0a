//! A finding, and a table of them for people. What is looked at, this file does not know.

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; or bad for a client that may not be here.
    Note,
    /// Something would go round the proxy, or break.
    Problem,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// What was looked at.
    pub(super) check: String,
    /// What was seen, and what to change.
    pub(super) text: String,
}

impl Finding {
    pub(super) fn new(level: Level, check: impl Into<String>, text: impl Into<String>) -> Self {
        Finding {
            level,
            check: check.into(),
            text: text.into(),
        }
    }

    pub(super) fn ok(check: impl Into<String>, text: impl Into<String>) -> Self {
        Finding::new(Level::Ok, check, text)
    }

    pub(super) fn note(check: impl Into<String>, text: impl Into<String>) -> Self {
        Finding::new(Level::Note, check, text)
    }

    pub(super) fn problem(check: impl Into<String>, text: impl Into<String>) -> Self {
        Finding::new(Level::Problem, check, text)
    }
}

/// Whether there is no problem.
pub(super) fn is_well(findings: &[Finding]) -> bool {
    findings.iter().all(|f| f.level != Level::Problem)
}

/// One line each, in columns, and the sum.
pub(super) fn table(findings: &[Finding]) -> String {
    let width = findings
        .iter()
        .map(|f| f.check.chars().count())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for Finding {
        level,
        check,
        text: seen,
    } in findings
    {
        let level = match level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Problem => "PROBLEM",
        };
        // A path or a name may hold anything; one finding stays one line.
        let seen = seen.replace(|c: char| c.is_control(), "?");
        text += &format!("{level:<7}  {check:<width$}  {seen}\n");
    }
    let of = |level| findings.iter().filter(|f| f.level == level).count();
    let sum = match (of(Level::Problem), of(Level::Note)) {
        (0, 0) => "all is well".to_owned(),
        (0, notes) => format!("no problem; notes: {notes}"),
        (problems, notes) => format!("PROBLEMS: {problems}; notes: {notes}"),
    };
    text + "\n" + &sum + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_finding_and_the_sum() {
        let mut findings = vec![
            Finding::ok("a", "fine"),
            Finding::note("long", "two\nlines"),
        ];
        assert_eq!(
            table(&findings),
            "ok       a     fine\nnote     long  two?lines\n\nno problem; notes: 1\n"
        );
        assert!(is_well(&findings));
        findings.push(Finding::problem("b", "change it"));
        assert!(table(&findings).ends_with("PROBLEM  b     change it\n\nPROBLEMS: 1; notes: 1\n"));
        assert!(!is_well(&findings));
    }
}
