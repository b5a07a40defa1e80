//! Structs that a kernel takes are the same in Rust and in CUDA C++: as elements and by value, with arrays, nested, aligned.

use common::on_both;
use wakeline::{Stream, prelude::*};

#[derive(Clone, Copy, Debug, PartialEq, KernelStruct)]
#[repr(C)]
struct Body {
    mass: f32,
    hits: u16,
    colour: [u8; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, KernelStruct)]
#[repr(C, align(16))]
struct Particle {
    id: u64,
    position: [f32; 3],
    body: Body,
    padding: [u32; 1],
}

#[derive(Clone, Copy, Debug, KernelStruct)]
#[repr(C)]
struct World {
    wind: [[f32; 3]; 2],
    seconds: f32,
    kind: u16,
    padding: [u8; 2],
}

#[kernel(unsafe(cuda = "kernels/fall.cu"), over = [particles.len()])]
fn fall(world: World, particles: &mut [Particle]) {
    for particle in particles {
        for (at, wind) in particle.position.iter_mut().zip(world.wind[1]) {
            *at += world.seconds * wind + particle.body.mass;
        }
        particle.body.hits += world.kind;
    }
}

on_both!(a_kernel_takes_structs_by_value_and_as_elements, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let particle = |n: u16| Particle {
        id: u64::MAX - u64::from(n),
        position: [f32::from(n), 1.0, 2.0],
        body: Body { mass: 0.5, hits: n, colour: [1, 2] },
        padding: [7],
    };
    let mut expected: Vec<_> = (0..1000).map(particle).collect();
    let mut particles = Buffer::from_slice(&stream, &expected).unwrap();
    let world = World { wind: [[99.0; 3], [1.0, 2.0, 4.0]], seconds: 0.25, kind: 3, padding: [0; 2] };
    fall::launch(&stream, world, &mut particles).unwrap();
    fall(world, &mut expected);
    assert_eq!(expected[1].position, [1.75, 2.0, 3.5]);
    assert!(particles.to_vec(&stream).await.unwrap() == expected);
});
