//! Why a call to Postgres failed, sorted by what it means for the store. No message text is looked at.

use std::{error::Error as _, fmt, io};

use tokio_postgres::error::SqlState;

use crate::config::Complaint;

/// A failed call. Its [`Reason`] is all that callers may depend on.
#[derive(Debug)]
pub struct StoreError {
    reason: Reason,
    detail: String,
}

/// The stable label of a failure, in logs and in `paceline_store_errors_total{reason}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No session at the moment; the last failure said why.
    Away,
    /// No reply within the deadline for a call.
    Timeout,
    /// The connection could not be made or broke.
    Connection,
    /// TLS to Postgres failed.
    Tls,
    /// User, password or database is not accepted (SQLSTATE class 28, 3D000).
    Authentication,
    /// The server only reads (25006), or is not the primary that was asked for.
    ReadOnly,
    /// The server stops or starts (57P01 to 57P03).
    ShuttingDown,
    /// The server has no connection left (53300).
    TooManyConnections,
    /// The table is missing or has another shape (42P01, 42703, 42P10, 42804, 42883).
    Table,
    /// The user may not use the table (42501).
    Privilege,
    /// Our own table is missing, and the user may not make it.
    Creation,
    /// The server's disk is full (53100).
    DiskFull,
    /// Somebody else was at the row: its lock was held for too long (55P03, or 57014 where the role has a
    /// `statement_timeout`), a deadlock was broken (40P01), or the isolation level forbids to go on from a change that was
    /// waited for (40001).
    Locked,
    /// The server would not execute this one statement: a trigger, a constraint, a type, a value (SQLSTATE class 22, 23, 44,
    /// P0). Others may pass on the same session.
    Refused,
    /// `store.url` cannot be understood, or names a file that cannot be read.
    Url,
    /// Anything else.
    Other,
}

impl Reason {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Away => "away",
            Reason::Timeout => "timeout",
            Reason::Connection => "connection",
            Reason::Tls => "tls",
            Reason::Authentication => "authentication",
            Reason::ReadOnly => "read_only",
            Reason::ShuttingDown => "shutting_down",
            Reason::TooManyConnections => "too_many_connections",
            Reason::Table => "table",
            Reason::Privilege | Reason::Creation => "privilege",
            Reason::DiskFull => "disk_full",
            Reason::Locked => "locked",
            Reason::Refused => "refused",
            Reason::Url => "url",
            Reason::Other => "other",
        }
    }

    /// What an operator can do about it.
    pub fn advice(self) -> &'static str {
        match self {
            Reason::Away | Reason::Timeout | Reason::Connection => {
                "check that Postgres runs and can be reached at store.url"
            }
            Reason::Tls => {
                "check sslmode and sslrootcert in store.url, and the server's certificate"
            }
            Reason::Authentication => "check user, password and database in store.url",
            Reason::ReadOnly => {
                "point store.url at the primary, or list all servers in it with target_session_attrs=read-write"
            }
            Reason::ShuttingDown => "wait until the server has started",
            Reason::TooManyConnections => "raise max_connections, or close idle sessions",
            Reason::Table => {
                "check store.table: it needs columns cache_key (unique), value and expires; leave it out to have one made"
            }
            Reason::Privilege => {
                "grant SELECT, INSERT, UPDATE and DELETE on the table to this user"
            }
            Reason::Creation => {
                "GRANT USAGE, CREATE ON SCHEMA public TO that user, or give it the database: CREATE DATABASE ... OWNER"
            }
            Reason::DiskFull => "free disk space on the server",
            Reason::Locked => "find the session that holds a lock on the cursor's row, in pg_locks",
            Reason::Refused => {
                "see the server's log: a trigger, a constraint or a column's type stands in the way"
            }
            Reason::Url => "see store.url in the manual of the configuration",
            Reason::Other => "see the server's log",
        }
    }
}

impl StoreError {
    /// An error without a cause in Postgres.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        StoreError {
            reason,
            detail: detail.into(),
        }
    }

    /// Why.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// What happened, and its label.
    pub fn what(&self) -> String {
        format!("{} ({})", self.detail, self.reason.label())
    }

    /// The same, saying which server.
    pub fn at(self, server: &str) -> Self {
        StoreError {
            reason: self.reason,
            detail: format!("{server}: {}", self.detail),
        }
    }

    /// The same, for another who waits for the same session.
    pub fn again(&self) -> Self {
        StoreError {
            reason: self.reason,
            detail: self.detail.clone(),
        }
    }

    /// Whether the session is of no more use.
    pub fn ends_session(&self) -> bool {
        !matches!(self.reason, Reason::Locked | Reason::Refused | Reason::Away)
    }
}

impl From<Complaint> for StoreError {
    fn from(c: Complaint) -> Self {
        StoreError::new(Reason::Url, format!("store.url: {}; {}", c.wrong, c.fix))
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reason == Reason::Url {
            // It says itself what to change.
            return f.write_str(&self.detail);
        }
        write!(f, "{}: {}", self.what(), self.reason.advice())
    }
}

impl std::error::Error for StoreError {}

impl From<tokio_postgres::Error> for StoreError {
    fn from(e: tokio_postgres::Error) -> Self {
        if let Some(db) = e.as_db_error() {
            // Only code and primary message: details may hold values.
            return StoreError::new(
                of_sql_state(db.code()),
                format!("{}: {}", db.code().code(), db.message()),
            );
        }
        let mut cause = e.source();
        while let Some(c) = cause {
            if c.is::<rustls::Error>() {
                return StoreError::new(Reason::Tls, c.to_string());
            }
            if let Some(io) = c.downcast_ref::<io::Error>() {
                let inner = io.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
                let reason = if inner.is_some() {
                    Reason::Tls
                } else {
                    Reason::Connection
                };
                return StoreError::new(reason, io.to_string());
            }
            cause = c.source();
        }
        let reason = if e.is_closed() {
            Reason::Connection
        } else {
            Reason::Other
        };
        StoreError::new(reason, e.to_string())
    }
}

impl From<io::Error> for StoreError {
    fn from(e: io::Error) -> Self {
        StoreError::new(Reason::Connection, e.to_string())
    }
}

fn of_sql_state(code: &SqlState) -> Reason {
    match code {
        c if *c == SqlState::READ_ONLY_SQL_TRANSACTION => Reason::ReadOnly,
        c if *c == SqlState::ADMIN_SHUTDOWN
            || *c == SqlState::CRASH_SHUTDOWN
            || *c == SqlState::CANNOT_CONNECT_NOW =>
        {
            Reason::ShuttingDown
        }
        c if *c == SqlState::TOO_MANY_CONNECTIONS => Reason::TooManyConnections,
        c if *c == SqlState::UNDEFINED_TABLE
            || *c == SqlState::UNDEFINED_COLUMN
            || *c == SqlState::UNDEFINED_FUNCTION
            || *c == SqlState::INVALID_COLUMN_REFERENCE
            || *c == SqlState::DATATYPE_MISMATCH
            || *c == SqlState::INVALID_SCHEMA_NAME =>
        {
            Reason::Table
        }
        c if *c == SqlState::INSUFFICIENT_PRIVILEGE => Reason::Privilege,
        c if *c == SqlState::DISK_FULL => Reason::DiskFull,
        c if *c == SqlState::LOCK_NOT_AVAILABLE
            || *c == SqlState::QUERY_CANCELED
            || *c == SqlState::T_R_SERIALIZATION_FAILURE
            || *c == SqlState::T_R_DEADLOCK_DETECTED =>
        {
            Reason::Locked
        }
        c if c.code().starts_with("28") || *c == SqlState::INVALID_CATALOG_NAME => {
            Reason::Authentication
        }
        c if ["22", "23", "44", "P0"].contains(&c.code().get(..2).unwrap_or_default()) => {
            Reason::Refused
        }
        _ => Reason::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_session_or_one_row_causes_ends_no_session() {
        let ends =
            |code| StoreError::new(of_sql_state(&SqlState::from_code(code)), "").ends_session();
        for code in [
            "55P03", "57014", "40001", "40P01", "22P02", "23502", "P0001",
        ] {
            assert!(!ends(code), "{code}");
        }
        for code in [
            "57P01", "25006", "42P01", "26000", "0A000", "08006", "53300",
        ] {
            assert!(ends(code), "{code}");
        }
    }
}
