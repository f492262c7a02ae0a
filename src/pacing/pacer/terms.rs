//! What goes into a pacer and what comes out of it.

use crate::pacing::{
    cursor::Ask,
    queue::{Client, Place, Urgency},
    time::{LocalTime, Nanos, StoreTime},
};

/// Names one waiting request.
pub type Id = u64;

/// The scheme and authority that a request is for, hashed by the caller with a key that nobody can know.
pub type Target = u64;

/// What stays the same while requests come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Interval between slots, as configured.
    pub interval: Nanos,
    /// Requests that may be under way at once; `None` is no limit.
    pub max_in_flight: Option<usize>,
    /// Requests that may wait at once.
    pub queue_limit: usize,
    /// Replicas and other programs that may share the cursor, as configured.
    pub shares: u32,
}

/// A request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Whom to be fair to.
    pub client: Client,
    /// RFC 9218 urgency.
    pub urgency: Urgency,
    /// When it must have been dispatched.
    pub deadline: LocalTime,
    /// Whose connections it uses.
    pub target: Target,
}

/// An instant at which exactly one request may be dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// On the store's clock.
    pub start: StoreTime,
    /// The same on ours, as well as can be told.
    pub at: LocalTime,
    /// The last instant at which it may be used.
    pub until: LocalTime,
    /// The interval to the next slot that anybody may use.
    pub interval: Nanos,
    /// Whether it is one of this replica's own share, which was never on the cursor.
    pub alone: bool,
    /// The episode of the throttle in which it was granted.
    pub episode: u64,
}

impl Slot {
    /// The same slot, now known to open at `at`.
    pub(super) fn opens_at(&mut self, at: LocalTime) {
        self.until = self.until.plus(at.since(self.at));
        self.at = at;
    }

    /// Whether a request may still go out in it.
    pub fn is_fresh(&self, now: LocalTime) -> bool {
        self.at <= now && now <= self.until
    }
}

/// What the shell has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// This request is near: make its upstream connection ready, then call [`super::Pacer::ready`].
    Connect(Id),
    /// Send this request now, in this slot; it has left the queue.
    Dispatch(Dispatched, Slot),
    /// Answer this request with a refusal; it has left the queue.
    Refuse(Id, Refusal),
    /// Ask the store for slots, then call [`super::Pacer::granted`] or [`super::Pacer::failed`].
    Reserve(Ask),
}

/// Why a request is not sent, and when to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The cause.
    pub cause: Cause,
    /// After how long a new try will find a slot within its deadline, as far as can be told.
    pub retry_after: Nanos,
}

/// The cause of a [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its slot would come after its deadline.
    WaitTooLong,
    /// Its deadline passed while the store could not be reached.
    StoreAway,
    /// As many requests wait as may.
    QueueFull,
    /// The destination has locked us out, with this status.
    LockedOut(u16),
    /// An operator has paused the destination.
    Paused,
}

/// A request that was given a slot, with what is needed to put it back if it does not use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatched {
    /// Which request.
    pub id: Id,
    pub(super) place: Place,
    pub(super) client: Client,
    pub(super) deadline: LocalTime,
    pub(super) patience: Nanos,
    pub(super) target: Target,
}
