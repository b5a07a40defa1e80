//! Runs examples as a user does, by their executables.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The example's executable: where cargo puts it, or beside this test's executable, if both were copied.
pub fn executable(name: &str) -> PathBuf {
    let me = std::env::current_exe().expect("the path of this executable");
    let here = me.parent().expect("a folder");
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let places = [here.join(format!("example-{name}")), here.with_file_name("examples").join(file)];
    let found = places.iter().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("no example at {places:?}: `cargo build --workspace --examples` first")).clone()
}

pub fn command(name: &str) -> Command {
    checked(&executable(name))
}

/// A command for an example or a program that runs examples, race-checked.
pub fn checked(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("WAKELINE_RACE_CHECK", "1").env_remove("WAKELINE_DEVICE").env_remove("RUST_LOG");
    command
}

/// One body as two tests, `name::emulated` and `name::cuda`. The body gets the value of an example's `--device` option.
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
