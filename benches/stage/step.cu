// A few elements, in place: a minimal kernel.
__global__ void step(unsigned int *x, unsigned long long len) {
    unsigned int i = threadIdx.x;
    if (i < len) x[i] += 1;
}
