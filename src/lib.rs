//! paceline: a forward proxy that lets each request out to a destination only when its turn comes on one cursor
//! shared by all replicas.

pub mod authority;
pub mod ca;
pub mod cli;
pub mod config;
pub mod metrics;
pub mod pacing;
pub mod store;
