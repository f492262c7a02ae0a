//! Who is compared: no proxy, paceline in its modes, and peers; and the way to each.

use std::{net::SocketAddr, sync::Arc};

use rustls::ClientConfig;

use super::{
    bed::certs::{TestCa, client_tls, server_tls},
    load::Route,
    origin::Origin,
    peers::{Ground, PEERS, Running, Service},
    proc::Family,
    replica::{Keys, Replica},
};

/// The path of what is asked for.
pub const SMALL: &str = "/1024";
/// The origin's name, which every peer resolves.
pub const NAME: &str = "localhost";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Absolute,
    Intercepted,
    Tunnelled,
    NewTunnel,
    NewTunnelResumed,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [
        Kind::Absolute,
        Kind::Intercepted,
        Kind::Tunnelled,
        Kind::NewTunnel,
        Kind::NewTunnelResumed,
    ];

    /// The title of its table.
    pub fn title(self) -> &'static str {
        match self {
            Kind::Absolute => "Absolute-form HTTP, kept alive",
            Kind::Intercepted => "Intercepted HTTPS, kept alive",
            Kind::Tunnelled => "Tunnelled HTTPS, kept alive",
            Kind::NewTunnel => "A new intercepted tunnel for each request, full handshakes",
            Kind::NewTunnelResumed => "A new intercepted tunnel for each request, sessions resumed",
        }
    }

    /// What `--only` calls it.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Absolute => "absolute",
            Kind::Intercepted => "intercepted",
            Kind::Tunnelled => "tunnelled",
            Kind::NewTunnel | Kind::NewTunnelResumed => "new-tunnel",
        }
    }
}

/// One that is measured, while it runs.
pub struct Contender {
    /// What it is called in the tables.
    pub name: &'static str,
    /// Its processes, if it has any.
    pub family: Option<Family>,
    /// The ways through it.
    pub routes: Vec<(Kind, Route)>,
    _keeps: Option<Keeps>,
}

#[allow(dead_code, reason = "held for its drop")]
enum Keeps {
    Peer(Running),
    Replica(Replica),
}

/// What all contenders share.
pub struct Bench {
    /// What all of them reach.
    pub origin: Origin,
    origin_root: String,
    ground: Ground,
    /// For everybody's files.
    pub dir: tempfile::TempDir,
}

impl Bench {
    /// An origin, and files for everybody.
    pub fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let ca = TestCa::new();
        let origin = Origin::start(server_tls(&ca.issue(&[NAME])));
        let peers = dir.path().join("peers");
        std::fs::create_dir(&peers).expect("our own folder");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).expect("our own folder");
        Bench {
            ground: Ground::new(&peers, origin.clone(), ca.root()),
            origin,
            origin_root: ca.root().to_owned(),
            dir,
        }
    }

    /// How many there are.
    pub fn contenders(&self) -> usize {
        OWN.len() + PEERS.len()
    }

    /// Starts the contender of that number.
    pub fn contender(&self, which: usize) -> Option<Contender> {
        if let Some(own) = OWN.get(which) {
            return Some(self.own(own));
        }
        let peer = &PEERS[which - OWN.len()];
        let running = peer.start(&self.ground)?;
        let at = running.listens;
        let origin = client_tls(self.origin_root.as_bytes());
        let mut routes = Vec::new();
        for service in peer.services {
            match service {
                Service::Absolute => routes.push((Kind::Absolute, self.absolute(at))),
                Service::Tunnel => routes.push((Kind::Tunnelled, self.tunnel(at, origin.clone()))),
                Service::Relay => {
                    let direct = self.direct(true);
                    routes.push((
                        Kind::Tunnelled,
                        Route {
                            connect: at,
                            ..direct
                        },
                    ));
                }
                Service::Intercept => {
                    let route = self.tunnel(at, client_tls(&self.ground.root()));
                    routes.extend(intercepted(&route));
                }
            }
        }
        Some(Contender {
            name: peer.name,
            family: Some(running.family()),
            routes,
            _keeps: Some(Keeps::Peer(running)),
        })
    }

    fn own(&self, own: &Own) -> Contender {
        let Some(destination) = own.destination else {
            let tls = self.direct(true);
            let mut routes = vec![
                (Kind::Absolute, self.direct(false)),
                (Kind::Tunnelled, tls.clone()),
            ];
            routes.extend(intercepted(&tls));
            return Contender {
                name: own.name,
                family: None,
                routes,
                _keeps: None,
            };
        };
        let name = own.name.replace([' ', ','], "-");
        let replica = Replica::start(self.dir.path(), &name, &self.keys(destination), own.log);
        let at = replica.proxy;
        let routes = if own.is_governed {
            let mut routes = vec![(Kind::Absolute, self.absolute(at))];
            routes.extend(intercepted(&self.tunnel(at, client_tls(&replica.root()))));
            routes
        } else {
            let trusts = client_tls(self.origin_root.as_bytes());
            vec![(Kind::Tunnelled, self.tunnel(at, trusts))]
        };
        Contender {
            name: own.name,
            family: Some(replica.family()),
            routes,
            _keeps: Some(Keeps::Replica(replica)),
        }
    }

    /// A configuration whose destination has these lines.
    pub fn keys(&self, destination: &str) -> Keys {
        let roots = self.dir.path().join("roots.pem");
        std::fs::write(&roots, &self.origin_root).expect("our own folder");
        let (http, https) = (self.origin.http, self.origin.https);
        Keys {
            proxy: format!(
                "max_connections = 20000\nmax_wait = \"1h\"\nconnect_ports = [{}]",
                https.port()
            ),
            rest: format!(
                "[upstream]\nextra_roots = {roots:?}\nresolve = {{ \"{NAME}:{}\" = \"{http}\", \"{NAME}:{}\" = \"{https}\" }}\n\
                 [[destination]]\nname = \"bench\"\n{destination}\n",
                http.port(),
                https.port()
            ),
            ..Keys::default()
        }
    }

    fn direct(&self, is_tls: bool) -> Route {
        let at = if is_tls {
            self.origin.https
        } else {
            self.origin.http
        };
        Route {
            host: format!("{NAME}:{}", at.port()),
            tls: is_tls.then(|| client_tls(self.origin_root.as_bytes())),
            ..Route::plain(at)
        }
    }

    /// To the origin by a proxy, in absolute form.
    pub fn absolute(&self, proxy: SocketAddr) -> Route {
        let host = format!("{NAME}:{}", self.origin.http.port());
        Route {
            prefix: format!("http://{host}"),
            host,
            ..Route::plain(proxy)
        }
    }

    /// To the origin by a proxy, within a tunnel.
    pub fn tunnel(&self, proxy: SocketAddr, tls: Arc<ClientConfig>) -> Route {
        let host = format!("{NAME}:{}", self.origin.https.port());
        Route {
            tunnel: Some(host.clone()),
            tls: Some(tls),
            host,
            ..Route::plain(proxy)
        }
    }

    /// Whether requests are paced there.
    pub fn is_paced(which: usize) -> bool {
        OWN.get(which).is_some_and(|own| own.name == "paceline")
    }

    /// Its name.
    pub fn name_of(which: usize) -> &'static str {
        OWN.get(which)
            .map_or_else(|| PEERS[which - OWN.len()].name, |own| own.name)
    }
}

/// One of those that need no installation.
struct Own {
    name: &'static str,
    /// Lines of its destination; `None` is no proxy at all.
    destination: Option<&'static str>,
    is_governed: bool,
    log: &'static str,
}

/// No proxy, and paceline in its modes. The pace is one that nobody reaches: what pacing costs is in it, waiting is not.
const OWN: [Own; 5] = [
    Own {
        name: "direct",
        destination: None,
        is_governed: false,
        log: "",
    },
    Own {
        name: "paceline",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0"),
        is_governed: true,
        log: "info",
    },
    Own {
        name: "paceline, access=off",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0"),
        is_governed: true,
        log: "access=off,info",
    },
    Own {
        name: "paceline, dry_run, access=off",
        destination: Some("hosts = [\"localhost\"]\nrate = 1000000.0\ndry_run = true"),
        is_governed: true,
        log: "access=off,info",
    },
    Own {
        name: "paceline, ungoverned",
        destination: Some("hosts = [\"elsewhere.test\"]\nrate = 1.0"),
        is_governed: false,
        log: "info",
    },
];

fn intercepted(route: &Route) -> [(Kind, Route); 3] {
    [
        (Kind::Intercepted, route.clone()),
        (Kind::NewTunnel, route.new_each(false)),
        (Kind::NewTunnelResumed, route.new_each(true)),
    ]
}
