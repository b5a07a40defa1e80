// One thread per byte.
__global__ void uppercase(unsigned char *text, unsigned long long len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < len && text[i] >= 'a' && text[i] <= 'z') text[i] -= 'a' - 'A';
}
