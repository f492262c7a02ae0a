//! CONNECT (RFC 9110 section 9.3.6): what is promised with the 200, and what is refused before it.
//!
//! For a governed host the 200 comes at once, before any name is resolved and any slot is taken: clients charge a wait
//! here to their connect time-out, and most cannot show why a CONNECT was refused. What can wait or fail does so inside.
//! For other hosts the origin is dialled first, so that a failure has a status.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{
    Request, Response,
    header::{CONTENT_LENGTH, TRANSFER_ENCODING},
};
use hyper::ext::ReasonPhrase;
use rustls::ServerConfig;
use tokio::{net::TcpStream, time::Instant};

use crate::{
    authority::Authority,
    downstream::incoming::Incoming,
    error::Error,
    pacing::lane::Departure,
    proxy::{Downstream, answer::Answer},
    record::Record,
    rules::Rules,
    shares::Share,
    upstream::stream::Stream,
};

/// What a tunnel was promised to do.
#[derive(Debug)]
pub enum Plan {
    /// Look inside: end TLS with this configuration, or read clear text, as the client begins.
    Intercept {
        /// What CONNECT named.
        authority: Authority,
        /// The leaf and all else for the handshake.
        tls: Arc<ServerConfig>,
        /// Who opened it.
        user: Option<Arc<str>>,
        /// Its place among those of its client.
        share: Share,
    },
    /// Pass bytes to a connection that is there already.
    Relay {
        /// The connection.
        origin: TcpStream,
        /// Where it leads.
        address: SocketAddr,
        /// What CONNECT named.
        authority: Authority,
        /// Who opened it.
        user: Option<Arc<str>>,
        /// Its place among those of its client.
        share: Share,
    },
    /// Pass bytes to a connection that has switched protocols.
    Switched {
        /// The origin's side.
        origin: Box<Stream>,
        /// What the origin has sent behind its answer.
        early: Bytes,
        /// Ends with the exchange.
        departure: Option<Departure>,
    },
}

/// Reads authority-form (RFC 9112 section 3.2.3). A `Host` field is not looked at: many clients send none, or another.
///
/// # Errors
/// The target is not a host and a port, or the request has a body, which CONNECT cannot.
pub fn target(request: &Request<Incoming>) -> Result<Authority, Error> {
    let uri = request.uri();
    let headers = request.headers();
    if headers.contains_key(CONTENT_LENGTH) || headers.contains_key(TRANSFER_ENCODING) {
        return Err(Error::Malformed("CONNECT must not have a body"));
    }
    if uri.scheme().is_some() || uri.path_and_query().is_some_and(|p| !p.as_str().is_empty()) {
        return Err(Error::Malformed(
            "CONNECT takes a host and a port, not a URL",
        ));
    }
    let text = uri.authority().map_or("", |a| a.as_str());
    Authority::parse(text, None)
        .map_err(|_| Error::Malformed("CONNECT takes a host and a port, as in example.org:443"))
}

/// Decides on a tunnel and, if it may be, leaves the promise with `downstream`.
///
/// # Errors
/// Why there is no tunnel.
pub async fn open(
    downstream: &Downstream,
    rules: &Rules,
    authority: Authority,
    user: Option<Arc<str>>,
    record: &mut Record,
) -> Result<Response<Answer>, Error> {
    let proxy = &downstream.proxy;
    let port_allowed = rules.settings().connect_ports.contains(&authority.port);
    if let Some(destination) = rules.destinations.governing(&authority.host) {
        record.governed_by(destination.clone());
        if !port_allowed {
            return Err(Error::PortDenied);
        }
        let tls = rules.leaves.server_config(&authority.host).map_err(|e| {
            if proxy.unsigned.is_due() {
                tracing::warn!(host = %authority.host, "no leaf: {e}");
            }
            if e.is_out_of_time() {
                Error::CaOutOfTime
            } else {
                Error::NotCovered
            }
        })?;
        downstream.promise(Plan::Intercept {
            authority,
            tls,
            share: share(downstream, user.as_ref())?,
            user,
        });
        return Ok(established());
    }
    downstream.ungoverned_allowed(rules, &authority)?;
    if !port_allowed {
        return Err(Error::PortDenied);
    }
    let share = share(downstream, user.as_ref())?;
    let started = Instant::now();
    let origin = proxy.upstream.tunnel(&authority).await;
    record.connected(started.elapsed());
    let origin = origin?;
    let address = origin.peer_addr().map_err(|_| Error::Unreachable)?;
    downstream.promise(Plan::Relay {
        origin,
        address,
        authority,
        user,
        share,
    });
    Ok(established())
}

/// One more tunnel for this client.
fn share(downstream: &Downstream, user: Option<&Arc<str>>) -> Result<Share, Error> {
    let client = downstream.client_key(user);
    downstream.proxy.tunnels.take(client).ok_or(Error::Share)
}

/// Exactly 200: several clients take no other 2xx. The codec adds no length and no body to it.
fn established() -> Response<Answer> {
    let mut response = Response::new(Answer::text(""));
    response
        .extensions_mut()
        .insert(ReasonPhrase::from_static(b"Connection established"));
    response
}
