//! The statements of membership: a heartbeat that also reads everybody's, a release, and the forgetting of the dead.
//!
//! Whether a lease is still ours is decided by its second word, with `split_part`, which takes any text; no cast in
//! these statements can fail on what somebody left in a row.

use tokio_postgres::types::{ToSql, Type};

use super::{
    error::{Reason, StoreError},
    session::{Lenient, Session},
    sql::{LOCK_TIMEOUT_MS, Table},
};
use crate::{
    membership::lease::{FREED, LONGEST},
    pacing::time::StoreTime,
};

/// What a heartbeat brought back.
#[derive(Clone, Debug)]
pub struct Echo {
    /// The store's now.
    pub now: StoreTime,
    /// Whether our own row was written.
    pub written: bool,
    /// All lease rows as they stood before, by key.
    pub rows: Vec<(String, String)>,
}

/// What to write, and on which condition.
#[derive(Clone, Copy, Debug)]
pub struct Beat<'b> {
    /// The key of our row; `None` only reads.
    pub key: Option<&'b str>,
    /// This run of this replica.
    pub incarnation: &'b str,
    /// What it says.
    pub word: &'b str,
    /// A row that holds exactly this may be taken over.
    pub seen: Option<&'b str>,
    /// The last instant of the store's clock at which to write; `None` is any.
    pub until: Option<StoreTime>,
    /// For how many seconds the row is not to be swept.
    pub lasts: f64,
}

/// A heartbeat that did not pass.
#[derive(Debug)]
pub struct Failed {
    /// Why.
    pub error: StoreError,
    /// Whether nothing was written, surely: the server itself said that the statement failed. Where a connection or a server
    /// ends, or a pooler speaks for it, the statement may have been carried out.
    pub surely: bool,
}

impl From<tokio_postgres::Error> for Failed {
    fn from(e: tokio_postgres::Error) -> Self {
        let surely = e
            .as_db_error()
            .is_some_and(|said| is_undone(said.code().code()));
        Failed {
            error: e.into(),
            surely,
        }
    }
}

/// Whether an error of this SQLSTATE leaves nothing of its statement behind.
fn is_undone(code: &str) -> bool {
    // Classes 08 and 58 are of connections and systems, 57P of servers that end; 40003 says itself that it does not know.
    !["08", "58", "57P", "40003"]
        .iter()
        .any(|of| code.starts_with(of))
}

/// One round trip: writes our lease, if it is ours to write, and reads all of `keys`.
///
/// # Errors
/// Why it failed, and whether it is known that nothing was written.
pub async fn beat(
    session: &Session,
    table: &Table,
    beat: &Beat<'_>,
    keys: &[String],
) -> Result<Echo, Failed> {
    let t = table.quoted();
    // `expires` moves only when half used: the table may have an index on it. Nobody holds a row without a value. Of a
    // value that no replica wrote, however long, no more is read than shows that.
    let longest = LONGEST + 1;
    let lasts = "make_interval(secs => $5::float8)";
    let text = format!(
        "WITH settings AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true), \
         set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)), \
         mine AS (INSERT INTO {t} AS c (cache_key, value, expires) \
         SELECT $1::text, (extract(epoch FROM clock_timestamp()) * 1000000000)::int8::text || ' ' || $2::text || ' ' || $3::text, \
         clock_timestamp() + {lasts} FROM settings WHERE $1::text IS NOT NULL \
         AND ($7::int8 IS NULL OR extract(epoch FROM clock_timestamp()) <= $7::int8 * 0.000000001) \
         ON CONFLICT (cache_key) DO UPDATE SET value = EXCLUDED.value, expires = \
         CASE WHEN c.expires < clock_timestamp() + {lasts} / 2 THEN EXCLUDED.expires ELSE c.expires END \
         WHERE split_part(c.value, ' ', 2) = $2::text OR left(c.value, {longest}) = $4::text OR c.value IS NULL RETURNING 1) \
         SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::int8, (SELECT count(*) FROM mine), \
         (SELECT coalesce(json_object_agg(cache_key, left(value, {longest})), '{{}}')::text FROM {t} WHERE cache_key = ANY($6::text[]))"
    );
    let until = beat.until.map(|t| t.0);
    let params: [(&(dyn ToSql + Sync), Type); 7] = [
        (&beat.key, Type::TEXT),
        (&beat.incarnation, Type::TEXT),
        (&beat.word, Type::TEXT),
        (&beat.seen, Type::TEXT),
        (&beat.lasts, Type::FLOAT8),
        (&keys, Type::TEXT_ARRAY),
        (&until, Type::INT8),
    ];
    let rows = session.client.query_typed(&text, &params).await?;
    let row = rows
        .first()
        .ok_or_else(|| unreadable("the heartbeat returned no row"))?;
    let (now, written, found): (i64, i64, Lenient) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let found: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&found.0).map_err(|_| unreadable("the heartbeat returned no JSON"))?;
    let rows = found
        .into_iter()
        .filter_map(|(k, v)| Some((k, v.as_str()?.to_owned())));
    Ok(Echo {
        now: StoreTime(now),
        written: written > 0,
        rows: rows.collect(),
    })
}

fn unreadable(what: &str) -> Failed {
    Failed {
        error: StoreError::new(Reason::Other, what),
        surely: false,
    }
}

/// Gives our lease back. The row stays, and says so: one that is merely gone proves nothing to the others, and a heartbeat
/// that is still under way would make it again.
///
/// # Errors
/// It stays until it lapses.
pub async fn release(
    session: &Session,
    table: &Table,
    key: &str,
    incarnation: &str,
) -> Result<(), StoreError> {
    let text = format!(
        "UPDATE {} SET value = '{FREED}' WHERE cache_key = $1 AND split_part(value, ' ', 2) = $2",
        table.quoted()
    );
    session
        .client
        .query_typed(&text, &[(&key, Type::TEXT), (&incarnation, Type::TEXT)])
        .await?;
    Ok(())
}

/// Frees a lease that still reads as it was seen; says whether it did.
///
/// # Errors
/// Nothing is known of what was freed.
pub async fn forget(
    session: &Session,
    table: &Table,
    key: &str,
    seen: &str,
) -> Result<bool, StoreError> {
    let text = format!(
        "UPDATE {} SET value = '{FREED}' WHERE cache_key = $1 AND left(value, {}) = $2 RETURNING 1",
        table.quoted(),
        LONGEST + 1
    );
    let rows = session
        .client
        .query_typed(&text, &[(&key, Type::TEXT), (&seen, Type::TEXT)])
        .await?;
    Ok(!rows.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_server_says_of_the_statement_itself_is_sure() {
        for code in [
            "P0001", "55P03", "57014", "22001", "42804", "23505", "53100", "40001", "25006",
            "XX000",
        ] {
            assert!(is_undone(code), "{code}");
        }
        for code in ["08006", "08P01", "57P01", "57P03", "58000", "40003"] {
            assert!(!is_undone(code), "{code}");
        }
    }
}
