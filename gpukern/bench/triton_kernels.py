"""Triton kernels that are timed on the simulated GPU and on Triton's own interpreter. It imports neither.

As a script, with TRITON_INTERPRET=1, it times its launches on Triton's own interpreter and prints {name: seconds} as
JSON; called after `import gpukern`, on the simulated GPU.
"""

import json
import sys
import time

import torch
import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + n, mask=n < N, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * N + n, e / tl.sum(e, 0), mask=n < N)


@triton.jit
def matmul(a_ptr, b_ptr, out_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(a_ptr + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out_ptr + m * N + n, acc, mask=(m < M) & (n < N))


def seconds(repeats: int, only: str = "") -> dict:
    """{name: seconds of the fastest of some launches}; each result is checked."""
    torch.manual_seed(0)
    x, a, b = torch.randn(512, 1000), torch.randn(250, 250), torch.randn(250, 250)
    out, product = torch.empty_like(x), torch.empty_like(a)
    calls = {
        "softmax": (lambda: softmax[(512,)](x, out, 1000, 1024), out, x.softmax(1)),
        "matmul": (lambda: matmul[(4, 4)](a, b, product, 250, 250, 250, 64, 64, 32), product, a @ b),
    }
    found = {}
    for name, (call, result, expected) in calls.items():
        if only not in name:
            continue
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        found[name] = min(times)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(seconds(int(sys.argv[1]), sys.argv[2])))
