__global__ void add_one(const unsigned int *x, unsigned long long x_len, unsigned int *y, unsigned long long y_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len && i < y_len) y[i] = x[i] + 1;
}
