//! The attack table: what a hostile client, resolver or origin can say, one row each, against a running replica and
//! over bare sockets, since a library would correct what it sends.
//!
//! A row names the kind of attack, what is sent, the answer, and what the origin saw of it. After each table the replica
//! must still serve, hold no more memory than before, have met no panic, and have shown no secret in its log, its metrics
//! or its answers: all that is secret in the rows is spelled with `s3cret`.

mod addresses;
mod answers;
mod certificates;
mod fields;
mod handshakes;
mod identity;
mod lines;
mod scene;
mod smuggling;
mod trust;

use crate::bed::scripted::{Step, say};

use scene::{ESTABLISHED, Scene, names_of};

/// Governed, in clear text and with TLS.
const HOST: &str = "gov.test";
/// Governed as well.
const OTHER: &str = "gov2.test";
/// Governed by nobody.
const STRANGER: &str = "tun.test";
/// What the requests of the rows carry, to be looked for where it must not be.
const SECRET: &str = "s3cret";

/// How a row's bytes reach the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// On the client's own connection.
    Plain,
    /// In TLS in a tunnel to this authority, with this name in the ClientHello.
    Inside(&'static str, Option<&'static str>),
    /// In clear text in a tunnel to this authority.
    Bare(&'static str),
}

/// Inside an ordinary tunnel.
const INSIDE: Way = Way::Inside("gov.test:443", Some(HOST));
/// Both ways to ask for a governed host.
const BOTH: [Way; 2] = [Way::Plain, INSIDE];

/// What comes back.
#[derive(Clone, Debug)]
enum Reply {
    /// A refusal of ours with this status and error type, after which the connection ends.
    Ends(u16, &'static str),
    /// A refusal of ours after which the connection goes on.
    Refused(u16, &'static str),
    /// A success of ours, with nothing in it; and the connection is in step.
    Ours,
    /// A tunnel.
    Tunnel,
    /// The origin's answers, one after another; and the connection is in step.
    Passes(&'static [u16]),
    /// The origin's answers, after which the connection ends.
    Last(&'static [u16]),
    /// The beginning of an answer that breaks off.
    Broken,
}

/// One attack.
#[derive(Clone, Debug)]
struct Row {
    /// The kind of attack; the tables are made of families of such kinds.
    id: &'static str,
    what: String,
    way: Way,
    /// `{U}` stands for what a target begins with, `{H}` for the host, `{n}` for what this row's requests are known by.
    sends: Vec<u8>,
    reply: Reply,
    /// What the origin does about `/{n}`.
    origin: Vec<Step>,
    /// The exact requests that arrive; `None` where one arrives for each answer and its text is not the point.
    arrives: Option<Vec<String>>,
}

fn row(id: &'static str, what: impl Into<String>, sends: impl AsRef<[u8]>, reply: Reply) -> Row {
    Row {
        id,
        what: what.into(),
        way: Way::Plain,
        sends: sends.as_ref().to_vec(),
        reply,
        origin: vec![say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")],
        arrives: None,
    }
}

impl Row {
    fn way(mut self, way: Way) -> Row {
        self.way = way;
        self
    }

    fn origin(mut self, steps: Vec<Step>) -> Row {
        self.origin = steps;
        self
    }

    /// The origin hears a body that ends so before it answers.
    fn heard(self, ending: &'static [u8]) -> Row {
        let answer = self.origin.clone();
        self.origin([vec![Step::Hear(ending)], answer].concat())
    }

    /// Just this arrives.
    fn arrives(mut self, texts: &[&str]) -> Row {
        self.arrives = Some(texts.iter().map(|text| (*text).to_owned()).collect());
        self
    }

    fn fill(&self, template: &[u8], name: &str) -> Vec<u8> {
        let start = match self.way {
            Way::Plain => format!("http://{HOST}"),
            Way::Inside(..) | Way::Bare(_) => String::new(),
        };
        let filled = replaced(template, b"{U}", start.as_bytes());
        let filled = replaced(&filled, b"{H}", HOST.as_bytes());
        replaced(&filled, b"{n}", name.as_bytes())
    }

    fn says(&self, method: &[u8]) -> bool {
        self.sends.starts_with(method)
    }
}

/// Both ways.
fn both(rows: Vec<Row>) -> Vec<Row> {
    let ways = |row: Row| BOTH.map(|way| row.clone().way(way));
    rows.into_iter().flat_map(ways).collect()
}

/// An ordinary request with more fields, and with secrets.
fn get(fields: &str) -> String {
    request("GET", "{U}/{n}?key=s3cret-query", fields, "")
}

fn post(fields: &str, body: &str) -> String {
    request("POST", "{U}/{n}?key=s3cret-query", fields, body)
}

fn request(method: &str, target: &str, fields: &str, body: &str) -> String {
    format!(
        "{method} {target} HTTP/1.1\r\nHost: {{H}}\r\nX-Key: s3cret-field\r\nCookie: s3cret-cookie\r\n{fields}\r\n{body}"
    )
}

fn connect(authority: &str) -> String {
    format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nX-Key: s3cret-field\r\n\r\n")
}

/// What arrives of a [`get`] with these fields.
fn arrived(fields: &str) -> String {
    request(
        "GET",
        "/{n}?key=s3cret-query",
        &format!("{fields}via: 1.1 paceline\r\n"),
        "",
    )
}

fn replaced(text: &[u8], what: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        match rest.strip_prefix(what) {
            Some(after) => {
                out.extend_from_slice(by);
                rest = after;
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}
