//! Blocking SQL for tests: a connection whose I/O runs on the bed's runtime.

use tokio_postgres::{Client, NoTls, Row, types::ToSql};

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
    pub fn run(&self, statements: &str) {
        runtime()
            .block_on(self.client.batch_execute(statements))
            .unwrap_or_else(|fault| panic!("{statements}: {fault}"));
    }

    /// Runs one statement and returns its rows.
    ///
    /// # Errors
    /// As tokio-postgres has them.
    pub fn rows(
        &self,
        statement: &str,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        runtime().block_on(self.client.query(statement, values))
    }

    /// The text in the first column of each row.
    pub fn texts(&self, statement: &str) -> Vec<String> {
        let rows = self
            .rows(statement, &[])
            .unwrap_or_else(|fault| panic!("{statement}: {fault}"));
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// The number in the only row.
    pub fn number(&self, statement: &str) -> i64 {
        let rows = self
            .rows(statement, &[])
            .unwrap_or_else(|fault| panic!("{statement}: {fault}"));
        rows.first()
            .unwrap_or_else(|| panic!("{statement} returns no row"))
            .get(0)
    }
}
