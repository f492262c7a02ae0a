//! pgbouncer in transaction mode: what stands before Postgres wherever many workers share it.

use std::{fs, net::SocketAddr, process::Command, time::Duration};

use tempfile::TempDir;

use super::{
    await_until::await_until,
    free_address,
    postgres::{Postgres, url},
    process::{Process, Unprivileged},
    sql::Sql,
};

/// A running pooler; dropped, it is killed.
pub struct Bouncer {
    address: SocketAddr,
    _process: Process,
    _dir: TempDir,
}

impl Bouncer {
    /// A pooler in transaction mode, with two server connections, before `store`.
    pub fn before(store: &Postgres) -> Bouncer {
        for _ in 0..5 {
            if let Some(bouncer) = Bouncer::try_start(store) {
                return bouncer;
            }
        }
        panic!("pgbouncer found no free port in five attempts");
    }

    fn try_start(store: &Postgres) -> Option<Bouncer> {
        let dir = tempfile::Builder::new()
            .prefix("paceline-bouncer-")
            .tempdir()
            .expect("a temporary folder");
        let (address, target) = (free_address(), store.address());
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n",
            target.port(),
            address.port(),
        );
        let path = dir.path().join("pgbouncer.ini");
        fs::write(&path, config).expect("our own folder");
        let mut command = Command::new("/usr/sbin/pgbouncer");
        command.arg(&path);
        if let Some(user) = Unprivileged::needed() {
            user.own(dir.path());
            user.own(&path);
            user.run(&mut command);
        }
        let mut process = Process::start("pgbouncer", dir.path(), command)
            .expect("pgbouncer, as tests/run installs it");
        let answers =
            await_until(
                "pgbouncer answers or ends",
                Duration::from_secs(10),
                || match process.ended() {
                    Some(_) => Some(false),
                    None => Sql::connect(&url(address)).is_ok().then_some(true),
                },
            );
        let bouncer = Bouncer {
            address,
            _process: process,
            _dir: dir,
        };
        answers.then_some(bouncer)
    }

    /// A URL by way of the pooler.
    pub fn url(&self) -> String {
        url(self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_clients_than_server_connections_are_served_side_by_side() {
        let postgres = Postgres::start();
        let bouncer = Bouncer::before(&postgres);
        // With pooling by session the third would wait for one of the first two to leave.
        let clients: Vec<Sql> = (0..3)
            .map(|_| Sql::connect(&bouncer.url()).unwrap())
            .collect();
        for (n, client) in clients.iter().enumerate() {
            client.run(&format!("CREATE TABLE seen{n} AS SELECT 1"));
        }
        assert_eq!(
            postgres
                .sql()
                .number("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'seen%'"),
            3
        );
    }
}
