// layernorm: out[C] = (x[C] - mean) / sqrt(variance + eps) * gamma[C] + beta[C], for each row. One warp a row.
//
// The 32 threads of a warp run together and can read each other's registers (a shuffle), so a row's sum needs neither
// shared memory nor a barrier. As layernorm_forward_kernel3 of llm.c does it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The sum of value over the 32 threads of the warp; each of them gets it. Five rounds: 16 apart, 8, 4, 2, 1.
__device__ float warp_sum(float value) {
    for (int apart = 16; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, apart);
    }
    return value;
}

template <typename T>
__global__ void layernorm_kernel(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ beta,
                                 T* __restrict__ out, float eps, long long rows, long long C) {
    int lane = threadIdx.x % 32;
    long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;  // the whole warp leaves: its row is one
    x += row * C;
    out += row * C;

    float sum = 0.0f;
    for (long long c = lane; c < C; c += 32) {
        sum += (float)x[c];
    }
    float mean = warp_sum(sum) / C;

    // a second pass: E[x^2] - mean^2 would need one, and cancels when the mean is large
    float squares = 0.0f;
    for (long long c = lane; c < C; c += 32) {
        float centred = (float)x[c] - mean;
        squares += centred * centred;
    }
    float rstd = rsqrtf(warp_sum(squares) / C + eps);

    for (long long c = lane; c < C; c += 32) {
        out[c] = (T)(((float)x[c] - mean) * rstd * (float)gamma[c] + (float)beta[c]);
    }
}
