//! The main example as a user runs it: its executable, its output file, its exit code and its line of text.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use common::{
    example::{checked, command, executable, text},
    on_each_device,
};
use tempfile::TempDir;

fn run(input: &Path, output: &Path, options: &[&str]) -> Output {
    command("uppercase").arg(input).arg(output).args(options).output().expect("it starts")
}

/// `LC_ALL=C tr a-z A-Z`
fn tr(data: &[u8]) -> Vec<u8> {
    data.iter().map(|byte| if byte.is_ascii_lowercase() { byte - 32 } else { *byte }).collect()
}

/// The sorted names of a folder's entries.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs the example on `data` and compares every byte.
fn check(device: &str, what: &str, data: &[u8], options: &[&str]) {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&input, data).unwrap();
    let ran = run(&input, &output, &[options, &["--device", device]].concat());
    assert!(ran.status.success(), "{what} on {device}: {}", text(&ran.stderr));
    assert_eq!(text(&ran.stderr), "", "{what}: no progress bar without a terminal");
    let stdout = text(&ran.stdout);
    assert_eq!(stdout.lines().count(), 1, "{what}: {stdout}");
    assert!(stdout.starts_with(&format!("{} bytes in ", data.len())), "{what}: {stdout}");
    assert!(stdout.contains(&format!("on {}", device.split(':').next().unwrap())), "{what}: {stdout}");
    // `assert_eq!` would print megabytes.
    assert!(fs::read(&output).unwrap() == tr(data), "{what} on {device}: wrong bytes");
    assert!(fs::read(&input).unwrap() == data, "{what}: the input is unchanged");
    assert_eq!(names(folder.path()), ["in", "out"], "{what}: no other file is left");
}

/// Pseudo-random bytes, the same in each call.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let next = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    });
    next.take(bytes).collect()
}

on_each_device!(an_empty_file, |device| {
    check(device, "empty", b"", &[]);
});

on_each_device!(small_texts, |device| {
    check(device, "no final newline", b"one\ntwo\nthree", &[]);
    check(device, "crlf", b"one\r\ntwo\r\n\r\nthree\r\n", &["--chunk", "7"]);
    check(
        device,
        "utf-8",
        "gr\u{fc}\u{df}e, \u{3b1}\u{3b2}\u{3b3}, \u{1f980} na\u{ef}ve\n".as_bytes(),
        &["--chunk", "3"],
    );
    check(device, "one byte at a time", b"abcdefghijklmnopqrstuvwxyz{`", &["--chunk", "1", "--envelopes", "1"]);
    check(device, "exactly two chunks", &[b'q'; 32], &["--chunk", "16"]);
});

on_each_device!(a_line_longer_than_a_chunk, |device| {
    let mut data = b"short\n".to_vec();
    data.extend(std::iter::repeat_n(*b"long ", 10_000).flatten());
    data.extend(b"\nshort\n");
    check(device, "long line", &data, &["--chunk", "1KiB"]);
});

on_each_device!(binary_bytes, |device| {
    let all: Vec<u8> = (0..=255).cycle().take(5000).collect();
    check(device, "all bytes", &all, &["--chunk", "999"]);
});

on_each_device!(an_input_of_many_chunks, |device| {
    let data = noise((5 << 20) + 12_345);
    check(device, "five MiB", &data, &["--chunk", "64KiB"]);
    check(device, "five MiB, one envelope", &data, &["--chunk", "256KiB", "--envelopes", "1"]);
});

/// The device has 64 MiB, the input 80 MiB.
#[test]
fn an_input_larger_than_the_device() {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let data = noise(1 << 20).repeat(80);
    fs::write(&input, &data).unwrap();
    let ran = run(&input, &output, &["--device", "emulated"]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert!(fs::read(&output).unwrap() == tr(&data), "wrong bytes");
    let stdout = text(&ran.stdout);
    assert!(stdout.trim_end().ends_with(&format!("peak device memory {} bytes", 3 * (4 << 20))), "{stdout}");
}

#[test]
fn the_output_is_replaced_once_it_is_complete() {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&input, "new").unwrap();
    fs::write(&output, "previous content").unwrap();
    let ran = run(&input, &output, &["--device", "emulated"]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert_eq!(fs::read(&output).unwrap(), b"NEW");
    assert_eq!(names(folder.path()), ["in", "out"]);
}

/// A symbolic link stays a link, even if its target does not exist yet. A circle of links is an error.
#[cfg(unix)]
#[test]
fn an_output_that_is_a_link_stays_a_link() {
    use std::os::unix::fs::symlink;

    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(folder.path().join("elsewhere")).unwrap();
    // Each link is relative to its own folder. The target does not exist yet.
    symlink("elsewhere/next", &output).unwrap();
    symlink("../end", folder.path().join("elsewhere/next")).unwrap();
    for content in ["text", "other"] {
        fs::write(&input, content).unwrap();
        let ran = run(&input, &output, &["--device", "emulated"]);
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        assert!(output.is_symlink() && folder.path().join("elsewhere/next").is_symlink());
        assert_eq!(fs::read(folder.path().join("end")).unwrap(), content.to_uppercase().as_bytes());
        assert_eq!(names(folder.path()), ["elsewhere", "end", "in", "out"]);
        assert_eq!(names(&folder.path().join("elsewhere")), ["next"]);
    }
    let circle = folder.path().join("circle");
    symlink("circle", &circle).unwrap();
    let ran = run(&input, &circle, &["--device", "emulated"]);
    assert_fails(&ran, &["circle: ", "symbolic links"], folder.path(), &["circle", "elsewhere", "end", "in", "out"]);
    assert!(circle.is_symlink());
}

#[cfg(target_os = "linux")]
fn has_unnamed_files(folder: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;

    fs::File::options().write(true).custom_flags(rustix::fs::OFlags::TMPFILE.bits() as i32).open(folder).is_ok()
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_job_leaves_nothing_behind() {
    use std::{io::Write, os::unix::process::ExitStatusExt, process::Stdio};

    use rustix::process::{Pid, Signal, kill_process};

    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let folder = TempDir::new().unwrap();
        if signal == Signal::KILL && !has_unnamed_files(folder.path()) {
            eprintln!("skipped: SIGKILL leaves a file behind, as this filesystem has no unnamed files");
            continue;
        }
        let output = folder.path().join("out");
        fs::write(&output, "previous").unwrap();
        let mut job = command("uppercase");
        job.arg("/dev/stdin").arg(&output).args(["--device", "emulated", "--chunk", "16KiB"]);
        let mut job = job.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut input = job.stdin.take().unwrap();
        // A pipe holds only a part of this: the job has read the rest and written most of it.
        input.write_all(&noise(4 << 20)).unwrap();
        kill_process(Pid::from_child(&job), signal).unwrap();
        let ran = job.wait_with_output().unwrap();
        drop(input);
        let number = signal.as_raw();
        let ended_by_signal = ran.status.signal() == Some(number) || ran.status.code() == Some(128 + number);
        assert!(ended_by_signal, "{signal:?}: {:?}, {}", ran.status, text(&ran.stderr));
        assert_eq!(names(folder.path()), ["out"], "{signal:?}: no other file is left");
        assert_eq!(fs::read(&output).unwrap(), b"previous", "{signal:?}");
    }
}

#[test]
fn a_device_file_is_written_in_place() {
    let folder = TempDir::new().unwrap();
    let input = folder.path().join("in");
    fs::write(&input, "text").unwrap();
    let ran = run(&input, Path::new("/dev/null"), &["--device", "emulated"]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let ran = run(&input, Path::new("/dev/stdout"), &["--device", "emulated"]);
    assert!(text(&ran.stdout).starts_with("TEXT"), "{}", text(&ran.stdout));
}

/// Checks what all failures have in common: exit code 1, one line that names the cause, no files left behind.
fn assert_fails(ran: &Output, contains: &[&str], folder: &Path, left: &[&str]) {
    let stderr = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "one line: {stderr}");
    assert!(stderr.ends_with('\n') && stderr.starts_with("uppercase: "), "{stderr}");
    for part in contains {
        assert!(stderr.contains(part), "lacks {part}: {stderr}");
    }
    assert_eq!(text(&ran.stdout), "");
    assert_eq!(names(folder), left, "no file is left behind");
}

/// A folder with an input and a previous output, which no failure may change.
fn with_previous_output() -> (TempDir, PathBuf, PathBuf) {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&input, noise(300_000)).unwrap();
    fs::write(&output, "previous").unwrap();
    (folder, input, output)
}

#[test]
fn a_missing_input() {
    let (folder, _, output) = with_previous_output();
    let ran = run(&folder.path().join("none"), &output, &["--device", "emulated"]);
    assert_fails(&ran, &["none", "No such file"], folder.path(), &["in", "out"]);
    assert_eq!(fs::read(&output).unwrap(), b"previous");
}

#[test]
fn missing_folders_of_the_output_are_created() {
    let (folder, input, _) = with_previous_output();
    let output = folder.path().join("not/there/shouted");
    let ran = run(&input, &output, &["--device", "emulated"]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert!(fs::read(&output).unwrap() == tr(&fs::read(&input).unwrap()));
}

#[test]
fn an_input_that_is_a_folder() {
    let (folder, _, output) = with_previous_output();
    let ran = run(folder.path(), &output, &["--device", "emulated"]);
    assert_fails(&ran, &["directory"], folder.path(), &["in", "out"]);
}

#[test]
fn an_unwritable_output() {
    let (folder, input, _) = with_previous_output();
    let ran = run(&input, &folder.path().join("in/out"), &["--device", "emulated"]);
    assert_fails(&ran, &["in/out", "Not a directory"], folder.path(), &["in", "out"]);
    let ran = run(&input, folder.path(), &["--device", "emulated"]);
    assert_fails(&ran, &["directory"], folder.path(), &["in", "out"]);
}

#[test]
fn a_full_disk() {
    let (folder, input, output) = with_previous_output();
    let ran = run(&input, Path::new("/dev/full"), &["--device", "emulated", "--chunk", "64KiB"]);
    assert_fails(&ran, &["No space left"], folder.path(), &["in", "out"]);

    // A disk that becomes full during the job: no file may be larger than 64 KiB (128 blocks of 512 bytes).
    let mut shell = checked(Path::new("/bin/sh"));
    shell.args(["-c", r#"trap "" XFSZ; ulimit -f 128; exec "$@""#, "sh"]).arg(executable("uppercase"));
    let ran = shell.arg(&input).arg(&output).args(["--device", "emulated", "--chunk", "16KiB"]).output().unwrap();
    assert_fails(&ran, &["operator `write`", "File too large"], folder.path(), &["in", "out"]);
    assert_eq!(fs::read(&output).unwrap(), b"previous", "no partial output under the final name");
}

#[test]
fn a_chunk_larger_than_the_device() {
    let (folder, input, output) = with_previous_output();
    let ran = run(&input, &output, &["--device", "emulated", "--chunk", "65MiB", "--envelopes", "1"]);
    assert_fails(&ran, &["out of memory", "emulated", "68157440"], folder.path(), &["in", "out"]);
    assert_eq!(fs::read(&output).unwrap(), b"previous");
    // One fits, three do not.
    let ran = run(&input, &output, &["--device", "emulated", "--chunk", "30MiB"]);
    assert_fails(&ran, &["out of memory", "3 envelopes"], folder.path(), &["in", "out"]);
}

#[test]
fn a_missing_device() {
    let (folder, input, output) = with_previous_output();
    for device in ["cuda:99", "cuda:-1", "gpu", ""] {
        let ran = run(&input, &output, &["--device", device]);
        assert_fails(&ran, &["no such device"], folder.path(), &["in", "out"]);
    }
    let ran = command("uppercase").arg(&input).arg(&output).env("WAKELINE_DEVICE", "cuda:99").output().unwrap();
    assert_fails(&ran, &["no such device", "WAKELINE_DEVICE=cuda:99"], folder.path(), &["in", "out"]);
    // The host is a device, but not one for kernels.
    for (device, wanted) in [
        (
            "gpu",
            "WAKELINE_DEVICE=gpu: no such device: `gpu` is not a device: write `cuda:0`, `cuda:1`, ..., `emulated` or",
        ),
        (
            "host",
            "`.on(&device)`; `WAKELINE_DEVICE=host` makes the host the first device: set it to `emulated`, `cuda:0`",
        ),
    ] {
        let ran = command("uppercase").arg(&input).arg(&output).env("WAKELINE_DEVICE", device).output().unwrap();
        assert_fails(&ran, &[wanted], folder.path(), &["in", "out"]);
    }
    assert_eq!(fs::read(&output).unwrap(), b"previous");
}

/// The argument parser reports these, with its own exit code.
#[test]
fn an_invalid_command_line() {
    let (folder, input, output) = with_previous_output();
    for options in [["--chunk", "0"], ["--chunk", "many"], ["--envelopes", "0"], ["--envelopes", "few"]] {
        let ran = run(&input, &output, &options);
        assert_eq!(ran.status.code(), Some(2), "{options:?}");
        assert!(text(&ran.stderr).contains(options[0]), "{}", text(&ran.stderr));
    }
    assert_eq!(names(folder.path()), ["in", "out"]);
    assert_eq!(fs::read(&output).unwrap(), b"previous");
}
