// Adds one to each element, and then runs until `nanoseconds` have passed by the device's own clock. One block.
__global__ void work(unsigned long long *data, unsigned long long len, unsigned long long nanoseconds) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    for (unsigned long long i = threadIdx.x; i < len; i += blockDim.x) data[i] += 1;
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - began < nanoseconds);
}
