//! What the leases of all replicas mean for the pace of this one: who sends by itself, into how many shares the ceiling is
//! divided, and whose ceiling is in force.

use std::collections::BTreeMap;

use super::{
    Member, Membership, State,
    lease::{Lease, Seen, Word},
};
use crate::{
    config::Rate,
    pacing::{
        share::{self, Facts, Terms},
        time::{LocalTime, Nanos},
    },
};

/// The ceiling of a destination that all replicas keep to.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// In requests per second, as the slowest replica is configured.
    pub ceiling: f64,
    /// The time between two slots, by which ceilings are compared: two that were written in different ways are one.
    pub interval: Nanos,
    /// Whether replicas are configured with different ceilings, or with different numbers of shares.
    pub differ: bool,
    /// The replica whose ceiling it is, where that is not this one's own.
    pub by: Option<Member>,
}

impl Membership {
    /// How the cursor called `cursor` may be paced now.
    pub fn terms(&self, cursor: &str, now: LocalTime) -> Terms {
        let state = self.lock();
        share::terms(now, &self.facts(&state, cursor, now))
    }

    fn facts(&self, state: &State, cursor: &str, now: LocalTime) -> Facts {
        let of = self.shares(state, now);
        let at = known_at(state, now);
        let sum = |rows: &mut dyn Iterator<Item = (&Seen, &Lease)>| {
            rows.map(|(_, lease)| lease.word.takes(of))
                .fold(0, u32::saturating_add)
        };
        Facts {
            heard: state.footing.is_heard(now),
            claimed: state.footing.has_claimed(),
            last_claim: state.footing.last_claim(),
            stuck: state.failing.get(cursor).and_then(|f| f.told),
            number: state.number,
            all_held: state.all_held,
            silent: sum(&mut self.others(state).filter(|(row, lease)| {
                row.is_silent(now, self.ttl)
                    || (lease.word.leaves(cursor) && !row.has_lapsed(now, self.ttl))
            })),
            taken: sum(&mut self
                .others(state)
                .filter(|(row, _)| !row.has_lapsed(at, self.ttl))),
            of,
        }
    }

    /// The leases of others.
    fn others<'s>(&'s self, state: &'s State) -> impl Iterator<Item = (&'s Seen, &'s Lease)> {
        state.rows.iter().filter_map(|(number, row)| {
            let lease = row.lease.as_ref()?;
            // In the row of our own number an earlier run of us may be seen until it is read again.
            let is_ours = lease.incarnation == self.incarnation || Some(*number) == state.number;
            (!is_ours).then_some((row, lease))
        })
    }

    /// What the others said whose leases have not lapsed.
    fn words<'s>(&'s self, state: &'s State, now: LocalTime) -> impl Iterator<Item = &'s Word> {
        let at = known_at(state, now);
        self.others(state)
            .filter(move |(row, _)| !row.has_lapsed(at, self.ttl))
            .map(|(_, lease)| &lease.word)
    }

    /// Into how many shares the ceiling is divided. Replicas that are configured with different numbers would send more
    /// than all of it, each on its own; so the largest counts.
    pub(super) fn shares(&self, state: &State, now: LocalTime) -> u32 {
        self.words(state, now)
            .map(|w| w.shares)
            .fold(self.of, u32::max)
    }

    /// The smallest ceiling that a replica is configured with whose lease has not lapsed, and whether they disagree.
    pub fn agreed(&self, destination: &str, own: f64, now: LocalTime) -> (f64, bool) {
        let agreement = self.agreement(destination, own, now);
        (agreement.ceiling, agreement.differ)
    }

    /// The same, with the interval that follows, and whose it is.
    pub fn agreement(&self, destination: &str, own: f64, now: LocalTime) -> Agreement {
        let state = self.lock();
        let at = known_at(&state, now);
        let mut agreement = Agreement {
            ceiling: own,
            interval: interval(own),
            differ: self
                .words(&state, now)
                .any(|w| w.shares != 0 && w.shares != self.of),
            by: None,
        };
        for (number, row) in &state.rows {
            let Some(lease) = row.lease.as_ref().filter(|_| !row.has_lapsed(at, self.ttl)) else {
                continue;
            };
            let Some(ceiling) = lease.word.ceilings.get(destination) else {
                continue;
            };
            if lease.incarnation == self.incarnation || Some(*number) == state.number {
                continue;
            }
            let theirs = interval(*ceiling);
            agreement.differ |= theirs != interval(own);
            if theirs > agreement.interval {
                agreement.ceiling = *ceiling;
                agreement.interval = theirs;
                agreement.by = self.member(&state, *number, row, now);
            }
        }
        agreement
    }

    /// Which part of the ceiling is sent at the moment by those on the same footing as this replica: all of it, what is
    /// left beside silent ones, or its own share.
    pub fn part(&self, cursor: &str, now: LocalTime) -> f64 {
        match self.terms(cursor, now) {
            Terms::Shared { silent, of } => f64::from(of - silent) / f64::from(of),
            Terms::Alone(share) => 1.0 / f64::from(share.of),
            Terms::Hold(_) | Terms::Nothing => 0.0,
        }
    }

    /// One line for each destination whose ceiling begins or ends to be in dispute, or whose ceiling in force is another's.
    pub(super) fn tell_disputes(&self, now: LocalTime) {
        let ceilings = self.lock().ceilings.clone();
        let mut disputed = BTreeMap::new();
        for (destination, own) in &ceilings {
            let agreement = self.agreement(destination, *own, now);
            if !agreement.differ {
                continue;
            }
            let by = agreement.by.as_ref();
            let whose = by.map_or("this replica".to_owned(), |m| {
                format!("{} ({})", m.name(), m.state)
            });
            let before = self.lock().disputed.get(destination).cloned();
            if before.as_ref() != Some(&whose) {
                tracing::warn!(
                    destination,
                    in_force = agreement.ceiling,
                    own,
                    by = whose,
                    "replicas are configured with different rates or numbers of shares; the smallest rate is in force: set the same in every one"
                );
            }
            disputed.insert(destination.clone(), whose);
        }
        let before = std::mem::replace(&mut self.lock().disputed, disputed);
        let state = self.lock();
        for destination in before.keys().filter(|d| !state.disputed.contains_key(*d)) {
            tracing::info!(
                destination,
                "all replicas are configured with one rate again"
            );
        }
    }
}

impl Word {
    /// Whether its replica, although it is heard, does not use the shared cursor called `cursor`, and may send by itself.
    fn leaves(&self, cursor: &str) -> bool {
        self.alone || self.failing.contains(cursor)
    }

    /// How many of `of` shares its replica takes by itself: more than one, if it divides by less than we do because it has
    /// not heard of it.
    fn takes(&self, of: u32) -> u32 {
        match if self.of == 0 { self.shares } else { self.of } {
            0 => 1,
            theirs => of.div_ceil(theirs).max(1),
        }
    }
}

/// Up to when leases can have lapsed: while the store is away the last agreement holds, however long that is, for the
/// others hold to it too.
fn known_at(state: &State, now: LocalTime) -> LocalTime {
    match state.read {
        Some((_, read)) if !state.footing.passes() => read,
        _ => now,
    }
}

fn interval(ceiling: f64) -> Nanos {
    Rate::per_second(ceiling).map_or(Nanos::MAX, |r| {
        Nanos::try_from(r.interval_nanos()).unwrap_or(Nanos::MAX)
    })
}
