//! The statements, and the names they use.
//!
//! The reservation is [`crate::pacing::cursor::reserve`] in SQL: one `INSERT ... ON CONFLICT DO UPDATE`, whose SET
//! expressions Postgres evaluates with the row's lock held, so `clock_timestamp()` is read at the moment the cursor
//! moves. The cursor is text holding a bare decimal number of epoch seconds, as programs write it that move it with a
//! statement of their own.

use crate::pacing::{
    cursor::ROUNDING,
    throttle::{LONGEST, NO_ROW},
};

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

/// Sets how long the statements that follow wait for a lock, in milliseconds; for a session that is ours alone.
pub fn lock_timeout(wait: u32) -> String {
    format!("SET lock_timeout = {wait}")
}

/// The statement `text`, made for a pooled session, with another wait for a lock.
pub fn waiting(text: &str, wait: u32) -> String {
    let setting = |wait: u32| format!("set_config('lock_timeout', '{wait}', true)");
    text.replace(&setting(LOCK_TIMEOUT_MS), &setting(wait))
}

/// Session settings for a connection that is ours alone: the same as [`reserve`] makes for a pooled one.
///
/// A commit need not reach the disk: a cursor lost in a crash is made good by the replicas' floors.
///
/// Each statement sees what was committed before it, whatever the role's or the database's default: with `repeatable read`,
/// every wait for somebody else's change would end in an error. No session is too idle (PostgreSQL 14 or later), and the server
/// finds out within seconds that we are gone.
///
/// A database of the encoding SQL_ASCII may hold any bytes, and would refuse a row that is no UTF-8 instead of showing it.
///
/// The others are for [`reserve_near`], whose plan must not depend on how large the table was when it was made: no scan of
/// the whole table, however small, and no planning at each call. (What has no other way, such as [`sweep`], scans it all
/// the same, at a cost that is imagined to be so high that it would be compiled first.)
pub fn session_settings() -> String {
    format!(
        "SET synchronous_commit = off; SET lock_timeout = {LOCK_TIMEOUT_MS}; SET enable_seqscan = off; \
         SET enable_tidscan = on; SET plan_cache_mode = force_generic_plan; SET jit = off; \
         SET default_transaction_isolation = 'read committed'; SET tcp_keepalives_idle = 5; \
         SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3; \
         SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'; \
         SELECT set_config('client_encoding', 'SQL_ASCII', false) WHERE current_setting('server_encoding') = 'SQL_ASCII'"
    )
}

/// The reservation. Parameters: `$1` key (text); in nanoseconds (int8) `$2` slots x interval, `$3` lead, `$4` floor or
/// NULL, `$5` horizon, `$6` how far ahead others may hold slots; `$7` the key of the throttle's row and `$8` the first word
/// that the caller knows of it (text). Answers one row: the end of the last slot (int8 nanoseconds since the epoch; NULL,
/// and no slot taken, when the throttle's row says another word), now (timestamptz), the throttle's row (text or NULL), and
/// where the cursor's row now lies (tid; NULL unless the table is [`HAS_PLACES`]). No row, and nothing done, when the cursor lies
/// beyond the horizon: [`look`] says where.
///
/// With `pooled`, the settings are made inside the statement and hold for it alone: a transaction pooler may run each
/// statement in another session.
///
/// Half of the server's time for a plain upsert goes into setting up the functions of its expressions, and a pooled
/// statement is parsed each time: each call saved here shows. Whole nanoseconds and not numeric, VALUES and not SELECT
/// (which would put a subquery's plan below) are a fifth of the whole.
pub fn reserve(table: &Table, pooled: bool, has_places: bool) -> String {
    let known = known(table);
    let first = format!(
        "CASE WHEN {IS_KNOWN} THEN {} ELSE (({NOW}) * 0.000000001)::text END",
        moved("NULL::int8")
    );
    // Evaluated before the row is looked for, so before there is a lock to wait for.
    let first = with_settings(first, pooled);
    // `expires` is indexed in a Django cache table: writing it each time would make every update a new index entry.
    // It moves only when half used, so that almost all updates are heap-only (HOT).
    format!(
        "{known} INSERT INTO {t} AS c (cache_key, value, expires) VALUES ($1::text, {first}, {EXPIRES}) \
         ON CONFLICT (cache_key) DO UPDATE SET value = CASE WHEN {IS_KNOWN} THEN {next} ELSE c.value END, \
         expires = CASE WHEN c.expires < excluded.expires - interval '30 minutes' THEN excluded.expires ELSE c.expires END \
         WHERE {believed} RETURNING {ANSWER}, {place}",
        t = table.quoted(),
        next = moved(&cursor()),
        believed = believed(),
        place = if has_places { "c.ctid" } else { "NULL::tid" },
    )
}

/// The reservation from a row that is known to lie near a place. Parameters and answer as those of [`reserve`], and `$9` the
/// first place to look at and `$10` the one after the last (tid). No row, and nothing done, when the row is not there, or its
/// cursor beyond the horizon.
///
/// While a transaction that began earlier is held open on the database, no dead version of the row can be removed, and
/// the index keeps an entry for each page that the row ever lay in. To find the row by its key, [`reserve`] walks through all
/// of its versions: 3 ms after 200,000. This statement reads a few pages, whatever came before. It is not quite flat either:
/// when a page is full, one update in about 100 makes an index entry, and for that Postgres makes sure that no other
/// row has the key, by that same walk.
///
/// The key is compared in a form that no index has, since an index is what is not to be used. A row that another has
/// moved between our look and our lock is judged anew, with its newest values, wherever it lies (servers of before
/// November 2025) or if it still lies within the range (later ones); so it is moved once or not at all, and never back. Its
/// values and the clock are read before the row is locked, and once more if somebody has changed it meanwhile. A lock that
/// was held and left no change delays a slot, which is then void like any that comes late: that much is better in [`reserve`].
pub fn reserve_near(table: &Table, pooled: bool) -> String {
    // `FROM throttle` would make a join of it, and leave the choice of its order to the planner.
    format!(
        "{known} UPDATE {t} AS c SET value = {value}, \
         expires = CASE WHEN c.expires < {EXPIRES} - interval '30 minutes' THEN {EXPIRES} ELSE c.expires END \
         WHERE c.ctid >= $9::tid AND c.ctid < $10::tid AND c.cache_key::text || '' = $1::text AND {believed} \
         RETURNING {ANSWER}, c.ctid",
        known = known(table),
        t = table.quoted(),
        believed = believed(),
        // Evaluated when the row is found, and before there is a lock to wait for.
        value = with_settings(
            format!(
                "CASE WHEN {IS_KNOWN} THEN {} ELSE c.value END",
                moved(&cursor())
            ),
            pooled
        ),
    )
}

/// Whether [`reserve_near`] is of use with a table: one row of one bool. Parameter: `$1` its quoted name (text).
///
/// From PostgreSQL 14 on a range of places is read without reading all that is before it. A view has no places, and
/// those of another kind of storage need not mean the same; who may read single columns only may not read them.
pub const HAS_PLACES: &str = "SELECT current_setting('server_version_num')::int >= 140000 AND EXISTS (\
    SELECT FROM pg_class AS c JOIN pg_am AS a ON a.oid = c.relam WHERE c.oid = to_regclass($1::text) \
    AND c.relkind = 'r' AND a.amname = 'heap' AND has_table_privilege(c.oid, 'SELECT'))";

/// The clock counts microseconds, and a float8 of seconds holds them exactly until the year 2041.
const NOW: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::int8 * 1000";
/// When a row that is used now may be swept.
const EXPIRES: &str =
    "clock_timestamp() + make_interval(secs => (3600 + $5::int8 / 1000000000)::float8)";
/// Whether the throttle's row says what the caller knows of it.
const IS_KNOWN: &str = "(SELECT known FROM throttle)";
/// What a reservation answers, but for the row's place.
const ANSWER: &str = "CASE WHEN (SELECT known FROM throttle) THEN (value::numeric * 1000000000)::int8 END, \
    clock_timestamp(), (SELECT v FROM throttle)";

/// The throttle's row as it stood when the statement began: one lookup, whose cost does not show in the whole.
fn known(table: &Table) -> String {
    format!(
        "WITH throttle AS MATERIALIZED (SELECT v, coalesce(split_part(v, ' ', 1), '{NO_ROW}') = $8::text AS known \
         FROM (SELECT (SELECT value FROM {t} WHERE cache_key = $7::text) AS v) AS row)",
        t = table.quoted()
    )
}

/// The instant in a value that is a number, in nanoseconds.
const HELD: &str = "(c.value::numeric * 1000000000)::int8";

/// The cursor that the row `c` holds.
///
/// A value that is not a plain number counts as absent, and heals itself; so does one that would not fit into int8
/// nanoseconds (from the year 2255 on). Nothing is cast before the pattern has said that it can be.
fn cursor() -> String {
    format!("CASE WHEN c.value ~ '{NUMBER}' THEN {HELD} END")
}

/// Whether the cursor in the row `c`, if there is one, lies within the horizon.
fn believed() -> String {
    format!("CASE WHEN c.value ~ '{NUMBER}' THEN {HELD} - {NOW} <= $5::int8 ELSE true END")
}

/// Where a cursor stands that a reservation found beyond its horizon. Parameter: `$1` its key (text). Answers a row of the
/// cursor (int8 nanoseconds; NULL when the value is no number) and now (timestamptz), or none.
pub fn look(table: &Table) -> String {
    format!(
        "SELECT {cursor}, clock_timestamp() FROM {t} AS c WHERE cache_key = $1::text",
        cursor = cursor(),
        t = table.quoted()
    )
}

/// Where cursors stand. Parameter: `$1` their keys (text[]). Answers a row for each that has one: its key (text), and how far it
/// lies ahead of now (int8 nanoseconds; NULL when the value is no number).
pub fn standings(table: &Table) -> String {
    format!(
        "SELECT c.cache_key::text, {cursor} - {NOW} FROM {t} AS c WHERE cache_key = ANY($1::text[])",
        cursor = cursor(),
        t = table.quoted()
    )
}

/// Makes a cursor that is not believed count as absent, if it still stands where it was seen. Parameters: `$1` key (text),
/// `$2` that instant (int8 nanoseconds).
pub fn disbelieve(table: &Table) -> String {
    format!(
        "UPDATE {t} AS c SET value = '0' WHERE cache_key = $1::text AND {cursor} = $2::int8",
        cursor = cursor(),
        t = table.quoted()
    )
}

/// The text of a cursor after slots were taken from it.
fn moved(cursor: &str) -> String {
    let floor = format!("CASE WHEN $4::int8 - {NOW} <= $5::int8 THEN $4::int8 END");
    // A cursor behind our own floor was lost, and others may hold slots that it does not know of.
    let lost = format!(
        "CASE WHEN $4::int8 > {NOW} - $6::int8 AND coalesce({cursor}, 0) + {ROUNDING} < $4::int8 \
         THEN {NOW} + $6::int8 END"
    );
    format!(
        "((greatest({NOW} + $3::int8, {cursor}, {floor}, {lost}) + $2::int8) * 0.000000001)::text"
    )
}

/// An expression that makes the settings before it is evaluated, where they do not last.
fn with_settings(expression: String, pooled: bool) -> String {
    if !pooled {
        return expression;
    }
    format!(
        "CASE WHEN set_config('synchronous_commit', 'off', true) IS NOT NULL \
         AND set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true) IS NOT NULL THEN {expression} END"
    )
}

/// Writes the state of a throttle if its row still holds what was read, or what nobody can have written. Parameters: `$1` key,
/// `$2` what it must hold or NULL, `$3` the new text (text), `$4` seconds until it may be swept (float8). Answers one row:
/// whether it holds the new text (bool), and what it holds (text or NULL).
///
/// A row that holds something else is written as it was: only so can a statement tell what is there once it has the lock, and
/// not what was there when it began. (A trigger may change what is written, or prevent it.)
pub fn write_throttle(table: &Table) -> String {
    let ours =
        format!("(c.value IS NOT DISTINCT FROM $2::text OR octet_length(c.value) > {LONGEST})");
    format!(
        "WITH settings AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true), \
         set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)), \
         written AS (INSERT INTO {t} AS c (cache_key, value, expires) \
         SELECT $1::text, $3::text, clock_timestamp() + make_interval(secs => $4::float8) FROM settings \
         ON CONFLICT (cache_key) DO UPDATE SET value = CASE WHEN {ours} THEN excluded.value ELSE c.value END, \
         expires = CASE WHEN {ours} THEN excluded.expires ELSE c.expires END RETURNING value), \
         held AS (SELECT value FROM written UNION ALL \
         SELECT value FROM {t} WHERE cache_key = $1::text AND NOT EXISTS (SELECT FROM written)) \
         SELECT coalesce((SELECT value = $3::text FROM held), false), (SELECT left(value, {LONGEST} + 1) FROM held)",
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
/// for slots that others hold from before, `$4` where it has to stand at least, or NULL (int8 nanoseconds). It is never moved
/// ahead.
pub fn free_cursor(table: &Table) -> String {
    format!(
        "UPDATE {t} SET value = (least((value::numeric * 1000000000)::int8, greatest(\
         (date_part('epoch', clock_timestamp()) * 1000000)::int8 * 1000 + $3::int8, $4::int8)) * 0.000000001)::text \
         WHERE cache_key = $1::text AND CASE WHEN value ~ '{NUMBER}' \
         THEN value::numeric >= ($2::int8 - {PAUSES_APART}) * 0.000000001 ELSE false END",
        t = table.quoted()
    )
}

/// The throttles' rows of all hosts of a destination. Parameter: `$1` what their keys begin with (text).
pub fn throttles(table: &Table) -> String {
    format!(
        "SELECT cache_key::text, left(value, {LONGEST} + 1) FROM {} \
         WHERE starts_with(cache_key::text, $1::text) AND value IS NOT NULL",
        table.quoted()
    )
}

/// Rows by their keys. Parameter: `$1` the keys (text[]). Of a text that is too long to be ours only the beginning is read.
pub fn watched(table: &Table) -> String {
    format!(
        "SELECT cache_key::text, left(value, {LONGEST} + 1) FROM {} WHERE cache_key = ANY($1::text[])",
        table.quoted()
    )
}

/// The store's clock: one row of one timestamptz.
pub const CLOCK: &str = "SELECT clock_timestamp()";

/// The key of a reservation that is only tried and taken back. It is under the prefix, as a policy on rows may want it; no
/// destination can have it, for names have no blank; and `chance` makes it one that nobody else waits for.
pub fn rehearsal_key(key_prefix: &str, chance: u64) -> String {
    format!("{key_prefix}paceline rehearsal {chance:016x}")
}

/// Begins the transaction of a rehearsal. Should we vanish, the server ends it soon.
pub const BEGIN_REHEARSAL: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; \
    SET LOCAL idle_in_transaction_session_timeout = 2000";

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

/// Begins the transaction of a [`sweep`], which ends with it in no more than the time that a call may take.
pub const BEGIN_SWEEP: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = off; \
    SET LOCAL statement_timeout = 500; SET LOCAL idle_in_transaction_session_timeout = 2000";

/// Removes rows that are dead for sure, a part of them if they are many. Parameters: `$1` prefix (text), `$2` the names of all
/// destinations (text[]).
///
/// Dead is only what paceline writes itself and what says so itself: a lease that was not renewed; a throttle that was not
/// written for a day, and that of a whole destination only if it says that nothing is held back; and the cursor of a *host*
/// that has passed an hour ago. All of them besides with an `expires` that has passed. The cursor of a destination is never removed: other programs may move it, and they need not care for `expires`.
/// A row that somebody has locked is in use.
pub fn sweep(table: &Table) -> String {
    // A cursor that has passed means the same as none; what is no number was written by somebody else.
    let passed = format!(
        "CASE WHEN value ~ '{NUMBER}' THEN value::numeric < extract(epoch FROM now())::numeric - 3600 ELSE false END"
    );
    format!(
        "WITH dead AS MATERIALIZED (SELECT cache_key FROM {t} AS c, \
         LATERAL (SELECT substr(c.cache_key::text, length($1::text) + 1) AS rest) AS key \
         WHERE starts_with(c.cache_key::text, $1::text) AND expires < now() - interval '1 minute' AND CASE \
         WHEN rest ~ '^lease:[0-9]+$' THEN NOT (CASE WHEN value ~ '^[0-9]{{1,19}} ' \
         THEN split_part(value, ' ', 1)::numeric > (extract(epoch FROM now())::numeric - 60) * 1000000000 ELSE false END) \
         WHEN starts_with(rest, 'throttle:') THEN split_part(value, ' ', 1) = '1' OR NOT substr(rest, 10) = ANY($2::text[]) \
         WHEN position('/' IN rest) > 0 AND split_part(rest, '/', 1) = ANY($2::text[]) THEN {passed} \
         ELSE false END LIMIT 1000 FOR UPDATE OF c SKIP LOCKED) \
         DELETE FROM {t} WHERE cache_key IN (SELECT cache_key FROM dead)",
        t = table.quoted()
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
