extern "C" __global__ void fine(float *x, unsigned long long x_len) {}
