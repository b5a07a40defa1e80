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

// Three images, one of them not to be read, become two thumbnails in one picture.
on_each_device!(pictures_skips_broken_files_and_draws_the_others, |device| {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let checks = |x: u32, y: u32| {
        image::Rgb([if (x / 64 + y / 64).is_multiple_of(2) { 250_u8 } else { 20 }, (y % 256) as u8, 90])
    };
    image::RgbImage::from_fn(640, 480, checks).save(path("wide.png")).unwrap();
    image::RgbImage::from_fn(100, 300, checks).save(path("high.jpg")).unwrap();
    std::fs::write(path("broken.png"), "no image").unwrap();
    let sheet = path("sheet.png");
    let output = command("pictures")
        .args(["--device", device, "--size", "64"])
        .args([folder.path(), &*sheet])
        .output()
        .expect("it starts");
    let (said, line) = (text(&output.stderr), text(&output.stdout));
    assert!(output.status.success(), "{said}");
    assert!(
        said.starts_with("pictures: skipped ") && said.contains("broken.png") && said.lines().count() == 1,
        "{said}"
    );
    assert!(line.starts_with("2 thumbnails on ") && line.contains("1 files skipped"), "{line}");
    let drawn = image::open(&sheet).unwrap().into_rgba8();
    assert_eq!(drawn.dimensions(), (128, 64));
    // The thumbnail of `wide.png` is 64 x 48, right of that of `high.jpg`, 21 x 64; the rest is white.
    assert_eq!((drawn.get_pixel(96, 2).0, drawn.get_pixel(2, 32).0), ([255; 4], [255; 4]));
    assert!(drawn.get_pixel(66, 10).0[0] > 150, "a bright field: {:?}", drawn.get_pixel(66, 10));
    assert!(drawn.get_pixel(70, 30).0[0] < 60, "a dark edge or field: {:?}", drawn.get_pixel(70, 30));
});

on_each_device!(batching_answers_each_of_many_callers, |device| {
    run("batching", device, &["--clients", "50", "--requests", "20", "--batch", "16"], |line| {
        assert!(line.starts_with("1000 requests in "), "{line}");
        let batches: usize = line["1000 requests in ".len()..].split(' ').next().unwrap().parse().unwrap();
        assert!((63..=1000).contains(&batches), "sixteen requests a batch at most: {line}");
    });
});

on_each_device!(observed_prints_its_page_and_a_report, |device| {
    let output = command("observed").args(["--device", device, "--seconds", "1"]).output().expect("it starts");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(said.starts_with("see it run at http://127.0.0.1:"), "{said}");
    assert!(said.contains("section `filter`") && !said.contains(" 0 rounds replayed"), "{said}");
});

on_each_device!(loop_goes_round_until_the_roots_change_no_more, |device| {
    let output = command("loop").args(["--device", device]).output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut roots: Vec<f32> =
        text(&output.stdout).lines().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    roots.sort_by(f32::total_cmp);
    assert_eq!(
        roots.iter().map(|root| root.round()).collect::<Vec<_>>(),
        (1..=10_u8).map(f32::from).collect::<Vec<_>>()
    );
});
