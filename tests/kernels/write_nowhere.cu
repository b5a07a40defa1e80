__global__ void write_nowhere(unsigned int *x, unsigned long long len, unsigned int what) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= len) return;
    if (x[i] == what) x[i + (1ull << 42)] = 0;
    x[i] += 1;
}
