//! A resolver that says what a test wants: any address for any name, another one the next time, or a failure. It stands in
//! the place of the C library's in the replica's process, since nothing short of a network of its own gives DNS answers
//! such as `127.0.0.1` for a public name.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The names of one replica.
pub struct Names {
    library: PathBuf,
    file: PathBuf,
}

impl Names {
    /// No name exists. Needs the C compiler that the project's own build needs.
    pub fn new(dir: &Path) -> Names {
        let (library, source) = (dir.join("names.so"), dir.join("names.c"));
        fs::write(&source, include_str!("names.c")).expect("our own folder");
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([&library, &source])
            .status();
        assert!(
            made.as_ref().is_ok_and(std::process::ExitStatus::success),
            "cc could not make the resolver: {made:?}"
        );
        let names = Names {
            library,
            file: dir.join("names"),
        };
        names.say(&[]);
        names
    }

    /// What each name is said to be from now on: addresses with commas between, or `!none`, `!again`, `!fail`, `!hang`.
    /// Names are as they are asked for: with the dot at their end.
    pub fn say<'n>(&self, answers: impl IntoIterator<Item = &'n (String, String)>) {
        let mut text = String::new();
        for (name, said) in answers {
            let _ = writeln!(text, "{name}={said}");
        }
        // In one step, for a question may be asked meanwhile.
        let fresh = self.file.with_extension("new");
        fs::write(&fresh, text).expect("our own folder");
        fs::rename(&fresh, &self.file).expect("our own folder");
    }

    /// Makes a command resolve names here.
    pub fn serve(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env("PACELINE_TEST_NAMES", &self.file);
    }
}
