"""Faulty Triton kernels on the simulated GPU: each fault is named with its line and program; memory stays whole."""

import inspect
import threading

import pytest
import torch

from gpukern import device, simulate

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not device.simulated(), reason="the simulated GPU is off where there is a card"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
]


def line(kernel, text: str) -> str:
    """ "test_triton_faults.py:12", where `text` stands in a kernel."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (place,) = (n for n, source in enumerate(lines) if text in source)
    return f"test_triton_faults.py:{first + place}"


def only_fault(kernel, grid, *args, text: str, kind: str, array: str, index: int, who: str, count=None, **meta):
    """Run, and hold the one fault that is found against what is planted."""
    report = simulate.run(kernel, grid, None, *args, **meta)
    (fault,) = report.faults
    assert (fault.kind, fault.line, fault.array, fault.index) == (kind, line(kernel, text), array, (index,)), fault
    assert fault.threads[0] == who and who in fault.message and fault.line in fault.message
    assert count is None or fault.count == count
    return fault


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y, mask=i < n)


def test_a_load_without_a_mask():
    x = torch.ones(100)
    out = torch.zeros(100)
    fault = only_fault(
        add_kernel, (2,), x, x.clone(), out, 100, BLOCK=64,
        text="y = tl.load", kind="out_of_bounds", array="y_ptr", index=100, who="program 1", count=28,
    )  # fmt: skip
    assert "loads y_ptr[100]" in fault.message and "mask=" in fault.message
    assert out.tolist() == [2] * 100


@triton.jit
def last_kernel(out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 1.0, mask=i <= n)


def test_a_mask_that_is_off_by_one_and_a_view_whose_neighbour_stays():
    memory = torch.zeros(100)
    view = memory[10:50]  # the tensor is these 40, whatever lies behind them
    only_fault(
        last_kernel, (3,), view, 40, BLOCK=16,
        text="tl.store", kind="out_of_bounds", array="out_ptr", index=40, who="program 2", count=1,
    )  # fmt: skip
    assert memory.tolist() == [0] * 10 + [1] * 40 + [0] * 50


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x)


def test_a_store_without_a_mask():
    only_fault(
        copy_kernel, (2,), torch.ones(10), torch.zeros(10), 10, BLOCK=8,
        text="tl.store", kind="out_of_bounds", array="out_ptr", index=10, who="program 1", count=6,
    )  # fmt: skip


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + m * M + n)
    tl.store(out_ptr + n * M + m, x)


def test_a_wrong_stride():
    only_fault(
        transpose_kernel, (1,), torch.ones(8, 4), torch.zeros(4, 8), 8, 4,
        text="x = tl.load", kind="out_of_bounds", array="x_ptr", index=32, who="program 0", count=16,
    )  # fmt: skip


@triton.jit
def neighbour_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + i - 1)
    tl.store(out_ptr + i, left)


def test_a_pointer_below_the_start():
    memory = torch.arange(20.0)
    out = torch.zeros(16)
    fault = only_fault(
        neighbour_kernel, (2,), memory[4:], out, BLOCK=8,
        text="left = tl.load", kind="out_of_bounds", array="x_ptr", index=-1, who="program 0", count=1,
    )  # fmt: skip
    assert "before its first element" in fault.message
    assert out[0].isnan() and out[1:].tolist() == memory[4:19].tolist()  # poison, never the memory that lies there


@triton.jit
def total_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + i))
    tl.store(out_ptr, total)


def test_programs_that_store_to_one_place():
    fault = only_fault(
        total_kernel, (4,), torch.arange(64.0), torch.zeros(1), BLOCK=16,
        text="tl.store", kind="race", array="out_ptr", index=0, who="program 1", count=3,
    )  # fmt: skip
    assert fault.threads == ["program 1", "program 0"] and "tl.atomic_add" in fault.message


def test_programs_that_store_the_same_value_are_warned():
    report = simulate.run(total_kernel, (4,), None, torch.ones(64), torch.zeros(1), BLOCK=16)
    assert [f.kind for f in report.faults] == ["same_value_race"] and not report.errors
    total_kernel[(4,)](torch.ones(64), torch.zeros(1), BLOCK=16)  # does not raise


@triton.jit
def accumulate_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(out_ptr)
    tl.store(out_ptr, old + tl.sum(tl.load(x_ptr + i)))


def test_a_missing_atomic():
    report = simulate.run(accumulate_kernel, (4,), None, torch.ones(64), torch.zeros(1), BLOCK=16)
    races = {(f.kind, f.line) for f in report.faults}
    assert races == {("race", line(accumulate_kernel, "old =")), ("race", line(accumulate_kernel, "tl.store"))}


@triton.jit
def rows_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)  # wrong where the rows are on axis 1
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + n)
    tl.store(out_ptr + row * stride + n, 2 * x)


def test_a_wrong_axis_and_a_grid_that_is_too_small_leave_the_output_unwritten():
    x, out = torch.ones(4, 8), torch.zeros(4, 8)
    report = simulate.run(rows_kernel, (1, 4), None, x, out, 8, BLOCK=8, outputs="out_ptr")
    assert {f.kind for f in report.faults} == {"same_value_race", "uninitialised"}
    assert report.faults[0].threads == ["program (0, 1)", "program (0, 0)"]
    report = simulate.run(rows_kernel, (3,), None, x, out, 8, BLOCK=8, outputs="out_ptr")
    (fault,) = report.faults
    assert (fault.kind, fault.array, fault.index, fault.count) == ("uninitialised", "out_ptr", (3, 0), 8)
    assert "no program writes out_ptr[3, 0] nor 7 more" in fault.message
    assert simulate.run(rows_kernel, (4,), None, x, out, 8, BLOCK=8, outputs="out_ptr").faults == []


def test_a_grid_that_is_too_large():
    only_fault(
        rows_kernel, (5,), torch.ones(4, 8), torch.zeros(5, 8), 8, BLOCK=8,
        text="x = tl.load", kind="out_of_bounds", array="x_ptr", index=32, who="program 4", count=8,
    )  # fmt: skip


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, AXES: tl.constexpr):
    x_block = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    out_block = tl.make_block_ptr(out_ptr, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    x = tl.load(x_block, boundary_check=AXES)
    tl.store(out_block, x + 1, boundary_check=(0, 1))


def test_a_block_pointer_without_boundary_check():
    x, out = torch.ones(5, 3), torch.zeros(5, 3)
    only_fault(
        block_pointer_kernel, (2,), x, out, 5, 3, 4, 4, AXES=(1,),
        text="boundary_check=AXES", kind="out_of_bounds", array="x_ptr", index=15, who="program 1", count=9,
    )  # fmt: skip
    assert simulate.run(block_pointer_kernel, (2,), None, x, out, 5, 3, 4, 4, AXES=(0, 1)).faults == []
    assert out.tolist() == [[2.0] * 3] * 5


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
    out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BM, BN])
    m = tl.program_id(0) * BM
    out.store([m, 0], x.load([m, 0]) + 1)


def test_a_descriptor_is_clipped_by_its_shape_but_not_if_the_shape_is_a_lie():
    x, out = torch.ones(5, 12), torch.zeros(5, 12)
    assert simulate.run(descriptor_kernel, (2,), None, x, out, 5, 12, 4, 16).faults == []
    assert out.tolist() == [[2.0] * 12] * 5
    only_fault(
        descriptor_kernel, (2,), x, torch.zeros(8, 12), 6, 12, 4, 16,
        text="out.store", kind="out_of_bounds", array="x_ptr", index=60, who="program 1", count=12,
    )  # fmt: skip


@triton.jit
def shift_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + 1, mask=i + 1 < n, other=0.0)
    tl.store(x_ptr + i, x, mask=i < n)


def test_in_place_where_another_program_reads():
    fault = only_fault(
        shift_kernel, (4,), torch.arange(64.0), 64, BLOCK=16,
        text="tl.store", kind="race", array="x_ptr", index=16, who="program 1", count=3,
    )  # fmt: skip
    assert "which program 0 loads" in fault.message


@triton.jit
def scatter_kernel(out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i // 2, i)


def test_lanes_of_one_store_that_meet():
    fault = only_fault(
        scatter_kernel, (1,), torch.zeros(8, dtype=torch.int32), BLOCK=16,
        text="tl.store", kind="race", array="out_ptr", index=0, who="program 0", count=8,
    )  # fmt: skip
    assert "different values" in fault.message


@triton.jit
def atomic_kernel(x_ptr, out_ptr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + tl.load(x_ptr + i), 1)


def test_an_atomic_out_of_bounds():
    x = torch.arange(32, dtype=torch.int32) % 8
    x[20] = 9
    out = torch.zeros(8, dtype=torch.int32)
    only_fault(
        atomic_kernel, (2,), x, out, BINS=8, BLOCK=16,
        text="tl.atomic_add", kind="out_of_bounds", array="out_ptr", index=9, who="program 1", count=1,
    )  # fmt: skip
    assert out.tolist() == [4, 4, 4, 4, 3, 4, 4, 4]


@triton.jit
def writes_input_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x * 2)
    tl.store(out_ptr + i, x)


def test_an_input_that_is_written():
    only_fault(
        writes_input_kernel, (1,), torch.ones(16), torch.zeros(16), BLOCK=16, inputs=("x_ptr",),
        text="tl.store(x_ptr", kind="input_written", array="x_ptr", index=0, who="program 0", count=16,
    )  # fmt: skip


@triton.jit
def unset_output_kernel(out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    old = tl.load(out_ptr + i)
    tl.store(out_ptr + i, old + 1)


def test_an_output_that_is_read_before_it_is_written():
    only_fault(
        unset_output_kernel, (1,), torch.zeros(16), BLOCK=16, outputs="out_ptr",
        text="old = tl.load", kind="uninitialised", array="out_ptr", index=0, who="program 0", count=16,
    )  # fmt: skip


@triton.jit
def columns_kernel(out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # wrong for a column: its stride is missing
    tl.store(out_ptr + i, i.to(tl.float32))


def test_what_lies_between_the_elements_of_a_view_is_not_its():
    memory = torch.full((8, 4), 9.0)
    fault = only_fault(
        columns_kernel, (2,), memory[:, 1], BLOCK=16,
        text="tl.store", kind="out_of_bounds", array="out_ptr", index=1, who="program 0", count=12 + 12,
    )  # fmt: skip
    assert "no element of it lies there" in fault.message and "strides" in fault.message
    assert memory[:, 1].tolist() == [0, 4, 8, 12, 16, 20, 24, 28] and (memory[:, [0, 2, 3]] == 9).all()


@triton.jit
def far_kernel(x_ptr, out_ptr, stride):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * stride)
    tl.store(out_ptr + row, x)


def test_an_offset_that_wraps_below_the_start_is_told_what_to_do():
    fault = only_fault(
        far_kernel, (2,), torch.ones(4), torch.ones(4), -(2**30),
        text="x = tl.load", kind="out_of_bounds", array="x_ptr", index=-(2**30), who="program 1", count=1,
    )  # fmt: skip
    assert ".to(tl.int64)" in fault.message


@triton.jit
def count_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    bins = tl.load(x_ptr + tl.arange(0, BLOCK))
    count = tl.load(out_ptr + bins)
    tl.store(out_ptr + bins, count + 1)


def test_lanes_that_meet_with_one_value_are_warned():
    x = torch.tensor([0, 1, 2, 1, 3, 1, 3, 7])
    report = simulate.run(count_kernel, (1,), None, x, torch.zeros(8), BLOCK=8)
    (fault,) = report.faults
    assert (fault.kind, fault.line, fault.index, fault.count) == (
        "same_value_race", line(count_kernel, "tl.store"), (1,), 3,
    )  # fmt: skip
    assert "atomic_add" in fault.message
    assert simulate.run(count_kernel, (1,), None, torch.arange(7, -1, -1), torch.zeros(8), BLOCK=8).faults == []


@triton.jit
def add_to_output_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, EXCHANGE: tl.constexpr):
    total = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    if EXCHANGE:
        tl.atomic_xchg(out_ptr, total)
    tl.atomic_add(out_ptr, total)


def test_an_atomic_that_adds_to_what_nobody_has_written():
    fault = only_fault(
        add_to_output_kernel, (2,), torch.ones(32), torch.zeros(1), 16, False, outputs="out_ptr",
        text="tl.atomic_add", kind="uninitialised", array="out_ptr", index=0, who="program 0", count=1,
    )  # fmt: skip
    assert "torch.zeros" in fault.message
    arguments = torch.ones(32), torch.zeros(1), 16, True
    assert simulate.run(add_to_output_kernel, 1, None, *arguments, outputs="out_ptr").faults == []


@triton.jit
def wait_kernel(flag_ptr, out_ptr):
    last = tl.num_programs(0) - 1
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag_ptr, 0) == 0:
            pass
    elif tl.program_id(0) == last:
        tl.atomic_xchg(flag_ptr, 1)
    tl.store(out_ptr + tl.program_id(0), 1.0)


def test_a_program_may_wait_for_a_later_one_but_a_card_runs_only_so_many_at_once():
    def launch(programs, waiting=wait_kernel):
        flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(programs)
        return simulate.run(waiting, (programs,), None, flag, out, card="T4", num_warps=32), out

    report, out = launch(40)
    assert report.faults == [] and out.tolist() == [1] * 40
    assert launch(41)[0].faults == []  # one of them waits, and the others need one place after the other
    report, _ = launch(41, all_wait_kernel)
    assert [(f.kind, f.line) for f in report.errors] == [("hang", line(all_wait_kernel, "while"))]
    assert "T4 runs at most 40 of these at once" in report.faults[0].message
    report, out = launch(40, all_wait_kernel)
    assert report.faults == [] and out.tolist() == [1] * 40


@triton.jit
def all_wait_kernel(flag_ptr, out_ptr):
    tl.atomic_add(flag_ptr, 1)
    while tl.atomic_add(flag_ptr, 0) < tl.num_programs(0):
        pass
    tl.store(out_ptr + tl.program_id(0), 1.0)


@triton.jit
def fails_kernel(flag_ptr, out_ptr):
    if tl.program_id(0) == 3:
        tl.device_assert(False, "program 3 fails")
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass


def test_a_program_that_fails_while_others_wait_ends_the_launch():
    before = threading.active_count()
    with pytest.raises(InterpreterError, match="program 3 fails"):
        simulate.run(fails_kernel, 8, None, torch.zeros(1, dtype=torch.int32), torch.zeros(8))
    report = simulate.run(fails_kernel, 3, None, torch.zeros(1, dtype=torch.int32), torch.zeros(8))
    assert [f.kind for f in report.faults] == ["hang"] and threading.active_count() <= before + 1


@triton.jit
def poll_kernel(flag_ptr):
    while tl.load(flag_ptr) == 0:
        pass


@pytest.mark.slow  # it looks a hundred thousand times
def test_a_program_that_waits_with_plain_loads():
    report = simulate.run(poll_kernel, 1, None, torch.zeros(1))
    assert [(f.kind, f.line) for f in report.errors] == [("hang", line(poll_kernel, "while"))]


@triton.jit
def through_memory_kernel(addresses, out_ptr, BLOCK: tl.constexpr):
    x_ptr = tl.load(addresses).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


def test_a_pointer_from_memory_that_leads_beyond_its_tensor():
    x, out = torch.ones(6), torch.zeros(8)
    report = simulate.run(through_memory_kernel, 1, None, torch.tensor([x.data_ptr()]), out, 8)
    assert [(f.kind, f.line) for f in report.faults] == [("out_of_bounds", line(through_memory_kernel, "tl.store"))]
    assert out[:6].tolist() == [1] * 6
    report = simulate.run(through_memory_kernel, 1, None, torch.tensor([64]), out, 8)
    assert [f.message.partition(",")[2][:22] for f in report.faults] == [" where no tensor lies."]


@triton.jit
def same_tensor_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i + 1))


def test_one_tensor_under_two_names_is_told_by_the_name_that_was_used():
    x = torch.ones(8)
    assert [f.array for f in simulate.run(same_tensor_kernel, 1, None, x, x, 8).faults] == ["x_ptr"]


@triton.jit
def helper(ptr, i):
    return tl.load(ptr + i + 1)


@triton.jit
def calling_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, helper(x_ptr, i))


def test_a_fault_in_a_function_that_the_kernel_calls_is_told_by_its_own_line():
    report = simulate.run(calling_kernel, (1,), None, torch.ones(8), torch.zeros(8), BLOCK=8)
    assert [f.line for f in report.faults] == [line(helper, "return")]
    assert report.lines["global_load_requests", line(helper, "return")] == 1


def test_a_launch_in_the_normal_way_raises_and_keeps_the_report():
    with pytest.raises(simulate.FaultError, match="out_of_bounds: program 1 stores to out_ptr"):
        copy_kernel[(2,)](torch.ones(10), torch.zeros(10), 10, BLOCK=8)
    assert [f.kind for f in simulate.last().faults] == ["out_of_bounds"]


@triton.jit
def flagged_kernel(x_ptr, part_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, SEM: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + i)))
    done = tl.atomic_add(count_ptr, 1, sem=SEM)
    if done == PROGRAMS - 1:
        parts = tl.load(part_ptr + tl.arange(0, PROGRAMS))
        tl.store(out_ptr, tl.sum(parts))


def test_the_last_program_may_read_what_the_others_wrote_if_the_counter_orders_them():
    def launch(sem):
        out = torch.zeros(1)
        arguments = torch.ones(64), torch.zeros(4), torch.zeros(1, dtype=torch.int32), out
        return simulate.run(flagged_kernel, (4,), None, *arguments, 16, 4, SEM=sem), out

    report, out = launch("acq_rel")
    assert report.faults == [] and out.item() == 64
    report, _ = launch("relaxed")
    assert [(f.kind, f.array, f.count) for f in report.faults] == [("race", "part_ptr", 3)]


@triton.jit
def lock_kernel(x_ptr, lock_ptr, out_ptr, BLOCK: tl.constexpr, AFTER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + i)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    total = tl.load(out_ptr + i) + x
    if AFTER:
        tl.atomic_xchg(lock_ptr, 0)
        tl.store(out_ptr + i, total)
    else:
        tl.store(out_ptr + i, total)
        tl.atomic_xchg(lock_ptr, 0)


def test_a_lock_orders_what_lies_inside_it_and_nothing_else():
    out = torch.zeros(16)
    arguments = torch.ones(64), torch.zeros(1, dtype=torch.int32), out
    assert simulate.run(lock_kernel, (4,), None, *arguments, 16, AFTER=False).faults == []
    assert out.tolist() == [4] * 16
    report = simulate.run(lock_kernel, (4,), None, *arguments, 16, AFTER=True)
    assert {f.kind for f in report.faults} == {"race"}
