//! The keys that a configuration may hold, and what an unknown one was probably meant to be.
//!
//! One list for the parser, its messages and the test that holds `docs/configuration.md` to the code.

/// The groups and their keys, in the order of the manual. The name `destination` stands for each `[[destination]]`.
pub const GROUPS: &[Group] = &[
    Group {
        name: "proxy",
        keys: &[
            "listen",
            "proxy_protocol_from",
            "allow_clients",
            "open",
            "via",
            "max_wait",
            "max_connections",
            "max_connections_per_client",
            "drain",
            "ungoverned",
            "refusal_status",
            "connect_ports",
            "allow_upstreams",
            "auth",
        ],
    },
    Group {
        name: "proxy.auth",
        keys: &["users"],
    },
    Group {
        name: "admin",
        keys: &["listen", "token"],
    },
    Group {
        name: "store",
        keys: &[
            "url",
            "table",
            "key_prefix",
            "max_replicas",
            "replica",
            "foreign_fetchers",
            "lease_ttl",
        ],
    },
    Group {
        name: "ca",
        keys: &["dir"],
    },
    Group {
        name: "upstream",
        keys: &["extra_roots", "resolve"],
    },
    Group {
        name: "destination",
        keys: &[
            "name",
            "hosts",
            "rate",
            "scope",
            "tls",
            "opaque_h2",
            "max_in_flight",
            "throttle_status",
            "lockout_status",
            "lockout_after",
            "lockout_for",
            "recovery_after",
            "retry_after_cap",
            "retry_throttled",
            "dry_run",
        ],
    },
];

/// The groups at the top of the file.
pub const TOP: &[&str] = &["proxy", "admin", "store", "ca", "upstream", "destination"];

/// A group of keys.
pub struct Group {
    /// Its name as in `[name]`.
    pub name: &'static str,
    /// Its keys, groups within it included.
    pub keys: &'static [&'static str],
}

/// The keys that belong in the group; none for a name that is no group.
pub(super) fn of(group: &str) -> &'static [&'static str] {
    GROUPS
        .iter()
        .find(|g| g.name == group)
        .map_or(&[], |g| g.keys)
}

/// What to change about a key that the group doesn't have: the nearest known key, the group it belongs to, or all of
/// the group's keys.
pub(super) fn advice(key: &str, group: &str, known: &[&str]) -> String {
    if let Some(nearest) = nearest(key, known) {
        return format!("did you mean `{nearest}`?");
    }
    let lower = folded(key);
    let elsewhere = GROUPS
        .iter()
        .find(|g| g.name != group && g.keys.contains(&lower.as_str()));
    match elsewhere {
        Some(g) if g.name == "destination" => "it belongs in [[destination]]".to_owned(),
        Some(g) => format!("it belongs in [{}]", g.name),
        None => format!("remove it, or use one of {}", known.join(", ")),
    }
}

/// The known word that was probably meant.
pub fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let word = folded(word);
    let all = known.iter().map(|k| (distance(&word, k), *k));
    let (distance, nearest) = all.min()?;
    (distance <= 1 + nearest.len() / 4).then_some(nearest)
}

fn folded(key: &str) -> String {
    key.to_lowercase().replace('-', "_")
}

/// Insertions, deletions, replacements and swaps of neighbours between two short texts (Damerau's distance, the
/// restricted one).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replace.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(before[j - 2] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_recognised() {
        for (key, group, advice_is) in [
            ("lisen", "proxy", "did you mean `listen`?"),
            ("max-wait", "proxy", "did you mean `max_wait`?"),
            ("Listen", "proxy", "did you mean `listen`?"),
            ("tabel", "store", "did you mean `table`?"),
            ("host", "destination", "did you mean `hosts`?"),
            ("rate", "proxy", "it belongs in [[destination]]"),
            ("table", "proxy", "it belongs in [store]"),
            ("colour", "ca", "remove it, or use one of dir"),
        ] {
            assert_eq!(advice(key, group, of(group)), advice_is, "{key}");
        }
    }

    #[test]
    fn distance_counts_single_edits() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "abc"), 0);
        assert_eq!(distance("acb", "abc"), 1);
        assert_eq!(distance("ab", "abc"), 1);
        assert_eq!(distance("xbc", "abc"), 1);
        assert_eq!(distance(&"a".repeat(10_000), ""), 64);
    }
}
