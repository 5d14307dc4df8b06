"""measure: a wrong kernel is never timed, rows keep where they come from, nothing unrecorded is made up."""

import dataclasses
import json
import math

import pytest
import torch

from gpukern import device, measure, record
from gpukern.kernels import OPS
from gpukern.layer import CONFIGS, PLANS, Config, Layer, Part, Plan, Step
from gpukern.measure import LayerBench, NotRecorded, Row, Timing, layers, recordings
from gpukern.op import InputError, Op, Version, error

SMALL = Config("small", C=32, H=2, F=48)
STEP = Step(1, 4, 4)


# ---- The error, and the check


def test_error_sees_one_wrong_element_among_a_million():
    ref = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    out = ref.clone()
    out[517, 3] += 1.0
    assert error(ref, ref) == 0.0
    assert error(out, ref) > 0.2


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_error_of_a_value_that_is_no_number_is_infinite(wrong):
    assert error(torch.tensor([1.0, wrong]), torch.tensor([1.0, 2.0])) == math.inf
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, wrong])) == math.inf
    assert error(torch.tensor([1.0, wrong]), torch.tensor([1.0, wrong])) == 0.0


def test_error_of_nothing_is_zero_and_of_zeros_must_be_exact():
    assert error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    assert error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert error(torch.full((3,), 1e-30), torch.zeros(3)) == math.inf


def test_error_compares_shapes_and_tuples():
    with pytest.raises(InputError, match="shape"):
        error(torch.zeros(2), torch.zeros(3))
    with pytest.raises(InputError, match="2 tensors"):
        error((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)))
    assert error((torch.zeros(2), torch.ones(2)), (torch.zeros(2), torch.zeros(2))) == math.inf


def forgets_the_end(x, y):
    out = torch.empty_like(x)
    out[:-1] = x[:-1] + y[:-1]
    return out


def with_version(launcher: str) -> Op:
    op = OPS["vector_add"]
    return dataclasses.replace(op, versions={**op.versions, "tried": Version("torch", launcher)})


def test_a_version_that_leaves_an_element_unwritten_fails_its_check():
    x = torch.ones(4096)
    right = forgets_the_end(x, x)  # its memory may well hold the right answer: that of whoever had it before
    del right
    op = with_version(f"{__name__}:forgets_the_end")
    verdict = measure.check(op, "tried", {"N": 4096}, torch.float32)
    assert not verdict.ok and verdict.error == math.inf
    assert "WRONG" in str(verdict)
    assert measure.check(op, "torch", {"N": 4096}, torch.float32).ok


def test_poison_ends_with_the_check():
    with measure.poisoned():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
        torch.empty(3, dtype=torch.int32)  # has no NaN, and is left alone
        assert torch.empty(3, requires_grad=True).isnan().all()
    assert torch.empty.__name__ == "empty"


# ---- Timing


@pytest.mark.skipif(not device.simulated(), reason="on a card times are measured")
def test_without_a_card_a_time_is_refused_not_invented():
    with pytest.raises(device.DeviceError, match="does not time"):
        measure.time([lambda: None])
    with pytest.raises(device.DeviceError, match="recording needs a CUDA card"):
        record.record("tiles", print)


@pytest.mark.gpu
def test_a_copy_is_timed_within_what_the_card_can_do():
    n = 1 << 28
    x = torch.randn(n, device="cuda")
    y = torch.empty_like(x)
    timing = measure.time([lambda: y.copy_(x)])
    rate = 2 * 4 * n / timing.median_us * 1e6
    assert 0.5 < rate / device.card().bandwidth < 1.0
    assert timing.low_us <= timing.median_us <= timing.high_us and "graph" in timing.method


@pytest.mark.gpu
def test_small_work_is_timed_cold():
    """16 MB that stay in L2 are read faster than HBM allows; rotated past L2 they are not."""
    copies = [torch.randn(1 << 22, device="cuda") for _ in range(measure.timing.copies_past_l2(4 << 22))]
    cold = measure.time([lambda x=x: x.sum() for x in copies]).median_us
    hot = measure.time([copies[0].sum] * len(copies)).median_us
    assert len(copies) > 4 and hot < cold
    assert (4 << 22) / cold * 1e6 < device.card().bandwidth


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_with_events():
    x = torch.ones(1 << 20, device="cuda")
    timing = measure.time([lambda: x.sum().item()])
    assert "events" in timing.method and timing.median_us > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_measured_part_by_part(name):
    layer = Layer.random("tiny", torch.bfloat16)
    rows = measure.plan_rows(layer, PLANS[name], Step(1, 32, 32))
    assert [row.part for row in rows] == [*(part.name for part in PLANS[name].at(Step(1, 32, 32)).parts), "all"]
    for row in rows:
        assert (row.status, row.source, row.card) == ("ok", "measured", device.card().name)
        assert row.error <= row.tolerance and row.time_us > 0


# ---- Rows of a layer, with the card's clock replaced so that any machine runs it


@pytest.fixture
def clock(monkeypatch):
    """Times of 100 us for whatever runs; a list of how often it was asked."""
    asked = []

    def time(runs, budget_ms=0):
        asked.append(len(runs))
        for run in runs:
            run()
        return Timing(100.0, 99.0, 101.0, "test clock", None)

    monkeypatch.setattr(layers, "time", time)
    return asked


def test_a_part_is_checked_then_timed_and_the_row_says_all(clock):
    layer = Layer.random(SMALL)
    row = LayerBench(layer, STEP).row(Part(("mlp_up",), "triton", {"BM": 16, "BN": 16, "BK": 16}), "triton")
    assert (row.status, row.time_us, row.method, row.source) == ("ok", 100.0, "test clock", device.mode())
    assert row.error <= row.tolerance and row.launches == 1
    assert (row.M, row.N, row.K) == (4, 48, 32) and row.tile["BN"] == 16
    cost = layer.part_cost(Part(("mlp_up",), "triton"), STEP)
    assert (row.bytes, row.flops) == (cost.bytes, cost.flops)
    assert row.share == pytest.approx(1e6 * max(cost.flops / 67e12, cost.bytes / 4.8e12) / 100)


def test_a_wrong_part_is_never_timed(clock, monkeypatch):
    op = OPS["matmul"]
    versions = {**op.versions, "off": Version("torch", f"{__name__}:matmul_without_bias")}
    monkeypatch.setitem(OPS, "matmul", dataclasses.replace(op, versions=versions))
    row = LayerBench(Layer.random(SMALL), STEP).row(Part(("mlp_down",), "off"))
    assert row.time_us is None and row.status.startswith("WRONG") and row.error > row.tolerance
    assert clock == []


def matmul_without_bias(a, w, bias=None, activation=None, residual=None):
    return OPS["matmul"].versions["torch"](a, w, None, activation, residual)


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        ({"BM": 48, "BN": 16, "BK": 16}, "power of two"),
        ({"BM": 16, "BN": 16, "BK": 8}, "tl.dot"),
        ({"BM": 256, "BN": 256, "BK": 128, "stages": 4}, "shared memory"),
    ],
)
def test_a_refused_tile_is_a_row_that_says_why(clock, tile, why):
    row = LayerBench(Layer.random(SMALL), STEP).row(Part(("mlp_up",), "triton", tile))
    assert row.time_us is None and row.status.startswith("refused") and why in row.status


def test_the_qkv_rows_of_the_cache_are_checked_and_then_given_back(clock):
    layer = Layer.random(SMALL)
    bench = LayerBench(layer, Step(1, 1, 6))
    assert bench.row(Part(("qkv",), "torch")).status == "ok"
    for _, state in bench._copies:
        assert state["k"].isfinite().all() and state["v"].isfinite().all()


@pytest.mark.slow
def test_a_whole_plan_is_checked_end_to_end(clock):
    layer = Layer.random(SMALL)
    rows = [LayerBench(layer, STEP).whole(PLANS[name]) for name in ("reference", "flash")]
    assert [row.status for row in rows] == ["ok", "ok"]
    assert [row.launches for row in rows] == [None, 6]
    assert rows[0].bytes > rows[1].bytes and rows[0].flops == rows[1].flops


def test_a_bandwidth_above_the_cards_is_flagged_and_not_shown(clock):
    layer = Layer.random("gpt2", torch.bfloat16)
    bench = LayerBench(layer, Step(1, 1, 64))
    row = bench._blank("qkv", "torch", 10 * 10**9, 1, "")  # 10 GB in 100 us
    row = bench._timed(row, Timing(100.0, 99.0, 101.0, "test clock", None))
    assert row.time_us is None and "100000 GB/s is more than the 4800 GB/s" in row.status


# ---- Recordings


def rows_of(card: str, n: int) -> list[Row]:
    kind = {"sweep": "s", "config": "c", "part": "qkv", "version": "v", "dtype": "bfloat16"}
    sizes = {"B": 1, "T": 1, "S": 2, "C": 4, "H": 1, "F": 8}
    return [
        Row(**kind, **sizes, BM=16, time_us=1.5 * i + 1, card=card, date="2026-01-02", status="ok, it, is")
        for i in range(n)
    ]


def test_rows_survive_being_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.rows, "RECORDED", tmp_path)
    rows = rows_of("card A", 3) + rows_of("card B", 1)
    measure.write(tmp_path / "some-card", "s", rows)
    back = measure.read("s")
    assert [dataclasses.replace(row, source="measured") for row in back] == rows
    assert {row.source for row in back} == {"recorded"}
    assert list(measure.frame(back).columns) == [f.name for f in dataclasses.fields(Row)]
    measure.read.cache_clear()


def test_an_interrupted_recording_leaves_the_old_one(tmp_path, monkeypatch):
    measure.write(tmp_path, "s", rows_of("card A", 2))
    before = (tmp_path / "s.csv").read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measure.write(tmp_path, "s", rows_of("card A", 5))
    assert (tmp_path / "s.csv").read_bytes() == before


@pytest.mark.parametrize("sweep", ["tiles", "plans"])
def test_recorded_rows_are_whole_and_possible(sweep):
    rows = measure.read(sweep)
    card = device.card("H200")
    assert len(rows) > 1000 if sweep == "tiles" else len(rows) > 900
    for row in rows:
        assert row.card == "H200" and row.driver and row.torch and row.triton and row.date and row.source == "recorded"
        if row.status != "ok":
            assert row.time_us is None and row.status.startswith(("refused", "failed", "WRONG", "flagged"))
            continue
        assert 0 < row.low_us <= row.time_us <= row.high_us
        assert row.error <= row.tolerance
        dtype = getattr(torch, row.dtype)
        assert row.share == pytest.approx(1e6 * card.bound(row.flops, row.bytes, dtype) / row.time_us, rel=1e-3)
        assert row.share <= 1.05, row  # nothing is faster than the card


def test_recorded_costs_are_those_that_the_plan_gives_today():
    for row in measure.read("plans"):
        if row.config == "trained" or row.part == "all":
            continue
        step = Step(row.B, row.T, row.S)
        costs = Layer.random(CONFIGS[row.config], getattr(torch, row.dtype)).costs(PLANS[row.plan].at(step), step)
        cost = next(c for c in costs if c.part.name == row.part)
        assert (row.bytes, row.flops) == (cost.bytes, cost.flops)


def test_every_config_has_every_plan_in_both_phases():
    for name in (*CONFIGS, "trained"):
        dtype = "float32" if name in ("tiny", "trained") else "bfloat16"
        for phase in ("prefill", "decode"):
            steps = measure.recorded_plan_steps(name, phase, dtype)
            assert len(steps) >= 2, (name, phase)
            for plan in PLANS:
                for B, T, S in steps:
                    rows = measure.recorded_plan(name, plan, Step(B, T, S), dtype)
                    assert [r.part for r in rows] == [*(p.name for p in PLANS[plan].at(Step(B, T, S)).parts), "all"]


def test_what_was_not_recorded_says_so_and_offers_the_nearest():
    with pytest.raises(
        NotRecorded, match="B=1 T=500 S=500 was not recorded; the nearest is B=1 T=512 S=512"
    ) as missing:
        measure.recorded_plan("gpt2", "flash", Step(1, 500, 500), torch.bfloat16)
    assert missing.value.nearest.T == 512
    with pytest.raises(NotRecorded, match="nothing like it"):
        measure.recorded_plan("gpt2", "flash", Step(1, 512, 512), torch.float16)
    tile = {"BM": 128, "BN": 256, "BK": 64, "warps": 8, "stages": 5}
    with pytest.raises(NotRecorded, match="stages=5.*the nearest is BM=128 BN=256 BK=64 warps=8 stages=4"):
        measure.recorded_tile("c4096", "qkv", Step(1, 2048, 2048), torch.bfloat16, "triton", tile)


def test_rows_of_two_cards_are_not_mixed(monkeypatch):
    ours = measure.recorded_plan("gpt2", "flash", Step(1, 512, 512), "bfloat16")
    others = [dataclasses.replace(row, card="another card", time_us=1.0) for row in ours]
    monkeypatch.setattr(recordings, "read", lambda sweep: (*others, *ours))
    assert measure.recorded_plan("gpt2", "flash", Step(1, 512, 512), "bfloat16") == ours
    monkeypatch.setattr(recordings, "read", lambda sweep: tuple(others))
    assert {row.card for row in measure.recorded_plan("gpt2", "flash", Step(1, 512, 512), "bfloat16")} == {
        "another card"
    }


@pytest.mark.skipif(not device.simulated(), reason="on a card the same calls measure")
def test_without_a_card_the_same_calls_give_recorded_rows():
    layer = Layer.random("c4096", torch.bfloat16)
    rows = measure.plan_rows(layer, PLANS["flash"], Step(1, 2048, 2048))
    assert rows[-1].source == "recorded" and rows[-1].time_us > 0
    row = measure.tile_row(layer, Part(("qkv",), "triton"), Step(1, 2048, 2048))
    assert row.source == "recorded" and row.tile == layer.tile(Part(("qkv",), "triton"), Step(1, 2048, 2048))
    assert "weights" not in vars(layer)


@pytest.mark.skipif(not device.simulated(), reason="on a card the same calls measure")
@pytest.mark.parametrize(
    ("layer", "plan"),
    [
        (Layer.random("gpt2", torch.bfloat16), PLANS["triton"].with_tile("qkv", {"BM": 32, "BN": 32})),
        (Layer.random("gpt2", torch.bfloat16), Plan("triton", PLANS["numba"].parts)),
        (Layer.random("gpt2", torch.bfloat16), Plan("triton", PLANS["flash"].parts)),
        (Layer.random(dataclasses.replace(SMALL, name="gpt2"), torch.bfloat16), PLANS["triton"]),
        (Layer.random(dataclasses.replace(CONFIGS["gpt2"], first_norm=True), torch.bfloat16), PLANS["triton"]),
    ],
    ids=["another tile", "other kernels", "another partition", "other sizes", "a first norm"],
)
def test_a_recorded_time_is_only_given_for_what_was_recorded(layer, plan):
    with pytest.raises(NotRecorded):
        measure.plan_rows(layer, plan, Step(1, 512, 512))


@pytest.mark.skipif(not device.simulated(), reason="on a card the same calls measure")
def test_a_recorded_tile_is_only_given_for_the_layer_that_was_recorded():
    part, step = Part(("mlp_up",), "triton"), Step(1, 1024, 1024)
    assert measure.tile_row(Layer.random("gpt2", torch.bfloat16), part, step).time_us > 0
    with pytest.raises(NotRecorded, match="C=32 H=2 F=48"):
        measure.tile_row(Layer.random(dataclasses.replace(SMALL, name="gpt2"), torch.bfloat16), part, step)


@pytest.mark.skipif(not device.simulated(), reason="on a card the same calls measure")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(("qkv",), "triton", {"BM": 0}), "BM=0 must be a whole number"),
        (Part(("qkv",), "triton", {"BM": -16}), "BM=-16 must be a whole number"),
        (Part(("qkv",), "triton", {"BM": "a"}), "BM='a' must be a whole number"),
        (Part(("qkv",), "triton", {"BX": 16}), "no tile size 'BX'; it has BM, BN"),
        (Part(("qkv",), "nope"), "no version 'nope'"),
        (Part(("mlp_up", "mlp_down"), "triton"), "no kernel runs mlp_up\\+mlp_down"),
    ],
)
def test_a_tile_that_is_none_is_refused(part, message):
    with pytest.raises(InputError, match=message):
        measure.tile_row(Layer.random("gpt2", torch.bfloat16), part, Step(1, 1024, 1024))


@pytest.mark.skipif(not device.simulated(), reason="on a card the same calls measure")
def test_nothing_made_without_a_card_says_that_it_was_measured():
    layer = Layer.random(SMALL)
    with pytest.raises(device.DeviceError, match="measured on a CUDA card"):
        next(measure.sweep_tiles(layer, [Part(("mlp_up",), "torch")], STEP))
    row = LayerBench(layer, STEP).row(Part(("mlp_up",), "torch"))
    assert (row.source, row.card, row.time_us) == ("counted", "simulated H200", None)


def test_a_layer_without_a_finite_answer_is_not_right(clock, monkeypatch):
    layer = Layer.random(SMALL)
    layer.weights.w_1[0, 0] = math.inf  # after the weights were checked; copies would be checked again
    monkeypatch.setattr(layers, "copies_past_l2", lambda *_, **__: 1)
    bench = LayerBench(layer, STEP)
    assert bench.row(Part(("mlp_up",), "torch")).status.startswith("WRONG: error inf")
    assert bench.whole(PLANS["reference"]).status.startswith("WRONG: error inf")
    assert clock == []


# ---- Limits


def test_the_formula_for_shared_memory_is_what_the_compiler_took():
    """In the recorded sweep, for every pipelined tile; one stage alone may take less (see `shared_bytes`)."""
    checked = 0
    for row in measure.read("tiles"):
        if row.shared is None or row.version == "torch" or row.stages == 1:
            continue
        op = {"qkv": "qkv", "scores+softmax+values": "attention"}.get(row.part, "matmul")
        sizes = {"D": row.C // row.H} if op == "attention" else {}
        version = OPS[op].versions[row.version]
        assert version.shared_bytes(row.tile, dtype=torch.bfloat16, on=device.card("H200"), **sizes) == row.shared, row
        checked += 1
    assert checked > 2000


def test_limits_name_what_an_impossible_tile_breaks():
    version = OPS["matmul"].versions["triton"]

    def broken(dtype=torch.bfloat16, card="H200", **tile):
        return [limit.name for limit in measure.tile_limits(version, tile, dtype, device.card(card)) if limit.broken]

    assert broken(BM=128, BN=256, BK=64, warps=8, stages=4) == []
    assert broken(BM=128, BN=256, BK=64, warps=8, stages=5) == ["shared memory a block"]
    assert broken(BM=128, BN=256, BK=64, warps=8, stages=4, card="RTX 4090") == ["shared memory a block"]
    assert broken(BM=256, BN=256, BK=16, warps=4, stages=2) == ["accumulator registers a thread"]
    whole = measure.tile_limits(version, {"BM": 256, "BN": 256}, torch.bfloat16)  # the rest by the version's default
    assert [limit.used for limit in whole if limit.name.startswith(("threads", "acc"))] == [256, 256]
    assert "threads a block" in broken(BM=64, BN=64, BK=32, warps=64, stages=2)
    threads = measure.tile_limits(OPS["matmul"].versions["numba"], {"BM": 64, "BN": 32, "BK": 8}, torch.float32)[0]
    numba = measure.tile_limits(OPS["matmul"].versions["numba"], {"BM": 16, "BN": 16, "BK": 512}, torch.float32)
    assert [str(limit) for limit in numba if limit.broken] == ["shared memory a block: 65,536 of 49,152 bytes"]
    assert threads.broken and str(threads) == "threads a block: 2,048 of 1,024 threads"


def test_waves_are_tiles_over_sms():
    assert measure.waves(2048, 12288, 1, {"BM": 128, "BN": 256}, device.card("H200")) == pytest.approx(16 * 48 / 132)
    assert measure.waves(1, 1, 1, {"BM": 128, "BN": 256}, device.card("T4")) == pytest.approx(1 / 40)


def test_a_sweep_or_job_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: False)
    with pytest.raises(InputError, match="known are tiles, plans"):
        record.record("speed", print)
    with pytest.raises(InputError, match="has 'gpt7' in its name"):
        record.record("plans", print, "gpt7")


def test_the_provenance_of_a_measurement_made_now():
    made = measure.provenance()
    card = f"simulated {device.card().name}" if device.simulated() else device.card().name
    assert made["torch"] == torch.__version__ and made["card"] == card
    json.dumps(made)
