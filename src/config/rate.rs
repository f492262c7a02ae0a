//! A ceiling as the operator writes it, and the interval that follows from it.
//!
//! Pure arithmetic; doesn't know cursors or slots.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// The slowest ceiling: one request a day.
const SLOWEST: f64 = 1.0 / 86_400.0;

/// The fastest ceiling, in requests per second: an interval of one microsecond, finer than any store can pace.
const FASTEST: f64 = 1e6;

const NANOS_PER_SECOND: f64 = 1e9;

/// A ceiling: requests in all per span of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second; finite, and from one a day to a million a second.
    pub per_second: f64,
}

impl Rate {
    /// A ceiling of so many requests per second.
    ///
    /// # Errors
    /// When it is not a number, not above zero, or out of range.
    pub fn per_second(per_second: f64) -> Result<Rate, RateError> {
        // No range contains NaN. The slack lets "1/day" through in whatever way the division rounded.
        if (SLOWEST * (1.0 - f64::EPSILON)..=FASTEST).contains(&per_second) {
            return Ok(Rate { per_second });
        }
        Err(match per_second {
            rate if rate > FASTEST => RateError::TooFast,
            rate if rate > 0.0 => RateError::TooSlow,
            _ => RateError::NotPositive,
        })
    }

    /// The time between two slots in nanoseconds, rounded up: rounded down, the ceiling would be passed.
    pub fn interval_nanos(&self) -> u64 {
        let exact = NANOS_PER_SECOND / self.per_second;
        // "100/hour" has no exact binary form; without this slack of a few units in the last place its 36 s would
        // round up to 36 s and 1 ns, and not be the 36 s of a replica that was told 0.02777...
        let slack = exact * 4.0 * f64::EPSILON;
        // In range: `per_second` is at least one a day, so this is at most 8.64e13.
        (exact - slack).ceil() as u64
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(f64, &str); 4] = [
            (1.0, "s"),
            (60.0, "min"),
            (3600.0, "hour"),
            (86_400.0, "day"),
        ];
        let count = |unit: &(f64, &'static str)| (self.per_second * unit.0, unit.1);
        // The first unit in which it is at least 1 with at most three decimals reads best: 7.5/s, 100/min, 2000/day.
        let short = |(n, _): &(f64, &str)| {
            let thousands = n * 1e3;
            thousands > 999.9 && (thousands - thousands.round()).abs() < 1e-9 * thousands
        };
        let (n, unit) = UNITS.iter().map(count).find(short).unwrap_or_else(|| {
            count(if self.per_second < 1.0 {
                &UNITS[3]
            } else {
                &UNITS[0]
            })
        });
        write!(f, "{}/{unit}", (n * 1e3).round() / 1e3)
    }
}

impl FromStr for Rate {
    type Err = RateError;

    /// Reads `count/unit`, the unit being `s`, `min`, `hour` or `day` or a usual short or long form of these.
    fn from_str(text: &str) -> Result<Rate, RateError> {
        let (count, unit) = text.split_once('/').ok_or(RateError::Form)?;
        let seconds = match unit.trim() {
            "s" | "sec" | "second" => 1.0,
            "m" | "min" | "minute" => 60.0,
            "h" | "hour" => 3600.0,
            "d" | "day" => 86_400.0,
            _ => return Err(RateError::Unit),
        };
        let count = count.trim();
        // `f64::from_str` alone would also take "inf", "nan" and "1e3".
        if !count
            .bytes()
            .all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'-'))
        {
            return Err(RateError::Form);
        }
        let count: f64 = count.parse().map_err(|_| RateError::Form)?;
        Rate::per_second(count / seconds)
    }
}

/// Why a ceiling was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RateError {
    /// Neither a number nor `count/unit`.
    #[error(
        "is neither a number nor \"count/unit\"; write requests per second as in 7.0, or \"30/min\""
    )]
    Form,
    /// An unknown unit.
    #[error("has an unknown unit; use one of /s, /min, /hour, /day")]
    Unit,
    /// Zero, negative or not a number.
    #[error("must be above zero; write requests per second as in 7.0, or \"30/min\"")]
    NotPositive,
    /// Above a million a second.
    #[error("is above 1000000/s, which nothing can pace; write a lower one")]
    TooFast,
    /// Below one a day.
    #[error("is below 1/day; write a higher one")]
    TooSlow,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nanos(text: &str) -> u64 {
        text.parse::<Rate>()
            .unwrap_or_else(|e| panic!("{text}: {e}"))
            .interval_nanos()
    }

    #[test]
    fn intervals_are_exact_or_rounded_up() {
        assert_eq!(nanos("7/s"), 142_857_143);
        assert_eq!(nanos("20/s"), 50_000_000);
        assert_eq!(nanos("30/min"), 2_000_000_000);
        assert_eq!(nanos("100/hour"), 36_000_000_000);
        assert_eq!(nanos("2000/day"), 43_200_000_000);
        assert_eq!(nanos("1/day"), 86_400_000_000_000);
        assert_eq!(nanos("3/s"), 333_333_334);
        assert_eq!(nanos("1000000/s"), 1_000);
        assert_eq!(nanos("0.5 / s"), 2_000_000_000);
    }

    #[test]
    fn what_is_no_ceiling_is_refused() {
        for (text, error) in [
            ("7", RateError::Form),
            ("", RateError::Form),
            ("/s", RateError::Form),
            ("inf/s", RateError::Form),
            ("nan/s", RateError::Form),
            ("1e3/s", RateError::Form),
            ("1.2.3/s", RateError::Form),
            ("7/fortnight", RateError::Unit),
            ("7/", RateError::Unit),
            ("0/s", RateError::NotPositive),
            ("-1/s", RateError::NotPositive),
            ("0.5/day", RateError::TooSlow),
            ("1000001/s", RateError::TooFast),
        ] {
            assert_eq!(text.parse::<Rate>(), Err(error), "{text:?}");
        }
        assert_eq!(Rate::per_second(f64::NAN), Err(RateError::NotPositive));
        assert_eq!(Rate::per_second(f64::INFINITY), Err(RateError::TooFast));
        assert_eq!(
            Rate::per_second(f64::NEG_INFINITY),
            Err(RateError::NotPositive)
        );
        assert_eq!(Rate::per_second(1e9), Err(RateError::TooFast));
    }

    #[test]
    fn a_ceiling_prints_in_the_unit_that_reads_best() {
        for text in [
            "7/s",
            "30/min",
            "100/hour",
            "2000/day",
            "1/day",
            "1/s",
            "1000000/s",
        ] {
            let rate: Rate = text.parse().expect("a rate");
            let printed = rate.to_string();
            assert_eq!(
                printed.parse::<Rate>().expect("a rate").interval_nanos(),
                rate.interval_nanos(),
                "{text}"
            );
        }
        assert_eq!("2000/day".parse::<Rate>().unwrap().to_string(), "2000/day");
        assert_eq!("7.5/s".parse::<Rate>().unwrap().to_string(), "7.5/s");
    }

    proptest! {
        #[test]
        fn the_interval_is_the_shortest_that_keeps_the_ceiling(per_second in 1.2e-5..1e6f64) {
            let rate = Rate::per_second(per_second).expect("in range");
            let nanos = rate.interval_nanos() as f64;
            prop_assert!(nanos * per_second >= 1e9 * (1.0 - 1e-14));
            prop_assert!((nanos - 1.0) * per_second < 1e9);
        }

        #[test]
        fn any_text_is_answered(text in ".{0,20}|[0-9.]{0,8}/[a-z]{0,6}") {
            if let Ok(rate) = text.parse::<Rate>() {
                prop_assert!(rate.interval_nanos() >= 1_000);
            }
        }
    }
}
