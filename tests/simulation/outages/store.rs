//! The model of the store: the cursor's row and the leases' rows, with the statements' own rules, and a clock.

use std::collections::BTreeMap;

use paceline::{
    membership::Pulse,
    pacing::{
        cursor::{self, Ask, Granted},
        time::{MILLISECOND, Nanos, SECOND, StoreTime},
    },
};

use super::super::clocks::{Clock, True};

/// How long a statement waits for a locked row.
pub const LOCK_TIMEOUT: Nanos = 400 * MILLISECOND;

/// What a heartbeat brings back.
#[derive(Clone, Debug)]
pub struct Echo {
    pub now: StoreTime,
    pub written: bool,
    pub rows: Vec<(String, String)>,
}

#[derive(Debug)]
pub struct StoreModel {
    clock: Clock,
    pub stepped: Nanos,
    pub row: Option<StoreTime>,
    pub leases: BTreeMap<String, String>,
    pub down_until: True,
    pub frozen_until: True,
    pub locked_until: True,
    /// What a standby may still stand at.
    past: Vec<(True, Option<StoreTime>, BTreeMap<String, String>)>,
}

impl StoreModel {
    pub fn new(clock: Clock) -> Self {
        StoreModel {
            clock,
            stepped: 0,
            row: None,
            leases: BTreeMap::new(),
            down_until: 0,
            frozen_until: 0,
            locked_until: 0,
            past: Vec::new(),
        }
    }

    pub fn now(&self, t: True) -> StoreTime {
        StoreTime(self.clock.read(t) + self.stepped)
    }

    pub fn reserve(&mut self, t: True, ask: &Ask) -> Granted {
        self.remember(t);
        let granted = cursor::take(self.row, self.now(t), ask);
        self.row = Some(granted.end());
        granted
    }

    /// The rule of the heartbeat's statement: a row is written when it is missing, our own, or still as it was seen, and
    /// the time for it has not passed. The rows come back as they stood before.
    pub fn beat(&mut self, t: True, pulse: &Pulse, guarded: bool) -> Echo {
        self.remember(t);
        let now = self.now(t);
        let rows = self.leases.iter().filter(|(k, _)| pulse.keys.contains(k));
        let rows = rows.map(|(k, v)| (k.clone(), v.clone())).collect();
        let in_time = !guarded || pulse.until.is_none_or(|u| now <= u);
        let mut written = false;
        if let Some(key) = pulse.key.as_ref().filter(|_| in_time) {
            let may = self.leases.get(key).is_none_or(|held| {
                held.split(' ').nth(1) == Some(&pulse.incarnation)
                    || pulse.seen.as_deref() == Some(held)
            });
            if may {
                let text = format!("{} {} {}", now.0, pulse.incarnation, pulse.word);
                self.leases.insert(key.clone(), text);
                written = true;
            }
        }
        Echo { now, written, rows }
    }

    /// A standby that had got no further than `then` is the store now.
    pub fn go_back(&mut self, then: True) {
        if let Some((_, row, leases)) = self.past.iter().rev().find(|(at, ..)| *at <= then) {
            (self.row, self.leases) = (*row, leases.clone());
        }
    }

    fn remember(&mut self, t: True) {
        if self
            .past
            .last()
            .is_none_or(|(at, ..)| *at + SECOND / 10 <= t)
        {
            self.past.push((t, self.row, self.leases.clone()));
            if self.past.len() > 60 {
                self.past.remove(0);
            }
        }
    }
}
