//! One request in, one answer out: what form it has, whether it may pass, and who carries it.
//!
//! The same code serves a client's own connection and the inside of a tunnel; there scheme and authority are pinned.
//! Every failure ends in [`refuse`], the one place where an [`Error`] becomes a response.

pub mod answer;
pub mod auth;
pub mod connect;
pub mod forward;
pub mod relay;
pub mod tunnel;

use std::{
    fmt::Write as _,
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
};

use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, PROXY_AUTHENTICATE, RETRY_AFTER,
    },
};
use http_body::Body as _;
use hyper::ext::ReasonPhrase;

use crate::{
    authority::{Authority, Host},
    config,
    downstream::{incoming::Incoming, socket::Socket},
    drain::Signal,
    error::Error,
    headers,
    log::Seldom,
    metrics::Metrics,
    pacing::queue::Client,
    policy,
    proxy::{answer::Answer, connect::Plan, forward::Terms},
    record::Record,
    rules::{InForce, Kind, Opened, Rules, Ruling},
    shares::Shares,
    upstream::{Scheme, Target, Upstream, exchange::Outgoing},
};

/// What all requests share.
#[derive(Debug)]
pub struct Proxy {
    /// Who may do what, at the moment.
    pub in_force: InForce,
    /// Towards origins.
    pub upstream: Upstream,
    /// How many connections there may be: what is configured, or what there are files for.
    pub room: usize,
    /// Connections, by the address that they come from.
    pub connections: Arc<Shares>,
    /// Tunnels, by the user who opened them, or the address.
    pub tunnels: Arc<Shares>,
    /// For counting.
    pub metrics: Arc<Metrics>,
    /// For the line about hosts that the CA signs no leaf for.
    pub unsigned: Seldom,
    /// For the line about clients that do not trust the CA.
    pub untrusting: Seldom,
    /// Makes clients into keys of the queue; random, so that nobody can choose to share another's.
    pub client_keys: RandomState,
}

impl Proxy {
    /// The key under which a client without credentials is counted.
    pub fn address_key(&self, client: IpAddr) -> Client {
        self.client_keys.hash_one(policy::counted_as(client))
    }
}

/// A client's connection, or the inside of a tunnel on it.
#[derive(Debug)]
pub struct Downstream {
    /// What all requests share.
    pub proxy: Arc<Proxy>,
    /// Who is at the other end.
    pub client: IpAddr,
    /// The connection, to see whether they still are.
    pub socket: Socket,
    /// When it is time to go.
    pub drain: Signal,
    /// Inside a tunnel: what it was opened for, and who opened it.
    pub pinned: Option<Pinned>,
    /// What a CONNECT on this connection was promised: carried out once the 200 is sent.
    pub plan: Mutex<Option<Promise>>,
}

/// What the 200 to a CONNECT promised.
#[derive(Debug)]
pub struct Promise {
    /// What to do.
    pub plan: Plan,
    /// Ends with the tunnel.
    pub record: Option<Box<Record>>,
}

/// What a tunnel was opened for.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Clear text or TLS, as the first bytes showed.
    pub scheme: Scheme,
    /// What CONNECT named.
    pub authority: Authority,
    /// The name that the client sent in its ClientHello.
    pub sni: Option<Host>,
    /// The user of the CONNECT.
    pub user: Option<Arc<str>>,
}

/// Where a request wants to go.
enum Wish {
    /// A tunnel to here.
    Connect(Authority),
    /// This resource.
    Fetch(Target),
    /// Nowhere: it asks what we are.
    Us,
}

impl Downstream {
    /// Answers one request, with a refusal where the `verdict` on its form is one. Never fails: every error is an
    /// answer.
    pub async fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
        verdict: Result<(), Error>,
    ) -> Response<Answer> {
        let user = self.pinned.as_ref().and_then(|p| p.user.clone());
        // Boxed: it is handed on to the answer, and to a tunnel.
        let mut record = Box::new(Record::new(
            self.proxy.metrics.clone(),
            self.client,
            user,
            request.method().clone(),
        ));
        let is_connect = request.method() == Method::CONNECT;
        let version = request.version();
        // One set of rules for the whole of a request, whatever is reloaded meanwhile.
        let rules = self.proxy.in_force.now();
        let ruling = self.ruling(&rules);
        let outcome = match verdict {
            Ok(()) => self.carry(&rules, ruling, request, &mut record).await,
            Err(e) => Err(e),
        };
        match outcome {
            // A tunnel's record ends with the tunnel, any other with the body of its answer.
            Ok(response) if self.has_promise() => {
                if let Some(promise) =
                    &mut *self.plan.lock().unwrap_or_else(PoisonError::into_inner)
                {
                    promise.record = Some(record);
                }
                response
            }
            Ok(mut response) => {
                // An HTTP/1.0 client takes a body of unknown length to end with the connection (RFC 9112 section 6.3).
                // Only by an answer of that version is the codec kept from telling it that the connection is kept.
                if version == Version::HTTP_10 && response.body().size_hint().exact().is_none() {
                    *response.version_mut() = Version::HTTP_10;
                    close(&mut response);
                }
                if ruling != Ruling::Keep {
                    close(&mut response);
                }
                response.body_mut().record(record);
                response
            }
            Err(e) => {
                let text = e.text_for(record.destination());
                let mut response = refuse(&e, &text, rules.settings(), is_connect);
                if ruling != Ruling::Keep {
                    close(&mut response);
                }
                record.failed(&e, Some(response.status()));
                response
            }
        }
    }

    /// What the rules say of this connection. They may be others than those it was let in by.
    fn ruling(&self, rules: &Rules) -> Ruling {
        match (self.opened(), rules.admit(self.client)) {
            (Some(tunnel), _) => rules.judge(&tunnel, &self.proxy.upstream),
            (None, Err(e)) => Ruling::Refuse(e),
            (None, Ok(())) => Ruling::Keep,
        }
    }

    /// The tunnel of which this is the inside, if it is one.
    pub fn opened(&self) -> Option<Opened<'_>> {
        self.pinned.as_ref().map(|pinned| Opened {
            client: self.client,
            user: pinned.user.as_ref(),
            authority: &pinned.authority,
            kind: Kind::Read,
        })
    }

    async fn carry(
        &self,
        rules: &Rules,
        ruling: Ruling,
        request: Request<Incoming>,
        record: &mut Record,
    ) -> Result<Response<Answer>, Error> {
        match self.wish(&request)? {
            Wish::Us => {
                ruling.allowed()?;
                record.answered(StatusCode::OK);
                Ok(ourselves())
            }
            Wish::Connect(authority) => {
                record.target(None, &authority, "");
                ruling.allowed()?;
                let user = self.authenticate(rules, request.headers()).await?;
                connect::open(self, rules, authority, user, record).await
            }
            Wish::Fetch(target) => {
                record.target(Some(target.scheme), &target.authority, request.uri().path());
                ruling.allowed()?;
                let user = match &self.pinned {
                    Some(pinned) => pinned.user.clone(),
                    None => self.authenticate(rules, request.headers()).await?,
                };
                if headers::has_passed_us(request.headers()) {
                    return Err(Error::Loop);
                }
                let governed = rules.destinations.governing(&target.authority.host);
                if governed.is_none() {
                    self.ungoverned_allowed(rules, &target.authority)?;
                    self.port_allowed(rules, &target.authority)?;
                }
                let terms = Terms {
                    client: self.client_key(user.as_ref()),
                    urgency: headers::urgency(request.headers()),
                    max_wait: headers::max_wait(request.headers())?,
                };
                let version = request.version();
                let mut request = outgoing(request, &target, record.sent())?;
                if rules.settings().via {
                    headers::add_via(request.headers_mut(), version);
                }
                forward::forward(self, rules, governed, terms, request, target, record).await
            }
        }
    }

    /// Reads the request's target in whichever of the forms of RFC 9112 section 3.2 it has.
    fn wish(&self, request: &Request<Incoming>) -> Result<Wish, Error> {
        if request.method() == Method::TRACE {
            // Its answer repeats the request, with fields that a script in a browser could not read otherwise.
            return Err(Error::Malformed(
                "TRACE is not passed on; use another method",
            ));
        }
        let uri = request.uri();
        let Some(pinned) = &self.pinned else {
            if request.method() == Method::CONNECT {
                return Ok(Wish::Connect(connect::target(request)?));
            }
            // Asterisk-form (RFC 9112 section 3.2.4) means whoever reads it.
            if request.method() == Method::OPTIONS && uri.authority().is_none() && uri.path() == "*"
            {
                return Ok(Wish::Us);
            }
            return Ok(Wish::Fetch(absolute(uri)?));
        };
        if request.method() == Method::CONNECT {
            return Err(Error::Malformed("CONNECT inside a tunnel is not allowed"));
        }
        let authority = match uri.scheme() {
            Some(_) => {
                let target = absolute(uri)?;
                if target.scheme != pinned.scheme {
                    return Err(Error::Misdirected);
                }
                target.authority
            }
            None => host(request.headers(), request.version(), pinned)?,
        };
        let sni_differs = pinned
            .sni
            .as_ref()
            .is_some_and(|sni| *sni != pinned.authority.host);
        if authority != pinned.authority || sni_differs {
            return Err(Error::Misdirected);
        }
        Ok(Wish::Fetch(Target {
            scheme: pinned.scheme,
            authority,
        }))
    }

    async fn authenticate(
        &self,
        rules: &Rules,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<str>>, Error> {
        match &rules.credentials {
            Some(credentials) => {
                let from = self.proxy.address_key(self.client);
                credentials.check(from, headers).await.map(Some)
            }
            None => Ok(None),
        }
    }

    /// The key under which the queue is fair to this client: its user where it has one, else its address.
    pub fn client_key(&self, user: Option<&Arc<str>>) -> Client {
        match user {
            Some(user) => self.proxy.client_keys.hash_one(user),
            None => self.proxy.address_key(self.client),
        }
    }

    /// Whether a host that nobody governs may be asked for: none may where the operator says so, and no address that is
    /// not listed; it could be a governed host's, which would then go unpaced.
    ///
    /// # Errors
    /// [`Error::HostDenied`], [`Error::AddressDenied`], or [`Error::Loop`] for our own listeners.
    pub fn ungoverned_allowed(&self, rules: &Rules, authority: &Authority) -> Result<(), Error> {
        if rules.settings().ungoverned == config::Ungoverned::Deny {
            return Err(Error::HostDenied);
        }
        match authority.host {
            Host::Ip(ip) => self.proxy.upstream.check_literal(ip, authority),
            Host::Name(_) => Ok(()),
        }
    }

    /// Whether a URL outside a tunnel may name this port of an ungoverned host: the text of a request is enough to do harm
    /// to a mail server or a database. What `resolve` names is the operator's word, and so is an address in
    /// `allow_upstreams`, without which no literal gets this far.
    fn port_allowed(&self, rules: &Rules, authority: &Authority) -> Result<(), Error> {
        let ports = &rules.settings().connect_ports;
        if self.proxy.upstream.is_listed(authority) || ports.contains(&authority.port) {
            Ok(())
        } else {
            Err(Error::PortDenied)
        }
    }

    /// Leaves word of what to do once the answer to a CONNECT is sent.
    pub fn promise(&self, plan: Plan) {
        *self.plan.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Promise { plan, record: None });
    }

    /// Whether there is something to do.
    pub fn has_promise(&self) -> bool {
        self.plan
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// What was promised, if anything.
    pub fn promised(&self) -> Option<Promise> {
        self.plan
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// To `OPTIONS *`, from whoever may use the proxy or is about to log in: that this is paceline. It tells no more than any
/// refusal does.
fn ourselves() -> Response<Answer> {
    let mut response = Response::new(Answer::text(""));
    response
        .headers_mut()
        .insert(headers::PROXY_STATUS, HeaderValue::from_static("paceline"));
    response
}

/// Ends the connection with this answer.
fn close(response: &mut Response<Answer>) {
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(CONNECTION, close);
}

/// Absolute-form (RFC 9112 section 3.2.2), the form of requests to a proxy.
fn absolute(uri: &Uri) -> Result<Target, Error> {
    let scheme = match uri.scheme_str() {
        Some("http") => Scheme::Http,
        Some("https") => Scheme::Https,
        Some(_) => return Err(Error::Malformed("only http and https URLs are fetched")),
        None => {
            return Err(Error::Malformed(
                "this is a proxy; set it as HTTPS_PROXY and ask it for whole URLs",
            ));
        }
    };
    let text = uri.authority().map_or("", |a| a.as_str());
    let authority = Authority::parse(text, Some(scheme.default_port()))
        .map_err(|_| Error::Malformed("the URL's host or port is malformed"))?;
    Ok(Target { scheme, authority })
}

/// The authority that an origin-form request names in `Host`; exactly one is needed (RFC 9112 section 3.2), but an
/// HTTP/1.0 client may leave it out, and then means the tunnel's.
fn host(headers: &HeaderMap, version: Version, pinned: &Pinned) -> Result<Authority, Error> {
    let mut hosts = headers.get_all(HOST).iter();
    let text = match (hosts.next(), hosts.next()) {
        (Some(one), None) => one
            .to_str()
            .map_err(|_| Error::Malformed("the Host field is not ASCII"))?,
        (None, _) if version == Version::HTTP_10 => return Ok(pinned.authority.clone()),
        (None, _) => return Err(Error::Malformed("the Host field is missing")),
        (Some(_), Some(_)) => return Err(Error::Malformed("there is more than one Host field")),
    };
    Authority::parse(text, Some(pinned.scheme.default_port()))
        .map_err(|_| Error::Malformed("the Host field is malformed"))
}

/// The request as the origin gets it: origin-form, HTTP/1.1, `Host` as the target says, without what ends here.
fn outgoing(
    request: Request<Incoming>,
    target: &Target,
    sent: Arc<AtomicU64>,
) -> Result<Box<Request<Outgoing>>, Error> {
    let (mut head, body) = request.into_parts();
    let websocket = head.version != Version::HTTP_10 && headers::asks_for_websocket(&head.headers);
    headers::strip_request(&mut head.headers);
    if websocket {
        headers::put_websocket(&mut head.headers);
    }
    if head.uri.scheme().is_some() || head.uri.authority().is_some() {
        head.uri = origin_form(head.uri)?;
        put_host(&mut head.headers, target)?;
    } else if !head.headers.contains_key(HOST) {
        put_host(&mut head.headers, target)?;
    }
    head.version = Version::HTTP_11;
    let expected = head.headers.contains_key(EXPECT);
    // Boxed: it passes through many hands.
    Ok(Box::new(Request::from_parts(
        head,
        Outgoing::new(body, sent, expected),
    )))
}

/// Path and query alone (RFC 9112 section 3.2.1); an empty path is `/`.
fn origin_form(uri: Uri) -> Result<Uri, Error> {
    let malformed = |_| Error::Malformed("the URL's path is malformed");
    let path = match uri.into_parts().path_and_query {
        None => return Ok(Uri::default()),
        Some(path) if path.as_str().starts_with('?') => {
            format!("/{path}").parse().map_err(malformed)?
        }
        Some(path) => path,
    };
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).map_err(|_| Error::Malformed("the URL's path is malformed"))
}

/// Names the target in `Host`, without its scheme's own port. Most clients have done so themselves.
fn put_host(headers: &mut HeaderMap, target: &Target) -> Result<(), Error> {
    let mut text = String::with_capacity(64);
    // Writing to memory does not fail.
    let _ = write!(text, "{}", target.authority);
    if target.authority.port == target.scheme.default_port()
        && let Some(colon) = text.rfind(':')
    {
        text.truncate(colon);
    }
    let mut hosts = headers.get_all(HOST).iter();
    if let (Some(one), None) = (hosts.next(), hosts.next())
        && one.as_bytes() == text.as_bytes()
    {
        return Ok(());
    }
    let host =
        HeaderValue::try_from(text).map_err(|_| Error::Malformed("the URL's host is malformed"))?;
    headers.insert(HOST, host);
    Ok(())
}

/// An answer of our own. To a CONNECT, the reason phrase says why: it is the one part that most clients show.
pub fn refuse(
    error: &Error,
    text: &str,
    settings: &config::Proxy,
    is_connect: bool,
) -> Response<Answer> {
    let status = error.status(settings.refusal_status);
    let mut response = Response::new(Answer::text(format!("paceline: {text}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(headers::PROXY_STATUS, headers::proxy_status(error));
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    if let Some(seconds) = error.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
        headers.insert(
            PROXY_AUTHENTICATE,
            HeaderValue::from_static("Basic realm=\"paceline\", charset=\"UTF-8\""),
        );
    }
    if is_connect || error.closes() {
        close(&mut response);
    }
    if is_connect {
        let length = format!("paceline: {text}\n").len();
        let headers = response.headers_mut();
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        if let Ok(phrase) = ReasonPhrase::try_from(format!("paceline: {text}").into_bytes()) {
            response.extensions_mut().insert(phrase);
        }
    }
    response
}
