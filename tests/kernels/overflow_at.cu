// 64 MiB of stack, where a thread has at most 512 KiB; should there be enough one day, it comes back.
__device__ __noinline__ unsigned int deeper(unsigned int *x, unsigned int depth) {
    volatile unsigned int frame[256];
    frame[depth % 256] = x[0] + depth;
    if (depth == 0) return frame[0];
    return deeper(x, depth - 1) + frame[depth % 256];
}

__global__ void overflow_at(unsigned int *x, unsigned long long len, unsigned int what) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= len) return;
    if (x[i] == what) x[i] = deeper(x, 1 << 16);
    x[i] += 1;
}
