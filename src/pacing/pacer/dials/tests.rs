use super::*;
use crate::pacing::queue::Line;

/// Requests told and not yet ready or gone, with what they are for.
struct Bench {
    line: Line,
    dials: Dials,
    now: LocalTime,
    told: Vec<(Place, Target, Stage)>,
    targets: FxHashMap<Place, Target>,
}

impl Bench {
    fn new() -> Self {
        Bench {
            line: Line::default(),
            dials: Dials::default(),
            now: LocalTime(SECOND),
            told: Vec::new(),
            targets: FxHashMap::default(),
        }
    }

    fn wait(&mut self, target: Target) {
        let place = self.line.join(1, 3);
        self.dials.wait(place, target);
        self.targets.insert(place, target);
    }

    /// Tells all that should be told now.
    fn tell(&mut self, window: usize) {
        while let Some(place) = self.dials.next(self.now, window) {
            let target = self.targets[&place];
            let stage = self.dials.tell(self.now, place, target);
            self.told.push((place, target, stage));
        }
    }

    fn later(&mut self, span: Nanos) {
        self.now = self.now.plus(span);
    }

    /// All that are told of `target` get their connection.
    fn answer(&mut self, target: Target) {
        let (answered, rest) = std::mem::take(&mut self.told)
            .into_iter()
            .partition(|(_, t, _)| *t == target);
        self.told = rest;
        for (place, target, stage) in answered {
            let now = self.now;
            let stage = self.dials.connected(now, place, target, stage, true);
            self.dials.leave(place, target, stage);
        }
    }

    fn dialling(&self, target: Target) -> usize {
        self.told.iter().filter(|(_, t, _)| *t == target).count()
    }
}

#[test]
fn a_host_that_does_not_answer_is_left_to_few() {
    let mut b = Bench::new();
    for _ in 0..1_000 {
        b.wait(1);
    }
    for _ in 0..10 {
        b.tell(3);
        b.later(SLOW_CONNECT);
    }
    assert_eq!(b.dialling(1), FEW);
    // Behind them all, and told at once.
    b.wait(2);
    b.tell(3);
    assert_eq!(b.dialling(2), 1);
    // It answers: it is a host like others again.
    b.answer(1);
    b.tell(3);
    assert_eq!(b.dialling(1), 3);
}

#[test]
fn a_slow_host_that_answers_is_not_taken_for_a_dead_one() {
    let mut b = Bench::new();
    for _ in 0..1_000 {
        b.wait(1);
    }
    for _ in 0..5 {
        b.tell(20);
        b.later(300 * MILLISECOND);
        b.answer(1);
    }
    b.tell(20);
    b.later(300 * MILLISECOND);
    b.tell(20);
    assert_eq!(b.dialling(1), 20);
}

#[test]
fn thousands_of_hosts_that_do_not_answer_leave_room_for_those_that_do() {
    let mut b = Bench::new();
    b.wait(0);
    b.tell(3);
    b.later(MILLISECOND);
    b.answer(0);
    for target in 1..5_000 {
        for _ in 0..3 {
            b.wait(target);
        }
    }
    for _ in 0..1_000 {
        b.tell(3);
        b.later(SLOW_CONNECT);
    }
    assert_eq!(b.told.len(), CONNECTING_LIMITS[1]);
    b.wait(0);
    b.tell(3);
    assert_eq!(b.dialling(0), 1);
    // And hosts of which nothing is known get what those give up that have given up.
    for (place, target, stage) in b.told.split_off(40) {
        b.dials.leave(place, target, stage);
    }
    b.tell(3);
    assert!(b.told.len() > 40);
}

#[test]
fn hosts_that_nobody_waits_for_are_forgotten_before_long() {
    let mut b = Bench::new();
    for target in 0..10_000 {
        b.wait(target);
        b.tell(3);
        b.answer(target);
    }
    assert!(b.dials.targets.len() <= IDLE_TARGETS + 1);
    assert!(b.dials.is_empty());
}

#[test]
fn as_many_connections_are_made_ahead_as_pass_meanwhile() {
    let mut b = Bench::new();
    assert_eq!(b.dials.ahead(25 * MILLISECOND), READY_AHEAD);
    for _ in 0..50 {
        b.wait(1);
        b.tell(3);
        b.later(150 * MILLISECOND);
        b.answer(1);
    }
    let ahead = b.dials.ahead(25 * MILLISECOND);
    assert!((6..=9).contains(&ahead), "{ahead}");
    assert_eq!(b.dials.ahead(SECOND), READY_AHEAD);
    assert_eq!(b.dials.ahead(1), AHEAD_LIMIT);
    // Kept connections take no time: none is made ahead.
    for _ in 0..50 {
        b.wait(1);
        b.tell(3);
        let (place, target, stage) = b.told.remove(0);
        let stage = b.dials.connected(b.now, place, target, stage, false);
        b.dials.leave(place, target, stage);
    }
    assert_eq!(b.dials.ahead(25 * MILLISECOND), READY_AHEAD);
}
