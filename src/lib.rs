//! paceline: a forward proxy that lets each request out to a destination only when its turn comes on one cursor
//! shared by all replicas.
//!
//! The path of a request: [`listener`] accepts, [`downstream`] speaks HTTP, [`proxy`] says what a request wants,
//! `proxy::forward` waits for its turn at [`pacing`] while [`upstream`] makes a connection ready, and the answer goes
//! back as it comes. [`store`] keeps the cursor. `docs/architecture.md` has the map.

pub mod admin;
pub mod app;
pub mod authority;
pub mod ca;
pub mod cli;
pub mod config;
pub mod destination;
pub mod downstream;
pub mod drain;
pub mod error;
pub mod headers;
pub mod http1;
pub mod listener;
pub mod log;
pub mod membership;
pub mod metrics;
pub mod pacing;
pub mod panics;
pub mod policy;
pub mod proxy;
pub mod record;
pub mod rules;
pub mod service;
pub mod shares;
pub mod store;
pub mod tls;
pub mod upstream;
