__global__ void affine(const unsigned int* x, unsigned long long x_len, unsigned int* y, unsigned long long y_len,
                       unsigned int a, unsigned int b) {
    unsigned long long at = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (at < x_len && at < y_len) y[at] = a * x[at] + b + (unsigned int)at;
}
