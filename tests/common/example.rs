//! Examples as a user runs them: their executables.

#![allow(dead_code, reason = "each test takes from here what it needs")]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The example beside this test: where cargo puts it, or where it was copied to together with this executable.
pub(crate) fn executable(name: &str) -> PathBuf {
    let me = std::env::current_exe().expect("a path of its own");
    let here = me.parent().expect("a folder");
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let places = [here.join(format!("example-{name}")), here.with_file_name("examples").join(file)];
    let found = places.iter().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("no example at {places:?}: `cargo build --examples` first")).clone()
}

/// An example, race-checked.
pub(crate) fn command(name: &str) -> Command {
    checked(&executable(name))
}

/// A program that runs examples race-checked, or is one.
pub(crate) fn checked(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("WAKELINE_RACE_CHECK", "1").env_remove("WAKELINE_DEVICE").env_remove("RUST_LOG");
    command
}

/// A GPU where one is demanded, and the emulated device always.
pub(crate) fn devices() -> Vec<&'static str> {
    match std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") {
        true => vec!["emulated", "cuda:0"],
        false => vec!["emulated"],
    }
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("messages are text")
}
