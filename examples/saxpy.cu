__global__ void saxpy(float a, const float *x, unsigned long long x_len, float *y, unsigned long long y_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    // Not a fused multiply-add: the host rounds twice, too, and the results are compared bit for bit.
    if (i < x_len && i < y_len) y[i] = __fadd_rn(y[i], __fmul_rn(a, x[i]));
}
