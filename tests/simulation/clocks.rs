//! Clocks that disagree: each counts true time from its own start and at its own speed. True time, in nanoseconds from
//! the beginning of the history, exists only in the simulation; no part of the program sees it.

/// An instant of true time.
pub type True = i64;

/// A clock that never steps. It runs evenly, but for a time in which it is slewed, as NTP does it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// What it showed when the history began.
    pub base: i64,
    /// How much faster than true time it runs, in parts per million.
    pub ppm: i64,
    pub slew: Slew,
}

/// From when until when, and by how many parts per million.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slew {
    pub from: True,
    pub until: True,
    pub ppm: i64,
}

impl Clock {
    /// What it shows at `t`.
    pub fn read(&self, t: True) -> i64 {
        let gained =
            |span: i64, ppm: i64| (i128::from(span) * i128::from(ppm)).div_euclid(1_000_000) as i64;
        let slewed = t.min(self.slew.until) - self.slew.from;
        self.base + t + gained(t, self.ppm) + gained(slewed.max(0), self.slew.ppm)
    }

    /// The first instant at which it shows `reading` or more; may lie before the history.
    pub fn shows(&self, reading: i64) -> True {
        let mut t = reading.saturating_sub(self.base);
        for _ in 0..8 {
            t += reading.saturating_sub(self.read(t));
        }
        while self.read(t) >= reading {
            t -= 1;
        }
        while self.read(t) < reading {
            t += 1;
        }
        t
    }
}
