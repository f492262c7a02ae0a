//! Whether the ceiling held, by what the origin saw, and the two lines that say so. Pure.

use super::sight::Figures;
use crate::{
    config::Rate,
    pacing::time::{MILLISECOND, Nanos, SECOND},
};

/// What a request may be late between its slot and the origin's notice of it: 50 ms that a slot may be late by the
/// rules, and as much for a busy machine. It moves a request from one second to the next; it makes no more of them.
const LATE: Nanos = 100 * MILLISECOND;

/// The end of the demonstration.
#[derive(Debug)]
pub(super) struct Verdict {
    /// Whether the ceiling held with paceline.
    pub(super) held: bool,
    /// It in words.
    pub(super) lines: Vec<String>,
}

impl Verdict {
    /// Judges the half with paceline; the other one, if it was run, is for comparison.
    pub(super) fn new(rate: &Rate, with: &Figures, without: Option<&Figures>) -> Self {
        let held = with.total <= most(rate, with.span) && with.busiest as u64 <= most(rate, SECOND);
        let judged = match held {
            true => format!("the ceiling of {rate} held"),
            false => format!("the ceiling of {rate} did NOT hold"),
        };
        let mut lines = vec![format!("with paceline: {}; {judged}", in_words(with))];
        lines.push(match without {
            Some(without) => format!(
                "without:       {}; {:.0} times the ceiling",
                in_words(without),
                without.average() / rate.per_second
            ),
            None => "without:       not run, for the demo was stopped".to_owned(),
        });
        Verdict { held, lines }
    }
}

fn in_words(figures: &Figures) -> String {
    let average = figures.average();
    let decimals = if average < 100.0 { 1 } else { 0 };
    format!("{average:.decimals$}/s, busiest second {}", figures.busiest)
}

/// The most requests that can arrive within a span, both ends included, at the ceiling.
fn most(rate: &Rate, span: Nanos) -> u64 {
    let interval = Nanos::try_from(rate.interval_nanos()).unwrap_or(Nanos::MAX);
    let fit = span.saturating_add(LATE).max(0) / interval.max(1);
    fit.unsigned_abs() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(total: u64, span: Nanos, busiest: usize) -> Figures {
        Figures {
            total,
            span,
            busiest,
            ..Figures::default()
        }
    }

    fn judge(with: Figures) -> Verdict {
        let rate = Rate::per_second(7.0).expect("a rate");
        Verdict::new(&rate, &with, Some(&figures(4121, 10 * SECOND, 431)))
    }

    #[test]
    fn the_pace_itself_is_held() {
        let verdict = judge(figures(71, 10 * SECOND, 8));
        assert!(verdict.held);
        assert_eq!(
            verdict.lines,
            [
                "with paceline: 7.0/s, busiest second 8; the ceiling of 7/s held",
                "without:       412/s, busiest second 431; 59 times the ceiling",
            ]
        );
    }

    #[test]
    fn one_request_too_many_in_a_second_or_in_all_is_not_held() {
        for (total, busiest, held) in [
            (71, 8, true),
            (71, 9, false),
            (72, 8, false),
            (213, 24, false),
        ] {
            let verdict = judge(figures(total, 10 * SECOND, busiest));
            assert_eq!(verdict.held, held, "{total} in all, {busiest} in a second");
            assert_eq!(verdict.lines[0].contains("NOT"), !held);
        }
    }

    #[test]
    fn a_demo_that_was_stopped_early_has_a_verdict_on_what_was_seen() {
        let rate = Rate::per_second(7.0).expect("a rate");
        for (seen, held) in [
            (figures(0, 0, 0), true),
            (figures(1, 0, 1), true),
            (figures(9, SECOND, 9), false),
        ] {
            let verdict = Verdict::new(&rate, &seen, None);
            assert_eq!((verdict.held, verdict.lines.len()), (held, 2));
        }
    }
}
