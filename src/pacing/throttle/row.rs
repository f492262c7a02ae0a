//! The throttle state as the text of a row: `<word> <JSON>`.
//!
//! The first word is the multiplier, or `0.VERSION` while nothing is to be sent: a pause that was made longer reads
//! otherwise than before. It is what a reservation compares: one that was asked for in ignorance of a changed pace takes no
//! slot. Instants are nanoseconds of the store's clock.

use serde_json::{Value, json};

use super::{CAP, EVIDENCE_LIMIT, Evidence, Latch, Moment, NUMBER_LIMIT, Stop, Throttle};
use crate::{
    config::LONGEST_STOP,
    pacing::time::{LocalTime, Nanos, nanos},
};

/// The word of a row that is not there.
pub const NO_ROW: &str = "1";
/// The longest text that is read, in bytes. A longer one was written by nobody.
pub const LONGEST: usize = 16 * 1024;

/// The word of a row.
pub fn word(text: Option<&str>) -> &str {
    text.map_or(NO_ROW, |t| t.split(' ').next().unwrap_or_default())
}

impl Throttle {
    /// The word that this state is written with at `now`.
    pub fn word(&self, now: LocalTime) -> String {
        match self.regime(now).halt {
            Some(_) => format!("0.{}", self.version()),
            None => self.multiplier.to_string(),
        }
    }

    /// The text of its row.
    pub fn to_text(&self, at: Moment) -> String {
        format!("{} {}", self.word(at.now), self.state(at, self.version))
    }

    /// Whether `other` differs in its version at most.
    pub fn says_the_same(&self, other: &Throttle, at: Moment) -> bool {
        self.state(at, 0) == other.state(at, 0)
    }

    fn state(&self, at: Moment, version: u64) -> Value {
        let instant = |t: LocalTime| t.0.saturating_add(at.offset.unwrap_or(0));
        let latch = |l: Latch| match l.stop {
            None => json!({ "at": l.at }),
            Some(s) => json!({
                "at": l.at,
                "until": s.written.unwrap_or_else(|| instant(s.until)),
                "span": s.span,
                "status": s.status,
            }),
        };
        let evidence: Vec<Value> = self
            .evidence
            .iter()
            .map(|e| json!([e.url, instant(e.at), e.status]))
            .collect();
        json!({
            "version": version,
            "episode": self.episode,
            "multiplier": self.multiplier,
            "clean": self.clean,
            "widened": self.widened,
            "resumed": self.resumed,
            "hold": latch(self.hold),
            "lockout": latch(self.lockout),
            "pause": latch(self.pause),
            "evidence": evidence,
        })
    }

    /// Reads a row; `None` for anything that no replica wrote. An instant further ahead than it was ever meant to be is
    /// taken back to that: the store's clock was another then.
    pub fn parse(text: &str, at: Moment) -> Option<Throttle> {
        if text.len() > LONGEST {
            return None;
        }
        let (word, state) = text.split_once(' ')?;
        let state: Value = serde_json::from_str(state).ok()?;
        let sane = |value: &Value| value.as_u64().filter(|n| *n <= NUMBER_LIMIT);
        let number = |key: &str| state.get(key).and_then(sane);
        let multiplier = u32::try_from(number("multiplier")?).ok()?;
        if !(1..=CAP).contains(&multiplier) || !multiplier.is_power_of_two() {
            return None;
        }
        if !word.starts_with("0.") && word != multiplier.to_string() {
            return None;
        }
        let instant = |t: Nanos| LocalTime(t.saturating_sub(at.offset.unwrap_or(0)));
        let latch = |key: &str| {
            let value = state.get(key)?;
            let decided = value.get("at").and_then(sane)?;
            let Some(until) = value.get("until") else {
                return Some(Latch::free(decided));
            };
            let span = value.get("span").and_then(Value::as_i64)?;
            let span = span.clamp(0, nanos(LONGEST_STOP));
            let status = value.get("status").and_then(Value::as_u64)?;
            let written = until.as_i64()?;
            let stop = Stop {
                until: instant(written).min(at.now.plus(span)),
                span,
                status: u16::try_from(status).ok()?,
                written: Some(written),
            };
            Some(Latch {
                stop: Some(stop),
                at: decided,
            })
        };
        // Rows that an earlier build wrote have neither.
        let version_of = |key: &str| state.get(key).map_or(Some(0), sane);
        let evidence = state.get("evidence").and_then(Value::as_array)?;
        let evidence: Option<Vec<Evidence>> = evidence
            .iter()
            .take(EVIDENCE_LIMIT)
            .map(|e| {
                let seen = instant(e.get(1)?.as_i64()?);
                Some(Evidence {
                    url: e.get(0)?.as_u64()?,
                    at: seen.min(at.now),
                    status: u16::try_from(e.get(2)?.as_u64()?).ok()?,
                })
            })
            .collect();
        Some(Throttle {
            version: number("version")?,
            multiplier,
            episode: number("episode")?,
            widened: version_of("widened")?,
            resumed: version_of("resumed")?,
            clean: u32::try_from(number("clean")?).ok()?,
            hold: latch("hold")?,
            lockout: latch("lockout")?,
            pause: latch("pause")?,
            evidence: evidence?,
        })
    }
}
