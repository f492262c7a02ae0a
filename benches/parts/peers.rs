//! The other proxies of a comparison: how each is started where it is installed, and what it can do.
//!
//! All ask for `localhost`, which every one of them resolves, and get an origin's root to trust and a root to sign with.
//! Those that are not installed are left out, by name.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose};

use super::{
    bed::{await_until::await_until, free_address, process::Process},
    installed::{
        haproxy, haproxy_relay, http_mitm_proxy, hudsucker, mitmproxy, nginx, nginx_relay, squid,
        squid_bump, tinyproxy,
    },
    origin::Origin,
    proc::Family,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// What a client may want of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// `GET http://...`
    Absolute,
    /// CONNECT, and a look into what passes.
    Intercept,
    /// CONNECT, and bytes.
    Tunnel,
    /// Bytes to the origin's TLS port, without a word to the proxy: the least that anything in between costs.
    Relay,
}

/// A proxy to compare with.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// What it is called in the tables.
    pub name: &'static str,
    /// What it does.
    pub services: &'static [Service],
    start: fn(&Ground, SocketAddr) -> Option<Command>,
}

use Service::{Absolute, Intercept, Relay, Tunnel};

/// All that are known.
pub const PEERS: [Peer; 10] = [
    Peer {
        name: "haproxy",
        services: &[Absolute],
        start: haproxy,
    },
    Peer {
        name: "nginx",
        services: &[Absolute],
        start: nginx,
    },
    Peer {
        name: "squid",
        services: &[Absolute, Tunnel],
        start: squid,
    },
    Peer {
        name: "tinyproxy",
        services: &[Absolute, Tunnel],
        start: tinyproxy,
    },
    Peer {
        name: "hudsucker",
        services: &[Absolute, Intercept],
        start: hudsucker,
    },
    Peer {
        name: "http-mitm-proxy",
        services: &[Absolute, Intercept],
        start: http_mitm_proxy,
    },
    Peer {
        name: "squid ssl-bump",
        services: &[Intercept],
        start: squid_bump,
    },
    Peer {
        name: "mitmproxy",
        services: &[Intercept],
        start: mitmproxy,
    },
    Peer {
        name: "haproxy as relay",
        services: &[Relay],
        start: haproxy_relay,
    },
    Peer {
        name: "nginx as relay",
        services: &[Relay],
        start: nginx_relay,
    },
];

/// What all peers are given.
pub struct Ground {
    /// A folder for their files.
    pub dir: PathBuf,
    /// What they are to reach.
    pub origin: Origin,
}

/// A running peer; dropped, it is ended with all that it has started.
pub struct Running {
    process: Process,
    /// Where it listens.
    pub listens: SocketAddr,
}

impl Running {
    /// The process and its children.
    pub fn family(&self) -> Family {
        Family(self.process.id())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Workers of some outlive a parent that is killed.
        self.process.kill_group();
    }
}

impl Ground {
    /// Writes the roots into `dir`: `origin-ca.pem`, and to sign with `mitm-ca.pem`, `mitm-ca.key` and both in
    /// `mitm-ca-bundle.pem`.
    pub fn new(dir: &Path, origin: Origin, origin_root: &str) -> Ground {
        let ground = Ground {
            dir: dir.to_owned(),
            origin,
        };
        // Some peers run as a user of their own.
        let _ = fs::set_permissions(dir, fs::Permissions::from_mode(0o755));
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "paceline bench root for peers");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let root = params.self_signed(&key).expect("a self-signed root").pem();
        let key = key.serialize_pem();
        ground.write("origin-ca.pem", origin_root);
        ground.write("mitm-ca.pem", &root);
        ground.write("mitm-ca.key", &key);
        ground.write("mitm-ca-bundle.pem", &format!("{key}{root}"));
        ground
    }

    /// The root that clients of intercepting peers trust.
    pub fn root(&self) -> Vec<u8> {
        fs::read(self.path("mitm-ca.pem")).expect("our own file")
    }

    /// Writes a file.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).expect("our own folder");
        path
    }

    /// The path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// An empty folder.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("our own folder");
        path
    }
}

impl Peer {
    /// Starts it and waits until it listens; `None` where it is not installed.
    ///
    /// # Panics
    /// When it is installed and does not come up, with what it said.
    pub fn start(&self, ground: &Ground) -> Option<Running> {
        let listens = free_address();
        let mut command = (self.start)(ground, listens)?;
        command.current_dir(&ground.dir).process_group(0);
        let name = self.name.replace(' ', "-");
        let process = Process::start(&name, &ground.dir, command);
        let mut running = Running {
            process: process.expect("a program that was found"),
            listens,
        };
        await_until(&format!("{} listens", self.name), PATIENCE, || {
            let ended = running.process.ended();
            assert!(
                ended.is_none(),
                "{} ended: {}",
                self.name,
                running.process.stderr()
            );
            TcpStream::connect(listens).ok()
        });
        Some(running)
    }
}
