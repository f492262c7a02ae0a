//! The other proxies of a comparison: how each is started where it is installed, and what it can do.
//!
//! All ask for `localhost`, which every one of them resolves, and get an origin's root to trust and a root to sign with.
//! Those that are not installed are left out, by name.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose};

use super::{
    bed::{await_until::await_until, free_address, process::Process},
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

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).expect("our own folder");
        path
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn folder(&self, name: &str) -> PathBuf {
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

/// A program on the path, or where Debian puts what only root runs.
fn program(name: &str) -> Option<Command> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.push("/usr/sbin".into());
    let found = folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|file| file.exists())?;
    Some(Command::new(found))
}

fn haproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let to = ground.origin.http;
    haproxy_with(
        ground,
        &format!("listen f\n  mode http\n  http-reuse always\n  bind {listens}\n  server o {to}\n"),
    )
}

fn haproxy_relay(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let to = ground.origin.https;
    haproxy_with(
        ground,
        &format!("listen f\n  mode tcp\n  bind {listens}\n  server o {to}\n"),
    )
}

fn haproxy_with(ground: &Ground, section: &str) -> Option<Command> {
    let mut command = program("haproxy")?;
    let config = ground.write(
        "haproxy.cfg",
        &format!(
            "global\n  maxconn 8000\ndefaults\n  timeout connect 5s\n  timeout client 600s\n  timeout server 600s\n{section}"
        ),
    );
    command.arg("-db").arg("-f").arg(config);
    Some(command)
}

fn nginx(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let (to, dir) = (ground.origin.http, &ground.dir);
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {}; ", dir.join(what).display()))
        .concat();
    nginx_with(
        ground,
        &format!(
            "http {{ access_log off; {temporary} keepalive_requests 100000000;
             upstream o {{ server {to}; keepalive 128; keepalive_requests 100000000; }}
             proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_set_header Host $http_host;
             proxy_max_temp_file_size 0;
             server {{ listen {listens} backlog=4096; location / {{ proxy_pass http://o; }} }} }}"
        ),
    )
}

fn nginx_relay(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
    let to = ground.origin.https;
    Path::new(module).exists().then_some(())?;
    nginx_with(
        ground,
        &format!("stream {{ server {{ listen {listens} backlog=4096; proxy_pass {to}; }} }}"),
    )
}

fn nginx_with(ground: &Ground, section: &str) -> Option<Command> {
    let mut command = program("nginx")?;
    let dir = ground.dir.display();
    let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
    let load = if section.starts_with("stream") {
        format!("load_module {module};\n")
    } else {
        String::new()
    };
    let config = ground.write(
        "nginx.conf",
        &format!(
            "{load}daemon off; worker_processes auto; worker_rlimit_nofile 16384; pid {dir}/nginx.pid;
             error_log {dir}/nginx.log crit; events {{ worker_connections 8000; }}\n{section}\n"
        ),
    );
    command.arg("-c").arg(config);
    Some(command)
}

fn squid(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    squid_with(ground, &format!("http_port {listens}"))
}

fn squid_bump(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let helper = "/usr/lib/squid/security_file_certgen";
    Path::new(helper).exists().then_some(())?;
    let (bundle, root) = (
        ground.path("mitm-ca-bundle.pem"),
        ground.path("origin-ca.pem"),
    );
    // Not in the folder that squid_with makes anew.
    let leaves = ground.folder("squid-leaves").join("db");
    let made = Command::new(helper)
        .args(["-c", "-s"])
        .arg(&leaves)
        .args(["-M", "4MB"])
        .stdout(Stdio::null())
        .status()
        .ok()?;
    if let Some((uid, gid)) = user("proxy") {
        let entries = fs::read_dir(&leaves)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path());
        for path in entries.chain([leaves.clone(), ground.path("squid-leaves")]) {
            let _ = std::os::unix::fs::chown(path, Some(uid), Some(gid));
        }
    }
    made.success().then_some(())?;
    squid_with(
        ground,
        &format!(
            "http_port {listens} ssl-bump tls-cert={bundle} generate-host-certificates=on dynamic_cert_mem_cache_size=4MB
sslcrtd_program {helper} -s {leaves} -M 4MB
sslcrtd_children 2
ssl_bump bump all
tls_outgoing_options cafile={root}",
            bundle = bundle.display(),
            leaves = leaves.display(),
            root = root.display(),
        ),
    )
}

fn squid_with(ground: &Ground, lines: &str) -> Option<Command> {
    let mut command = program("squid")?;
    let dir = ground.folder("squid");
    if let Some((uid, gid)) = user("proxy") {
        let _ = std::os::unix::fs::chown(&dir, Some(uid), Some(gid));
        let key = ground.path("mitm-ca-bundle.pem");
        let _ = std::os::unix::fs::chown(key, Some(uid), Some(gid));
        command.uid(uid).gid(gid);
    }
    let config = ground.write(
        "squid.conf",
        &format!(
            "{lines}
http_access allow all
cache deny all
access_log none
cache_store_log none
cache_log {dir}/log
pid_filename {dir}/pid
coredump_dir {dir}
shutdown_lifetime 0 seconds
max_filedescriptors 16384
",
            dir = dir.display()
        ),
    );
    command.arg("-N").arg("-f").arg(config);
    Some(command)
}

fn tinyproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let mut command = program("tinyproxy")?;
    let (ip, port, tls) = (listens.ip(), listens.port(), ground.origin.https.port());
    let config = ground.write(
        "tinyproxy.conf",
        &format!(
            "Port {port}\nListen {ip}\nTimeout 600\nMaxClients 5000\nAllow 127.0.0.1\nLogLevel Critical\nConnectPort {tls}\n"
        ),
    );
    command.arg("-d").arg("-c").arg(config);
    Some(command)
}

fn mitmproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let mut command = program("mitmdump")?;
    let dir = ground.folder("mitmproxy");
    fs::copy(
        ground.path("mitm-ca-bundle.pem"),
        dir.join("mitmproxy-ca.pem"),
    )
    .ok()?;
    command.args([
        "-q",
        "--listen-host",
        "127.0.0.1",
        "-p",
        &listens.port().to_string(),
    ]);
    command
        .arg("--set")
        .arg(format!("confdir={}", dir.display()));
    let root = ground.path("origin-ca.pem");
    command
        .arg("--set")
        .arg(format!("ssl_verify_upstream_trusted_ca={}", root.display()));
    command.args(["--set", "stream_large_bodies=1m"]);
    Some(command)
}

fn hudsucker(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    named_by("PACELINE_BENCH_HUDSUCKER", ground, listens)
}

fn http_mitm_proxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    named_by("PACELINE_BENCH_HTTP_MITM_PROXY", ground, listens)
}

/// A library of which somebody has made a program: `PROGRAM ADDRESS FOLDER nodelay`, where the folder holds the files of
/// [`Ground::new`], and `nodelay` asks for `TCP_NODELAY` on the sockets that it accepts.
fn named_by(variable: &str, ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let program = std::env::var_os(variable).filter(|program| !program.is_empty())?;
    let mut command = Command::new(program);
    command
        .arg(listens.to_string())
        .arg(&ground.dir)
        .arg("nodelay");
    command.env("SSL_CERT_FILE", ground.path("origin-ca.pem"));
    Some(command)
}

/// Who a program runs as that will not run as root; `None` when we are not root.
fn user(name: &str) -> Option<(u32, u32)> {
    rustix::process::geteuid().is_root().then_some(())?;
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let line = users
        .lines()
        .find(|line| line.split(':').next() == Some(name))?;
    let mut numbers = line.split(':').skip(2).map_while(|n| n.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}
