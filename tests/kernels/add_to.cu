__global__ void add_to(unsigned int *y, unsigned long long y_len, const unsigned int *x, unsigned long long x_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < y_len && i < x_len) y[i] += x[i];
}
