__global__ void write_askew(unsigned int *x, unsigned long long len, unsigned int what) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= len) return;
    if (x[i] == what) *(volatile unsigned int *)((char *)x + 1) = 0;
    x[i] += 1;
}
