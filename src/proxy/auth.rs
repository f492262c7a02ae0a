//! Proxy credentials: `Proxy-Authorization: Basic` (RFC 7617) against stored hashes.
//!
//! A credential that verified once is remembered by a keyed digest, so that argon2 is paid once per user and not per
//! request. Unknown users cost the same work as known ones.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use argon2::{Argon2, PasswordHash, PasswordVerifier as _};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, header::PROXY_AUTHORIZATION};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::Semaphore;

use crate::{
    config::{self, PasswordHash as Stored},
    error::Error,
};

/// Digests remembered at most; more than this means that somebody changes passwords, or guesses.
const REMEMBERED: usize = 4_096;
/// Hashes computed at once: each takes a processor, and argon2 much memory.
const HASHES_AT_ONCE: usize = 1;
/// Credentials longer than this are not looked at.
const LONGEST: usize = 1_024;

/// The users of `[proxy.auth]`.
pub struct Credentials {
    users: BTreeMap<Arc<str>, Stored>,
    verified: Mutex<HashSet<[u8; 32]>>,
    hashing: Semaphore,
    key: [u8; 32],
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("users", &self.users.len())
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// From the configuration. Users that stand in `before` with the same hash go on being the same users.
    pub fn new(auth: &config::Auth, before: Option<&Credentials>) -> Self {
        let mut key = [0; 32];
        // Keyed by chance: what is remembered here is worth nothing elsewhere.
        for chunk in key.chunks_mut(8) {
            use std::hash::BuildHasher as _;
            chunk.copy_from_slice(&std::hash::RandomState::new().hash_one(0u8).to_ne_bytes());
        }
        let same = |name: &str, hash: &Stored| {
            let (own, old) = before?.users.get_key_value(name)?;
            (old == hash).then(|| own.clone())
        };
        let user = |(name, hash): (&String, &Stored)| {
            let own = same(name, hash).unwrap_or_else(|| Arc::from(name.as_str()));
            (own, hash.clone())
        };
        let users = auth.users.iter().map(user).collect();
        Credentials {
            users,
            verified: Mutex::default(),
            hashing: Semaphore::new(HASHES_AT_ONCE),
            key,
        }
    }

    /// The user whose credentials the request carries. Hashing is slow by design, so it is done beside the runtime and
    /// few at a time: whoever guesses waits for other guessers, and nobody else does.
    ///
    /// # Errors
    /// There are none, or they are wrong; which of both is not told.
    pub async fn check(&self, headers: &HeaderMap) -> Result<Arc<str>, Error> {
        let (name, password) = basic(headers).ok_or(Error::CredentialsNeeded)?;
        let digest: [u8; 32] = Sha256::new()
            .chain_update(self.key)
            .chain_update(&name)
            .chain_update([0])
            .chain_update(&password)
            .finalize()
            .into();
        let known = self.users.get_key_value(name.as_str());
        if let (true, Some((user, _))) = (self.verified().contains(&digest), known) {
            return Ok(user.clone());
        }
        let mut hashes: Vec<Stored> = known.map(|(_, hash)| hash.clone()).into_iter().collect();
        // The slowest hash is tried beside any other, so that neither unknown users nor kinds of hash show in the time.
        let is_slow = |hash: &&Stored| matches!(hash, Stored::Argon2(_));
        if !hashes.iter().any(|hash| is_slow(&hash)) {
            hashes.extend(self.users.values().find(is_slow).cloned());
        }
        let ours = known.is_some();
        let Ok(permit) = self.hashing.acquire().await else {
            return Err(Error::CredentialsNeeded);
        };
        let checked = tokio::task::spawn_blocking(move || {
            let all: Vec<bool> = hashes.iter().map(|hash| matches(hash, &password)).collect();
            ours && all.first() == Some(&true)
        });
        let right = checked.await.unwrap_or(false);
        drop(permit);
        let (true, Some((user, _))) = (right, known) else {
            return Err(Error::CredentialsNeeded);
        };
        let mut remembered = self.verified();
        if remembered.len() >= REMEMBERED {
            remembered.clear();
        }
        remembered.insert(digest);
        Ok(user.clone())
    }

    /// Whether a user that [`Credentials::check`] found, perhaps of those that were in force before, may still use the
    /// proxy: its name is the very one that was handed out, for a user with a new password gets a new one.
    pub fn stand(&self, user: &Arc<str>) -> bool {
        let own = self.users.get_key_value(user);
        own.is_some_and(|(own, _)| Arc::ptr_eq(own, user))
    }

    fn verified(&self) -> MutexGuard<'_, HashSet<[u8; 32]>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn matches(hash: &Stored, password: &str) -> bool {
    match hash {
        Stored::Argon2(phc) => PasswordHash::new(phc).is_ok_and(|parsed| {
            Argon2::default()
                .verify_password(password.as_bytes(), &parsed)
                .is_ok()
        }),
        Stored::Sha256(digest) => Sha256::digest(password.as_bytes())
            .as_slice()
            .ct_eq(digest)
            .into(),
    }
}

fn basic(headers: &HeaderMap) -> Option<(String, String)> {
    let mut values = headers.get_all(PROXY_AUTHORIZATION).iter();
    let value = values.next()?;
    if values.next().is_some() || value.len() > LONGEST {
        return None;
    }
    let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (name, password) = decoded.split_once(':')?;
    (!password.is_empty()).then(|| (name.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials() -> Credentials {
        let argon2 = {
            use argon2::PasswordHasher as _;
            let params = argon2::Params::new(8, 1, 1, None).expect("small but valid");
            let hasher = Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, params);
            hasher
                .hash_password_with_salt(b"open:sesame", b"0123456789abcdef")
                .expect("hashed")
                .to_string()
        };
        let users = BTreeMap::from([
            ("ali".to_owned(), Stored::Argon2(argon2)),
            (
                "bab".to_owned(),
                Stored::Sha256(Sha256::digest(b"secret").into()),
            ),
        ]);
        Credentials::new(&config::Auth { users }, None)
    }

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(PROXY_AUTHORIZATION, value.parse().expect("a value"))])
    }

    fn login(user: &str, password: &str) -> HeaderMap {
        with(&format!(
            "Basic {}",
            STANDARD.encode(format!("{user}:{password}"))
        ))
    }

    #[tokio::test]
    async fn right_credentials_pass_and_keep_passing() {
        let c = credentials();
        for _ in 0..3 {
            assert_eq!(
                c.check(&login("ali", "open:sesame")).await.as_deref(),
                Ok("ali")
            );
            assert_eq!(c.check(&login("bab", "secret")).await.as_deref(), Ok("bab"));
        }
    }

    #[tokio::test]
    async fn after_a_change_only_users_with_the_same_hash_stand() {
        let before = credentials();
        let user = before.check(&login("bab", "secret")).await.expect("right");
        let with = |hash: &[u8]| {
            let stored = Stored::Sha256(Sha256::digest(hash).into());
            let users = BTreeMap::from([("bab".to_owned(), stored)]);
            Credentials::new(&config::Auth { users }, Some(&before))
        };
        let (same, changed) = (with(b"secret"), with(b"other"));
        assert!(before.stand(&user) && same.stand(&user));
        assert!(!changed.stand(&user));
        let old = changed.check(&login("bab", "secret")).await;
        assert_eq!(old, Err(Error::CredentialsNeeded));
        let again = changed.check(&login("bab", "other")).await.expect("right");
        assert!(changed.stand(&again) && !same.stand(&again));
    }

    #[tokio::test]
    async fn everything_else_is_turned_away() {
        let c = credentials();
        for headers in [
            HeaderMap::new(),
            login("ali", "secret"),
            login("bab", "open:sesame"),
            login("eve", "secret"),
            login("bab", ""),
            with("Bearer secret"),
            with("Basic ???"),
            with("Basic"),
            with(&format!("Basic {}", STANDARD.encode([0xff, 0xfe]))),
            with(&format!("Basic {}", STANDARD.encode("x".repeat(2_000)))),
        ] {
            assert_eq!(c.check(&headers).await, Err(Error::CredentialsNeeded));
        }
        let mut twice = login("bab", "secret");
        twice.append(PROXY_AUTHORIZATION, "Basic x".parse().expect("a value"));
        assert_eq!(c.check(&twice).await, Err(Error::CredentialsNeeded));
    }
}
