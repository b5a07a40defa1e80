// Adds the pixel's column and row to it.
extern "C" __global__ void tint(unsigned int width, unsigned int height, float *pixels, unsigned long long pixels_len) {
    unsigned long long x = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long y = blockIdx.y * (unsigned long long)blockDim.y + threadIdx.y;
    if (x < width && y < height && y * width + x < pixels_len) pixels[y * width + x] += x + 1000 * y;
}
