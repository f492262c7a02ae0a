//! What happens to the store and to the links in one history, drawn from its seed.

use paceline::pacing::time::{MILLISECOND, Nanos, SECOND};

use super::super::{clocks::True, plan::Spans, random::Random};

#[derive(Clone, Debug)]
pub struct OutagePlan {
    pub seed: u64,
    pub replicas: usize,
    pub max_replicas: u32,
    pub interval: Nanos,
    pub one_way: Spans,
    pub span: True,
    /// Which replicas have requests.
    pub busy: Vec<bool>,
    /// What each is configured with: `max_replicas`, and how many times the ceiling.
    pub numbers: Vec<u32>,
    pub faster: Vec<Nanos>,
    pub troubles: Vec<(True, Trouble)>,
}

#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    /// One link: what is sent is refused, or held back.
    Cut {
        replica: usize,
        span: Nanos,
        stalled: bool,
    },
    /// The server is gone.
    Down(Nanos),
    /// The server stands still, and carries out later what was sent to it.
    Frozen(Nanos),
    /// Somebody holds the cursor's row.
    Locked(Nanos),
    RowVanishes,
    AllRowsVanish,
    /// Another server takes over after `gap`, as things stood `lag` ago, its clock `step` ahead.
    Failover {
        gap: Nanos,
        lag: Nanos,
        step: Nanos,
    },
    Kill {
        replica: usize,
        down: Nanos,
    },
    /// Heartbeats fail, and nothing else does.
    Beats {
        replica: usize,
        span: Nanos,
        how: Beats,
    },
    /// The session ends.
    End(usize),
    /// All requests of a replica are given up, and others come after `span`.
    GivenUp {
        replica: usize,
        span: Nanos,
    },
}

/// What becomes of heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beats {
    /// The server refuses them.
    Refused,
    /// They are written, and the replies are lost.
    Unanswered,
}

impl OutagePlan {
    /// Some links, all links, the server, the row: one after the other or at once.
    pub fn drawn(seed: u64, random: &mut Random) -> Self {
        let max_replicas = random.within(1..=4) as u32;
        let replicas = random.within(1..=i64::from(max_replicas)) as usize;
        let one_way = random.magnitude(50_000..=20 * MILLISECOND);
        let mut plan = OutagePlan {
            seed,
            replicas,
            max_replicas,
            interval: random.magnitude(20 * MILLISECOND..=300 * MILLISECOND),
            one_way: one_way / 2..=one_way,
            span: 70 * SECOND,
            busy: (0..replicas).map(|_| !random.chance(150)).collect(),
            numbers: vec![max_replicas; replicas],
            faster: vec![1; replicas],
            troubles: Vec::new(),
        };
        // Files that differ: rates by orders of magnitude, and numbers of which the first to start are the smallest, as when
        // they are raised one after the other.
        if random.chance(300) {
            for n in 0..replicas {
                plan.faster[n] = random.magnitude(1..=1_000);
                plan.numbers[n] = random.within(n as i64 + 1..=i64::from(max_replicas)) as u32;
            }
            plan.faster[random.next() as usize % replicas] = 1;
            plan.numbers[replicas - 1] = max_replicas;
        }
        for _ in 0..random.within(1..=5) {
            let at = random.within(8 * SECOND..=45 * SECOND);
            plan.draw_trouble(at, random);
        }
        // A run that begins while it alone cannot reach the store cannot know how the others are configured.
        if !plan.is_even() {
            for (_, trouble) in &mut plan.troubles {
                if let Trouble::Kill { replica, .. } = *trouble {
                    *trouble = Trouble::End(replica);
                }
            }
        }
        // Somebody must remember who else there was: a run that begins with an empty table, or with a clock that makes all
        // leases look lapsed, while all others are away, cannot know of them until they are heard.
        if plan
            .troubles
            .iter()
            .any(|(_, t)| matches!(t, Trouble::Kill { .. }))
        {
            for (_, trouble) in &mut plan.troubles {
                match trouble {
                    Trouble::AllRowsVanish => *trouble = Trouble::RowVanishes,
                    Trouble::Failover { step, .. } => *step = 0,
                    _ => {}
                }
            }
        }
        plan
    }

    fn draw_trouble(&mut self, at: True, random: &mut Random) {
        let replica = random.next() as usize % self.replicas;
        let span = random.magnitude(200 * MILLISECOND..=20 * SECOND);
        let trouble = match random.within(0..=13) {
            0 | 1 => Trouble::Cut {
                replica,
                span,
                stalled: random.chance(500),
            },
            2 => {
                // Flapping: up for long enough to be used.
                let mut from = at;
                for _ in 0..random.within(2..=5) {
                    let span = random.within(200 * MILLISECOND..=6 * SECOND);
                    let stalled = random.chance(500);
                    let cut = Trouble::Cut {
                        replica,
                        span,
                        stalled,
                    };
                    self.troubles.push((from, cut));
                    from += span + random.within(200 * MILLISECOND..=5 * SECOND);
                }
                return;
            }
            3 => Trouble::Down(span),
            4 => Trouble::Frozen(span),
            5 => Trouble::Locked(span),
            6 => Trouble::RowVanishes,
            7 => Trouble::AllRowsVanish,
            8 => Trouble::Failover {
                gap: random.within(0..=3 * SECOND),
                lag: random.within(0..=2 * SECOND),
                step: random.pick(&[0, 0, 3_600 * SECOND, -3_600 * SECOND]),
            },
            9 => Trouble::Kill {
                replica,
                down: random.magnitude(10 * MILLISECOND..=8 * SECOND),
            },
            10 => Trouble::Beats {
                replica,
                span,
                how: random.pick(&[Beats::Refused, Beats::Unanswered]),
            },
            11 => {
                // Sessions that end as soon as they are used.
                let until = at + random.within(3 * SECOND..=20 * SECOND);
                self.flap(replica, at, until, random);
                return;
            }
            12 => {
                // A lock that outlasts the patience of those who meet it.
                let span = random.pick(&[span, self.span]);
                let given_up = Trouble::GivenUp { replica, span };
                self.troubles
                    .push((at, Trouble::Locked(span.min(6 * SECOND))));
                self.troubles
                    .push((at + random.within(0..=5 * SECOND), given_up));
                return;
            }
            // All links at once, but not to the instant.
            _ => {
                for replica in 0..self.replicas {
                    let from = at + random.within(0..=SECOND);
                    let stalled = random.chance(500);
                    let cut = Trouble::Cut {
                        replica,
                        span,
                        stalled,
                    };
                    self.troubles.push((from, cut));
                }
                return;
            }
        };
        self.troubles.push((at, trouble));
    }

    /// The session of `replica` ends again and again.
    pub fn flap(&mut self, replica: usize, from: True, until: True, random: &mut Random) {
        let mut at = from;
        while at < until {
            self.troubles.push((at, Trouble::End(replica)));
            at += random.within(250 * MILLISECOND..=750 * MILLISECOND);
        }
    }

    /// Whether all are configured alike.
    pub fn is_even(&self) -> bool {
        self.numbers.iter().all(|n| *n == self.max_replicas) && self.faster.iter().all(|f| *f == 1)
    }

    /// The interval that a replica is configured with.
    pub fn interval_of(&self, replica: usize) -> Nanos {
        (self.interval / self.faster[replica]).max(1_000)
    }

    /// When the last trouble is over.
    pub fn over(&self) -> True {
        let end = |(at, trouble): &(True, Trouble)| {
            at + match *trouble {
                Trouble::Cut { span, .. }
                | Trouble::Down(span)
                | Trouble::Frozen(span)
                | Trouble::Locked(span)
                | Trouble::Beats { span, .. } => span,
                Trouble::Failover { gap, .. } => gap,
                Trouble::Kill { down, .. } => down,
                Trouble::RowVanishes
                | Trouble::AllRowsVanish
                | Trouble::End(_)
                | Trouble::GivenUp { .. } => 0,
            }
        };
        self.troubles.iter().map(end).max().unwrap_or(0)
    }

    /// How long slots granted before a row was lost may yet be used beside those granted after.
    pub fn settles(&self) -> Nanos {
        2 * SECOND + 4 * Nanos::from(self.max_replicas) * self.interval
    }
}
