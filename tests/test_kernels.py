"""kernels: every version of every operation gives the reference's numbers, and refuses what it cannot compute."""

import functools
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpukern
from gpukern import device
from gpukern.kernels import OPS
from gpukern.kernels.attention import reference as attention_reference
from gpukern.kernels.softmax import visible, visible_pairs
from gpukern.layer import Config, Part, Step
from gpukern.layer.plan import part_cost
from gpukern.layer.stages import STAGES
from gpukern.op import FLOATS, InputError, Op, error
from gpukern.simulate.lockstep import launch
from gpukern.simulate.lockstep.lower import Code

DEVICE = device.torch_device()
REFUSALS = (InputError, device.LimitError)


def ours(op: Op) -> list[str]:
    """The versions to hold to the rules here. CUTLASS is an extra, for 16-bit types: test_cpp.py has its tests."""
    return [name for name, version in op.versions.items() if version.language != "cutlass"]


def here(op: Op) -> list[str]:
    """Of these, the versions that this machine can run. What only a card runs, test_cpp.py compiles and reads."""
    return [name for name in ours(op) if not (device.simulated() and op.versions[name].needs_card)]


KERNELS = [(op, name) for op in OPS.values() for name in ours(op) if name != "torch"]
RUNNING = [(op, name) for op, name in KERNELS if name in here(op)]


def each(cases):
    """Parametrize over (op, version, ...), with an id that prints them: matmul-triton-M33-N17-K45-float16."""

    def text(value) -> str:
        if isinstance(value, Op):
            return value.name
        if isinstance(value, dict):
            return "-".join(f"{axis}{n}" for axis, n in value.items())
        return str(value).removeprefix("torch.")

    return [pytest.param(*case, id="-".join(map(text, case))) for case in cases]


def each_of(values):
    """Parametrize over `bad`, an argument that is to be refused or survived."""
    return pytest.mark.parametrize("bad", values, ids=repr)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that an element that no kernel writes cannot pass; and so does the memory around it,
    where nothing may be written."""
    margin, buffers = 64, []

    def poison(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            if not out.is_floating_point() or not out.is_contiguous():
                return out
            buffer = torch.full((out.numel() + 2 * margin,), math.nan, dtype=out.dtype, device=out.device)
            buffers.append(buffer)
            return buffer[margin : margin + out.numel()].view(out.shape)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    yield
    for buffer in buffers:
        around = torch.cat((buffer[:margin], buffer[-margin:]))
        assert around.isnan().all(), "written outside of the output"


def tensors(inputs: dict) -> dict:
    """The tensors among the inputs by name, those of a norm included."""
    found = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if inputs.get("norm"):
        found["gamma"], found["beta"] = inputs["norm"][:2]
    return found


def with_tensor(inputs: dict, name: str, tensor: torch.Tensor) -> dict:
    """The inputs with another tensor for `name`."""
    if name in inputs:
        return {**inputs, name: tensor}
    gamma, beta, eps = inputs["norm"]
    return {**inputs, "norm": (tensor, beta, eps) if name == "gamma" else (gamma, tensor, eps)}


# Small shapes in which no optional tensor is left out.
FULL = {
    "vector_add": {"N": 5},
    "copy": {"N": 5},
    "saxpy": {"N": 5},
    "transpose": {"M": 3, "N": 5},
    "reduction": {"N": 5},
    "histogram": {"N": 5},
    "gelu": {"N": 5},
    "matmul": {"M": 3, "N": 5, "K": 7, "bias": 1, "gelu": 1, "residual": 1},
    "matvec": {"M": 3, "N": 5, "K": 7, "bias": 1, "gelu": 1, "residual": 1},
    "layernorm": {"B": 2, "T": 1, "C": 5},
    "residual_layernorm": {"B": 2, "T": 1, "C": 5, "sum": 1},
    "softmax": {"B": 1, "H": 2, "T": 2, "S": 5, "causal": 1},
    "qkv": {"B": 2, "T": 1, "C": 6, "H": 3, "S": 5, "position": 2, "norm": 1},
    "scores": {"B": 2, "H": 3, "T": 1, "S": 5, "D": 4},
    "values": {"B": 2, "H": 3, "T": 1, "S": 5, "D": 4},
    "attention": {"B": 1, "H": 2, "T": 1, "S": 5, "D": 16, "causal": 1},
}


@pytest.mark.parametrize(
    "op, version, shape, dtype",
    each(
        (op, version, shape, dtype)
        for op in OPS.values()
        for version in here(op)
        for dtype in op.dtypes
        for shape in (op.shapes if dtype == op.dtypes[0] else op.shapes[:4])
    ),
)
def test_agrees_with_the_reference(op, version, shape, dtype):
    inputs = op.draw(shape, dtype, DEVICE)
    before = {name: tensor.clone() for name, tensor in tensors(inputs).items()}
    wanted = op.reference(**inputs)
    for name, tensor in tensors(inputs).items():
        assert torch.equal(tensor, before[name]) or tensor.isnan().any(), f"the reference wrote into {name}"

    out = op.versions[version](**inputs)

    assert error(out, wanted) <= op.tolerance[dtype]
    for tensor in out if isinstance(out, tuple) else (out,):
        assert tensor.dtype == (dtype if dtype in FLOATS else torch.int32) and tensor.device.type == DEVICE.type
    for name, tensor in tensors(inputs).items():
        if name in ("k_cache", "v_cache"):
            first, last = inputs["position"], inputs["position"] + shape["T"]
            tensor, before[name] = (torch.cat((c[:, :, :first], c[:, :, last:]), 2) for c in (tensor, before[name]))
        assert torch.equal(tensor, before[name]), f"{version} wrote into {name}"


@pytest.mark.parametrize("version", here(OPS["qkv"]))
def test_qkv_writes_into_the_caches_it_was_given(version):
    inputs = OPS["qkv"].draw(OPS["qkv"].shapes[3], torch.float32, DEVICE)
    _, k_cache, v_cache = OPS["qkv"].versions[version](**inputs)
    assert k_cache.data_ptr() == inputs["k_cache"].data_ptr()
    assert v_cache.data_ptr() == inputs["v_cache"].data_ptr()


@pytest.mark.parametrize("op, version", each(RUNNING))
def test_any_stride_is_right_or_refused(op, version):
    inputs = op.draw(FULL[op.name], op.dtypes[0], DEVICE)
    wanted = op.reference(**inputs)
    for name, tensor in tensors(inputs).items():
        between = torch.full_like(tensor, math.nan if tensor.is_floating_point() else 7)
        spread = torch.stack((tensor, between), -1)[..., 0]  # every second element
        assert spread.stride(-1) == 2 and torch.equal(spread, tensor)
        changed = op.draw(FULL[op.name], op.dtypes[0], DEVICE)
        try:
            out = op.versions[version](**with_tensor(changed, name, spread))
        except InputError as refusal:
            assert "contiguous" in str(refusal) or "side by side" in str(refusal)
        else:
            assert error(out, wanted) <= op.tolerance[op.dtypes[0]], name


@pytest.mark.parametrize("op, version", each(KERNELS))
def test_refuses_a_wrong_type_dtype_or_device(op, version):
    inputs = op.draw(FULL[op.name], op.dtypes[0], DEVICE)
    for name, tensor in tensors(inputs).items():
        with pytest.raises(InputError, match="ndarray"):
            op.versions[version](**with_tensor(inputs, name, tensor.cpu().numpy()))
        with pytest.raises(InputError, match="float64"):
            op.versions[version](**with_tensor(inputs, name, tensor.double()))
        if len(tensors(inputs)) > 1:
            with pytest.raises(InputError, match="float16"):
                op.versions[version](**with_tensor(inputs, name, tensor.half()))
            with pytest.raises(InputError, match="meta"):
                op.versions[version](**with_tensor(inputs, name, tensor.to("meta")))


# op, argument, how it is spoilt
SPOILT = [
    ("vector_add", "y", lambda y: y[:-1]),
    ("matmul", "a", lambda a: a[:, :-1]),
    ("matmul", "w", lambda w: w[:, :-1]),
    ("matmul", "bias", lambda bias: bias[:-1]),
    ("matmul", "residual", lambda residual: residual[:-1]),
    ("matmul", "activation", lambda activation: "relu"),
    ("matvec", "a", lambda a: a[:, :-1]),
    ("matvec", "a", lambda a: a.repeat(3, 1)),  # 9 rows
    ("matvec", "w", lambda w: w[:, :-1]),
    ("matvec", "bias", lambda bias: bias[:-1]),
    ("matvec", "residual", lambda residual: residual[:-1]),
    ("matvec", "activation", lambda activation: "relu"),
    ("residual_layernorm", "residual", lambda residual: residual[:-1]),
    ("residual_layernorm", "beta", lambda beta: beta[:-1]),
    ("layernorm", "gamma", lambda gamma: gamma[:-1]),
    ("layernorm", "beta", lambda beta: beta[:-1]),
    ("softmax", "x", lambda x: x[0, 0, 0]),
    ("qkv", "x", lambda x: x[:, :, :-1]),
    ("qkv", "w", lambda w: w[:, :-1]),
    ("qkv", "bias", lambda bias: bias[:-1]),
    ("qkv", "k_cache", lambda cache: cache[:, :, :-1]),
    ("qkv", "v_cache", lambda cache: cache[:, :-1]),
    ("qkv", "position", lambda position: position + 3),  # one row too many
    ("qkv", "position", lambda position: -1),
    ("qkv", "norm", lambda norm: (norm[0][:-1], *norm[1:])),
    ("scores", "k", lambda k: k[..., :-1]),
    ("scores", "k", lambda k: k[:, :-1]),
    ("values", "v", lambda v: v[:, :, :-1]),
    ("values", "p", lambda p: p[:-1]),
    ("attention", "q", lambda q: q[0]),
    ("attention", "k", lambda k: k[:, :, :-1]),
    ("attention", "v", lambda v: v[:, :-1]),
]


@pytest.mark.parametrize(
    "op, version, argument, spoil",
    [
        pytest.param(OPS[name], version, argument, spoil, id=f"{name}-{version}-{argument}{i}")
        for i, (name, argument, spoil) in enumerate(SPOILT)
        for version in ours(OPS[name])
        if version != "torch"
    ],
)
def test_refuses_a_wrong_argument(op, version, argument, spoil):
    inputs = op.draw(FULL[op.name], op.dtypes[0], DEVICE)
    before = {name: tensor.clone() for name, tensor in tensors(inputs).items()}
    with pytest.raises(InputError):
        op.versions[version](**{**inputs, argument: spoil(inputs[argument])})
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(inputs).items()), "half written"


def bad_tiles(op, version) -> list:
    """(tile, what the error must name) for every rule that the version's tile can break."""
    tile = version.tile
    dot = "stages" in tile and op.name != "matvec"  # tl.dot wants 16 rows and columns; matvec has none
    if version.language in ("numba", "cuda"):
        bad = [({"warps": 64}, "2048"), ({"warps": 0}, "warps=0")] if "warps" in tile else []
        bad += [({"threads": 2048}, "1024")] if "threads" in tile else []
        bad += [({"BM": 512, "BN": 512}, "1024"), ({"BK": 0}, "BK"), ({"BM": -16}, "BM")] if "BM" in tile else []
        return bad
    bad = [({name: 24}, f"{name}=24") for name in tile if name != "stages"]
    bad += [({name: 8}, f"{name}=8") for name in ("BM", "BN", "BK") if dot and name in tile]
    bad += [({"stages": 0}, "stages=0")] if "stages" in tile else []
    bad += [({"warps": 64}, "2048 threads")] if tile else []
    if "BK" in tile and dot:
        bad += [({"BM": 256, "BN": 256, "BK": 128, "stages": 4}, "shared memory")]
    return bad


@pytest.mark.parametrize(
    "op, version, tile, names",
    each((op, name, tile, text) for op, name in KERNELS for tile, text in bad_tiles(op, op.versions[name])),
)
def test_refuses_an_impossible_tile(op, version, tile, names):
    with pytest.raises(REFUSALS, match=names):
        op.versions[version](**op.draw(FULL[op.name], op.dtypes[0], DEVICE), **tile)


def other_tiles(version) -> list:
    """Tiles that a learner may choose, away from the default."""
    if version.launcher.endswith(":matmul_vectorised"):  # a warp computes 64 x 32
        return [{"BM": 64, "BN": 64, "BK": 4}, {"BM": 64, "BN": 32}]
    if version.language in ("numba", "cuda"):
        tiles = [{"threads": 32, "warps": 1, "BM": 8, "BN": 4, "BK": 32}, {"warps": 3, "BM": 16, "BN": 8, "BK": 5}]
        tiles = [{name: n for name, n in tile.items() if name in version.tile} for tile in tiles]
        return [tile for tile in tiles if tile]
    tiles = [{"BM": 16, "BN": 32}, {"BM": 32, "BN": 16, "BK": 64, "warps": 2, "stages": 1}, {"BN": 16, "warps": 1}]
    return [{name: n for name, n in tile.items() if name in version.tile} for tile in tiles]


@pytest.mark.parametrize(
    "op, version, tile",
    each((op, name, tile) for op, name in RUNNING for tile in other_tiles(op.versions[name]) if op.versions[name].tile),
)
def test_agrees_with_any_tile(op, version, tile):
    inputs = op.draw(op.shapes[2], op.dtypes[0], DEVICE)
    wanted = op.reference(**inputs)
    assert error(op.versions[version](**inputs, **tile), wanted) <= op.tolerance[op.dtypes[0]]


@pytest.mark.parametrize("version", here(OPS["attention"]))
@pytest.mark.parametrize("T, S", [(1, 9), (3, 9), (9, 9), (18, 37)])
def test_attention_over_a_cache_is_the_end_of_the_whole(version, T, S):
    """A chunk of T tokens that looks at S gives the last T rows of all S tokens at once."""
    whole = OPS["attention"].draw({"B": 1, "H": 1, "T": S, "S": S, "D": 16, "causal": 1}, torch.float32, DEVICE)
    wanted = attention_reference(**whole)[:, S - T :]
    version = OPS["attention"].versions[version]
    tile = {"BM": 16, "BN": 16} if "BM" in version.tile else {}  # small, so that there are several
    out = version(**{**whole, "q": whole["q"][:, :, S - T :]}, **tile)
    assert error(out, wanted) <= OPS["attention"].tolerance[torch.float32]


def test_the_causal_mask_is_aligned_to_the_last_token():
    assert visible(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(3, 2).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    for T, S in ((1, 1), (2, 4), (3, 2), (7, 7), (5, 1), (4, 0)):
        assert visible_pairs(T, S) == visible(T, S).sum()
        assert visible_pairs(T, S, causal=False) == T * S


@pytest.mark.parametrize("version", here(OPS["softmax"]))
def test_softmax_leaves_exact_zeros_and_never_nan(version):
    x = torch.full((4, 6), -math.inf, device=DEVICE)
    x[1, :2] = torch.tensor([60000.0, 60001.0])
    x[2] = -1e30
    x[3] = torch.arange(6)
    out = OPS["softmax"].versions[version](x, causal=False)
    assert out[0].eq(0).all() and out[1, 2:].eq(0).all()
    assert error(out[1, :2], torch.tensor([0.0, 1.0]).softmax(0)) < 1e-6
    assert error(out[2], torch.full((6,), 1 / 6)) < 1e-6
    causal = OPS["softmax"].versions[version](x[3:].repeat(8, 1), causal=True)  # 8 rows look at 6 columns
    assert causal[:2].eq(0).all()
    assert (causal == 0).equal(~visible(8, 6, DEVICE))


@pytest.mark.parametrize("version", here(OPS["layernorm"]))
def test_layernorm_survives_a_large_mean(version):
    """E[x^2] - mean^2 in one pass has no correct digit here."""
    inputs = OPS["layernorm"].draw({"B": 1, "T": 3, "C": 100}, torch.float32, DEVICE)
    inputs["x"] += 1e4
    out = OPS["layernorm"].versions[version](**inputs)
    assert error(out, OPS["layernorm"].reference(**inputs)) < 5e-3


def test_layernorm_refuses_a_row_that_does_not_fit_the_registers():
    x = torch.zeros(1, 1 << 17, device=DEVICE)
    with pytest.raises(device.LimitError, match="registers"):
        OPS["layernorm"].versions["triton"](x, x[0], x[0])


@pytest.mark.parametrize("version", here(OPS["gelu"]))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu_at_the_ends_and_in_the_middle(version, dtype):
    """Large |x| must not overflow; in the middle the tanh form is not the exact one."""
    x = torch.tensor([-60000.0, -100.0, -12.0, -0.0, 12.0, 100.0, 60000.0], device=DEVICE, dtype=dtype)
    out = OPS["gelu"].versions[version](x)
    assert out.tolist() == [0, 0, 0, 0, *x[4:].tolist()]
    if dtype == torch.float32:
        x = torch.linspace(-3, 3, 61, device=DEVICE)
        out = OPS["gelu"].versions[version](x)
        exact = torch.nn.functional.gelu(x.double())
        assert (out - exact).abs().max() > 1e-4


@pytest.mark.parametrize("version", here(OPS["matmul"]))
def test_float32_matmul_keeps_all_digits(version):
    """TF32 would drop the last bits of 1 + 2^-12."""
    a = torch.full((16, 16), 1 + 2**-12, device=DEVICE)
    out = OPS["matmul"].versions[version](a, torch.eye(16, device=DEVICE))
    assert torch.equal(out, a)


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["numba", "triton"])
def test_matmul_offsets_pass_two_to_the_31(version, monkeypatch):
    monkeypatch.undo()  # no need to fill 4 GB with NaN
    rows = torch.zeros(2**31 + 64, dtype=torch.float16, device=DEVICE).as_strided((2, 48), (2**31, 1))
    inputs = OPS["matmul"].draw({"M": 2, "N": 32, "K": 48}, torch.float16, DEVICE)
    rows.copy_(inputs["a"])
    out = OPS["matmul"].versions[version](rows, inputs["w"])
    assert error(out, OPS["matmul"].reference(**inputs)) <= OPS["matmul"].tolerance[torch.float16]


@pytest.mark.parametrize("op", each((op,) for op in OPS.values()))
def test_costs_are_whole_numbers(op):
    for shape in op.shapes:
        for dtype in op.dtypes:
            cost, inputs = (op.flops(shape), op.bytes(shape, dtype)), op.draw(shape, dtype, DEVICE)
            assert all(isinstance(n, int) and n >= 0 for n in cost)
            # At least the inputs are read; a cache is written to.
            read = sum(t.nbytes for name, t in tensors(inputs).items() if "cache" not in name)
            if all(shape.values()):
                assert cost[1] > read


SMALL_LAYER = Config("small", C=48, H=3, F=144, first_norm=True)


def stage_shape(stage: str, step: Step) -> tuple[str, dict, int]:
    """What runs a stage of SMALL_LAYER: operation, shape, and the operations of an epilogue, which no Op counts."""
    B, T, S, C, H, D, F = step.B, step.T, step.S, SMALL_LAYER.C, SMALL_LAYER.H, SMALL_LAYER.D, SMALL_LAYER.F
    bias, gelu, residual = 1, 8, 1  # operations an element
    heads = {"B": B, "H": H, "T": T, "S": S, "D": D, "causal": 1}
    rows = {"M": B * T, "N": C, "bias": 1, "residual": 1}
    return {
        "qkv": ("qkv", {"B": B, "T": T, "C": C, "norm": 1}, bias * B * T * 3 * C),
        "scores": ("scores", heads, 0),
        "softmax": ("softmax", heads, 0),
        "values": ("values", heads, 0),
        "output": ("matmul", {**rows, "K": C}, (bias + residual) * B * T * C),
        "norm": ("layernorm", {"B": B, "T": T, "C": C}, 0),
        "mlp_up": ("matmul", {"M": B * T, "N": F, "K": C, "bias": 1}, (bias + gelu) * B * T * F),
        "mlp_down": ("matmul", {**rows, "K": F}, (bias + residual) * B * T * C),
    }[stage]


@pytest.mark.parametrize("step", [Step(2, 1, 9), Step(2, 5, 5), Step(1, 3, 8)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_costs_are_those_of_the_stage_that_the_operation_runs(stage, step):
    op, shape, epilogue = stage_shape(stage, step)
    cost = part_cost(Part((stage,), "torch"), SMALL_LAYER, step, torch.float16)
    flops = OPS[op].flops(shape)
    if op in ("scores", "values"):  # which know no mask: of their pairs, the stage counts those that are visible
        flops = flops * step.pairs // (step.T * step.S)
    assert (OPS[op].bytes(shape, torch.float16), flops + epilogue) == (cost.bytes, cost.flops)


@pytest.mark.parametrize("op, version", each(KERNELS))
def test_a_launcher_takes_the_tile_that_its_version_declares_and_no_other(op, version):
    own = dict(inspect.signature(op.versions[version].function).parameters)
    for name in inspect.signature(op.reference).parameters:
        own.pop(name)
    assert {name: parameter.default for name, parameter in own.items()} == op.versions[version].tile


@pytest.mark.parametrize("tile", [{}, {"BM": 8, "BN": 32, "BK": 64}, {"BM": 4, "BN": 8, "BK": 20}], ids=str)
@pytest.mark.parametrize("op, norm", [("matmul", None), ("qkv", 0), ("qkv", 1), ("scores", None), ("values", None)])
def test_numba_takes_the_shared_memory_of_the_formula(op, norm, tile, monkeypatch):
    if not device.simulated():
        pytest.skip("reads what the simulated GPU's compiler lays out")
    made = []
    monkeypatch.setattr(launch, "Code", lambda *args: made.append(Code(*args)) or made[-1])
    importlib.import_module(f"gpukern.kernels.{op}.numba_ladder").__dict__[f"_{op}_kernel"].cache_clear()
    shape = {"M": 64, "N": 64, "K": 64, "B": 1, "H": 1, "T": 64, "S": 64, "D": 64, "C": 64}  # no tile is cut
    version = OPS[op].versions["numba"]

    version(**OPS[op].draw({**shape, "norm": norm}, torch.float32, DEVICE), **tile)

    more = {} if norm is None else {"norm": bool(norm)}
    assert [code.shared_static for code in made] == [version.shared_bytes(tile, dtype=torch.float32, **more)]


@pytest.mark.parametrize("op", ["matmul", "qkv", "scores", "values"])
def test_numba_refuses_a_tile_by_the_formula(op):
    version, tile = OPS[op].versions["numba"], {"BM": 8, "BN": 8}
    most = device.card().shared_static
    fits = max(BK for BK in range(1, 1000) if version.shared_bytes({**tile, "BK": BK}, dtype=torch.float16) <= most)
    inputs = OPS[op].draw(FULL[op], torch.float16, DEVICE)
    version(**inputs, **tile, BK=fits)
    with pytest.raises(device.LimitError, match="static shared memory"):
        version(**inputs, **tile, BK=fits + 1)


# Runs in a process of its own, where Triton is the compiler and not the interpreter: it needs no card for that.
COMPILE = """
import json, sys, types
package = types.ModuleType("gpukern")  # without its __init__, which would choose the interpreter
package.__path__ = [sys.argv[1]]
sys.modules["gpukern"] = package

import importlib
import torch
import triton
from triton.backends.compiler import GPUTarget
from gpukern.device import CARDS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compiled(ladder, kernel, dtype, card, warps, stages, **constants):
    # Every argument a multiple of 16, pointers aligned, the innermost strides 1: what the layer launches.
    fn = getattr(importlib.import_module(f"gpukern.kernels.{ladder}.triton_ladder"), kernel)
    defaults = {n: p.default for n, p in fn.signature.parameters.items() if p.default is not p.empty}
    inner = {n: 1 for n in fn.arg_names if n in ("stride_ak", "stride_wn", "stride_rn", "stride_xc", "stride_qd",
                                                 "stride_kd", "stride_ps", "stride_vd")}
    constants = defaults | inner | constants
    kinds = {"eps": "fp32", "scale": "fp32"}
    types = {n: "constexpr" if n in constants else kinds.get(n, "*" + dtype if n.endswith("_ptr") else "i32")
             for n in fn.arg_names}
    at = {n: (i,) for i, n in enumerate(fn.arg_names)}
    aligned = {at[n]: [["tt.divisibility", 16]] for n, kind in types.items() if kind not in ("constexpr", "fp32")}
    source = triton.compiler.ASTSource(fn, types, {at[n]: c for n, c in constants.items()}, aligned)
    major, minor = CARDS[card].compute_capability
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options).metadata.shared


rows = []
for case in json.loads(sys.argv[2]):
    got = compiled(**case)
    constants = {n: case[n] for n in ("BM", "BN", "BK", "D") if n in case}
    wanted = None
    if "BM" in case:
        room = "attention" if case["ladder"] == "attention" else "matmul"
        formula = importlib.import_module(f"gpukern.kernels.{room}.triton_ladder").shared_bytes
        wanted = formula(**constants, warps=case["warps"], stages=case["stages"], dtype=DTYPES[case["dtype"]],
                         on=CARDS[case["card"]])
    rows.append((got, wanted))
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_triton_kernel_compiles_and_takes_the_shared_memory_of_the_formula():
    tile = {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 3}
    small = {"BM": 64, "BN": 64, "BK": 32, "warps": 4, "stages": 2}
    decode = {"BM": 16, "BN": 64, "BK": 64, "warps": 4, "stages": 4}
    flash = {"BM": 64, "BN": 64, "D": 64, "warps": 4, "stages": 3, "CAUSAL": True}
    plain = {"bias_ptr": None, "residual_ptr": None, "GELU": False}
    one = {"warps": 4, "stages": 1}
    cases = [
        {"ladder": "matmul", "kernel": "_matmul_kernel", "GELU": True, **tile},
        {"ladder": "matmul", "kernel": "_matmul_kernel", **plain, **decode},
        {"ladder": "qkv", "kernel": "_qkv_kernel", "gamma_ptr": None, "beta_ptr": None, **tile},
        {"ladder": "qkv", "kernel": "_qkv_kernel", **tile},
        {"ladder": "scores", "kernel": "_scores_kernel", **small},
        {"ladder": "values", "kernel": "_values_kernel", **small},
        {"ladder": "attention", "kernel": "_attention_flash_kernel", **flash},
        {"ladder": "softmax", "kernel": "_softmax_kernel", "CAUSAL": True, "BN": 1024, **one},
        {"ladder": "layernorm", "kernel": "_layernorm_kernel", "BC": 1024, **one},
        {"ladder": "gelu", "kernel": "_gelu_kernel", "BN": 1024, **one},
        {"ladder": "vector_add", "kernel": "_vector_add_kernel", "BN": 1024, **one},
    ]
    cases = [{**case, "dtype": dtype, "card": "H200"} for case in cases for dtype in ("bf16", "fp32")]
    cases.append({**cases[0], "card": "A100"})
    command = [sys.executable, "-c", COMPILE, str(Path(gpukern.__file__).parent), json.dumps(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for case, (shared, formula) in zip(cases, json.loads(done.stdout), strict=True):
        if case["kernel"] == "_qkv_kernel" and "gamma_ptr" not in case:
            assert shared > formula, case  # the normalised tile of x has room of its own
        else:
            assert formula is None or shared == formula, case


# ---- Arguments that are not what they should be


@each_of([1.0, None, True, torch.tensor(1), -1, 5])
@pytest.mark.parametrize("name", ["numba", "triton"])
def test_qkv_refuses_a_position_that_is_none(name, bad):
    inputs = OPS["qkv"].draw({"B": 1, "T": 2, "C": 16, "H": 1, "S": 6}, torch.float32, DEVICE)
    with pytest.raises(InputError, match="2 tokens at position"):
        OPS["qkv"].versions[name](**{**inputs, "position": bad})


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_qkv_refuses_caches_that_share_memory(name):
    inputs = OPS["qkv"].draw({"B": 2, "T": 2, "C": 16, "H": 1, "S": 6}, torch.float32, DEVICE)
    with pytest.raises(InputError, match="the same memory"):
        OPS["qkv"].versions[name](**{**inputs, "v_cache": inputs["k_cache"]})
    both = torch.zeros(2 * inputs["k_cache"].numel(), device=DEVICE)
    n = inputs["k_cache"].numel()
    overlap = {"k_cache": both[:n].view(2, 1, 6, 16), "v_cache": both[n - 1 : -1].view(2, 1, 6, 16)}
    with pytest.raises(InputError, match="the same memory"):
        OPS["qkv"].versions[name](**{**inputs, **overlap})
    OPS["qkv"].versions[name](**{**inputs, **overlap, "v_cache": both[n:].view(2, 1, 6, 16)})  # side by side is well
    with pytest.raises(InputError, match="v_cache is expanded"):
        OPS["qkv"].versions[name](**{**inputs, "v_cache": inputs["v_cache"][:1].expand(2, -1, -1, -1)})


@each_of([0, -1, 1.5, "a", None, True])
@pytest.mark.parametrize(
    ("op", "size"),
    [(op, size) for op in OPS.values() if "numba" in op.versions for size in op.versions["numba"].tile],
    ids=lambda value: getattr(value, "name", value),
)
def test_numba_refuses_a_size_that_is_no_whole_number(op, size, bad):
    with pytest.raises(REFUSALS, match=size):
        op.versions["numba"](**op.draw(op.shapes[0], torch.float32, DEVICE), **{size: bad})


@each_of([[1.0, 2.0], None, 3.0])
@pytest.mark.parametrize("op, name", each(KERNELS))
def test_what_is_no_tensor_is_refused(op, name, bad):
    inputs = op.draw(FULL[op.name], op.dtypes[0], DEVICE)
    for argument in ("x", "y", "a", "w", "gamma", "beta", "q", "k", "v", "p", "k_cache", "v_cache"):
        if argument in tensors(inputs):
            with pytest.raises(InputError, match=f"{argument} must be a torch.Tensor"):
                op.versions[name](**with_tensor(inputs, argument, bad))


@each_of([0, -1, 1.5, "a", None, True])
@pytest.mark.parametrize(
    "op, name, size",
    each((op, name, size) for op, name in KERNELS for size in op.versions[name].tile if name != "numba"),
)
def test_triton_refuses_a_size_that_is_no_whole_number(op, name, size, bad):
    with pytest.raises(InputError, match=f"{size}={bad!r}"):
        op.versions[name](**op.draw(FULL[op.name], op.dtypes[0], DEVICE), **{size: bad})


def test_vector_add_in_triton_is_held_to_the_limits_of_the_card():
    x = torch.ones(8, device=DEVICE)
    with pytest.raises(device.LimitError, match="2048 threads"):
        OPS["vector_add"].versions["triton"](x, x, warps=64)


def test_a_tile_larger_than_triton_has_is_refused():
    x = torch.ones(8, device=DEVICE)
    with pytest.raises(InputError, match="at most 1048576"):
        OPS["vector_add"].versions["triton"](x, x, BN=1 << 21)
    with pytest.raises(InputError, match="the nearest are 2 and 4"):
        OPS["vector_add"].versions["triton"](x, x, warps=3)


@pytest.mark.parametrize("name", here(OPS["scores"]))
def test_heads_of_no_elements_are_refused(name):
    q = torch.ones(1, 1, 2, 0, device=DEVICE)
    with pytest.raises(InputError, match="D must be at least 1"):
        OPS["scores"].versions[name](q, q)


@pytest.mark.parametrize("name", here(OPS["softmax"]))
@each_of([math.nan, math.inf])
def test_masked_weights_are_zero_whatever_the_others_are(name, bad):
    x = torch.ones(1, 3, 5, device=DEVICE)
    x[0, 0, 0] = bad
    out = OPS["softmax"].versions[name](x, causal=True)
    assert (out[0, 0, 3:] == 0).all() and out[0, 1:].isfinite().all()
    assert (OPS["softmax"].reference(x, causal=True)[0, 0, 3:] == 0).all()
