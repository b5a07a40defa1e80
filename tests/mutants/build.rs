//! All targets of this package are built with the mutants.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=wakeline_mutants");
}
