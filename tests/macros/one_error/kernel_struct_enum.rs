use wakeline::{Stream, prelude::*};

#[derive(Clone, Copy, KernelStruct)]
#[repr(C)]
enum Particle {
    Alive,
    Dead,
}

#[kernel]
fn fall(gravity: Particle, particles: &mut [Particle]) {
    let _ = (gravity, particles);
}

fn use_it(stream: &Stream, gravity: Particle, particles: &mut Buffer<Particle>) -> Result<()> {
    fall::launch(stream, gravity, particles)
}

fn main() {}
