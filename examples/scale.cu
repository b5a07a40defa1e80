__global__ void scale(const float *x, unsigned long long x_len, float *y, unsigned long long y_len, float factor) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len && i < y_len) y[i] = factor * x[i];
}
