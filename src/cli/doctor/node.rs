//! Which Node is here, and whether its own `fetch` heeds the proxy's variables: an old one ignores them without a word.
//!
//! The one program that the doctor runs, for nothing but its version.

use std::{
    io::Read as _,
    process::{Command, Stdio},
    time::Duration,
};

/// Major and minor.
pub(super) type Version = (u32, u32);

/// How long it may take to say its version.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whether this version heeds the variables, once it is told to: 22 from 22.21 on, 24 from 24.5 on (24.0 does so in
/// `fetch`, but not in `node:https`), and never 23.
pub(super) fn heeds_proxy(version: Version) -> bool {
    version >= (24, 5) || (version.0 == 22 && version.1 >= 21)
}

/// The version of the `node` that is found first.
pub(super) async fn version() -> Option<Version> {
    let mut node = Command::new("node");
    node.arg("--version")
        // What it is told to load could print anything.
        .env_remove("NODE_OPTIONS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut node = node.spawn().ok()?;
    let ended = tokio::time::timeout(PATIENCE, async {
        while let Ok(None) = node.try_wait() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    });
    if ended.await.is_err() {
        let _ = node.kill();
        let _ = node.wait();
        return None;
    }
    let mut said = [0; 64];
    let length = node.stdout.take()?.read(&mut said).ok()?;
    read(std::str::from_utf8(&said[..length]).ok()?)
}

fn read(said: &str) -> Option<Version> {
    let mut parts = said.trim().strip_prefix('v')?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_that_heed_the_variables_everywhere_count() {
        for (said, heeds) in [
            ("v20.20.2\n", Some(false)),
            ("v22.20.0\n", Some(false)),
            ("v22.21.0\n", Some(true)),
            ("v23.11.1\n", Some(false)),
            ("v24.4.1\n", Some(false)),
            ("v24.5.0\n", Some(true)),
            ("v25.0.0-nightly\n", Some(true)),
            ("24.5.0", None),
            ("", None),
        ] {
            assert_eq!(read(said).map(heeds_proxy), heeds, "{said:?}");
        }
    }
}
