//! The plot of what was sent against the ceiling, as SVG, and rates in units that read well.
//!
//! A curve is a moving mean: over few requests even a perfect pace would seem to pass its ceiling (three in a second at
//! 2.5/s), so the mean is taken over fifty of them where a minute has so many. Where five minutes have too few for
//! that, each is shown by itself. It knows numbers only, not where they come from.

use std::fmt::Write as _;

/// The plot's own units: about a phone's width, so that its letters are as large as the text around it.
const WIDTH: f64 = 360.0;
const LEFT: f64 = 32.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 130.0;
const HEIGHT: f64 = 150.0;

/// Below this many requests per second five minutes have fewer than sixty: no mean of them would say much.
const SLOWEST_CURVE: f64 = 0.2;
/// A mean that ends longer ago is not told as that of now.
const CURRENT: usize = 5;

/// What there is to be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plot<'a> {
    /// The configured ceiling, in requests per second.
    pub ceiling: f64,
    /// What is allowed at the moment, in requests per second.
    pub allowed: f64,
    /// Requests by all replicas in each second, oldest first; `None` where that is not known.
    pub all: &'a [Option<u64>],
    /// The same by this replica.
    pub own: &'a [Option<u64>],
}

impl Plot<'_> {
    /// Seconds over which a mean is taken; `None` where each request is shown by itself.
    pub fn window(&self) -> Option<usize> {
        match self.ceiling {
            c if c >= 5.0 => Some(10),
            c if c >= 50.0 / 30.0 => Some(30),
            c if c >= SLOWEST_CURVE => Some(60),
            _ => None,
        }
    }

    /// The latest mean of all replicas, in requests per second; `None` where it is not known.
    pub fn now(&self) -> Option<f64> {
        latest(self.all, self.window()?)
    }

    /// The latest mean of this replica, likewise.
    pub fn own_now(&self) -> Option<f64> {
        latest(self.own, self.window()?)
    }

    /// Whether this replica's curve says anything that the other does not.
    pub fn has_own(&self) -> bool {
        self.own.iter().any(|count| count.is_some_and(|n| n > 0)) && self.own != self.all
    }

    /// The whole drawing. `title` and `description` are for those who do not see it; `id` tells it from others on the page.
    pub fn svg(&self, id: usize, title: &str, description: &str) -> String {
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"plot{id} plot{id}d\">\
             <title id=\"plot{id}\">{title}</title><desc id=\"plot{id}d\">{description}</desc>"
        );
        for minute in 0..=5 {
            let x = LEFT + f64::from(minute) * (WIDTH - LEFT) / 5.0;
            let (text, anchor) = match minute {
                0 => ("\u{2212}5 min".to_owned(), "start"),
                5 => ("now".to_owned(), "end"),
                m => (format!("\u{2212}{}", 5 - m), "middle"),
            };
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{BOTTOM}\"/><text x=\"{x:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{text}</text>",
                BOTTOM + 14.0,
            );
        }
        match self.window() {
            Some(window) => self.curves(&mut svg, window),
            None => self.single(&mut svg),
        }
        svg + "</svg>"
    }

    fn curves(&self, svg: &mut String, window: usize) {
        let unit = Unit::of(self.ceiling);
        let (all, own) = (means(self.all, window), means(self.own, window));
        let peak = all.iter().chain(&own).flatten().copied();
        let top = peak.fold(self.ceiling, f64::max) * 1.12;
        let y = |rate: f64| BOTTOM - rate / top * (BOTTOM - TOP);
        let step = nice_step(top * unit.seconds / 4.0);
        let mut tick = 0.0;
        while tick <= top * unit.seconds {
            let at = y(tick / unit.seconds);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{WIDTH}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 5.0,
                at + 4.0,
                short(tick),
            );
            tick += step;
        }
        for run in runs(&all) {
            let (line, [from, to]) = polyline(&all, run, y);
            let _ = write!(
                svg,
                "<path class=\"area\" d=\"M{from:.1} {BOTTOM}L{line}L{to:.1} {BOTTOM}Z\"/><path class=\"line\" d=\"M{line}\"/>"
            );
        }
        if self.has_own() {
            for run in runs(&own) {
                let _ = write!(
                    svg,
                    "<path class=\"own\" d=\"M{}\"/>",
                    polyline(&own, run, y).0
                );
            }
        }
        let ceiling = y(self.ceiling);
        let mut mark = |class: &str, at: f64, text_at: f64, text: &str| {
            let _ = write!(
                svg,
                "<path class=\"{class}\" d=\"M{LEFT} {at:.1}H{WIDTH}\"/><text class=\"mark\" x=\"{}\" y=\"{text_at:.1}\" text-anchor=\"end\">{text}</text>",
                WIDTH - 2.0,
            );
        };
        let ratio = self.allowed / self.ceiling;
        if (1e-6..0.999).contains(&ratio) {
            let at = y(self.allowed);
            // Under its line only where the ceiling's line is too near above it.
            let text_at = if at - ceiling < 16.0 {
                at + 12.0
            } else {
                at - 4.0
            };
            mark(
                "allowed",
                at,
                text_at,
                &format!("allowed now {}", unit.rate(self.allowed)),
            );
        }
        mark(
            "ceiling",
            ceiling,
            ceiling - 4.0,
            &format!("ceiling {}", unit.rate(self.ceiling)),
        );
    }

    /// A stroke for each second in which something was sent, as high as there were requests.
    fn single(&self, svg: &mut String) {
        let counts = if self.all.iter().any(Option::is_some) {
            self.all
        } else {
            self.own
        };
        let most = counts.iter().flatten().max().copied().unwrap_or(0).max(1) as f64;
        let mut strokes = String::new();
        for (i, count) in counts.iter().enumerate() {
            if let Some(count) = count.filter(|n| *n > 0) {
                let height = count as f64 / most * (BOTTOM - TOP) * 0.8;
                let _ = write!(strokes, "M{:.1} {BOTTOM}v-{height:.1}", x(i, counts.len()));
            }
        }
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {BOTTOM}H{WIDTH}\"/><path class=\"ticks\" d=\"{strokes}\"/>"
        );
        for (count, at) in [(0.0, BOTTOM), (most, BOTTOM - (BOTTOM - TOP) * 0.8)] {
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 5.0,
                at + 4.0,
                short(count)
            );
        }
    }
}

/// The mean of the `window` seconds that end with each second, in requests per second; `None` where not all are known.
fn means(counts: &[Option<u64>], window: usize) -> Vec<Option<f64>> {
    let mean = |end: usize| {
        let seconds = counts.get((end + 1).checked_sub(window)?..=end)?;
        let sum = seconds
            .iter()
            .try_fold(0, |sum: u64, n| Some(sum.saturating_add((*n)?)))?;
        Some(sum as f64 / window as f64)
    };
    (0..counts.len()).map(mean).collect()
}

fn latest(counts: &[Option<u64>], window: usize) -> Option<f64> {
    means(counts, window)
        .into_iter()
        .rev()
        .take(CURRENT)
        .flatten()
        .next()
}

/// Ranges of seconds without a gap.
fn runs(means: &[Option<f64>]) -> Vec<std::ops::Range<usize>> {
    let mut runs = Vec::new();
    let mut from = 0;
    for part in means.split(Option::is_none) {
        if !part.is_empty() {
            runs.push(from..from + part.len());
        }
        from += part.len() + 1;
    }
    runs
}

/// Where the end of second `index` of `of` lies.
fn x(index: usize, of: usize) -> f64 {
    LEFT + (index + 1) as f64 / of.max(1) as f64 * (WIDTH - LEFT)
}

/// The points of a run, and where it begins and ends; without points between others of the same height.
fn polyline(
    means: &[Option<f64>],
    run: std::ops::Range<usize>,
    y: impl Fn(f64) -> f64,
) -> (String, [f64; 2]) {
    let ends = [x(run.start, means.len()), x(run.end - 1, means.len())];
    let mut line = String::new();
    for i in run.clone() {
        let between = i > run.start && i + 1 < run.end;
        if between && means[i - 1] == means[i] && means[i] == means[i + 1] {
            continue;
        }
        let separator = if line.is_empty() { "" } else { " " };
        let _ = write!(
            line,
            "{separator}{:.1} {:.1}",
            x(i, means.len()),
            y(means[i].unwrap_or(0.0))
        );
    }
    (line, ends)
}

/// 1, 2 or 5 times a power of ten, at least `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-9).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
    steps
        .into_iter()
        .find(|step| *step >= least * 0.999)
        .unwrap_or(steps[3])
}

/// What a rate is told in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Unit {
    seconds: f64,
    name: &'static str,
}

impl Unit {
    /// The smallest one in which `rate`, in requests per second, is at least one.
    pub fn of(rate: f64) -> Unit {
        let units = [
            (1.0, "/s"),
            (60.0, "/min"),
            (3600.0, "/h"),
            (86_400.0, "/day"),
        ];
        let unit = |(seconds, name)| Unit { seconds, name };
        let fits = units
            .into_iter()
            .find(|(seconds, _)| rate * seconds >= 0.9999);
        unit(fits.unwrap_or(units[3]))
    }

    /// A rate, without decimals that say nothing.
    pub fn rate(self, rate: f64) -> String {
        format!("{}{}", short(rate * self.seconds), self.name)
    }

    /// A rate that changes while one looks: with its decimals, so that it keeps its width.
    pub fn steady(self, rate: f64) -> String {
        let rate = rate * self.seconds;
        format!("{rate:.*}{}", decimals(rate), self.name)
    }
}

fn decimals(number: f64) -> usize {
    match number {
        n if n < 10.0 => 2,
        n if n < 100.0 => 1,
        _ => 0,
    }
}

fn short(number: f64) -> String {
    let text = format!("{number:.*}", decimals(number));
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plot<'a>(ceiling: f64, all: &'a [Option<u64>], own: &'a [Option<u64>]) -> Plot<'a> {
        Plot {
            ceiling,
            allowed: ceiling,
            all,
            own,
        }
    }

    #[test]
    fn rates_are_told_in_a_unit_that_reads_well() {
        for (rate, text) in [
            (7.0, "7/s"),
            (2.5, "2.5/s"),
            (1.0, "1/s"),
            (0.5, "30/min"),
            (1.0 / 60.0, "1/min"),
            (2000.0 / 86_400.0, "1.39/min"),
            (0.002, "7.2/h"),
            (1e-5, "0.86/day"),
            (1234.5, "1234/s"),
            (0.0, "0/day"),
        ] {
            assert_eq!(Unit::of(rate).rate(rate), text);
        }
        assert_eq!(Unit::of(7.0).steady(0.0), "0.00/s");
        assert_eq!(Unit::of(7.0).steady(6.999), "7.00/s");
        assert_eq!(Unit::of(0.5).steady(0.45), "27.0/min");
    }

    #[test]
    fn axes_are_marked_at_round_numbers() {
        for (least, step) in [
            (2.6, 5.0),
            (1.0, 1.0),
            (0.3, 0.5),
            (11.2, 20.0),
            (70.0, 100.0),
        ] {
            assert!((nice_step(least) - step).abs() < 1e-9, "{least}");
        }
    }

    #[test]
    fn the_rate_of_now_is_not_that_of_before_an_outage() {
        let mut all = vec![Some(7); 300];
        all[298..].fill(None);
        assert_eq!(plot(7.0, &all, &all).now(), Some(7.0));
        all[295..].fill(None);
        assert_eq!(plot(7.0, &all, &all).now(), None);
        assert_eq!(plot(7.0, &[], &[]).now(), None);
        assert_eq!(plot(0.01, &all, &all).now(), None, "there is no mean");
    }

    #[test]
    fn what_is_not_known_is_a_gap_and_not_nothing() {
        let mut all = vec![Some(7); 300];
        all[100..160].fill(None);
        let own = vec![Some(2); 300];
        let svg = plot(7.0, &all, &own).svg(0, "t", "d");
        assert_eq!(svg.matches("class=\"area\"").count(), 2, "{svg}");
        assert_eq!(svg.matches("class=\"own\"").count(), 1, "{svg}");
        // A steady pace is two points.
        assert!(svg.contains("class=\"own\" d=\"M42.9 "), "{svg}");
        assert_eq!(
            svg.split("class=\"own\" d=\"M")
                .nth(1)
                .map(|d| d.split('"').next().map(|d| d.split(' ').count())),
            Some(Some(4))
        );
        let alone = plot(7.0, &all, &all).svg(0, "t", "d");
        assert!(!alone.contains("class=\"own\""), "one replica is one curve");
    }

    #[test]
    fn what_is_allowed_is_drawn_where_it_is_less_than_the_ceiling() {
        let all = vec![Some(3); 300];
        let mut plot = plot(7.0, &all, &all);
        assert!(!plot.svg(0, "t", "d").contains("allowed now"));
        plot.allowed = 3.5;
        assert!(plot.svg(0, "t", "d").contains(">allowed now 3.5/s<"));
        plot.allowed = 0.0;
        assert!(!plot.svg(0, "t", "d").contains("allowed now"));
    }

    #[test]
    fn a_slow_destination_shows_each_request() {
        let mut all = vec![Some(0); 300];
        for i in (9..300).step_by(60) {
            all[i] = Some(1);
        }
        let svg = plot(1.0 / 60.0, &all, &all).svg(0, "t", "d");
        let strokes = svg
            .split("class=\"ticks\" d=\"")
            .nth(1)
            .and_then(|d| d.split('"').next());
        assert_eq!(strokes.map(|d| d.matches('M').count()), Some(5), "{svg}");
    }

    proptest! {
        /// A request each interval, seen by whole seconds: the curve must not lie above the ceiling by more than the one
        /// request that a window holds at its edge.
        #[test]
        fn a_perfect_pace_does_not_seem_to_pass_its_ceiling(ceiling in 0.2f64..200.0, phase in 0.0f64..1.0) {
            let mut all = vec![Some(0u64); 300];
            let mut at = phase / ceiling;
            while at < 300.0 {
                if let Some(Some(n)) = all.get_mut(at as usize) {
                    *n += 1;
                }
                at += 1.0 / ceiling;
            }
            let plot = plot(ceiling, &all, &all);
            let window = plot.window().expect("a curve");
            let most = means(&all, window).into_iter().flatten().fold(0.0, f64::max);
            prop_assert!(most <= ceiling * (1.0 + 1.001 / (ceiling * window as f64)), "{most} at {ceiling}");
        }

        #[test]
        fn any_counts_make_a_drawing_of_finite_numbers(
            ceiling in prop_oneof![1e-9f64..1e-3, 0.1f64..10.0, 10.0f64..1e9],
            part in 0.0f64..=1.0,
            counts in prop::collection::vec(prop::option::of(0u64..1_000_000), 0..320),
        ) {
            let plot = Plot { ceiling, allowed: ceiling * part, all: &counts, own: &[] };
            let svg = plot.svg(3, "t", "d");
            prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            prop_assert!(svg.len() < 40_000, "{}", svg.len());
        }
    }
}
