//! The pacer driven by hand: one replica, a cursor without delay, instants given one by one.

use std::collections::HashSet;

use proptest::prelude::*;

use super::{
    dials::{CONNECTING_LIMITS, FEW, READY_AHEAD, SLOW_CONNECT},
    *,
};
use crate::pacing::{cursor::Ask, queue::Urgency};
use crate::store::memory;

type Refused = Vec<(Id, Refusal)>;

const INTERVAL: Nanos = 100 * MILLISECOND;

fn settings() -> Settings {
    Settings {
        interval: INTERVAL,
        max_in_flight: None,
        queue_limit: 10_000,
        max_replicas: 1,
    }
}

/// A pacer with an embedded cursor, whose connections are ready as soon as they are asked for.
struct Bench {
    pacer: Pacer,
    cursor: memory::Cursor,
    now: LocalTime,
    connects: bool,
    told: Vec<Id>,
    asks: usize,
    /// Whom requests are for, and who never answers.
    target: Target,
    hung: Option<Target>,
    of: std::collections::HashMap<Id, Target>,
    /// How long a connection takes, those that are being made, and the most that were not used at once.
    dials: Nanos,
    pending: BTreeSet<(LocalTime, Id)>,
    most_told: usize,
}

impl Bench {
    fn new(settings: Settings) -> Self {
        Bench {
            pacer: Pacer::new(settings),
            cursor: memory::Cursor::default(),
            now: LocalTime(1_000 * SECOND),
            connects: true,
            told: Vec::new(),
            asks: 0,
            target: 1,
            hung: None,
            of: std::collections::HashMap::new(),
            dials: 0,
            pending: BTreeSet::new(),
            most_told: 0,
        }
    }

    fn arrive(&mut self, client: Client, urgency: Urgency, patience: Nanos) -> Result<Id, Refusal> {
        let deadline = self.now.plus(patience);
        let id = self.pacer.arrive(
            self.now,
            Arrival {
                client,
                urgency,
                deadline,
                target: self.target,
            },
        )?;
        self.of.insert(id, self.target);
        Ok(id)
    }

    /// Connections that are made by now.
    fn answer(&mut self) {
        while let Some((_, id)) = self.pending.first().filter(|(at, _)| *at <= self.now) {
            self.pacer.ready(self.now, *id, true);
            self.pending.pop_first();
        }
    }

    /// Lets everything happen that is due now; returns who was dispatched and who refused.
    fn pump(&mut self) -> (Vec<(Dispatched, Slot)>, Refused) {
        let (mut sent, mut refused) = (Vec::new(), Vec::new());
        self.answer();
        while let Some(action) = self.pacer.next_action(self.now) {
            match action {
                Action::Connect(id) => {
                    self.told.push(id);
                    if self.connects && self.hung != Some(self.of[&id]) {
                        self.pending.insert((self.now.plus(self.dials), id));
                        self.answer();
                    }
                    let near = self.pacer.dials.connecting() + self.pacer.dials.ready().len();
                    self.most_told = self.most_told.max(near);
                }
                Action::Reserve(ask) => {
                    self.asks += 1;
                    let granted = self.cursor.reserve(self.now, &ask);
                    self.pacer.granted(self.now, granted, self.cursor.clock());
                }
                Action::Dispatch(who, slot) => sent.push((who, slot)),
                Action::Refuse(id, refusal) => refused.push((id, refusal)),
            }
        }
        (sent, refused)
    }

    /// Sleeps as told until `until`; returns who was dispatched, with the instants, and who was refused.
    fn run(&mut self, until: LocalTime) -> (Vec<(Id, LocalTime)>, Refused) {
        let (mut all_sent, mut all_refused) = (Vec::new(), Vec::new());
        loop {
            let (sent, refused) = self.pump();
            for (who, _) in sent {
                all_sent.push((who.id, self.now));
                self.pacer.finished(1);
            }
            all_refused.extend(refused);
            let made = self.pending.first().map(|(at, _)| *at);
            let next = [self.pacer.wake_at(), made].into_iter().flatten().min();
            match next.filter(|t| *t <= until) {
                Some(t) => {
                    assert!(
                        t > self.now,
                        "woken at {t:?}, which is not after {:?}",
                        self.now
                    );
                    self.now = t;
                }
                None => break,
            }
        }
        self.now = until;
        (all_sent, all_refused)
    }
}

#[test]
fn the_first_request_goes_at_once_and_the_next_an_interval_later() {
    let mut b = Bench::new(settings());
    let start = b.now;
    for _ in 0..3 {
        b.arrive(1, 3, 10 * SECOND).expect("room");
    }
    let (sent, _) = b.run(start.plus(SECOND));
    let gaps: Vec<Nanos> = sent.windows(2).map(|w| w[1].1.since(w[0].1)).collect();
    assert_eq!((sent.len(), sent[0].1), (3, start));
    assert!(
        gaps.iter().all(|g| g.abs_diff(INTERVAL) < 100_000),
        "{gaps:?}"
    );
}

#[test]
fn of_a_burst_as_many_are_served_as_their_patience_allows_and_the_rest_refused_at_once() {
    let mut b = Bench::new(settings());
    let start = b.now;
    let mut refused = Vec::new();
    for client in 0..80 {
        if let Err(refusal) = b.arrive(client, 3, 4 * SECOND) {
            refused.push(refusal);
        }
    }
    let (sent, later) = b.run(start.plus(6 * SECOND));
    assert!((39..=41).contains(&sent.len()), "{} served", sent.len());
    assert_eq!(refused.len() + later.len() + sent.len(), 80);
    assert_eq!(later, [], "let in and refused later");
    // Each may come back one slot after the one before, and finds the queue short enough then.
    let waits: Vec<Nanos> = refused.iter().map(|r| r.retry_after).collect();
    assert!(
        waits.windows(2).all(|w| w[1] - w[0] == INTERVAL),
        "{waits:?}"
    );
    assert_eq!(waits.iter().collect::<HashSet<_>>().len(), refused.len());
}

#[test]
fn a_refused_client_that_comes_back_when_told_is_served_in_time() {
    let mut b = Bench::new(settings());
    let start = b.now;
    let mut back_at = Vec::new();
    for client in 0..200 {
        if let Err(refusal) = b.arrive(client, 3, 2 * SECOND) {
            back_at.push(start.plus(refusal.retry_after));
        }
    }
    let mut served = 0;
    for at in back_at.clone() {
        served += b.run(at).0.len();
        b.arrive(9, 3, 2 * SECOND)
            .expect("was told to come back now");
    }
    let (sent, refused) = b.run(b.now.plus(10 * SECOND));
    assert_eq!(refused, []);
    assert_eq!(served + sent.len(), 200);
}

#[test]
fn no_more_than_are_needed_are_told_to_connect() {
    let mut b = Bench::new(settings());
    for client in 0..500 {
        b.arrive(client, 3, 100 * SECOND).expect("room");
    }
    b.connects = false;
    b.pump();
    assert_eq!(b.told.len(), 1 + READY_AHEAD);
    // While those are slow the next are told, a few at a time, and few of one host in all.
    b.run(b.now.plus(50 * SECOND));
    assert_eq!(b.told.len(), FEW);
    assert_eq!(b.pacer.dials.connecting(), FEW);
}

#[test]
fn a_queue_for_thousands_of_dead_hosts_opens_no_thousands_of_connections() {
    let mut b = Bench::new(settings());
    for target in 0..5_000 {
        b.target = target;
        b.arrive(target, 3, 1_000 * SECOND).expect("room");
    }
    b.connects = false;
    b.run(b.now.plus(50 * SECOND));
    assert_eq!(b.told.len(), CONNECTING_LIMITS[1]);
}

/// A host that never answers has its requests before all others; those to a good host keep the pace.
#[test]
fn a_host_that_does_not_answer_holds_up_no_other() {
    let mut b = Bench::new(settings());
    (b.hung, b.target) = (Some(7), 7);
    for client in 0..200 {
        b.arrive(client, 3, 1_000 * SECOND).expect("room");
    }
    b.target = 1;
    for client in 0..100 {
        b.arrive(client, 3, 1_000 * SECOND).expect("room");
    }
    let start = b.now;
    let (sent, _) = b.run(start.plus(5 * SECOND + SLOW_CONNECT));
    assert!(sent.len() >= 50, "{} sent", sent.len());
    // Those keep their places: once their host answers, they come first.
    b.hung = None;
    for id in std::mem::take(&mut b.told) {
        b.pacer.ready(b.now, id, true);
    }
    let (sent, _) = b.run(b.now.plus(SECOND));
    assert!(sent.iter().all(|(id, _)| *id < 200), "{sent:?}");
}

/// An origin that closes each connection, and handshakes that take longer than several intervals.
#[test]
fn connections_that_take_long_are_made_ahead() {
    let interval = 25 * MILLISECOND;
    let mut b = Bench::new(Settings {
        interval,
        ..settings()
    });
    for client in 0..1_000 {
        b.arrive(client, 3, 1_000 * SECOND).expect("room");
    }
    b.dials = 160 * MILLISECOND;
    b.run(b.now.plus(2 * SECOND));
    let (sent, _) = b.run(b.now.plus(10 * SECOND));
    assert!(sent.len() >= 398, "{} sent", sent.len());
    assert!(
        b.most_told <= 20,
        "{} connections at once for 40/s",
        b.most_told
    );
}

#[test]
fn a_slow_connection_lets_the_next_pass_and_keeps_its_place() {
    let mut b = Bench::new(settings());
    let ids: Vec<Id> = (0..4)
        .map(|client| b.arrive(client, 3, 10 * SECOND).expect("room"))
        .collect();
    b.connects = false;
    b.pump();
    b.pacer.ready(b.now, ids[1], true);
    let (sent, _) = b.pump();
    assert_eq!(sent.iter().map(|(w, _)| w.id).collect::<Vec<_>>(), [ids[1]]);
    b.pacer.ready(b.now, ids[2], true);
    b.pacer.ready(b.now, ids[0], true);
    let (sent, _) = b.run(b.now.plus(INTERVAL + MILLISECOND));
    assert_eq!(sent.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [ids[0]]);
}

#[test]
fn no_slot_is_taken_before_a_connection_is_ready() {
    let mut b = Bench::new(settings());
    b.connects = false;
    b.arrive(1, 3, 10 * SECOND).expect("room");
    b.run(b.now.plus(5 * SECOND));
    assert_eq!(b.asks, 0);
}

#[test]
fn a_client_that_leaves_gives_its_slot_to_the_next() {
    let mut b = Bench::new(settings());
    let start = b.now;
    for client in 0..2 {
        b.arrive(client, 3, 10 * SECOND).expect("room");
    }
    let first = b.pump().0;
    assert_eq!(first.len(), 1);
    b.pacer.undispatched(b.now, first[0].0, first[0].1, None);
    let (sent, _) = b.pump();
    assert_eq!((sent.len(), sent[0].1.start), (1, first[0].1.start));
    assert_eq!((b.now, b.pacer.voided()), (start, 0));
}

#[test]
fn slots_that_passed_while_the_machine_slept_send_nobody() {
    let mut b = Bench::new(settings());
    for client in 0..50 {
        b.arrive(client, 3, 60 * SECOND).expect("room");
    }
    b.run(b.now.plus(SECOND));
    b.now = b.now.plus(5 * SECOND);
    let woke = b.now;
    assert_eq!(b.pump().0.len(), 1, "the slot of now, and none of the past");
    let (sent, refused) = b.run(woke.plus(SECOND));
    assert!(
        sent.len() <= 10 && refused.is_empty(),
        "{} sent, {refused:?}",
        sent.len()
    );
}

#[test]
fn nobody_is_sent_after_the_deadline_however_late_the_machine_wakes() {
    let mut b = Bench::new(settings());
    b.connects = false;
    let id = b.arrive(1, 3, SECOND).expect("room");
    b.pump();
    b.pacer.ready(b.now, id, true);
    b.now = b.now.plus(SECOND + 1);
    let (sent, refused) = b.pump();
    assert_eq!((sent.len(), refused.len()), (0, 1));
}

#[test]
fn as_many_are_under_way_as_may_be() {
    let mut b = Bench::new(Settings {
        max_in_flight: Some(3),
        ..settings()
    });
    for client in 0..20 {
        b.arrive(client, 3, 60 * SECOND).expect("room");
    }
    let mut sent = Vec::new();
    for _ in 0..10 {
        sent.extend(b.pump().0);
        b.now = b
            .pacer
            .wake_at()
            .expect("deadlines")
            .min(b.now.plus(INTERVAL));
    }
    assert_eq!((sent.len(), b.pacer.in_flight(), b.asks), (3, 3, 3));
    b.pacer.finished(1);
    assert_eq!(b.pump().0.len(), 1);
}

#[test]
fn a_store_that_fails_is_asked_again_when_told_and_not_before() {
    let mut b = Bench::new(settings());
    let id = b.arrive(1, 3, 10 * SECOND).expect("room");
    assert_eq!(b.pacer.next_action(b.now), Some(Action::Connect(id)));
    b.pacer.ready(b.now, id, true);
    assert!(matches!(
        b.pacer.next_action(b.now),
        Some(Action::Reserve(_))
    ));
    let retry_at = b.now.plus(100 * MILLISECOND);
    b.pacer.failed(retry_at);
    assert_eq!(
        (b.pacer.next_action(b.now), b.pacer.wake_at()),
        (None, Some(retry_at))
    );
    assert!(matches!(
        b.pacer.next_action(retry_at),
        Some(Action::Reserve(_))
    ));
    // While that call is under way there is nothing to wake for but the deadline.
    assert_eq!(b.pacer.wake_at(), Some(b.now.plus(10 * SECOND)));
    b.pacer.failed(retry_at.plus(SECOND));
    let (_, refused) = b.run(b.now.plus(500 * MILLISECOND));
    assert_eq!(refused, []);
    let (sent, _) = b.run(b.now.plus(2 * SECOND));
    assert_eq!(sent.len(), 1);
}

#[test]
fn a_request_whose_deadline_passes_while_the_store_is_away_is_told_so() {
    let mut b = Bench::new(settings());
    let id = b.arrive(1, 3, SECOND).expect("room");
    b.pacer.next_action(b.now);
    b.pacer.ready(b.now, id, true);
    b.pacer.next_action(b.now);
    b.pacer.failed(b.now.plus(60 * SECOND));
    let (_, refused) = b.run(b.now.plus(2 * SECOND));
    assert_eq!(
        refused.iter().map(|(_, r)| r.cause).collect::<Vec<_>>(),
        [Cause::StoreAway]
    );
}

#[test]
fn a_faster_pace_is_not_held_back_by_a_slot_of_the_slow_one() {
    let day = 86_400 * SECOND;
    let mut b = Bench::new(Settings {
        interval: day,
        ..settings()
    });
    b.arrive(1, 3, 2 * day).expect("room");
    b.arrive(1, 3, 2 * day).expect("room");
    b.run(b.now.plus(SECOND));
    b.pacer.reconfigure(settings());
    let (sent, _) = b.run(b.now.plus(SECOND));
    assert_eq!(sent.len(), 1);
}

#[test]
fn a_slower_pace_holds_from_the_next_slot_but_one() {
    let mut b = Bench::new(settings());
    for client in 0..30 {
        b.arrive(client, 3, 60 * SECOND).expect("room");
    }
    b.run(b.now.plus(SECOND));
    b.pacer.reconfigure(Settings {
        interval: SECOND,
        ..settings()
    });
    let (sent, _) = b.run(b.now.plus(10 * SECOND));
    assert!((9..=12).contains(&sent.len()), "{}", sent.len());
}

#[test]
fn after_a_change_to_a_faster_pace_nobody_is_refused_for_the_old_one() {
    let mut b = Bench::new(Settings {
        interval: SECOND,
        ..settings()
    });
    for client in 0..8 {
        b.arrive(client, 3, 60 * SECOND).expect("room");
    }
    b.run(b.now.plus(2 * SECOND - MILLISECOND));
    b.pacer.reconfigure(settings());
    // Six wait: one slot of the old pace may be held, and the rest takes half a second.
    b.arrive(9, 3, 3 * SECOND).expect("room at the new pace");
    let (sent, refused) = b.run(b.now.plus(2 * SECOND));
    assert_eq!((sent.len(), refused.len()), (7, 0));
}

#[test]
fn one_long_gap_does_not_make_the_queue_look_hopeless() {
    let mut b = Bench::new(settings());
    for client in 0..100 {
        b.arrive(client, 3, 25 * SECOND).expect("room");
    }
    let before = b.run(b.now.plus(SECOND)).0.len();
    // Somebody else moves the cursor three seconds on: 90 wait, 12 s are needed and more than 20 s are left.
    let elsewhere = Ask {
        slots: 30,
        interval: INTERVAL,
        lead: 0,
        floor: None,
        horizon: 60 * SECOND,
        held: 0,
    };
    b.cursor.reserve(b.now, &elsewhere);
    let (sent, refused) = b.run(b.now.plus(24 * SECOND));
    assert_eq!((refused.len(), sent.len()), (0, 100 - before));
}

#[test]
fn after_a_step_of_the_clock_the_pace_of_what_was_sent_still_counts() {
    let mut pacer = Pacer::new(settings());
    let mut clock = ClockBounds::default();
    let (mut now, mut last, mut sent) = (LocalTime(SECOND), None, 0);
    for client in 0..40 {
        let deadline = now.plus(60 * SECOND);
        pacer
            .arrive(
                now,
                Arrival {
                    client,
                    urgency: 3,
                    deadline,
                    target: 1,
                },
            )
            .expect("room");
    }
    let mut stepped = 0;
    let mut cursor = None;
    while sent < 30 {
        while let Some(action) = pacer.next_action(now) {
            match action {
                Action::Connect(id) => pacer.ready(now, id, true),
                Action::Reserve(ask) => {
                    // The clock jumps an hour, forth and back, with every seventh slot.
                    stepped = if sent / 7 % 2 == 1 { 3_600 * SECOND } else { 0 };
                    let store = StoreTime(now.0 + stepped);
                    let granted = crate::pacing::cursor::reserve(cursor, store, &ask);
                    cursor = Some(granted.end());
                    clock.observe(now, now, store);
                    pacer.granted(now, granted, &clock);
                }
                Action::Dispatch(..) => {
                    if let Some(before) = last.replace(now) {
                        assert!(
                            now.since(before) >= INTERVAL - 1_000,
                            "{} after a step",
                            now.since(before)
                        );
                    }
                    sent += 1;
                }
                Action::Refuse(id, refusal) => panic!("{id} refused: {refusal:?}"),
            }
        }
        now = pacer.wake_at().expect("requests wait");
    }
    assert!(clock.steps() >= 3 && stepped == 0);
}

/// Sees a clock step by `by` at a second, and half a minute later an idle lane's request, on a pacer of before or a new one.
fn first_after_a_step(interval: Nanos, by: Nanos, new: bool, used: bool) -> Nanos {
    let settings = Settings {
        interval,
        max_replicas: 3,
        ..settings()
    };
    let (mut pacer, mut clock) = (Pacer::new(settings), ClockBounds::default());
    let offset = 1_700_000_000 * SECOND;
    let mut now = LocalTime(1_000 * SECOND);
    let (mut cursor, mut shift, mut sent_at) = (None, 0, None);
    let arrive = |pacer: &mut Pacer, now: LocalTime| {
        let arrival = Arrival {
            client: 1,
            urgency: 3,
            deadline: now.plus(1_000 * SECOND),
            target: 1,
        };
        pacer.arrive(now, arrival).expect("room");
    };
    let step_at = now.plus(2 * interval);
    let again_at = step_at.plus(35 * SECOND);
    if used {
        arrive(&mut pacer, now);
    }
    let mut beat_at = now;
    loop {
        if now == step_at {
            shift = by;
        }
        if now == again_at {
            if new {
                pacer = Pacer::new(settings);
            }
            sent_at = None;
            arrive(&mut pacer, now);
        }
        if now == beat_at {
            clock.observe(now, now, StoreTime(now.0 + offset + shift));
            beat_at = now.plus(SECOND);
        }
        pacer.look(now, &clock);
        while let Some(action) = pacer.next_action(now) {
            match action {
                Action::Connect(id) => pacer.ready(now, id, true),
                Action::Reserve(ask) => {
                    let store = StoreTime(now.0 + offset + shift);
                    let granted = crate::pacing::cursor::reserve(cursor, store, &ask);
                    cursor = Some(granted.end());
                    clock.observe(now, now, store);
                    pacer.granted(now, granted, &clock);
                }
                Action::Dispatch(..) => sent_at = Some(now),
                Action::Refuse(id, refusal) => panic!("{id} refused: {refusal:?}"),
            }
        }
        if let (true, Some(sent)) = (now >= again_at, sent_at) {
            return sent.since(again_at);
        }
        let next = [
            Some(step_at),
            Some(again_at),
            Some(beat_at),
            pacer.wake_at(),
        ];
        now = next
            .into_iter()
            .flatten()
            .filter(|t| *t > now)
            .min()
            .expect("beats");
    }
}

#[test]
fn after_a_step_of_the_clock_an_idle_destination_sends_at_once() {
    for interval in [2 * SECOND, 43_200 * MILLISECOND] {
        for by in [3_600 * SECOND, -3_600 * SECOND] {
            for (new, used) in [(true, true), (true, false), (false, true), (false, false)] {
                let wait = first_after_a_step(interval, by, new, used);
                assert!(
                    wait <= MILLISECOND,
                    "waited {wait} ns at {interval} after a step of {by}; {new} {used}"
                );
            }
        }
    }
}

/// What was sent before the step still counts: the next is an interval after it, and no sooner.
#[test]
fn after_a_step_of_the_clock_a_slow_pace_goes_on_where_it_was() {
    for (interval, by) in [
        (20 * SECOND, 3_600 * SECOND),
        (20 * SECOND, -3_600 * SECOND),
        (SECOND, 0),
    ] {
        let settings = Settings {
            interval,
            max_replicas: 3,
            ..settings()
        };
        let (mut pacer, mut clock) = (Pacer::new(settings), ClockBounds::default());
        let (start, offset) = (LocalTime(1_000 * SECOND), 1_700_000_000 * SECOND);
        let (mut now, mut cursor, mut sent) = (start, None, Vec::new());
        for client in 0..4 {
            let arrival = Arrival {
                client,
                urgency: 3,
                deadline: now.plus(1_000 * SECOND),
                target: 1,
            };
            pacer.arrive(now, arrival).expect("room");
        }
        while sent.len() < 4 {
            let shift = if now.since(start) >= 5 * SECOND {
                by
            } else {
                0
            };
            let store = StoreTime(now.0 + offset + shift);
            clock.observe(now, now, store);
            pacer.look(now, &clock);
            while let Some(action) = pacer.next_action(now) {
                match action {
                    Action::Connect(id) => pacer.ready(now, id, true),
                    Action::Reserve(ask) => {
                        let granted = crate::pacing::cursor::reserve(cursor, store, &ask);
                        cursor = Some(granted.end());
                        pacer.granted(now, granted, &clock);
                    }
                    Action::Dispatch(..) => sent.push(now),
                    Action::Refuse(id, refusal) => panic!("{id} refused: {refusal:?}"),
                }
            }
            now = now.plus(100 * MILLISECOND);
        }
        let gaps: Vec<Nanos> = sent.windows(2).map(|w| w[1].since(w[0])).collect();
        let slack = 200 * MILLISECOND;
        assert!(
            gaps.iter()
                .all(|gap| (interval..=interval + slack).contains(gap)),
            "{gaps:?} after {by}"
        );
    }
}

proptest! {
    /// Whoever is ready and first in the order of the line goes first, and the shell is never woken for nothing:
    /// before `wake_at` nothing new comes, and at it something does or the next waking is later.
    #[test]
    fn the_order_is_that_of_the_line_among_the_ready(
        steps in prop::collection::vec((0u64..4, 0u8..8, 0i64..80 * MILLISECOND, 0u8..10), 1..80),
    ) {
        let mut b = Bench::new(settings());
        b.connects = false;
        let mut unready = Vec::new();
        for (client, urgency, pause, what) in steps {
            let _ = b.arrive(client, urgency, 1_000 * SECOND);
            let until = b.now.plus(pause);
            loop {
                let expected = b.pacer.dials.ready().first().copied();
                let action = b.pacer.next_action(b.now);
                match action {
                    Some(Action::Dispatch(who, slot)) => {
                        prop_assert!(slot.is_fresh(b.now));
                        prop_assert_eq!(Some(who.place), expected);
                        b.pacer.finished(1);
                    }
                    Some(Action::Connect(id)) => unready.push(id),
                    Some(Action::Reserve(ask)) => {
                        let granted = b.cursor.reserve(b.now, &ask);
                        b.pacer.granted(b.now, granted, b.cursor.clock());
                    }
                    Some(Action::Refuse(id, r)) => prop_assert!(false, "{} refused: {:?}", id, r),
                    None => {
                        let wake_at = b.pacer.wake_at().unwrap_or(until);
                        prop_assert!(wake_at > b.now || wake_at == until);
                        let before = LocalTime(wake_at.0 - 1).min(until);
                        if before > b.now {
                            prop_assert_eq!(b.pacer.next_action(before), None);
                        }
                        if wake_at > until {
                            b.now = until;
                            break;
                        }
                        b.now = wake_at;
                        if wake_at == until && b.pacer.wake_at().is_none_or(|w| w > until) {
                            break;
                        }
                    }
                }
            }
            // Some connections become ready, in any order; some are lost.
            if what < 7 && !unready.is_empty() {
                let id = unready.swap_remove(usize::from(what) % unready.len());
                b.pacer.ready(b.now, id, true);
                if what == 6 {
                    b.pacer.unready(b.now, id);
                    unready.push(id);
                }
            }
        }
    }

    /// Whatever happens, each request that was let in ends once: sent, refused, or gone.
    #[test]
    fn each_request_ends_exactly_once(
        steps in prop::collection::vec((0u64..4, 0i64..60 * MILLISECOND, 0i64..3 * SECOND, 0u8..10), 1..100),
        most in prop::option::of(1usize..4),
    ) {
        let mut b = Bench::new(Settings { max_in_flight: most, ..settings() });
        let (mut waiting, mut out) = (Vec::new(), 0usize);
        for (client, pause, patience, what) in steps {
            waiting.extend(b.arrive(client, 3, patience).ok());
            if what == 0 && !waiting.is_empty() {
                b.pacer.leave(waiting.swap_remove(0));
            }
            let (sent, refused) = b.pump();
            for (who, slot) in sent {
                match what {
                    1 => b.pacer.undispatched(b.now, who, slot, Some(true)),
                    2 => {
                        b.pacer.undispatched(b.now, who, slot, None);
                        waiting.retain(|id| *id != who.id);
                    }
                    _ => {
                        prop_assert!(waiting.contains(&who.id));
                        waiting.retain(|id| *id != who.id);
                        out += 1;
                    }
                }
            }
            for (id, _) in refused {
                prop_assert!(waiting.contains(&id));
                waiting.retain(|w| *w != id);
            }
            prop_assert_eq!((b.pacer.waiting(), b.pacer.in_flight()), (waiting.len(), out));
            prop_assert!(most.is_none_or(|m| out <= m));
            if what > 5 && out > 0 {
                b.pacer.finished(1);
                out -= 1;
            }
            b.now = b.now.plus(pause);
        }
        while out > 0 {
            b.pacer.finished(1);
            out -= 1;
        }
        let (sent, refused) = b.run(b.now.plus(10 * SECOND));
        prop_assert_eq!(sent.len() + refused.len(), waiting.len());
        prop_assert!(b.pacer.waiting() == 0 && b.pacer.is_idle());
        prop_assert_eq!((b.pacer.by_place.len(), b.pacer.deadlines.len()), (0, 0));
        prop_assert!(b.pacer.dials.is_empty());
    }
}
