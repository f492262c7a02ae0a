//! How the demonstration looks: a table drawn over itself in a terminal, a line a second elsewhere. It knows figures, and
//! not where they come from.

use std::io::{self, Write};

use super::{sight::Figures, worker::Stand};
use crate::pacing::time::{Nanos, seconds};

/// Workers side by side, and how many have a column: more would not fit on a screen.
const ABREAST: usize = 12;
const COLUMNS: usize = 3 * ABREAST;

/// Where it is shown.
#[derive(Debug)]
pub(super) struct Screen<W> {
    out: W,
    live: bool,
    /// Lines of the table that stands there already.
    drawn: usize,
}

/// What is shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'v> {
    /// "with" or "without".
    pub(super) half: &'v str,
    /// Since the half began.
    pub(super) elapsed: Nanos,
    /// What the origin sees.
    pub(super) figures: &'v Figures,
    /// How the workers stand.
    pub(super) workers: &'v [Stand],
    /// It is the last of this half.
    pub(super) last: bool,
}

impl<W: Write> Screen<W> {
    /// On `out`, which is a terminal if it is `live`.
    pub(super) fn new(out: W, live: bool) -> Self {
        Screen {
            out,
            live,
            drawn: 0,
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// One line of text.
    pub(super) fn say(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.out, "{line}")?;
        self.out.flush()
    }

    /// The state of things, in the place of the one before.
    pub(super) fn show(&mut self, view: &View<'_>) -> io::Result<()> {
        if !self.live {
            // The end of a half falls on a second, which has its line.
            return if view.last {
                Ok(())
            } else {
                self.say(&line(view))
            };
        }
        let table = table(view);
        // Back over what was drawn; lines that would wrap are cut, or the way back would be too short.
        let mut text = String::from("\x1b[?7l");
        if self.drawn > 0 {
            text += &format!("\x1b[{}A", self.drawn);
        }
        for line in &table {
            text += &format!("\r{line}\x1b[K\n");
        }
        text += "\x1b[?7h";
        self.drawn = if view.last { 0 } else { table.len() };
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

fn line(view: &View<'_>) -> String {
    let workers = view.workers;
    let waiting = workers.iter().filter(|w| w.waiting.is_some()).count();
    format!(
        "{:<7} {:>3.0} s  {}  served {} each, {waiting} of {} waiting",
        view.half,
        seconds(view.elapsed),
        seen(view.figures),
        served(workers),
        workers.len()
    )
}

/// The least and the most that one of them was served.
fn served(workers: &[Stand]) -> String {
    let served = || workers.iter().map(|w| w.served);
    let (least, most) = (served().min().unwrap_or(0), served().max().unwrap_or(0));
    match least == most {
        true => least.to_string(),
        false => format!("{least} to {most}"),
    }
}

fn seen(figures: &Figures) -> String {
    let gap = match figures.smallest_gap {
        Some(gap) => format!("{:.1} ms", gap * 1e3),
        None => "-".to_owned(),
    };
    format!(
        "now {:>6.1}/s  busiest second {:>5}  smallest gap {gap:>8}  total {:>6}",
        figures.now, figures.busiest, figures.total
    )
}

fn table(view: &View<'_>) -> Vec<String> {
    let mut lines = vec![format!("  the origin sees  {}", seen(view.figures))];
    let shown = &view.workers[..view.workers.len().min(COLUMNS)];
    for (group, workers) in shown.chunks(ABREAST).enumerate() {
        let row = |name: &str, cell: &dyn Fn(usize, &Stand) -> String| {
            let cells = workers
                .iter()
                .enumerate()
                .map(|(i, w)| cell(group * ABREAST + i + 1, w));
            format!(
                "  {name:<8}{}",
                cells.map(|c| format!("{c:>6}")).collect::<String>()
            )
        };
        lines.push(row("worker", &|number, _| number.to_string()));
        lines.push(row("served", &|_, worker| worker.served.to_string()));
        lines.push(row("waits", &|_, worker| match worker.waiting {
            Some(waited) => format!("{:.1}s", seconds(waited)),
            None => "-".to_owned(),
        }));
    }
    let rest = &view.workers[shown.len()..];
    if !rest.is_empty() {
        lines.push(format!(
            "  and {} more, served {} each",
            rest.len(),
            served(rest)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pacing::time::{MILLISECOND, SECOND};

    fn shown(live: bool, workers: usize, times: usize) -> String {
        let figures = Figures {
            total: 22,
            now: 7.0,
            span: 3 * SECOND,
            busiest: 8,
            smallest_gap: Some(0.1418),
        };
        let stand = Stand {
            served: 2,
            waiting: Some(1200 * MILLISECOND),
        };
        let mut screen = Screen::new(Vec::new(), live);
        for _ in 0..times {
            let view = View {
                half: "with",
                elapsed: 3 * SECOND,
                figures: &figures,
                workers: &vec![stand; workers],
                last: false,
            };
            screen.show(&view).expect("a buffer");
        }
        String::from_utf8(screen.out).expect("UTF-8")
    }

    #[test]
    fn elsewhere_than_in_a_terminal_it_is_one_plain_line() {
        assert_eq!(
            shown(false, 12, 1),
            "with      3 s  now    7.0/s  busiest second     8  smallest gap 141.8 ms  total     22  served 2 each, 12 of 12 waiting\n"
        );
    }

    #[test]
    fn a_table_is_drawn_over_the_one_before() {
        let once = shown(true, 12, 1);
        let lines = once.matches('\n').count();
        assert_eq!(lines, 4);
        assert!(once.contains("  waits     1.2s  1.2s") && !once.contains("\x1b[4A"));
        let twice = shown(true, 12, 2);
        assert_eq!(twice.matches("\x1b[4A").count(), 1);
    }

    #[test]
    fn a_table_of_two_hundred_workers_fits_on_a_screen() {
        for workers in [1, 12, 13, 36, 37, 200] {
            let text = shown(true, workers, 1);
            assert!(text.matches('\n').count() <= 11, "{workers}");
            assert!(text.lines().all(|l| l.chars().count() < 110), "{workers}");
        }
        assert!(shown(true, 200, 1).contains("and 164 more, served 2 each"));
    }
}
