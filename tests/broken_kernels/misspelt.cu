extern "C" __global__ void mispelt(float *x, unsigned long long x_len) {}
