//! The rules in force: who may use the proxy for what, and who governs which host.
//!
//! One value that is replaced as a whole, so that each request is judged by one configuration from its first byte to its
//! last. A tunnel may outlive the rules that it was opened under, and is then judged by the new ones. How rules come to
//! be is for `app.rs` and `reload.rs` to know.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    authority::Authority,
    ca::Leaves,
    config::{self, Config, Ungoverned},
    destination::Destinations,
    error::Error,
    policy,
    proxy::auth::Credentials,
    upstream::Upstream,
};

/// How long a tunnel that the rules no longer allow stays open: what is about to end by itself may do so, and a request
/// that comes meanwhile has an answer that says why.
pub const MOMENT: Duration = Duration::from_secs(3);

/// The rules, as of the last reading of the configuration.
#[derive(Debug)]
pub struct Rules {
    /// The configuration in force: the file as it was read last, but for what only a new start can change.
    pub config: Config,
    /// Who governs what.
    pub destinations: Destinations,
    /// For intercepted tunnels.
    pub leaves: Arc<Leaves>,
    /// Who may use the proxy by name.
    pub credentials: Option<Arc<Credentials>>,
}

/// A tunnel, for rules to judge that are newer than it.
#[derive(Clone, Copy, Debug)]
pub struct Opened<'t> {
    /// Who opened it.
    pub client: IpAddr,
    /// By which name.
    pub user: Option<&'t Arc<str>>,
    /// What for.
    pub authority: &'t Authority,
    /// What goes on in it.
    pub kind: Kind,
}

/// What goes on in a tunnel.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Its requests are read and paced.
    Read,
    /// Bytes pass, unread, to and from this address.
    Relayed(SocketAddr),
    /// A request switched to another protocol, after its slot.
    Switched,
}

/// What becomes of a tunnel under new rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// It stays.
    Keep,
    /// It would be another kind of tunnel today, and should be opened anew; what it carries is allowed.
    Reopen,
    /// It would be refused today.
    Refuse(Error),
}

impl Ruling {
    /// Whether requests on it may go on.
    ///
    /// # Errors
    /// Why it would be refused.
    pub fn allowed(self) -> Result<(), Error> {
        match self {
            Ruling::Keep | Ruling::Reopen => Ok(()),
            Ruling::Refuse(e) => Err(e),
        }
    }
}

impl Rules {
    /// `[proxy]`
    pub fn settings(&self) -> &config::Proxy {
        &self.config.proxy
    }

    /// Judges a tunnel that was opened under rules that may have been others.
    pub fn judge(&self, opened: &Opened<'_>, upstream: &Upstream) -> Ruling {
        match self.allows(opened, upstream) {
            Err(e) => Ruling::Refuse(e),
            Ok(()) => {
                let governed = self.destinations.governing(&opened.authority.host);
                match (opened.kind, governed.is_some()) {
                    (Kind::Read, false) | (Kind::Relayed(_), true) => Ruling::Reopen,
                    _ => Ruling::Keep,
                }
            }
        }
    }

    fn allows(&self, opened: &Opened<'_>, upstream: &Upstream) -> Result<(), Error> {
        self.admit(opened.client)?;
        match (&self.credentials, opened.user) {
            (Some(credentials), Some(user)) if !credentials.stand(user) => {
                return Err(Error::Withdrawn);
            }
            // A switched request outside a tunnel does not say whose it was.
            (Some(_), None) if !matches!(opened.kind, Kind::Switched) => {
                return Err(Error::Withdrawn);
            }
            _ => {}
        }
        let governed = self.destinations.governing(&opened.authority.host);
        // Requests outside tunnels, and so what they switch to, may name any port of a governed host and what `resolve` names.
        let limited = match opened.kind {
            Kind::Switched => governed.is_none() && !upstream.is_listed(opened.authority),
            Kind::Read | Kind::Relayed(_) => true,
        };
        if limited
            && !self
                .settings()
                .connect_ports
                .contains(&opened.authority.port)
        {
            return Err(Error::PortDenied);
        }
        if governed.is_none() && self.settings().ungoverned == Ungoverned::Deny {
            return Err(Error::HostDenied);
        }
        match opened.kind {
            Kind::Relayed(address) => upstream.check_reached(opened.authority, address),
            Kind::Read | Kind::Switched => Ok(()),
        }
    }

    /// Whether a client with this address may use the proxy.
    ///
    /// # Errors
    /// [`Error::ClientDenied`].
    pub fn admit(&self, client: IpAddr) -> Result<(), Error> {
        if policy::admits(&self.settings().allow_clients, client) {
            Ok(())
        } else {
            Err(Error::ClientDenied)
        }
    }
}

/// Where the rules in force are to be had.
#[derive(Debug)]
pub struct InForce(watch::Sender<Arc<Rules>>);

impl InForce {
    /// With the first ones.
    pub fn new(rules: Rules) -> Self {
        InForce(watch::Sender::new(Arc::new(rules)))
    }

    /// Those of now. Take them once for a request: the next call may give others.
    pub fn now(&self) -> Arc<Rules> {
        self.0.borrow().clone()
    }

    /// From now on these; open tunnels are judged by them.
    pub fn replace(&self, rules: Rules) {
        self.0.send_replace(Arc::new(rules));
    }

    /// Resolves when the rules have not allowed this tunnel for a [`MOMENT`].
    pub async fn outlived(&self, opened: &Opened<'_>, upstream: &Upstream) {
        let mut changes = self.0.subscribe();
        loop {
            // Seen before it is judged: a change that comes in between is not missed. Nor is one from before the tunnel
            // came here.
            let rules = changes.borrow_and_update().clone();
            let kept = rules.judge(opened, upstream) == Ruling::Keep;
            drop(rules);
            if kept {
                if changes.changed().await.is_err() {
                    return std::future::pending().await;
                }
                continue;
            }
            tokio::time::sleep(MOMENT).await;
            if self.now().judge(opened, upstream) != Ruling::Keep {
                return;
            }
        }
    }
}
