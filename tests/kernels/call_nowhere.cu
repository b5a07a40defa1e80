__global__ void call_nowhere(unsigned int *x, unsigned long long len, unsigned int what) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= len) return;
    typedef void (*Function)(unsigned int *);
    // No function has this address, far beyond any code; and no compiler knows it.
    if (x[i] == what) ((Function)((len + what) << 40))(x);
    x[i] += 1;
}
