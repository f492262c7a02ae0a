//! Towards the origin: a connection is first made [`Ready`], resolved, connected and past its TLS handshake, and then
//! carries one request at a time. Of pacing this module knows nothing.
//!
//! A connection is driven by whoever holds it: the task of the request that uses it, or the pool's. No task of its own
//! stands between the origin's bytes and the client's.

pub mod dial;
pub mod exchange;
pub mod pool;
pub mod read_ahead;
pub mod stream;

use std::{
    hash::{BuildHasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock, PoisonError, RwLock},
    time::Duration,
};

use crate::{
    authority::{Authority, Host},
    config,
    error::Error,
    policy::Reach,
    upstream::{dial::Dialer, exchange::Ready, pool::Pool, stream::Stream},
};

/// DNS, TCP and TLS together may take this long.
const READY_DEADLINE: Duration = Duration::from_secs(10);

/// Plain or TLS, the connection's half of a URL's scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `http`
    Http,
    /// `https`
    Https,
}

impl Scheme {
    /// The port that a URL of this scheme means when it names none.
    pub fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }

    /// As it stands in a URL.
    pub fn as_str(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }
}

/// Whom a request is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Whether TLS is spoken.
    pub scheme: Scheme,
    /// Host and port.
    pub authority: Authority,
}

impl Target {
    /// The same number for the same target, in this process alone: nobody can choose two that collide.
    pub fn key(&self) -> u64 {
        static KEYS: OnceLock<RandomState> = OnceLock::new();
        KEYS.get_or_init(RandomState::new).hash_one(self)
    }
}

/// Makes connections and keeps those that are idle.
#[derive(Debug)]
pub struct Upstream {
    way: RwLock<Arc<Way>>,
}

/// How origins are reached at the moment. Connections of one way are never used on another: they may lead where the new
/// configuration does not.
#[derive(Debug)]
struct Way {
    dialer: Dialer,
    pool: Arc<Pool>,
}

/// Tries to read the roots that `config` names, for `paceline check`.
///
/// # Errors
/// The file of `extra_roots` cannot be read, or has no root in it.
pub fn check_roots(config: &config::Upstream) -> Result<(), config::Complaint> {
    dial::roots(config).map(drop)
}

impl Upstream {
    /// With the roots and overrides of the configuration; `reach` says which addresses may be dialled.
    ///
    /// # Errors
    /// A file with roots cannot be read, or no root is to be had at all. The text says which and what to do.
    pub fn new(config: &config::Upstream, reach: Reach) -> Result<Self, String> {
        let dialer = Dialer::new(config, reach)?;
        Ok(Upstream {
            way: RwLock::new(Way::new(dialer)),
        })
    }

    /// Dials by `dialer` from now on. Requests under way keep their connections; idle ones are kept only when nothing
    /// has changed.
    pub fn redirect(&self, dialer: Dialer) {
        if !self.way().dialer.is_like(&dialer) {
            *self.way.write().unwrap_or_else(PoisonError::into_inner) = Way::new(dialer);
        }
    }

    fn way(&self) -> Arc<Way> {
        self.way
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether this address may be asked for by number: only if the operator listed it, by itself or in `resolve`.
    ///
    /// # Errors
    /// [`Error::Loop`] for our own listeners, else [`Error::AddressDenied`].
    pub fn check_literal(&self, ip: IpAddr, authority: &Authority) -> Result<(), Error> {
        self.way().dialer.check_literal(ip, authority)
    }

    /// Whether `authority`, which was reached at `address`, could be reached there now.
    ///
    /// # Errors
    /// As [`Upstream::check_literal`].
    pub fn check_reached(&self, authority: &Authority, address: SocketAddr) -> Result<(), Error> {
        self.way().dialer.check_reached(authority, address)
    }

    /// Whether it is by the operator's word that `authority` can be reached at all: `resolve` names it, or its address has to
    /// be in `allow_upstreams`, being a literal or this machine's own.
    pub fn is_listed(&self, authority: &Authority) -> bool {
        let listed = match &authority.host {
            Host::Ip(_) => true,
            Host::Name(name) => dial::is_localhost(name),
        };
        listed || self.way().dialer.is_overridden(authority)
    }

    /// An idle connection to `target`, if there is one that still lives.
    pub fn idle(&self, target: &Target) -> Option<Ready> {
        self.way().pool.take(target)
    }

    /// A connection to `target` that a request can be written to: an idle one, or a new one.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn ready(&self, target: &Target) -> Result<Ready, Error> {
        match self.idle(target) {
            Some(ready) => Ok(ready),
            None => self.fresh(target).await,
        }
    }

    /// A new connection to `target`.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn fresh(&self, target: &Target) -> Result<Ready, Error> {
        let way = self.way();
        let made = async {
            let stream = way.dialer.stream(target).await?;
            Ok(Ready::new(stream, target.clone(), way.pool.clone()))
        };
        // Boxed: a request that waits for its turn would have room for a dialling, which most never do.
        Box::pin(tokio::time::timeout(READY_DEADLINE, made))
            .await
            .unwrap_or(Err(Error::ConnectTimeout))
    }

    /// A bare TCP connection, for a tunnel that is not looked into.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn tunnel(&self, authority: &Authority) -> Result<tokio::net::TcpStream, Error> {
        let target = Target {
            scheme: Scheme::Http,
            authority: authority.clone(),
        };
        let way = self.way();
        let made = Box::pin(way.dialer.stream(&target));
        match tokio::time::timeout(READY_DEADLINE, made).await {
            Ok(Ok(Stream::Plain(tcp))) => Ok(tcp),
            Ok(Ok(Stream::Tls(_))) => Err(Error::Tls),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(Error::ConnectTimeout),
        }
    }
}

impl Way {
    fn new(dialer: Dialer) -> Arc<Self> {
        Arc::new(Way {
            dialer,
            pool: Pool::start(),
        })
    }
}
