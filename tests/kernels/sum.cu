__global__ void sum(const unsigned int *x, unsigned long long x_len, unsigned int *total, unsigned long long total_len) {
    if (blockIdx.x != 0 || threadIdx.x != 0 || total_len == 0) return;
    unsigned int all = 0;
    for (unsigned long long i = 0; i < x_len; i++) all += x[i];
    total[0] = all;
}
