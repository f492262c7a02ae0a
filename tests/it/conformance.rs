//! Every form that a message can have passes as it came, in plain form and through an intercepted tunnel, byte for byte
//! against an origin that says and hears bytes. What RFC 9110 section 7.6 wants changed is all that changes.

mod broken;
mod continues;
mod fields;
mod messages;
mod order;
mod tunnels;
mod upgrade;

use std::time::Duration;

use crate::bed::{
    client::Session,
    recipe::{Recipe, Site},
    replica::Replica,
    scripted::{Scripted, Step, say},
};

const PLAIN: &str = "plain.test";
const SECURE: &str = "lh3.googleusercontent.com";
/// For bytes that are to come at once.
const SOON: Duration = Duration::from_secs(10);

/// How a request reaches the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// In absolute form, in clear text.
    Plain,
    /// In a tunnel that the proxy looks into.
    Intercepted,
}

const FORMS: [Form; 2] = [Form::Plain, Form::Intercepted];

/// A replica between clients and one origin for each form.
struct Scene {
    replica: Replica,
    plain: Scripted,
    secure: Scripted,
    site: Site,
}

impl Scene {
    fn new() -> Scene {
        Scene::with("2000.0", |recipe| recipe)
    }

    fn with(rate: &str, more: impl FnOnce(Recipe) -> Recipe) -> Scene {
        let (plain, secure, site) = (Scripted::plain(PLAIN), Scripted::tls(SECURE), Site::new());
        let recipe = Recipe::new()
            .destination("all", &[PLAIN, SECURE], rate)
            .scripted(&plain)
            .scripted(&secure);
        Scene {
            replica: Replica::start(&site, "r0", &more(recipe)),
            plain,
            secure,
            site,
        }
    }

    fn origin(&self, form: Form) -> &Scripted {
        match form {
            Form::Plain => &self.plain,
            Form::Intercepted => &self.secure,
        }
    }

    /// A connection on which requests of that form can be sent.
    fn open(&self, form: Form) -> Session {
        match form {
            Form::Plain => self.replica.session(PLAIN),
            Form::Intercepted => self
                .replica
                .browser(&self.site, SECURE)
                .tunnel()
                .expect("a governed host is answered 200"),
        }
    }

    /// A template with `{at}` before a path and `{host}` for the host, as this form has them.
    fn fill(&self, form: Form, template: &str) -> String {
        let host = self.origin(form).name();
        let at = match form {
            Form::Plain => format!("http://{host}"),
            Form::Intercepted => String::new(),
        };
        template.replace("{at}", &at).replace("{host}", host)
    }

    /// A request as sent on a connection of this form.
    fn send(&self, form: Form, session: &mut Session, template: &str) {
        let request = self.fill(form, template);
        session
            .send(request.as_bytes())
            .unwrap_or_else(|fault| panic!("{form:?}: {request:?}: {fault}"));
    }

    /// What is wrong with a connection that must still be in step: the next request must get its own answer.
    fn out_of_step(&self, form: Form, session: &mut Session) -> Option<String> {
        let said = say("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nin step");
        self.origin(form).script("/step", vec![said]);
        let request = self.fill(form, "GET {at}/step HTTP/1.1\r\nHost: {host}\r\n\r\n");
        if let Err(fault) = session.send(request.as_bytes()) {
            return Some(format!("the connection is gone: {fault}"));
        }
        match session.answer() {
            Ok(answer) if answer.status() == 200 && answer.text() == "in step" => None,
            other => Some(format!("the next answer is {other:?}")),
        }
    }
}

/// One row of the table. `{at}` stands before a path, `{host}` for the host.
struct Row {
    /// What it shows.
    what: &'static str,
    /// What the client sends.
    request: &'static str,
    /// What the origin does.
    origin: Vec<Step>,
    /// What the origin gets; empty where that is not the point.
    arrives: &'static str,
    /// What the client gets.
    answer: &'static str,
    /// Whether the connection ends with it.
    ends: bool,
}

impl Row {
    fn new(
        what: &'static str,
        request: &'static str,
        origin: &'static str,
        answer: &'static str,
    ) -> Row {
        Row {
            what,
            request,
            origin: vec![say(origin)],
            arrives: "",
            answer,
            ends: false,
        }
    }

    fn arrives(mut self, arrives: &'static str) -> Row {
        self.arrives = arrives;
        self
    }

    fn origin(mut self, steps: Vec<Step>) -> Row {
        self.origin = steps;
        self
    }

    fn ends(mut self) -> Row {
        self.ends = true;
        self
    }
}

/// Tries every row in both forms and reports all that differ.
fn check(scene: &Scene, rows: &[Row]) {
    let mut faults = Vec::new();
    for form in FORMS {
        for row in rows {
            for fault in differences(scene, form, row) {
                faults.push(format!("{form:?}, {}: {fault}", row.what));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn differences(scene: &Scene, form: Form, row: &Row) -> Vec<String> {
    let origin = scene.origin(form);
    let path = row
        .request
        .split("{at}")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .expect("a row's request has a target");
    origin.script(path, row.origin.clone());
    let mut session = scene.open(form);
    scene.send(form, &mut session, row.request);
    let expected = scene.fill(form, row.answer);
    // One byte more than is expected, for a connection that ends, so that its end or an excess shows.
    let heard = session.hear(expected.len() + usize::from(row.ends), SOON);
    let heard = String::from_utf8_lossy(&heard).into_owned();
    let mut faults = Vec::new();
    if heard != expected {
        faults.push(format!(
            "answer\n    expected {expected:?}\n    heard    {heard:?}"
        ));
    }
    let arrives = scene.fill(form, row.arrives);
    let arrived: Vec<String> = origin.asked(path).into_iter().map(|one| one.text).collect();
    if !row.arrives.is_empty() && arrived != [arrives.clone()] {
        faults.push(format!(
            "request\n    expected {arrives:?}\n    arrived  {arrived:?}"
        ));
    }
    if !row.ends && faults.is_empty() {
        faults.extend(scene.out_of_step(form, &mut session));
    }
    faults
}
