//! A line that is written for every request, put together by hand: in the two forms in which the log's library writes
//! lines, text and JSON, but without its detours, which cost as much as half of what else a request does here.
//!
//! Knows no field by name.

use std::{
    cell::Cell,
    fmt::{self, Display, Write as _},
    io::Write as _,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, SystemTime},
};

use super::{BACKLOG, FORM, Form, push};

thread_local! {
    /// Memory of the last line.
    static LAST: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A line of level `INFO` in the making. Fields come out in the order in which they are given.
pub struct Line {
    out: Vec<u8>,
    form: Form,
    target: &'static str,
}

impl Line {
    /// Begins a line. Whether it is wanted is for the caller to ask, by `tracing::enabled!`.
    pub fn begin(target: &'static str) -> Line {
        Line::of(Form::at(FORM.load(Relaxed)), target, SystemTime::now())
    }

    fn of(form: Form, target: &'static str, at: SystemTime) -> Line {
        let mut out = LAST.take();
        out.clear();
        let at = humantime::format_rfc3339_micros(at);
        // Writing to memory does not fail, here and below.
        let _ = match form {
            Form::Text => write!(out, "{at}  INFO {target}:"),
            Form::Colour => write!(
                out,
                "\x1b[2m{at}\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m"
            ),
            Form::Json => write!(out, "{{\"timestamp\":\"{at}\",\"level\":\"INFO\""),
        };
        Line { out, form, target }
    }

    /// A field that stands as it is in text. It must not hold what would end the line there.
    pub fn plain(&mut self, name: &str, value: impl Display) {
        self.name(name);
        match self.form {
            Form::Json => self.json(&value.to_string()),
            _ => _ = write!(self.out, "{value}"),
        }
    }

    /// The same for a text.
    pub fn word(&mut self, name: &str, value: &str) {
        self.name(name);
        match self.form {
            Form::Json => self.json(value),
            _ => self.out.extend_from_slice(value.as_bytes()),
        }
    }

    /// A field that is quoted in text.
    pub fn quoted(&mut self, name: &str, value: &str) {
        self.name(name);
        match self.form {
            Form::Json => self.json(value),
            _ if value.bytes().all(is_plain) => {
                self.out.push(b'"');
                self.out.extend_from_slice(value.as_bytes());
                self.out.push(b'"');
            }
            _ => _ = write!(self.out, "{value:?}"),
        }
    }

    /// A number.
    pub fn number(&mut self, name: &str, value: u64) {
        self.name(name);
        let _ = write!(self.out, "{value}");
    }

    /// A span as a plain decimal of seconds, to the microsecond.
    pub fn seconds(&mut self, name: &str, span: Duration) {
        self.name(name);
        let rounded = span.saturating_add(Duration::from_nanos(500));
        let mut digits = *b".000000";
        let mut rest = rounded.subsec_micros();
        for digit in digits[1..].iter_mut().rev() {
            // A digit is below ten.
            *digit += (rest % 10) as u8;
            rest /= 10;
        }
        let _ = write!(self.out, "{}", rounded.as_secs());
        self.out.extend_from_slice(&digits);
    }

    /// Ends the line and sends it on its way.
    pub fn end(mut self) {
        self.close();
        if let Some(backlog) = BACKLOG.get() {
            push(backlog, &self.out);
        }
        LAST.set(self.out);
    }

    fn close(&mut self) {
        let _ = match self.form {
            Form::Json => writeln!(self.out, ",\"target\":\"{}\"}}", self.target),
            _ => writeln!(self.out),
        };
    }

    fn name(&mut self, name: &str) {
        let (before, after) = match self.form {
            Form::Text => (" ", "="),
            Form::Colour => (" \x1b[3m", "\x1b[0m\x1b[2m=\x1b[0m"),
            Form::Json => (",\"", "\":"),
        };
        for part in [before, name, after] {
            self.out.extend_from_slice(part.as_bytes());
        }
    }

    fn json(&mut self, text: &str) {
        let _ = serde_json::to_writer(&mut self.out, text);
    }
}

/// A text in which everything is escaped that is not printable ASCII, and quotes and backslashes.
pub struct Escaped<'t>(pub &'t str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.bytes().all(is_plain) {
            // As nearly all are.
            return f.write_str(self.0);
        }
        self.0.escape_default().try_for_each(|c| f.write_char(c))
    }
}

/// Whether a character stands for itself in every form.
fn is_plain(b: u8) -> bool {
    (b.is_ascii_graphic() || b == b' ') && !matches!(b, b'\'' | b'"' | b'\\')
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use proptest::prelude::*;
    use tracing_subscriber::{fmt::MakeWriter, layer::SubscriberExt as _};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("sound").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'w> MakeWriter<'w> for Sink {
        type Writer = Sink;

        fn make_writer(&'w self) -> Sink {
            self.clone()
        }
    }

    /// What the log's library makes of a line.
    fn of_the_library(form: Form, url: &str, user: &str) -> String {
        let sink = Sink::default();
        let registry = tracing_subscriber::registry();
        let lines = tracing_subscriber::fmt::layer().with_writer(sink.clone());
        let log = || {
            tracing::info!(target: "access", url = %Escaped(url), user, status = 200u16, received = u64::MAX, method = %"GET");
        };
        match form {
            Form::Json => {
                let lines = lines
                    .json()
                    .flatten_event(true)
                    .with_current_span(false)
                    .with_span_list(false);
                tracing::subscriber::with_default(registry.with(lines), log);
            }
            _ => {
                let lines = lines.with_ansi(form == Form::Colour);
                tracing::subscriber::with_default(registry.with(lines), log);
            }
        }
        String::from_utf8(sink.0.lock().expect("sound").clone()).expect("text")
    }

    fn of_ours(form: Form, url: &str, user: &str) -> String {
        let mut line = Line::of(form, "access", SystemTime::now());
        line.plain("url", Escaped(url));
        line.quoted("user", user);
        line.number("status", 200);
        line.number("received", u64::MAX);
        line.word("method", "GET");
        line.close();
        String::from_utf8(line.out).expect("text")
    }

    /// A line without its instant.
    fn timeless(line: &str) -> String {
        let at = line.find("20").expect("an instant");
        let length = "2026-01-02T03:04:05.678901Z".len();
        assert!(line[at..at + length].ends_with('Z'), "{line}");
        format!("{}{}", &line[..at], &line[at + length..])
    }

    proptest! {
        #[test]
        fn a_line_is_as_the_library_writes_it(url in "/\\PC{0,20}|/[ -~]{0,20}", user in "[ -~]{0,9}|\\PC{0,9}") {
            for form in [Form::Text, Form::Colour, Form::Json] {
                let (ours, theirs) = (of_ours(form, &url, &user), of_the_library(form, &url, &user));
                prop_assert_eq!(timeless(&ours), timeless(&theirs));
            }
        }

        #[test]
        fn an_escaped_text_is_what_it_always_was(text in "\\PC{0,30}|[ -~]{0,30}|.{0,30}") {
            prop_assert_eq!(Escaped(&text).to_string(), text.escape_default().to_string());
        }
    }

    #[test]
    fn seconds_are_plain_decimals_in_text_and_numbers_in_json() {
        for (nanos, text) in [
            (40_000, "0.000040"),
            (161_000_000, "0.161000"),
            (0, "0.000000"),
            (999_999_600, "1.000000"),
            (61_000_000_499, "61.000000"),
        ] {
            for form in [Form::Text, Form::Json] {
                let mut line = Line::of(form, "access", SystemTime::now());
                line.seconds("total_s", Duration::from_nanos(nanos));
                line.close();
                let line = String::from_utf8(line.out).expect("text");
                if form == Form::Json {
                    let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
                    let number = value["total_s"].as_f64().expect("a number");
                    assert!((number - nanos as f64 / 1e9).abs() <= 5.1e-7, "{line}");
                } else {
                    assert!(line.ends_with(&format!(" total_s={text}\n")), "{line}");
                }
            }
        }
    }
}
