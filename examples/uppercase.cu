__global__ void uppercase(unsigned char *text, unsigned long long len) {
    // A thread for each 16 bytes where the text is aligned (envelopes are), then the rest.
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < len) {
        unsigned char c = text[i];
        if (c >= 'a' && c <= 'z') text[i] = c - 32;
    }
}
