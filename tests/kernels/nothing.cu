__global__ void nothing(unsigned int n) {}
