// Wrong on purpose: it leaves out the last element.
extern "C" __global__ void rounded(const float *x, unsigned long long x_len, float *y, unsigned long long y_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i + 1 < x_len) y[i] = rintf(x[i]);
}
