//! The replicas that hold a number, for those who look on, and for those who free one.

use super::{Membership, State, lease::Seen};
use crate::pacing::time::{LocalTime, seconds};

/// A replica, for those who look on.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name; empty where its row cannot be read.
    pub replica: String,
    /// Whether it is this one.
    pub is_self: bool,
    /// Whether it is heard (`live`), heard and yet on its share (`alone`), silent, or has lapsed.
    pub state: &'static str,
    /// How long it has not been heard, in seconds.
    pub silent_for: f64,
}

impl Member {
    /// Its name, or what there is to say instead.
    pub fn name(&self) -> &str {
        match self.replica.as_str() {
            "" => "unknown",
            name => name,
        }
    }
}

impl Membership {
    pub(super) fn member(
        &self,
        state: &State,
        number: u32,
        row: &Seen,
        now: LocalTime,
    ) -> Option<Member> {
        let lease = row.lease.as_ref()?;
        let is_self = lease.incarnation == self.incarnation;
        Some(Member {
            number,
            replica: lease.word.replica.clone(),
            is_self,
            state: match () {
                () if is_self && state.footing.is_heard(now) && state.footing.has_claimed() => {
                    "live"
                }
                () if row.has_lapsed(now, self.ttl) => "lapsed",
                () if row.is_silent(now, self.ttl) => "silent",
                () if lease.word.alone => "alone",
                () => "live",
            },
            silent_for: seconds(row.age(now)),
        })
    }

    /// All replicas that hold a number.
    pub fn members(&self, now: LocalTime) -> Vec<Member> {
        let state = self.lock();
        let rows = state.rows.iter();
        rows.filter_map(|(number, row)| self.member(&state, *number, row, now))
            .collect()
    }

    /// Live replicas, this one included, and those that the others leave room for: silent ones, and those on their share.
    pub fn count(&self, now: LocalTime) -> (usize, usize) {
        let members = self.members(now);
        let live = members.iter().filter(|m| m.state == "live").count();
        let lapsed = members.iter().filter(|m| m.state == "lapsed").count();
        (live, members.len() - live - lapsed)
    }

    /// The row of the silent or lapsed replica called `name`, to be freed: its key, and what stands in it.
    ///
    /// # Errors
    /// There is none, or it lives; the text says which.
    pub fn to_forget(&self, name: &str, now: LocalTime) -> Result<(String, String), String> {
        let members = self.members(now);
        let Some(member) = members.iter().find(|m| m.replica == name) else {
            return Err(format!(
                "no replica is called {name}; those known: {}",
                self.holders()
            ));
        };
        if matches!(member.state, "live" | "alone") {
            return Err(format!(
                "{name} lives; stop it first, which frees its number by itself"
            ));
        }
        let row = self
            .lock()
            .rows
            .get(&member.number)
            .map(|r| r.text.clone())
            .unwrap_or_default();
        Ok((self.key(member.number), row))
    }

    /// The key and the incarnation of our own lease, if we have one.
    pub fn own(&self) -> Option<(String, String)> {
        let number = self.lock().number?;
        Some((self.key(number), self.incarnation.clone()))
    }

    pub(super) fn holders(&self) -> String {
        let members = self.members(LocalTime::now());
        let say = |m: &Member| match m.state {
            "live" | "alone" => format!("{} holds {}", m.name(), m.number),
            other => format!(
                "{} holds {} ({other} for {:.0} s)",
                m.name(),
                m.number,
                m.silent_for
            ),
        };
        if members.is_empty() {
            return "none yet".to_owned();
        }
        members.iter().map(say).collect::<Vec<_>>().join(", ")
    }
}
