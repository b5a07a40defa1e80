extern "C" __global__ void doubles(double *x, unsigned long long x_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len) x[i] = 0;
}
