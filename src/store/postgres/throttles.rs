//! The rows that hold throttle states: written on condition, and the cursor moved after them.

use tokio_postgres::types::{ToSql, Type};

use super::{
    LONG_PATIENCE, Postgres,
    error::{Reason, StoreError},
    session::Lenient,
    sql,
};
use crate::pacing::{
    throttle::tracker::Write,
    time::{Nanos, SECOND, seconds},
};

/// Statements beside the reservations that may be under way at once.
pub(super) const SIDE_CALLS: usize = 16;
/// A state that nobody touches is swept after this long; the replicas that go by it put it back.
const KEPT: Nanos = 86_400 * SECOND;

impl Postgres {
    /// Writes a throttle's state: `Err` with what its row holds if that is not what was to be written.
    ///
    /// # Errors
    /// Nothing is known of what was written.
    pub async fn write_throttle(
        &self,
        key: &str,
        write: &Write,
    ) -> Result<Result<(), Option<String>>, StoreError> {
        let span = write.moves_cursor.map_or(0, |stop| stop.span);
        let lasts = seconds(KEPT.saturating_add(span));
        let rows = self
            .run(
                &sql::write_throttle(&self.table),
                &[
                    (&key, Type::TEXT),
                    (&write.expected, Type::TEXT),
                    (&write.text, Type::TEXT),
                    (&lasts, Type::FLOAT8),
                ],
            )
            .await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::new(Reason::Other, "the write returned no row"))?;
        Ok(match row.try_get(0)? {
            true => Ok(()),
            false => Err(row.try_get::<_, Option<Lenient>>(1)?.map(|t| t.0)),
        })
    }

    /// Moves a cursor to where a state that was written wants it; one that is moved back is put `spare` from now.
    ///
    /// # Errors
    /// It may stand where it stood.
    pub async fn follow(&self, key: &str, write: &Write, spare: Nanos) -> Result<(), StoreError> {
        let to = write.moves_cursor.and_then(|stop| stop.written);
        if let Some(from) = write.frees_cursor.and_then(|stop| stop.written) {
            let text = sql::free_cursor(&self.table);
            let params: [(&(dyn ToSql + Sync), Type); 4] = [
                (&key, Type::TEXT),
                (&from, Type::INT8),
                (&spare, Type::INT8),
                (&to, Type::INT8),
            ];
            self.run(&text, &params).await?;
        }
        if let Some(to) = to {
            let text = sql::push_cursor(&self.table);
            self.run(&text, &[(&key, Type::TEXT), (&to, Type::INT8)])
                .await?;
        }
        Ok(())
    }

    /// The rows of the throttles whose keys begin with `prefix`.
    ///
    /// # Errors
    /// They could not be read.
    pub async fn throttles(&self, prefix: &str) -> Result<Vec<(String, String)>, StoreError> {
        let rows = self
            .run(&sql::throttles(&self.table), &[(&prefix, Type::TEXT)])
            .await?;
        rows.iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get::<_, Lenient>(1)?.0)))
            .collect()
    }

    /// A statement beside the reservations, in turn with those that wait for a lock.
    async fn run(
        &self,
        text: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        // An order to thousands of hosts: few of its writes wait for their turn at a time, and none in vain.
        let _turn = self.side_calls.acquire().await;
        let Some(sessions) = self.sessions.borrow().clone() else {
            return Err(StoreError::new(Reason::Away, "no connection to Postgres"));
        };
        let turn = sessions.turn(LONG_PATIENCE).await?;
        let side = &sessions.side;
        let call = async {
            let call = side.client.query_typed(text, params);
            let (_, rows) = tokio::join!(side.be_patient(turn.wait), call);
            Ok(rows?)
        };
        let outcome = side.await_reply(self.deadline(), call).await;
        if let Err(e) = &outcome
            && e.reason() == Reason::Timeout
        {
            let _ = self.lost.try_send((sessions.clone(), e.again()));
        }
        outcome
    }
}
