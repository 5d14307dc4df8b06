"""Numba's ladders: each rung does to its counter what its docstring says, and refuses what it cannot run."""

import importlib
import math

import numpy as np
import pytest
import torch

from gpukern import device, inspect, simulate
from gpukern.kernels import quads
from gpukern.kernels.copy import copy, saxpy
from gpukern.kernels.histogram import histogram
from gpukern.kernels.layernorm import layernorm
from gpukern.kernels.matmul import matmul
from gpukern.kernels.reduction import reduction
from gpukern.kernels.softmax import softmax
from gpukern.kernels.timeline import _timeline_kernel, timeline
from gpukern.kernels.transpose import transpose
from gpukern.op import InputError, error

DEVICE = device.torch_device()
WARPS = 2048  # of 32 elements each, in most of the shapes here


def counted(op, version: str, shape: dict, dtype=torch.float32, **tile) -> simulate.Report:
    """Run a version on the simulated GPU, see that it is right, and return what its last launch counted."""
    if not device.simulated():
        pytest.skip("counts on the simulated GPU")
    inputs = op.draw(shape, dtype, DEVICE)
    out = op.versions[version](**inputs, **tile)
    assert error(out, op.reference(**inputs)) <= op.tolerance[dtype]
    report = simulate.last()
    assert not report.faults
    return report


def counters(report, *names) -> tuple:
    return tuple(report.counters[name] for name in names)


@pytest.fixture
def launches(monkeypatch) -> list:
    """The reports of all launches of a test, in order."""
    if not device.simulated():
        pytest.skip("counts on the simulated GPU")
    from gpukern.simulate.lockstep import launch

    made, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda *args, **options: made.append(run(*args, **options)) or made[-1])
    return made


# ---- copy and saxpy

GLOBAL = ("global_load_requests", "global_load_sectors", "global_store_requests", "global_store_sectors")


@pytest.mark.parametrize(
    "version, requests, sectors",
    [
        ("numba_strided", WARPS, 32 * WARPS),
        ("numba_coalesced", WARPS, 4 * WARPS),
        ("numba_grid_stride", WARPS, 4 * WARPS),
        ("numba_vectorised", WARPS // 4, 4 * WARPS),
    ],
)
def test_the_rungs_of_copy(version, requests, sectors):
    report = counted(copy, version, {"N": 32 * WARPS})
    assert counters(report, *GLOBAL) == (requests, sectors, requests, sectors)


def test_a_grid_stride_loop_takes_its_grid_from_the_card():
    resident = device.card().sms * 32 * device.card().warps_per_sm
    small, large = (counted(copy, "numba_grid_stride", {"N": n}, threads=1024) for n in (3000, 2 * resident + 1))
    assert math.prod(small.grid) == 3
    assert math.prod(large.grid) * 1024 == resident
    assert counted(copy, "numba_coalesced", {"N": 2 * resident + 1}, threads=1024).grid[0] * 1024 > 2 * resident


@pytest.mark.parametrize("dtype", copy.dtypes, ids=str)
def test_copy_moves_16_bytes_whatever_they_mean(dtype):
    report = counted(copy, "numba_vectorised", {"N": 4096 + 3}, dtype)
    whole = 4096 * dtype.itemsize // (16 * 32)
    assert counters(report, "global_load_requests", "global_load_sectors")[0] == whole + 1  # the last three alone
    assert report.derived["bytes_over_least"] < 1.02


@pytest.mark.parametrize("op", [copy, saxpy], ids=lambda op: op.name)
def test_vectors_that_cannot_be_had_in_16_bytes_go_element_by_element(op):
    x = torch.arange(301.0, device=DEVICE)
    for view in (x[1:], x[::2], x[:0], x[3:4]):
        inputs = {"x": view} if op is copy else {"x": view, "y": view, "alpha": 2.0}
        assert error(op.versions["numba_vectorised"](**inputs), op.reference(**inputs)) == 0
    assert quads.quad_elements(x) == 300 and quads.quad_elements(x[1:]) == 0 and quads.quad_elements(x[::2]) == 0


def test_the_rungs_of_saxpy():
    one, four = (counted(saxpy, f"numba_{name}", {"N": 32 * WARPS}) for name in ("grid_stride", "vectorised"))
    assert counters(one, *GLOBAL) == (2 * WARPS, 8 * WARPS, WARPS, 4 * WARPS)
    assert counters(four, *GLOBAL) == (WARPS // 2, 8 * WARPS, WARPS // 4, 4 * WARPS)
    assert one.derived["flops_per_byte"] == four.derived["flops_per_byte"] == 1 / 6


# ---- transpose


def test_the_rungs_of_transpose():
    naive, tile, padded, wide = (
        counted(transpose, f"numba_{name}", {"M": 128, "N": 192}) for name in ("naive", "tile", "padded", "vectorised")
    )
    warps = 128 * 192 // 32
    assert counters(naive, *GLOBAL) == (warps, 4 * warps, warps, 32 * warps)
    assert counters(tile, *GLOBAL) == counters(padded, *GLOBAL) == (warps, 4 * warps, warps, 4 * warps)
    assert counters(wide, *GLOBAL) == (warps // 4, 4 * warps, warps // 4, 4 * warps)
    conflicts = ("shared_load_requests", "shared_load_bank_conflicts", "shared_store_bank_conflicts")
    assert counters(tile, *conflicts) == (warps, 31 * warps, 0)
    assert counters(padded, *conflicts) == (warps, 0, 0)
    assert counters(wide, *conflicts) == (warps, warps, warps)


@pytest.mark.parametrize("version", [name for name in transpose.versions if name != "torch"])
@pytest.mark.parametrize("threads", [32, 64, 512])
def test_transpose_of_any_view_in_any_block(version, threads):
    x = torch.arange(70.0 * 132, device=DEVICE).view(70, 132)
    for view in (x, x.T, x[1:, 3:], x[::2, ::3], x[:, :128], x[1:9, 4:8]):
        assert torch.equal(transpose.versions[version](view, threads=threads), view.T.contiguous())


# ---- reduction


def test_the_rungs_of_reduction():
    shape, tile = {"N": 256}, {"threads": 256}
    divergent, sequential, shuffle = (
        counted(reduction, f"numba_{name}", shape, **tile) for name in ("divergent", "sequential", "shuffle")
    )
    warps = 8
    # In the first five of the eight steps, each warp has threads that add and threads that wait; then some warps do.
    assert divergent.counters["divergent_branches"] >= 5 * warps
    assert sequential.counters["divergent_branches"] == 6  # five steps of the last warp, and the thread that stores
    assert counters(sequential, "barriers", "shared_load_bank_conflicts") == (9 * warps, 0)
    assert counters(shuffle, "barriers", "shared_load_requests") == (2 * warps, warps)
    assert sequential.counters["shared_load_requests"] > 3 * warps


def test_the_last_block_makes_one_launch_of_many(launches):
    x = reduction.draw({"N": 70_000}, torch.float32, DEVICE)["x"]
    reduction.versions["numba_shuffle"](x)
    assert [math.prod(report.grid) for report in launches] == [274, 2, 1]
    launches.clear()
    reduction.versions["numba_last_block"](x)
    (report,) = launches
    assert report.counters["atomics"] == math.prod(report.grid)  # a ticket each
    assert report.derived["bytes_over_least"] < 1.01
    assert report.counters["global_load_requests"] < 70_000 / 32 / 4 + 10


@pytest.mark.parametrize("version", [name for name in reduction.versions if name != "torch"])
def test_a_sum_is_the_same_each_time_and_of_any_view(version):
    x = reduction.draw({"N": 9999}, torch.float32, DEVICE)["x"]
    assert reduction.versions[version](x).item() == reduction.versions[version](x).item()
    for view in (x[1:], x[::3], x[:9900].view(99, 100).T, x[5], x[:0]):
        assert error(reduction.versions[version](view), reduction.reference(view)) < 2e-6


# ---- histogram


def test_the_rungs_of_histogram():
    shape = {"N": 1 << 14}
    shared, everywhere = (counted(histogram, f"numba_{n}", shape, torch.uint8) for n in ("privatised", "global"))
    warps, blocks = (1 << 14) // 32, math.prod(shared.grid)
    assert everywhere.counters["atomics"] == warps
    on_line = sorted(n for (name, _), n in shared.lines.items() if name == "atomics")
    assert on_line == [8 * blocks, warps]  # 256 counters of a block for 8 warps; and those in shared memory
    assert counters(shared, "barriers") == (2 * 8 * blocks,) and counters(everywhere, "barriers") == (0,)


def test_values_without_a_bin_are_not_counted():
    x = torch.tensor([-1, 0, 255, 256, 3, 3, -(2**31), 2**31 - 1], dtype=torch.int32, device=DEVICE)
    for version in histogram.versions.values():
        out = version(x)
        assert out.sum() == 4 and out[3] == 2 and out[0] == 1 and out[255] == 1
    with pytest.raises(InputError, match="supported are uint8, int32"):
        histogram.versions["numba_global"](x.float())


# ---- matmul

PRODUCT = {"M": 128, "N": 128, "K": 32}


def test_the_rungs_of_matmul():
    names = ("numba_naive", "numba_coalesced", "numba", "numba_register_tile", "numba_vectorised")
    rungs = naive, coalesced, tile, registers, wide = [counted(matmul, name, PRODUCT) for name in names]
    assert naive.derived["sectors_per_load_request"] == (32 + 1) / 2
    assert naive.derived["sectors_per_store_request"] == 32
    assert coalesced.derived["sectors_per_load_request"] == (1 + 4) / 2
    assert coalesced.derived["sectors_per_store_request"] == 4
    # Each element of a travels N / BN times, each of w M / BM times.
    sectors = [report.counters["global_load_sectors"] for report in (tile, registers, wide)]
    assert sectors == [(128 // BM) * 2 * 128 * 32 // 8 for BM in (16, 64, 128)]
    # Two loads for a multiply-add of each thread; 8 for 16; 4 of 16 bytes for 64.
    warp_products = 128 * 128 * 32 // 32
    loads = [report.counters["shared_load_requests"] for report in (tile, registers, wide)]
    assert loads == [warp_products * 2, warp_products * 8 // 16, warp_products * 4 // 64]
    assert registers.counters["shared_load_bank_conflicts"] == wide.counters["shared_load_bank_conflicts"] == 0
    # Two barriers for each step of K, in each warp of each block; then one.
    assert registers.counters["barriers"] == 2 * (32 // 16) * 8 * 4 and wide.counters["barriers"] == (32 // 16) * 8
    assert len({report.counters["flops"] for report in rungs}) == 1
    intensity = [report.derived["flops_per_byte"] for report in rungs]
    assert intensity == sorted(intensity) and intensity[0] < 0.1 < 1 < intensity[2] < 10 < intensity[-1]


def kernel_of(module: str, name: str, *parameters):
    return getattr(importlib.import_module(f"gpukern.kernels.matmul.{module}"), name)(*parameters)


PLAIN = (False, False, False)
ALL = (True, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", [PLAIN, ALL], ids=["plain", "epilogue"])
def test_the_sums_of_a_thread_are_registers(epilogue):
    x, bias = np.zeros((64, 64), np.float32), np.zeros(64, np.float32)
    arguments = (x, x, bias, x, x)
    registers = kernel_of("numba_register_tile", "_matmul_register_tile_kernel", 64, 64, 16, *epilogue)
    pair = (quads._load_quad, quads._store_quad)
    wide = kernel_of("numba_vectorised", "_matmul_vectorised_kernel", 128, 128, 16, *pair, *epilogue)
    for kernel, most in ((registers, 255), (wide, 128)):
        made = inspect.compiled(kernel, arguments, "H200")
        assert (made.local, made.spills) == (0, 0) and made.registers <= most
    assert made.features["vector_loads"] == 4 and made.features["vector_stores"] == 16
    assert made.features["barriers"] == 1
    assert inspect.occupancy(256, made.registers, made.shared, "H200").blocks == 2


@pytest.mark.parametrize("version", ["numba_register_tile", "numba_vectorised"])
def test_a_product_of_tiles_and_rests(version):
    """More than one tile along each axis, none of them full; and each epilogue."""
    tile = {"BM": 64, "BN": 64, "BK": 4} if version == "numba_vectorised" else {"BM": 16, "BN": 8, "BK": 5}
    for shape in ({"M": 67, "N": 70, "K": 10}, {"M": 65, "N": 68, "K": 12, "bias": 1, "gelu": 1, "residual": 1}):
        inputs = matmul.draw(shape, torch.float32, DEVICE)
        out = matmul.versions[version](**inputs, **tile)
        assert error(out, matmul.reference(**inputs)) <= matmul.tolerance[torch.float32]


def test_a_matrix_too_wide_for_32_bits_goes_element_by_element():
    x = torch.empty(0, 1 << 24)
    assert quads.accesses(64, x)[0] is quads._load_quad
    assert quads.accesses(128, x)[0] is quads._load_elements
    assert quads.accesses(64, torch.empty(4, 6))[0] is quads._load_elements
    assert quads.accesses(64, torch.empty(8, 4).half())[0] is quads._load_elements
    assert quads.accesses(64, torch.empty(8, 4).T)[0] is quads._load_elements


# ---- softmax and layernorm


def test_a_row_a_thread_or_a_block():
    shape = {"B": 1, "H": 1, "T": 64, "S": 256}
    thread, block = (counted(softmax, name, shape) for name in ("numba_one_thread", "numba"))
    assert thread.derived["sectors_per_load_request"] == thread.derived["sectors_per_store_request"] == 32
    assert block.derived["sectors_per_load_request"] == block.derived["sectors_per_store_request"] == 4
    assert thread.counters["barriers"] == 0


def test_shuffles_need_two_barriers_a_sum():
    tree, shuffle = (counted(layernorm, n, {"B": 1, "T": 4, "C": 512}) for n in ("numba", "numba_shuffle"))
    warps = 4 * 4
    assert tree.counters["barriers"] == 2 * 9 * warps and shuffle.counters["barriers"] == 2 * 2 * warps
    assert shuffle.counters["shared_store_requests"] == 2 * warps


# ---- the timeline


def test_a_timeline_needs_a_card():
    if not device.simulated():
        pytest.skip("the refusal of the simulated GPU")
    with pytest.raises(device.DeviceError, match="no SMs and no clock"):
        timeline(torch.ones(4, dtype=torch.int32))


def test_a_timeline_reads_the_registers_of_the_card():
    few, many = np.zeros(4, np.int32), np.zeros(4, np.int64)
    ptx = inspect.compiled(_timeline_kernel, (few, np.zeros(4, np.float32), few, many, many), "H200").ptx
    assert ptx.count("%smid") == 1 and ptx.count("%globaltimer") == 2


@pytest.mark.gpu
def test_blocks_that_work_longer_end_later():
    card = device.card()
    rounds = torch.full((2 * card.sms,), 20_000, dtype=torch.int32, device=DEVICE)
    rounds[0] *= 10
    timeline(rounds)  # compiled
    told = timeline(rounds)
    assert told.sm.unique().numel() == card.sms and told.start.min() == 0
    assert (told.end > told.start).all() and told.end.argmax() == 0


# ---- refusals


@pytest.mark.parametrize(
    "op, version, tile, words",
    [
        (transpose, "numba_tile", {"threads": 48}, "threads=48 must be a multiple of 32"),
        (transpose, "numba_vectorised", {"threads": 96}, "threads=96 is not a power of two"),
        (reduction, "numba_sequential", {"threads": 1}, "use at least 2"),
        (reduction, "numba_shuffle", {"threads": 40}, "threads=40 must be a multiple of 32"),
        (reduction, "numba_last_block", {"blocks": 0}, "blocks=0"),
        (copy, "numba_vectorised", {"quads": 0}, "quads=0"),
        (matmul, "numba_register_tile", {"BM": 6}, "BM=6 and BN=64 must be multiples of 4"),
        (matmul, "numba_register_tile", {"BK": 128}, "static shared memory"),
        (matmul, "numba_vectorised", {"BM": 32}, "a warp computes 64 x 32"),
        (matmul, "numba_vectorised", {"BK": 4}, "use 8"),
        (matmul, "numba_vectorised", {"BK": 32}, "static shared memory"),
        (matmul, "numba_vectorised", {"BN": 96}, "BN=96 is not a power of two"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_refuses_a_tile_that_it_cannot_run(op, version, tile, words):
    with pytest.raises((InputError, device.LimitError), match=words):
        op.versions[version](**op.draw(op.shapes[0], torch.float32, DEVICE), **tile)
