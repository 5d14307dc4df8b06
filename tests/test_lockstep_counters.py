"""The simulated GPU's counters are those that Nsight Compute shows for the same kernels on an H200."""

import numpy as np
import pytest
from numba import cuda, float32, float64

from gpukern.simulate import run


@cuda.jit
def copy(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i]


@cuda.jit
def copy_every(x, out, step):
    i = cuda.grid(1) * step
    if i < out.size:
        out[i] = x[i]


def transpose(width):
    @cuda.jit
    def kernel(x, out):
        tile = cuda.shared.array((32, width), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
        tile[ty, tx] = x[row + ty, column + tx]
        cuda.syncthreads()
        out[column + ty, row + tx] = tile[tx, ty]

    return kernel


def counts(report, *names):
    return tuple(report.counters[name] for name in names)


GLOBAL = ("global_load_requests", "global_load_sectors", "global_store_sectors")
SHARED = ("shared_load_bank_conflicts", "shared_load_wavefronts", "shared_load_requests")


def test_a_coalesced_copy_costs_four_sectors_a_warp():
    x, out = np.random.rand(2, 65536).astype(np.float32)
    report = run(copy, 256, 256, x, out)
    assert counts(report, *GLOBAL) == (2048, 8192, 8192)
    assert np.array_equal(x, out) and not report.faults


def test_every_eighth_element_costs_a_sector_each():
    x, out = np.random.rand(2, 65536).astype(np.float32)
    assert counts(run(copy_every, 32, 256, x, out, 8), *GLOBAL) == (256, 8192, 8192)


@pytest.mark.parametrize("padding, conflicts, wavefronts", [(0, 63488, 65536), (1, 0, 2048)])
def test_transpose_through_shared_memory(padding, conflicts, wavefronts):
    x = np.random.rand(256, 256).astype(np.float32)
    out = np.zeros_like(x)
    report = run(transpose(32 + padding), (8, 8), (32, 32), x, out)
    assert counts(report, *SHARED) == (conflicts, wavefronts, 2048)
    assert counts(report, *GLOBAL) == (2048, 8192, 8192)
    assert np.array_equal(out, x.T) and not report.faults


def test_a_view_off_the_start_of_its_allocation_touches_one_more_sector():
    x, out = np.zeros(1025, np.float32), np.zeros(1024, np.float32)
    assert counts(run(copy, 4, 256, x[1:], out), *GLOBAL) == (32, 5 * 32, 128)


def test_counts_belong_to_lines():
    x, out = np.random.rand(2, 1024).astype(np.float32)
    report = run(copy, 4, 256, x, out)
    line = copy.py_func.__code__.co_firstlineno
    assert report.lines["global_load_requests", f"test_lockstep_counters.py:{line + 4}"] == 32
    assert report.lines["branches", f"test_lockstep_counters.py:{line + 3}"] == 32


@cuda.jit
def diverge(out):
    i = cuda.grid(1)
    if cuda.laneid < 16:
        out[i] = 1
    else:
        out[i] = 2


@cuda.jit
def diverge_by_warp(out):
    i = cuda.grid(1)
    if i // 32 % 2 == 0:
        out[i] = 1
    else:
        out[i] = 2


def test_a_branch_diverges_only_inside_a_warp():
    out = np.zeros(256, np.int32)
    assert counts(run(diverge, 2, 128, out), "branches", "divergent_branches", "global_store_requests") == (8, 8, 16)
    assert out.tolist() == ([1] * 16 + [2] * 16) * 8
    assert counts(run(diverge_by_warp, 2, 128, out), "branches", "divergent_branches", "global_store_requests") == (
        8,
        0,
        8,
    )


@cuda.jit
def read_shared(out, stride):
    tile = cuda.shared.array(1024, float32)
    i = cuda.threadIdx.x
    for j in range(i, 1024, 32):
        tile[j] = j
    cuda.syncthreads()
    out[i] = tile[i * stride]


@pytest.mark.parametrize("stride, wavefronts", [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (16, 16), (31, 1), (32, 32)])
def test_a_stride_costs_its_common_divisor_with_32_banks(stride, wavefronts):
    out = np.zeros(32, np.float32)
    report = run(read_shared, 1, 32, out, stride)
    assert counts(report, *SHARED) == (wavefronts - 1, wavefronts, 1)
    assert out.tolist() == [i * stride for i in range(32)]


@cuda.jit
def doubles(x, out):
    tile = cuda.shared.array(64, float64)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[63 - i]


def test_doubles_take_eight_sectors_and_two_wavefronts_a_warp():
    x, out = np.random.rand(2, 64)
    report = run(doubles, 1, 64, x, out)
    assert counts(report, *GLOBAL) == (2, 16, 16)
    assert counts(report, *SHARED) == (0, 4, 2)
    assert np.array_equal(out, x[::-1])
