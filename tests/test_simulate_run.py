"""simulate.run: one call for both languages; what a report holds beside the counters."""

import numpy as np
import pytest
from numba import cuda, float32

from gpukern import simulate
from gpukern.device import DeviceError, LimitError


@cuda.jit
def add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def vectors(n=1000):
    return np.arange(n, dtype=np.float32), np.ones(n, np.float32), np.zeros(n, np.float32)


def test_a_report_says_what_was_launched_counted_and_derived():
    x, y, out = vectors(1024)
    report = simulate.run(add, 4, 256, x, y, out)
    assert np.array_equal(out, x + y) and report.faults == []
    assert (report.kernel, report.language, report.card.name) == ("add", "numba", "H200")
    assert (report.grid, report.block, report.shared) == ((4, 1, 1), (256, 1, 1), 0)
    assert report.counters["global_load_unique_bytes"] == 8192
    assert report.counters["global_store_unique_bytes"] == 4096
    assert report.counters["flops"] == 1024
    assert report.derived == {
        "sectors_per_load_request": 4,
        "sectors_per_store_request": 4,
        "bytes_moved": 12288,
        "least_bytes": 12288,
        "bytes_over_least": 1,
        "flops_per_byte": 1024 / 12288,
        "lanes_per_step": 32,
    }
    assert simulate.last() is report
    assert "add[4, 256] on the simulated H200" in repr(report) and "no faults" in repr(report)


def test_what_is_read_twice_is_moved_twice_and_unique_once():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i] + x[0] + x[i]

    x, _, out = vectors(64)
    report = simulate.run(kernel, 1, 64, x, out)
    assert report.counters["global_load_unique_bytes"] == 256
    assert report.counters["global_load_sectors"] == 2 * (4 + 1 + 4)


def test_lines_as_a_frame():
    x, y, out = vectors()
    frame = simulate.run(add, 4, 256, x, y, out).frame()
    first = add.py_func.__code__.co_firstlineno
    row = frame.loc[f"test_simulate_run.py:{first + 4}"]
    assert row["source"] == "out[i] = x[i] + y[i]"
    assert (row["global_load_requests"], row["global_store_requests"], row["flops"]) == (64, 32, 1000)
    assert frame.loc[f"test_simulate_run.py:{first + 3}", "branches"] == 32


def test_active_lanes_are_those_that_run():
    @cuda.jit
    def kernel(out):
        if cuda.laneid < 8:
            out[cuda.grid(1)] = 1

    report = simulate.run(kernel, 1, 64, np.zeros(64, np.float32))
    by_line = {
        line: n / report.lines["steps", line] for (name, line), n in report.lines.items() if name == "active_lanes"
    }
    assert min(by_line.values()) == 8 and max(by_line.values()) == 32


@pytest.mark.parametrize(
    "grid, block, words",
    [(1, 2048, "2048 threads"), ((1, 70000), 32, "grid.y is 70000"), (1, (1, 1, 65), "block.z is 65"), (0, 32, "grid")],
)
def test_a_launch_that_the_card_does_not_take_is_a_fault_and_runs_nothing(grid, block, words):
    x, y, out = vectors()
    report = simulate.run(add, grid, block, x, y, out)
    (fault,) = report.faults
    assert fault.kind == "limit" and words in fault.message and fault.line.startswith("test_simulate_run.py:")
    assert not out.any() and not any(report.counters.values())
    with pytest.raises(LimitError):
        add[grid, block](x, y, out)


def test_a_block_that_wants_more_registers_than_an_sm_has_is_a_fault():
    @cuda.jit
    def greedy(x, out, n):
        i = cuda.grid(1)
        mine = cuda.local.array(80, float32)
        for j in range(80):  # unrolled: each element becomes a register
            mine[j] = x[(i + j) % x.size]
        for _ in range(n):
            for j in range(80):
                mine[j] = mine[j] * mine[j] + x[j]
        total = float32(0)
        for j in range(80):
            total += mine[j]
        out[i] = total

    x, out = np.zeros((2, 1024), np.float32)
    report = simulate.run(greedy, 1, 1024, x, out, 2)
    assert report.compiled.registers > 64
    (fault,) = report.faults
    assert fault.kind == "limit" and "registers" in fault.message and fault.line.startswith("test_simulate_run.py:")
    assert simulate.run(greedy, 1, 256, x, out, 2).faults == []


def test_occupancy_and_waves_come_from_what_the_compiler_says():
    x, y, out = vectors(1 << 16)
    report = simulate.run(add, 256, 256, x, y, out)
    assert report.occupancy.fraction == 1 and report.occupancy.blocks == 8
    assert report.waves == 256 / (132 * 8)


def test_limits_are_those_of_the_card_that_was_asked_for():
    @cuda.jit
    def meets(out):
        cuda.cg.this_grid().sync()
        out[cuda.grid(1)] = 1

    out = np.zeros(1056 * 64, np.float32)
    assert simulate.run(meets, 1056, 64, out, card="H200").faults == []
    assert [f.kind for f in simulate.run(meets, 1056, 64, out, card="T4").faults] == ["limit"]
    assert simulate.run(meets, 8, 64, out[:512], card="T4").card.name == "T4"
    with pytest.raises(DeviceError, match="known are H200"):
        simulate.run(meets, 8, 64, out, card="GTX 9")


def test_an_input_must_not_be_written():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i]
        x[i] = 0

    x, _, out = vectors(64)
    assert simulate.run(kernel, 1, 64, x, out).faults == []
    (fault,) = simulate.run(kernel, 1, 64, x, out, inputs="x").faults
    assert (fault.kind, fault.array, fault.index, fault.count) == ("input_written", "x", (0,), 64)
    (fault,) = simulate.run(kernel, 1, 64, x, x[::-1], inputs="x").faults[:1]
    with pytest.raises(ValueError, match="no argument 'z'; it has x, out"):
        simulate.run(kernel, 1, 64, x, out, inputs="z")


def test_an_output_must_be_written_whole():
    x, y, out = vectors(300)
    (fault,) = simulate.run(add, 1, 256, x, y, out, outputs=("out",)).faults
    assert (fault.kind, fault.array, fault.index, fault.count) == ("uninitialised", "out", (256,), 44)
    assert simulate.run(add, 2, 256, x, y, out, outputs="out").faults == []
    strided = np.zeros((300, 2), np.float32)[:, 0]
    assert simulate.run(add, 2, 256, x, y, strided, outputs="out").faults == []


def test_an_output_holds_nothing_before_it_is_written():
    @cuda.jit
    def accumulate(x, out):
        i = cuda.grid(1)
        out[i] += x[i]

    x, _, out = vectors(64)
    assert simulate.run(accumulate, 1, 64, x, out).faults == []
    (fault,) = simulate.run(accumulate, 1, 64, x, out, outputs="out").faults
    assert (fault.kind, fault.array, fault.index, fault.count) == ("uninitialised", "out", (0,), 64)
    fresh = cuda.device_array(64, np.float32)
    with pytest.raises(simulate.FaultError, match=r"reads out\[0\] .* which nobody has written"):
        accumulate[1, 64](x, fresh)


def test_a_device_array_is_filled_by_the_host_by_a_launch_or_by_both():
    @cuda.jit
    def copy(x, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = x[i]

    a, b = cuda.device_array(64, np.float32), cuda.device_array(64, np.float32)
    a.copy_to_device(np.ones(64, np.float32))
    copy[1, 32](a, b[:32])
    assert [f.index for f in simulate.run(copy, 2, 32, b, a).faults] == [(32,)]
    b[32:] = 2
    copy[2, 32](b, a)
    assert a.copy_to_host().tolist() == [1] * 32 + [2] * 32


def test_a_local_array_must_be_written_before_it_is_read():
    @cuda.jit
    def kernel(out, first):
        mine = cuda.local.array(4, float32)
        for j in range(first, 4):
            mine[j] = j
        out[cuda.grid(1)] = mine[0] + mine[3]

    assert simulate.run(kernel, 1, 32, np.zeros(32, np.float32), 0).faults == []
    (fault,) = simulate.run(kernel, 1, 32, np.zeros(32, np.float32), 1).faults
    assert (fault.kind, fault.array, fault.index) == ("uninitialised", "mine", (0,))


def test_the_trace_is_what_one_block_accessed():
    @cuda.jit
    def turned(x, out):
        s = cuda.shared.array((8, 8), float32)
        i, j = cuda.threadIdx.y, cuda.threadIdx.x
        b = cuda.blockIdx.x
        s[i, j] = x[b, i, j]
        cuda.syncthreads()
        out[b, i, j] = s[j, i]

    x = np.arange(3 * 64, dtype=np.float32).reshape(3, 8, 8)
    out = np.zeros_like(x)
    trace = simulate.run(turned, 3, (8, 8), x, out, trace=2).trace
    assert [(a.space, a.doing, a.array) for a in trace] == [
        ("global", "load", "x"),
        ("shared", "store", "s"),
        ("shared", "load", "s"),
        ("global", "store", "out"),
    ]
    assert trace[0].shape == (3, 8, 8) and trace[0].address.tolist() == [512 + 4 * n for n in range(64)]
    assert trace[1].threads.tolist() == list(range(64)) and trace[1].address[:3].tolist() == [0, 4, 8]
    assert trace[2].index[0][:3].tolist() == [0, 1, 2] and trace[2].address[:3].tolist() == [0, 32, 64]
    assert simulate.run(turned, 3, (8, 8), x, out, trace=None).trace == []


def test_without_checks_only_the_result_is_made():
    @cuda.jit
    def race(x, out):
        s = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        s[i] = x[i]
        out[i] = s[63 - i]

    x, _, out = vectors(64)
    report = simulate.run(race, 1, 64, x, out, checks=False)
    assert report.faults == [] and not any(report.counters.values()) and np.array_equal(out, x[::-1])
    assert [f.kind for f in simulate.run(race, 1, 64, x, out).faults] == ["race"]
    report = simulate.run(add, 1, 64, x[:32], x, out, checks=False)
    assert [f.kind for f in report.faults] == ["out_of_bounds"]


def test_a_numba_kernel_takes_no_keywords():
    with pytest.raises(TypeError, match="BLOCK"):
        simulate.run(add, 1, 32, *vectors(32), BLOCK=32)


def test_what_is_no_kernel_and_a_block_that_is_not_there_are_told():
    def plain(x):
        pass

    for kernel, block, words in (
        (plain, 32, "is no kernel: decorate"),
        (None, None, "None is no kernel"),
        (add, None, "give it a block"),
    ):
        with pytest.raises(TypeError, match=words):
            simulate.run(kernel, 1, block, *vectors(32))
