__global__ void blur(unsigned width, unsigned height, const float *from, unsigned long long from_len,
                     float *to, unsigned long long to_len) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    unsigned long long pixels = (unsigned long long)width * height;
    if (x >= width || y >= height || from_len < pixels || to_len < pixels) return;
    auto at = [&](int x, int y) {
        x = max(0, min(x, (int)width - 1));
        y = max(0, min(y, (int)height - 1));
        return from[(unsigned long long)y * width + x];
    };
    to[(unsigned long long)y * width + x] =
        (at(x, y) + at(x - 1, y) + at(x + 1, y) + at(x, y - 1) + at(x, y + 1)) / 5.0f;
}
