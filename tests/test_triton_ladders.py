"""The Triton ladders: what each rung does to the counters of the simulated GPU, and to what the compiler makes."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from gpukern import device, inspect, simulate
from gpukern.kernels.layernorm import layernorm, residual_layernorm
from gpukern.kernels.matmul import matmul
from gpukern.kernels.matvec import matvec
from gpukern.kernels.softmax import softmax
from gpukern.op import InputError, error
from gpukern.simulate import report as reports

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
from gpukern.kernels.matmul import triton_ladder as matmul_ladder  # noqa: E402
from gpukern.kernels.matmul import triton_persistent  # noqa: E402
from gpukern.kernels.matvec import triton_ladder as matvec_ladder  # noqa: E402
from gpukern.kernels.softmax import triton_ladder as softmax_ladder  # noqa: E402

pytestmark = pytest.mark.skipif(not device.simulated(), reason="the simulated GPU is off where there is a card")
CPU = torch.device("cpu")
SMALL = {"BM": 16, "BN": 16, "BK": 16, "warps": 1}


@pytest.fixture
def counted(monkeypatch):
    """A function that calls a version, checks what it returns, and gives its launches and counters, added up."""

    def count(op, name, inputs, **tile):
        launches = []
        monkeypatch.setattr(reports, "keep", launches.append)
        out = op.versions[name](**inputs, **tile)
        assert error(out, op.reference(**inputs)) <= op.tolerance[next(iter(inputs.values())).dtype], name
        assert not any(report.errors for report in launches)
        return Counter(launches=len(launches)) + sum((Counter(r.counters) for r in launches), Counter())

    return count


def sectors(*shape: int, itemsize: int = 4) -> int:
    """32-byte sectors of a whole tensor that begins at a sector."""
    return math.prod(shape) * itemsize // 32


# ---- softmax


def test_softmax_reads_three_times_then_once_then_twice(counted):
    inputs = softmax.draw({"B": 1, "H": 1, "T": 16, "S": 512}, torch.float32, CPU)
    once = sectors(16, 512)
    three = counted(softmax, "triton_three_pass", inputs, BN=128)
    fused = counted(softmax, "triton", inputs)
    online = counted(softmax, "triton_online", inputs, BN=128)
    maxima_and_sums = 3 * 16  # a maximum is read by two kernels, a sum by one: a sector each
    assert three["global_load_sectors"] == 3 * once + maxima_and_sums
    assert (fused["global_load_sectors"], online["global_load_sectors"]) == (once, 2 * once)
    assert fused["global_store_sectors"] == online["global_store_sectors"] == once
    assert three["global_store_sectors"] == once + 2 * 16
    assert (three["launches"], fused["launches"], online["launches"]) == (3, 1, 1)


def test_softmax_of_a_row_too_wide_for_the_registers_is_the_online_one(counted):
    inputs = softmax.draw({"B": 1, "H": 1, "T": 2, "S": 512}, torch.float32, CPU)
    assert counted(softmax, "triton", inputs, BN=256)["global_load_sectors"] == 2 * sectors(2, 512)
    with pytest.raises(device.LimitError, match="registers"):
        softmax.versions["triton"](torch.zeros(1, 1 << 14), BN=1 << 14, warps=1)


@pytest.mark.parametrize("name", ["triton_three_pass", "triton", "triton_online"])
def test_softmax_reads_little_of_what_the_mask_hides(name, counted):
    inputs = softmax.draw({"B": 1, "H": 1, "T": 128, "S": 128, "causal": 1}, torch.float32, CPU)
    whole = counted(softmax, name, {**inputs, "causal": False}, BN=128)["global_load_sectors"]
    causal = counted(softmax, name, inputs, BN=128)["global_load_sectors"]
    assert 0.5 < causal / whole < 0.6  # half of it, and up to 15 columns a row, with which loads stay 16 bytes wide


def test_short_rows_share_a_program_when_there_are_enough():
    full = 2 * device.card().sms  # programs of 32 warps, of which two fill an SM
    for rows, programs in ((4 * full, full), (full, full), (3, 3)):
        softmax.versions["triton"](torch.randn(rows, 16), warps=32)
        assert simulate.last().grid[0] == programs
        layernorm.versions["triton"](torch.randn(rows, 16), torch.ones(16), torch.ones(16), warps=32)
        assert simulate.last().grid[0] == programs
    softmax.versions["triton"](torch.randn(4 * full, 16), BN=32, warps=32)  # two rows fill a program
    assert simulate.last().grid[0] == 2 * full


@pytest.mark.parametrize("name", ["triton_three_pass", "triton", "triton_online"])
def test_softmax_of_extreme_rows(name):
    top = torch.finfo(torch.float32).max
    x = torch.stack((torch.full((40,), -math.inf), torch.full((40,), -top), torch.full((40,), top)))
    x[2, 20:] = -top
    out = softmax.versions[name](x, BN=16, warps=1)
    assert out[0].eq(0).all() and error(out[1], torch.full((40,), 1 / 40)) < 1e-6
    assert error(out[2], torch.tensor([1 / 20] * 20 + [0.0] * 20)) < 1e-6


def test_softmax_compiles_to_wide_loads_with_and_without_a_mask():
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    for causal in (False, True):
        arguments = (x, x, 8192, 1024, 1024, causal)
        made = inspect.compiled(softmax_ladder._softmax_kernel, arguments, "H200", BN=1024, BM=4, num_warps=8)
        assert made.features["vector_loads"] and made.features["vector_stores"] and not made.spills


# ---- layernorm


def test_layernorm_of_wide_rows_reads_twice(counted):
    inputs = layernorm.draw({"B": 1, "T": 4, "C": 512}, torch.float32, CPU)
    once, parameters = sectors(4, 512), 2 * sectors(512)
    assert counted(layernorm, "triton", inputs)["global_load_sectors"] == once + 4 * parameters
    assert counted(layernorm, "triton_two_pass", inputs, BC=128)["global_load_sectors"] == 2 * once + 4 * parameters


def test_a_residual_costs_no_trip_of_its_own(counted):
    inputs = residual_layernorm.draw({"B": 1, "T": 4, "C": 512}, torch.float32, CPU)
    once, parameters = sectors(4, 512), 4 * 2 * sectors(512)
    apart = counted(residual_layernorm, "triton_two_kernels", inputs)
    fused = counted(residual_layernorm, "triton", inputs)
    assert (apart["launches"], fused["launches"]) == (2, 1)
    assert (apart["global_load_sectors"], apart["global_store_sectors"]) == (3 * once + parameters, 2 * once)
    assert (fused["global_load_sectors"], fused["global_store_sectors"]) == (2 * once + parameters, once)
    keeps = counted(residual_layernorm, "triton", {**inputs, "keep_sum": True})
    assert (keeps["global_load_sectors"], keeps["global_store_sectors"]) == (2 * once + parameters, 2 * once)


@pytest.mark.parametrize("name", residual_layernorm.versions)
@pytest.mark.parametrize("shape", residual_layernorm.shapes, ids=str)
def test_residual_layernorm_agrees_with_the_reference(name, shape):
    for dtype, tolerance in residual_layernorm.tolerance.items():
        inputs = residual_layernorm.draw(shape, dtype, CPU)
        out = residual_layernorm.versions[name](**inputs)
        assert error(out, residual_layernorm.reference(**inputs)) <= tolerance


@pytest.mark.parametrize("name", ["triton", "triton_two_pass"])
def test_layernorm_keeps_its_digits_beside_a_large_mean(name):
    """Lanes see different numbers of columns, and E[x^2] - mean^2 would have no correct digit."""
    inputs = layernorm.draw({"B": 1, "T": 2, "C": 1000}, torch.float32, CPU)
    inputs["x"] += 1e4
    tile = {"BC": 64, "warps": 1} if name == "triton_two_pass" else {}
    assert error(layernorm.versions[name](**inputs, **tile), layernorm.reference(**inputs)) < 2e-3


def test_residual_layernorm_refuses_what_does_not_fit():
    inputs = residual_layernorm.draw({"B": 1, "T": 2, "C": 16}, torch.float32, CPU)
    for spoilt in ({"residual": inputs["residual"][:, :1]}, {"residual": inputs["residual"].half()}, {"x": 1.0}):
        for name in ("triton_two_kernels", "triton", "triton_two_pass"):
            with pytest.raises(InputError):
                residual_layernorm.versions[name](**{**inputs, **spoilt})


# ---- matmul


def test_grouped_tiles_load_the_same_and_share_more_at_any_time(counted):
    a, w = torch.randn(128, 16), torch.randn(16, 256)
    naive = counted(matmul, "triton_naive", {"a": a, "w": w}, **SMALL)
    grouped = counted(matmul, "triton_grouped", {"a": a, "w": w}, **SMALL)
    assert naive["global_load_sectors"] == grouped["global_load_sectors"]

    def distinct_tiles(group):  # of a and w, that the first 16 of 128 programs load: one wave of a card of 16 SMs
        out = torch.empty(128, 256)
        wave = simulate.run(
            matmul_ladder._matmul_kernel, 16, None, a, w, None, None, out, 128, 256, 16, *a.stride(), *w.stride(), 0, 0,
            GELU=False, BM=16, BN=16, BK=16, GROUP=group, num_warps=1,
        )  # fmt: skip
        return wave.counters["global_load_unique_bytes"] / (16 * 16 * 4)

    assert distinct_tiles(1) == 1 + 16  # one row of tiles
    assert distinct_tiles(8) == 8 + 2


def test_the_pipeline_is_copies_ahead_and_descriptors_are_the_copy_engine():
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    pointers = (x, x, None, None, x, 512, 512, 512, 512, 1, 512, 1, 512, 1)
    tile = {"GELU": False, "BM": 64, "BN": 64, "BK": 64, "num_warps": 4}
    one, four = (
        inspect.compiled(matmul_ladder._matmul_kernel, pointers, "H200", **tile, num_stages=stages) for stages in (1, 4)
    )
    described = (x, x, None, None, x, 512, 512, 512, 512, 512, 0)
    engine = inspect.compiled(
        triton_persistent._matmul_persistent_kernel,
        described, "H200", **tile, COLUMNS=False, GROUP=8, num_stages=4,
    )  # fmt: skip
    assert one.features["async_copies"] == 0 < four.features["async_copies"]
    assert engine.features["async_copies"] == 0 < engine.features["tma"]
    assert all(made.features["wgmma"] and not made.spills for made in (one, four, engine))
    assert engine.registers < four.registers and one.shared < four.shared
    for made, module in ((one, matmul_ladder), (four, matmul_ladder)):
        stages = 1 if made is one else 4
        assert made.shared == module.shared_bytes(64, 64, 64, 4, stages, torch.bfloat16)
    barriers = 64
    assert engine.shared <= triton_persistent.shared_bytes(64, 64, 64, 4, 4, torch.bfloat16) + barriers
    occupancy = inspect.occupancy(128, engine.registers, engine.shared, "H200").blocks
    assert triton_persistent.programs_per_sm(64, 64, 64, 4, 4, torch.bfloat16) == occupancy


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, True])
def test_the_large_tile_fits_with_its_whole_epilogue(columns):
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    made = inspect.compiled(
        triton_persistent._matmul_persistent_kernel, (x, x, x, x, x, 2048, 4096, 4096, 4096, 4096, 4096), "H200",
        COLUMNS=columns, GELU=True, BM=128, BN=256, BK=64, GROUP=8, num_warps=8, num_stages=4,
    )  # fmt: skip
    assert made.features["wgmma"] and made.features["tma"] and not made.spills


def engine_ran() -> bool:
    """Was the last launch the one with descriptors, and not matmul's?"""
    return reports.last().kernel == "_matmul_persistent_kernel"


@pytest.mark.parametrize("epilogue", [{}, {"bias": 1, "gelu": 1}, {"bias": 1, "residual": 1}], ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_persistent_programs_walk_over_tiles(epilogue, columns, monkeypatch):
    card = replace(device.card("H200"), sms=3)
    monkeypatch.setattr(device, "card", lambda name=None: card)
    monkeypatch.setattr(triton_persistent, "programs_per_sm", lambda *_: 1)
    inputs = matmul.draw({"M": 75, "N": 136, "K": 72, **epilogue}, torch.bfloat16, CPU)
    if columns:
        inputs["w"] = inputs["w"].T.contiguous().T
    out = matmul.versions["triton_persistent"](**inputs, BM=16, BN=32, BK=16, warps=1, stages=2)
    assert error(out, matmul.reference(**inputs)) <= matmul.tolerance[torch.bfloat16]
    assert engine_ran() and reports.last().grid[0] == 3  # for 25 tiles


@pytest.mark.parametrize(
    "M, N, K, dtype, engine",
    [
        (33, 64, 40, torch.float16, True),
        (1, 64, 40, torch.bfloat16, True),  # one row: its stride says nothing
        (33, 64, 41, torch.bfloat16, False),  # rows of a begin at odd places
        (33, 61, 40, torch.bfloat16, False),  # rows of w and of the output do
        (33, 64, 40, torch.float32, False),
        (33, 64, 0, torch.bfloat16, False),
    ],
)
def test_persistent_takes_what_descriptors_describe_and_leaves_the_rest_to_matmul(M, N, K, dtype, engine):
    inputs = matmul.draw({"M": M, "N": N, "K": K, "bias": 1, "residual": 1}, dtype, CPU)
    out = matmul.versions["triton_persistent"](**inputs, BM=16, BN=32, BK=16, warps=1)
    assert error(out, matmul.reference(**inputs)) <= matmul.tolerance[dtype]
    assert engine_ran() == engine


def test_persistent_reads_slices_in_place():
    inputs = matmul.draw({"M": 20, "N": 48, "K": 40, "residual": 1}, torch.bfloat16, CPU)
    wanted = matmul.reference(**inputs)
    for name, first, engine in (("a", 8, True), ("w", 8, True), ("residual", 8, True), ("w", 3, False)):
        whole = torch.full((inputs[name].shape[0], 128), math.nan, dtype=torch.bfloat16)
        part = whole[:, first : first + inputs[name].shape[1]].copy_(inputs[name])
        out = matmul.versions["triton_persistent"](**{**inputs, name: part}, BM=16, BN=32, BK=16, warps=1)
        assert error(out, wanted) <= matmul.tolerance[torch.bfloat16]
        assert engine_ran() == engine, (name, first)


def test_persistent_leaves_the_allocator_of_its_caller():
    from triton.runtime import _allocation

    def mine(size, alignment, stream):
        raise AssertionError("the caller's allocator is the caller's")

    before = _allocation._allocator.get()
    triton.set_allocator(mine)
    try:
        x = torch.ones(32, 32, dtype=torch.float16)
        matmul.versions["triton_persistent"](x, x, BM=16, BN=32, BK=16, warps=1)
        assert _allocation._allocator.get() is mine
    finally:
        triton.set_allocator(before)


@pytest.mark.parametrize("name", ["triton_naive", "triton_persistent"])
def test_an_epilogue_stores_nothing_of_its_own(name, counted):
    drawn = matmul.draw({"M": 32, "N": 64, "K": 32, "bias": 1, "gelu": 1, "residual": 1}, torch.bfloat16, CPU)
    plain = {**drawn, "bias": None, "activation": None, "residual": None}
    tile = {**SMALL, "BN": 64}  # a quarter of which is 32 bytes wide
    without, with_all = (counted(matmul, name, inputs, **tile) for inputs in (plain, drawn))
    assert without["global_store_sectors"] == with_all["global_store_sectors"] == sectors(32, 64, itemsize=2)
    bias, residual = 2 * sectors(64, itemsize=2), sectors(32, 64, itemsize=2)
    assert with_all["global_load_sectors"] - without["global_load_sectors"] == bias + residual


# ---- matvec


def test_matvec_reads_the_weights_once_and_split_k_adds_parts_and_tickets(counted):
    inputs = matvec.draw({"M": 1, "N": 128, "K": 256}, torch.float32, CPU)
    weights = sectors(256, 128)
    whole = counted(matvec, "triton", inputs, BN=64, BK=16)
    split = counted(matvec, "triton_split_k", inputs, BN=64, BK=16, splits=4)
    assert whole["global_load_unique_bytes"] == 4 * (256 * 128 + 256)
    assert whole["global_load_sectors"] == weights + 2 * sectors(256)
    parts = 4 * sectors(128)
    assert split["global_load_sectors"] == whole["global_load_sectors"] + parts
    assert split["global_store_sectors"] == whole["global_store_sectors"] + parts + 2  # and two tickets put back
    assert (whole["atomics"], split["atomics"]) == (0, 2 * 4)


@pytest.mark.parametrize("name", ["triton", "triton_split_k"])
@pytest.mark.parametrize("M, dtype, strided", [(1, torch.bfloat16, 1), (3, torch.float16, 0), (8, torch.float32, 1)])
def test_matvec_agrees_with_the_reference(name, M, dtype, strided):
    shape = {"M": M, "N": 37, "K": 67, "bias": 1, "gelu": 1, "residual": 1, "strided": strided}
    inputs = matvec.draw(shape, dtype, CPU)
    tiles = [{"BN": 16, "BK": 32}, {"BN": 8, "BK": 128, "warps": 1, "stages": 3}]
    for tile in tiles:
        out = matvec.versions[name](**inputs, **tile)
        assert error(out, matvec.reference(**inputs)) <= matvec.tolerance[dtype]
        assert torch.equal(out, matvec.versions[name](**inputs, **tile))  # tickets are back at 0; the order is one


@pytest.mark.parametrize("shape", matvec.shapes, ids=str)
def test_matvec_with_its_own_tile(shape):
    for name in matvec.versions:
        inputs = matvec.draw(shape, torch.float32, CPU)
        assert error(matvec.versions[name](**inputs), matvec.reference(**inputs)) <= matvec.tolerance[torch.float32]


def test_matvec_refuses_many_rows_and_a_tile_too_large():
    inputs = matvec.draw({"M": 9, "N": 4, "K": 4}, torch.float32, CPU)
    for name in ("triton", "triton_split_k"):
        with pytest.raises(InputError, match="9 rows"):
            matvec.versions[name](**inputs)
        few = {**inputs, "a": inputs["a"][:1]}
        with pytest.raises(device.LimitError, match="registers"):
            matvec.versions[name](**few, BN=256, BK=256, warps=1)
        with pytest.raises(InputError, match="BN=24"):
            matvec.versions[name](**few, BN=24)
    with pytest.raises(InputError, match="splits=3"):
        matvec.versions["triton_split_k"](**few, splits=3)


@pytest.mark.parametrize("columns", [False, True])
def test_matvec_compiles_to_wide_loads_or_to_a_ring_of_copies(columns):
    x, scratch = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64)
    strides = (1, 4096) if columns else (4096, 1)
    arguments = (x, x, None, None, x, scratch, scratch.int(), 1, 4096, 4096, 4096, 1, *strides, 0, 0)
    tile = {"BN": 2, "BK": 2048} if columns else {"BN": 256, "BK": 16}
    loads, ring = (
        inspect.compiled(
            matvec_ladder._matvec_split_k_kernel, arguments, "H200",
            GELU=False, SPLITS=4, BM=1, **tile, STAGES=stages, num_warps=4,
        )
        for stages in (1, 3)
    )  # fmt: skip
    assert loads.features["vector_loads"] >= 4 and "evict_first" in loads.ptx and not loads.features["async_copies"]
    assert ring.features["async_copies"] and ring.shared >= matvec_ladder.shared_bytes(
        **tile, warps=4, stages=3, dtype=torch.bfloat16
    )
    assert not loads.spills and not ring.spills
