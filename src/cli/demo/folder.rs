//! A folder for the demonstration's certificates, gone when it is dropped. What is put there it does not know.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context as _, Result};

/// A folder that nobody else can look into.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes it where temporary files belong (`TMPDIR`).
    pub(super) fn make() -> Result<Self> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let name = format!(
            "paceline-demo-{}-{}",
            std::process::id(),
            since.map_or(0, |d| d.as_nanos())
        );
        let path = std::env::temp_dir().join(name);
        // Fails where something of that name exists, a link that somebody laid out for us included.
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| {
            format!(
                "cannot make {}; set TMPDIR to a folder that can be written",
                path.display()
            )
        })?;
        Ok(Folder(path))
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.0) {
            tracing::warn!("{} is left behind: {e}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_folder_is_private_and_goes_with_its_owner() {
        let folder = Folder::make().expect("a folder");
        let path = folder.path().to_owned();
        let mode = fs::metadata(&path).expect("it exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::write(path.join("key"), "x").expect("ours");
        drop(folder);
        assert!(!path.exists());
    }
}
