//! The TLS settings for each host, with a leaf minted once per name: bounded, single-flight, renewed in time.
//!
//! Doesn't know which hosts are governed: it serves what the issuer covers.

use std::{
    fmt,
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use lru::LruCache;
use rustls::{
    ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs::Ticketer},
    server::{ProducesTickets, ServerSessionMemoryCache, StoresServerSessions},
    sign::SingleCertAndKey,
    version::{TLS12, TLS13},
};

use super::{
    CaError, Issuer,
    leaf::{LeafKey, mint},
    resumption::{BoundToHost, Comeback},
};
use crate::{authority::Host, tls};

/// The most names whose leaf is kept. An entry takes about 3 KiB, so all of them take 12 MiB.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// The most sessions kept for TLS 1.2 clients without tickets; a session is under 300 bytes.
const SESSIONS: usize = 1024;
/// Two would let a client open two tunnels at once from one handshake; clients that do so ask again anyway, and each
/// ticket is 220 bytes in every new tunnel.
const TICKETS: usize = 1;

/// Mints and keeps the leaves of one issuer, with the TLS settings that go with them.
pub struct Leaves {
    issuer: Arc<Issuer>,
    key: LeafKey,
    provider: Arc<CryptoProvider>,
    tickets: Arc<dyn ProducesTickets>,
    sessions: Arc<dyn StoresServerSessions>,
    /// One lock for all: it is held for a look-up, some 50 ns, never while a leaf is minted.
    entries: Mutex<LruCache<Host, Arc<Entry>>>,
    minted: AtomicU64,
}

/// The place of one name. Whoever finds it empty or out of date mints, while others of that name wait on the lock
/// for the 20 to 50 microseconds that it takes; other names are not held up.
#[derive(Default)]
struct Entry {
    current: Mutex<Option<Served>>,
}

struct Served {
    with_ticket: Arc<ServerConfig>,
    without: Arc<ServerConfig>,
    comeback: Arc<Comeback>,
    not_before: SystemTime,
    renew_at: SystemTime,
}

impl Served {
    fn config(&self) -> Arc<ServerConfig> {
        match self.comeback.is_likely() {
            true => self.with_ticket.clone(),
            false => self.without.clone(),
        }
    }
}

impl Leaves {
    /// Starts with no leaf, a fresh leaf key and fresh ticket keys (rotated every six hours, never on disk).
    ///
    /// # Errors
    /// When the system's random source fails.
    pub fn new(issuer: Arc<Issuer>) -> Result<Leaves, CaError> {
        Ok(Leaves {
            issuer,
            key: LeafKey::generate()?,
            provider: Arc::new(tls::provider()),
            tickets: Ticketer::new()?,
            sessions: ServerSessionMemoryCache::new(SESSIONS),
            entries: Mutex::new(LruCache::new(CAPACITY)),
            minted: AtomicU64::new(0),
        })
    }

    /// The TLS settings for tunnels to `host`, as of the system's time: TLS 1.2 and 1.3, ALPN `http/1.1` only.
    ///
    /// # Errors
    /// A host outside the issuer's constraints; an issuer before or after its time.
    pub fn server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, CaError> {
        self.server_config_at(host, SystemTime::now())
    }

    /// As [`Leaves::server_config`], at a given time.
    ///
    /// # Errors
    /// As [`Leaves::server_config`].
    pub fn server_config_at(
        &self,
        host: &Host,
        now: SystemTime,
    ) -> Result<Arc<ServerConfig>, CaError> {
        let entry = self.entry(host)?;
        let mut current = lock(&entry.current);
        // A leaf from the future is what a clock that was set back leaves behind.
        if let Some(served) = current
            .as_ref()
            .filter(|served| served.not_before <= now && now < served.renew_at)
        {
            return Ok(served.config());
        }
        let served = self.serve(host, now)?;
        let config = served.config();
        *current = Some(served);
        Ok(config)
    }

    /// The issuer that signs.
    pub fn issuer(&self) -> &Arc<Issuer> {
        &self.issuer
    }

    /// How many leaves have been signed since the start.
    pub fn minted(&self) -> u64 {
        self.minted.load(Ordering::Relaxed)
    }

    /// How many names have a place in the cache.
    pub fn len(&self) -> usize {
        lock(&self.entries).len()
    }

    /// Whether no name has a place in the cache.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn entry(&self, host: &Host) -> Result<Arc<Entry>, CaError> {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get(host) {
            return Ok(entry.clone());
        }
        // Asked only here, because only covered names get in; and before they do, because names that can never be
        // served must not push out others.
        if !self.issuer.covers(host) {
            return Err(CaError::NotCovered { host: host.clone() });
        }
        let entry = Arc::new(Entry::default());
        entries.put(host.clone(), entry.clone());
        Ok(entry)
    }

    fn serve(&self, host: &Host, now: SystemTime) -> Result<Served, CaError> {
        self.issuer.check_time(now)?;
        let leaf = mint(host, &self.issuer, &self.key, now)?;
        self.minted.fetch_add(1, Ordering::Relaxed);

        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13, &TLS12])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(leaf.certified)));
        // HTTP/2 buys nothing for pacing; every client but gRPC's falls back.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.ignore_client_order = true;
        let comeback = Arc::<Comeback>::default();
        let bound = Arc::new(BoundToHost::new(
            host,
            self.tickets.clone(),
            self.sessions.clone(),
            comeback.clone(),
        ));
        config.ticketer = bound.clone();
        config.session_storage = bound;
        config.send_tls13_tickets = 0;
        let without = Arc::new(config.clone());
        config.send_tls13_tickets = TICKETS;
        Ok(Served {
            with_ticket: Arc::new(config),
            without,
            comeback,
            not_before: leaf.not_before,
            renew_at: leaf.renew_at,
        })
    }
}

impl fmt::Debug for Leaves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaves")
            .field("issuer", &self.issuer)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Locks; a thread that panicked has left nothing half done, because entries are set in one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread, time::Duration};

    use rustls::{
        ClientConfig, HandshakeKind, ProtocolVersion, SupportedProtocolVersion,
        pki_types::CertificateDer,
    };

    use super::*;
    use crate::ca::{
        leaf::LEAF_LIFE,
        testing::{Handshake, TestCa, client, handshake, host},
    };

    const HOUR: Duration = Duration::from_secs(3600);

    fn leaf_of(ca: &TestCa, config: &Arc<ServerConfig>, name: &str) -> CertificateDer<'static> {
        crate::ca::testing::chain(config, ca.client(), name)[0].clone()
    }

    #[test]
    fn a_name_is_minted_once_and_again_after_two_thirds_of_its_life() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        let host = host("example.com");
        let renew_at = SystemTime::now();
        let start = renew_at - LEAF_LIFE * 2 / 3;

        let first = leaves.server_config_at(&host, start).unwrap();
        let last_of_first = leaves
            .server_config_at(&host, renew_at - Duration::from_nanos(1))
            .unwrap();
        assert!(Arc::ptr_eq(&first, &last_of_first));
        assert_eq!(leaves.minted(), 1);

        let second = leaves.server_config_at(&host, renew_at).unwrap();
        assert_eq!(leaves.minted(), 2);
        assert_ne!(
            leaf_of(&ca, &first, "example.com"),
            leaf_of(&ca, &second, "example.com")
        );
    }

    #[test]
    fn a_clock_that_was_set_back_gets_a_leaf_that_is_valid_by_it() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        let now = SystemTime::now();
        leaves.server_config_at(&host("example.com"), now).unwrap();
        leaves
            .server_config_at(&host("example.com"), now - HOUR / 2)
            .unwrap();
        assert_eq!(leaves.minted(), 1, "the leaf is back-dated by an hour");
        leaves
            .server_config_at(&host("example.com"), now - 2 * HOUR)
            .unwrap();
        assert_eq!(leaves.minted(), 2);
    }

    #[test]
    fn many_threads_that_want_one_name_at_once_mint_it_once() {
        const THREADS: usize = 16;
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        for round in 0..50 {
            let host = host(&format!("host-{round}.example.com"));
            let barrier = Barrier::new(THREADS);
            let configs: Vec<_> = thread::scope(|scope| {
                let ask = || {
                    barrier.wait();
                    leaves.server_config(&host).unwrap()
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(ask)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect()
            });
            assert!(
                configs
                    .iter()
                    .all(|config| Arc::ptr_eq(&config.cert_resolver, &configs[0].cert_resolver))
            );
            assert_eq!(leaves.minted(), round + 1);
        }
    }

    #[test]
    fn the_cache_is_bounded_and_forgets_the_name_unused_for_longest() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        let now = SystemTime::now();
        let name = |number: usize| host(&format!("{number}.example.com"));
        for number in 0..CAPACITY.get() {
            leaves.server_config_at(&name(number), now).unwrap();
        }
        leaves.server_config_at(&name(0), now).unwrap();
        leaves.server_config_at(&name(CAPACITY.get()), now).unwrap();
        assert_eq!(leaves.len(), CAPACITY.get());

        let minted = leaves.minted();
        leaves.server_config_at(&name(0), now).unwrap();
        assert_eq!(leaves.minted(), minted, "used lately, so kept");
        leaves.server_config_at(&name(1), now).unwrap();
        assert_eq!(
            leaves.minted(),
            minted + 1,
            "unused for longest, so forgotten"
        );
    }

    #[test]
    fn a_host_outside_the_constraints_is_refused_and_takes_no_place() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        for name in ["example.org", "notexample.com", "192.0.2.1", "::1"] {
            assert!(
                leaves
                    .server_config(&host(name))
                    .unwrap_err()
                    .is_not_covered(),
                "{name}"
            );
        }
        assert!(leaves.is_empty());
        assert_eq!(leaves.minted(), 0);
    }

    #[test]
    fn an_issuer_out_of_its_time_mints_nothing() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        let certificate = ca.issuer.certificate();
        let host = host("example.com");
        for now in [
            certificate.not_after,
            certificate.not_before - Duration::from_secs(1),
        ] {
            assert!(
                leaves
                    .server_config_at(&host, now)
                    .unwrap_err()
                    .is_out_of_time()
            );
        }
        leaves
            .server_config_at(&host, certificate.not_before)
            .unwrap();
        leaves
            .server_config_at(&host, certificate.not_after - Duration::from_secs(1))
            .unwrap();
    }

    #[test]
    fn only_http_1_1_is_offered_and_http_2_alone_is_refused() {
        let ca = TestCa::new(&["example.com"]);
        let config = ca.leaves().server_config(&host("example.com")).unwrap();
        let alpn = |protocols: &[&[u8]]| {
            let mut client = ca.client();
            client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            handshake(&Arc::new(client), config.clone(), "example.com")
        };
        let both = alpn(&[b"h2", b"http/1.1"]).unwrap();
        assert_eq!(both.server.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert_eq!(alpn(&[]).unwrap().server.alpn_protocol(), None);
        assert!(matches!(
            alpn(&[b"h2"]),
            Err(rustls::Error::NoApplicationProtocol)
        ));
    }

    /// Shakes hands for `first`, then with the same client's sessions for `second`, and says how the second went.
    ///
    /// `name` is what the client believes to connect to both times, so that its own care does not hide ours.
    fn resumed(
        version: &'static SupportedProtocolVersion,
        first: &str,
        second: &str,
        name: &str,
    ) -> HandshakeKind {
        let ca = TestCa::new(&["example.com", "192.0.2.7", "192.0.2.8"]);
        let leaves = ca.leaves();
        // The certificate is for another name when the hosts differ; only resumption is at issue here.
        let mut config = client(&[], &[version]);
        config
            .dangerous()
            .set_certificate_verifier(Arc::new(trusting::AnyCertificate));
        let config = Arc::new(config);
        let once = |to: &str| {
            let server = leaves.server_config(&host(to)).unwrap();
            handshake(&config, server, name)
                .unwrap()
                .server
                .handshake_kind()
                .unwrap()
        };
        assert_eq!(once(first), HandshakeKind::Full);
        once(second)
    }

    #[test]
    fn a_session_resumes_in_another_tunnel_to_its_host_and_in_none_to_another() {
        for version in [&TLS13, &TLS12] {
            let (a, b) = ("a.example.com", "b.example.com");
            assert_eq!(resumed(version, a, a, a), HandshakeKind::Resumed);
            assert_eq!(resumed(version, a, b, a), HandshakeKind::Full);
            // With an address as its name the client sends no SNI.
            let (a, b) = ("192.0.2.7", "192.0.2.8");
            assert_eq!(resumed(version, a, a, a), HandshakeKind::Resumed);
            assert_eq!(resumed(version, a, b, a), HandshakeKind::Full);
        }
    }

    #[test]
    fn a_client_that_comes_back_always_resumes_and_others_are_soon_given_few_tickets() {
        let ca = TestCa::new(&["example.com"]);
        let leaves = ca.leaves();
        let (forgetful, faithful) = (|| Arc::new(ca.client()), Arc::new(ca.client()));
        let once = |client: &Arc<ClientConfig>| {
            let server = leaves.server_config(&host("example.com")).unwrap();
            handshake(client, server, "example.com").unwrap()
        };
        let kind = |done: Handshake| done.server.handshake_kind().unwrap();
        assert_eq!(kind(once(&faithful)), HandshakeKind::Full);
        for _ in 0..30 {
            assert_eq!(kind(once(&faithful)), HandshakeKind::Resumed);
        }
        let tickets = |n: usize| {
            let received = (0..n).map(|_| once(&forgetful()).client.tls13_tickets_received());
            received.sum::<u32>()
        };
        assert_eq!(tickets(8), 8);
        assert_eq!(tickets(80), 10);
        // The ticket that it has been given is good for ever so many of theirs, and it brings the next.
        for _ in 0..30 {
            assert_eq!(kind(once(&faithful)), HandshakeKind::Resumed);
        }
    }

    #[test]
    fn a_ticket_from_before_a_renewal_or_a_restart_never_breaks_a_handshake() {
        let ca = TestCa::new(&["example.com"]);
        let client = Arc::new(ca.client());
        let (before, after) = (ca.leaves(), ca.leaves());
        let host = host("example.com");
        let now = SystemTime::now();
        let kind = |config| {
            let done = handshake(&client, config, "example.com").unwrap();
            assert_eq!(
                done.client.protocol_version(),
                Some(ProtocolVersion::TLSv1_3)
            );
            done.server.handshake_kind().unwrap()
        };
        assert_eq!(
            kind(before.server_config_at(&host, now).unwrap()),
            HandshakeKind::Full
        );
        let renewed = before.server_config_at(&host, now + LEAF_LIFE).unwrap();
        // The same host and process: its tickets hold over a new leaf.
        assert_eq!(kind(renewed), HandshakeKind::Resumed);
        assert_eq!(
            kind(after.server_config_at(&host, now).unwrap()),
            HandshakeKind::Full
        );
    }

    #[test]
    fn a_full_handshake_sends_the_client_less_than_it_takes_for_two_tickets() {
        let ca = TestCa::new(&["example.com"]);
        let config = ca.leaves().server_config(&host("example.com")).unwrap();
        let done = handshake(&Arc::new(ca.client()), config, "example.com").unwrap();
        assert!(done.server_bytes < 2_000, "{} bytes", done.server_bytes);
    }

    #[test]
    fn debug_shows_no_key() {
        let ca = TestCa::new(&["example.com"]);
        let shown = format!("{:?} {:?}", ca.leaves(), ca.issuer);
        assert!(
            shown.contains("***") && !shown.contains("KeyPair"),
            "{shown}"
        );
    }

    /// A client that believes any certificate.
    mod trusting {
        use rustls::{
            DigitallySignedStruct, Error, SignatureScheme,
            client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
            crypto::aws_lc_rs::default_provider,
            pki_types::{CertificateDer, ServerName, UnixTime},
        };

        #[derive(Debug)]
        pub(super) struct AnyCertificate;

        impl ServerCertVerifier for AnyCertificate {
            fn verify_server_cert(
                &self,
                _: &CertificateDer<'_>,
                _: &[CertificateDer<'_>],
                _: &ServerName<'_>,
                _: &[u8],
                _: UnixTime,
            ) -> Result<ServerCertVerified, Error> {
                Ok(ServerCertVerified::assertion())
            }

            fn verify_tls12_signature(
                &self,
                _: &[u8],
                _: &CertificateDer<'_>,
                _: &DigitallySignedStruct,
            ) -> Result<HandshakeSignatureValid, Error> {
                Ok(HandshakeSignatureValid::assertion())
            }

            fn verify_tls13_signature(
                &self,
                _: &[u8],
                _: &CertificateDer<'_>,
                _: &DigitallySignedStruct,
            ) -> Result<HandshakeSignatureValid, Error> {
                Ok(HandshakeSignatureValid::assertion())
            }

            fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
                default_provider()
                    .signature_verification_algorithms
                    .supported_schemes()
            }
        }
    }
}
