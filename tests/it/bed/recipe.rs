//! A configuration file in the making: what a test cares about is said, the rest is the bed's. Text, not the project's
//! own types, because the file is what operators write.

use std::{
    fmt::Write,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::{origin::Origin, scripted::Scripted};

/// A folder for one test: configurations, logs, and the CA that its replicas share.
pub struct Site {
    dir: TempDir,
}

impl Site {
    /// An empty folder.
    pub fn new() -> Site {
        Site {
            dir: tempfile::Builder::new()
                .prefix("paceline-site-")
                .tempdir()
                .expect("a temporary folder"),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, text).expect("our own folder");
        path
    }

    /// The root that clients are to trust, once a replica has made it.
    pub fn root(&self) -> PathBuf {
        self.path().join("certs/ca.pem")
    }
}

/// A configuration, section by section.
#[derive(Clone, Debug)]
pub struct Recipe {
    listen: SocketAddr,
    proxy: String,
    admin: String,
    store: String,
    resolve: String,
    roots: String,
    destinations: String,
}

impl Recipe {
    /// Both listeners on free ports, the embedded store, no destination.
    pub fn new() -> Recipe {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let empty = String::new;
        Recipe {
            listen,
            proxy: empty(),
            admin: empty(),
            store: empty(),
            resolve: empty(),
            roots: empty(),
            destinations: empty(),
        }
    }

    /// A fixed address for the proxy, for what must be known before it runs.
    pub fn listen(mut self, listen: SocketAddr) -> Recipe {
        self.listen = listen;
        self
    }

    /// A line of `[proxy]`, or a whole table under it.
    pub fn proxy(mut self, line: &str) -> Recipe {
        self.proxy += &format!("{line}\n");
        self
    }

    /// The lines of `[admin]`, in the place of a listener on a free port of loopback.
    pub fn admin(mut self, lines: &str) -> Recipe {
        self.admin = lines.to_owned();
        self
    }

    /// The store's URL.
    pub fn store(self, url: &str) -> Recipe {
        self.store_key(&format!("url = {url:?}"))
    }

    /// A line of `[store]`.
    pub fn store_key(mut self, line: &str) -> Recipe {
        self.store += &format!("{line}\n");
        self
    }

    /// A destination; [`Recipe::key`] adds to it.
    pub fn destination(mut self, name: &str, hosts: &[&str], rate: &str) -> Recipe {
        self.destinations +=
            &format!("[[destination]]\nname = {name:?}\nhosts = {hosts:?}\nrate = {rate}\n");
        self
    }

    /// A line of the destination named last.
    pub fn key(mut self, line: &str) -> Recipe {
        self.destinations += &format!("{line}\n");
        self
    }

    /// Sends what is meant for the origin's names to the origin, and trusts its root.
    pub fn origin(self, origin: &Origin) -> Recipe {
        self.origin_at(origin, origin.address())
    }

    /// As [`Recipe::origin`], by way of a link at `address`.
    pub fn origin_at(mut self, origin: &Origin, address: SocketAddr) -> Recipe {
        let port = if origin.root().is_some() { 443 } else { 80 };
        for name in origin.names() {
            self = self.resolve(&format!("{name}:{port}"), address);
        }
        self.roots += origin.root().unwrap_or_default();
        self
    }

    /// Sends what is meant for a scripted origin's name to it, and trusts its root.
    pub fn scripted(mut self, origin: &Scripted) -> Recipe {
        let port = if origin.root().is_some() { 443 } else { 80 };
        self = self.resolve(&format!("{}:{port}", origin.name()), origin.address());
        self.roots += origin.root().unwrap_or_default();
        self
    }

    /// Trusts these PEM certificates as roots of origins.
    pub fn roots(mut self, pem: &str) -> Recipe {
        self.roots += pem;
        self
    }

    /// Connects to `address` for `authority`.
    pub fn resolve(mut self, authority: &str, address: SocketAddr) -> Recipe {
        self.resolve += &format!("{authority:?} = \"{address}\"\n");
        self
    }

    /// Writes the file for a replica called `name`.
    pub fn write(&self, site: &Site, name: &str) -> PathBuf {
        let mut text = format!("[proxy]\nlisten = \"{}\"\n{}", self.listen, self.proxy);
        let admin = match self.admin.as_str() {
            "" => "listen = \"127.0.0.1:0\"",
            lines => lines,
        };
        let _ = write!(
            text,
            "[admin]\n{admin}\n[ca]\ndir = {:?}\n",
            site.path().join("certs")
        );
        if !self.store.is_empty() {
            let _ = write!(text, "[store]\nreplica = {name:?}\n{}", self.store);
        }
        text += "[upstream]\n";
        if !self.roots.is_empty() {
            let roots = site.write(&format!("{name}-roots.pem"), &self.roots);
            let _ = writeln!(text, "extra_roots = {roots:?}");
        }
        let _ = write!(
            text,
            "[upstream.resolve]\n{}{}",
            self.resolve, self.destinations
        );
        site.write(&format!("{name}.toml"), &text)
    }
}
