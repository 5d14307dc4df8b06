"""attention: each version changes one thing, and that shows in what is counted or in what is compiled."""

import pytest
import torch

from gpukern import device, inspect, simulate
from gpukern.kernels import OPS, tickets
from gpukern.kernels.attention import attention
from gpukern.kernels.attention.triton_descriptors import _attention_descriptors_kernel
from gpukern.kernels.attention.triton_ladder import _attention_flash_kernel
from gpukern.kernels.attention.triton_split_kv import _attention_split_kv_kernel
from gpukern.op import FLOATS, InputError, error

DEVICE = device.torch_device()
OURS = [name for name, version in attention.versions.items() if version.language == "triton"]
FLASH = [name for name in OURS if name != "triton"]
counted = pytest.mark.skipif(not device.simulated(), reason="counted on the simulated GPU")


def run(version: str, inputs: dict, **tile):
    return attention.versions[version](**inputs, **tile)


def right(version: str, shape: dict, dtype=torch.float32, **tile) -> None:
    inputs = attention.draw(shape, dtype, DEVICE)
    out = run(version, inputs, **tile)
    assert error(out, attention.reference(**inputs)) <= attention.tolerance[dtype], (version, shape)


# ---- Right on what users have


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ["torch", *OURS])
def test_heads_of_q_share_heads_of_k_and_v(name, dtype):
    for H, H_kv, T, S in ((4, 1, 1, 19), (6, 2, 5, 23), (6, 3, 7, 4), (3, 1, 9, 9)):
        right(name, {"B": 2, "H": H, "H_kv": H_kv, "T": T, "S": S, "D": 16, "causal": 1}, dtype)
    right(name, {"B": 1, "H": 4, "H_kv": 2, "T": 3, "S": 18, "D": 32, "strided": 1}, dtype)


@pytest.mark.parametrize("name", ["torch", *OURS])
def test_heads_that_cannot_be_shared_evenly_are_refused(name):
    inputs = attention.draw({"B": 1, "H": 3, "H_kv": 2, "T": 1, "S": 5, "D": 16}, torch.float32, DEVICE)
    with pytest.raises((InputError, RuntimeError)):
        run(name, inputs)


@pytest.mark.parametrize("name", FLASH)
def test_sizes_around_a_tile_and_chunks_onto_a_cache(name):
    tile = {"BM": 32, "BN": 16} if "BM" in attention.versions[name].tile else {"BN": 16, "splits": 4}
    for T, S in ((1, 15), (1, 16), (1, 65), (31, 33), (33, 33), (17, 47), (40, 17)):
        right(name, {"B": 1, "H": 1, "T": T, "S": S, "D": 16, "causal": 1}, **tile)
    right(name, {"B": 1, "H": 1, "T": 17, "S": 33, "D": 128}, **tile)


@pytest.mark.parametrize("name", FLASH)
def test_rows_that_see_nothing_are_zero_and_large_scores_stay_right(name):
    inputs = attention.draw({"B": 1, "H": 2, "T": 9, "S": 4, "D": 16, "causal": 1}, torch.float32, DEVICE)
    inputs["q"] *= 1e4  # scores of many thousands: exp of them is inf, of their differences it is not
    out = run(name, inputs)
    assert out[:, :5].eq(0).all() and out.isfinite().all()
    assert error(out, attention.reference(**inputs)) < 1e-3
    inputs["q"] = inputs["q"] * 0 - 1e30  # scores near the lowest of float32
    inputs["k"] = inputs["k"].abs()
    assert run(name, inputs)[:, 5:].isfinite().all()
    assert run(name, {**inputs, "k": inputs["k"][:, :, :0], "v": inputs["v"][:, :, :0]}).eq(0).all()


@pytest.mark.parametrize("name", FLASH)
def test_rows_that_are_not_where_a_descriptor_wants_them_are_right_or_refused(name):
    inputs = attention.draw({"B": 1, "H": 2, "T": 3, "S": 9, "D": 16, "causal": 1}, torch.float32, DEVICE)
    apart = torch.zeros(1, 2, 9, 17, device=DEVICE)[..., :16]
    apart.copy_(inputs["k"])
    changed = {**inputs, "k": apart}
    if "descriptors" in name:
        with pytest.raises(InputError, match="multiples of 16 bytes"):
            run(name, changed)
    else:
        assert error(run(name, changed), attention.reference(**inputs)) <= attention.tolerance[torch.float32]


# ---- What each version changes


def report_of(version: str, inputs: dict, **tile):
    """The report of a version that is one launch."""
    run(version, inputs, **tile)
    return simulate.last()


@counted
def test_flash_does_not_move_the_scores():
    inputs = attention.draw({"B": 1, "H": 1, "T": 64, "S": 64, "D": 16, "causal": 1}, torch.float32, DEVICE)
    flash = report_of("triton_flash", inputs, BM=64, BN=16).counters
    scores = OPS["scores"].versions["triton"](inputs["q"], inputs["k"])
    assert simulate.last().counters["global_store_unique_bytes"] == scores.nbytes == 64 * 64 * 4
    assert flash["global_store_unique_bytes"] == 64 * 16 * 4  # the output alone
    assert flash["global_load_unique_bytes"] == 3 * 64 * 16 * 4  # q, k and v, each once


@counted
def test_descriptors_move_the_same_bytes():
    inputs = attention.draw({"B": 1, "H": 2, "T": 48, "S": 48, "D": 16, "causal": 1}, torch.float32, DEVICE)
    flash, descriptors = (report_of(v, inputs, BM=16, BN=16).counters for v in FLASH[:2])
    for name in ("global_load_unique_bytes", "global_store_unique_bytes", "global_load_sectors"):
        assert flash[name] == descriptors[name]


def heads(D: int, T: int = 256, dtype=torch.bfloat16) -> tuple:
    """Arguments of the flash kernels, to compile them for."""
    q, k, v = (torch.zeros(1, 2, T, D, dtype=dtype) for _ in "qkv")
    strides = [n for x in (q, k, v) for n in x.stride()[:3]]
    return q, k, v, torch.zeros(1, T, 2 * D, dtype=dtype), 2, 1, T, T, 0.1, *strides


def test_descriptors_leave_the_loads_to_the_copy_engine():
    tile = {"CAUSAL": True, "BM": 128, "BN": 64, "D": 128, "num_warps": 8, "num_stages": 3}
    flash = inspect.compiled(_attention_flash_kernel, heads(128), "H200", **tile)
    descriptors = inspect.compiled(_attention_descriptors_kernel, heads(128), "H200", **tile)
    assert flash.features["tma"] == 0 < flash.features["async_copies"]
    assert descriptors.features["async_copies"] == 0 < descriptors.features["tma"]
    assert descriptors.registers < flash.registers and descriptors.spills == flash.spills == 0
    assert descriptors.features["wgmma"] == flash.features["wgmma"] > 0


@counted
def test_split_kv_starts_a_program_for_every_part_and_combines_in_the_same_launch():
    inputs = attention.draw({"B": 1, "H": 3, "T": 1, "S": 130, "D": 16, "causal": 1}, torch.float32, DEVICE)
    flash, split = (
        report_of("triton_flash", inputs, BM=16, BN=16),
        report_of("triton_split_kv", inputs, BN=16, splits=4),
    )
    assert (flash.grid, split.grid) == ((3, 1, 1), (12, 1, 1))
    assert (flash.counters["atomics"], split.counters["atomics"]) == (0, 12)
    parts = 3 * 4 * (16 + 2) * 4  # a sum of D, the largest score and the total, in float32, of each part
    more = split.counters["global_store_unique_bytes"] - flash.counters["global_store_unique_bytes"]
    assert more == parts + 3 * 4  # and the counters that are set back
    assert not tickets._pool(DEVICE).counters.any()


@counted
def test_grouped_heads_are_read_once_for_the_group():
    shape = {"B": 1, "H": 8, "T": 1, "S": 64, "D": 16, "causal": 1}
    alone, shared = (
        report_of("triton_split_kv", attention.draw({**shape, **more}, torch.float32, DEVICE), BN=16, splits=2)
        for more in ({}, {"H_kv": 2})
    )
    cache = 2 * 64 * 16 * 4 // simulate.report.SECTOR  # sectors of one head of k and v
    assert alone.counters["global_load_sectors"] - shared.counters["global_load_sectors"] == (8 - 2) * cache


@counted
def test_split_kv_is_free_of_races_and_writes_all():
    q = torch.randn(1, 2, 1, 16)
    k, v = torch.randn(2, 1, 2, 50, 16)
    out, acc = torch.empty(1, 1, 32), torch.empty(2, 4, 16, 16)
    top, total, ticket = torch.empty(2, 4, 16), torch.empty(2, 4, 16), torch.zeros(2, dtype=torch.int32)
    report = simulate.run(
        _attention_split_kv_kernel, 8, None, q, k, v, out, acc, top, total, ticket, 2, 1, 1, 50, 0.25,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], CAUSAL=True, SPLITS=4, BN=16, D=16,
        inputs=("q_ptr", "k_ptr", "v_ptr"), outputs=("out_ptr",),
    )  # fmt: skip
    assert report.faults == []


def test_tickets_differ_from_launch_to_launch_and_run_out_with_a_word():
    first, second = tickets.tickets(5), tickets.tickets(7)
    assert first.data_ptr() + 5 * 4 <= second.data_ptr() or second.data_ptr() + 7 * 4 <= first.data_ptr()
    with pytest.raises(device.LimitError, match="Use fewer splits"):
        tickets.tickets(1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", FLASH)
def test_long_sequences_on_the_card(name, D):
    for T, S in ((1, 4099), (513, 2048), (1000, 1000)):
        right(name, {"B": 1, "H": 4, "H_kv": 2, "T": T, "S": S, "D": D, "causal": 1}, torch.bfloat16)
