// One block: its threads stride over the numbers, and share the largest change.
__global__ void newton(const float *numbers, unsigned long long numbers_len, float *roots, unsigned long long roots_len,
                       float *change, unsigned long long change_len) {
    __shared__ float largest[256];
    float mine = 0.0f;
    for (unsigned long long i = threadIdx.x; i < numbers_len && i < roots_len; i += blockDim.x) {
        float next = (roots[i] + numbers[i] / roots[i]) / 2.0f;
        mine = fmaxf(mine, fabsf(next - roots[i]));
        roots[i] = next;
    }
    largest[threadIdx.x] = mine;
    for (unsigned half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) change[0] = largest[0];
}
