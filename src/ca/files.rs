//! The CA's folder: names, careful reads of keys, writes that never replace a key, and the lock between processes.
//!
//! Knows nothing of what is inside a certificate or a key.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::CaError;

/// The root's certificate, to distribute.
pub const ROOT_CERTIFICATE: &str = "ca.pem";
/// The root's key, which only `paceline ca init` needs.
pub const ROOT_KEY: &str = "ca.key";
/// The certificate of the intermediate that signs leaves.
pub const ISSUER_CERTIFICATE: &str = "issuer.pem";
/// The key of the intermediate that signs leaves.
pub const ISSUER_KEY: &str = "issuer.key";

/// Empty; its lock keeps two processes from making the CA at once.
const LOCK: &str = ".lock";
/// A PEM file with a key or a few certificates is under 10 KiB; anything far above that is not one of ours.
const LARGEST_FILE: u64 = 1 << 20;

/// The paths of one CA.
#[derive(Clone, Debug)]
pub struct Files {
    dir: PathBuf,
}

impl Files {
    /// The files in `dir`, which need not exist yet.
    pub fn new(dir: &Path) -> Self {
        Files {
            dir: dir.to_owned(),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of one of the four files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes the folder, for its owner alone, unless it is there. An existing folder is left as it is.
    pub(super) fn make_dir(&self) -> Result<(), CaError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .map_err(CaError::io("make the folder", &self.dir))
    }

    /// Waits until no other process or thread makes or renews this CA, and keeps others out until dropped.
    pub(super) fn lock_for_writing(&self) -> Result<File, CaError> {
        let path = self.path(LOCK);
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(CaError::io("open", &path))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| CaError::io("lock", &path)(error.into()))?;
        Ok(lock)
    }

    /// Waits for a writer to finish. `None` where there is no lock file, or none that this user may open: the
    /// folder is then kept by somebody else, and possibly read-only.
    pub(super) fn lock_for_reading(&self) -> Option<File> {
        let lock = File::open(self.path(LOCK)).ok()?;
        flock(&lock, FlockOperation::LockShared).ok()?;
        Some(lock)
    }

    /// Whether a file is there (a dangling link counts: it must not be written through).
    pub fn has(&self, name: &str) -> bool {
        self.path(name).symlink_metadata().is_ok()
    }

    /// Reads a certificate file.
    pub(super) fn read_certificate(&self, name: &str) -> Result<Vec<u8>, CaError> {
        let path = self.path(name);
        let file = File::open(&path).map_err(CaError::io("read", &path))?;
        read_bounded(file, &path)
    }

    /// Reads a key file, or refuses one that belongs to somebody else or is open to others. A link counts as what it
    /// leads to: Kubernetes mounts secrets so.
    pub(super) fn read_key(&self, name: &str) -> Result<Vec<u8>, CaError> {
        let path = self.path(name);
        refuse_exposed_target(&path)?;
        // A look at the open file, not at the path, so that the file checked is the file read. A pipe in its place must
        // not hold us up before we have looked.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path)
            .map_err(CaError::io("read", &path))?;
        let metadata = file.metadata().map_err(CaError::io("read", &path))?;
        refuse_exposed(&path, &metadata)?;
        read_bounded(file, &path)
    }

    /// Refuses a folder that anyone may write in, and any key in it (old ones too) that is open to others.
    pub(super) fn refuse_exposed_keys(&self) -> Result<(), CaError> {
        refuse_open_folder(&self.dir)?;
        for entry in fs::read_dir(&self.dir).map_err(CaError::io("list", &self.dir))? {
            let path = entry.map_err(CaError::io("list", &self.dir))?.path();
            if path.extension().is_some_and(|extension| extension == "key") {
                refuse_exposed_target(&path)?;
                let metadata = fs::metadata(&path).map_err(CaError::io("read", &path))?;
                refuse_exposed(&path, &metadata)?;
            }
        }
        Ok(())
    }

    /// Puts a new file in place, or fails if one of that name is there: never overwrites.
    pub(super) fn place_new(&self, name: &str, content: &[u8], mode: u32) -> Result<(), CaError> {
        let path = self.path(name);
        let temporary = self.write_temporary(name, content, mode)?;
        // link(2) is atomic and, unlike rename(2), fails when the name is taken.
        let linked = fs::hard_link(&temporary, &path).map_err(CaError::io("create", &path));
        fs::remove_file(&temporary).map_err(CaError::io("remove", &temporary))?;
        linked?;
        self.sync_dir()
    }

    /// Replaces a file that can be made again (never a key) in one step.
    pub(super) fn replace(&self, name: &str, content: &[u8], mode: u32) -> Result<(), CaError> {
        let path = self.path(name);
        let temporary = self.write_temporary(name, content, mode)?;
        fs::rename(&temporary, &path).map_err(CaError::io("replace", &path))?;
        self.sync_dir()
    }

    /// Gives the present issuer's files the names `issuer-<unix time>.pem` and `.key`, or the next time that is free.
    ///
    /// Returns the new name without its ending.
    pub(super) fn set_issuer_aside(&self, now: SystemTime) -> Result<String, CaError> {
        let mut stamp = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let aside = loop {
            let aside = format!("issuer-{stamp}");
            if !self.has(&format!("{aside}.pem")) && !self.has(&format!("{aside}.key")) {
                break aside;
            }
            stamp += 1;
        };
        // The certificate first: should we be killed in between, a key without a certificate is left, for which
        // the next run makes a certificate.
        for (name, ending) in [(ISSUER_CERTIFICATE, "pem"), (ISSUER_KEY, "key")] {
            if self.has(name) {
                let (from, to) = (self.path(name), self.path(&format!("{aside}.{ending}")));
                fs::hard_link(&from, &to).map_err(CaError::io("create", &to))?;
                fs::remove_file(&from).map_err(CaError::io("move", &from))?;
            }
        }
        self.sync_dir()?;
        Ok(aside)
    }

    /// Writes and syncs a file with a name of its own; it has its final mode from its first moment.
    fn write_temporary(&self, name: &str, content: &[u8], mode: u32) -> Result<PathBuf, CaError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let path = loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = self.path(&format!(".{name}.{}.{count}", std::process::id()));
            let opened = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&path);
            match opened {
                Ok(mut file) => {
                    let written = file.write_all(content).and_then(|()| file.sync_all());
                    if let Err(error) = written {
                        // Best effort: the write's error is the one to tell.
                        let _ = fs::remove_file(&path);
                        return Err(CaError::io("write", &path)(error));
                    }
                    break path;
                }
                // Left by a process that was killed and whose id is in use again.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(CaError::io("create", &path)(error)),
            }
        };
        Ok(path)
    }

    fn sync_dir(&self) -> Result<(), CaError> {
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(CaError::io("write", &self.dir))
    }
}

fn read_bounded(file: File, path: &Path) -> Result<Vec<u8>, CaError> {
    let mut content = Vec::new();
    file.take(LARGEST_FILE)
        .read_to_end(&mut content)
        .map_err(CaError::io("read", path))?;
    Ok(content)
}

/// Refuses a folder in which everyone may replace files.
fn refuse_open_folder(dir: &Path) -> Result<(), CaError> {
    const STICKY: u32 = 0o1000;
    let metadata = fs::metadata(dir).map_err(CaError::io("read", dir))?;
    if metadata.mode() & 0o002 != 0 && metadata.mode() & STICKY == 0 {
        return Err(CaError::Exposed {
            path: dir.to_owned(),
            fault: "can be written by everyone, who could replace the keys in it".into(),
            remedy: "run `chmod o-w` on it",
        });
    }
    Ok(())
}

/// Where the path is a link, its target's folder must be as good as the CA's own.
fn refuse_exposed_target(path: &Path) -> Result<(), CaError> {
    let metadata = fs::symlink_metadata(path).map_err(CaError::io("read", path))?;
    if !metadata.file_type().is_symlink() {
        return Ok(());
    }
    let target = fs::canonicalize(path).map_err(CaError::io("read", path))?;
    target.parent().map_or(Ok(()), refuse_open_folder)
}

/// Who runs paceline.
struct Us {
    uid: u32,
    /// All groups that this process is in.
    groups: Vec<u32>,
}

impl Us {
    fn now() -> Us {
        use rustix::process::{getegid, geteuid, getgroups};
        let mut groups: Vec<u32> = getgroups()
            .unwrap_or_default()
            .iter()
            .map(|group| group.as_raw())
            .collect();
        groups.push(getegid().as_raw());
        Us {
            uid: geteuid().as_raw(),
            groups,
        }
    }
}

fn refuse_exposed(path: &Path, metadata: &fs::Metadata) -> Result<(), CaError> {
    let exposed = |fault: String, remedy| {
        Err(CaError::Exposed {
            path: path.to_owned(),
            fault,
            remedy,
        })
    };
    if !metadata.is_file() {
        return exposed(
            "is not a regular file".into(),
            "put the key file itself there, with mode 0600",
        );
    }
    let us = Us::now();
    let (owner, group) = (metadata.uid(), metadata.gid());
    if metadata.mode() & too_open(owner, group, &us) != 0 {
        let fault = format!(
            "has mode {:04o}, which opens a private key to its group or to others",
            metadata.mode() & 0o7777
        );
        return exposed(
            fault,
            "run `chmod 600` on it, and replace the key if somebody may have read it",
        );
    }
    if owner != us.uid && owner != 0 {
        return exposed(
            format!(
                "belongs to user {owner}, not to user {} that runs paceline",
                us.uid
            ),
            "run `chown` on it, or run paceline as its owner",
        );
    }
    Ok(())
}

/// The bits that a key's mode must not have: none for group and others. The exception is root's file for a group of ours
/// that may read it: root gave it to us so, and could not have done otherwise where it may not give its files away, as
/// in a Kubernetes volume with `fsGroup` (mode 0440). PostgreSQL has the same rule for its key.
fn too_open(owner: u32, group: u32, us: &Us) -> u32 {
    if owner == 0 && us.uid != 0 && us.groups.contains(&group) {
        0o037
    } else {
        0o077
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_of_roots_for_a_group_of_ours_may_be_read_by_its_group() {
        let us = Us {
            uid: 1_000,
            groups: vec![1_000, 2_000],
        };
        let root = Us {
            uid: 0,
            groups: vec![0],
        };
        let refuses = |mode: u32, owner, group, us| mode & too_open(owner, group, us) != 0;
        assert!(
            !refuses(0o440, 0, 2_000, &us),
            "a Kubernetes volume with fsGroup"
        );
        assert!(!refuses(0o640, 0, 2_000, &us));
        assert!(refuses(0o660, 0, 2_000, &us));
        assert!(refuses(0o444, 0, 2_000, &us));
        assert!(refuses(0o440, 0, 3_000, &us), "a group of others");
        assert!(
            refuses(0o440, 1_000, 2_000, &us),
            "we could have made it 0400"
        );
        assert!(refuses(0o440, 0, 0, &root));
        assert!(!refuses(0o400, 0, 0, &root) && !refuses(0o600, 1_000, 1_000, &us));
    }
}
