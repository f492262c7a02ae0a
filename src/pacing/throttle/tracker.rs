//! What one replica keeps of a shared throttle: the state it goes by, what it last read in the row, and what it has to
//! write there.
//!
//! A change is in force here at once and is then written, on the condition that the row still holds what was read; if
//! it does not, the two are merged and written again. Clean answers are not part of the state until they are written: they
//! are added to whatever the row says then, so that each counts once, whoever heard it. Without a store, or while it is
//! away, the state is this replica's own. Who carries the text to and fro, this file does not know.

use super::{
    Halt, Moment, Regime, Rules, Stop, Throttle,
    row::{NO_ROW, word},
};
use crate::pacing::time::{LocalTime, MILLISECOND, Nanos};

/// Clean answers are told to the others together, at most this often, or when they are enough.
const TELL_EVERY: Nanos = 250 * MILLISECOND;
/// Whatever the row does, it is written no more often than this, after so many writes at once.
const WRITE_EVERY: Nanos = 100 * MILLISECOND;
const WRITES_AT_ONCE: Nanos = 10;
/// What was written and is not there is written again after this long.
const REPEAT_AFTER: Nanos = 500 * MILLISECOND;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Tracker {
    rules: Rules,
    state: Throttle,
    /// The row as it was last read; `None` while there is none.
    row: Option<String>,
    /// The episode of the row: that of the slots that its cursor grants.
    row_episode: u64,
    /// The version of the newest row that was read or written.
    newest: u64,
    /// The state has to be written to the row: it says something new, or the row that was read is older (the store was
    /// restored, or is another; or the reply was merely late).
    dirty: bool,
    outdated: bool,
    /// The state's pace is news to the row, and not only its stops.
    paced: bool,
    /// The cursor is yet to be moved to the end of a stop, or back from there.
    unmoved: bool,
    /// Clean answers that neither the state nor the row counts yet, and how many of them a write under way carries.
    clean: u32,
    under_way: u32,
    told_at: LocalTime,
    /// Of the stops that were ended before their time the one that would have ended first, and the largest multiplier since:
    /// the cursor may stand there still.
    ended: Option<(Stop, u32)>,
    /// Versions are stamps of our own clock, because the store's is unknown.
    adrift: bool,
    /// When the next write would be due if they came evenly, and the last one.
    writes: LocalTime,
    last_write: Option<(u64, LocalTime)>,
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
    /// What the row must still hold, if it is there; `None`: it must not be there, or hold NULL.
    pub expected: Option<String>,
    /// What to put there.
    pub text: String,
    /// The version written.
    pub version: u64,
    /// Afterwards the cursor has to be moved to the end of this, for programs that know of nothing else.
    pub moves_cursor: Option<Stop>,
    /// Afterwards the cursor is to be moved back if it still stands at the end of this.
    pub frees_cursor: Option<Stop>,
    /// The largest multiplier that slots may have been granted under which others still hold.
    pub multiplier: u32,
    /// What the text says, and the version of the state that it was made from.
    state: Throttle,
    base: u64,
}

impl Tracker {
    /// A tracker that has read nothing.
    pub fn new(rules: Rules) -> Self {
        Tracker {
            rules,
            state: Throttle::default(),
            row: None,
            row_episode: 0,
            newest: 0,
            dirty: false,
            outdated: false,
            paced: false,
            unmoved: false,
            clean: 0,
            under_way: 0,
            told_at: LocalTime(Nanos::MIN),
            ended: None,
            adrift: false,
            writes: LocalTime(Nanos::MIN),
            last_write: None,
        }
    }

    /// New rules.
    pub fn reconfigure(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Takes in an event. Returns whether what is in force may have changed.
    pub fn apply(&mut self, at: Moment, event: Event) -> bool {
        self.moor(at);
        let rules = self.rules;
        self.dirty |= self.state.lapse(at);
        let (stops, multiplier) = (self.state.stops(), self.state.multiplier());
        let state = &mut self.state;
        let changed = match event {
            Event::Clean { episode } => {
                self.count_clean(episode);
                return false;
            }
            Event::Throttled {
                episode,
                retry_after,
            } => state.throttled(at, episode, retry_after, &rules),
            Event::Forbidden { url, status } => state.forbidden(at, url, status, &rules),
            Event::Pause(span) => state.pause(at, span),
            Event::Resume => state.resume(at),
            Event::Unlock => state.unlock(at),
        };
        if changed && matches!(event, Event::Throttled { .. } | Event::Resume) {
            self.paced = true;
            self.forget_clean();
        }
        self.note_moves(&stops, multiplier);
        self.adrift |= changed && at.offset.is_none();
        self.dirty |= changed;
        changed
    }

    /// A clean answer counts when its request had its slot at the present pace; of others it says nothing.
    fn count_clean(&mut self, episode: u64) {
        if self.state.multiplier() > 1 && episode >= self.state.episode() {
            self.clean = self.clean.saturating_add(1);
        }
    }

    /// The pace is another than that at which they came.
    fn forget_clean(&mut self) {
        (self.clean, self.under_way) = (0, 0);
    }

    /// Whether what was counted here, with what the state counts, makes the pace less wide.
    fn has_enough(&self) -> bool {
        self.clean > 0 && self.state.clean.saturating_add(self.clean) >= self.rules.recovery_after
    }

    /// Clean answers of a time in which no row can be written count for this replica's own pace.
    pub fn count_alone(&mut self, at: Moment) {
        if self.has_enough() {
            let clean = self.clean;
            self.forget_clean();
            let changed = self.state.clean(at, clean, &self.rules);
            self.dirty |= changed;
            self.paced |= changed;
        }
    }

    /// Compares the stops that there are with those of before: the cursor has to follow.
    fn note_moves(&mut self, before: &[Option<Stop>], multiplier: u32) {
        let after = self.state.stops();
        let lacks = |stops: &[Option<Stop>], one: &Stop| !stops.iter().flatten().any(|s| s.is(one));
        self.unmoved |= after.iter().flatten().any(|stop| lacks(before, stop));
        for ended in before.iter().flatten().filter(|stop| lacks(&after, stop)) {
            let (first, widest) = self.ended.unwrap_or((*ended, 1));
            let first = if ended.until < first.until {
                *ended
            } else {
                first
            };
            self.ended = Some((first, widest.max(multiplier)));
        }
    }

    /// What was decided while the store's clock was unknown is put on it as soon as it is known.
    fn moor(&mut self, at: Moment) {
        if let (true, Some(offset)) = (self.adrift, at.offset) {
            self.adrift = false;
            self.state.moor(offset);
        }
    }

    /// Takes in what the row holds. Returns whether what is in force may have changed.
    pub fn seen(&mut self, at: Moment, text: Option<&str>) -> bool {
        self.moor(at);
        let known = self.row.as_deref() == text;
        if known && (text.is_some() || self.state.is_neutral()) {
            return false;
        }
        self.row = text.map(str::to_owned);
        let row = text.and_then(|t| Throttle::parse(t, at));
        self.row_episode = row.as_ref().map_or(0, Throttle::episode);
        let before = (self.state.multiplier(), self.state.episode());
        self.outdated = row.as_ref().is_some_and(|r| r.version() < self.newest);
        match row {
            Some(row) if self.dirty && !row.says_the_same(&self.state, at) => self.meet(at, &row),
            Some(row) if self.dirty || row.version() >= self.state.version() => self.adopt(row),
            // An older row of before any protest, or none: where ours says nothing either, it is forgotten with all it counted,
            // or what its slots are told of their episode would be older than what is known here, for ever.
            Some(row) if row.is_neutral() && self.state.is_neutral() => self.forget(row),
            None if text.is_none() && self.state.is_neutral() && !self.dirty => {
                self.forget(Throttle::default());
            }
            // Ours is put back. If it was only the reply that was late, the write meets what is there.
            Some(_) => self.outdated = true,
            // No row, or garbage: ours is put back.
            None => (self.dirty, self.paced) = (true, true),
        }
        self.dirty |= self.state.lapse(at);
        if (self.state.multiplier(), self.state.episode()) != before {
            self.forget_clean();
        }
        true
    }

    /// Goes by the row, which is the newest that counts now, also where an older one says all that was to be told. What is yet to
    /// be done about the cursor is not forgotten: the row may be our own, and the reply to its write lost.
    fn adopt(&mut self, row: Throttle) {
        (self.newest, self.outdated) = (row.version(), false);
        self.state = row;
        self.dirty = self.unmoved || self.ended.is_some();
        self.paced = false;
    }

    /// Goes by a state that is older than what is known here.
    fn forget(&mut self, row: Throttle) {
        (self.newest, self.outdated) = (row.version(), false);
        self.state = row;
    }

    /// There is something to be told, and the row says something else.
    fn meet(&mut self, at: Moment, row: &Throttle) {
        let paced = self.paced || row.version() < self.newest;
        let merged = self.state.merged(row, paced, at, &self.rules);
        let multiplier = self.state.multiplier().max(row.multiplier());
        let before = [self.state.stops(), row.stops()].concat();
        (self.state, self.paced) = (merged, paced);
        self.note_moves(&before, multiplier);
        if row.says_the_same(&self.state, at) {
            self.adopt(row.clone());
        } else {
            self.newest = self.newest.max(row.version());
        }
    }

    /// Whether something is over, so that [`Tracker::lapse`] has something to do.
    pub fn is_due(&self, now: LocalTime) -> bool {
        self.state.is_due(now)
    }

    /// Ends what is over.
    pub fn lapse(&mut self, at: Moment) {
        self.moor(at);
        self.dirty |= self.state.lapse(at);
    }

    /// What has to be written to the row now. One of [`Tracker::wrote`], [`Tracker::met`] and [`Tracker::unanswered`] has to
    /// follow before the next.
    pub fn write(&mut self, at: Moment) -> Option<Write> {
        self.moor(at);
        if self.writes_at().is_none_or(|due| due > at.now) {
            return None;
        }
        let mut state = self.state.clone();
        if self.paced {
            // The count begins when all know of this pace.
            self.forget_clean();
        }
        state.clean(at, self.clean, &self.rules);
        self.under_way = self.clean;
        self.told_at = at.now;
        self.writes = self.writes.max(at.now).plus(WRITE_EVERY);
        self.last_write = Some((state.version(), at.now));
        Some(Write {
            expected: self.row.clone(),
            text: state.to_text(at),
            version: state.version(),
            moves_cursor: state.holds_cursor(at.now),
            frees_cursor: self.ended.map(|(stop, _)| stop),
            multiplier: self.ended.map_or(1, |(_, m)| m).max(state.multiplier()),
            base: self.state.version(),
            state,
        })
    }

    /// When [`Tracker::write`] will have something at the latest, if nothing else happens.
    pub fn writes_at(&self) -> Option<LocalTime> {
        let tells = (self.clean > 0).then(|| match self.has_enough() {
            true => LocalTime(Nanos::MIN),
            false => self.told_at.plus(TELL_EVERY),
        });
        let repeats = match self.last_write {
            // The same once more: somebody else undoes it, or changes it on its way, and may go on doing so.
            Some((version, at)) if version == self.state.version() => at.plus(REPEAT_AFTER),
            _ => LocalTime(Nanos::MIN),
        };
        let due = (!self.is_settled())
            .then_some(repeats)
            .into_iter()
            .chain(tells)
            .min()?;
        Some(due.max(self.writes.plus(-WRITE_EVERY * WRITES_AT_ONCE)))
    }

    /// A write was made, and the cursor moved as it asked if it has `followed`; if not, both are made again.
    pub fn wrote(&mut self, at: Moment, write: &Write, followed: bool) {
        self.clean = self.clean.saturating_sub(self.under_way);
        self.under_way = 0;
        if write.version < self.newest {
            // Another has written since, and that was read before this reply came.
            return;
        }
        self.row = Some(write.text.clone());
        self.row_episode = write.state.episode();
        self.newest = write.version;
        let before = (self.state.multiplier(), self.state.episode());
        if self.state.version() == write.base || write.state.says_the_same(&self.state, at) {
            self.state = write.state.clone();
            (self.dirty, self.paced, self.unmoved) = (!followed, false, !followed);
            self.outdated = false;
            if followed {
                self.ended = None;
            }
        } else {
            // Something happened meanwhile.
            self.meet(at, &write.state);
        }
        if (self.state.multiplier(), self.state.episode()) != before {
            self.forget_clean();
        }
    }

    /// A write was not made, because the row held this instead of what was expected. What it was to tell is still to be told, at
    /// once: replicas that tell at the same time would meet each time, and the same one would always lose.
    pub fn met(&mut self, at: Moment, text: Option<&str>) {
        self.under_way = 0;
        self.told_at = LocalTime(Nanos::MIN);
        self.seen(at, text);
    }

    /// A write had no reply. What it counted may be in the row or not: to count it again could make the pace faster than it
    /// may be, so it is given up, unless the write was `surely_not` made.
    pub fn unanswered(&mut self, surely_not: bool) {
        if !surely_not {
            self.clean = self.clean.saturating_sub(self.under_way);
        }
        self.under_way = 0;
    }

    /// Whether the row holds all that is known here.
    pub fn is_settled(&self) -> bool {
        !self.dirty && !self.outdated
    }

    /// No store keeps this state: there is nothing to write.
    pub fn settle_alone(&mut self, at: Moment) {
        self.count_alone(at);
        (self.dirty, self.paced, self.unmoved) = (false, false, false);
        (self.ended, self.outdated) = (None, false);
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
        self.state.is_neutral() && self.is_settled()
    }
}

#[cfg(test)]
mod tests;
