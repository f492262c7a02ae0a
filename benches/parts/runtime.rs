//! What the tests' bed asks of the program that it is part of: a runtime for its servers, and free ports.

use std::{
    net::{SocketAddr, TcpListener},
    sync::OnceLock,
};

use tokio::runtime::Runtime;

/// The runtime of the bed's connections.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().expect("a runtime for the bed"))
}

/// An address on loopback that was free a moment ago.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port on loopback")
}
