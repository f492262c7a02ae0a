//! Who of those that wait makes a connection, and how many do at once.
//!
//! The first in line do, so many as will be needed while a connection is being made. One that takes long no longer counts
//! as nearly ready, and the next makes one too, whatever its host; and the host of a slow one is *suspect* until a
//! connection to it is made: only [`FEW`] of its requests are at it, and the others keep their places meanwhile. How many
//! may be at it in all depends on what is known of the host, so that thousands of hosts that never answer leave room for
//! those that do. No step walks over the queue.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::pacing::{
    clock::Smoothed,
    pacer::terms::Target,
    queue::Place,
    time::{LocalTime, MILLISECOND, Nanos, SECOND},
};

/// How many requests beyond the slots held may have a ready connection, at the least.
pub(super) const READY_AHEAD: usize = 2;
/// How many at the most, where connections take long to make.
pub(super) const AHEAD_LIMIT: usize = 64;
/// A connection that is not ready after this long, and much longer than others to its host took, no longer counts as
/// nearly ready.
pub(super) const SLOW_CONNECT: Nanos = 200 * MILLISECOND;
/// Requests to a suspect host that may be making a connection.
pub(super) const FEW: usize = 8;
/// Requests that may be making a connection at once, for one to a host of this standing to begin.
pub(super) const CONNECTING_LIMITS: [usize; 3] = [64, 128, 256];
/// No connection counts as having taken longer.
const LONGEST_DIAL: Nanos = 2 * SECOND;
/// Hosts that are remembered although nobody waits for them.
const IDLE_TARGETS: usize = 256;

/// What is known of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Standing {
    /// A connection to it is slow, or was the last time.
    Suspect,
    /// No connection has been made yet.
    #[default]
    Unknown,
    /// The last connection was made in time.
    Good,
}

/// How far a waiting request is with its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not told to make one.
    Far,
    /// Told at the first instant, slow from the second on.
    Dialling(LocalTime, LocalTime),
    /// It has one.
    Ready,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Dials {
    /// Told to connect (ready or not), and of those the ready ones.
    near: BTreeSet<Place>,
    ready: BTreeSet<Place>,
    /// Told, not ready and not yet slow, by when they will be.
    young: BTreeSet<(LocalTime, Place, Target)>,
    targets: FxHashMap<Target, Known>,
    /// The first not yet told of each target that may have one told, by the target's standing.
    heads: [Places; 3],
    /// Targets that nobody waits for.
    idle: usize,
    /// How long connections take to make; those from the pool take no time.
    took: Smoothed,
}

/// One host with a scheme and port.
#[derive(Debug, Default)]
struct Known {
    standing: Standing,
    /// How long connections to it take to make.
    took: Smoothed,
    waiting: usize,
    dialling: usize,
    far: Places,
    head: Option<(Standing, Place)>,
}

impl Known {
    fn slow_after(&self) -> Nanos {
        self.took.usual().max(SLOW_CONNECT)
    }
}

impl Dials {
    /// A request stands in line, far from its turn as yet.
    pub(super) fn wait(&mut self, place: Place, target: Target) -> Stage {
        let known = match self.targets.get_mut(&target) {
            Some(known) => {
                self.idle -= usize::from(known.waiting == 0);
                known
            }
            None => self.targets.entry(target).or_default(),
        };
        known.waiting += 1;
        known.far.insert(place);
        self.find_head(target);
        Stage::Far
    }

    /// A request leaves the line.
    pub(super) fn leave(&mut self, place: Place, target: Target, stage: Stage) {
        self.near.remove(&place);
        let Some(known) = self.targets.get_mut(&target) else {
            return;
        };
        known.waiting -= 1;
        self.idle += usize::from(known.waiting == 0);
        match stage {
            Stage::Far => known.far.remove(place),
            Stage::Ready => {
                self.ready.remove(&place);
            }
            Stage::Dialling(_, slow_at) => {
                known.dialling -= 1;
                self.young.remove(&(slow_at, place, target));
            }
        }
        self.find_head(target);
        if self.idle > IDLE_TARGETS {
            self.targets.retain(|_, known| known.waiting > 0);
            self.idle = 0;
        }
    }

    /// A request that stands far is told to make a connection.
    pub(super) fn tell(&mut self, now: LocalTime, place: Place, target: Target) -> Stage {
        let Some(known) = self.targets.get_mut(&target) else {
            return Stage::Far;
        };
        known.far.remove(place);
        known.dialling += 1;
        self.near.insert(place);
        let slow_at = match known.standing {
            // Nobody waits for one that will be slow again.
            Standing::Suspect => now,
            _ => now.plus(known.slow_after()),
        };
        if slow_at > now {
            self.young.insert((slow_at, place, target));
        }
        self.find_head(target);
        Stage::Dialling(now, slow_at)
    }

    /// A request has a connection: one that was `dialled`, or an idle one.
    pub(super) fn connected(
        &mut self,
        now: LocalTime,
        place: Place,
        target: Target,
        stage: Stage,
        dialled: bool,
    ) -> Stage {
        let Some(known) = self.targets.get_mut(&target) else {
            return stage;
        };
        match stage {
            Stage::Ready => return stage,
            Stage::Far => known.far.remove(place),
            Stage::Dialling(told, slow_at) => {
                known.dialling -= 1;
                self.young.remove(&(slow_at, place, target));
                let took = match dialled {
                    true => now.since(told).clamp(0, LONGEST_DIAL),
                    false => 0,
                };
                self.took.add(took);
                if dialled {
                    known.took.add(took);
                    known.standing = Standing::Good;
                }
            }
        }
        self.near.insert(place);
        self.ready.insert(place);
        self.find_head(target);
        Stage::Ready
    }

    /// The connection of a request was lost, and it makes another.
    pub(super) fn lost(&mut self, now: LocalTime, place: Place, target: Target) -> Stage {
        self.ready.remove(&place);
        self.tell(now, place, target)
    }

    /// Who is to make a connection next, if any should: the first `window` in line, and others behind them while too few
    /// are ready or nearly so.
    pub(super) fn next(&mut self, now: LocalTime, window: usize) -> Option<Place> {
        while let Some(&(slow_at, _, target)) = self.young.first()
            && slow_at <= now
        {
            self.young.pop_first();
            if let Some(known) = self.targets.get_mut(&target) {
                known.standing = Standing::Suspect;
            }
            self.find_head(target);
        }
        let next = self.head()?;
        // Mostly those before it are all that are near, and no count is needed.
        let rank = if self.near.last().is_none_or(|last| *last < next) {
            self.near.len()
        } else {
            self.near.range(..next).take(window).count()
        };
        let served = rank >= window && self.ready.len() + self.young.len() >= window;
        (!served).then_some(next)
    }

    /// When [`Dials::next`] may have somebody without an event.
    pub(super) fn wake_at(&self) -> Option<LocalTime> {
        let (slow_at, ..) = self.young.first()?;
        self.head().map(|_| *slow_at)
    }

    /// How many beyond the slots held should have a connection or be making one: as many as pass at this interval while
    /// one is made.
    pub(super) fn ahead(&self, interval: Nanos) -> usize {
        let pass = self.took.usual() / interval.max(1);
        let pass = usize::try_from(pass).unwrap_or(0).min(AHEAD_LIMIT - 1);
        (pass + 1).max(READY_AHEAD)
    }

    /// How many requests are making a connection.
    pub(super) fn connecting(&self) -> usize {
        self.near.len() - self.ready.len()
    }

    /// Those that have a connection.
    pub(super) fn ready(&self) -> &BTreeSet<Place> {
        &self.ready
    }

    /// Whether nobody waits.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let sets = self.near.len() + self.ready.len() + self.young.len();
        let heads = self.heads.iter().any(|heads| heads.first().is_some());
        sets == 0 && !heads && self.targets.values().all(|known| known.waiting == 0)
    }

    /// The first in line of those that may be told.
    fn head(&self) -> Option<Place> {
        let connecting = self.connecting();
        let heads = self.heads.iter().zip(CONNECTING_LIMITS);
        let heads = heads.filter(|(_, limit)| connecting < *limit);
        heads.filter_map(|(heads, _)| heads.first()).min()
    }

    /// Sees to it that `heads` has the first of this target.
    fn find_head(&mut self, target: Target) {
        let Some(known) = self.targets.get_mut(&target) else {
            return;
        };
        let enough = known.standing == Standing::Suspect && known.dialling >= FEW;
        let first = known.far.first().filter(|_| !enough);
        let head = first.map(|place| (known.standing, place));
        if head != known.head {
            if let Some((standing, place)) = std::mem::replace(&mut known.head, head) {
                self.heads[standing as usize].remove(place);
            }
            if let Some((standing, place)) = head {
                self.heads[standing as usize].insert(place);
            }
        }
    }
}

/// Places in order. A single one costs no allocation.
#[derive(Debug, Default)]
struct Places {
    first: Option<Place>,
    rest: BTreeSet<Place>,
}

impl Places {
    fn first(&self) -> Option<Place> {
        self.first
    }

    fn insert(&mut self, place: Place) {
        match self.first {
            None => self.first = Some(place),
            Some(first) if place < first => {
                self.rest.insert(first);
                self.first = Some(place);
            }
            Some(_) => {
                self.rest.insert(place);
            }
        }
    }

    fn remove(&mut self, place: Place) {
        if self.first == Some(place) {
            self.first = self.rest.pop_first();
        } else {
            self.rest.remove(&place);
        }
    }
}

#[cfg(test)]
mod tests;
