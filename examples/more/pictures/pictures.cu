typedef unsigned long long length;

__device__ unsigned channel(unsigned pixel, int c) { return pixel >> (8 * c) & 255; }

__global__ void shrink(unsigned width, unsigned height, const unsigned *from, length from_len,
                       unsigned to_width, unsigned to_height, unsigned *to, length to_len) {
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= to_width || y >= to_height) return;
    if (from_len < (length)width * height || to_len < (length)to_width * to_height) return;
    unsigned left = (length)x * width / to_width, right = (x + 1ull) * width / to_width;
    unsigned top = (length)y * height / to_height, bottom = (y + 1ull) * height / to_height;
    right = max(right, left + 1);
    bottom = max(bottom, top + 1);
    unsigned sums[4] = {0, 0, 0, 0}, count = (right - left) * (bottom - top), pixel = 0;
    for (unsigned row = top; row < bottom; row++)
        for (unsigned column = left; column < right; column++)
            for (int c = 0; c < 4; c++) sums[c] += channel(from[(length)row * width + column], c);
    for (int c = 0; c < 4; c++) pixel |= sums[c] / count << (8 * c);
    to[(length)y * to_width + x] = pixel;
}

// A pixel of a picture whose edge repeats.
__device__ unsigned at(const unsigned *from, int width, int height, int x, int y) {
    x = max(0, min(x, width - 1));
    y = max(0, min(y, height - 1));
    return from[(length)y * width + x];
}

__global__ void soften(unsigned width, unsigned height, const unsigned *from, length from_len, unsigned *to, length to_len) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height || min(from_len, to_len) < (length)width * height) return;
    unsigned pixel = 0;
    for (int c = 0; c < 4; c++) {
        unsigned sum = 0;
        for (int dx = -1; dx <= 1; dx++)
            for (int dy = -1; dy <= 1; dy++) sum += channel(at(from, width, height, x + dx, y + dy), c);
        sum /= 9;
        pixel |= (c < 3 ? sum / 32 * 32 + 16 : sum) << (8 * c);
    }
    to[(length)y * width + x] = pixel;
}

__global__ void edges(unsigned width, unsigned height, const unsigned *from, length from_len, unsigned *to, length to_len) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height || min(from_len, to_len) < (length)width * height) return;
    auto light = [&](int dx, int dy) {
        unsigned pixel = at(from, width, height, x + dx, y + dy);
        return (int)(2 * channel(pixel, 0) + 5 * channel(pixel, 1) + channel(pixel, 2));
    };
    int across = light(1, -1) + 2 * light(1, 0) + light(1, 1) - light(-1, -1) - 2 * light(-1, 0) - light(-1, 1);
    int down = light(-1, 1) + 2 * light(0, 1) + light(1, 1) - light(-1, -1) - 2 * light(0, -1) - light(1, -1);
    to[(length)y * width + x] = (abs(across) + abs(down)) / 8;
}

__global__ void draw(unsigned *pixels, length pixels_len, const unsigned *edges, length edges_len) {
    length i = blockIdx.x * (length)blockDim.x + threadIdx.x;
    if (i >= pixels_len || i >= edges_len) return;
    unsigned pixel = pixels[i], keep = 255 - min(edges[i], 255u), drawn = pixel & 0xff000000;
    for (int c = 0; c < 3; c++) drawn |= channel(pixel, c) * keep / 255 << (8 * c);
    pixels[i] = drawn;
}
