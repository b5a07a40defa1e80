extern "C" __global__ void saxpy(float a, const float *x, unsigned long long x_len, float *y, unsigned long long y_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len && i < y_len) y[i] += a * x[i];
}
