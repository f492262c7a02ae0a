//! The integration tests: claims about replicas as processes, with a real Postgres, a real TLS origin and real clients.
//! One binary, one module a theme; what they stand on is in `bed`.

mod bed;
