//! Proxy credentials: `Proxy-Authorization: Basic` (RFC 7617) against stored hashes.
//!
//! What a credential turned out to be is remembered by a keyed digest, so that argon2 is paid once for each and not per
//! request, by a fleet with a wrong password as little as by one with the right one. Unknown users cost the same work as
//! known ones. How often an address may have new ones tried is in `guesses`.

mod guesses;

use std::{
    collections::{BTreeMap, HashMap},
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use argon2::{Argon2, PasswordHash, PasswordVerifier as _};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, header::PROXY_AUTHORIZATION};
use lru::LruCache;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::Semaphore;

use crate::{
    config::{self, PasswordHash as Stored},
    error::Error,
    pacing::{queue::Client, time::LocalTime},
    proxy::auth::guesses::Guesses,
};

/// Credentials remembered at most, right and wrong ones each.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();
/// Hashes computed at once: each takes a processor, and argon2 much memory.
const HASHES_AT_ONCE: usize = 1;
/// Credentials longer than this are not looked at.
const LONGEST: usize = 1_024;

type Digest = [u8; 32];

/// The users of `[proxy.auth]`.
pub struct Credentials {
    users: BTreeMap<Arc<str>, Stored>,
    known: Mutex<Known>,
    hashing: Arc<Semaphore>,
    key: [u8; 32],
}

/// What is known of credentials without hashing them.
struct Known {
    right: LruCache<Digest, ()>,
    /// Kept apart, so that guesses push no right one out.
    wrong: LruCache<Digest, ()>,
    /// Being hashed, or waiting for it, by how many requests wait for the same.
    pending: HashMap<Digest, usize>,
    guesses: Guesses,
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
            known: Mutex::new(Known {
                right: LruCache::new(REMEMBERED),
                wrong: LruCache::new(REMEMBERED),
                pending: HashMap::new(),
                guesses: Guesses::new(),
            }),
            hashing: Arc::new(Semaphore::new(HASHES_AT_ONCE)),
            key,
        }
    }

    /// The user whose credentials the request of the address `from` carries. Hashing is slow by design, so it is done
    /// beside the runtime and few at a time: whoever guesses waits for other guessers, and is soon told to come back
    /// later.
    ///
    /// # Errors
    /// There are no credentials, or they are wrong (whether there is such a user is not told), or the address has had too
    /// many wrong ones tried of late.
    pub async fn check(&self, from: Client, headers: &HeaderMap) -> Result<Arc<str>, Error> {
        let (name, password) = basic(headers).ok_or(Error::CredentialsNeeded)?;
        let digest: Digest = Sha256::new()
            .chain_update(self.key)
            .chain_update(&name)
            .chain_update([0])
            .chain_update(&password)
            .finalize()
            .into();
        let user = self.users.get_key_value(name.as_str());
        if let Some(verdict) = self.recall(&digest, user.map(|(name, _)| name)) {
            return verdict;
        }
        let _pending = Pending::new(self, digest, from)?;
        let Ok(permit) = self.hashing.clone().acquire_owned().await else {
            return Err(Error::CredentialsNeeded);
        };
        // Many connections of one worker come with the same credentials at once: the first has been at it meanwhile.
        if let Some(verdict) = self.recall(&digest, user.map(|(name, _)| name)) {
            return verdict;
        }
        let mut hashes: Vec<Stored> = user.map(|(_, hash)| hash.clone()).into_iter().collect();
        // The slowest hash is tried beside any other, so that neither unknown users nor kinds of hash show in the time.
        let is_slow = |hash: &&Stored| matches!(hash, Stored::Argon2(_));
        if !hashes.iter().any(|hash| is_slow(&hash)) {
            hashes.extend(self.users.values().find(is_slow).cloned());
        }
        let ours = user.is_some();
        let checked = tokio::task::spawn_blocking(move || {
            // Held to the end of the hashing, which goes on when the request is dropped.
            let _permit = permit;
            let all: Vec<bool> = hashes.iter().map(|hash| matches(hash, &password)).collect();
            ours && all.first() == Some(&true)
        });
        let right = checked.await.unwrap_or(false);
        let mut known = self.lock();
        match (right, user) {
            (true, Some((user, _))) => {
                known.right.put(digest, ());
                known.guesses.refund(from);
                Ok(user.clone())
            }
            _ => {
                known.wrong.put(digest, ());
                Err(Error::CredentialsWrong)
            }
        }
    }

    /// Whether a user that [`Credentials::check`] found, perhaps of those that were in force before, may still use the
    /// proxy: its name is the very one that was handed out, for a user with a new password gets a new one.
    pub fn stand(&self, user: &Arc<str>) -> bool {
        let own = self.users.get_key_value(user);
        own.is_some_and(|(own, _)| Arc::ptr_eq(own, user))
    }

    /// What these credentials turned out to be before.
    fn recall(&self, digest: &Digest, user: Option<&Arc<str>>) -> Option<Result<Arc<str>, Error>> {
        let mut known = self.lock();
        if let (Some(()), Some(user)) = (known.right.get(digest), user) {
            return Some(Ok(user.clone()));
        }
        let wrong = known.wrong.get(digest).is_some();
        wrong.then_some(Err(Error::CredentialsWrong))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request whose credentials are being found out. Only the first of those with the same ones is charged for it.
struct Pending<'c> {
    credentials: &'c Credentials,
    digest: Digest,
}

impl<'c> Pending<'c> {
    fn new(credentials: &'c Credentials, digest: Digest, from: Client) -> Result<Self, Error> {
        let mut known = credentials.lock();
        if !known.pending.contains_key(&digest) {
            let charged = known.guesses.charge(LocalTime::now(), from);
            charged.map_err(|retry_after| Error::Guessing { retry_after })?;
        }
        *known.pending.entry(digest).or_insert(0) += 1;
        Ok(Pending {
            credentials,
            digest,
        })
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut known = self.credentials.lock();
        if let Some(waiting) = known.pending.get_mut(&self.digest) {
            *waiting -= 1;
            if *waiting == 0 {
                known.pending.remove(&self.digest);
            }
        }
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
                c.check(1, &login("ali", "open:sesame")).await.as_deref(),
                Ok("ali")
            );
            assert_eq!(
                c.check(1, &login("bab", "secret")).await.as_deref(),
                Ok("bab")
            );
        }
    }

    #[tokio::test]
    async fn after_a_change_only_users_with_the_same_hash_stand() {
        let before = credentials();
        let user = before
            .check(1, &login("bab", "secret"))
            .await
            .expect("right");
        let with = |hash: &[u8]| {
            let stored = Stored::Sha256(Sha256::digest(hash).into());
            let users = BTreeMap::from([("bab".to_owned(), stored)]);
            Credentials::new(&config::Auth { users }, Some(&before))
        };
        let (same, changed) = (with(b"secret"), with(b"other"));
        assert!(before.stand(&user) && same.stand(&user));
        assert!(!changed.stand(&user));
        let old = changed.check(1, &login("bab", "secret")).await;
        assert_eq!(old, Err(Error::CredentialsWrong));
        let again = changed
            .check(1, &login("bab", "other"))
            .await
            .expect("right");
        assert!(changed.stand(&again) && !same.stand(&again));
    }

    #[tokio::test]
    async fn everything_else_is_turned_away() {
        let c = credentials();
        let wrong = [
            login("ali", "secret"),
            login("bab", "open:sesame"),
            login("eve", "secret"),
        ];
        for (from, headers) in wrong.into_iter().enumerate() {
            assert_eq!(
                c.check(from as Client, &headers).await,
                Err(Error::CredentialsWrong)
            );
        }
        for (from, headers) in [
            HeaderMap::new(),
            login("bab", ""),
            with("Bearer secret"),
            with("Basic ???"),
            with("Basic"),
            with(&format!("Basic {}", STANDARD.encode([0xff, 0xfe]))),
            with(&format!("Basic {}", STANDARD.encode("x".repeat(2_000)))),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(
                c.check(from as Client, &headers).await,
                Err(Error::CredentialsNeeded)
            );
        }
        let mut twice = login("bab", "secret");
        twice.append(PROXY_AUTHORIZATION, "Basic x".parse().expect("a value"));
        assert_eq!(c.check(1, &twice).await, Err(Error::CredentialsNeeded));
    }

    #[tokio::test]
    async fn who_guesses_is_told_to_come_back_and_keeps_nobody_else_out() {
        let c = credentials();
        assert_eq!(
            c.check(1, &login("bab", "secret")).await.as_deref(),
            Ok("bab")
        );
        let mut refused = 0;
        for n in 0..100 {
            match c.check(1, &login("bab", &format!("guess{n}"))).await {
                Err(Error::CredentialsWrong) => {}
                Err(Error::Guessing { retry_after }) => {
                    assert!(retry_after > 0);
                    refused += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(refused >= 60, "only {refused} of 100 guesses were refused");
        assert_eq!(
            c.check(1, &login("bab", "secret")).await.as_deref(),
            Ok("bab"),
            "what is known to be right is not held back by who guesses beside it"
        );
        assert_eq!(
            c.check(2, &login("ali", "open:sesame")).await.as_deref(),
            Ok("ali")
        );
    }

    #[tokio::test]
    async fn the_same_credentials_are_tried_once_however_often_they_come() {
        let c = credentials();
        for _ in 0..100 {
            let wrong = c.check(1, &login("bab", "outdated")).await;
            assert_eq!(
                wrong,
                Err(Error::CredentialsWrong),
                "never throttled: nothing is guessed"
            );
        }
        // Many at once, as after a restart, more than one address may guess.
        let c = Arc::new(c);
        let mut many = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let c = c.clone();
            many.spawn(async move { c.check(1, &login("ali", "open:sesame")).await });
        }
        for verdict in many.join_all().await {
            assert_eq!(verdict.as_deref(), Ok("ali"));
        }
        assert!(c.lock().pending.is_empty());
    }
}
