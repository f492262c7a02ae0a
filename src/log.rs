//! How the log is written, and how lines that could be many are kept few.
//!
//! Lines go to standard error by a thread of their own, over a queue that has an end: whoever logs never waits for whoever
//! reads. What does not fit is dropped and counted. The queue and the count are the process's, as the log is.

use std::{
    io::{self, IsTerminal as _, Write},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

use tracing_subscriber::{
    EnvFilter,
    fmt::{self, MakeWriter},
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::pacing::time::{LocalTime, Nanos, SECOND};

/// At most one line of a kind in this time.
const SELDOM: Nanos = 10 * SECOND;
/// Lines that may wait to be written: a second of a busy proxy, and a megabyte or two of memory.
const WAITING: usize = 8_192;
/// The longest line, in bytes. All that a client chooses is cut shorter before; this is for what was not thought of.
const LONGEST: usize = 4_096;
/// How long the end of the process waits for the last lines to be written.
const FLUSH: Duration = Duration::from_secs(1);

static QUEUE: OnceLock<SyncSender<Entry>> = OnceLock::new();
static JSON: AtomicBool = AtomicBool::new(false);
static DROPPED: AtomicU64 = AtomicU64::new(0);

enum Entry {
    Line(Vec<u8>),
    /// Answered once everything before it is written.
    Flush(SyncSender<()>),
}

/// Sends the log to stderr. `PACELINE_LOG` filters it (`info` when unset; `access=off` leaves out the access lines),
/// `PACELINE_LOG_FORMAT=json` makes each line a JSON object.
///
/// # Errors
/// One of the variables cannot be meant; the text says which and what to write.
pub fn start(env: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    let filter = filter(&set("PACELINE_LOG").unwrap_or_else(|| "info".to_owned()))?;
    let is_json = match set("PACELINE_LOG_FORMAT").as_deref() {
        None | Some("text") => false,
        Some("json") => true,
        Some(other) => {
            return Err(format!(
                "PACELINE_LOG_FORMAT: {other:?} is no format; write json, or leave it out for text"
            ));
        }
    };
    let (sender, receiver) = sync_channel(WAITING);
    let writing = std::thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || write_out(&receiver, &mut io::stderr()));
    if writing.is_ok() {
        let _ = QUEUE.set(sender);
    }
    let registry = tracing_subscriber::registry().with(filter);
    let started = if is_json {
        JSON.store(true, Relaxed);
        let lines = fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false);
        registry.with(lines.with_writer(Queue)).try_init()
    } else {
        let lines = fmt::layer().with_ansi(io::stderr().is_terminal());
        registry.with(lines.with_writer(Queue)).try_init()
    };
    // A log that was started before goes on.
    let _ = started;
    Ok(())
}

/// Reads a filter. The library would take a level that is mistyped for the name of a module, and log nothing else.
fn filter(text: &str) -> Result<EnvFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let wrong = |part: &str| {
        format!(
            "PACELINE_LOG: {part:?} is no filter; write a level ({}), or MODULE=LEVEL such as access=off, with commas between several",
            LEVELS.join(", ")
        )
    };
    let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
    let is_module = |word: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b':' | b'-');
        !word.is_empty() && word.bytes().all(plain)
    };
    let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
    let parts: Vec<_> = parts.collect();
    for part in &parts {
        let is_right = match part.split_once('=') {
            Some((module, level)) => is_module(module) && is_level(level),
            None => is_level(part),
        };
        if !is_right {
            return Err(wrong(part));
        }
    }
    EnvFilter::builder()
        .parse(parts.join(","))
        .map_err(|_| wrong(text))
}

/// How many lines were dropped because nobody read the log.
pub fn dropped() -> u64 {
    DROPPED.load(Relaxed)
}

/// Seconds as a field of a line: a number in JSON; in text a plain decimal of microseconds, for a number's own form may
/// be `4e-5`, which neither people nor awk read well.
pub fn seconds(span: Duration) -> Box<dyn tracing::Value> {
    match JSON.load(Relaxed) {
        true => Box::new((span.as_secs_f64() * 1e6).round() / 1e6),
        false => Box::new(tracing::field::display(Plain(span))),
    }
}

struct Plain(Duration);

impl std::fmt::Display for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.6}", self.0.as_secs_f64())
    }
}

/// Waits until the lines so far are written, but not for a reader that has stopped reading.
pub fn flush() {
    let (done, written) = sync_channel(1);
    if let Some(queue) = QUEUE.get()
        && queue.try_send(Entry::Flush(done)).is_ok()
    {
        let _ = written.recv_timeout(FLUSH);
    }
}

/// Writes lines as they come. After some were dropped, the first that can be written says so.
fn write_out(queue: &Receiver<Entry>, out: &mut impl Write) {
    let mut told = 0;
    while let Ok(entry) = queue.recv() {
        match entry {
            Entry::Line(line) => {
                let dropped = dropped();
                if dropped > told {
                    let lines = dropped - told;
                    let _ = writeln!(
                        out,
                        "WARN paceline::log: {lines} lines were dropped, for standard error was not read; read it faster, or log less with PACELINE_LOG"
                    );
                    told = dropped;
                }
                if out.write_all(&line).is_err() {
                    DROPPED.fetch_add(1, Relaxed);
                }
            }
            Entry::Flush(done) => _ = done.try_send(()),
        }
    }
}

/// Makes a writer for each line.
struct Queue;

impl<'w> MakeWriter<'w> for Queue {
    type Writer = Line;

    fn make_writer(&'w self) -> Line {
        Line(Vec::new())
    }
}

/// One line in the making; dropped, it is on its way.
struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let line = cut(std::mem::take(&mut self.0));
        match QUEUE.get() {
            Some(queue) => {
                if queue.try_send(Entry::Line(line)).is_err() {
                    DROPPED.fetch_add(1, Relaxed);
                }
            }
            // No thread was to be had.
            None => _ = io::stderr().write_all(&line),
        }
    }
}

/// A line no longer than a line may be, still with its end, and still UTF-8.
fn cut(mut line: Vec<u8>) -> Vec<u8> {
    const END: &[u8] = b"...\n";
    if line.len() > LONGEST {
        let mut length = LONGEST - END.len();
        // Not amid a character.
        while line[length] & 0xc0 == 0x80 {
            length -= 1;
        }
        line.truncate(length);
        line.extend_from_slice(END);
    }
    line
}

/// Lets one of many equal lines through from time to time.
#[derive(Debug, Default)]
pub struct Seldom(AtomicI64);

impl Seldom {
    /// Whether the line is due.
    pub fn is_due(&self) -> bool {
        let (now, last) = (LocalTime::now().0, self.0.load(Relaxed));
        (last == 0 || now - last >= SELDOM)
            && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_mistyped_is_refused_and_quoted() {
        for text in [
            "info",
            "WARN",
            "off",
            "info,access=off",
            "info, paceline::store=debug,",
        ] {
            assert!(filter(text).is_ok(), "{text}");
        }
        for (text, part) in [
            ("inf", "\"inf\""),
            ("info,acess", "\"acess\""),
            ("access=none", "\"access=none\""),
            ("a=b=info", "\"a=b=info\""),
            ("=info", "\"=info\""),
        ] {
            let said = filter(text).expect_err("mistyped");
            assert!(said.contains(part) && said.contains("access=off"), "{said}");
        }
    }

    #[test]
    fn seconds_in_text_are_plain_decimals() {
        for (nanos, text) in [
            (40_000, "0.000040"),
            (161_000_000, "0.161000"),
            (0, "0.000000"),
        ] {
            assert_eq!(Plain(Duration::from_nanos(nanos)).to_string(), text);
        }
    }

    #[test]
    fn a_line_has_an_end_and_no_half_characters() {
        let long = format!("x{}\n", "\u{e9}".repeat(3_000));
        let short = cut(long.into_bytes());
        assert!(short.len() <= LONGEST && short.ends_with(b"...\n"));
        assert!(String::from_utf8(short).is_ok());
        assert_eq!(cut(b"short\n".to_vec()), b"short\n");
    }

    #[test]
    fn dropped_lines_are_told_once_before_the_next_line() {
        let (sender, receiver) = sync_channel(8);
        DROPPED.fetch_add(3, Relaxed);
        for line in ["a\n", "b\n"] {
            sender
                .try_send(Entry::Line(line.into()))
                .unwrap_or_else(|_| panic!("there is room"));
        }
        drop(sender);
        let mut out = Vec::new();
        write_out(&receiver, &mut out);
        let out = String::from_utf8(out).expect("text");
        assert!(
            out.starts_with("WARN paceline::log: 3 lines were dropped"),
            "{out}"
        );
        assert!(
            out.ends_with("\na\nb\n") && out.lines().count() == 3,
            "{out}"
        );
    }
}
