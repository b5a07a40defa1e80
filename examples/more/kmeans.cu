// The nearest centroid of each point. Each operation is rounded by itself, as on the host, so that both find the same.
__global__ void assign(const float *points, unsigned long long points_len, const float *centroids,
                       unsigned long long centroids_len, unsigned int *assignments, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = points[2 * i], y = points[2 * i + 1], nearest = __int_as_float(0x7f800000);
    unsigned int cluster = 0;
    for (unsigned int k = 0; k < centroids_len / 2; k++) {
        float dx = __fsub_rn(x, centroids[2 * k]), dy = __fsub_rn(y, centroids[2 * k + 1]);
        float distance = __fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy));
        if (distance < nearest) {
            nearest = distance;
            cluster = k;
        }
    }
    assignments[i] = cluster;
}
