//! The integration tests: claims about replicas as processes, with a real Postgres, a real TLS origin and real clients.
//! One binary, one module a theme; what they stand on is in `bed`.
#![allow(
    clippy::disallowed_methods,
    reason = "the tests are plain blocking code that measures and waits from outside"
)]

mod agreement;
mod attacks;
mod bed;
mod bulk;
mod ceiling;
mod clients;
mod conformance;
mod cursor_sql;
mod demo;
mod deploy;
mod destinations;
mod doctor;
mod drain;
mod floods;
mod framing;
mod held;
mod leaving;
mod limits;
mod metrics;
mod near_and_far;
mod operator;
mod outage;
mod page;
mod queue;
mod ready;
mod refusals;
mod reload;
mod sessions;
mod shared_cache;
mod start;
mod store;
mod storm;
mod throttle;
