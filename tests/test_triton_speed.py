"""Triton's interpreter against the simulated GPU with all its checks, timed in one run. As a script: the former."""

import os
import subprocess
import sys
import time

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
import triton.language as tl  # noqa: E402


@triton.jit
def softmax_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + n
    x = tl.load(x_ptr + at, mask=n < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + at, e / tl.sum(e, axis=0), mask=n < N)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        a = tl.load(a_ptr + m * K + k0 + k[None, :], mask=(m < M) & (k0 + k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + (k0 + k[:, None]) * N + n, mask=(k0 + k[:, None] < K) & (n < N), other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + m * N + n, total, mask=(m < M) & (n < N))


def seconds(repeats: int) -> tuple:
    """The best times of a softmax of 256 rows of 1024 and of a matmul of 256 x 256 x 256."""
    torch.manual_seed(0)
    x, a, b = torch.randn(256, 1024), torch.randn(256, 256), torch.randn(256, 256)
    times = {"softmax": [], "matmul": []}
    for _ in range(repeats):
        start = time.perf_counter()
        softmax, product = torch.empty_like(x), torch.empty(256, 256)
        softmax_kernel[(256,)](x, softmax, 1024, BLOCK=1024)
        middle = time.perf_counter()
        matmul_kernel[(4, 4)](a, b, product, 256, 256, 256, BM=64, BN=64, BK=32)
        times["softmax"].append(middle - start)
        times["matmul"].append(time.perf_counter() - middle)
    torch.testing.assert_close(softmax, x.softmax(1))
    torch.testing.assert_close(product, a @ b, rtol=1e-4, atol=1e-4)
    return min(times["softmax"]), min(times["matmul"])


@pytest.mark.slow
def test_softmax_is_at_least_twice_as_fast_and_matmul_not_slower():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    softmax, matmul = map(float, run.stdout.split())
    ours = seconds(5)
    assert softmax / ours[0] >= 2 and matmul / ours[1] >= 1, (softmax, matmul, ours)


if __name__ == "__main__":
    print(*seconds(2))
