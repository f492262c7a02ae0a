//! The test bed: everything around the proxy that a claim needs, made for real on loopback and on free ports.
//!
//! The tests themselves are plain blocking code: one thread is one client, one process is one replica. What has to
//! serve many sockets at once (origin, fault link, SQL) runs on a runtime of the bed's own.

pub mod await_until;
pub mod bouncer;
pub mod certs;
pub mod client;
pub mod crowd;
pub mod http_text;
pub mod link;
pub mod metrics;
pub mod names;
pub mod origin;
pub mod origin_misbehaves;
#[cfg(test)]
mod origin_tests;
pub mod pattern;
pub mod postgres;
pub mod process;
pub mod recipe;
pub mod replica;
pub mod scripted;
pub mod sql;
pub mod timeline;
pub mod worker;

use std::{
    net::{SocketAddr, TcpListener},
    sync::OnceLock,
};

use tokio::runtime::Runtime;

/// The runtime of the bed's servers. It lives as long as the test process; what runs on it ends by handles.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime for the bed")
    })
}

/// An address on loopback that was free a moment ago, for programs that cannot bind port 0 and say what they got.
/// Who uses it must expect a clash and try again.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port on loopback")
}
