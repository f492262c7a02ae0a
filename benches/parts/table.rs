//! Figures of several rounds, and how they are printed: the median, with the least and the most beside it.

use std::{fmt, time::Duration};

/// The same figure, once for each round.
#[derive(Clone, Debug, Default)]
pub struct Rounds(Vec<f64>);

impl Rounds {
    /// Adds a round's; what is not a number was not measured.
    pub fn add(&mut self, figure: f64) {
        if figure.is_finite() {
            self.0.push(figure);
        }
    }

    /// The middle one; not a number where there is none.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    /// These over those, round by round: rounds of one run share what disturbed them.
    pub fn over(&self, others: &Rounds) -> Rounds {
        let pairs = self.0.iter().zip(&others.0);
        Rounds(pairs.map(|(a, b)| a / b).collect())
    }

    /// The median with a fixed number of digits behind the point, for figures whose last digits are what matters.
    pub fn fixed(&self, digits: usize) -> String {
        let (median, least, most) = (self.median(), self.least(), self.most());
        match self.0.len() {
            0 => "-".to_owned(),
            1 => format!("{median:.digits$}"),
            _ => format!("{median:.digits$} ({least:.digits$}..{most:.digits$})"),
        }
    }

    fn least(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn most(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

impl fmt::Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            0 => f.write_str("-"),
            1 => f.write_str(&short(self.median())),
            _ => write!(
                f,
                "{} ({}..{})",
                short(self.median()),
                short(self.least()),
                short(self.most())
            ),
        }
    }
}

/// Three digits that matter; whole from a hundred on.
pub fn short(figure: f64) -> String {
    match figure.abs() {
        _ if figure.is_nan() => "-".to_owned(),
        100.0.. => grouped(figure.round() as i64),
        10.0.. => format!("{figure:.1}"),
        0.1.. => format!("{figure:.2}"),
        _ => format!("{figure:.3}"),
    }
}

fn grouped(whole: i64) -> String {
    let digits = whole.abs().to_string();
    let mut text = String::from(if whole < 0 { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Prints the head of a table.
pub fn head(title: &str, columns: &[&str]) {
    println!("\n### {title}\n");
    row(columns.iter().map(|c| (*c).to_owned()));
    let rule = (0..columns.len()).map(|n| if n == 0 { "---" } else { "---:" });
    println!("|{}|", rule.collect::<Vec<_>>().join("|"));
}

/// Prints a row.
pub fn row(cells: impl IntoIterator<Item = String>) {
    let cells: Vec<_> = cells.into_iter().collect();
    println!("| {} |", cells.join(" | "));
}

/// Exact percentiles of spans, in microseconds.
pub fn percentiles<const N: usize>(spans: &mut [Duration], at: [f64; N]) -> [f64; N] {
    spans.sort_unstable();
    at.map(|p| match spans {
        [] => f64::NAN,
        _ => {
            let rank = (spans.len() as f64 * p / 100.0) as usize;
            spans[rank.min(spans.len() - 1)].as_secs_f64() * 1e6
        }
    })
}
