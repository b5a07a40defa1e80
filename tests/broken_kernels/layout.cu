extern "C" __global__ void layout(Pair pair) {}
