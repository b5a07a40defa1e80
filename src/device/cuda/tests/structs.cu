// Kernels with different structs; see `same_file` in tests.rs.

__global__ void narrow(Small *small, unsigned long long) {
    small[0].x += 1;
}

__global__ void widen(Large *large, unsigned long long) {
    large[0].y[0] += large[0].small.x;
}

__global__ void again(Small *small, unsigned long long) {
    small[0].x += 1;
}
