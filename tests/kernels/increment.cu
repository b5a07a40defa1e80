__global__ void increment(unsigned int *x, unsigned long long len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < len) x[i] += 1;
}
