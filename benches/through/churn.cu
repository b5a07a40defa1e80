// Some rounds of a small generator over each element: work that takes a while.
__global__ void churn(unsigned int *data, unsigned long long len, unsigned int rounds) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= len) return;
    unsigned int x = data[i];
    for (unsigned int n = 0; n < rounds; n++) x = x * 1664525u + 1013904223u;
    data[i] = x;
}
