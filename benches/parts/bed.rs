//! Of the tests' bed, what benches need of it: real Postgres, certificates, processes, figures. The bed's own files, and no copy.
#![allow(
    dead_code,
    unused_imports,
    reason = "the tests use more of it than benches do"
)]

#[path = "../../tests/it/bed/await_until.rs"]
pub mod await_until;
#[path = "../../tests/it/bed/certs.rs"]
pub mod certs;
#[path = "../../tests/it/bed/metrics.rs"]
pub mod metrics;
#[path = "../../tests/it/bed/postgres.rs"]
pub mod postgres;
#[path = "../../tests/it/bed/process.rs"]
pub mod process;
#[path = "../../tests/it/bed/sql.rs"]
pub mod sql;

pub(crate) use super::parts::runtime::{free_address, runtime};
