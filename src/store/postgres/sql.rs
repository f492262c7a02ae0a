//! The statements, and the names they use.
//!
//! The reservation is [`crate::pacing::cursor::reserve`] in SQL: one `INSERT ... ON CONFLICT DO UPDATE`, whose SET
//! expressions Postgres evaluates with the row's lock held, so `clock_timestamp()` is read at the moment the cursor
//! moves. The cursor is text holding a bare decimal number of epoch seconds, as programs write it that move it with a
//! statement of their own.

use crate::pacing::{cursor::ROUNDING, throttle::NO_ROW};

/// A table name made safe to stand in a statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    quoted: String,
}

impl Table {
    /// Quotes `name`, which is `table` or `schema.table`.
    pub fn new(name: &str) -> Self {
        let parts: Vec<String> = name
            .split('.')
            .map(|p| format!("\"{}\"", p.replace('"', "\"\"")))
            .collect();
        Table {
            quoted: parts.join("."),
        }
    }

    /// The quoted name.
    pub fn quoted(&self) -> &str {
        &self.quoted
    }
}

/// A cursor that can be read: a plain number whose nanoseconds fit into int8 (until the year 2255).
const NUMBER: &str = "^[0-8]?[0-9]{1,9}([.][0-9]{0,40})?$";

/// How long a wait for a locked row may take, in milliseconds: less than the client's own deadline for the call, so
/// that a call given up on this side leaves no statement behind that would move the cursor later.
pub const LOCK_TIMEOUT_MS: u32 = 400;

/// Session settings for a connection that is ours alone: the same as [`reserve`] makes for a pooled one.
///
/// A commit need not reach the disk: a cursor lost in a crash is made good by the replicas' floors.
pub fn session_settings() -> String {
    format!("SET synchronous_commit = off; SET lock_timeout = {LOCK_TIMEOUT_MS}")
}

/// The reservation. Parameters: `$1` key (text); in nanoseconds (int8) `$2` slots x interval, `$3` lead, `$4` floor or
/// NULL, `$5` horizon, `$6` how far ahead others may hold slots; `$7` the key of the throttle's row and `$8` the first word
/// that the caller knows of it (text). Answers one row: the end of the last slot (int8 nanoseconds since the epoch; NULL,
/// and no slot taken, when the throttle's row says another word), now (timestamptz), and the throttle's row (text or NULL).
///
/// With `pooled`, the settings are made inside the statement and hold for it alone: a transaction pooler may run each
/// statement in another session.
///
/// Half of the server's time for a plain upsert goes into setting up the functions of its expressions, and a pooled
/// statement is parsed each time: each call saved here shows. Whole nanoseconds and not numeric, VALUES and not SELECT
/// (which would put a subquery's plan below) are a fifth of the whole.
pub fn reserve(table: &Table, pooled: bool) -> String {
    // The clock counts microseconds, and a float8 of seconds holds them exactly until the year 2041.
    let now = "(date_part('epoch', clock_timestamp()) * 1000000)::int8 * 1000";
    let floor = format!("CASE WHEN $4::int8 - {now} <= $5::int8 THEN $4::int8 END");
    // A value that is not a plain number counts as absent, and heals itself; so does one that would not fit into int8
    // nanoseconds (from the year 2255 on). Nothing is cast before the pattern has said that it can be.
    let held = "(c.value::numeric * 1000000000)::int8";
    let cursor = format!(
        "CASE WHEN c.value ~ '{NUMBER}' \
         THEN CASE WHEN {held} - {now} <= $5::int8 THEN {held} END END"
    );
    let moved = |cursor: &str| {
        // A cursor behind our own floor was lost, and others may hold slots that it does not know of.
        let lost = format!(
            "CASE WHEN $4::int8 > {now} - $6::int8 AND coalesce({cursor}, 0) + {ROUNDING} < $4::int8 \
             THEN {now} + $6::int8 END"
        );
        format!(
            "((greatest({now} + $3::int8, {cursor}, {floor}, {lost}) + $2::int8) * 0.000000001)::text"
        )
    };
    // The throttle's row as it stood when the statement began: one lookup, whose cost does not show in the whole.
    let known = format!(
        "WITH throttle AS MATERIALIZED (SELECT v, coalesce(split_part(v, ' ', 1), '{NO_ROW}') = $8::text AS known \
         FROM (SELECT (SELECT value FROM {t} WHERE cache_key = $7::text) AS v) AS row)",
        t = table.quoted()
    );
    let is_known = "(SELECT known FROM throttle)";
    let first = format!(
        "CASE WHEN {is_known} THEN {} ELSE (({now}) * 0.000000001)::text END",
        moved("NULL::int8")
    );
    let first = if pooled {
        // Evaluated before the row is looked for, so before there is a lock to wait for.
        format!(
            "CASE WHEN set_config('synchronous_commit', 'off', true) IS NOT NULL \
             AND set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true) IS NOT NULL THEN {first} END"
        )
    } else {
        first
    };
    // `expires` is indexed in a Django cache table: writing it each time would make every update a new index entry.
    // It moves only when half used, so that almost all updates are heap-only (HOT).
    format!(
        "{known} INSERT INTO {t} AS c (cache_key, value, expires) VALUES ($1::text, {first}, \
         clock_timestamp() + make_interval(secs => (3600 + $5::int8 / 1000000000)::float8)) \
         ON CONFLICT (cache_key) DO UPDATE SET value = CASE WHEN {is_known} THEN {next} ELSE c.value END, \
         expires = CASE WHEN c.expires < excluded.expires - interval '30 minutes' THEN excluded.expires ELSE c.expires END \
         RETURNING CASE WHEN {is_known} THEN (value::numeric * 1000000000)::int8 END, clock_timestamp(), \
         (SELECT v FROM throttle)",
        t = table.quoted(),
        next = moved(&cursor),
    )
}

/// Writes the state of a throttle if its row still holds what was read. Parameters: `$1` key, `$2` what it must hold or
/// NULL, `$3` the new text (text), `$4` seconds until it may be swept (float8). Answers one row: whether it was written
/// (int8), and what the row held before (text or NULL).
pub fn write_throttle(table: &Table) -> String {
    format!(
        "WITH settings AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true), \
         set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)), \
         written AS (INSERT INTO {t} AS c (cache_key, value, expires) \
         SELECT $1::text, $3::text, clock_timestamp() + make_interval(secs => $4::float8) FROM settings \
         ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value, expires = excluded.expires \
         WHERE c.value = $2::text RETURNING 1) \
         SELECT (SELECT count(*) FROM written), (SELECT value FROM {t} WHERE cache_key = $1::text)",
        t = table.quoted()
    )
}

/// Two replicas that pause for the same time mean instants this close together, in nanoseconds.
const PAUSES_APART: i64 = 5_000_000_000;

/// Moves a cursor ahead to an instant, for programs that know of nothing else. Parameters: `$1` key (text), `$2` the instant
/// in nanoseconds since the epoch (int8). One that is further ahead already stays.
pub fn push_cursor(table: &Table) -> String {
    format!(
        "INSERT INTO {t} AS c (cache_key, value, expires) \
         VALUES ($1::text, ($2::int8 * 0.000000001)::text, \
         to_timestamp($2::int8 * 0.000000001::float8) + interval '1 hour') \
         ON CONFLICT (cache_key) DO UPDATE SET expires = greatest(c.expires, excluded.expires), value = CASE \
         WHEN c.value ~ '{NUMBER}' THEN CASE WHEN c.value::numeric < $2::int8 * 0.000000001 THEN excluded.value \
         ELSE c.value END ELSE excluded.value END",
        t = table.quoted()
    )
}

/// Moves a cursor back that stands at the instant to which [`push_cursor`] moved it, or behind it: slots there are those of
/// programs that took them during the pause. Parameters: `$1` key (text), `$2` that instant, `$3` how far from now it is put,
/// for slots that others hold from before (int8 nanoseconds).
pub fn free_cursor(table: &Table) -> String {
    format!(
        "UPDATE {t} SET value = (((date_part('epoch', clock_timestamp()) * 1000000)::int8 * 1000 + $3::int8) * 0.000000001)::text \
         WHERE cache_key = $1::text AND CASE WHEN value ~ '{NUMBER}' \
         THEN value::numeric >= ($2::int8 - {PAUSES_APART}) * 0.000000001 ELSE false END",
        t = table.quoted()
    )
}

/// The throttles' rows of all hosts of a destination. Parameter: `$1` what their keys begin with (text).
pub fn throttles(table: &Table) -> String {
    format!(
        "SELECT cache_key, value FROM {} WHERE starts_with(cache_key::text, $1::text)",
        table.quoted()
    )
}

/// The store's clock: one row of one timestamptz.
pub const CLOCK: &str = "SELECT clock_timestamp()";

/// The key of a reservation that is only tried and taken back. No destination can have it: its names have no blank.
pub const REHEARSAL_KEY: &str = "paceline rehearsal";

/// Makes our own table. Never run for an adopted one.
///
/// The free half of each page is for heap-only updates.
pub fn create_table(table: &Table) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS {} (cache_key varchar(255) PRIMARY KEY, value text NOT NULL, \
         expires timestamptz NOT NULL) WITH (fillfactor = 50)",
        table.quoted()
    )
}

/// Where a table without a schema would be made (null: nowhere), whether it may be, and by whom.
pub const MAY_CREATE: &str = "SELECT current_schema()::text, \
    coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), current_user::text";

/// Removes rows under a prefix that have expired. Parameter: `$1` prefix (text). Rows of others are not touched.
pub fn sweep(table: &Table) -> String {
    format!(
        "DELETE FROM {} WHERE starts_with(cache_key::text, $1::text) AND expires < now() - interval '1 minute'",
        table.quoted()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_name_cannot_break_out_of_its_quotes() {
        assert_eq!(Table::new("public.cache").quoted(), r#""public"."cache""#);
        assert_eq!(
            Table::new(r#"a"; drop table b; --"#).quoted(),
            r#""a""; drop table b; --""#
        );
    }
}
