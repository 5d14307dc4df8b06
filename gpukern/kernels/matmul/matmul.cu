// matmul: out[M, N] = act(a[M, K] @ w[K, N] + bias[N]) + residual[M, N], in tiles of TILE x TILE.
//
// Each element of a is needed by N columns of the output, each of w by M rows. A block computes a tile of the output, and
// loads what it needs of a and w through shared memory, a tile of each at a time: an element is read from global memory
// by one thread and used by TILE of them. Chapter 5 of Kirk, Hwu and El Hajj, Programming Massively Parallel Processors.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// GELU in its tanh form: x * sigmoid(2u). Where expf is infinite, x is divided by it to zero.
__device__ float gelu(float x) {
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // the first factor is sqrt(2 / pi)
    return x / (1.0f + expf(-2.0f * u));
}

// bias and residual may be null. Strides are in elements: a[m, k] is a[m * a_m + k * a_k].
template <typename T, int TILE, bool GELU>
__global__ void __launch_bounds__(TILE * TILE)
matmul_kernel(const T* __restrict__ a, long long a_m, long long a_k,
              const T* __restrict__ w, long long w_k, long long w_n,
              const T* __restrict__ bias,
              const T* __restrict__ residual, long long r_m, long long r_n,
              T* __restrict__ out, long long M, long long N, long long K) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float w_tile[TILE][TILE];
    int tx = threadIdx.x, ty = threadIdx.y;
    long long m = (long long)blockIdx.x * TILE + ty;  // rows on x, where the grid may be longest
    long long n = (long long)blockIdx.y * TILE + tx;  // neighbouring threads, neighbouring columns: w is coalesced

    float acc = 0.0f;
    for (long long k0 = 0; k0 < K; k0 += TILE) {
        // one element of each tile a thread; past the edge of a matrix a tile holds zeros
        a_tile[ty][tx] = m < M && k0 + tx < K ? (float)a[m * a_m + (k0 + tx) * a_k] : 0.0f;
        w_tile[ty][tx] = k0 + ty < K && n < N ? (float)w[(k0 + ty) * w_k + n * w_n] : 0.0f;
        __syncthreads();  // the tiles are full
        #pragma unroll
        for (int k = 0; k < TILE; k++) {
            acc += a_tile[ty][k] * w_tile[k][tx];
        }
        __syncthreads();  // the tiles are used up
    }

    if (m < M && n < N) {
        if (bias) acc += (float)bias[n];
        if (GELU) acc = gelu(acc);
        if (residual) acc += (float)residual[m * r_m + n * r_n];
        out[m * N + n] = (T)acc;
    }
}
