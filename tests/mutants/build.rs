//! Builds all targets of this package with the mutants.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=wakeline_mutants");
}
