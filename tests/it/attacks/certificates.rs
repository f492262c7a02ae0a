//! Origins that cannot prove who they are, or do not even try: nothing is sent to them, and there is no way round it.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Command,
    sync::Arc,
    thread,
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, NameConstraints, SanType, date_time_ymd,
};
use rustls::{
    ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
};

use super::{Reply, Row, Scene, Way, row};
use crate::bed::{await_until::await_until, process::Process, scripted::Scripted};

const UNTRUSTED: Reply = Reply::Refused(502, "tls_certificate_error");
const BROKEN: Reply = Reply::Refused(502, "tls_protocol_error");

/// A certificate with its key, and the certificates above it.
struct Chain {
    issuer: Issuer<'static, KeyPair>,
    key: Vec<u8>,
    /// From this one upwards, without the root.
    certificates: Vec<CertificateDer<'static>>,
}

fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "some authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn server(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params
}

impl Chain {
    fn root() -> (Chain, String) {
        let (params, key) = (authority(), KeyPair::generate().expect("a key"));
        let root = params.self_signed(&key).expect("a root");
        let chain = Chain {
            key: key.serialize_der(),
            issuer: Issuer::new(params, key),
            certificates: vec![],
        };
        (chain, root.pem())
    }

    fn sign(&self, params: CertificateParams) -> Chain {
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        let mut certificates = vec![signed.der().clone()];
        certificates.extend(self.certificates.iter().cloned());
        Chain {
            key: key.serialize_der(),
            issuer: Issuer::new(params, key),
            certificates,
        }
    }

    fn tls(&self) -> Arc<ServerConfig> {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()));
        let provider = Arc::new(aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider's own versions")
            .with_no_client_auth()
            .with_single_cert(self.certificates.clone(), key)
            .expect("a certificate with its key");
        Arc::new(config)
    }
}

/// What each origin shows: which host it stands for, whether it is to be believed, and its certificates.
fn identities(root: &Chain) -> Vec<(&'static str, bool, Chain)> {
    let with = |name: &str, change: &dyn Fn(&mut CertificateParams)| {
        let mut params = server(name);
        change(&mut params);
        params
    };
    let middle = |change: &dyn Fn(&mut CertificateParams)| {
        let mut params = authority();
        change(&mut params);
        root.sign(params)
    };
    let intermediate = middle(&|_| {});
    let mut alone = intermediate.sign(server("alone.wild.test"));
    alone.certificates.truncate(1);
    let mut long = middle(&|_| {});
    for _ in 0..19 {
        long = long.sign(authority());
    }
    let constrained = middle(&|params| {
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName("other.test".to_owned())],
            excluded_subtrees: vec![],
        });
    });
    let shallow = middle(&|params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let (stranger, _) = Chain::root();
    let itself = {
        let (params, key) = (
            server("itself.wild.test"),
            KeyPair::generate().expect("a key"),
        );
        let certificate = params.self_signed(&key).expect("a certificate");
        Chain {
            key: key.serialize_der(),
            issuer: Issuer::new(params, key),
            certificates: vec![certificate.der().clone()],
        }
    };
    vec![
        ("fine.wild.test", true, root.sign(server("fine.wild.test"))),
        (
            "below.wild.test",
            true,
            intermediate.sign(server("*.wild.test")),
        ),
        (
            "expired.wild.test",
            false,
            root.sign(with("expired.wild.test", &|p| {
                (p.not_before, p.not_after) =
                    (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
            })),
        ),
        (
            "early.wild.test",
            false,
            root.sign(with("early.wild.test", &|p| {
                p.not_before = date_time_ymd(2090, 1, 1)
            })),
        ),
        (
            "wrong.wild.test",
            false,
            root.sign(server("right.wild.test")),
        ),
        ("suffix.wild.test", false, root.sign(server("wild.test"))),
        (
            "prefix.wild.test",
            false,
            root.sign(server("prefix.wild.test.evil.test")),
        ),
        ("itself.wild.test", false, itself),
        (
            "unknown.wild.test",
            false,
            stranger.sign(server("unknown.wild.test")),
        ),
        (
            "common.wild.test",
            false,
            root.sign(with("common.wild.test", &|p| p.subject_alt_names.clear())),
        ),
        (
            "two.labels.wild.test",
            false,
            root.sign(server("*.wild.test")),
        ),
        (
            "partial.wild.test",
            false,
            root.sign(server("par*.wild.test")),
        ),
        (
            "address.wild.test",
            false,
            root.sign(with("x", &|p| {
                p.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())]
            })),
        ),
        (
            "constrained.wild.test",
            false,
            constrained.sign(server("constrained.wild.test")),
        ),
        (
            "client.wild.test",
            false,
            root.sign(with("client.wild.test", &|p| {
                p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]
            })),
        ),
        ("alone.wild.test", false, alone),
        ("long.wild.test", false, long.sign(server("long.wild.test"))),
        (
            "leaf.wild.test",
            false,
            root.sign(server("somebody.test"))
                .sign(server("leaf.wild.test")),
        ),
        (
            "shallow.wild.test",
            false,
            shallow.sign(authority()).sign(server("shallow.wild.test")),
        ),
        (
            "nul.wild.test",
            false,
            root.sign(with("x", &|p| {
                p.subject_alt_names = vec![SanType::DnsName(
                    "nul.wild.test\0.evil.test".try_into().expect("ASCII"),
                )]
            })),
        ),
    ]
}

/// A request to this host, in a tunnel for it.
fn ask(id: &'static str, host: &str, fields: &str, reply: Reply) -> Row {
    // As long as the test's process lives.
    let authority: &'static str = format!("{host}:443").leak();
    let sends = format!("GET /{{n}}?s3cret HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n");
    row(id, host, sends, reply).way(Way::Inside(authority, authority.strip_suffix(":443")))
}

#[test]
fn an_origin_that_cannot_prove_its_name_is_sent_nothing() {
    let (root, pem) = Chain::root();
    let origins: Vec<(bool, Scripted)> = identities(&root)
        .iter()
        .map(|(name, fine, chain)| (*fine, Scripted::tls_as(name, &pem, chain.tls())))
        .collect();
    let mut scene = Scene::with(|recipe, _| {
        origins
            .iter()
            .fold(recipe, |recipe, (_, origin)| recipe.scripted(origin))
    });
    let rows: Vec<Row> = origins
        .iter()
        .map(|(fine, origin)| match fine {
            // What arrives there is looked at below, as these are no origins of the scene.
            true => ask("F10", origin.name(), "", Reply::Passes(&[404])).arrives(&[]),
            false => ask("F10", origin.name(), "", UNTRUSTED),
        })
        .collect();
    scene.play(&rows);
    for (fine, origin) in &origins {
        let heard: usize = origin.heard().iter().map(|c| c.bytes.len()).sum();
        assert_eq!(heard > 0, *fine, "{}", origin.name());
    }
}

/// What an origin does in the place of a handshake.
#[derive(Clone, Copy)]
enum Instead {
    Say(&'static [u8]),
    Reset,
    Close,
    Stall,
    /// A handshake message that has no end.
    Flood,
}

fn origin(instead: Instead) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("the bound address");
    // Ends with the test's process.
    thread::spawn(move || {
        let mut stalled = Vec::new();
        for mut tcp in listener.incoming().flatten() {
            let _ = tcp.read(&mut [0; 2048]);
            match instead {
                Instead::Say(bytes) => drop(tcp.write_all(bytes)),
                Instead::Reset => {
                    drop(socket2::SockRef::from(&tcp).set_linger(Some(std::time::Duration::ZERO)))
                }
                Instead::Close => {}
                Instead::Stall => stalled.push(tcp),
                Instead::Flood => {
                    let first = b"\x16\x03\x03\x40\0\x02\xff\xff\xff".iter().copied();
                    let mut record: Vec<u8> = first.chain([0; 0x4000 - 4]).collect();
                    for _ in 0..1_024 {
                        if tcp.write_all(&record).is_err() {
                            break;
                        }
                        record[5..9].fill(0);
                    }
                }
            }
        }
    });
    address
}

/// An origin of OpenSSL's, for what our own TLS refuses to do.
fn openssl(dir: &Path, name: &str, arguments: &[&str]) -> (Process, SocketAddr) {
    let mut command = Command::new("openssl");
    command
        .current_dir(dir)
        .args([
            "s_server",
            "-accept",
            "127.0.0.1:0",
            "-cipher",
            "ALL:@SECLEVEL=0",
            "-www",
        ])
        .args(arguments);
    let process = Process::start(name, dir, command).expect("openssl, which tests/run installs");
    let address = await_until(
        "openssl listens",
        std::time::Duration::from_secs(10),
        || {
            let out = process.stdout();
            out.split_once("ACCEPT ")?
                .1
                .lines()
                .next()?
                .trim()
                .parse()
                .ok()
        },
    );
    (process, address)
}

/// A self-signed certificate for `NAME.wild.test`, to be trusted as a root.
fn weak(dir: &Path, name: &str, key: &str, digest: &str) -> String {
    let made = Command::new("openssl")
        .current_dir(dir)
        .args([
            "req", "-x509", "-nodes", "-days", "30", "-newkey", key, digest, "-subj", "/CN=weak",
        ])
        .args([
            "-addext",
            &format!("subjectAltName=DNS:{name}.wild.test"),
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ])
        .args([
            "-keyout",
            &format!("{name}.key"),
            "-out",
            &format!("{name}.pem"),
        ])
        .output()
        .expect("openssl, which tests/run installs");
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    std::fs::read_to_string(dir.join(format!("{name}.pem"))).expect("a file of our own")
}

#[test]
fn an_origin_whose_tls_is_weak_or_broken_is_an_error_and_never_clear_text() {
    let rows = vec![
        ask("F11", "garbage.wild.test", "", BROKEN),
        ask("F11", "alert.wild.test", "", BROKEN),
        ask("F11", "reset.wild.test", "", BROKEN),
        ask("F11", "close.wild.test", "", BROKEN),
        ask("F11", "ancient.wild.test", "", BROKEN),
        ask("F11", "flood.wild.test", "", BROKEN),
        ask("F11", "empty.wild.test", "", BROKEN),
        ask(
            "F11",
            "stall.wild.test",
            "Paceline-Max-Wait: 1s\r\n",
            Reply::Refused(504, "connection_timeout"),
        ),
        ask("F11", "old.wild.test", "", BROKEN),
        ask("F10", "short.wild.test", "", UNTRUSTED),
        ask("F10", "sha1.wild.test", "", UNTRUSTED),
    ];
    // The processes end with the scene's folder.
    let mut servers = Vec::new();
    let mut scene = Scene::with(|mut recipe, site| {
        let dir = site.path();
        for (name, instead) in [
            ("garbage", Instead::Say(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")),
            ("alert", Instead::Say(b"\x15\x03\x03\0\x02\x02\x28")),
            ("reset", Instead::Reset),
            ("close", Instead::Close),
            // A ServerHello of TLS 1.0.
            ("ancient", Instead::Say(b"\x16\x03\x01\0\x2a\x02\0\0\x26\x03\x01aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\0\0\x2f\0")),
            ("flood", Instead::Flood),
            ("empty", Instead::Say(b"\x16\x03\x03\0\0\x16\x03\x03\0\0\x16\x03\x03\0\0")),
            ("stall", Instead::Stall),
        ] {
            recipe = recipe.resolve(&format!("{name}.wild.test:443"), origin(instead));
        }
        let mut roots = String::new();
        for (name, key, digest, more) in [
            ("old", "rsa:2048", "-sha256", &["-tls1"][..]),
            ("short", "rsa:1024", "-sha256", &[]),
            ("sha1", "rsa:2048", "-sha1", &[]),
        ] {
            roots += &weak(dir, name, key, digest);
            let (cert, key) = (format!("{name}.pem"), format!("{name}.key"));
            let arguments = [&["-cert", cert.as_str(), "-key", key.as_str()], more].concat();
            let (process, address) = openssl(dir, name, &arguments);
            servers.push(process);
            recipe = recipe.resolve(&format!("{name}.wild.test:443"), address);
        }
        recipe.roots(&roots)
    });
    scene.play(&rows);
    let certificates = CertificateDer::pem_file_iter(scene.site.path().join("r0-roots.pem"))
        .expect("a file of our own");
    assert!(certificates.count() >= 3, "nobody is trusted here");
}
