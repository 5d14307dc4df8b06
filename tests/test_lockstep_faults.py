"""Planted faults are found, each with its line and threads; kernels that differ by the one fix are clean."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from gpukern.device import LimitError
from gpukern.simulate import FaultError, run

N = 256
FLOATS = np.arange(N, dtype=np.float32)


def floats(n=N):
    return np.zeros(n, np.float32)


def make(argument):
    """An argument of a case: an array, copied, or a function and its arguments, called."""
    return argument[0](*argument[1:]) if isinstance(argument, tuple) else argument.copy()


# Each: kernel, grid, block, arguments (made anew), the kinds of fault expected.
FAULTY = []


def faulty(kinds, grid, block, *arguments, shared=0):
    def add(kernel):
        FAULTY.append(pytest.param(cuda.jit(kernel), kinds, grid, block, arguments, shared, id=kernel.__name__))
        return kernel

    return add


@faulty({"out_of_bounds"}, 2, 256, (floats, 300))
def no_guard(out):
    i = cuda.grid(1)
    out[i] = i


@faulty({"out_of_bounds"}, 1, 256, FLOATS, (floats,))
def guard_off_by_one(x, out):
    i = cuda.grid(1)
    if i <= x.size:
        out[i] = x[i + 1]


@faulty({"negative_index"}, 1, 256, FLOATS, (floats,))
def stencil_left_edge(x, out):
    i = cuda.grid(1)
    out[i] = x[i] - x[i - 1]


@faulty({"out_of_bounds"}, 1, (4, 3), (np.zeros, (3, 4)))
def row_and_column_swapped(out):
    i, j = cuda.grid(2)
    out[i, j] = i * 4 + j


@faulty({"out_of_bounds"}, 1, 32, (floats, 32))
def shared_one_too_many(out):
    s = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    s[i + 1] = i
    out[i] = 1


@faulty({"out_of_bounds"}, 1, 32, (floats, 32), shared=64)
def dynamic_shared_too_small(out):
    s = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    s[i] = i
    out[i] = s[i]


@faulty({"race"}, 1, 256, FLOATS, (floats,))
def reversal_without_barrier(x, out):
    s = cuda.shared.array(256, float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    if i < 128:
        out[i] = s[255 - i]
    cuda.syncthreads()


@faulty({"race"}, 1, 256, FLOATS, (floats,))
def reversal_without_barrier_in_lockstep(x, out):
    s = cuda.shared.array(256, float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    out[i] = s[255 - i]


@faulty({"race"}, (2, 2), (16, 16), np.ones((32, 32), np.float32), np.ones((32, 32), np.float32), (np.zeros, (32, 32)))
def tile_loop_without_second_barrier(a, b, out):
    at = cuda.shared.array((16, 16), float32)
    bt = cuda.shared.array((16, 16), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    m, n = cuda.blockIdx.y * 16 + ty, cuda.blockIdx.x * 16 + tx
    acc = float32(0)
    for k0 in range(0, 32, 16):
        at[ty, tx] = a[m, k0 + tx]
        bt[ty, tx] = b[k0 + ty, n]
        cuda.syncthreads()
        for k in range(16):
            acc += at[ty, k] * bt[k, tx]
    out[m, n] = acc


@faulty({"race"}, 1, 256, FLOATS, (floats, 1))
def tree_without_barrier(x, out):
    s = cuda.shared.array(256, float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    cuda.syncthreads()
    half = 128
    while half > 0:
        if i < half:
            s[i] += s[i + half]
        half //= 2
    if i == 0:
        out[0] = s[0]


@faulty({"race"}, 1, 32, FLOATS, (floats, 1))
def warp_tree_without_syncwarp(x, out):
    s = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    cuda.syncwarp()
    half = 16
    while half > 0:
        if i < half:
            s[i] += s[i + half]
        half //= 2
    if i == 0:
        out[0] = s[0]


@faulty({"race"}, 4, 256, (floats, 1))
def everybody_adds_to_one(out):
    out[0] += 1


@faulty({"race"}, 4, 64, np.arange(256) % 10, (np.zeros, 10))
def histogram_without_atomics(x, counts):
    i = cuda.grid(1)
    counts[x[i]] += 1


@faulty({"race"}, 4, 64, np.arange(256, dtype=np.float32))
def shift_in_place(x):
    i = cuda.grid(1)
    if i < x.size - 1:
        x[i] = x[i + 1]


@faulty({"race"}, 4, 64, FLOATS, np.ones(4, np.float32), (floats, 4))
def block_reads_what_another_wrote(x, partial, out):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        partial[b] = x[b]
    cuda.syncthreads()
    if b > 0 and cuda.threadIdx.x == 0:
        out[b] = partial[b - 1]


@faulty({"race"}, 1, 64, (floats, 1))
def atomic_and_plain(out):
    cuda.atomic.add(out, 0, float32(1))
    if cuda.threadIdx.x == 0:
        out[0] = 5


@faulty({"race"}, 1, 64, (np.zeros, 64))
def a_flag_is_read_without_barrier(out):
    s = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        s[0] = 7
    out[cuda.threadIdx.x] = s[0]


@faulty({"uninitialised"}, 1, 64, (floats, 64))
def shared_read_before_write(out):
    s = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    s[i] += 1
    out[i] = s[i]


@faulty({"uninitialised"}, 2, 64, (floats, 128))
def shared_kept_from_the_block_before(out):
    s = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        s[i] = 1
    cuda.syncthreads()
    out[cuda.grid(1)] = s[i]


@faulty({"divergent_barrier"}, 1, 64, (floats, 64))
def barrier_in_a_branch(out):
    i = cuda.threadIdx.x
    if i < 32:
        cuda.syncthreads()
    out[i] = i


@faulty({"divergent_barrier"}, 1, 64, (floats, 64))
def two_barriers_in_two_branches(out):
    i = cuda.threadIdx.x
    if i < 32:
        out[i] = 1
        cuda.syncthreads()
    else:
        cuda.syncthreads()
        out[i] = 2


@faulty({"divergent_barrier"}, 2, 64, (floats, 100))
def return_before_the_barrier(out):
    s = cuda.shared.array(64, float32)
    i = cuda.grid(1)
    if i >= out.size:
        return
    s[cuda.threadIdx.x] = i
    cuda.syncthreads()
    out[i] = s[cuda.threadIdx.x]


@faulty({"divergent_barrier"}, 1, 64, (floats, 64))
def barrier_in_an_uneven_loop(out):
    i = cuda.threadIdx.x
    for j in range(i % 3):
        out[i] += j
        cuda.syncthreads()


@faulty({"divergent_warp"}, 1, 32, (floats, 32))
def shuffle_in_a_branch(out):
    i = cuda.threadIdx.x
    v = float32(i)
    if i < 16:
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, 16)
    out[i] = v


@faulty({"race"}, 3, 64, (floats, 192), (floats, 192))
def grid_without_sync(x, out):
    i = cuda.grid(1)
    x[i] = i
    cuda.syncthreads()
    out[i] = x[x.size - 1 - i]


@faulty({"race"}, 2, 32, (floats, 2), (np.zeros, 1, np.int32), (floats, 1))
def published_without_a_fence(partial, arrived, out):
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        partial[b] = b
        if cuda.atomic.add(arrived, 0, 1) == 1:
            out[0] = partial[0] + partial[1]


@faulty({"race"}, 1, 64, (floats, 64))
def two_threads_share_a_place(out):
    out[cuda.threadIdx.x // 2] = cuda.threadIdx.x


@faulty({"divergent_barrier"}, 2, 64, (floats, 128))
def grid_sync_in_a_branch(out):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    out[i] = i
    if cuda.blockIdx.x == 0:
        grid.sync()


@faulty({"same_value_race"}, 2, 64, (floats, 1))
def all_write_one_value(out):
    out[0] = 1


@pytest.mark.parametrize("kernel, kinds, grid, block, arguments, shared", FAULTY)
def test_planted_faults_are_found(kernel, kinds, grid, block, arguments, shared):
    made = [make(a) for a in arguments]
    report = run(kernel, grid, block, *made, shared=shared)
    assert {fault.kind for fault in report.faults} == kinds
    for fault in report.faults:
        assert fault.line.startswith("test_lockstep_faults.py:") and fault.line in fault.message
        assert fault.threads and fault.threads[0].startswith("thread ")


def test_a_loop_without_end_is_a_fault():
    def waits_for_nobody(flag):
        while flag[0] == 0:
            pass

    (fault,) = run(cuda.jit(waits_for_nobody), 1, 1, floats(1)).faults
    lines = [waits_for_nobody.__code__.co_firstlineno + n for n in (1, 2)]
    assert fault.kind == "hang" and fault.line in [f"test_lockstep_faults.py:{line}" for line in lines]
    assert "waits_for_nobody does not come to an end as nobody changes what its" in fault.message


def test_a_launch_raises_what_run_collects():
    kernel = cuda.jit(no_guard)
    with pytest.raises(FaultError, match=r"thread 44 of block 1 writes out\[300\].*shape \(300,\)") as caught:
        kernel[2, 256](floats(300))
    assert caught.value.report.counters["global_store_requests"] == 10


def test_a_warning_does_not_stop_a_launch():
    out = floats(1)
    cuda.jit(all_write_one_value)[2, 64](out)
    assert out[0] == 1


def test_the_other_access_of_a_race_is_named():
    kernel = cuda.jit(reversal_without_barrier_in_lockstep)
    line = kernel.py_func.__code__.co_firstlineno
    (fault,) = run(kernel, 1, 256, FLOATS, floats()).faults
    assert f"thread 0 of block 0 reads s[255] (test_lockstep_faults.py:{line + 5})" in fault.message
    assert f"thread 255 of block 0 wrote (test_lockstep_faults.py:{line + 4})" in fault.message
    assert (fault.array, fault.index) == ("s", (255,))


def test_a_store_out_of_bounds_touches_nothing_else():
    base = np.zeros(512, np.float32)
    run(cuda.jit(no_guard), 2, 256, base[:300])
    assert not base[300:].any()


@pytest.mark.parametrize(
    "grid, block, match",
    [(1, 1025, "1025 threads"), (1, (1, 1, 65), "block.z"), (0, 32, "grid.x"), ((1, 70000), 1, "grid.y")],
)
def test_launch_limits(grid, block, match):
    with pytest.raises(LimitError, match=match):
        cuda.jit(no_guard)[grid, block](floats())


def test_shared_limits():
    @cuda.jit
    def big(out):
        s = cuda.shared.array((128, 128), float32)
        s[0, 0] = 1
        out[0] = s[0, 0]

    with pytest.raises(LimitError, match="65,536 bytes"):
        big[1, 1](floats())
    with pytest.raises(LimitError, match="60,000 bytes"):
        cuda.jit(dynamic_shared_too_small)[1, 32, 0, 60000](floats(32))
