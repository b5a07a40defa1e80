// One thread for each row of 64 numbers.
__global__ void row_lengths(const float *rows, unsigned long long rows_len,
                            float *lengths, unsigned long long lengths_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= lengths_len || (i + 1) * 64 > rows_len) return;
    float sum = 0.0f;
    for (int at = 0; at < 64; at++) sum += rows[i * 64 + at] * rows[i * 64 + at];
    lengths[i] = sqrtf(sum);
}
