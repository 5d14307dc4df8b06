"""The lockstep machine against Numba's own simulator, timed in one run. As a script, this file times what it finds."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from numba import cuda, float32


@cuda.jit
def matmul(a, b, out):
    """64 x 64 x 64 with 16 x 16 tiles in shared memory."""
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


def seconds(repeats: int) -> float:
    """The best time of a launch."""
    a, b, out = np.random.default_rng(0).random((3, 64, 64), np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        matmul[(4, 4), (16, 16)](a, b, out)
        times.append(time.perf_counter() - start)
    assert np.allclose(out, a @ b, rtol=1e-5)
    return min(times)


@pytest.mark.slow
def test_a_tiled_matmul_is_at_least_100_times_as_fast():
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    assert float(run.stdout) / seconds(5) >= 100


if __name__ == "__main__":
    print(seconds(1))
