// matmul: out[M, N] = act(a[M, K] @ w[K, N] + bias[N]) + residual[M, N], in tiles of BM x BN.
//
// Each element of a is needed by N columns of the output, each of w by M rows. A block computes a tile of the output, and
// loads what it needs of a and w through shared memory, BK columns of a and rows of w at a time: an element of a is read
// from global memory by one thread and used by BN of them. Chapter 5 of Kirk, Hwu and El Hajj, Programming Massively
// Parallel Processors.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// GELU in its tanh form: x * sigmoid(2u). Where expf is infinite, x is divided by it to zero.
__device__ float gelu(float x) {
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // the first factor is sqrt(2 / pi)
    return x / (1.0f + expf(-2.0f * u));
}

// bias and residual may be null. Strides are in elements: a[m, k] is a[m * a_m + k * a_k].
template <typename T, int BM, int BN, int BK, bool GELU>
__global__ void __launch_bounds__(BM * BN)
matmul_kernel(const T* __restrict__ a, long long a_m, long long a_k,
              const T* __restrict__ w, long long w_k, long long w_n,
              const T* __restrict__ bias,
              const T* __restrict__ residual, long long r_m, long long r_n,
              T* __restrict__ out, long long M, long long N, long long K) {
    __shared__ float a_tile[BM][BK];
    __shared__ float w_tile[BK][BN];
    int tx = threadIdx.x, ty = threadIdx.y;
    long long m = (long long)blockIdx.x * BM + ty;  // rows on x, where the grid may be longest
    long long n = (long long)blockIdx.y * BN + tx;  // neighbouring threads, neighbouring columns: w is coalesced
    a += m * a_m;  // the thread's row of a
    w += n * w_n;  // and its column of w

    float acc = 0.0f;
    for (long long k0 = 0; k0 < K; k0 += BK) {
        // together the threads load a tile of each; past the edge of a matrix a tile holds zeros
        for (int k = tx; k < BK; k += BN) {
            a_tile[ty][k] = m < M && k0 + k < K ? (float)a[(k0 + k) * a_k] : 0.0f;
        }
        for (int k = ty; k < BK; k += BM) {
            w_tile[k][tx] = k0 + k < K && n < N ? (float)w[(k0 + k) * w_k] : 0.0f;
        }
        __syncthreads();  // the tiles are full
        for (int k = 0; k < BK; k++) {
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
