//! Scenarios H11 and H12: examples that compute something compare it with the host's result, and fail if it differs.

use common::{
    example::{command, text},
    on_each_device, quick_or_long,
};

/// Runs an example on a device, and passes its single output line to `then`.
fn run(name: &str, device: &str, options: &[&str], then: impl Fn(&str)) {
    let output = command(name).args(["--device", device]).args(options).output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    then(text(&output.stdout));
}

on_each_device!(h11_k_means_of_10_000_points_is_the_hosts, |device| {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("clusters.png");
    let rounds = quick_or_long(100, 1000).to_string();
    run("kmeans", device, &["--rounds", &rounds, "--picture", picture.to_str().unwrap()], |line| {
        assert!(line.starts_with(&format!("10000 points, 3 clusters, {rounds} rounds")), "{line}");
        assert!(line.contains("the host's clusters"), "{line}");
        let drawn = std::fs::read(&picture).unwrap();
        assert_eq!(&drawn[..8], b"\x89PNG\r\n\x1a\n");
        std::fs::remove_file(&picture).unwrap();
    });
});

on_each_device!(h12_a_chain_of_matrices_agrees_with_float64, |device| {
    run("matmul_chain", device, &["-n", "96", "--count", "12"], |line| {
        assert!(line.starts_with("12 matrices to "), "{line}");
        assert!(line.ends_with(" of float64\n"), "{line}");
    });
    // With one matrix the product is the matrix itself.
    run("matmul_chain", device, &["-n", "5", "--count", "1"], |line| {
        assert!(line.starts_with("1 matrices to "), "{line}")
    });
});

#[test]
fn examples_report_errors_in_one_line() {
    for (name, options) in [("kmeans", ["-k", "20000"]), ("matmul_chain", ["--device", "cuda:99"])] {
        let output = command(name).args(options).output().expect("it starts");
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.starts_with(&format!("{name}: ")) && said.lines().count() == 1, "{said}");
    }
}
