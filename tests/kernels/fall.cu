// `Particle`, `Body` and `World` are defined already, from the structs in Rust.
extern "C" __global__ void fall(World world, Particle *particles, unsigned long long particles_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= particles_len) return;
    Particle &particle = particles[i];
    for (int axis = 0; axis < 3; axis++) {
        particle.position[axis] += world.seconds * world.wind[1][axis] + particle.body.mass;
    }
    particle.body.hits += world.kind;
}
