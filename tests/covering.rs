//! A launch covers what the kernel's `over` says, or is refused: on every device, in streams and in graphs.

use common::on_both;
use wakeline::{Stream, graph::Graph, prelude::*};

#[kernel(unsafe(cuda = "kernels/tint.cu"), over = [width, height])]
fn tint(width: u32, height: u32, pixels: &mut [f32]) {
    for (at, pixel) in pixels.iter_mut().enumerate().take(width as usize * height as usize) {
        *pixel += (at % width as usize + 1000 * (at / width as usize)) as f32;
    }
}

/// Extents of mixed types, whose product exceeds each of them.
#[kernel(over = [x.len() / 2, wide * wide, 7 - less])]
fn mixed(wide: u32, less: i8, x: &mut [u8]) {
    let _ = (wide, less);
    x.fill(1);
}

fn tinted(width: usize, height: usize) -> Vec<f32> {
    (0..width * height).map(|at| (at % width + 1000 * (at / width)) as f32).collect()
}

fn refusal(result: wakeline::Result<impl Sized>) -> String {
    let Err(error) = result else { panic!("a launch that does not cover its data was accepted") };
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    format!("{error:#}")
}

on_both!(the_default_grid_covers_a_picture_of_any_size, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    for (width, height) in [(1, 1), (33, 9), (257, 31), (3, 300), (640, 480)] {
        let mut pixels = Buffer::from_slice(&stream, &vec![0_f32; width * height]).unwrap();
        tint::launch(&stream, width as u32, height as u32, &mut pixels).unwrap();
        assert!(pixels.to_vec(&stream).await.unwrap() == tinted(width, height), "{width} x {height}");
    }
});

on_both!(a_grid_that_is_too_small_is_refused_and_enqueues_nothing, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut pixels = Buffer::from_slice(&stream, &vec![0_f32; 100 * 50]).unwrap();
    let grid = Grid::blocks([4, 6, 1]).threads([32, 8, 1]);
    let refused = refusal(tint::launch_with(grid, &stream, 100, 50, &mut pixels));
    for part in ["kernel `tint`", "covers 48 of 50 in dimension y", "at least 7 blocks in y"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(refusal(tint::launch_with(Grid::blocks([1; 3]), &stream, 100, 8, &mut pixels)).contains("dimension x"));
    assert_eq!(pixels.to_vec(&stream).await.unwrap(), [0.0; 5000]);
    for grid in [Grid::blocks([4, 7, 1]).threads([32, 8, 1]), Grid::default().threads([1, 1, 1])] {
        let mut pixels = Buffer::from_slice(&stream, &vec![0_f32; 100 * 50]).unwrap();
        tint::launch_with(grid, &stream, 100, 50, &mut pixels).unwrap();
        assert_eq!(pixels.to_vec(&stream).await.unwrap(), tinted(100, 50));
    }
});

on_both!(a_picture_without_pixels_launches_nothing, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut pixels = Buffer::from_slice(&stream, &[0_f32; 4]).unwrap();
    for (width, height) in [(0, 4), (4, 0), (0, u32::MAX)] {
        tint::launch(&stream, width, height, &mut pixels).unwrap();
        tint::launch_with(Grid::blocks([1; 3]), &stream, width, height, &mut pixels).unwrap();
    }
    assert_eq!(pixels.to_vec(&stream).await.unwrap(), [0.0; 4]);
});

on_both!(extents_past_the_limits_are_refused, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut pixels = Buffer::from_slice(&stream, &[0_f32; 4]).unwrap();
    let refused = refusal(tint::launch(&stream, u32::MAX, u32::MAX, &mut pixels));
    assert!(refused.contains("dimension y") && refused.contains("the limit is 65535 blocks"), "{refused}");
    let refused = refusal(tint::launch_with(Grid::blocks([u32::MAX; 3]), &stream, 2, 2, &mut pixels));
    assert!(refused.contains("too large"), "{refused}");
    assert_eq!(pixels.to_vec(&stream).await.unwrap(), [0.0; 4]);
});

on_both!(a_graph_captures_only_launches_that_cover, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut pixels = Buffer::from_slice(&stream, &vec![0_f32; 100 * 50]).unwrap();
    assert_eq!(pixels.to_vec(&stream).await.unwrap(), [0.0; 5000]);
    let refused = refusal(Graph::capture(&device, |capture| {
        tint::launch_with(Grid::blocks([1; 3]).threads([32, 8, 1]), capture.stream(), 100, 50, &mut pixels)
    }));
    assert!(refused.contains("covers 32 of 100 in dimension x"), "{refused}");
    let (graph, ()) = Graph::capture(&device, |capture| tint::launch(capture.stream(), 100, 50, &mut pixels)).unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(pixels.to_vec(&stream).await.unwrap(), tinted(100, 50));
});

#[tokio::test]
async fn operands_of_an_extent_may_have_different_types_and_do_not_wrap() {
    let stream = Stream::new(&common::emulated()).unwrap();
    let mut x = Buffer::from_slice(&stream, &[0_u8; 5]).unwrap();
    mixed::launch_with(Grid::blocks([2, 64, 7]).threads([1; 3]), &stream, 8, 0, &mut x).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), [1; 5]);
    // 65536 * 65536 is 0 in 32 bits.
    let refused = refusal(mixed::launch(&stream, 65_536, 0, &mut x));
    assert!(refused.contains("`over` is 4294967296 in dimension y"), "{refused}");
    let refused = refusal(mixed::launch(&stream, 1, 8, &mut x));
    assert!(refused.contains("`over` is -1 in dimension z"), "{refused}");
}
