//! Clocks that disagree: each counts true time from its own start and at its own speed. True time, in nanoseconds from
//! the beginning of the history, exists only in the simulation; no part of the program sees it.

/// An instant of true time.
pub type True = i64;

/// A clock that never steps.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// What it showed when the history began.
    pub base: i64,
    /// How much faster than true time it runs, in parts per million.
    pub ppm: i64,
}

impl Clock {
    /// What it shows at `t`.
    pub fn read(&self, t: True) -> i64 {
        self.base + t + (i128::from(t) * i128::from(self.ppm)).div_euclid(1_000_000) as i64
    }

    /// The first instant at which it shows `reading` or more; may lie before the history.
    pub fn shows(&self, reading: i64) -> True {
        let far = i128::from(reading.saturating_sub(self.base));
        let mut t = (far * 1_000_000 / i128::from(1_000_000 + self.ppm)) as i64;
        while self.read(t) >= reading {
            t -= 1;
        }
        while self.read(t) < reading {
            t += 1;
        }
        t
    }
}
