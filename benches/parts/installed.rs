//! How each peer is configured and called; `None` where it is not installed.

use std::{
    fs,
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::peers::Ground;

/// nginx's module for passing bytes, where Debian has it.
const NGINX_STREAM: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

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

/// haproxy, in the place of the origin.
pub fn haproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let to = ground.origin.http;
    haproxy_with(
        ground,
        &format!("listen f\n  mode http\n  http-reuse always\n  bind {listens}\n  server o {to}\n"),
    )
}

/// haproxy, passing bytes.
pub fn haproxy_relay(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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

/// nginx, in the place of the origin.
pub fn nginx(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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

/// nginx, passing bytes, where its stream module is installed.
pub fn nginx_relay(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    let to = ground.origin.https;
    Path::new(NGINX_STREAM).exists().then_some(())?;
    nginx_with(
        ground,
        &format!("stream {{ server {{ listen {listens} backlog=4096; proxy_pass {to}; }} }}"),
    )
}

fn nginx_with(ground: &Ground, section: &str) -> Option<Command> {
    let mut command = program("nginx")?;
    let dir = ground.dir.display();
    let load = if section.starts_with("stream") {
        format!("load_module {NGINX_STREAM};\n")
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

/// squid.
pub fn squid(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    squid_with(ground, &format!("http_port {listens}"))
}

/// squid, looking into tunnels, where it was built with OpenSSL.
pub fn squid_bump(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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

/// tinyproxy.
pub fn tinyproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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

/// mitmproxy.
pub fn mitmproxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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

/// A program made of hudsucker.
pub fn hudsucker(ground: &Ground, listens: SocketAddr) -> Option<Command> {
    named_by("PACELINE_BENCH_HUDSUCKER", ground, listens)
}

/// A program made of the crate http-mitm-proxy.
pub fn http_mitm_proxy(ground: &Ground, listens: SocketAddr) -> Option<Command> {
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
