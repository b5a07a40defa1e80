__global__ void swap(Point *points, unsigned long long points_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < points_len) points[i] = {points[i].y, points[i].x};
}

__global__ void advance(Step step, float *x, unsigned long long x_len) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len) x[i] += step.by.x * step.times;
}
