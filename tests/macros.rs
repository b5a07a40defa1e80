//! What the macros accept, and what they say about what they do not.
//!
//! Each file of `macros/pass` compiles and runs; each of `macros/fail` has beside it the message that a user sees. After
//! a change that is meant: `TRYBUILD=overwrite cargo test --test macros`, and read the difference as a user would.

#[test]
fn macros() {
    let t = trybuild::TestCases::new();
    t.pass("tests/macros/pass/*.rs");
    t.compile_fail("tests/macros/fail/*.rs");
}
