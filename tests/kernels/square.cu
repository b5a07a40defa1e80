__global__ void square(const unsigned int *a, unsigned long long a_len, unsigned int *b, unsigned long long b_len,
                       unsigned int n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= b_len) return;
    unsigned long long row = i / n, column = i % n;
    unsigned int sum = 0;
    for (unsigned int k = 0; k < n; k++) sum += a[row * n + k] * a[k * (unsigned long long)n + column];
    b[i] = sum;
}
