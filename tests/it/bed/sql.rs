//! Blocking SQL for tests: a connection whose I/O runs on the bed's runtime.

use tokio_postgres::{Client, NoTls, Row};

use super::runtime;

/// One connection to a database.
pub struct Sql {
    client: Client,
}

impl Sql {
    /// Connects.
    ///
    /// # Errors
    /// As tokio-postgres has them.
    pub fn connect(url: &str) -> Result<Sql, tokio_postgres::Error> {
        let (client, connection) = runtime().block_on(tokio_postgres::connect(url, NoTls))?;
        runtime().spawn(connection);
        Ok(Sql { client })
    }

    /// Runs statements that return nothing.
    ///
    /// # Panics
    /// When the server refuses one, with what it says. So do all others.
    pub fn run(&self, statements: &str) {
        let ran = runtime().block_on(self.client.batch_execute(statements));
        ran.unwrap_or_else(|fault| refused(statements, &fault));
    }

    /// Runs one statement and returns its rows.
    pub fn rows(&self, statement: &str) -> Vec<Row> {
        let rows = runtime().block_on(self.client.query(statement, &[]));
        rows.unwrap_or_else(|fault| refused(statement, &fault))
    }

    /// The text in the first column of each row.
    pub fn texts(&self, statement: &str) -> Vec<String> {
        self.rows(statement).iter().map(|row| row.get(0)).collect()
    }

    /// The number in the only row.
    pub fn number(&self, statement: &str) -> i64 {
        match self.rows(statement).as_slice() {
            [row] => row.get(0),
            rows => panic!("{statement} returns {} rows", rows.len()),
        }
    }
}

fn refused(statement: &str, fault: &tokio_postgres::Error) -> ! {
    match fault.as_db_error() {
        Some(said) => panic!("{statement}: {said}"),
        None => panic!("{statement}: {fault}"),
    }
}
