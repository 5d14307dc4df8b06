"""simulate: the simulated GPU computes bfloat16 as a card does, and refuses what a card refuses.

All of it runs in the mode `counted`, which importing gpukern has set up on a machine without a card.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import cuda, float32

from gpukern import device

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(not device.simulated(), reason="the simulated GPU is off where there is a card")


def bfloat16(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + m * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n)
    tl.store(out_ptr + m * N + n, tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dot(dtype):
    a, b = bfloat16(16, 32).to(dtype), bfloat16(32, 64, seed=1).to(dtype)
    out = torch.empty(16, 64)
    dot_kernel[(1,)](a, b, out, 16, 64, 32)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@triton.jit
def copy_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_casts_to_bfloat16_and_back_round_to_nearest_even(dtype):
    # 1 + 2^-8 and 1 + 3 * 2^-8 lie half way between two bfloat16: they go to 1 and to 1 + 2^-6, the even ones.
    halfway = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-10, 257.0, 259.0, 0.0, 3.0]
    x = torch.tensor(halfway, dtype=torch.float64).to(dtype)
    out = torch.empty(8, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, out, 8)
    assert torch.equal(out, x.bfloat16())
    back = torch.empty(8, dtype=dtype)
    copy_kernel[(1,)](out, back, 8)
    assert torch.equal(back, out.to(dtype))
    if dtype == torch.float64:
        assert out.tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, 256.0, 260.0, 0.0, 3.0]


def test_inf_and_nan_survive_a_cast():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38])  # the last is beyond the largest bfloat16
    out = torch.empty(4, dtype=torch.bfloat16)
    copy_kernel[(1,)](x, out, 4)
    torch.testing.assert_close(out, x.bfloat16(), equal_nan=True)


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n, mask=n < N - 1, other=2.0)
    tl.store(out_ptr + n, x + y)
    tl.store(out_ptr + N + n, x - y)
    tl.store(out_ptr + 2 * N + n, x * y)
    tl.store(out_ptr + 3 * N + n, x / y)
    tl.store(out_ptr + 4 * N + n, tl.where(x < y, -x, y * 1.5))
    tl.store(out_ptr + 5 * N + n, tl.maximum(x, y) + tl.full((N,), 1.7, tl.bfloat16))
    tl.store(out_ptr + 6 * N + n, tl.fma(x, y, x))
    tl.store(out_ptr + 7 * N + n, tl.abs(x))


def test_arithmetic_and_comparison():
    x, y, out = bfloat16(64), bfloat16(64, seed=1), torch.empty(8, 64, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, 64)
    y[-1] = 2.0
    fma = (x.double() * y.double() + x.double()).bfloat16()  # one rounding, not two
    wanted = [x + y, x - y, x * y, x / y, torch.where(x < y, -x, y * 1.5), torch.maximum(x, y) + 1.7, fma, x.abs()]
    for i, row in enumerate(wanted):
        assert torch.equal(out[i], row), i


@triton.jit
def reduction_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr, tl.sum(x, axis=0))
    tl.store(out_ptr + 1, tl.max(x, axis=0))
    tl.store(out_ptr + 2, tl.min(x, axis=0))
    tl.store(out_ptr + 3, tl.argmax(x, axis=0))
    tl.store(out_ptr + 4 + tl.arange(0, N), tl.cumsum(x, axis=0))
    tile = x.reshape(N // 4, 4)
    tl.store(out_ptr + 4 + N + tl.arange(0, 4), tl.sum(tile, axis=0))
    tl.store(out_ptr + 8 + N, tl.sum(tile))


def test_reductions():
    """Triton widens bfloat16 for max, min, argmax and cumsum, and not for sum."""
    x, out = bfloat16(1024) + 1, torch.empty(9 + 1024)
    reduction_kernel[(1,)](x, out, 1024)
    wide = x.float()
    assert out[1:4].tolist() == [wide.max(), wide.min(), wide.argmax()]
    torch.testing.assert_close(out[4:-5], wide.cumsum(0), rtol=1e-5, atol=1e-5)
    sums = torch.cat((out[:1], out[-5:]))
    assert torch.equal(sums, sums.bfloat16().float())
    torch.testing.assert_close(
        sums, torch.cat((wide.sum()[None], wide.reshape(256, 4).sum(0), wide.sum()[None])), rtol=0.01, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dot_refuses_what_no_tensor_core_takes(dtype):
    with pytest.raises(device.LimitError, match="K=8.*at least 16"):
        dot_kernel[(1,)](torch.ones(16, 8, dtype=dtype), torch.ones(8, 16, dtype=dtype), torch.empty(16, 16), 16, 16, 8)


@pytest.mark.parametrize(
    "grid, warps, names",
    [
        ((1, 65536), 4, "grid.y is 65536"),
        ((1, 1, 65536), 4, "grid.z is 65536"),
        (lambda meta: (1, meta["N"] * 2**14), 4, "grid.y is 65536"),
        ((1,), 3, "num_warps=3"),
        ((1,), 64, "2048 threads"),
    ],
)
def test_triton_launches_keep_the_limits(grid, warps, names):
    with pytest.raises(device.LimitError, match=names):
        copy_kernel[grid](torch.ones(4), torch.empty(4), N=4, num_warps=warps)


def test_an_empty_triton_grid_runs_nothing():
    out = torch.zeros(4)
    copy_kernel[(0,)](torch.ones(4), out, 4)
    assert out.tolist() == [0, 0, 0, 0]


@triton.jit
def block_kernel(out_ptr, M: tl.constexpr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.arange(0, M)[:, None] + tl.arange(0, N)[None, :]))


def test_triton_blocks_keep_the_limit():
    out = torch.empty(1, dtype=torch.int64)
    block_kernel[(1,)](out, 1024, 8)
    assert out.item() == 8 * sum(range(1024)) + 1024 * sum(range(8))
    with pytest.raises(Exception, match="exceeds triton maximum tensor numel"):
        block_kernel[(1,)](out, 2048, 1024)
    with pytest.raises(Exception, match="power of 2"):
        block_kernel[(1,)](out, 48, 8)


@triton.jit
def softplus(x):
    return tl.log(1 + tl.exp(x))


@triton.jit
def learner_kernel(x_ptr, out_ptr, N, BN: tl.constexpr):
    """As a learner writes it: a device function, a loop over tiles, masks, a scalar."""
    total = 0.0
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(n < N, softplus(x), 0.0))
    tl.store(out_ptr, total / N)


def test_a_learners_triton_kernel():
    x, out = bfloat16(1000), torch.empty(1)
    for _ in range(2):  # the language is patched for a launch, and restored after it
        learner_kernel[(1,)](x, out, 1000, BN=128)
        torch.testing.assert_close(out[0], torch.nn.functional.softplus(x.float()).mean())


@triton.jit
def wrong_kernel(x_ptr):
    tl.store(x_ptr, no_such_name)  # noqa: F821


def test_a_learners_mistake_is_still_reported():
    with pytest.raises(Exception, match="no_such_name"):
        wrong_kernel[(1,)](torch.ones(1))
    out = torch.empty(4)
    copy_kernel[(1,)](torch.ones(4), out, 4)  # and leaves the interpreter as it was
    assert out.tolist() == [1, 1, 1, 1]


@cuda.jit
def index_kernel(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = i


@pytest.mark.parametrize(
    "grid, block, names",
    [
        (1, 2048, "2048 threads"),
        (1, (64, 32), "2048 threads"),
        (1, (1, 1, 65), "block.z is 65"),
        ((1, 65536), 1, "grid.y is 65536"),
        (0, 32, "grid.x is 0"),
    ],
)
def test_numba_launches_keep_the_limits(grid, block, names):
    with pytest.raises(device.LimitError, match=names):
        index_kernel[grid, block](np.zeros(4, np.float32))


def test_a_numba_launch_within_the_limits():
    x = np.zeros(100, np.float32)
    index_kernel[4, 32](x)
    assert x.tolist() == list(range(100))


@cuda.jit
def reverse_kernel(x):
    ahead = cuda.shared.array(64, float32)
    twice = cuda.shared.array((2, 64), float32)  # not the same memory
    i = cuda.threadIdx.x
    ahead[i] = x[i]
    twice[1, i] = 2 * x[i]
    cuda.syncthreads()
    x[i] = ahead[63 - i] + twice[1, 63 - i]


@cuda.jit
def shared_kernel(x):
    tile = cuda.shared.array((96, 128), float32)  # 48 KB: as much as there is
    one_more = cuda.shared.array(1, float32)
    tile[0, 0] = one_more[0] = x[0]


@cuda.jit
def dynamic_kernel(x):
    tile = cuda.shared.array(0, float32)
    tile[x.size - 1] = x[0]
    x[0] = tile.size


def test_numba_shared_memory_works():
    x = np.arange(64, dtype=np.float32)
    reverse_kernel[1, 64](x)
    assert x.tolist() == [3 * (63 - i) for i in range(64)]
    dynamic_kernel[1, 1, 0, 4 * 64](x)
    assert x[0] == 64


def test_numba_shared_memory_keeps_the_limit():
    x = np.zeros(8, np.float32)
    with pytest.raises(device.LimitError, match="49,156 bytes of shared memory"):
        shared_kernel[1, 1](x)
    with pytest.raises(device.LimitError, match="49,156 bytes of shared memory"):
        dynamic_kernel[1, 1, 0, 48 * 1024 + 4](x)


def test_the_simulators_are_installed_by_the_import():
    """In a fresh process, with nothing else imported: what a notebook's first cell does."""
    code = """
import gpukern, numpy
from numba import cuda
@cuda.jit
def kernel(x): x[0] = 1
try:
    kernel[1, 2048](numpy.zeros(1))
except gpukern.device.LimitError as error:
    print(error)
"""
    env = {**os.environ, "GPUKERN_DEVICE": "simulated"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "1024" in done.stdout, done.stderr
