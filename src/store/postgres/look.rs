//! What stands in the rows of cursors, in words: whether anybody moves them, and when that was last.
//!
//! A mistyped table, prefix or name makes a second budget without any error: the row that other programs move is then another.

use tokio_postgres::types::{ToSql, Type};

use super::{error::StoreError, session::Session, sql, sql::Table};
use crate::{
    config::{self, Scope},
    pacing::time::{Nanos, SECOND, seconds},
};

/// How a cursor's row was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// There is none.
    NoRow,
    /// It holds no number.
    NoNumber,
    /// The cursor stands this far ahead of the store's clock; negative: it has passed.
    Ahead(Nanos),
}

/// One line for each of the `destinations` that has a cursor of its own, in their order.
///
/// # Errors
/// The rows could not be read.
pub(super) async fn cursors(
    session: &Session,
    table: &Table,
    key_prefix: &str,
    destinations: &[config::Destination],
) -> Result<Vec<String>, StoreError> {
    let own = destinations
        .iter()
        .filter(|d| d.scope == Scope::Destination);
    let keyed: Vec<(String, Nanos)> = own
        .map(|d| {
            let interval = Nanos::try_from(d.rate.interval_nanos()).unwrap_or(Nanos::MAX);
            (format!("{key_prefix}{}", d.name), interval)
        })
        .collect();
    let keys: Vec<&str> = keyed.iter().map(|(key, _)| key.as_str()).collect();
    let params: [(&(dyn ToSql + Sync), Type); 1] = [(&keys, Type::TEXT_ARRAY)];
    let rows = session
        .client
        .query_typed(&sql::standings(table), &params)
        .await?;
    let mut found = std::collections::HashMap::new();
    for row in &rows {
        let ahead: Option<i64> = row.try_get(1)?;
        let how = ahead.map_or(Found::NoNumber, Found::Ahead);
        found.insert(row.try_get::<_, String>(0)?, how);
    }
    let line = |(key, interval): &(String, Nanos)| {
        let how = found.get(key).copied().unwrap_or(Found::NoRow);
        format!("cursor {key}: {}", sentence(how, *interval))
    };
    Ok(keyed.iter().map(line).collect())
}

/// What a row that was found so says about those who move it.
fn sentence(found: Found, interval: Nanos) -> String {
    match found {
        Found::NoRow => {
            "no row, so nobody moves it yet (if other programs share this ceiling, check store.table, \
             store.key_prefix and the destination's name)"
                .to_owned()
        }
        Found::NoNumber => "the row holds no number; the first reservation puts one there".to_owned(),
        // The last slot began an interval before the cursor.
        Found::Ahead(ahead) => match interval.saturating_sub(ahead) {
            ago if ago >= 0 => format!("moved {} ago", span(ago)),
            _ => format!("moved, and ahead by {}", span(ahead)),
        },
    }
}

fn span(nanos: Nanos) -> String {
    let s = seconds(nanos);
    match nanos / SECOND {
        ..10 => format!("{s:.1} s"),
        10..180 => format!("{s:.0} s"),
        180..7_200 => format!("{:.0} min", s / 60.0),
        7_200..172_800 => format!("{:.0} h", s / 3_600.0),
        _ => format!("{:.0} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_when_it_was_moved_last() {
        let interval = SECOND / 7;
        for (ahead, words) in [
            (interval, "moved 0.0 s ago"),
            (-SECOND / 7 * 6, "moved 1.0 s ago"),
            (-60 * SECOND, "moved 60 s ago"),
            (-900 * SECOND, "moved 15 min ago"),
            (-86_400 * SECOND, "moved 24 h ago"),
            (-10 * 86_400 * SECOND, "moved 10 days ago"),
            (5 * SECOND, "moved, and ahead by 5.0 s"),
        ] {
            assert_eq!(sentence(Found::Ahead(ahead), interval), words, "{ahead}");
        }
        assert!(sentence(Found::NoRow, interval).starts_with("no row, so nobody moves it yet"));
        assert!(sentence(Found::NoNumber, interval).contains("no number"));
    }
}
