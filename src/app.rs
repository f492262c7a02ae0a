//! All wiring: the parts are made in order, everything is bound before anything is served, and the value that comes
//! back knows where.

pub mod faults;
pub mod reload;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use tokio::net::TcpListener;

use self::reload::Reload;
use crate::{
    admin::{self, Admin},
    authority::HostPattern,
    ca::{self, Constraints, Issuer, Leaves},
    cli::env::Worker,
    config::{self, Config, TlsMode, host_name},
    destination::{Destinations, Ground, QUEUE_LIMIT, QUEUE_SHARE},
    drain::{self, Drain, Hangups, Signal},
    listener,
    metrics::Metrics,
    pacing::alarm::Alarm,
    policy::Reach,
    proxy::{Proxy, auth::Credentials},
    rules::{InForce, Rules},
    service,
    shares::Shares,
    store::{Store, memory, postgres::Postgres},
    upstream::Upstream,
};

/// How long the first connection to the store is waited for before serving without it.
const STORE_PATIENCE: Duration = Duration::from_secs(2);

/// Files that are not clients' or origins'.
const FILES_APART: usize = 64;

/// How long the last refusals may take to reach their clients.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// A replica, bound and ready to run.
#[derive(Debug)]
pub struct App {
    /// Where clients connect.
    pub proxy_address: SocketAddr,
    /// Where the operator looks.
    pub admin_address: SocketAddr,
    proxy_listener: TcpListener,
    admin_listener: TcpListener,
    proxy: Arc<Proxy>,
    admin: Arc<Admin>,
    reach: Reach,
    hangups: Hangups,
    drain: Drain,
    signal: Signal,
    ca_dir: PathBuf,
}

/// The hosts whose tunnels are looked into.
pub fn intercepted(config: &Config) -> impl Iterator<Item = &HostPattern> {
    config
        .destinations
        .iter()
        .filter(|d| d.tls == TlsMode::Intercept)
        .flat_map(|d| &d.hosts)
}

impl App {
    /// Makes and binds everything. The CA is made if it is missing.
    ///
    /// # Errors
    /// Anything that keeps the replica from serving, with what to change.
    pub async fn new(config: Config) -> Result<App> {
        App::sharing(config, memory::Cursors::default()).await
    }

    /// As [`App::new`]; without Postgres the cursors are those given, which other replicas in this process may share.
    ///
    /// # Errors
    /// As [`App::new`].
    pub async fn sharing(config: Config, cursors: memory::Cursors) -> Result<App> {
        let hangups = Hangups::listen()?;
        if let Some(fault) = faults::opaque(&config) {
            bail!("{fault}");
        }
        let leaves = Arc::new(certificates(&config)?);
        let metrics = Metrics::new();
        expiry(&metrics, &leaves, &config);
        metrics.reloaded(Some(since_epoch(SystemTime::now())));
        let (room, line) = room_for(config.proxy.max_connections);
        if let Some(line) = line {
            tracing::warn!("{line}");
        }
        for warning in faults::warnings(&config) {
            tracing::warn!("{warning}");
        }
        let share = config.proxy.share(room);
        metrics.limit("connections", room);
        metrics.limit("connections_per_client", share);
        metrics.limit("tunnels_per_client", share);
        metrics.limit("queued", QUEUE_LIMIT);
        metrics.limit("queued_per_client", QUEUE_SHARE);
        let reach = Reach::new(&config.proxy.allow_upstreams);
        let upstream =
            Upstream::new(&config.upstream, reach.clone()).map_err(anyhow::Error::msg)?;
        let proxy_listener = bind(config.proxy.listen, "proxy.listen")?;
        let admin_listener = bind(config.admin.listen, "admin.listen")?;
        let (proxy_address, admin_address) =
            (proxy_listener.local_addr()?, admin_listener.local_addr()?);
        reach.set_own(vec![proxy_address, admin_address]);
        let store = match &config.store {
            None => Store::Memory(cursors),
            Some(settings) => {
                let ceilings = ceilings(&config.destinations);
                Store::Postgres(Postgres::start(settings, ceilings, metrics.clone())?)
            }
        };
        match &store {
            Store::Memory(_) => metrics.store_up(true),
            Store::Postgres(postgres) => {
                if !postgres.wait_until_up(STORE_PATIENCE).await {
                    tracing::warn!(
                        "the store is not there yet; serving on a share of the ceiling until it is"
                    );
                }
                for line in postgres
                    .cursors(&config.destinations)
                    .await
                    .unwrap_or_default()
                {
                    tracing::info!("{line}");
                }
            }
        }
        let ground = Ground {
            store: store.clone(),
            alarm: Alarm::start().context("no timer to be had; raise the limit of open files")?,
            metrics: metrics.clone(),
            shares: config.store.as_ref().map_or(1, config::Store::shares),
        };
        let ca_dir = config.ca.dir.clone();
        let credentials = config.proxy.auth.as_ref();
        let credentials = credentials.map(|auth| Arc::new(Credentials::new(auth, None)));
        let proxy = Arc::new(Proxy {
            in_force: InForce::new(Rules {
                destinations: Destinations::new(&config.destinations, &ground),
                leaves,
                credentials,
                config,
            }),
            upstream,
            room,
            connections: Shares::new(share),
            tunnels: Shares::new(share),
            metrics,
            unsigned: Default::default(),
            untrusting: Default::default(),
            client_keys: Default::default(),
        });
        let (drain, signal) = Drain::new();
        let admin = Arc::new(Admin {
            proxy: proxy.clone(),
            store,
            draining: drain.flag(),
        });
        Ok(App {
            proxy_address,
            admin_address,
            proxy_listener,
            admin_listener,
            proxy,
            admin,
            reach,
            hangups,
            drain,
            signal,
            ca_dir,
        })
    }

    /// The export lines for a worker's shell, for the address that was bound.
    ///
    /// # Errors
    /// The bundle of roots cannot be written.
    pub fn exports(&self) -> std::io::Result<String> {
        let bundle = ca::write_bundle(&self.ca_dir)?;
        Ok(crate::cli::env::exports(Worker {
            listen: self.proxy_address,
            credentials: self.proxy.in_force.now().credentials.is_some(),
            host_name: &host_name(),
            bundle: &bundle,
        }))
    }

    /// Serves until asked to stop, then finishes what is under way. A second request to stop ends it at once. The
    /// configuration is read again, with the variables of `env`, at each SIGHUP.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    pub async fn run(self, env: fn(&str) -> Option<String>) -> Result<()> {
        self.run_until(drain::asked_to_stop()?, env).await
    }

    /// As [`App::run`], until `stop` resolves with the reason; a signal then ends it at once.
    ///
    /// # Errors
    /// The signal handlers cannot be installed.
    pub async fn run_until(
        self,
        stop: impl Future<Output = &'static str>,
        env: fn(&str) -> Option<String>,
    ) -> Result<()> {
        let serving_at = format!(
            "proxy on {}, admin on {}",
            self.proxy_address, self.admin_address
        );
        let App {
            proxy_listener,
            admin_listener,
            proxy,
            admin,
            reach,
            hangups,
            drain,
            signal,
            ..
        } = self;
        let (store, metrics) = (admin.store.clone(), proxy.metrics.clone());
        // The admin listener serves to the end: it must tell that the replica drains.
        tokio::spawn(admin::run(admin_listener, admin));
        let reload = Reload {
            proxy: proxy.clone(),
            store: store.clone(),
            reach,
            env,
            serving_at: serving_at.clone(),
        };
        let reloading = tokio::spawn(reload.run(hangups));
        let serving = tokio::spawn(listener::run(proxy_listener, proxy.clone(), signal));
        service::keep_watch();
        service::ready(&serving_at);
        let why = stop.await;
        let patience = proxy.in_force.now().settings().drain;
        service::stopping(patience);
        let stop_again = drain::asked_to_stop()?;
        drain.start();
        reloading.abort();
        let _ = serving.await;
        tracing::info!(
            signal = why,
            connections = metrics.open_connections(),
            "draining"
        );
        let finished = tokio::select! {
            finished = drain.finished(patience) => finished,
            why = stop_again => {
                tracing::warn!(signal = why, "asked to stop again");
                false
            }
        };
        if finished {
            tracing::info!("drained");
        } else {
            // What waits is refused, so that each client has its answer; what is under way cannot be answered any more.
            drain.give_up();
            let answered = drain.finished(LAST_ANSWERS).await;
            tracing::warn!(
                left = if answered {
                    0
                } else {
                    metrics.open_connections()
                },
                "the time to drain is up; what waited was refused, what is left is cut"
            );
        }
        if let Store::Postgres(postgres) = &store {
            postgres.release().await;
        }
        Ok(())
    }
}

fn certificates(config: &Config) -> Result<Leaves> {
    let files = ca::Files::new(&config.ca.dir);
    // The root's key is used here only to make a CA where there is none; anything else is `paceline ca init`'s.
    if !(files.has(ca::ISSUER_CERTIFICATE) && files.has(ca::ISSUER_KEY)) {
        let constraints = Constraints::permitting(intercepted(config));
        let outcome = ca::init(&config.ca.dir, &constraints, SystemTime::now())?;
        for line in crate::cli::ca::describe(&outcome).lines() {
            tracing::info!("{line}");
        }
    }
    let issuer = Arc::new(Issuer::load(&config.ca.dir)?);
    for fault in faults::uncovered(config, &issuer) {
        tracing::warn!("{fault}");
    }
    Ok(Leaves::new(issuer)?)
}

fn bind(address: SocketAddr, key: &str) -> Result<TcpListener> {
    listener::bind(address).with_context(|| {
        format!("{key}: cannot listen on {address}; stop what uses it or choose another")
    })
}

/// The ceilings by destination, in requests per second, for the other replicas to know.
fn ceilings(destinations: &[config::Destination]) -> BTreeMap<String, f64> {
    let ceiling = |d: &config::Destination| (d.name.clone(), d.rate.per_second);
    destinations.iter().map(ceiling).collect()
}

fn since_epoch(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |d| d.as_secs_f64())
}

/// How many connections there is room for, of `wanted`, and a line where that is fewer. A connection of a client may need
/// another to an origin; some files are for the store, the operator and the log.
fn room_for(wanted: usize) -> (usize, Option<String>) {
    use rustix::process::{Resource, getrlimit};
    let Some(files) = getrlimit(Resource::Nofile).current else {
        return (wanted, None);
    };
    let room = usize::try_from(files / 2).unwrap_or(usize::MAX);
    let room = room.saturating_sub(FILES_APART).max(1);
    let line = (wanted > room).then(|| {
        format!(
            "max_connections is {room} and not {wanted}, for {files} files may be open (two for each connection); raise that limit (ulimit -n, LimitNOFILE)"
        )
    });
    (wanted.min(room), line)
}

/// Shows when the CA's certificates end.
fn expiry(metrics: &Metrics, leaves: &Leaves, config: &Config) {
    metrics.ca_expiry("issuer", since_epoch(leaves.issuer().not_after()));
    // A replica may lack the root's certificate; it needs it for nothing but this and the bundle.
    if let Ok(root) = ca::Certificate::load_root(&config.ca.dir) {
        metrics.ca_expiry("root", since_epoch(root.not_after));
    }
}

/// Keeps memory, with the keys in it, out of core files and away from other processes of this user.
pub fn keep_no_core() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let done = setrlimit(Resource::Core, none)
        .and_then(|()| set_dumpable_behavior(DumpableBehavior::NotDumpable));
    if let Err(e) = done {
        tracing::warn!("core files stay possible: {e}; set LimitCORE=0 for this service");
    }
}

/// Lets this process hold as many connections as the system allows: the usual soft limit of 1,024 files is fewer than
/// one fleet of workers has.
pub fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit of open files stays as it is: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_cannot_be_dumped() {
        use rustix::process::{DumpableBehavior, Resource, dumpable_behavior, getrlimit};
        keep_no_core();
        assert_eq!(
            dumpable_behavior().ok(),
            Some(DumpableBehavior::NotDumpable)
        );
        assert_eq!(getrlimit(Resource::Core).maximum, Some(0));
    }

    #[test]
    fn no_more_connections_are_accepted_than_there_are_files_for() {
        let wanted = usize::MAX / 4;
        let (room, line) = room_for(wanted);
        let line = line.expect("no machine has so many files");
        assert!(
            line.contains(&format!("max_connections is {room} and not {wanted}")),
            "{line}"
        );
        assert!(room < wanted);
        assert_eq!(room_for(1), (1, None));
        let proxy = Config::load(None, &|_| None).expect("the defaults").proxy;
        assert_eq!(
            (proxy.share(10_000), proxy.share(600), proxy.share(1)),
            (5_000, 512, 1)
        );
    }
}
