//! Examples as a user runs them: their executables.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The example beside this test: where cargo puts it, or where it was copied to together with this executable.
pub fn executable(name: &str) -> PathBuf {
    let me = std::env::current_exe().expect("a path of its own");
    let here = me.parent().expect("a folder");
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let places = [here.join(format!("example-{name}")), here.with_file_name("examples").join(file)];
    let found = places.iter().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("no example at {places:?}: `cargo build --examples` first")).clone()
}

/// An example, race-checked.
pub fn command(name: &str) -> Command {
    checked(&executable(name))
}

/// A program that runs examples race-checked, or is one.
pub fn checked(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("WAKELINE_RACE_CHECK", "1").env_remove("WAKELINE_DEVICE").env_remove("RUST_LOG");
    command
}

/// A body as two tests, `name::emulated` and `name::cuda`: it is given the device as an example's option says it.
#[macro_export]
macro_rules! on_each_device {
    ($name:ident, $body:expr) => {
        mod $name {
            use super::*;

            fn body(device: &str) {
                ($body)(device);
            }

            #[test]
            fn emulated() {
                body("emulated");
            }

            #[test]
            #[ignore = "needs a GPU"]
            fn cuda() {
                body("cuda:0");
            }
        }
    };
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("messages are text")
}
