//! What the service manager hears, and the health check of containers. The manager is a socket of the test's own.

use std::{os::unix::net::UnixDatagram, process::Command, time::Duration};

use rustix::process::Signal;

use crate::bed::{
    await_until::await_until,
    recipe::{Recipe, Site},
    replica::{Replica, paceline, run_paceline},
};

const PATIENCE: Duration = Duration::from_secs(5);

/// A service manager that listens.
struct Manager {
    socket: UnixDatagram,
}

impl Manager {
    fn new(site: &Site) -> Manager {
        let socket = UnixDatagram::bind(site.path().join("notify")).expect("our own folder");
        socket.set_read_timeout(Some(PATIENCE)).expect("set");
        Manager { socket }
    }

    /// The command `run`, as the manager starts it.
    fn command(&self, site: &Site, recipe: &Recipe) -> Command {
        let config = recipe.write(site, "r0");
        let mut command = paceline(&["run", "--config", &config.to_string_lossy()]);
        command
            .env("NOTIFY_SOCKET", site.path().join("notify"))
            .env("WATCHDOG_USEC", "300000");
        command
    }

    fn next(&self) -> String {
        let mut text = [0; 1024];
        let length = self.socket.recv(&mut text).expect("a message");
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    /// The next message that is no sign of life.
    fn next_but_watchdog(&self) -> String {
        loop {
            let message = self.next();
            if message != "WATCHDOG=1\n" {
                return message;
            }
        }
    }
}

fn recipe() -> Recipe {
    Recipe::new().destination("img", &["img.test"], "10.0")
}

#[test]
fn the_service_manager_hears_ready_then_signs_of_life_then_stopping() {
    let site = Site::new();
    let manager = Manager::new(&site);
    let mut replica = Replica::spawn(&site, "r0", manager.command(&site, &recipe()));
    let ready = manager.next_but_watchdog();
    let at = format!("STATUS=proxy on {}, admin on ", replica.proxy());
    assert!(ready.starts_with(&format!("READY=1\n{at}")), "{ready}");
    for _ in 0..3 {
        assert_eq!(manager.next(), "WATCHDOG=1\n");
    }
    replica.signal(Signal::TERM);
    let stopping = manager.next_but_watchdog();
    let whole = "STOPPING=1\nEXTEND_TIMEOUT_USEC=40000000\nSTATUS=draining\n";
    assert_eq!(stopping, whole, "the default drain of 35 s and 5 s more");
    assert_eq!(replica.await_end(PATIENCE).code(), Some(0));
}

#[test]
fn without_its_store_a_replica_is_ready_for_its_manager_all_the_same() {
    let site = Site::new();
    let manager = Manager::new(&site);
    let nobody = format!("postgres://postgres@{}/x", crate::bed::free_address());
    let command = manager.command(&site, &recipe().store(&nobody));
    let _replica = Replica::spawn(&site, "r0", command);
    assert!(manager.next_but_watchdog().starts_with("READY=1\n"));
}

#[test]
fn a_manager_that_has_gone_is_no_reason_to_stop() {
    let site = Site::new();
    let manager = Manager::new(&site);
    let command = manager.command(&site, &recipe());
    drop(manager);
    let mut replica = Replica::spawn(&site, "r0", command);
    replica.await_ready();
    await_until("the log says so", PATIENCE, || {
        let log = replica.stderr();
        log.contains("the service manager was not told")
            .then_some(())
    });
    replica.signal(Signal::TERM);
    assert_eq!(replica.await_end(PATIENCE).code(), Some(0));
}

#[test]
fn the_health_check_says_by_its_exit_code_whether_a_replica_is_ready() {
    let site = Site::new();
    let recipe = recipe().proxy("drain = \"20s\"");
    let mut replica = Replica::start(&site, "r0", &recipe);
    let url = format!("http://{}", replica.admin_address());
    let check = || run_paceline(site.path(), &["health", "--admin", &url]);
    let well = check();
    assert_eq!((well.status.code(), &*well.text()), (Some(0), "ready\n"));

    // A connection with half a request on it holds the drain up.
    let mut held = replica.session("img.test");
    held.send(b"GET http://img.test/ HTTP/1.1\r\n")
        .expect("sent");
    replica.signal(Signal::TERM);
    await_until("the health check says that it drains", PATIENCE, || {
        let outcome = check();
        (outcome.stderr == "paceline: not ready: draining\n").then(|| {
            assert_eq!(outcome.status.code(), Some(1));
        })
    });
    drop(held);
    assert_eq!(replica.await_end(PATIENCE).code(), Some(0));
    let gone = check();
    assert_eq!(gone.status.code(), Some(1));
    assert!(
        gone.stderr.contains("cannot reach the admin listener"),
        "{}",
        gone.stderr
    );
}
