//! How one lane gets its next slot: from the shared cursor, from its own share, or not yet.
//!
//! The step between the membership's terms and the pacer. The shell (`pacing/lane.rs`, or the simulation) only carries
//! out what is decided here. No clock is read here, and no store is called.

use crate::pacing::{
    clock::ClockBounds,
    cursor::{Ask, Granted, furthest, held, horizon},
    pacer::Pacer,
    share::{self, Share, Terms},
    time::{LocalTime, MILLISECOND, Nanos, SECOND, StoreTime},
};

/// How often a lane that cannot use the shared cursor looks whether it can again.
pub const LOOK_AGAIN: Nanos = 200 * MILLISECOND;
/// How often a row that could not be moved is tried while the lane paces on its share.
const PROBE_EVERY: Nanos = SECOND;

/// What the membership says about one cursor at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// How it may be paced.
    pub terms: Terms,
    /// Whether the store can be asked at all.
    pub reachable: bool,
}

/// What the shell has to do about the pacer's wish for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the shared cursor.
    Ask(Ask),
    /// Nothing now: the pacer has been told when to wish again.
    Wait,
    /// The pacer has been given a slot of our own share. With an [`Ask`], the row is to be tried beside it, only to see
    /// whether it can be moved again.
    Own(Option<Ask>),
}

/// What a lane remembers from step to step.
#[derive(Clone, Copy, Debug)]
pub struct Course {
    /// The start of the slot of our own share that was given last, since we left the shared cursor.
    last: Option<StoreTime>,
    probe_at: LocalTime,
}

impl Default for Course {
    fn default() -> Self {
        Course {
            last: None,
            probe_at: LocalTime(Nanos::MIN),
        }
    }
}

impl Course {
    /// Answers the pacer's wish `ask`, whose pace is the one that the replicas have agreed on.
    pub fn step(
        &mut self,
        now: LocalTime,
        mut ask: Ask,
        view: &View,
        pacer: &mut Pacer,
        clock: &ClockBounds,
    ) -> Step {
        match view.terms {
            Terms::Shared { silent, of } => {
                ask.interval = share::stretched(ask.interval, silent, of);
                // Slots that others hold are as far apart as ours.
                if ask.held > 0 {
                    ask.held = held(ask.interval, pacer.others_hold());
                }
                // Where our own slots lie, others of that pace may lie behind them.
                let known = ask.floor.zip(clock.to_store(now, now));
                let ahead = known.map_or(0, |(floor, here)| floor.since(here));
                if (1..=furthest(ask.interval, ask.horizon)).contains(&ahead) {
                    ask.horizon = ask.horizon.saturating_add(ahead);
                }
                Step::Ask(ask)
            }
            Terms::Hold(until) => {
                pacer.failed(until.min(now.plus(LOOK_AGAIN)));
                Step::Wait
            }
            Terms::Nothing => {
                pacer.failed(now.plus(LOOK_AGAIN));
                Step::Wait
            }
            Terms::Alone(share) => {
                self.give_own(now, ask.interval, share, pacer, clock);
                let probes = view.reachable && now >= self.probe_at;
                Step::Own(probes.then(|| {
                    self.probe_at = now.plus(PROBE_EVERY);
                    Ask { slots: 1, ..ask }
                }))
            }
        }
    }

    /// Whether slots come from our own share, so that somebody has to look whether that is over.
    pub fn is_alone(&self) -> bool {
        self.last.is_some()
    }

    /// Back on the shared cursor, slots of our own share are given up: the others no longer leave room for them, and
    /// at a slow pace they would lie far ahead.
    pub fn look(&mut self, terms: Terms, pacer: &mut Pacer) {
        if self.last.is_some() && matches!(terms, Terms::Shared { .. }) {
            self.last = None;
            pacer.discard_alone();
        }
    }

    /// The next instant of our own share that comes after all we know of.
    fn give_own(
        &mut self,
        now: LocalTime,
        interval: Nanos,
        share: Share,
        pacer: &mut Pacer,
        clock: &ClockBounds,
    ) {
        // Without a notion of the store's clock our own is as good: all that counts is how far apart the instants are.
        let mut ours = ClockBounds::default();
        let (clock, here) = match clock.to_store(now, now) {
            Some(here) => (clock, here),
            None => {
                ours.observe(now, now, StoreTime(now.0));
                (&ours, StoreTime(now.0))
            }
        };
        // Instants that nobody else keeps clear of have to keep clear of our own; a number's instants do by themselves.
        let after = if share.number.is_some() {
            1
        } else {
            share.period(interval)
        };
        let from = [pacer.floor(), self.last.map(|t| t.plus(after))]
            .into_iter()
            .flatten()
            // Further ahead than can honestly be: another clock's. On the cursor itself it is not believed either.
            .filter(|t| t.since(here) <= horizon(interval, share.of))
            .fold(here, StoreTime::max);
        let granted = Granted {
            now: here,
            start: share.next(from, interval),
            slots: 1,
            interval,
        };
        pacer.granted_alone(now, granted, clock);
        self.last = Some(granted.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::pacer::{Action, Arrival, Settings};

    const INTERVAL: Nanos = 100 * MILLISECOND;

    fn pacer(now: LocalTime, waiting: u64) -> Pacer {
        let mut pacer = Pacer::new(Settings {
            interval: INTERVAL,
            max_in_flight: None,
            queue_limit: 100,
            shares: 3,
        });
        for client in 0..waiting {
            let arrival = Arrival {
                client,
                urgency: 3,
                deadline: now.plus(60 * SECOND),
                target: 1,
            };
            let id = pacer.arrive(now, arrival).expect("room");
            pacer.ready(now, id, true);
        }
        pacer
    }

    /// Everything the pacer does up to `until`, with its wishes answered under `terms`: the slots of its dispatches.
    fn run(
        pacer: &mut Pacer,
        course: &mut Course,
        terms: Terms,
        clock: &ClockBounds,
        mut now: LocalTime,
        until: LocalTime,
    ) -> Vec<StoreTime> {
        let view = View {
            terms,
            reachable: false,
        };
        let mut starts = Vec::new();
        loop {
            while let Some(action) = pacer.next_action(now) {
                match action {
                    Action::Reserve(ask) => {
                        course.step(now, ask, &view, pacer, clock);
                    }
                    Action::Dispatch(_, slot) => {
                        pacer.departed(&slot);
                        starts.push(slot.start);
                    }
                    Action::Connect(_) | Action::Refuse(..) => {}
                }
            }
            match pacer.wake_at() {
                Some(at) if at <= until => now = at,
                _ => return starts,
            }
        }
    }

    fn clock(now: LocalTime) -> ClockBounds {
        let mut clock = ClockBounds::default();
        clock.observe(now, now, StoreTime(1_000 * SECOND));
        clock
    }

    fn alone(number: Option<u32>) -> Terms {
        Terms::Alone(Share { number, of: 3 })
    }

    #[test]
    fn a_share_is_a_third_of_the_pace_on_instants_of_its_own() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 50), Course::default());
        let starts = run(
            &mut pacer,
            &mut course,
            alone(Some(2)),
            &clock(now),
            now,
            now.plus(3 * SECOND),
        );
        assert_eq!(starts.len(), 10);
        assert!(starts.iter().all(|t| t.0 / INTERVAL % 3 == 2), "{starts:?}");
    }

    #[test]
    fn without_a_number_or_a_clock_the_share_is_as_large() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 50), Course::default());
        let none = ClockBounds::default();
        let starts = run(
            &mut pacer,
            &mut course,
            alone(None),
            &none,
            now,
            now.plus(3 * SECOND - 1),
        );
        assert_eq!(starts.len(), 10);
        assert!(starts.windows(2).all(|w| w[1].since(w[0]) == 3 * INTERVAL));
    }

    #[test]
    fn back_on_the_cursor_no_slot_of_the_share_is_used_and_the_last_used_is_the_floor() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 50), Course::default());
        let clock = clock(now);
        let until = now.plus(SECOND);
        let starts = run(&mut pacer, &mut course, alone(Some(0)), &clock, now, until);
        let shared = Terms::Shared { silent: 0, of: 3 };
        course.look(shared, &mut pacer);
        assert!(!course.is_alone());
        let view = View {
            terms: shared,
            reachable: true,
        };
        let Some(Action::Reserve(ask)) = pacer.next_action(until) else {
            panic!("the slot of the share is still held");
        };
        let Step::Ask(ask) = course.step(until, ask, &view, &mut pacer, &clock) else {
            panic!("the shared cursor is asked");
        };
        assert_eq!(ask.floor, starts.last().map(|t| t.plus(INTERVAL)));
    }

    #[test]
    fn an_agreed_ceiling_below_our_own_holds_on_the_share_too() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 1), Course::default());
        pacer.agree(2 * INTERVAL, 3);
        while let Some(action) = pacer.next_action(now) {
            if let Action::Reserve(ask) = action {
                let view = View {
                    terms: alone(Some(1)),
                    reachable: true,
                };
                let step = course.step(now, ask, &view, &mut pacer, &clock(now));
                assert!(matches!(step, Step::Own(Some(probe)) if probe.interval == 2 * INTERVAL));
            }
        }
        let slot = course.last.expect("a slot of our own");
        assert_eq!(slot.0 / (2 * INTERVAL) % 3, 1);
    }

    /// Rows that vanish twice within a moment make others silent, so that the interval grows: what they hold is let pass too.
    #[test]
    fn with_room_left_for_the_silent_the_slots_that_others_hold_are_as_far_apart_as_ours() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 5), Course::default());
        let view = View {
            terms: Terms::Shared { silent: 2, of: 3 },
            reachable: true,
        };
        while let Some(action) = pacer.next_action(now) {
            if let Action::Reserve(ask) = action {
                let Step::Ask(ask) = course.step(now, ask, &view, &mut pacer, &clock(now)) else {
                    panic!("the shared cursor is asked");
                };
                assert_eq!(ask.interval, 3 * INTERVAL);
                // Two others, each with a slot, and the end of the last of them.
                assert_eq!(ask.held, 3 * 3 * INTERVAL);
                return;
            }
        }
        panic!("no slot was wanted");
    }

    #[test]
    fn a_cursor_behind_our_own_far_slot_is_not_doubted() {
        let now = LocalTime(SECOND);
        let (mut pacer, mut course) = (pacer(now, 5), Course::default());
        let (far, view) = (
            200 * INTERVAL + 40 * SECOND,
            View {
                terms: Terms::Shared { silent: 0, of: 3 },
                reachable: true,
            },
        );
        pacer.raise_floor(StoreTime(1_000 * SECOND).plus(far));
        while let Some(action) = pacer.next_action(now) {
            if let Action::Reserve(ask) = action {
                let plain = ask.horizon;
                let Step::Ask(ask) = course.step(now, ask, &view, &mut pacer, &clock(now)) else {
                    panic!("the shared cursor is asked");
                };
                assert!(ask.horizon >= plain + far - MILLISECOND);
                return;
            }
        }
        panic!("no slot was wanted");
    }
}
