"""Numba kernels that are timed on the simulated GPU and on Numba's own simulator. It imports neither.

As a script, with NUMBA_ENABLE_CUDASIM=1, it times its launches on Numba's own simulator and prints {name: seconds} as
JSON; called after `import gpukern`, on the simulated GPU.
"""

import json
import math
import sys
import time

import numpy as np
from numba import cuda, float32, int32

N = 64


@cuda.jit
def matmul(a, b, out):
    a_tile = cuda.shared.array((16, 16), float32)
    b_tile = cuda.shared.array((16, 16), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    m, n = cuda.blockIdx.y * 16 + ty, cuda.blockIdx.x * 16 + tx
    acc = float32(0)
    for k0 in range(0, a.shape[1], 16):
        a_tile[ty, tx] = a[m, k0 + tx]
        b_tile[ty, tx] = b[k0 + ty, n]
        cuda.syncthreads()
        for k in range(16):
            acc += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()
    out[m, n] = acc


@cuda.jit
def tree_reduction(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    half = 128
    while half > 0:
        if t < half:
            s[t] += s[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        out[cuda.blockIdx.x] = s[0]


@cuda.jit
def transpose(x, out):
    tile = cuda.shared.array((32, 33), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
    for j in range(0, 32, 8):
        tile[ty + j, tx] = x[row + ty + j, column + tx]
    cuda.syncthreads()
    for j in range(0, 32, 8):
        out[column + ty + j, row + tx] = tile[tx, ty + j]


@cuda.jit
def histogram(x, out):
    s = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    if t < 64:
        s[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(s, x[i], 1)
    cuda.syncthreads()
    if t < 64:
        cuda.atomic.add(out, t, s[t])


@cuda.jit
def softmax(x, out):
    s = cuda.shared.array(128, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    most = float32(-1e30)
    for j in range(t, x.shape[1], 128):
        most = max(most, x[row, j])
    s[t] = most
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            s[t] = max(s[t], s[t + half])
        cuda.syncthreads()
        half //= 2
    most = s[0]
    cuda.syncthreads()
    total = float32(0)
    for j in range(t, x.shape[1], 128):
        total += math.exp(x[row, j] - most)
    s[t] = total
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            s[t] += s[t + half]
        cuda.syncthreads()
        half //= 2
    for j in range(t, x.shape[1], 128):
        out[row, j] = math.exp(x[row, j] - most) / s[0]


def launches() -> dict:
    """{name: (kernel, grid, block, arguments, what the last one must become)}"""
    random = np.random.default_rng(0)
    a, b = random.random((2, N, N), np.float32)
    x, picked = random.random((4, 512), np.float32), random.integers(0, 64, 4096).astype(np.int32)
    wide = random.random((64, 128), np.float32)
    exp = np.exp(x - x.max(1, keepdims=True))
    zeros = np.zeros
    return {
        "matmul": (matmul, (4, 4), (16, 16), (a, b, zeros((N, N), np.float32)), a @ b),
        "tree_reduction": (tree_reduction, 8, 256, (x.ravel(), zeros(8, np.float32)), x.reshape(8, 256).sum(1)),
        "transpose": (transpose, (4, 2), (32, 8), (wide, zeros((128, 64), np.float32)), wide.T),
        "histogram": (histogram, 4, 256, (picked, zeros(64, np.int32)), np.bincount(picked, minlength=64)),
        "softmax": (softmax, 4, 128, (x, zeros((4, 512), np.float32)), exp / exp.sum(1, keepdims=True)),
    }


def seconds(repeats: int, only: str = "") -> dict:
    """{name: seconds of the fastest of some launches}; each result is checked first."""
    found = {}
    for name, (kernel, grid, block, arguments, expected) in launches().items():
        if only not in name:
            continue
        times = []
        for _ in range(repeats):
            arguments[-1][...] = 0
            start = time.perf_counter()
            kernel[grid, block](*arguments)
            times.append(time.perf_counter() - start)
        np.testing.assert_allclose(arguments[-1], expected, rtol=1e-5)
        found[name] = min(times)
    return found


if __name__ == "__main__":
    print(json.dumps(seconds(int(sys.argv[1]), sys.argv[2])))
