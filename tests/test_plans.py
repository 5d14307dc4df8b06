"""plans: the fused parts and their kernels, the parts for decode, the one-kernel layer, graphs."""

import dataclasses

import pytest
import torch

from gpukern import device, inspect, measure, simulate
from gpukern.kernels import OPS
from gpukern.kernels.decode_layer import decode_layer
from gpukern.kernels.decode_layer.triton_stages import STAGES as LAUNCHES
from gpukern.kernels.decode_layer.triton_stages import _decode_layer_kernel
from gpukern.kernels.mlp import norm_mlp_up
from gpukern.kernels.qkv import qkv
from gpukern.layer import PLANS, Config, Layer, Part, Plan, Step, boundary_bytes, costs, crossings, plan
from gpukern.layer.layer import TOLERANCE
from gpukern.op import FLOATS, InputError, error

DEVICE = device.torch_device()
SMALL = Config("small", C=48, H=3, F=80)
NORMED = dataclasses.replace(SMALL, name="normed", first_norm=True)
DECODE = Step(1, 1, 9)
counted = pytest.mark.skipif(not device.simulated(), reason="counted on the simulated GPU")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d)[6:])


def ids(values) -> dict:
    return {"argvalues": values, "ids": ["-".join(f"{axis}{n}" for axis, n in value.items()) for value in values]}


# ---- The partition, and the other one for decode


def test_the_fused_plan_has_five_parts_and_keeps_what_they_make():
    assert [part.name for part in PLANS["fused"].parts] == [
        "qkv", "scores+softmax+values", "output", "norm+mlp_up", "mlp_down",
    ]  # fmt: skip
    for step in (Step(1, 6, 6), DECODE):
        flash, fused = (costs(PLANS[name].at(step), SMALL, step, torch.float16) for name in ("flash", "fused"))
        normalised = step.B * step.T * SMALL.C * 2
        assert sum(c.bytes for c in flash) - sum(c.bytes for c in fused) == 2 * normalised  # there and back
        assert sum(c.flops for c in flash) == sum(c.flops for c in fused)
    crossing = {(c.tensor, c.writer, c.reader) for c in crossings(PLANS["fused"], SMALL, Step(1, 6, 6), torch.float16)}
    assert not any(tensor == "n" for tensor, _, _ in crossing) and ("y", 2, 4) in crossing


def test_a_plan_may_name_other_parts_for_one_token():
    one = PLANS["one_kernel"]
    assert len(one.at(DECODE).parts) == 1 and len(one.at(Step(1, 6, 6)).parts) == 5
    assert len(one.at(Step(2, 1, 9)).parts) == 5  # two sequences: a product of two rows
    assert boundary_bytes(one.at(DECODE), SMALL, DECODE, torch.float16) == []
    assert PLANS["flash"].at(DECODE).parts == PLANS["flash"].parts
    with pytest.raises(InputError, match="ordered partition"):
        Plan("wrong", PLANS["flash"].parts, decode=PLANS["flash"].parts[1:])
    tiled = PLANS["fused"].with_tile("mlp_up", {"BN": 2})
    assert [p.tile for p in tiled.decode if "mlp_up" in p.stages] == [{"BN": 2}]
    assert plan("eager") is PLANS["reference"]


def test_decode_runs_the_kernels_for_one_token(monkeypatch):
    ran = []
    run_part = Layer.run_part
    monkeypatch.setattr(Layer, "run_part", lambda self, part, state: (ran.append(part), run_part(self, part, state)))
    layer = Layer.random(SMALL)
    layer.run(*layer.inputs(DECODE), "fused")
    assert tuple(ran) == PLANS["fused"].decode
    assert all("triton" in part.version and part.version != "triton" for part in ran)


@dtypes
@pytest.mark.parametrize("config", [SMALL, NORMED], ids=lambda c: c.name)
def test_every_part_agrees_with_float64(config, dtype):
    layer = Layer.random(config, dtype)
    for step in (Step(1, 7, 7), Step(2, 3, 8), DECODE, Step(1, 1, 1), Step(2, 1, 5)):
        state = layer.start(*layer.inputs(step))
        for part in PLANS["fused"].at(step).parts:
            exact = layer.exact_part(part, state)
            with measure.poisoned():
                layer.run_part(part, state)
            assert measure.found_error(layer.made(part, state), exact) <= layer.tolerance(part), (part.name, step)


def test_prefill_is_prefill_of_less_and_steps_of_decode():
    layer = Layer.random(NORMED)
    x = torch.randn(1, 12, NORMED.C, generator=torch.Generator().manual_seed(3)).to(layer.device)
    whole = layer.run(x, layer.cache(1, 12), "fused")
    cache = layer.cache(1, 12)
    pieces = [layer.run(x[:, :8], cache, "fused")]
    pieces += [layer.run(x[:, t : t + 1], cache, "fused") for t in range(8, 12)]
    assert error(torch.cat(pieces, 1), whole) < 1e-5


# ---- The kernels of its parts


@dtypes
@pytest.mark.parametrize("version", norm_mlp_up.versions)
@pytest.mark.parametrize("shape", **ids(norm_mlp_up.shapes))
def test_norm_mlp_up_agrees_with_float64(version, shape, dtype):
    inputs = norm_mlp_up.draw(shape, dtype, DEVICE)
    with measure.poisoned():
        out = norm_mlp_up.versions[version](**inputs)
    assert error(out, norm_mlp_up.reference(**inputs)) <= norm_mlp_up.tolerance[dtype]


def test_norm_mlp_up_in_several_tiles_of_columns_and_with_a_large_mean():
    inputs = norm_mlp_up.draw({"B": 1, "T": 37, "K": 45, "N": 450}, torch.float32, DEVICE)
    tile = {"BM": 16, "BN": 16, "BK": 16, "warps": 2, "stages": 1}
    with device.using("T4" if device.simulated() else None):  # 40 SMs: a program has more than one tile
        out = norm_mlp_up.versions["triton"](**inputs, **tile)
    assert error(out, norm_mlp_up.reference(**inputs)) <= norm_mlp_up.tolerance[torch.float32]
    inputs = norm_mlp_up.draw({"B": 1, "T": 2, "K": 100, "N": 17}, torch.float32, DEVICE)
    inputs["x"] += 1e4
    for version in norm_mlp_up.versions:
        out = norm_mlp_up.versions[version](**inputs)
        assert error(out, norm_mlp_up.reference(**inputs)) < 5e-3, version


@pytest.mark.parametrize("version", ["triton", "triton_decode"])
def test_norm_mlp_up_refuses_what_does_not_fit(version):
    run = norm_mlp_up.versions[version]
    inputs = norm_mlp_up.draw({"B": 1, "T": 2, "K": 7, "N": 5}, torch.float32, DEVICE)
    for name, bad in (("gamma", inputs["gamma"][:-1]), ("w", inputs["w"][:-1]), ("bias", inputs["bias"].half())):
        with pytest.raises(InputError, match=name):
            run(**{**inputs, name: bad})
    with pytest.raises(InputError, match="x is not contiguous"):
        run(**{**inputs, "x": inputs["x"].transpose(0, 1).expand(2, 3, 7)})
    with pytest.raises(InputError, match="BN=24"):
        run(**inputs, BN=24)
    with pytest.raises(device.LimitError, match="2048 threads"):
        run(**inputs, warps=64)


@counted
def test_the_norm_as_prologue_saves_the_normalised_rows():
    inputs = norm_mlp_up.draw({"B": 1, "T": 16, "K": 64, "N": 48}, torch.float32, DEVICE)
    norm_mlp_up.versions["triton"](**inputs, BM=16, BN=16, BK=16)
    fused = simulate.last().counters
    n = OPS["layernorm"].versions["triton"](*(inputs[name] for name in ("x", "gamma", "beta", "eps")))
    assert simulate.last().counters["global_store_unique_bytes"] == n.nbytes  # the trip that is saved
    assert fused["global_store_unique_bytes"] == 16 * 48 * 4  # only what the product makes
    norm_mlp_up.versions["triton_decode"](**inputs, BN=16)
    assert simulate.last().counters["global_load_unique_bytes"] == fused["global_load_unique_bytes"]


@counted
@pytest.mark.parametrize("op, shape", [(norm_mlp_up, {"B": 1, "T": 1, "K": 64, "N": 96, "columns": 1}),
                                       (qkv, {"B": 1, "T": 1, "C": 64, "H": 2, "S": 5})],
                         ids=["norm_mlp_up", "qkv"])  # fmt: skip
def test_decode_in_vectors_works_for_the_one_row_there_is(op, shape):
    inputs = op.draw(shape, torch.float32, DEVICE)
    op.versions["triton"](**inputs, BM=16, BN=32, BK=32)
    tiles = simulate.last().counters
    op.versions["triton_decode"](**inputs, BN=32)
    vectors = simulate.last().counters
    assert vectors["flops"] < tiles["flops"] / 10  # a tile has 16 rows
    assert vectors["global_store_unique_bytes"] == tiles["global_store_unique_bytes"]
    assert vectors["global_load_sectors"] <= tiles["global_load_sectors"]


def test_a_vector_that_does_not_fit_the_registers_is_refused():
    inputs = norm_mlp_up.draw({"B": 1, "T": 1, "K": 1 << 16, "N": 1}, torch.float32, DEVICE)
    with pytest.raises(device.LimitError, match="Use more warps"):
        norm_mlp_up.versions["triton_decode"](**inputs, BN=1)


# ---- The layer in one kernel

TILE = {"programs": 24, "BN": 4, "splits": 2, "warps": 4, "stages": 2}


@dtypes
@pytest.mark.parametrize("version, programs", [("torch", None), ("triton_stages", 24), ("triton_one_kernel", 1)])
@pytest.mark.parametrize("shape", **ids(decode_layer.shapes))
def test_the_decode_layer_agrees_with_float64(version, programs, shape, dtype):
    """One program is a whole grid: it meets itself at every barrier, and runs all that the one kernel runs."""
    inputs = decode_layer.draw(shape, dtype, DEVICE)
    before = inputs["k_cache"].clone()
    wanted = decode_layer.reference(**inputs)
    with measure.poisoned():
        out = decode_layer.versions[version](**inputs, **({**TILE, "programs": programs} if programs else {}))
    assert error(out, wanted) <= decode_layer.tolerance[dtype]
    position = inputs["position"]
    changed = (inputs["k_cache"] != before).any(-1).any(1)[0]
    assert changed.nonzero().flatten().tolist() == [position]  # one row of the cache, and no other


def test_the_decode_layer_counts_what_the_layer_counts():
    step = Step(1, 1, 41)
    for config, norm in ((SMALL, 0), (NORMED, 1)):
        (cost,) = costs(PLANS["one_kernel"].at(step), config, step, torch.float16)
        shape = {"C": config.C, "H": config.H, "F": config.F, "S": 41, "norm": norm}
        assert (decode_layer.bytes(shape, torch.float16), decode_layer.flops(shape)) == (cost.bytes, cost.flops)


@counted
def test_stage_by_stage_it_is_five_launches_that_read_each_weight_once(monkeypatch):
    reports = []
    run = type(_decode_layer_kernel).run

    def watched(kernel, *args, **kwargs):
        run(kernel, *args, **kwargs)
        reports.append(simulate.last())

    monkeypatch.setattr(type(_decode_layer_kernel), "run", watched)
    inputs = decode_layer.draw({"C": 64, "H": 4, "F": 128, "S": 40, "columns": 1}, torch.float32, DEVICE)
    decode_layer.versions["triton_stages"](**inputs, **TILE)
    assert len(reports) == LAUNCHES and all(report.faults == [] for report in reports)
    loaded = [report.counters["global_load_unique_bytes"] for report in reports]
    weights = [3 * 64 * 64, 0, 64 * 64, 64 * 128, 128 * 64]
    assert all(4 * n <= got <= 4 * n + 4 * (2 * 40 * 64 + 8 * 64 + 128) for n, got in zip(weights, loaded, strict=True))
    assert [report.counters["atomics"] for report in reports] == [0, 4 * 2, 0, 0, 0]  # a ticket a part of a head


@pytest.mark.skipif(not device.simulated(), reason="on a card it runs")
def test_a_barrier_of_many_programs_wants_a_card():
    inputs = decode_layer.draw(decode_layer.shapes[0], torch.float32, DEVICE)
    with pytest.raises(device.DeviceError, match="wait for each other at a barrier"):
        decode_layer.versions["triton_one_kernel"](**inputs)
    layer = Layer.random(SMALL)
    with pytest.raises(device.DeviceError, match="needs a CUDA card"):
        layer.run(*layer.inputs(DECODE), "one_kernel")
    x, cache = layer.inputs(Step(1, 5, 5))
    assert error(layer.run(x, cache, "one_kernel"), layer.exact(*layer.inputs(Step(1, 5, 5)))) < 1e-5  # as `fused`


@pytest.mark.parametrize(
    ("argument", "spoil", "message"),
    [
        ("x", lambda x: x.expand(2, 1, -1), "x has shape"),
        ("x", lambda x: x.half(), "float16|float32"),
        ("k_cache", lambda k: k[..., :-1], "v_cache has shape|C must be"),
        ("position", lambda p: p + 1, "do not fit"),
        ("weights", lambda w: {**w, "w_2": w["w_2"].T}, "w_2 has shape"),
        ("weights", lambda w: {**w, "b_o": w["b_o"][:-1]}, "b_o has shape"),
    ],
)
def test_the_decode_layer_refuses_what_does_not_fit(argument, spoil, message):
    inputs = decode_layer.draw({"C": 64, "H": 2, "F": 96, "S": 7}, torch.float32, DEVICE)
    before = inputs["k_cache"].clone()
    with pytest.raises(InputError, match=message):
        decode_layer.versions["triton_stages"](**{**inputs, argument: spoil(inputs[argument])}, **TILE)
    assert torch.equal(inputs["k_cache"], before)


@pytest.mark.slow
@pytest.mark.parametrize("C, H, F, tile", [
    (4096, 32, 16384, {"SPLITS": 4, "BN": 4, "BN_DOWN": 1, "AHEAD": 4, "num_warps": 8}),
    (768, 12, 3072, {"SPLITS": 16, "BN": 4, "BN_DOWN": 1, "AHEAD": 3, "num_warps": 4}),
])  # fmt: skip
def test_the_one_kernel_compiles_without_spills_and_asks_for_weights_before_it_waits(C, H, F, tile):
    D, one = C // H, torch.zeros(16, dtype=torch.bfloat16)
    scratch, counters = torch.zeros(16), torch.zeros(16, dtype=torch.int32)
    arguments = [*[one] * 4, None, None, *[one] * 10, *[scratch] * 7, counters, counters, 2047, 1e-5, 0.1, C, H, F]
    arguments += [2048 * D, D, 2048 * D, D, 1, C, 1, C, 1, C, 1, F]
    sizes = {"BC": 1 << (C - 1).bit_length(), "BF": 1 << (F - 1).bit_length(), "D": D, "PREFETCH": 1 << 16}
    made = inspect.compiled(_decode_layer_kernel, tuple(arguments), "H200", FIRST=0, LAST=4, **sizes, **tile)
    assert made.spills == 0 and made.registers * made.threads <= 65536
    assert made.features["atomics"] >= 6 and "prefetch.global.L2" in made.ptx  # 4 barriers, tickets, the last to leave


@pytest.mark.gpu
@dtypes
def test_the_one_kernel_layer_on_the_card_again_and_again(dtype):
    layer = Layer.random("gpt2", dtype)
    for S in (1, 2, 65, 1000):
        x, cache = layer.inputs(Step(1, 1, S))
        exact = layer.exact(x, cache)
        for _ in range(20):
            cache.length = S - 1
            with measure.poisoned():
                assert error(layer.run(x, cache, "one_kernel"), exact) <= TOLERANCE[dtype]


# ---- As a graph


@pytest.mark.parametrize(
    "name", ["reference", "fused", *(["triton", "one_kernel", "numba"] if device.has_cuda() else [])]
)
@pytest.mark.parametrize("step", [DECODE, Step(2, 3, 8)], ids=str)
def test_a_graph_gives_what_a_run_gives(name, step):
    layer = Layer.random(NORMED)
    graph = layer.graph(step, name)
    for seed in (1, 2):  # other values than it was captured with
        x, cache = layer.inputs(step, seed)
        wanted_cache = cache.clone()
        wanted = layer.run(x, wanted_cache, name)
        z = graph(x, cache)
        assert error(z, wanted) < 1e-5 and cache.length == step.S
        assert error(cache.k, wanted_cache.k) < 1e-5 and error(cache.v, wanted_cache.v) < 1e-5
    again = graph.replay()
    assert error(again, z) < 1e-5 and again.data_ptr() != z.data_ptr()


def test_a_graph_refuses_another_step():
    layer = Layer.random(SMALL)
    graph = layer.graph(DECODE, "reference")
    x, cache = layer.inputs(Step(1, 1, 7))
    with pytest.raises(InputError, match="holds a step of 1 tokens onto 8"):
        graph(x, cache)
    with pytest.raises(InputError, match="x has shape"):
        graph(*layer.inputs(Step(1, 2, 9)))


def test_parts_that_no_kernel_runs_are_refused_by_name():
    layer = Layer.random(SMALL)
    parts = (*PLANS["fused"].parts[:3], Part(("norm",), "torch"), Part(("mlp_up", "mlp_down"), "torch"))
    with pytest.raises(InputError, match=r"no kernel runs mlp_up\+mlp_down as one part; those .* norm\+mlp_up"):
        layer.run(*layer.inputs(DECODE), Plan("p", parts))
