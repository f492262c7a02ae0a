//! `paceline demo`: the point of it all in twenty seconds, on any machine, with nothing installed.
//!
//! An origin, replicas and workers run in this process. The replicas are the real thing: each is a whole
//! [`App`](crate::app::App), reached over loopback by CONNECT and looked into with a CA that is made for the occasion.
//! Then the same workers go to the origin without them. What is judged is what the origin saw; nothing is asked of the
//! replicas.

mod fleet;
mod folder;
mod origin;
mod screen;
mod sight;
mod verdict;
mod worker;

use std::{
    io::{self, IsTerminal as _},
    pin::Pin,
    time::Duration,
};

use anyhow::{Result, bail};
use clap::Args;
use tokio::task::JoinSet;

use self::{
    fleet::{Fleet, Keeper},
    folder::Folder,
    origin::Origin,
    screen::{Screen, View},
    sight::Figures,
    verdict::Verdict,
    worker::{Row, Way},
};
use crate::{
    cli::Usage,
    config::{Rate, STORE_URL_VARIABLE, Secret, store_url},
    drain,
    pacing::{
        pacer::grace,
        time::{LocalTime, Nanos, seconds},
    },
};

/// Ceilings that a demonstration makes sense with, in requests per second.
const RATES: std::ops::RangeInclusive<f64> = 0.5..=200.0;
/// How often the table in a terminal is drawn anew, and how often a line is printed elsewhere.
const REDRAWN: Duration = Duration::from_millis(250);
const PRINTED: Duration = Duration::from_secs(1);

/// What may be typed after `paceline demo`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct Options {
    /// The ceiling: requests per second over all, or such as 300/min
    #[arg(long, default_value = "7", value_parser = rate)]
    pub rate: Rate,
    /// How long each half lasts: with paceline, and without
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// How many replicas share the cursor
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub replicas: u32,
    /// How many workers fetch as fast as they can
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=200))]
    pub workers: u16,
    /// Keep the cursor in this Postgres (else in the one that PACELINE_STORE_URL names, else in this process)
    #[arg(long, value_name = "URL", value_parser = secret)]
    pub store_url: Option<Secret>,
    /// Give each replica a cursor of its own, to see what the verdict says of a ceiling that is not held
    #[arg(long, hide = true, conflicts_with = "store_url")]
    pub unshared: bool,
}

fn rate(text: &str) -> Result<Rate, String> {
    let rate = match text.parse::<f64>() {
        Ok(number) => Rate::per_second(number),
        Err(_) => text.parse(),
    };
    let rate = rate.map_err(|e| e.to_string())?;
    if !RATES.contains(&rate.per_second) {
        return Err(
            "a demonstration shows little below 0.5/s or above 200/s; choose between".into(),
        );
    }
    Ok(rate)
}

/// Why the smallest gap is what it is.
fn gaps(rate: &Rate) -> String {
    let interval = Nanos::try_from(rate.interval_nanos()).unwrap_or(Nanos::MAX);
    let milliseconds = |span: Nanos| seconds(span) * 1e3;
    format!(
        "(slots are {:.1} ms apart; a request may leave up to {:.1} ms after its slot, so the smallest gap can be that much shorter)",
        milliseconds(interval),
        milliseconds(grace(interval)),
    )
}

fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

/// Runs the demonstration and prints it. Returns whether the ceiling held.
///
/// # Errors
/// It could not be run, or nothing reached the origin.
pub async fn run(options: &Options, env: &dyn Fn(&str) -> Option<String>) -> Result<bool> {
    if let Some(url) = &options.store_url {
        // Not while the line is read: clap would show the value.
        store_url(url.reveal())
            .map_err(|c| Usage(format!("--store-url {}; {}", c.wrong, c.fix)))?;
    }
    let screen = Screen::new(io::stdout().lock(), io::stdout().is_terminal());
    let variable = || env(STORE_URL_VARIABLE).filter(|url| !url.is_empty());
    let keeper = match options
        .store_url
        .clone()
        .or_else(|| variable().map(Secret::new))
    {
        _ if options.unshared => Keeper::Nobody,
        Some(url) => Keeper::Postgres(url),
        None => Keeper::ThisProcess,
    };
    Demo {
        options,
        screen,
        stop: Box::pin(drain::asked_to_stop()?),
        stopped: false,
    }
    .play(keeper)
    .await
}

struct Demo<'o, W> {
    options: &'o Options,
    screen: Screen<W>,
    stop: Pin<Box<dyn Future<Output = &'static str> + 'o>>,
    stopped: bool,
}

impl<W: io::Write> Demo<'_, W> {
    async fn play(mut self, keeper: Keeper) -> Result<bool> {
        let folder = Folder::make()?;
        let origin = Origin::start(&folder).await?;
        let fleet = Fleet::start(self.options, &keeper, &folder, &origin).await?;
        let Options {
            rate,
            seconds,
            replicas,
            workers,
            ..
        } = self.options;
        self.screen.say(&format!(
            "paceline demo: {workers} workers fetch from one origin as fast as they can; it answers after {} ms",
            origin::ANSWERS_AFTER.as_millis()
        ))?;
        self.screen.say("")?;
        self.screen.say(&format!(
            "with paceline: {replicas} replicas, {}, a ceiling of {rate}; {seconds} s",
            keeper.as_words()
        ))?;
        self.screen.say(&gaps(rate))?;
        let ways = fleet.ways()?;
        let with = self.watch("with", &origin, &ways).await;
        fleet.stop().await;
        let with = with?;
        let mut without = None;
        if !self.stopped {
            self.screen.say("")?;
            self.screen.say(&format!(
                "without: the same {workers} workers go to the origin themselves; {seconds} s"
            ))?;
            without = Some(self.watch("without", &origin, &[origin.direct()?]).await?);
        }
        let verdict = Verdict::new(rate, &with, without.as_ref());
        self.screen.say("")?;
        for line in &verdict.lines {
            self.screen.say(line)?;
        }
        Ok(verdict.held)
    }

    /// Lets the workers loose on `ways`, each on one of them, and shows what the origin sees until the time is up.
    async fn watch(&mut self, half: &str, origin: &Origin, ways: &[Way]) -> Result<Figures> {
        origin.forget();
        let rows: Vec<_> = (0..self.options.workers).map(|_| Row::new()).collect();
        let mut workers = JoinSet::new();
        for (row, way) in rows.iter().zip(ways.iter().cycle()) {
            workers.spawn(worker::work(way.clone(), row.clone()));
        }
        let began = LocalTime::now();
        let mut ticks = tokio::time::interval(match self.screen.is_live() {
            true => REDRAWN,
            false => PRINTED,
        });
        // The first tick is at once, when there is nothing to see.
        ticks.tick().await;
        let end = tokio::time::sleep(Duration::from_secs(self.options.seconds));
        tokio::pin!(end);
        loop {
            let over = tokio::select! {
                _ = ticks.tick() => false,
                () = &mut end => true,
                _ = &mut self.stop => {
                    self.stopped = true;
                    true
                }
            };
            let now = LocalTime::now();
            let figures = origin.figures(now);
            self.screen.show(&View {
                half,
                elapsed: now.since(began),
                figures: &figures,
                workers: &rows.iter().map(|row| row.stand(now)).collect::<Vec<_>>(),
                last: over,
            })?;
            if over {
                workers.shutdown().await;
                if figures.total == 0 && !self.stopped {
                    let why = rows.iter().find_map(|row| row.complaint());
                    bail!(
                        "no request reached the origin {half} paceline: {}",
                        why.unwrap_or_else(|| {
                            "nobody was let out; is another demo running on this database?".into()
                        })
                    );
                }
                return Ok(figures);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_gap_is_explained() {
        let rate = Rate::per_second(7.0).expect("a rate");
        let said = gaps(&rate);
        assert!(
            said.contains("142.9 ms apart") && said.contains("35.7 ms"),
            "{said}"
        );
    }

    #[test]
    fn a_rate_is_a_number_or_a_count_in_a_unit_within_what_can_be_shown() {
        for (text, per_second) in [("7", 7.0), ("0.5", 0.5), ("300/min", 5.0), ("200", 200.0)] {
            assert_eq!(rate(text).map(|r| r.per_second), Ok(per_second), "{text}");
        }
        for text in ["0", "-1", "0.1", "201", "nan", "soon", "", "7/fortnight"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}
