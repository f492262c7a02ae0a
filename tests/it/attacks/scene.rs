//! Plays a table of rows against one replica, then looks at what they have left behind: in its origins, its log, its
//! figures and its memory. Knows no row.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use rustls::ClientConfig;

use super::{
    BOTH, HOST, OTHER, Reply, Row, SECRET, STRANGER, Way,
    trust::{blind_tls, nameless_tls},
};
use crate::bed::{
    client::{Answer, Session},
    metrics::Scrape,
    names::Names,
    recipe::{Recipe, Site},
    replica::{Replica, paceline},
    scripted::{Exchange, Scripted, say},
};

/// How much memory a table may leave behind: what allocators keep, but no leak of a row.
const GROWTH: u64 = 10 << 20;
/// Rows that are under way at one time.
const AT_ONCE: usize = 8;
/// A tunnel that says nothing more for this long has said all.
const QUIET: Duration = Duration::from_millis(150);

/// A replica, its origins, and whatever its resolver is to say.
pub struct Scene {
    pub site: Site,
    pub replica: Replica,
    pub names: Names,
    pub clear: Scripted,
    pub tls: Scripted,
    pub other: Scripted,
    pub stranger: Scripted,
    pub blind: Arc<ClientConfig>,
    nameless: Arc<ClientConfig>,
    memory: u64,
}

impl Scene {
    pub fn new() -> Scene {
        Scene::with(|recipe, _| recipe)
    }

    /// With more in its configuration, for which the folder is there.
    pub fn with(more: impl FnOnce(Recipe, &Site) -> Recipe) -> Scene {
        let site = Site::new();
        let (clear, tls) = (Scripted::plain(HOST), Scripted::tls(HOST));
        let (other, stranger) = (Scripted::tls(OTHER), Scripted::plain(STRANGER));
        let recipe = Recipe::new()
            .destination("governed", &[HOST, OTHER, "*.wild.test"], "2000.0")
            .scripted(&clear)
            .scripted(&tls)
            .scripted(&other)
            .scripted(&stranger)
            .resolve("tun.test:443", stranger.address());
        let names = Names::new(site.path());
        let config = more(recipe, &site).write(&site, "r0");
        let mut command = paceline(&["run", "--config", &config.to_string_lossy()]);
        command.env("PACELINE_LOG", "debug");
        names.serve(&mut command);
        let replica = Replica::spawn(&site, "r0", command);
        replica.await_ready();
        let scene = Scene {
            memory: replica.memory(),
            site,
            replica,
            names,
            clear,
            tls,
            other,
            stranger,
            blind: blind_tls(&[b"http/1.1"]),
            nameless: nameless_tls(),
        };
        scene.warm_up()
    }

    /// Meets every part of the program once, and as many connections as there will be at one time: what is allocated
    /// then stays, and is not the rows' doing.
    fn warm_up(mut self) -> Scene {
        let sessions: Vec<Session> = (0..AT_ONCE * 2)
            // Where credentials are wanted, there is no tunnel without.
            .filter_map(|n| self.open(BOTH[n % 2]).ok())
            .collect();
        for mut session in sessions {
            let target = format!("http://{HOST}/warm-up");
            let _ =
                session.send(format!("GET {target} HTTP/1.1\r\nHost: {HOST}\r\n\r\n").as_bytes());
            let _ = session.answer();
        }
        self.memory = self.replica.memory();
        self
    }

    /// Where the replica's clients connect, and where its operator does.
    pub fn own(&self) -> [SocketAddr; 2] {
        [self.replica.proxy(), self.replica.admin_address()]
    }

    pub fn origins(&self) -> [&Scripted; 4] {
        [&self.clear, &self.tls, &self.other, &self.stranger]
    }

    /// A connection on which a row's bytes can be sent.
    pub fn open(&self, way: Way) -> std::io::Result<Session> {
        let mut session = self.replica.session(HOST);
        let (Way::Inside(authority, _) | Way::Bare(authority)) = way else {
            return Ok(session);
        };
        let answer = session.connect(authority)?;
        if answer.status() != 200 {
            return Err(std::io::Error::other(answer.head.start_line));
        }
        match way {
            Way::Inside(_, Some(sni)) => session.start_tls(&self.blind, sni),
            Way::Inside(_, None) => session.start_tls(&self.nameless, HOST),
            _ => Ok(session),
        }
    }

    /// Plays all rows, then looks at what they have left behind.
    ///
    /// # Panics
    /// With a line for each fault.
    pub fn play(&mut self, rows: &[Row]) {
        let (next, names) = (AtomicUsize::new(0), names_of(rows));
        let worker = || {
            let mut faults = Vec::new();
            while let Some((row, name)) = {
                let n = next.fetch_add(1, Relaxed);
                rows.get(n).zip(names.get(n))
            } {
                faults.extend(self.play_one(row, name).err().map(|f| named(row, &f)));
            }
            faults
        };
        let mut faults: Vec<String> = thread::scope(|scope| {
            let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(worker)).collect();
            workers
                .into_iter()
                .flat_map(|w| w.join().expect("a worker that does not panic"))
                .collect()
        });
        let exchanges: Vec<Exchange> = self.origins().iter().flat_map(|o| o.exchanges()).collect();
        for (row, name) in rows.iter().zip(&names) {
            faults.extend(misarrived(row, name, &exchanges).map(|f| named(row, &f)));
        }
        let asked = |one: &&Exchange| {
            one.target() == "/warm-up" || names.iter().any(|name| one.text.contains(name))
        };
        let stray = exchanges.iter().filter(|one| !asked(one));
        faults.extend(stray.map(|one| format!("no row asked for {:?}", one.text)));
        // What came beside whole requests is the beginning of another that some row has smuggled.
        for origin in self.origins() {
            let came: usize = origin.heard().iter().map(|c| c.bytes.len()).sum();
            let read: usize = origin.exchanges().iter().map(|one| one.length).sum();
            if came != read && origin.name() != STRANGER {
                faults.push(format!(
                    "{}: {came} bytes came, and {read} are whole requests",
                    origin.name()
                ));
            }
        }
        faults.extend(self.aftermath());
        assert!(
            faults.is_empty(),
            "{} faults in {} rows:\n{}",
            faults.len(),
            rows.len(),
            faults.join("\n")
        );
    }

    fn play_one(&self, row: &Row, name: &str) -> Result<(), String> {
        for origin in self.origins() {
            origin.script(&format!("/{name}"), row.origin.clone());
            origin.script(&format!("/{name}?key=s3cret-query"), row.origin.clone());
        }
        let mut session = self
            .open(row.way)
            .map_err(|fault| format!("no tunnel: {fault}"))?;
        // A long one may be refused, and the connection closed, before all of it is sent.
        let _ = session.send(&row.fill(&row.sends, name));
        match row.reply {
            Reply::Ends(status, error) => {
                let answer = read(&mut session, row)?;
                refused(&answer, row, status, error)?;
                if !says(&answer, "connection", "close") {
                    return Err(format!("the end is not announced: {:?}", answer.head));
                }
                ended(&mut session)
            }
            Reply::Refused(status, error) => {
                let answer = read(&mut session, row)?;
                refused(&answer, row, status, error)?;
                self.in_step(&mut session, row, name)
            }
            Reply::Ours => {
                let answer = read(&mut session, row)?;
                let echoes = format!("{:?}", answer.head).contains("s3cret");
                if answer.status() != 200 || echoes || !answer.text().is_empty() {
                    return Err(format!("not ours: {:?} {}", answer.head, answer.text()));
                }
                self.in_step(&mut session, row, name)
            }
            Reply::Tunnel => {
                let head = session.hear(ESTABLISHED.len() + 1, QUIET);
                let head = String::from_utf8_lossy(&head).into_owned();
                let old = row.sends.windows(8).any(|w| w == b"HTTP/1.0");
                let expected = ESTABLISHED.replace("1.1", if old { "1.0" } else { "1.1" });
                (head == expected)
                    .then_some(())
                    .ok_or(format!("no tunnel: {head:?}"))
            }
            Reply::Passes(statuses) => {
                answered(&mut session, row, statuses)?;
                self.in_step(&mut session, row, name)
            }
            Reply::Last(statuses) => {
                answered(&mut session, row, statuses)?;
                ended(&mut session)
            }
            Reply::Broken => match read(&mut session, row) {
                Ok(whole) => Err(format!("passed for whole: {:?}", whole.head)),
                Err(_) => Ok(()),
            },
        }
    }

    /// The next request on a connection gets its own answer.
    fn in_step(&self, session: &mut Session, row: &Row, name: &str) -> Result<(), String> {
        let said = say("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nin step");
        for origin in self.origins() {
            origin.script(&format!("/{name}/step"), vec![said.clone()]);
        }
        let probe = row.fill(b"GET {U}/{n}/step HTTP/1.1\r\nHost: {H}\r\n\r\n", name);
        if !self.passes_ordinarily(row) {
            return Ok(());
        }
        session
            .send(&probe)
            .map_err(|fault| format!("the connection is gone: {fault}"))?;
        match session.answer() {
            Ok(answer) if answer.status() == 200 && answer.text() == "in step" => Ok(()),
            other => Err(format!("out of step, the next answer is {other:?}")),
        }
    }

    /// Whether an ordinary request can pass on a row's connection: not in a tunnel whose own name is wrong.
    fn passes_ordinarily(&self, row: &Row) -> bool {
        match row.way {
            Way::Plain => true,
            Way::Inside(authority, sni) => {
                authority.trim_end_matches('.').starts_with(HOST) && sni.is_none_or(|s| s == HOST)
            }
            Way::Bare(authority) => authority.starts_with(HOST),
        }
    }

    /// What is wrong with the replica after a table.
    pub fn aftermath(&mut self) -> Vec<String> {
        let mut faults = Vec::new();
        if let Some(status) = self.replica.ended() {
            return vec![format!("the replica ended: {status}")];
        }
        let memory = self.replica.memory();
        if memory > self.memory + GROWTH {
            faults.push(format!("memory grew from {} to {memory}", self.memory));
        }
        let metrics = self.replica.admin("/metrics").map(|a| a.text());
        let status = self.replica.admin("/status").map(|a| a.text());
        let (Ok(metrics), Ok(status)) = (metrics, status) else {
            return vec!["the admin listener does not answer".to_owned()];
        };
        let (log, printed) = (self.replica.stderr(), self.replica.stdout());
        for (name, text) in [
            ("log", &log),
            ("stdout", &printed),
            ("/metrics", &metrics),
            ("/status", &status),
        ] {
            let shown = text.lines().find(|line| line.contains(SECRET));
            faults.extend(shown.map(|line| format!("a secret in {name}: {line}")));
        }
        let panics = Scrape::parse(&metrics)
            .sum("paceline_panics_total", &[])
            .unwrap_or(f64::INFINITY);
        if panics > 0.0 || log.contains("panic at ") {
            faults.push("something panicked".to_owned());
        }
        let odd = |line: &&str| line.len() > 4096 || line.chars().any(char::is_control);
        let odd = log.lines().find(odd);
        faults.extend(odd.map(|line| format!("a log line too long, or not escaped: {line:?}")));
        for name in Scrape::parse(&metrics).label_values("destination") {
            if !matches!(name, "" | "governed") {
                faults.push(format!("a label that no operator wrote: {name:?}"));
            }
        }
        faults
    }
}

/// The answer that opens a tunnel, with nothing behind it.
pub const ESTABLISHED: &str = "HTTP/1.1 200 Connection established\r\n\r\n";

/// What the requests of each row are known by.
pub fn names_of(rows: &[Row]) -> Vec<String> {
    let name = |(n, row): (usize, &Row)| format!("{}-{n}-", row.id.to_lowercase());
    rows.iter().enumerate().map(name).collect()
}

fn named(row: &Row, fault: &str) -> String {
    let sent: String = String::from_utf8_lossy(&row.sends)
        .chars()
        .take(80)
        .collect();
    format!("{} {} ({:?}, {sent:?}): {fault}", row.id, row.what, row.way)
}

/// One answer, as long as the row's request makes it.
fn read(session: &mut Session, row: &Row) -> Result<Answer, String> {
    let bodiless = row.says(b"HEAD ");
    let answer = if bodiless {
        let head = session.head();
        head.map(|head| Answer { head, body: vec![] })
    } else {
        session.answer()
    };
    answer.map_err(|fault| format!("no answer: {fault}"))
}

fn answered(session: &mut Session, row: &Row, statuses: &[u16]) -> Result<(), String> {
    for status in statuses {
        let answer = read(session, row)?;
        if answer.status() != *status {
            return Err(format!("{:?} {}", answer.head, answer.text()));
        }
        // Only the origin's answers have none.
        if let Some(ours) = answer.field("proxy-status") {
            return Err(format!("not the origin's answer: {ours}"));
        }
    }
    Ok(())
}

fn says(answer: &Answer, name: &str, what: &str) -> bool {
    answer.field(name).is_some_and(|v| v.contains(what))
}

/// What all refusals have in common, and the two things in which they differ.
fn refused(answer: &Answer, row: &Row, status: u16, error: &str) -> Result<(), String> {
    let (text, phrase) = (answer.text(), &answer.head.start_line);
    let error = format!("paceline; error={error}");
    let whole = format!("{:?} {text}", answer.head);
    if answer.status() != status || answer.field("proxy-status") != Some(&error) {
        return Err(format!("expected {status} {error}: {whole}"));
    }
    let line = text.starts_with("paceline: ") && text.ends_with('\n') && text.lines().count() == 1;
    if !line && !row.says(b"HEAD ") {
        return Err(format!("no line that says what to do: {whole}"));
    }
    // A CONNECT that cannot be read to its end is refused as what it began as, too.
    if row.says(b"CONNECT ") && row.way == Way::Plain && !phrase.contains("paceline: ") {
        return Err(format!("the phrase does not say the cause: {phrase}"));
    }
    let echo = [SECRET, "evil", "<script", "\x1b", "%0d%0a"]
        .iter()
        .find(|what| whole.contains(*what));
    echo.map_or(Ok(()), |what| Err(format!("{what} is echoed: {whole}")))
}

fn ended(session: &mut Session) -> Result<(), String> {
    match session.rest() {
        Ok(rest) if rest.is_empty() => Ok(()),
        rest => Err(format!("the connection goes on: {rest:?}")),
    }
}

/// What is wrong with what arrived of a row.
fn misarrived(row: &Row, name: &str, exchanges: &[Exchange]) -> Option<String> {
    let step = format!("/{name}/step ");
    let came: Vec<&str> = exchanges
        .iter()
        .map(|one| one.text.as_str())
        .filter(|text| text.contains(name) && !text.contains(&step))
        .collect();
    if let Some(texts) = &row.arrives {
        let fill =
            |text: &String| String::from_utf8_lossy(&row.fill(text.as_bytes(), name)).into_owned();
        let expected: Vec<String> = texts
            .iter()
            .map(|text| fill(&text.replace("{U}", "")))
            .collect();
        return (came != expected).then(|| format!("expected {expected:?}\n    arrived  {came:?}"));
    }
    let expected = match row.reply {
        Reply::Ends(..) | Reply::Refused(..) | Reply::Tunnel | Reply::Ours => 0,
        Reply::Passes(statuses) | Reply::Last(statuses) => statuses.len(),
        Reply::Broken => 1,
    };
    (came.len() != expected).then(|| format!("{expected} requests expected, arrived {came:?}"))
}
