//! From one TOML value to what it means: texts, numbers, durations, addresses, statuses, credentials.
//!
//! Pure functions, each with its complaint. They know no key; ranges and hints are arguments.

use std::{net::IpAddr, ops::RangeInclusive, str::FromStr, time::Duration};

use argon2::password_hash::phc;
use http::StatusCode;
use ipnet::IpNet;
use toml::de::DeValue;

use super::{
    ClientRange, PasswordHash, Rate,
    faults::{Complaint, cut, shown},
    rate::RateError,
    source::kind,
};

/// The most memory that checking one password may take (KiB): anybody who can reach the proxy can cause a check.
const ARGON2_MEMORY: u32 = 256 * 1024;

/// The most passes over it.
const ARGON2_PASSES: u32 = 32;

pub(super) fn text<'v>(value: &'v DeValue<'_>) -> Result<&'v str, Complaint> {
    match value {
        DeValue::String(text) => Ok(text),
        other => Err(Complaint::new(
            format!("is {}, not text", kind(other)),
            "write it in \"quotes\"",
        )),
    }
}

/// Text that is not empty and holds no control characters.
pub(super) fn printable<'v>(value: &'v DeValue<'_>) -> Result<&'v str, Complaint> {
    let text = text(value)?;
    if text.is_empty() {
        return Err(Complaint::new(
            "is empty",
            "write a value, or remove the key",
        ));
    }
    if text.chars().any(char::is_control) {
        return Err(Complaint::new("has control characters", "remove them"));
    }
    Ok(text)
}

pub(super) fn boolean(value: &DeValue<'_>) -> Result<bool, Complaint> {
    match value {
        DeValue::Boolean(flag) => Ok(*flag),
        other => Err(Complaint::new(
            format!("is {}", kind(other)),
            "write true or false without quotes",
        )),
    }
}

/// A whole number within the range.
pub(super) fn whole<T>(value: &DeValue<'_>, range: RangeInclusive<T>) -> Result<T, Complaint>
where
    T: Copy + Ord + std::fmt::Display + TryFrom<i64>,
{
    let fix = format!(
        "write a whole number from {} to {}",
        range.start(),
        range.end()
    );
    let DeValue::Integer(number) = value else {
        return Err(Complaint::new(format!("is {}", kind(value)), fix));
    };
    i64::from_str_radix(number.as_str(), number.radix())
        .ok()
        .and_then(|n| T::try_from(n).ok())
        .filter(|n| range.contains(n))
        .ok_or_else(|| Complaint::new(format!("{} is out of range", cut(number.as_str())), fix))
}

/// A duration such as "30s" within the range.
pub(super) fn duration(
    value: &DeValue<'_>,
    range: RangeInclusive<Duration>,
) -> Result<Duration, Complaint> {
    let fix = format!(
        "write a duration from {} to {} in quotes, such as \"{}\"",
        humantime::format_duration(*range.start()),
        humantime::format_duration(*range.end()),
        humantime::format_duration(
            (*range.start())
                .max(Duration::from_secs(30))
                .min(*range.end())
        ),
    );
    let text = match value {
        DeValue::String(text) => text,
        DeValue::Integer(number) => {
            return Err(Complaint::new(
                format!("{} has no unit", cut(number.as_str())),
                fix,
            ));
        }
        other => return Err(Complaint::new(format!("is {}", kind(other)), fix)),
    };
    match humantime::parse_duration(text) {
        Ok(duration) if range.contains(&duration) => Ok(duration),
        Ok(_) => Err(Complaint::new(
            format!("{} is out of range", shown(text)),
            fix,
        )),
        Err(_) => Err(Complaint::new(
            format!("{} is no duration", shown(text)),
            fix,
        )),
    }
}

/// One of a few words.
pub(super) fn word<T: Copy>(value: &DeValue<'_>, words: &[(&str, T)]) -> Result<T, Complaint> {
    let found = match value {
        DeValue::String(text) => words.iter().find(|(word, _)| word == text),
        _ => None,
    };
    found.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let wrong = match value {
            DeValue::String(text) => format!("{} is unknown", shown(text)),
            other => format!("is {}", kind(other)),
        };
        let words: Vec<_> = words
            .iter()
            .map(|(word, _)| format!("\"{word}\""))
            .collect();
        Complaint::new(wrong, format!("write {}", words.join(" or ")))
    })
}

/// Any text that the type can read; `fix` says what is expected.
pub(super) fn parsed<T: FromStr>(
    value: &DeValue<'_>,
    what: &str,
    fix: &str,
) -> Result<T, Complaint> {
    let text = text(value)?;
    text.parse()
        .map_err(|_| Complaint::new(format!("{} is no {what}", shown(text)), fix))
}

/// A status by which a server refuses: 400 to 599.
pub(super) fn status(value: &DeValue<'_>) -> Result<StatusCode, Complaint> {
    let code = whole(value, 400..=599u16)?;
    StatusCode::from_u16(code)
        .map_err(|_| Complaint::new("is no status", "write a number from 400 to 599"))
}

/// A ceiling: a number of requests per second, or `count/unit`.
pub(super) fn rate(value: &DeValue<'_>) -> Result<Rate, Complaint> {
    let float = |digits: &str| digits.parse().map_err(|_| RateError::Form);
    let integer = |digits: &str, radix| match i64::from_str_radix(digits, radix) {
        Ok(number) => Rate::per_second(number as f64),
        Err(_) => Err(RateError::TooFast),
    };
    let (given, rate) = match value {
        DeValue::String(text) => (shown(text), text.parse()),
        DeValue::Float(number) => (
            cut(number.as_str()),
            float(number.as_str()).and_then(Rate::per_second),
        ),
        DeValue::Integer(number) => (
            cut(number.as_str()),
            integer(number.as_str(), number.radix()),
        ),
        other => (kind(other).to_owned(), Err(RateError::Form)),
    };
    rate.map_err(|error| {
        let complaint = Complaint::from_message(&error);
        Complaint::new(format!("{given} {}", complaint.wrong), complaint.fix)
    })
}

/// An address or CIDR range.
pub(super) fn net(value: &DeValue<'_>) -> Result<IpNet, Complaint> {
    net_from(
        text(value)?,
        "write an address or a CIDR range such as \"10.0.0.0/8\"",
    )
}

/// An entry of `allow_clients`.
pub(super) fn clients(value: &DeValue<'_>) -> Result<ClientRange, Complaint> {
    match text(value)? {
        "loopback" => Ok(ClientRange::Loopback),
        "private" => Ok(ClientRange::Private),
        "any" => Ok(ClientRange::Any),
        other => net_from(
            other,
            "write \"loopback\", \"private\", \"any\", or a CIDR range such as \"10.0.0.0/8\"",
        )
        .map(ClientRange::Net),
    }
}

fn net_from(text: &str, fix: &str) -> Result<IpNet, Complaint> {
    let net = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => text
            .parse::<IpNet>()
            .map_err(|_| Complaint::new(format!("{} is no address range", shown(text)), fix))?,
    };
    if let IpNet::V6(v6) = net
        && v6.prefix_len() >= 96
        && v6.addr().to_ipv4_mapped().is_some()
    {
        // Peers and hosts are folded to IPv4, so that such a range would match nothing.
        return Err(Complaint::new(
            format!("{text} is IPv4 mapped into IPv6"),
            "write the IPv4 range",
        ));
    }
    if net.trunc() != net {
        // 10.1.2.3/8 allows 16 million addresses where perhaps one was meant.
        return Err(Complaint::new(
            format!("{text} has bits set behind its prefix"),
            format!(
                "write {} for the range, or {} for the one address",
                net.trunc(),
                net.addr()
            ),
        ));
    }
    Ok(net)
}

/// The hash of a password. The complaint never holds the value: it may be the password.
pub(super) fn password_hash(value: &DeValue<'_>) -> Result<PasswordHash, Complaint> {
    const FIX: &str = "store a hash: `printf %s PASSWORD | sha256sum` for a long random password, \
                       `printf %s PASSWORD | argon2 SALT -id -e` for any other";
    let text = text(value)?;
    if text.starts_with('$') {
        return argon2_hash(text, FIX);
    }
    let hex = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
    let mut digest = [0; 32];
    let digits: Option<Vec<u8>> = hex
        .iter()
        .map(|b| {
            char::from(*b)
                .to_digit(16)
                .and_then(|d| u8::try_from(d).ok())
        })
        .collect();
    match digits {
        Some(digits) if digits.len() == 64 => {
            for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
                *byte = pair[0] << 4 | pair[1];
            }
            Ok(PasswordHash::Sha256(digest))
        }
        _ if text.starts_with("sha256:") => Err(Complaint::new(
            "has no 64 hexadecimal digits after \"sha256:\"",
            FIX,
        )),
        _ => Err(Complaint::new(
            "is no hash, perhaps a password in clear",
            FIX,
        )),
    }
}

fn argon2_hash(text: &str, fix: &str) -> Result<PasswordHash, Complaint> {
    let malformed = || Complaint::new("is no complete argon2 hash in PHC form", fix);
    let hash = phc::PasswordHash::new(text).map_err(|_| malformed())?;
    argon2::Algorithm::try_from(hash.algorithm.as_str()).map_err(|_| malformed())?;
    let params = argon2::Params::try_from(&hash).map_err(|_| malformed())?;
    if hash.salt.is_none() || hash.hash.is_none() {
        return Err(malformed());
    }
    if params.m_cost() > ARGON2_MEMORY || params.t_cost() > ARGON2_PASSES {
        return Err(Complaint::new(
            "costs too much to check for each request",
            format!("make the hash with at most m={ARGON2_MEMORY} (KiB) and t={ARGON2_PASSES}"),
        ));
    }
    Ok(PasswordHash::Argon2(text.to_owned()))
}
