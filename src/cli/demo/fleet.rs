//! The demonstration's replicas: whole ones, each with listeners of its own, from a configuration as an operator would
//! write it.

use std::{
    fmt::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
    task::JoinHandle,
};

use super::{
    Options,
    folder::Folder,
    origin::{HOST, Origin},
    worker::Way,
};
use crate::{
    app::App,
    ca,
    config::{Config, STORE_URL_VARIABLE, Secret, host_name},
    store::{memory::Cursors, postgres},
};

/// Who keeps the cursor.
#[derive(Clone, Debug)]
pub(super) enum Keeper {
    /// This process, for all replicas in it.
    ThisProcess,
    /// A Postgres.
    Postgres(Secret),
    /// Each replica its own: the mistake that paceline is there to prevent.
    Nobody,
}

impl Keeper {
    pub(super) fn as_words(&self) -> &'static str {
        match self {
            Keeper::ThisProcess => "one cursor in this process (--store-url URL: in Postgres)",
            Keeper::Postgres(_) => "one cursor in Postgres",
            Keeper::Nobody => "each with a cursor of its own",
        }
    }
}

/// Running replicas.
#[derive(Debug)]
pub(super) struct Fleet {
    proxies: Vec<SocketAddr>,
    root: PathBuf,
    stop: watch::Sender<bool>,
    running: Vec<JoinHandle<Result<()>>>,
    /// Of their own, so that nothing of them is left when they have stopped: a replica has tasks that end with its
    /// process, and one of them would take the lease again that was just given back.
    runtime: Option<Runtime>,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Fleet {
    /// Starts the replicas, which make a CA in the folder.
    pub(super) async fn start(
        options: &Options,
        keeper: &Keeper,
        folder: &Folder,
        origin: &Origin,
    ) -> Result<Self> {
        let certs = folder.path().join("certs");
        let cursors = match keeper {
            Keeper::Nobody => Cursors::default(),
            Keeper::ThisProcess | Keeper::Postgres(_) => Cursors::shared(),
        };
        let (stop, stopped) = watch::channel(false);
        let mut fleet = Fleet {
            proxies: Vec::new(),
            root: certs.join(ca::ROOT_CERTIFICATE),
            stop,
            running: Vec::new(),
            runtime: None,
        };
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        let replicas = fleet.runtime.insert(runtime);
        for number in 1..=options.replicas {
            let text = configuration(options, keeper, number, &certs, origin);
            let config = read(&text, keeper)?;
            if let (1, Some(store)) = (number, &config.store) {
                // A replica would serve without it, on a share; that is another demonstration.
                let tried = postgres::try_once(store, &[]).await;
                tried.map_err(|e| anyhow!("the store: {e}"))?;
            }
            let app = replicas
                .spawn(App::sharing(config, cursors.clone()))
                .await??;
            fleet.proxies.push(app.proxy_address);
            let mut stopped = stopped.clone();
            fleet.running.push(replicas.spawn(app.run_until(
                async move {
                    // That the sender is gone is an end too.
                    let _ = stopped.wait_for(|stop| *stop).await;
                    "the demo is over"
                },
                |_| None,
            )));
        }
        Ok(fleet)
    }

    /// The ways to the origin through each replica.
    pub(super) fn ways(&self) -> Result<Vec<Way>> {
        let way = |proxy: &SocketAddr| Way::new(*proxy, true, &self.root);
        self.proxies.iter().map(way).collect()
    }

    /// Stops the replicas in order; their places in the store are given back.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        for replica in self.running.drain(..) {
            let _ = replica.await;
        }
    }
}

fn configuration(
    options: &Options,
    keeper: &Keeper,
    number: u32,
    certs: &Path,
    origin: &Origin,
) -> String {
    let Options { rate, replicas, .. } = options;
    let mut text = format!(
        "[proxy]\nlisten = \"127.0.0.1:0\"\nmax_wait = \"15m\"\ndrain = \"2s\"\n\
         [admin]\nlisten = \"127.0.0.1:0\"\n\
         [ca]\ndir = {}\n\
         [upstream]\nextra_roots = {}\nresolve = {{ \"{HOST}:443\" = \"{}\" }}\n\
         [[destination]]\nname = \"demo\"\nhosts = [\"{HOST}\"]\nrate = {:?}\n",
        quoted(certs),
        quoted(origin.root()),
        origin.address(),
        rate.per_second,
    );
    if let Keeper::Postgres(_) = keeper {
        // A prefix of its own keeps it out of the way of a fleet in the same table; under the same names a demo that was
        // killed has its places back at once.
        let _ = write!(
            text,
            "[store]\nkey_prefix = \"paceline-demo:\"\nmax_replicas = {replicas}\nreplica = \"{}-demo-{number}\"\n",
            host_name()
        );
    }
    text
}

/// The URL goes the way of the environment: it may hold a password, and files are for less.
fn read(text: &str, keeper: &Keeper) -> Result<Config> {
    let env = |name: &str| match keeper {
        Keeper::Postgres(url) if name == STORE_URL_VARIABLE => Some(url.reveal().to_owned()),
        _ => None,
    };
    Config::parse(text, Path::new("demo.toml"), &env)
        .map_err(anyhow::Error::from)
        .context("the demo's configuration")
}

fn quoted(path: &Path) -> String {
    toml::Value::from(path.to_string_lossy().into_owned()).to_string()
}
