//! Tells the benches the profile that they are built in, which is the name of a folder: `target/PROFILE/build/PACKAGE/out`.

use std::{env, path::PathBuf};

fn main() {
    let out = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
    let profile = out.ancestors().nth(3).and_then(|folder| folder.file_name()).unwrap_or_default().to_string_lossy();
    // The folder of `cargo bench`, whose profile is `bench`, and of `cargo build --release`.
    let profile = if profile == "release" { "bench" } else { &*profile };
    println!("cargo::rustc-env=BUILT_IN_PROFILE={profile}");
    println!("cargo::rerun-if-changed=build.rs");
}
