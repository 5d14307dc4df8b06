"""Triton kernels whose sectors are held against Nsight Compute's.

How many warps share a program's access, and with it the number of requests, is the compiler's choice; which bytes are
touched is the kernel's.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from validation.cases import Case

TRITON_CASES = {}


def case(name: str, kernel, grid, arguments, differs: dict | None = None, **meta) -> None:
    TRITON_CASES[name] = Case(name, kernel, grid, None, arguments, 0, differs or {}, meta)


def values(*shape: int, dtype=np.float32, most: int = 64):
    """As cases.values. Copied to the card, so that making them launches nothing there."""
    n = int(np.prod(shape))
    made = torch.from_numpy((np.arange(n) * 7 % most).astype(dtype).reshape(shape))
    return made.to("cuda") if torch.cuda.is_available() else made


def zeros(*shape: int, dtype=np.float32):
    return values(*shape, dtype=dtype, most=1)


LOADS, STORES = "global_load_sectors", "global_store_sectors"
TWICE = "a thread has two neighbours and takes them in two instructions, which touch the same sectors"
ONE_BY_ONE = {LOADS: TWICE, STORES: TWICE}  # a mask that ends anywhere leaves no room for loads of two
SHARED = "rows of 300 floats end inside a sector: two warps that meet there both touch it"


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i, mask=i < n), tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i < n)


case("triton add", add, (8,), lambda: (values(2048), values(2048), zeros(2048), 2048), BLOCK=256)
case("triton add, cut", add, (4,), lambda: (values(1000), values(1000), zeros(1000), 1000), ONE_BY_ONE, BLOCK=256)
case("triton add float16", add, (2,), lambda: [*(values(2048, dtype="f2") for _ in "xyo"), 2048], BLOCK=1024)
case("triton add float64", add, (4,), lambda: [*(values(1024, dtype="f8") for _ in "xyo"), 1024], BLOCK=256)


@triton.jit
def strided(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i * stride))


case("triton every 3rd", strided, (4,), lambda: (values(3072), zeros(1024), 3), {LOADS: TWICE}, BLOCK=256)
case("triton every 8th", strided, (4,), lambda: (values(8192), zeros(1024), 8), BLOCK=256)


@triton.jit
def transpose(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    inside = (m < M) & (n < N)
    x = tl.load(x_ptr + m * N + n, mask=inside)
    tl.store(out_ptr + n * M + m, x, mask=inside)


case("triton transpose", transpose, (2, 4), lambda: (values(64, 128), zeros(128, 64), 64, 128), BM=32, BN=32)
case("triton transpose, odd sizes", transpose, (3, 4), lambda: (values(75, 100), zeros(100, 75), 75, 100), BM=32, BN=32)


@triton.jit
def softmax(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + n, mask=n < N, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * N + n, e / tl.sum(e, 0), mask=n < N)


case("triton softmax", softmax, (6,), lambda: (values(6, 1000), zeros(6, 1000), 1000), BLOCK=1024)
case(
    "triton softmax of 300",
    softmax,
    (6,),
    lambda: (values(6, 300), zeros(6, 300), 300),
    {LOADS: SHARED, STORES: SHARED},
    BLOCK=512,
)


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


def product(M, N, K, dtype):
    return lambda: (values(M, K, dtype=dtype, most=8), values(K, N, dtype=dtype, most=8), zeros(M, N), M, N, K)


case("triton matmul", matmul, (2, 2), product(64, 64, 128, "f4"), BM=32, BN=32, BK=32)
case("triton matmul float16", matmul, (2, 2), product(128, 128, 128, "f2"), BM=64, BN=64, BK=32)
case("triton matmul, odd sizes", matmul, (3, 3), product(75, 70, 90, "f4"), BM=32, BN=32, BK=32)
