//! What an origin's protest does to the pace: the multiplier, pauses and lockouts of one cursor, and how they end.
//!
//! The state is shared by all replicas as one row beside the cursor; each rule here is a plain function of the state, an
//! event and an instant, and the row's text is read and written here too. Who asks the store, and when, this file does not
//! know: see `throttle/tracker.rs` for what one replica keeps of it.

mod row;
pub mod tracker;

use std::cmp::Ordering;

pub use self::row::{LONGEST, NO_ROW, word};
use crate::{
    config::default,
    pacing::time::{LocalTime, Nanos, SECOND, nanos},
};

/// The largest multiplier.
pub const CAP: u32 = 16;
/// Forbidden URLs count together for this long.
const WINDOW: Nanos = 60 * SECOND;
/// The most URLs that are remembered; no lockout needs more.
pub const EVIDENCE_LIMIT: usize = 100;

/// The largest version and episode. A row with a larger one was written by nobody.
pub(super) const NUMBER_LIMIT: u64 = 1 << 62;

/// What a destination is configured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Clean answers in a row, over all replicas, that halve the multiplier.
    pub recovery_after: u32,
    /// Different URLs that bring about a lockout, at least 1.
    pub lockout_after: u32,
    /// How long a lockout lasts.
    pub lockout_for: Nanos,
    /// The longest pause that an origin can ask for.
    pub retry_after_cap: Nanos,
}

impl Default for Rules {
    /// Those of a destination that says nothing about them.
    fn default() -> Self {
        Rules {
            recovery_after: default::RECOVERY_AFTER,
            lockout_after: default::LOCKOUT_AFTER,
            lockout_for: nanos(default::LOCKOUT_FOR),
            retry_after_cap: nanos(default::RETRY_AFTER_CAP),
        }
    }
}

/// Which instant it is, on the clocks that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// On ours.
    pub now: LocalTime,
    /// What has to be added for the store's; `None` while that is unknown.
    pub offset: Option<Nanos>,
}

impl Moment {
    /// The store's clock, in microseconds: what a newer version of the state is told by.
    fn stamp(self) -> u64 {
        let micros = self.now.0.saturating_add(self.offset.unwrap_or(0)) / 1_000;
        u64::try_from(micros).unwrap_or(0)
    }
}

/// A time in which nothing is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    /// When it is over.
    pub until: LocalTime,
    /// How long it was meant to last in all. It bounds what a step of a clock can make of `until`.
    pub span: Nanos,
    /// The status that brought it about; 0 where none did.
    pub status: u16,
    /// `until` on the store's clock, in nanoseconds since the epoch, as it was first said; `None` while that clock is
    /// unknown.
    pub written: Option<Nanos>,
}

impl Stop {
    /// Whether both were decided as one; what a reader of the row makes of it on its own clock differs a little each time.
    fn is(&self, other: &Stop) -> bool {
        match (self.written, other.written) {
            (Some(a), Some(b)) => a == b,
            _ => self == other,
        }
    }
}

/// A stop or its absence, and the version of the state that decided so. What counts when two histories meet depends on who
/// decides: see [`Latch::longest`] and [`Latch::latest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Latch {
    stop: Option<Stop>,
    at: u64,
}

/// A URL that was forbidden, by its hash; when, and with which status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Evidence {
    url: u64,
    at: LocalTime,
    status: u16,
}

/// The state. See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// Grows with each change: microseconds of the store's clock, or one more than before if that is not later.
    version: u64,
    multiplier: u32,
    /// Grows with each widening. A slot belongs to the episode in which it was granted.
    episode: u64,
    /// The version of the last widening.
    widened: u64,
    /// The version at which an operator last ended all that slows down or pauses: what is older is over, whoever brings it
    /// up again.
    resumed: u64,
    /// Clean answers in a row.
    clean: u32,
    /// The origin asked for a pause.
    hold: Latch,
    /// The origin forbade us.
    lockout: Latch,
    /// An operator wants none.
    pause: Latch,
    evidence: Vec<Evidence>,
}

impl Default for Throttle {
    fn default() -> Self {
        Throttle {
            version: 0,
            multiplier: 1,
            episode: 0,
            widened: 0,
            resumed: 0,
            clean: 0,
            hold: Latch::default(),
            lockout: Latch::default(),
            pause: Latch::default(),
            evidence: Vec::new(),
        }
    }
}

/// What is in force at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regime {
    /// What the interval is multiplied by, 1 to [`CAP`].
    pub multiplier: u32,
    /// Why nothing is sent, if so.
    pub halt: Option<Halt>,
}

impl Default for Regime {
    fn default() -> Self {
        Regime {
            multiplier: 1,
            halt: None,
        }
    }
}

/// Why nothing is sent, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halt {
    /// The cause.
    pub cause: Cause,
    /// When it is over.
    pub until: LocalTime,
}

/// The cause of a [`Halt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// `Retry-After`: what is queued waits on.
    Hold,
    /// A lockout, by this status: what is queued is refused.
    Lockout(u16),
    /// An operator's pause: what is queued is refused.
    Pause,
}

impl Cause {
    /// One word for it.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Hold => "retry_after",
            Cause::Lockout(_) => "lockout",
            Cause::Pause => "pause",
        }
    }
}

impl Throttle {
    /// A request of `episode` was answered with a throttle status. It widens once for each episode: an answer to a request
    /// that was given its slot before the last widening says nothing about the pace since. Returns whether anything changed.
    pub fn throttled(
        &mut self,
        at: Moment,
        episode: u64,
        retry_after: Option<Nanos>,
        rules: &Rules,
    ) -> bool {
        let mut changed = false;
        if episode >= self.episode {
            self.touch(at);
            self.widened = self.version;
            self.episode = self.episode.saturating_add(1).min(NUMBER_LIMIT);
            self.multiplier = (self.multiplier.saturating_mul(2)).clamp(1, CAP);
            self.clean = 0;
            changed = true;
        }
        let span = retry_after.unwrap_or(0).min(rules.retry_after_cap);
        let until = at.now.plus(span);
        if span > 0 && self.hold.stop.is_none_or(|h| h.until < until) {
            self.touch(at);
            self.hold = Latch::new(at, span, 0, self.version);
            changed = true;
        }
        changed
    }

    /// So many clean answers, in a row as far as one replica has seen, to requests of the last episode.
    pub fn clean(&mut self, at: Moment, answers: u32, rules: &Rules) -> bool {
        if self.multiplier == 1 || answers == 0 {
            return false;
        }
        self.touch(at);
        self.clean = self.clean.saturating_add(answers);
        if self.clean >= rules.recovery_after {
            self.multiplier /= 2;
            self.clean = 0;
        }
        true
    }

    /// A URL, by its hash, was answered with the lockout status `status`.
    pub fn forbidden(&mut self, at: Moment, url: u64, status: u16, rules: &Rules) -> bool {
        self.lapse(at);
        if self.lockout.stop.is_some() {
            // What was under way when the lockout began does not make it longer.
            return false;
        }
        self.touch(at);
        self.evidence
            .retain(|e| e.url != url && at.now.since(e.at) < WINDOW);
        if self.evidence.len() >= EVIDENCE_LIMIT {
            self.evidence.remove(0);
        }
        self.evidence.push(Evidence {
            url,
            at: at.now,
            status,
        });
        self.convict(at, rules);
        true
    }

    /// A lockout, if there is evidence enough for one.
    fn convict(&mut self, at: Moment, rules: &Rules) {
        let enough = self.evidence.len() >= rules.lockout_after.max(1) as usize;
        if let Some(Evidence { status, .. }) = self.evidence.last().copied().filter(|_| enough) {
            self.lockout = Latch::new(at, rules.lockout_for, status, self.version);
            self.evidence.clear();
        }
    }

    /// An operator pauses the destination for `span` from now.
    pub fn pause(&mut self, at: Moment, span: Nanos) -> bool {
        self.touch(at);
        self.pause = Latch::new(at, span, 0, self.version);
        true
    }

    /// An operator ends a pause, an operator's or the origin's, and the slow-down after protests. Returns whether there was
    /// any.
    pub fn resume(&mut self, at: Moment) -> bool {
        let any = self.stops().iter().any(Option::is_some) || self.multiplier > 1;
        if any {
            self.touch(at);
            self.pause = Latch::free(self.version);
            self.hold = Latch::free(self.version);
            self.resumed = self.version;
            (self.multiplier, self.clean) = (1, 0);
        }
        any
    }

    /// An operator ends a lockout, and what led to one is forgotten.
    pub fn unlock(&mut self, at: Moment) -> bool {
        let locked = self.lockout.stop.is_some() || !self.evidence.is_empty();
        if locked {
            self.touch(at);
            self.lockout = Latch::free(self.version);
            self.evidence.clear();
        }
        locked
    }

    /// Ends what is over. Returns whether anything was.
    pub fn lapse(&mut self, at: Moment) -> bool {
        self.drop_stale(at.now);
        if !self.has_stopped(at.now) {
            return false;
        }
        self.touch(at);
        for latch in [&mut self.hold, &mut self.lockout, &mut self.pause] {
            if latch.stop.is_some_and(|s| s.until <= at.now) {
                // That its time is over is no word on a stop that another replica has decided on meanwhile.
                latch.stop = None;
            }
        }
        true
    }

    /// The state of two replicas that went on without knowing of each other; it is newer than both. What the origin asked
    /// for: the wider pace, the longest stop. What operators ordered: the later word, also over what the origin had asked
    /// for until then. Without `paced`, this side's pace is what it once read, and the other's is newer.
    #[must_use]
    pub fn merged(&self, other: &Throttle, paced: bool, at: Moment, rules: &Rules) -> Throttle {
        let resumed = self.resumed.max(other.resumed);
        let since = |latch: Latch| match latch.at < resumed {
            true => Latch::free(resumed),
            false => latch,
        };
        let (multiplier, clean) = self.merged_pace(other, paced, resumed);
        let mut merged = Throttle {
            version: self.version.max(other.version),
            multiplier,
            episode: self.episode.max(other.episode),
            widened: self.widened.max(other.widened),
            resumed,
            clean,
            hold: since(self.hold).longest(since(other.hold)),
            lockout: self.lockout.longest(other.lockout),
            pause: since(self.pause).latest(since(other.pause)),
            evidence: self.evidence.clone(),
        };
        merged.touch(at);
        merged.drop_stale(at.now);
        if merged.lockout.stop.is_some() {
            merged.evidence.clear();
            return merged;
        }
        for e in &other.evidence {
            if !merged.evidence.iter().any(|own| own.url == e.url) {
                merged.evidence.push(*e);
            }
        }
        // What an unlock has forgotten stays forgotten.
        let unlocked = Some(merged.lockout.at).filter(|v| *v <= at.stamp());
        let counts = |e: &Evidence| {
            let then = Moment { now: e.at, ..at };
            at.now.since(e.at) < WINDOW && unlocked.is_none_or(|v| then.stamp() >= v)
        };
        merged.evidence.retain(counts);
        merged.evidence.truncate(EVIDENCE_LIMIT);
        merged.convict(at, rules);
        merged
    }

    /// The multiplier and the count towards its end: see [`Throttle::merged`].
    fn merged_pace(&self, other: &Throttle, paced: bool, resumed: u64) -> (u32, u32) {
        // A slow-down of before the last `resume` was ended by it.
        let stands = |t: &Throttle| t.resumed == resumed || t.widened > resumed;
        let pace = |t: &Throttle| match stands(t) {
            true => (t.multiplier, t.episode, t.clean),
            false => (1, t.episode, 0),
        };
        let theirs = pace(other);
        if !paced {
            return (theirs.0, theirs.2);
        }
        let ours = pace(self);
        // What makes the other's pace wider begins a count of its own. Of two counts of one pace the larger includes the
        // smaller: what is not yet written is in neither.
        let clean = match ours.0.cmp(&theirs.0) {
            Ordering::Less => theirs.2,
            Ordering::Equal if ours.1 == theirs.1 => ours.2.max(theirs.2),
            Ordering::Equal if ours.1 < theirs.1 => theirs.2,
            _ => 0,
        };
        (ours.0.max(theirs.0), clean)
    }

    /// What is in force.
    pub fn regime(&self, now: LocalTime) -> Regime {
        let lockout = self.lockout.stop.map_or(0, |s| s.status);
        let causes = [
            (self.lockout, Cause::Lockout(lockout)),
            (self.pause, Cause::Pause),
            (self.hold, Cause::Hold),
        ];
        let halt = causes.into_iter().find_map(|(latch, cause)| {
            let stop = latch.stop.filter(|s| s.until > now)?;
            Some(Halt {
                cause,
                until: stop.until,
            })
        });
        Regime {
            multiplier: self.multiplier,
            halt,
        }
    }

    /// Whether it says nothing that an absent row would not say.
    pub fn is_neutral(&self) -> bool {
        let latches = [self.hold, self.lockout, self.pause];
        self.multiplier == 1 && self.evidence.is_empty() && latches.iter().all(|l| l.stop.is_none())
    }

    /// What the interval is multiplied by.
    pub fn multiplier(&self) -> u32 {
        self.multiplier
    }

    /// The present episode.
    pub fn episode(&self) -> u64 {
        self.episode
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether anything of it is over and not yet ended.
    pub fn is_due(&self, now: LocalTime) -> bool {
        let stale = |e: &Evidence| now.since(e.at) >= WINDOW;
        self.has_stopped(now) || self.evidence.first().is_some_and(stale)
    }

    fn has_stopped(&self, now: LocalTime) -> bool {
        let latches = [self.hold, self.lockout, self.pause];
        latches
            .iter()
            .any(|l| l.stop.is_some_and(|s| s.until <= now))
    }

    /// What was forbidden too long ago proves nothing any more.
    fn drop_stale(&mut self, now: LocalTime) {
        self.evidence.retain(|e| now.since(e.at) < WINDOW);
    }

    /// The stop until whose end the cursor has to be moved, for programs that know of nothing else.
    pub fn holds_cursor(&self, now: LocalTime) -> Option<Stop> {
        let stops = self.stops().into_iter().flatten();
        stops
            .filter(|stop| stop.until > now)
            .max_by_key(|stop| stop.until)
    }

    /// The stops for which the cursor is moved.
    fn stops(&self) -> [Option<Stop>; 2] {
        [self.hold.stop, self.pause.stop]
    }

    /// Brings the versions of a time in which the store's clock was unknown onto that clock, which is `offset` ahead of
    /// ours: only then can they be told from those of others.
    fn moor(&mut self, offset: Nanos) {
        let ahead = u64::try_from(offset / 1_000).unwrap_or(0);
        let moor = |v: &mut u64| {
            if *v > 0 {
                *v = v.saturating_add(ahead).min(NUMBER_LIMIT);
            }
        };
        moor(&mut self.version);
        moor(&mut self.widened);
        moor(&mut self.resumed);
        for latch in [&mut self.hold, &mut self.lockout, &mut self.pause] {
            moor(&mut latch.at);
            if let Some(stop) = &mut latch.stop {
                let there = stop.until.0.saturating_add(offset);
                stop.written = stop.written.or(Some(there));
            }
        }
    }

    fn touch(&mut self, at: Moment) {
        let later = self.version.saturating_add(1).max(at.stamp());
        // At the limit no change can be told from the one before by its number; the row that is written last counts then.
        self.version = later.min(NUMBER_LIMIT);
    }
}

impl Latch {
    fn new(from: Moment, span: Nanos, status: u16, at: u64) -> Self {
        let until = from.now.plus(span);
        let written = from.offset.map(|o| until.0.saturating_add(o));
        let stop = Some(Stop {
            until,
            span,
            status,
            written,
        });
        Latch { stop, at }
    }

    fn free(at: u64) -> Self {
        Latch { stop: None, at }
    }

    /// What an origin brought about: of two stops the longest, and a later word that ended one counts.
    fn longest(self, other: Latch) -> Latch {
        match (self.stop, other.stop) {
            (Some(a), Some(b)) if b.until > a.until => other,
            (Some(_), Some(_)) => self,
            // The same word, over by one clock and not yet by the other.
            (None, Some(_)) if other.at == self.at => other,
            _ if other.at > self.at => other,
            _ => self,
        }
    }

    /// What an operator ordered: the later word, whatever it says.
    fn latest(self, other: Latch) -> Latch {
        match other.at.cmp(&self.at) {
            Ordering::Less => self,
            Ordering::Equal => self.longest(other),
            Ordering::Greater => other,
        }
    }
}

#[cfg(test)]
mod tests;
