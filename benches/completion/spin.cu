// Runs for this long by the device's own clock, on one thread.
__global__ void spin(unsigned long long *count, unsigned long long len, unsigned long long nanoseconds) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - began < nanoseconds);
    if (len > 0) count[0] += 1;
}
