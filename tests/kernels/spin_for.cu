// One thread that keeps the device busy for so long.
__global__ void spin_for(unsigned int *x, unsigned long long len, unsigned long long nanoseconds) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begun < nanoseconds);
    if (len > 0) x[0] += 1;
}
