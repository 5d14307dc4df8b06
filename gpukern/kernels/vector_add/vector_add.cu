// vector_add: out[N] = x[N] + y[N], one thread an element. What numba_ladder.py writes in Python.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__global__ void vector_add_kernel(const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ out, long long N) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) {  // the last block may have threads to spare
        out[i] = (T)((float)x[i] + (float)y[i]);
    }
}
