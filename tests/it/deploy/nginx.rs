//! Debian's nginx with the shipped configuration, in which the ports alone are the test's.

use std::{net::SocketAddr, process::Command, time::Duration};

use super::{replaced, shipped_text, tool};
use crate::bed::{await_until::await_until, free_address, process::Process, recipe::Site};

/// A running nginx; dropped, it is killed with its workers.
pub struct Nginx {
    address: SocketAddr,
    config: String,
    dir: String,
    process: Process,
}

impl Nginx {
    /// nginx before three replicas.
    pub fn before(site: &Site, replicas: [SocketAddr; 3]) -> Nginx {
        for _ in 0..5 {
            if let Some(nginx) = Nginx::try_start(site, replicas) {
                return nginx;
            }
        }
        panic!("nginx found no free port in five attempts");
    }

    fn try_start(site: &Site, replicas: [SocketAddr; 3]) -> Option<Nginx> {
        let (address, dir) = (free_address(), site.path().to_string_lossy().into_owned());
        let mut text = shipped_text("nginx/nginx.conf");
        text = replaced(&text, "listen 3128 ", &format!("listen {address} "));
        text = replaced(&text, "/run/nginx.pid", &format!("{dir}/nginx.pid"));
        text = replaced(&text, "/dev/stderr", "stderr");
        text = replaced(&text, "/dev/stdout", &format!("{dir}/connections.log"));
        for (n, replica) in (1..).zip(replicas) {
            text = replaced(&text, &format!("paceline-{n}:3128"), &replica.to_string());
        }
        let config = site
            .write("nginx.conf", &text)
            .to_string_lossy()
            .into_owned();
        let test = tool(nginx(&config, &["-t"]));
        assert!(test.status.success(), "nginx -t: {}", test.stderr);
        let mut process =
            Process::start("nginx", site.path(), nginx(&config, &["-g", "daemon off;"]))
                .expect("nginx, as tests/run installs it");
        let listens = await_until(
            "nginx listens or ends",
            Duration::from_secs(10),
            || match process.ended() {
                Some(_) => Some(false),
                None => std::net::TcpStream::connect(address)
                    .is_ok()
                    .then_some(true),
            },
        );
        listens.then_some(Nginx {
            address,
            config,
            dir,
            process,
        })
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `nginx -s reload`.
    pub fn reload(&self) {
        let outcome = tool(nginx(&self.config, &["-s", "reload"]));
        assert!(
            outcome.status.success(),
            "nginx -s reload: {}",
            outcome.stderr
        );
    }

    /// What it has complained of, but for a limit of files that this machine does not let it have.
    pub fn complaints(&self) -> Vec<String> {
        let log = self.process.stderr();
        let lines = log.lines().filter(|line| !line.contains("setrlimit("));
        lines.map(str::to_owned).collect()
    }

    /// One line for each connection that has ended.
    pub fn connections(&self) -> String {
        std::fs::read_to_string(format!("{}/connections.log", self.dir)).unwrap_or_default()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // The workers would outlive a master that is killed.
        self.process.signal(rustix::process::Signal::TERM);
        let mut left = 200;
        while self.process.ended().is_none() && left > 0 {
            std::thread::sleep(Duration::from_millis(10));
            left -= 1;
        }
        self.process.signal_family(rustix::process::Signal::KILL);
    }
}

fn nginx(config: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("/usr/sbin/nginx");
    command.args(["-e", "stderr", "-c", config]).args(arguments);
    command
}
