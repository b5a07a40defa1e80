//! The kernels, each with its body for the emulated device; `pictures.cu` has those for a GPU. All arithmetic is on
//! integers, so that both give the same bytes.

use wakeline::prelude::*;

/// The mean of the source pixels that a pixel of the thumbnail covers.
#[kernel(unsafe(cuda = "pictures.cu"), over = [to_width, to_height])]
pub(crate) fn shrink(width: u32, height: u32, from: &[u32], to_width: u32, to_height: u32, to: &mut [u32]) {
    for y in 0..to_height {
        for x in 0..to_width {
            let covered = |at: u32, of: u32, side: u32| {
                let first = (u64::from(at) * u64::from(side) / u64::from(of)) as u32;
                let end = ((u64::from(at) + 1) * u64::from(side) / u64::from(of)) as u32;
                first..end.max(first + 1)
            };
            let (columns, rows) = (covered(x, to_width, width), covered(y, to_height, height));
            let count = (columns.len() * rows.len()) as u32;
            let mut sums = [0_u32; 4];
            for row in rows {
                for column in columns.clone() {
                    let pixel = from[row as usize * width as usize + column as usize].to_le_bytes();
                    sums.iter_mut().zip(pixel).for_each(|(sum, value)| *sum += u32::from(value));
                }
            }
            to[y as usize * to_width as usize + x as usize] = u32::from_le_bytes(sums.map(|sum| (sum / count) as u8));
        }
    }
}

/// A pixel of a picture whose edge repeats.
fn at(from: &[u32], width: u32, height: u32, x: i64, y: i64) -> [u8; 4] {
    let (x, y) = (x.clamp(0, i64::from(width) - 1), y.clamp(0, i64::from(height) - 1));
    from[(y * i64::from(width) + x) as usize].to_le_bytes()
}

/// The mean of three by three pixels, in few colours.
#[kernel(unsafe(cuda = "pictures.cu"), over = [width, height])]
pub(crate) fn soften(width: u32, height: u32, from: &[u32], to: &mut [u32]) {
    for y in 0..i64::from(height) {
        for x in 0..i64::from(width) {
            let mut sums = [0_u32; 4];
            for (dx, dy) in (-1..=1).flat_map(|dx| (-1..=1).map(move |dy| (dx, dy))) {
                let pixel = at(from, width, height, x + dx, y + dy);
                sums.iter_mut().zip(pixel).for_each(|(sum, value)| *sum += u32::from(value));
            }
            let [red, green, blue, alpha] = sums.map(|sum| sum / 9);
            let few = |value: u32| (value / 32 * 32 + 16) as u8;
            to[(y * i64::from(width) + x) as usize] =
                u32::from_le_bytes([few(red), few(green), few(blue), alpha as u8]);
        }
    }
}

/// How strong the edge is at each pixel: Sobel's operator on the brightness.
#[kernel(unsafe(cuda = "pictures.cu"), over = [width, height])]
pub(crate) fn edges(width: u32, height: u32, from: &[u32], to: &mut [u32]) {
    for y in 0..i64::from(height) {
        for x in 0..i64::from(width) {
            let light = |dx: i64, dy: i64| {
                let [red, green, blue, _] = at(from, width, height, x + dx, y + dy).map(i32::from);
                2 * red + 5 * green + blue
            };
            let across = light(1, -1) + 2 * light(1, 0) + light(1, 1) - light(-1, -1) - 2 * light(-1, 0) - light(-1, 1);
            let down = light(-1, 1) + 2 * light(0, 1) + light(1, 1) - light(-1, -1) - 2 * light(0, -1) - light(1, -1);
            to[(y * i64::from(width) + x) as usize] = ((across.abs() + down.abs()) / 8) as u32;
        }
    }
}

/// Darkens each pixel where the edge is strong.
#[kernel(unsafe(cuda = "pictures.cu"), over = [pixels.len()])]
pub(crate) fn draw(pixels: &mut [u32], edges: &[u32]) {
    for (pixel, edge) in pixels.iter_mut().zip(edges) {
        let [red, green, blue, alpha] = pixel.to_le_bytes();
        let dark = |value: u8| (u32::from(value) * (255 - (*edge).min(255)) / 255) as u8;
        *pixel = u32::from_le_bytes([dark(red), dark(green), dark(blue), alpha]);
    }
}
