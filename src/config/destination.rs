//! `[[destination]]`: the groups that say what is paced, and how they may not collide.
//!
//! Two destinations never share a name or a host: a request under two ceilings would have none.

use std::{ops::RangeInclusive, time::Duration};

use http::StatusCode;
use toml::de::DeValue;

use super::{
    Destination, LONGEST_STOP, OpaqueH2, Scope, Store, TlsMode, default,
    faults::{Complaint, Place, shown},
    parse::values,
    source::{Section, kind},
    value,
};
use crate::authority::{Host, HostPattern, MAX_LABEL};

/// The longest key of a row, in characters: that of a Django cache table, `varchar(255)`.
pub const KEY_LIMIT: usize = 255;
/// What stands between the prefix and the name in the key of a throttle's row.
pub const THROTTLE_PREFIX: &str = "throttle:";

/// The longest name of a destination, in bytes; it is a metric label and part of a key.
const LONGEST_NAME: usize = 64;

const MAX_IN_FLIGHT: RangeInclusive<usize> = 1..=100_000;
const LOCKOUT_AFTER: RangeInclusive<u32> = 1..=100;
const LOCKOUT_FOR: RangeInclusive<Duration> = Duration::from_secs(1)..=LONGEST_STOP;
const RECOVERY_AFTER: RangeInclusive<u32> = 1..=1_000_000;
const RETRY_AFTER_CAP: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(86_400);
const RETRY_THROTTLED: RangeInclusive<u32> = 0..=10;

/// A pattern that was read, with where and for whom.
struct Claim {
    pattern: HostPattern,
    place: Place,
    /// Index of the destination.
    owner: usize,
}

/// The destination in force without a file.
pub(super) fn built_in() -> Destination {
    let hosts = default::HOSTS.map(|text| {
        text.parse()
            .expect("the constants are host patterns, as a test shows")
    });
    Destination {
        name: default::DESTINATION.to_owned(),
        hosts: hosts.to_vec(),
        rate: default::RATE,
        scope: Scope::Destination,
        tls: TlsMode::Intercept,
        opaque_h2: OpaqueH2::Deny,
        max_in_flight: None,
        throttle_status: default::THROTTLE_STATUS.to_vec(),
        lockout_status: Vec::new(),
        lockout_after: default::LOCKOUT_AFTER,
        lockout_for: default::LOCKOUT_FOR,
        recovery_after: default::RECOVERY_AFTER,
        retry_after_cap: default::RETRY_AFTER_CAP,
        retry_throttled: default::RETRY_THROTTLED,
        dry_run: false,
    }
}

/// All destinations of a file, in its order.
pub(super) fn read_all(top: &Section<'_, '_>, store: Option<&Store>) -> Vec<Destination> {
    const EXAMPLE: &str = "write [[destination]] with name, hosts and rate";
    let fault =
        |place, wrong: String, fix| top.fault(place, "destination", Complaint::new(wrong, fix));
    let array = match top.find("destination") {
        Some((_, DeValue::Array(array))) if !array.is_empty() => array,
        None | Some((_, DeValue::Array(_))) => {
            let wrong = "there is none, so that nothing would be paced".to_owned();
            fault(top.place_of("destination"), wrong, EXAMPLE);
            return Vec::new();
        }
        Some((place, DeValue::Table(_))) => {
            let fix = "write [[destination]] in double brackets, once for each destination";
            fault(place, "is a single group".to_owned(), fix);
            return Vec::new();
        }
        Some((place, other)) => {
            fault(place, format!("is {}", kind(other)), EXAMPLE);
            return Vec::new();
        }
    };
    let mut destinations: Vec<Destination> = Vec::new();
    let mut names: Vec<(Place, String)> = Vec::new();
    let mut claims: Vec<Claim> = Vec::new();
    for (owner, element) in array.iter().enumerate() {
        let place = top.source.place(&element.span());
        let DeValue::Table(table) = element.get_ref() else {
            fault(place, format!("is {}", kind(element.get_ref())), EXAMPLE);
            continue;
        };
        let section = Section::new(top.source, "destination", table, place);
        let (destination, patterns) = read(&section);
        if !destination.name.is_empty() {
            check_name(&section, &destination.name, &mut names);
        }
        for (place, pattern) in patterns {
            let claim = Claim {
                pattern,
                place,
                owner,
            };
            check_claim(&section, &claim, &claims);
            if let (Some(store), Scope::Host) = (store, destination.scope) {
                check_key(&section, &claim, &destination.name, store);
            }
            claims.push(claim);
        }
        destinations.push(destination);
    }
    destinations
}

/// One destination; where a required key is missing or wrong, a stand-in goes with the fault.
fn read(section: &Section<'_, '_>) -> (Destination, Vec<(Place, HostPattern)>) {
    const HOSTS: &str = "write hosts = [\"example.com\", \"*.example.com\"]";
    if section.find("hosts").is_none() {
        section.fault(
            section.place_of("hosts"),
            "hosts",
            Complaint::new("is missing", HOSTS),
        );
    }
    let patterns = section
        .nonempty_list("hosts", HOSTS, host_pattern)
        .unwrap_or_default();
    let statuses = |key| values(section.list(key, value::status));
    let destination = Destination {
        name: section
            .require(
                "name",
                "write name = \"...\"; it labels metrics and names the cursor",
                name,
            )
            .unwrap_or_default(),
        hosts: patterns
            .iter()
            .map(|(_, pattern)| pattern.clone())
            .collect(),
        rate: section
            .require(
                "rate",
                "write requests per second as in rate = 7.0, or \"30/min\"",
                value::rate,
            )
            .unwrap_or(default::RATE),
        scope: section
            .read("scope", |v| {
                value::word(
                    v,
                    &[("destination", Scope::Destination), ("host", Scope::Host)],
                )
            })
            .unwrap_or(Scope::Destination),
        tls: section
            .read("tls", |v| {
                value::word(
                    v,
                    &[
                        ("intercept", TlsMode::Intercept),
                        ("opaque", TlsMode::Opaque),
                    ],
                )
            })
            .unwrap_or(TlsMode::Intercept),
        opaque_h2: section
            .read("opaque_h2", |v| {
                value::word(
                    v,
                    &[
                        ("deny", OpaqueH2::Deny),
                        ("per-record", OpaqueH2::PerRecord),
                    ],
                )
            })
            .unwrap_or(OpaqueH2::Deny),
        max_in_flight: section.read("max_in_flight", |v| value::whole(v, MAX_IN_FLIGHT)),
        throttle_status: statuses("throttle_status").unwrap_or(default::THROTTLE_STATUS.to_vec()),
        lockout_status: statuses("lockout_status").unwrap_or_default(),
        lockout_after: section
            .read("lockout_after", |v| value::whole(v, LOCKOUT_AFTER))
            .unwrap_or(default::LOCKOUT_AFTER),
        lockout_for: section
            .read("lockout_for", |v| value::duration(v, LOCKOUT_FOR))
            .unwrap_or(default::LOCKOUT_FOR),
        recovery_after: section
            .read("recovery_after", |v| value::whole(v, RECOVERY_AFTER))
            .unwrap_or(default::RECOVERY_AFTER),
        retry_after_cap: section
            .read("retry_after_cap", |v| value::duration(v, RETRY_AFTER_CAP))
            .unwrap_or(default::RETRY_AFTER_CAP),
        retry_throttled: section
            .read("retry_throttled", |v| value::whole(v, RETRY_THROTTLED))
            .unwrap_or(default::RETRY_THROTTLED),
        dry_run: section.read("dry_run", value::boolean).unwrap_or(false),
    };
    check_statuses(section, &destination);
    (destination, patterns)
}

fn name(value: &DeValue<'_>) -> Result<String, Complaint> {
    let text = value::text(value)?;
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    if (1..=LONGEST_NAME).contains(&text.len()) && text.bytes().all(allowed) {
        return Ok(text.to_owned());
    }
    Err(Complaint::new(
        format!("{} is no name of a destination", shown(text)),
        "write 1 to 64 ASCII letters, digits, dots, hyphens and underscores",
    ))
}

fn host_pattern(value: &DeValue<'_>) -> Result<HostPattern, Complaint> {
    let text = value::text(value)?;
    text.parse().map_err(|error| {
        let complaint = Complaint::from_message(&error);
        Complaint::new(
            format!("{}: {}", shown(text), complaint.wrong),
            complaint.fix,
        )
    })
}

fn check_name(section: &Section<'_, '_>, name: &str, names: &mut Vec<(Place, String)>) {
    let place = section.place_of("name");
    match names.iter().find(|(_, other)| other == name) {
        Some((first, _)) => {
            let wrong = format!(
                "{name:?} is the name of the destination {} too",
                in_line(first)
            );
            let complaint = Complaint::new(wrong, "choose another, since it names the cursor");
            section.fault(place, "name", complaint);
        }
        None => names.push((place, name.to_owned())),
    }
}

fn check_claim(section: &Section<'_, '_>, claim: &Claim, claims: &[Claim]) {
    let pattern = &claim.pattern;
    let complaint = claims.iter().find_map(|other| {
        let place = in_line(&other.place);
        if other.owner == claim.owner {
            let twice = other.pattern == *pattern;
            return twice.then(|| {
                Complaint::new(
                    format!("\"{pattern}\" is {place} already"),
                    "remove one of the two",
                )
            });
        }
        let wrong = match other.pattern == *pattern {
            true => format!("\"{pattern}\" belongs to another destination {place}"),
            false => format!(
                "\"{pattern}\" overlaps \"{}\" of another destination {place}",
                other.pattern
            ),
        };
        other.pattern.overlaps(pattern).then(|| {
            Complaint::new(
                wrong,
                "give each host to one destination, since it can have one ceiling only",
            )
        })
    });
    if let Some(complaint) = complaint {
        section.fault(claim.place.clone(), "hosts", complaint);
    }
}

/// With a cursor per host, the key must have room for the host; for a wildcard, for one more label of any length.
fn check_key(section: &Section<'_, '_>, claim: &Claim, name: &str, store: &Store) {
    let base = match claim.pattern.as_constraint_base() {
        Host::Name(base) if claim.pattern.to_string().starts_with('*') => {
            base.len() + 1 + MAX_LABEL
        }
        base => base.to_string().len(),
    };
    let before = store.key_prefix.chars().count() + THROTTLE_PREFIX.len();
    let key = before + name.len() + 1 + base;
    if key > KEY_LIMIT {
        let wrong = format!(
            "keys for \"{}\" would have {key} characters, and the table has room for {KEY_LIMIT}",
            claim.pattern
        );
        let fix = "shorten store.key_prefix or name, or use scope = \"destination\"";
        section.fault(claim.place.clone(), "hosts", Complaint::new(wrong, fix));
    }
}

fn check_statuses(section: &Section<'_, '_>, destination: &Destination) {
    let throttle: &[StatusCode] = &destination.throttle_status;
    let both = destination
        .lockout_status
        .iter()
        .find(|status| throttle.contains(status));
    if let Some(status) = both {
        let note = match section.find("throttle_status") {
            Some(_) => "",
            None => " (by default)",
        };
        let wrong = format!("{} is in throttle_status{note} too", status.as_u16());
        let complaint = Complaint::new(wrong, "list each status in one of the two");
        section.fault(
            section.place_of("lockout_status"),
            "lockout_status",
            complaint,
        );
    }
}

fn in_line(place: &Place) -> String {
    match place {
        Place::Line(_, line) => format!("in line {line}"),
        Place::File(_) | Place::Variable(_) => "elsewhere".to_owned(),
    }
}
