//! Random numbers that a seed repeats: SplitMix64 (Steele, Lea, Flood 2014). Nothing here knows what they are for.

use std::ops::RangeInclusive;

/// A seeded source.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly out of a range, both ends included.
    pub fn within(&mut self, range: RangeInclusive<i64>) -> i64 {
        let (low, high) = range.into_inner();
        let width = high.abs_diff(low).saturating_add(1);
        low.wrapping_add_unsigned(self.next() % width)
    }

    /// Out of a range, each order of magnitude as likely as the next.
    pub fn magnitude(&mut self, range: RangeInclusive<i64>) -> i64 {
        let (low, high) = (*range.start() as f64, *range.end() as f64);
        (low * (high / low).powf(self.fraction())) as i64
    }

    /// Exponentially distributed around a mean: the pauses of a Poisson process.
    pub fn pause(&mut self, mean: i64) -> i64 {
        (-(1.0 - self.fraction()).ln() * mean as f64) as i64
    }

    /// True so many times in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        self.next() % 1000 < u64::from(per_mille)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next() as usize % from.len()]
    }

    /// At least 0 and less than 1.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
