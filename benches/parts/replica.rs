//! A `paceline` process under measurement, with the configuration of a bench.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::{
    bed::{await_until::await_until, metrics::Scrape, process::Process},
    load::{Route, Wire, single},
    proc::Family,
};

const PATIENCE: Duration = Duration::from_secs(30);

/// A running replica; dropped, it is killed.
pub struct Replica {
    process: Process,
    /// Where clients connect.
    pub proxy: SocketAddr,
    admin: SocketAddr,
    root: PathBuf,
}

impl Replica {
    /// Starts one in `dir` and waits until it is ready. `keys` is the configuration but for the listeners, the CA and
    /// the replica's name.
    ///
    /// # Panics
    /// When it ends instead, with its log.
    pub fn start(dir: &Path, name: &str, keys: &Keys, filter: &str) -> Replica {
        let certs = dir.join("certs");
        let config = dir.join(format!("{name}.toml"));
        let mut text = format!(
            "[proxy]\nlisten = \"127.0.0.1:0\"\n{}\n[admin]\nlisten = \"127.0.0.1:0\"\n[ca]\ndir = {certs:?}\n",
            keys.proxy
        );
        if let Some(url) = &keys.store {
            text += &format!(
                "[store]\nurl = {url:?}\nreplica = {name:?}\n{}\n",
                keys.store_keys
            );
        }
        text += &keys.rest;
        fs::write(&config, text).expect("our own folder");
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command.arg("run").arg("--config").arg(&config).env_clear();
        command.env("PACELINE_LOG", filter).current_dir(dir);
        let mut process = Process::start(name, dir, command).expect("the program that cargo built");
        let (proxy, admin) = await_until("the replica listens", PATIENCE, || {
            let log = process.stderr();
            assert!(process.ended().is_none(), "{name} ended: {log}");
            Some((
                address_after("proxy listening on ", &log)?,
                address_after("admin listening on ", &log)?,
            ))
        });
        let replica = Replica {
            process,
            proxy,
            admin,
            root: certs.join("ca.pem"),
        };
        await_until("the replica is ready", PATIENCE, || {
            replica.admin("/readyz")
        });
        replica
    }

    /// What its clients must trust, as PEM.
    pub fn root(&self) -> Vec<u8> {
        fs::read(&self.root).expect("the root that it made")
    }

    /// The process.
    pub fn family(&self) -> Family {
        Family(self.process.id())
    }

    /// `/metrics`, now.
    pub fn scrape(&self) -> Scrape {
        Scrape::parse(&self.admin("/metrics").expect("the admin listener answers"))
    }

    /// The body of an answer of 200.
    fn admin(&self, path: &str) -> Option<String> {
        let route = Route::plain(self.admin);
        let text = single().block_on(async {
            let mut wire = Wire::open(&route).await.ok()?;
            wire.read(&route.request(path)).await.ok()
        })?;
        String::from_utf8(text).ok()
    }
}

/// What a configuration has besides the listeners.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    /// Lines of `[proxy]`.
    pub proxy: String,
    /// The store's URL.
    pub store: Option<String>,
    /// More lines of `[store]`.
    pub store_keys: String,
    /// Sections: `[upstream]` and the destinations.
    pub rest: String,
}

fn address_after(words: &str, log: &str) -> Option<SocketAddr> {
    let rest = log.split_once(words)?.1;
    let end = rest.find(|c: char| !(c.is_ascii_hexdigit() || ".:[]".contains(c)))?;
    rest[..end].parse().ok()
}
