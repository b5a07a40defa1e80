struct alignas(256) Wide {
    unsigned long long at[32];
};

__global__ void double_wide(Wide *x, unsigned long long len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < len) {
        for (int n = 0; n < 32; n++) x[i].at[n] *= 2;
    }
}
