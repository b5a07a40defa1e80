__global__ void advance(float time, float force, Particle *particles, unsigned long long particles_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= particles_len) return;
    Particle &particle = particles[i];
    particle.velocity[2] -= force / particle.mass * time;
    for (int axis = 0; axis < 3; axis++) particle.position[axis] += particle.velocity[axis] * time;
}
