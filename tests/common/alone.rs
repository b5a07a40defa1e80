//! Runs tests that could hang or end a whole process.

use std::{
    io::{Read, pipe},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::Command,
    sync::mpsc,
    thread,
    time::Duration,
};

/// Longer than any body takes on a loaded machine.
const BOUND: Duration = Duration::from_secs(60);
/// The variable that names the test that a process runs.
const ONLY: &str = "WAKELINE_TEST_ALONE";

/// Runs a body that must not hang. If it hangs, its process exits.
pub fn within_bound(body: impl FnOnce() + Send + 'static) {
    let test = thread::current();
    case_within_bound(test.name().unwrap_or("a test"), body);
}

/// The same for one case of a test, which is named when it hangs or fails.
pub fn case_within_bound(case: &str, body: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let _ = done.send(());
        outcome
    });
    if wait.recv_timeout(BOUND).is_err() {
        eprintln!("{case}: hangs");
        std::process::abort();
    }
    if let Err(panic) = thread.join().expect("it catches the panics of its body") {
        eprintln!("{case}: failed");
        resume_unwind(panic);
    }
}

/// Runs the body of the named test in a process of its own: an abort ends only that process, and a process that hangs
/// is killed. Its output is shown if it fails.
pub fn in_a_process(name: &str, body: impl FnOnce()) {
    if std::env::var(ONLY).is_ok_and(|only| only == name) {
        return body();
    }
    let (mut output, stderr) = pipe().unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--include-ignored"])
        .env(ONLY, name)
        .stdout(stderr.try_clone().unwrap())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let (tell, ended) = mpsc::channel();
    thread::spawn(move || {
        // The pipe closes when the process exits.
        let mut text = Vec::new();
        let _ = output.read_to_end(&mut text);
        let _ = tell.send(String::from_utf8_lossy(&text).into_owned());
    });
    let text = ended.recv_timeout(BOUND).unwrap_or_else(|_| {
        process.kill().unwrap();
        format!("{}\nthe test hangs", ended.recv().unwrap())
    });
    let status = process.wait().unwrap();
    assert!(status.success(), "{status}:\n{text}");
    // A name that matches no test also succeeds.
    assert!(text.contains("1 passed"), "no test `{name}`:\n{text}");
}
