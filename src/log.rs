//! How the log is written, and how lines that could be many are kept few.
//!
//! Lines go to standard error by a thread of their own, from a buffer that has an end: whoever logs never waits for whoever
//! reads. What does not fit is dropped and counted. The buffer and the count are the process's, as the log is.

mod line;

use std::{
    io::{self, IsTerminal as _, Write},
    mem,
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tracing_subscriber::{
    EnvFilter,
    fmt::{self, MakeWriter},
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

pub use self::line::{Escaped, Line};
use crate::pacing::time::{LocalTime, Nanos, SECOND};

/// At most one line of a kind in this time.
const SELDOM: Nanos = 10 * SECOND;
/// Bytes of lines that may wait to be written: some thousands of them.
const ROOM: usize = 1024 * 1024;
/// What is kept of the buffer's memory after more was needed once.
const KEPT: usize = 64 * 1024;
/// After it has written, the thread lets lines gather for so long: a busy proxy would otherwise wake it for each of them,
/// which costs more than to write it.
const GATHER: Duration = Duration::from_millis(5);
/// The longest line, in bytes. All that a client chooses is cut shorter before; this is for what was not thought of.
const LONGEST: usize = 4_096;
/// How long the end of the process waits for the last lines to be written.
const FLUSH: Duration = Duration::from_secs(1);

static BACKLOG: OnceLock<Backlog> = OnceLock::new();
static FORM: AtomicU8 = AtomicU8::new(Form::Text as u8);
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// What a line looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Form {
    Text,
    Colour,
    Json,
}

impl Form {
    fn at(number: u8) -> Self {
        let all = [Form::Text, Form::Colour, Form::Json];
        all[usize::from(number) % all.len()]
    }
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
    let backlog = BACKLOG.get_or_init(Backlog::default);
    let writing = std::thread::Builder::new()
        .name("log".to_owned())
        .spawn(|| backlog.write_out(&mut io::stderr()));
    backlog.lines().unattended = writing.is_err();
    let registry = tracing_subscriber::registry().with(filter);
    let form = if is_json {
        Form::Json
    } else if io::stderr().is_terminal() {
        Form::Colour
    } else {
        Form::Text
    };
    FORM.store(form as u8, Relaxed);
    let lines = fmt::layer().with_writer(LineByLine);
    let started = if form == Form::Json {
        let lines = lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false);
        registry.with(lines).try_init()
    } else {
        registry
            .with(lines.with_ansi(form == Form::Colour))
            .try_init()
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

/// Waits until the lines so far are written, but not for a reader that has stopped reading.
pub fn flush() {
    if let Some(backlog) = BACKLOG.get() {
        backlog.flush();
    }
}

/// The lines that wait to be written.
#[derive(Debug, Default)]
struct Backlog {
    lines: Mutex<Lines>,
    /// There is something to write, and the thread waits for it.
    filled: Condvar,
    /// Something was written.
    written: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    text: Vec<u8>,
    count: u64,
    /// How many there have been before these, and how many of all are written.
    before: u64,
    written: u64,
    /// The thread sleeps until somebody wakes it.
    asleep: bool,
    /// Somebody waits for the end.
    flushing: bool,
    /// There is no thread.
    unattended: bool,
}

impl Backlog {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut lines = self.lines();
        if lines.unattended {
            // No thread was to be had.
            let _ = io::stderr().write_all(line);
            return;
        }
        if lines.text.len() + line.len() > ROOM {
            DROPPED.fetch_add(1, Relaxed);
            return;
        }
        lines.text.extend_from_slice(line);
        lines.count += 1;
        if mem::take(&mut lines.asleep) {
            drop(lines);
            self.filled.notify_one();
        }
    }

    fn flush(&self) {
        let mut lines = self.lines();
        let all = lines.before + lines.count;
        lines.flushing = true;
        self.filled.notify_one();
        let missing = |lines: &mut Lines| !lines.unattended && lines.written < all;
        // A reader that does not read is not waited for.
        let _ = self.written.wait_timeout_while(lines, FLUSH, missing);
    }

    /// Writes lines as they come, some at a time.
    fn write_out(&self, out: &mut impl Write) {
        let (mut told, mut taken) = (0, Vec::new());
        loop {
            self.write_some(out, &mut taken, &mut told);
            let mut lines = self.lines();
            lines.flushing &= lines.count > 0;
            if !lines.flushing {
                drop(wait(self.filled.wait_timeout(lines, GATHER)));
            }
        }
    }

    /// Writes what there is, and waits for it before if there is nothing. After some were dropped, the first line that can
    /// be written says so: those before were `told`.
    fn write_some(&self, out: &mut impl Write, taken: &mut Vec<u8>, told: &mut u64) {
        let mut lines = self.lines();
        while lines.count == 0 {
            lines.asleep = true;
            lines = wait(self.filled.wait(lines));
        }
        lines.asleep = false;
        mem::swap(&mut lines.text, taken);
        let count = mem::take(&mut lines.count);
        lines.before += count;
        drop(lines);
        let dropped = dropped();
        if dropped > *told {
            let lines = dropped - *told;
            let _ = writeln!(
                out,
                "WARN paceline::log: {lines} lines were dropped, for standard error was not read; read it faster, or log less with PACELINE_LOG"
            );
            *told = dropped;
        }
        if out.write_all(taken).is_err() {
            DROPPED.fetch_add(count, Relaxed);
        }
        taken.clear();
        taken.shrink_to(KEPT);
        self.lines().written += count;
        self.written.notify_all();
    }
}

fn wait<T>(outcome: Result<T, PoisonError<T>>) -> T {
    outcome.unwrap_or_else(PoisonError::into_inner)
}

/// Makes a writer for each line.
struct LineByLine;

impl<'w> MakeWriter<'w> for LineByLine {
    type Writer = Whole;

    fn make_writer(&'w self) -> Whole {
        Whole
    }
}

/// Takes one line, whole.
struct Whole;

impl Write for Whole {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(backlog) = BACKLOG.get() {
            push(backlog, line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn push(backlog: &Backlog, line: &[u8]) {
    match line.len() {
        ..=LONGEST => backlog.push(line),
        _ => backlog.push(&cut(line.to_owned())),
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
    fn a_line_has_an_end_and_no_half_characters() {
        let long = format!("x{}\n", "\u{e9}".repeat(3_000));
        let short = cut(long.into_bytes());
        assert!(short.len() <= LONGEST && short.ends_with(b"...\n"));
        assert!(String::from_utf8(short).is_ok());
        assert_eq!(cut(b"short\n".to_vec()), b"short\n");
    }

    #[test]
    fn dropped_lines_are_told_once_before_the_next_line() {
        DROPPED.fetch_add(3, Relaxed);
        let backlog = Backlog::default();
        for line in ["a\n", "b\n"] {
            backlog.push(line.as_bytes());
        }
        let (mut out, mut told) = (Vec::new(), 0);
        backlog.write_some(&mut out, &mut Vec::new(), &mut told);
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
