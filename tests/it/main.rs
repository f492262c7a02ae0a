//! The integration tests: claims about replicas as processes, with a real Postgres, a real TLS origin and real clients.
//! One binary, one module a theme; what they stand on is in `bed`.

mod bed;
mod bulk;
mod ceiling;
mod clients;
mod conformance;
mod destinations;
mod drain;
mod leaving;
mod metrics;
mod queue;
mod ready;
mod refusals;
mod shared_cache;
mod start;
mod store;
mod storm;
