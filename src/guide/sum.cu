__global__ void block_sums(const float *values, unsigned long long values_len, float *sums, unsigned long long sums_len) {
    __shared__ float part[1024];
    unsigned long long i = blockIdx.x * 1024ull + threadIdx.x;
    part[threadIdx.x] = i < values_len ? values[i] : 0.0f;
    for (unsigned half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0 && blockIdx.x < sums_len) sums[blockIdx.x] = part[0];
}
