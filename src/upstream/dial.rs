//! From an authority to a byte stream: resolve, check the address, connect, and speak TLS.
//!
//! The address that is checked is the one that is dialled: the resolver hands on only addresses that may be reached,
//! and hyper-util's connector races those (happy eyeballs, RFC 8305). Entries of `resolve` are the operator's word and
//! are not checked.

use std::{
    collections::BTreeMap,
    error::Error as StdError,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::client::legacy::connect::{HttpConnector, dns::Name};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio_rustls::TlsConnector;
use tower_service::Service;

use crate::{
    authority::{Authority, Host},
    config,
    error::Error,
    policy::Reach,
    tls,
    upstream::{Scheme, Target, read_ahead::ReadAhead, stream::Stream},
};

/// How long the resolver may take.
const DNS_DEADLINE: Duration = Duration::from_secs(5);
/// How many addresses of a name are tried.
const ADDRESSES_TRIED: usize = 4;
/// How long the first address family is given before the other is tried too (RFC 8305 section 5).
const HAPPY_EYEBALLS: Duration = Duration::from_millis(250);

/// Opens streams to origins.
#[derive(Debug)]
pub struct Dialer {
    tls: Arc<ClientConfig>,
    roots: Arc<RootCertStore>,
    overrides: BTreeMap<Authority, Authority>,
    reach: Reach,
}

impl Dialer {
    /// Reads the roots.
    ///
    /// # Errors
    /// A file cannot be read, or there is no root at all.
    pub fn new(config: &config::Upstream, reach: Reach) -> Result<Self, String> {
        let roots =
            roots(config).map_err(|c| format!("upstream.extra_roots: {}; {}", c.wrong, c.fix))?;
        let roots = Arc::new(roots);
        let mut tls = ClientConfig::builder_with_provider(Arc::new(tls::provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Dialer {
            tls: Arc::new(tls),
            roots,
            overrides: config.resolve.clone(),
            reach,
        })
    }

    /// Whether the operator listed this address, by itself or in `resolve`; our own listeners are no address to ask for.
    ///
    /// # Errors
    /// [`Error::Loop`] or [`Error::AddressDenied`].
    pub fn check_literal(&self, ip: IpAddr, authority: &Authority) -> Result<(), Error> {
        if self.is_overridden(authority) {
            return Ok(());
        }
        match self.reach.check(SocketAddr::new(ip, authority.port)) {
            Err(Error::Loop) => Err(Error::Loop),
            _ if self.reach.is_listed(ip) => Ok(()),
            _ => Err(Error::AddressDenied),
        }
    }

    /// Whether the operator said where this host and port are.
    pub fn is_overridden(&self, authority: &Authority) -> bool {
        self.overrides.contains_key(authority)
    }

    /// Whether it leads every authority where `other` does, and trusts the same.
    pub fn is_like(&self, other: &Dialer) -> bool {
        self.overrides == other.overrides
            && self.reach.listed() == other.reach.listed()
            && self.roots.roots == other.roots.roots
    }

    /// Whether `authority`, which was reached at `address`, could be reached there now.
    ///
    /// # Errors
    /// As [`Dialer::check_literal`].
    pub fn check_reached(&self, authority: &Authority, address: SocketAddr) -> Result<(), Error> {
        match authority.host {
            _ if self.is_overridden(authority) => Ok(()),
            Host::Ip(ip) => self.check_literal(ip, authority),
            Host::Name(_) => self.reach.check(address),
        }
    }

    /// A stream to `target`, TLS included.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn stream(&self, target: &Target) -> Result<Stream, Error> {
        let tcp = self.connect(&target.authority).await?;
        if target.scheme == Scheme::Http {
            return Ok(Stream::Plain(tcp));
        }
        let name = match &target.authority.host {
            Host::Name(name) => ServerName::try_from(name.to_string()).map_err(|_| {
                Error::Malformed("the host is no name that TLS can verify; use its real name")
            })?,
            Host::Ip(ip) => ServerName::from(*ip),
        };
        let tls = TlsConnector::from(self.tls.clone())
            .connect(name, ReadAhead::new(tcp))
            .await
            .map_err(|e| of_tls(&e))?;
        Ok(Stream::Tls(Box::new(tls)))
    }

    async fn connect(&self, authority: &Authority) -> Result<tokio::net::TcpStream, Error> {
        let (dialled, trusted) = match self.overrides.get(authority) {
            Some(instead) => (instead, true),
            None => (authority, false),
        };
        if let (Host::Ip(ip), false) = (&dialled.host, trusted) {
            self.reach.check(SocketAddr::new(*ip, dialled.port))?;
        }
        let uri = Uri::builder()
            .scheme("http")
            .authority(dialled.to_string())
            .path_and_query("/")
            .build();
        let uri =
            uri.map_err(|_| Error::Malformed("the host cannot be dialled; use its real name"))?;
        let reach = (!trusted).then(|| self.reach.clone());
        let mut connector = HttpConnector::new_with_resolver(Checked {
            reach,
            port: dialled.port,
        });
        connector.set_nodelay(true);
        connector.set_happy_eyeballs_timeout(Some(HAPPY_EYEBALLS));
        let io = connector.call(uri).await.map_err(|e| of_connect(&e))?;
        Ok(io.into_inner())
    }
}

pub(super) fn roots(config: &config::Upstream) -> Result<RootCertStore, config::Complaint> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(system.certs);
    if roots.is_empty() {
        // A container without a system store, say. These are Mozilla's roots as of the crate's release.
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    if let Some(file) = &config.extra_roots {
        let wrong = |e: &dyn fmt::Display| {
            config::Complaint::new(
                format!("{}: {e}", file.display()),
                "name a file of PEM certificates",
            )
        };
        let before = roots.len();
        for cert in CertificateDer::pem_file_iter(file).map_err(|e| wrong(&e))? {
            roots
                .add(cert.map_err(|e| wrong(&e))?)
                .map_err(|e| wrong(&e))?;
        }
        if roots.len() == before {
            return Err(wrong(&"no certificate in it"));
        }
    }
    Ok(roots)
}

/// The system's resolver, handing on only what may be reached.
#[derive(Clone)]
struct Checked {
    /// `None` for entries of `resolve`.
    reach: Option<Reach>,
    port: u16,
}

impl Service<Name> for Checked {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Checked { reach, port } = self.clone();
        Box::pin(async move {
            let Some(reach) = reach else {
                return Ok(lookup(name.as_str(), port).await?.into_iter());
            };
            let found = match name.as_str() {
                name if is_localhost(name) => LOCALHOST.map(|ip| (ip, port).into()).to_vec(),
                name => match listed_in_hosts(name).await {
                    found if !found.is_empty() => {
                        found.into_iter().map(|ip| (ip, port).into()).collect()
                    }
                    // The trailing dot keeps the resolver from trying the machine's search domains: with one of them a
                    // name of one label could become a governed host's, and go unpaced.
                    _ => lookup(&format!("{name}."), port).await?,
                },
            };
            let mut denied = None;
            let mut allowed = Vec::with_capacity(found.len());
            for address in found {
                match reach.check(address) {
                    Ok(()) => allowed.push(address),
                    Err(e) => denied = Some(e),
                }
            }
            allowed.truncate(ADDRESSES_TRIED);
            if allowed.is_empty() {
                Err(denied.unwrap_or(Error::Dns))
            } else {
                Ok(allowed.into_iter())
            }
        })
    }
}

async fn lookup(name: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    let found = tokio::time::timeout(DNS_DEADLINE, tokio::net::lookup_host((name, port)));
    let found = found.await.map_err(|_| Error::DnsTimeout)?;
    Ok(found.map_err(|_| Error::Dns)?.collect())
}

/// What `/etc/hosts` says of a name (hosts(5)). The C library compares its names letter by letter, and would not find one
/// that is asked for with a trailing dot.
async fn listed_in_hosts(name: &str) -> Vec<IpAddr> {
    match tokio::fs::read_to_string("/etc/hosts").await {
        Ok(text) => addresses_of(name, &text),
        Err(_) => Vec::new(),
    }
}

fn addresses_of(name: &str, hosts: &str) -> Vec<IpAddr> {
    let of_line = |line: &str| {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_ascii_whitespace();
        let address = words.next()?.parse().ok()?;
        words
            .any(|listed| listed.eq_ignore_ascii_case(name))
            .then_some(address)
    };
    hosts.lines().filter_map(of_line).collect()
}

/// RFC 6761 section 6.3: these names are this machine, and no resolver is to be asked for them.
pub fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix("localhost");
    name.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

const LOCALHOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Finds the cause of a failed connection in its chain of sources.
fn of_connect(e: &(dyn StdError + 'static)) -> Error {
    let mut cause = Some(e);
    while let Some(c) = cause {
        if let Some(ours) = c.downcast_ref::<Error>() {
            return *ours;
        }
        if let Some(io) = c.downcast_ref::<io::Error>() {
            return match io.kind() {
                io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => {
                    Error::ConnectRefused
                }
                io::ErrorKind::TimedOut => Error::ConnectTimeout,
                _ => Error::Unreachable,
            };
        }
        cause = c.source();
    }
    Error::Unreachable
}

fn of_tls(e: &io::Error) -> Error {
    match e
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>())
    {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
            Error::Certificate
        }
        Some(_) => Error::Tls,
        None => Error::Tls,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

impl StdError for Error {}

#[cfg(test)]
mod tests {
    use rustls::CipherSuite;

    use super::*;

    #[test]
    fn origins_that_leave_the_choice_to_us_speak_aes_128() {
        let config = config::Config::built_in();
        let dialer = Dialer::new(&config.upstream, Reach::new(&[])).unwrap();
        let suites = &dialer.tls.crypto_provider().cipher_suites;
        let tls13 = suites.iter().find(|s| s.tls13().is_some()).unwrap();
        assert_eq!(tls13.suite(), CipherSuite::TLS13_AES_128_GCM_SHA256);
    }

    #[test]
    fn the_hosts_file_is_read_as_the_c_library_reads_it() {
        let text = "# our own\n127.0.0.1\tlocalhost\n10.0.0.7 db.internal  DB # the database\n\
                    fd00::7 db.internal\nnonsense db.internal\n10.0.0.8";
        let found = |name| addresses_of(name, text);
        let db: Vec<IpAddr> = ["10.0.0.7", "fd00::7"].map(|a| a.parse().unwrap()).into();
        assert_eq!(found("db.internal"), db);
        assert_eq!(found("db"), db[..1]);
        for nobody in ["internal", "db.internal.", "the", ""] {
            assert_eq!(found(nobody), [] as [IpAddr; 0], "{nobody}");
        }
    }

    #[test]
    fn names_under_localhost_are_this_machine_and_no_others() {
        for name in ["localhost", "a.localhost", "b.a.localhost"] {
            assert!(is_localhost(name), "{name}");
        }
        for name in ["notlocalhost", "localhost.test", "a.localhosts", "local"] {
            assert!(!is_localhost(name), "{name}");
        }
    }
}
