//! What one replica keeps of a shared throttle: the state it goes by, what it last read in the row, and what it has to
//! write there.
//!
//! A change is in force here at once and is then written, on the condition that the row still holds what was read; if
//! it does not, the two are merged and written again. Without a store, or while it is away, the state is this replica's
//! own. Who carries the text to and fro, this file does not know.

use super::{
    Halt, Moment, Regime, Rules, Stop, Throttle,
    row::{NO_ROW, word},
};
use crate::pacing::time::{LocalTime, MILLISECOND, Nanos};

/// Clean answers are told to the others together, at most this often, or when they are enough.
const TELL_EVERY: Nanos = 250 * MILLISECOND;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Tracker {
    rules: Rules,
    state: Throttle,
    /// The row as it was last read; `None` while there is none.
    row: Option<String>,
    /// The episode of the row: that of the slots that its cursor grants.
    row_episode: u64,
    /// The state has to be written to the row.
    dirty: bool,
    /// Clean answers that the state does not count yet.
    clean: u32,
    told_at: LocalTime,
    /// A pause that was ended before its time: the cursor may still stand at its end.
    ended: Option<Stop>,
}

/// Something that bears on the pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A throttle status, for a request of this episode, with what `Retry-After` says.
    Throttled {
        /// The episode of the request's slot.
        episode: u64,
        /// The pause that is asked for.
        retry_after: Option<Nanos>,
    },
    /// A clean answer, for a request of this episode.
    Clean {
        /// The episode of the request's slot.
        episode: u64,
    },
    /// A lockout status.
    Forbidden {
        /// The hash of the URL.
        url: u64,
        /// The status.
        status: u16,
    },
    /// An operator pauses.
    Pause(Nanos),
    /// An operator ends a pause, and the slow-down.
    Resume,
    /// An operator ends a lockout.
    Unlock,
}

/// A write to the row that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What the row must still hold; `None`: it must not be there.
    pub expected: Option<String>,
    /// What to put there.
    pub text: String,
    /// The state's version.
    pub version: u64,
    /// Afterwards the cursor has to be moved to the end of this, for programs that know of nothing else.
    pub moves_cursor: Option<Stop>,
    /// Afterwards the cursor is to be moved back if it still stands at the end of this.
    pub frees_cursor: Option<Stop>,
}

impl Tracker {
    /// A tracker that has read nothing.
    pub fn new(rules: Rules) -> Self {
        Tracker {
            rules,
            state: Throttle::default(),
            row: None,
            row_episode: 0,
            dirty: false,
            clean: 0,
            told_at: LocalTime(Nanos::MIN),
            ended: None,
        }
    }

    /// New rules.
    pub fn reconfigure(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Takes in an event. Returns whether what is in force may have changed.
    pub fn apply(&mut self, at: Moment, event: Event) -> bool {
        let rules = self.rules;
        let state = &mut self.state;
        state.lapse(at);
        let changed = match event {
            Event::Clean { episode } => return self.count_clean(at, episode),
            Event::Throttled {
                episode,
                retry_after,
            } => state.throttled(at, episode, retry_after, &rules),
            Event::Forbidden { url, status } => state.forbidden(at, url, status, &rules),
            Event::Pause(span) => state.pause(at, span),
            Event::Resume => {
                let (any, pause) = state.resume(at);
                self.ended = pause.or(self.ended);
                any
            }
            Event::Unlock => state.unlock(at),
        };
        if changed && matches!(event, Event::Throttled { .. }) {
            self.clean = 0;
        }
        self.dirty |= changed;
        changed
    }

    /// A clean answer counts when its request had its slot at the present pace; of others it says nothing.
    fn count_clean(&mut self, at: Moment, episode: u64) -> bool {
        if self.state.multiplier() == 1 || episode < self.state.episode() {
            return false;
        }
        self.clean = self.clean.saturating_add(1);
        let enough = self.state.clean.saturating_add(self.clean) >= self.rules.recovery_after;
        enough && self.tell_clean(at)
    }

    fn tell_clean(&mut self, at: Moment) -> bool {
        let clean = std::mem::take(&mut self.clean);
        self.told_at = at.now;
        let changed = self.state.clean(at, clean, &self.rules);
        self.dirty |= changed;
        changed
    }

    /// Takes in what the row holds. Returns whether what is in force may have changed.
    pub fn seen(&mut self, at: Moment, text: Option<&str>) -> bool {
        let known = self.row.as_deref() == text;
        if known && (text.is_some() || self.state.is_neutral()) {
            return false;
        }
        self.row = text.map(str::to_owned);
        let row = text.and_then(|t| Throttle::parse(t, at));
        self.row_episode = row.as_ref().map_or(0, Throttle::episode);
        let before = (self.state.multiplier(), self.state.episode());
        match row {
            Some(row) if self.dirty && !row.says_the_same(&self.state, at) => {
                self.state = self.state.merged(&row, at, &self.rules);
            }
            Some(row) if self.dirty || row.version() >= self.state.version() => {
                self.state = row;
                self.dirty = false;
            }
            // An older row of before any protest, or none: where ours says nothing either, it is forgotten with all it counted,
            // or what its slots are told of their episode would be older than what is known here, for ever.
            Some(row) if row.is_neutral() && self.state.is_neutral() => self.state = row,
            None if text.is_none() && self.state.is_neutral() && !self.dirty => {
                self.state = Throttle::default();
            }
            // An older row (the store is another, or was restored), none, or garbage: ours is put back.
            _ => self.dirty = true,
        }
        self.dirty |= self.state.lapse(at);
        if (self.state.multiplier(), self.state.episode()) != before {
            self.clean = 0;
        }
        true
    }

    /// Whether something is over, so that [`Tracker::lapse`] has something to do.
    pub fn is_due(&self, now: LocalTime) -> bool {
        self.state.is_due(now)
    }

    /// Ends what is over.
    pub fn lapse(&mut self, at: Moment) {
        self.dirty |= self.state.lapse(at);
    }

    /// What has to be written to the row now.
    pub fn write(&mut self, at: Moment) -> Option<Write> {
        if self.clean > 0 && at.now.since(self.told_at) >= TELL_EVERY {
            self.tell_clean(at);
        }
        self.dirty.then(|| Write {
            expected: self.row.clone(),
            text: self.state.to_text(at),
            version: self.state.version(),
            moves_cursor: self.state.holds_cursor(at.now),
            frees_cursor: self.ended,
        })
    }

    /// When [`Tracker::write`] will have something at the latest, if nothing else happens.
    pub fn writes_at(&self) -> Option<LocalTime> {
        if self.dirty {
            return Some(LocalTime(Nanos::MIN));
        }
        (self.clean > 0).then(|| self.told_at.plus(TELL_EVERY))
    }

    /// A write was made, and the cursor moved as it asked if it has `followed`; if not, both are made again.
    pub fn wrote(&mut self, write: &Write, followed: bool) {
        self.row = Some(write.text.clone());
        if followed && self.state.version() == write.version {
            self.dirty = false;
            self.row_episode = self.state.episode();
            self.ended = None;
        }
    }

    /// Whether the row holds all that is known here.
    pub fn is_settled(&self) -> bool {
        !self.dirty
    }

    /// No store keeps this state: there is nothing to write.
    pub fn settle_alone(&mut self) {
        self.dirty = false;
        self.row_episode = self.state.episode();
    }

    /// What is in force.
    pub fn regime(&self, now: LocalTime) -> Regime {
        self.state.regime(now)
    }

    /// Why nothing is sent, if so.
    pub fn halt(&self, now: LocalTime) -> Option<Halt> {
        self.regime(now).halt
    }

    /// The word that a reservation has to find in the row.
    pub fn row_word(&self) -> &str {
        self.row.as_deref().map_or(NO_ROW, |text| word(Some(text)))
    }

    /// The episode of slots granted by the shared cursor.
    pub fn row_episode(&self) -> u64 {
        self.row_episode
    }

    /// The episode of slots of this replica's own.
    pub fn episode(&self) -> u64 {
        self.state.episode()
    }

    /// Whether there is anything that the others, or an operator, may have to be told of.
    pub fn is_neutral(&self) -> bool {
        self.state.is_neutral() && !self.dirty
    }
}

#[cfg(test)]
mod tests;
