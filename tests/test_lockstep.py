"""Kernels that are right: the machine gives the right numbers, of the compiler's types, and reports nothing."""

import importlib
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from numba import cuda, float32, int32, int64, uint32
from numba.core.errors import TypingError
from numba.cuda.core.errors import TypingError as CudaTypingError

from gpukern import op
from gpukern.device import LimitError
from gpukern.simulate import FaultError, Refused, report, run

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def clean(kernel, grid, block, *args, shared=0):
    """Run; there must be nothing to report."""
    report = run(kernel, grid, block, *args, shared=shared)
    assert report.faults == []
    return report


LADDERS = ["vector_add", "gelu", "softmax", "layernorm", "matmul", "scores", "values", "qkv", "attention"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LADDERS)
def test_the_ladders_of_the_course(name, dtype):
    operation = getattr(importlib.import_module(f"gpukern.kernels.{name}"), name)
    for version in operation.versions.values():
        if version.language == "numba":
            for shape in operation.shapes:
                inputs = operation.draw(shape, dtype, torch.device("cpu"))
                copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
                report.keep(report.Report())
                out = version(**inputs)
                assert op.error(out, operation.reference(**copies)) <= operation.tolerance[dtype]
                assert report.last().faults == []


# --- control flow ---


@cuda.jit
def collatz(x, steps):
    i = cuda.grid(1)
    if i >= x.size:
        return
    n, count = x[i], 0
    while n != 1:
        if n % 2 == 0:
            n //= 2
        else:
            n = 3 * n + 1
        count += 1
    steps[i] = count


def test_a_loop_that_each_thread_leaves_at_its_own_time():
    def steps(n):
        count = 0
        while n != 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    x, out = np.arange(1, 301), np.zeros(300, np.int64)
    report = clean(collatz, 3, 128, x, out)
    assert out.tolist() == [steps(n) for n in range(1, 301)]
    assert 0 < report.counters["divergent_branches"] < report.counters["branches"]


@cuda.jit
def breaks_and_continues(out):
    i = cuda.grid(1)
    total = 0
    for j in range(i % 7, 20, 1 + i % 3):
        if j % 4 == 1:
            continue
        if j > 15 and i % 2:
            break
        for k in range(j):
            if k == 3:
                break
            total += k
        else:
            total += 100
        total += 1 if 3 < j <= 9 or i == 5 else 2
    out[i] = total


def test_break_continue_else_and_conditional_expressions():
    def expected(i):
        total = 0
        for j in range(i % 7, 20, 1 + i % 3):
            if j % 4 == 1:
                continue
            if j > 15 and i % 2:
                break
            for k in range(j):
                if k == 3:
                    break
                total += k
            else:
                total += 100
            total += 1 if 3 < j <= 9 or i == 5 else 2
        return total

    out = np.zeros(96, np.int64)
    clean(breaks_and_continues, 2, 48, out)
    assert out.tolist() == [expected(i) for i in range(96)]


@cuda.jit(device=True)
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a


@cuda.jit(device=True)
def sorted_pair(a, b):
    if a < b:
        return a, b
    return b, a


@cuda.jit
def uses_device_functions(x, y, out):
    i = cuda.grid(1)
    low, high = sorted_pair(x[i], y[i])
    out[i, 0] = gcd(low, high)
    out[i, 1] = gcd(b=gcd(low, 12), a=30)


def test_device_functions_with_several_returns_and_keywords():
    x, y = RNG.integers(1, 500, (2, 64))
    out = np.zeros((64, 2), np.int64)
    clean(uses_device_functions, 2, 32, x, y, out)
    assert out[:, 0].tolist() == np.gcd(x, y).tolist()
    assert out[:, 1].tolist() == np.gcd(30, np.gcd(np.minimum(x, y), 12)).tolist()


def test_a_backward_range_and_three_dimensions():
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.grid(3)
        nx, ny, nz = cuda.gridsize(3)
        total = 0
        for k in range(9, x, -2):
            total += k
        out[x, y, z] = total + 1000 * (nx * 100 + ny * 10 + nz) + y * z

    out = np.zeros((4, 6, 4), np.int64)
    clean(kernel, (2, 3, 1), (2, 2, 4), out)
    x, y, z = np.indices(out.shape)
    assert np.array_equal(out, np.array([sum(range(9, i, -2)) for i in range(4)])[x] + 1000 * 464 + y * z)


# --- types ---


def test_types_are_those_of_the_compiler():
    @cuda.jit
    def kernel(i4, f4, u1, out, wide):
        out[0] = i4[0] * i4[0]  # int64: Numba widens int32
        out[1] = u1[0] + u1[1]
        out[2] = i4[0] // -3
        out[3] = i4[0] % -3
        out[4] = int32(f4[0] * float32(1e20))  # held at the end of the type
        wide[0] = f4[0] / 3
        wide[1] = i4[1] / i4[2]
        wide[2] = f4[0] + f4[1]
        wide[3] = f4[0] * 1.0
        wide[4] = 2**0.5 + abs(-i4[1])

    i4, f4 = np.array([2**20 + 7, 7, 2], np.int32), np.array([0.1, 1e-9], np.float32)
    out, wide = np.zeros(5, np.int64), np.zeros(5, np.float64)
    clean(kernel, 1, 1, i4, f4, np.array([200, 100], np.uint8), out, wide)
    assert out.tolist() == [(2**20 + 7) ** 2, 300, (2**20 + 7) // -3, (2**20 + 7) % -3, 2**31 - 1]
    assert wide.tolist() == [float(f4[0]) / 3, 3.5, float(f4[0] + f4[1]), float(f4[0]), 2**0.5 + 7]


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
def test_arithmetic_rounds_to_the_small_type(dtype):
    @cuda.jit
    def kernel(x, y, out):
        i = cuda.grid(1)
        out[i] = x[i] * y[i] + x[i]

    x, y = RNG.standard_normal((2, 64)).astype(dtype)
    out = np.zeros(64, dtype)
    clean(kernel, 2, 32, x, y, out)
    assert np.array_equal(out, x * y + x)


def test_mathematics():
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        v = x[i]
        out[0, i] = math.sqrt(v) + math.exp(-v) + math.log(v) + math.tanh(v)
        out[1, i] = math.pow(v, float32(2.5)) + math.atan2(v, float32(3)) + math.erf(v)
        out[2, i] = max(v, float32(1)) + min(v, float32(2), float32(3)) + round(v) + math.floor(v)
        out[3, i] = cuda.fma(v, v, -v * v)

    x, out = RNG.random(32, np.float32) + 0.5, np.zeros((4, 32), np.float32)
    clean(kernel, 1, 32, x, out)
    d = x.astype(np.float64)
    erf = np.array([math.erf(v) for v in d])
    assert np.allclose(out[0], np.sqrt(d) + np.exp(-d) + np.log(d) + np.tanh(d), rtol=1e-6)
    assert np.allclose(out[1], d**2.5 + np.arctan2(d, 3) + erf, rtol=1e-6)
    assert np.allclose(out[2], np.maximum(d, 1) + np.minimum(d, 2) + np.rint(d) + np.floor(d), rtol=1e-6)
    assert np.array_equal(out[3], (d * d - (x * x)).astype(np.float32)) and out[3].any()


def test_bits():
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        out[i, 0] = cuda.popc(x[i])
        out[i, 1] = cuda.clz(x[i])
        out[i, 2] = cuda.ffs(x[i])
        out[i, 3] = cuda.brev(x[i])
        out[i, 4] = (x[i] >> uint32(3)) ^ (x[i] << uint32(2)) & ~x[i] | uint32(1)

    x = np.array([0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x00F0, 12345678, 3], np.uint32)
    out = np.zeros((8, 5), np.int64)
    clean(kernel, 1, 8, x, out)
    ints = [int(v) for v in x]
    assert out[:, 0].tolist() == [v.bit_count() for v in ints]
    assert out[:, 1].tolist() == [32 - v.bit_length() for v in ints]
    assert out[:, 2].tolist() == [(v & -v).bit_length() for v in ints]
    assert out[:, 3].tolist() == [int(f"{v:032b}"[::-1], 2) for v in ints]


def test_what_the_compiler_refuses_is_refused():
    @cuda.jit
    def comprehension(out):
        out[0] = len([2 * i for i in range(3)])

    @cuda.jit
    def run_time_shape(out, n):
        s = cuda.shared.array(n, float32)
        out[0] = s[0]

    for kernel, args in ((run_time_shape, (np.zeros(1), 4)), (comprehension, (np.zeros((2, 2)),))):
        with pytest.raises((TypingError, CudaTypingError)):
            kernel[1, 1](*args)


def test_what_it_cannot_run_is_refused_with_its_line():
    @cuda.jit
    def kernel(x, out):
        out[:] = x

    line = kernel.py_func.__code__.co_firstlineno + 2
    with pytest.raises(Refused, match=rf"test_lockstep.py:{line}: .* an assignment to a slice"):
        kernel[1, 1](np.zeros(3), np.zeros(3))


# --- memory ---


def test_strided_arrays_views_and_slices():
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        row = x[i]
        part = row[1:5:2]
        column = x[:, 2]
        out[i, 0] = part[0] + part[1] * 10 + len(part)
        out[i, 1] = column[i] + x[-1, -1] + row.shape[0] + x.size + x.ndim

    base = np.arange(240, dtype=np.float32).reshape(20, 12)
    x = base[::2, ::-1][:8]
    out = np.zeros((8, 2), np.float32)
    clean(kernel, 1, 8, x, out)
    assert np.array_equal(out[:, 0], x[:, 1] + x[:, 3] * 10 + 2)
    assert np.array_equal(out[:, 1], x[:, 2] + x[-1, -1] + 12 + 96 + 2)


def test_local_constant_and_dynamic_shared_arrays():
    table = np.array([1.0, 10.0, 100.0], np.float32)

    @cuda.jit
    def kernel(out):
        digits = cuda.local.array((2, 3), float32)
        weights = cuda.const.array_like(table)
        s = cuda.shared.array(0, float32)
        i = cuda.threadIdx.x
        for j in range(3):
            digits[1, j] = i + j
            digits[0, j] = 0
        total = float32(0)
        for j in range(3):
            total += digits[1, j] * weights[j] + digits[0, j]
        s[cuda.blockDim.x - 1 - i] = total
        cuda.syncthreads()
        out[cuda.grid(1)] = s[i]

    out = np.zeros(80, np.float32)
    clean(kernel, 2, 40, out, shared=160)
    i = 39 - np.arange(80) % 40
    assert np.array_equal(out, i + (i + 1) * 10.0 + (i + 2) * 100)


def test_atomics():
    @cuda.jit
    def kernel(x, bins, low, high, slots, bits, turns):
        i = cuda.grid(1)
        if i < x.size:
            cuda.atomic.add(bins, x[i], 1)
            cuda.atomic.min(low, 0, x[i])
            cuda.atomic.max(high, (0, 1), x[i])
            slots[cuda.atomic.add(turns, 0, 1)] = i
            cuda.atomic.or_(bits, 0, uint32(1) << uint32(x[i]))
            cuda.atomic.inc(bits, 1, uint32(9))
            cuda.atomic.sub(turns, 1, 2)
            cuda.atomic.exch(turns, 2, i)
            cuda.atomic.cas(turns, 3, 0, i + 1)

    x = RNG.integers(0, 10, 300)
    bins, low, high = np.zeros(10, np.int64), np.array([99]), np.zeros((1, 2), np.int64)
    slots, bits, turns = np.full(300, -1), np.zeros(2, np.uint32), np.zeros(4, np.int64)
    clean(kernel, 5, 64, x, bins, low, high, slots, bits, turns)
    assert bins.tolist() == np.bincount(x, minlength=10).tolist()
    assert (low[0], high[0, 1], bits[0]) == (x.min(), x.max(), sum(1 << v for v in set(x.tolist())))
    assert sorted(slots.tolist()) == list(range(300))
    assert bits[1] == 0 and turns[:2].tolist() == [300, -600] and 0 <= turns[2] < 300 and 0 < turns[3] <= 300


def test_a_lock_is_handed_on():
    @cuda.jit
    def kernel(lock, total):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        cuda.atomic.add(total, 0, 1)
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)

    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    clean(kernel, 4, 1, lock, total)
    assert (lock[0], total[0]) == (0, 4)


def test_a_block_waits_for_a_flag_of_another_behind_its_barrier():
    @cuda.jit
    def kernel(flag, out):
        tries = 0
        if cuda.blockIdx.x == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                tries += 1
        else:
            cuda.syncthreads()
            cuda.atomic.exch(flag, 0, 1)
        out[cuda.grid(1)] = 1

    out = np.zeros(2, np.int32)
    clean(kernel, 2, 1, np.zeros(1, np.int32), out)
    assert out.all()


def test_atomics_that_change_nothing_are_no_hang():
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i % 2:
            for j in range(1000):
                cuda.atomic.max(out, 0, x[j])
        cuda.syncthreads()
        out[1 + i] = cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)

    out = np.full(33, 7)
    clean(kernel, 1, 32, np.zeros(1000, np.int64), out)
    assert out.tolist() == [7, *(np.arange(32) ^ 1)]


# --- warps and barriers ---


@cuda.jit
def block_sum(x, out):
    partial = cuda.shared.array(32, float32)
    i = cuda.grid(1)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    v = x[i] if i < x.size else float32(0)
    for delta in (16, 8, 4, 2, 1):
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, delta)
    if lane == 0:
        partial[warp] = v
    cuda.syncthreads()
    if warp == 0:
        v = partial[lane] if lane < cuda.blockDim.x // 32 else float32(0)
        delta = 16
        while delta > 0:
            v += cuda.shfl_xor_sync(0xFFFFFFFF, v, delta)
            delta //= 2
        if lane == 0:
            cuda.atomic.add(out, 0, v)


def test_a_block_reduces_by_shuffles():
    x, out = RNG.random(1000, np.float32), np.zeros(1, np.float32)
    clean(block_sum, 4, 256, x, out)
    assert np.allclose(out, x.sum())


def test_votes_shuffles_and_matches():
    @cuda.jit
    def kernel(x, out, word):
        i = cuda.grid(1)
        out[i, 0] = cuda.any_sync(0xFFFFFFFF, x[i] > 90)
        out[i, 1] = cuda.all_sync(0xFFFFFFFF, x[i] > 2)
        out[i, 2] = cuda.shfl_sync(0xFFFFFFFF, x[i], 5)
        out[i, 3] = cuda.shfl_up_sync(0xFFFFFFFF, x[i], 1)
        out[i, 4] = cuda.popc(cuda.match_any_sync(0xFFFFFFFF, x[i]))
        word[i] = cuda.ballot_sync(0xFFFFFFFF, x[i] % 2 == 1)
        if x[i] % 2 == 1:
            out[i, 5] = cuda.popc(cuda.activemask())

    x = RNG.integers(0, 100, 64)
    out, word = np.zeros((64, 6), np.int64), np.zeros(64, np.uint32)
    clean(kernel, 1, 64, x, out, word)
    for w in (x[:32], x[32:]):
        at = slice(0, 32) if np.shares_memory(w, x[:32]) else slice(32, 64)
        odd = w % 2 == 1
        assert (out[at, 0] == (w > 90).any()).all() and (out[at, 1] == (w > 2).all()).all()
        assert (out[at, 2] == w[5]).all() and out[at, 3].tolist() == [w[0], *w[:-1]]
        assert out[at, 4].tolist() == [(w == v).sum() for v in w]
        assert (word[at] == sum(1 << n for n in range(32) if odd[n])).all()
        assert out[at, 5].tolist() == (odd * odd.sum()).tolist()


def test_barriers_that_count():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i, 0] = cuda.syncthreads_count(int32(x[i] > 50))
        out[i, 1] = cuda.syncthreads_and(int32(x[i] > 50))
        out[i, 2] = cuda.syncthreads_or(int32(x[i] > 95))

    x, out = RNG.integers(0, 100, 200), np.zeros((200, 3), np.int64)
    clean(kernel, 2, 100, x, out)
    for b in range(2):
        w = x[b * 100 : b * 100 + 100]
        assert (out[b * 100 : b * 100 + 100] == [(w > 50).sum(), (w > 50).all(), (w > 95).any()]).all()


def test_a_warp_tree_with_syncwarp_and_a_double_buffer():
    @cuda.jit
    def kernel(x, sums, scan):
        s = cuda.shared.array(32, float32)
        buffer = cuda.shared.array((2, 32), float32)
        i = cuda.threadIdx.x
        s[i] = x[i]
        buffer[0, i] = x[i]
        cuda.syncwarp()
        half = 16
        while half > 0:
            v = s[i] + s[i + half] if i < half else float32(0)
            cuda.syncwarp()
            if i < half:
                s[i] = v
            cuda.syncwarp()
            half //= 2
        if i == 0:
            sums[0] = s[0]
        now, step = 0, 1
        while step < 32:
            cuda.syncthreads()
            v = buffer[now, i]
            if i >= step:
                v += buffer[now, i - step]
            now = 1 - now
            buffer[now, i] = v
            step *= 2
        cuda.syncthreads()
        scan[i] = buffer[now, i]

    x, sums, scan = RNG.random(32, np.float32), np.zeros(1, np.float32), np.zeros(32, np.float32)
    clean(kernel, 1, 32, x, sums, scan)
    assert np.allclose(sums, x.sum()) and np.allclose(scan, np.cumsum(x), rtol=1e-5)


def reverse_after_all_have_written():
    @cuda.jit
    def kernel(x, out):
        grid = cuda.cg.this_grid()
        i = cuda.grid(1)
        x[i] = i
        grid.sync()
        out[i] = x[x.size - 1 - i]

    return kernel


def test_the_grid_waits_for_itself():
    x, out = np.zeros((2, 4096), np.float32)
    clean(reverse_after_all_have_written(), 64, 64, x, out)
    assert out.tolist() == list(range(4095, -1, -1))
    with pytest.raises(LimitError, match="synchronises its grid of 5,000 blocks"):
        reverse_after_all_have_written()[5000, 1024](x, out)


def test_the_last_block_adds_what_all_have_published():
    @cuda.jit
    def kernel(x, partial, arrived, out):
        b = cuda.blockIdx.x
        if cuda.threadIdx.x == 0:
            partial[b] = x[b] * 2
            cuda.threadfence()
            if cuda.atomic.add(arrived, 0, 1) == cuda.gridDim.x - 1:
                total = float32(0)
                for j in range(cuda.gridDim.x):
                    total += partial[j]
                out[0] = total

    x, out = RNG.random(3000, np.float32), np.zeros(1, np.float32)
    clean(kernel, 3000, 32, x, np.zeros(3000, np.float32), np.zeros(1, np.int32), out)
    assert np.allclose(out, 2 * x.sum(), rtol=1e-5)


def test_a_device_function_has_its_shared_array_once():
    @cuda.jit(device=True)
    def mirrored(v):
        s = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        s[t] = v
        cuda.syncthreads()
        v = s[31 - t]
        cuda.syncthreads()
        return v

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = mirrored(float32(t)) + 2 * mirrored(float32(t * t))

    out = np.zeros(32, np.float32)
    clean(kernel, 1, 32, out)
    t = 31 - np.arange(32)
    assert out.tolist() == (t + 2 * t * t).tolist()
    (code,) = kernel._lockstep.values()
    assert code.shared_static == 128


# --- launches and the host ---


def test_a_stored_launch_keeps_its_own_sizes():
    @cuda.jit
    def kernel(out):
        cuda.atomic.add(out, 0, 1)

    small, large, out = kernel[1, 4], kernel[1, 8], np.zeros(1, np.int64)
    small(out)
    assert out[0] == 4
    large(out)
    small(out)
    assert out[0] == 16


SIZE = 2


def test_globals_are_frozen_at_the_first_launch():
    global SIZE

    @cuda.jit
    def kernel(out):
        out[0] = SIZE

    out = np.zeros(1, np.int64)
    kernel[1, 1](out)
    SIZE = 9
    kernel[1, 1](out)
    SIZE = 2
    assert out[0] == 2


def test_two_shared_arrays_on_one_line_are_two():
    @cuda.jit
    def kernel(out):
        a, b = cuda.shared.array(4, int32), cuda.shared.array(4, int32)
        i = cuda.threadIdx.x
        a[i] = 1
        b[i] = 2
        out[i] = a[i] * 10 + b[i]

    out = np.zeros(4, np.int32)
    clean(kernel, 1, 4, out)
    assert out.tolist() == [12] * 4


def test_declared_signatures_cast_their_arguments():
    @cuda.jit("void(float32[:], int32)")
    def kernel(out, n):
        out[cuda.threadIdx.x] = n / 2

    out = np.zeros(2, np.float32)
    kernel[1, 2](out, 3)
    assert out.tolist() == [1.5, 1.5]
    with pytest.raises(TypeError, match="No matching definition"):
        kernel[1, 2](np.zeros(2, np.float64), 3)


@cuda.jit
def scale(x, factor):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= factor


def test_arrays_of_the_host_the_card_and_torch():
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.arange(10, dtype=dtype)
        scale[1, 32](tensor, 2)
        assert tensor.tolist() == [2 * n for n in range(10)]
    here = np.arange(10.0)
    there = cuda.to_device(here)
    scale.forall(10)(there, 3.0)
    scale[1, 32, cuda.stream()](there[2:5], 10.0)
    cuda.synchronize()
    expected = here * 3
    expected[2:5] *= 10
    assert here.tolist() == list(range(10)) and there.copy_to_host().tolist() == expected.tolist()
    like = cuda.device_array_like(there)
    assert np.isnan(like.copy_to_host()).all()
    like.copy_to_device(there)
    assert np.array_equal(like.copy_to_host(), expected)


def test_arguments_that_share_memory():
    x = np.arange(64, dtype=np.float32)

    @cuda.jit
    def shift(a, b):
        i = cuda.grid(1)
        if i < a.size:
            b[i] = a[i]

    with pytest.raises(FaultError, match="race"):
        shift[2, 32](x[:-1], x[1:])


def test_ten_million_threads_need_little_memory():
    n = 2_000_000
    x, y, out = np.ones(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.float32)

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i] + y[i]

    report = clean(add, -(-n // 256), 256, x, y, out)
    assert (out == 2).all() and report.counters["global_load_requests"] == 2 * n // 32


def test_int64_is_used_where_the_compiler_uses_it():
    @cuda.jit
    def kernel(out):
        i = cuda.blockIdx.x + 3
        out[0] = i * 1000000000
        out[1] = int64(int32(i) * int32(1000000000))

    out = np.zeros(2, np.int64)
    clean(kernel, 1, 1, out)
    assert out.tolist() == [3_000_000_000, 3_000_000_000]
