__global__ void mirror(unsigned width, unsigned height, const float *from, unsigned long long from_len,
                       float *to, unsigned long long to_len) {
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned long long pixels = (unsigned long long)width * height;
    if (x >= width || y >= height || from_len < pixels || to_len < pixels) return;
    to[(unsigned long long)y * width + x] = from[(y + 1ull) * width - 1 - x];
}

__global__ void blend(float *picture, unsigned long long picture_len, const float *with, unsigned long long with_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < picture_len && i < with_len) picture[i] = (picture[i] + with[i]) / 2.0f;
}
