//! What the macros refuse: each file of `refused` has beside it the message that a user sees. After a change that is meant:
//! `TRYBUILD=overwrite cargo test -p wakeline-macro-tests`, and read the difference as a user would.

#[test]
fn what_is_refused_says_what_to_write_instead() {
    trybuild::TestCases::new().compile_fail("refused/*.rs");
}
