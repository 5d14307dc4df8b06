"""checkpoints: what `gpukern layer --weights FILE` says of files that are whole, broken, or no layer of GPT-2's."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from gpukern import cli
from gpukern.layer import CheckpointError, Config, Layer, train
from gpukern.layer.weights import whole_number
from gpukern.op import InputError

C, F = 64, 128


@pytest.fixture
def gpt2() -> dict[str, torch.Tensor]:
    """The tensors of a GPT-2 of two layers, by GPT-2's names."""
    torch.manual_seed(0)
    model = train.Model(V=7, C=C, H=1, F=F, layers=2, context=8, dropout=0.0)
    return {name.removeprefix("transformer."): weight.clone() for name, weight in model.state_dict().items()}


@pytest.fixture
def layer_of(monkeypatch, capsys, tmp_path):
    """Run `gpukern layer` on a checkpoint of `tensors` (or of bytes); returns its exit code, stdout and stderr."""

    def run(tensors: dict | bytes, *arguments: str, **metadata: str) -> tuple[int, str, str]:
        path = tmp_path / "model.safetensors"
        if isinstance(tensors, bytes):
            path.write_bytes(tensors)
        else:
            save_file(tensors, path, metadata or None)
        more = ("--tokens", "3", "--json", *arguments)
        monkeypatch.setattr(sys, "argv", ["gpukern", "layer", "--weights", str(path), *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return run


def refused(result: tuple[int, str, str], message: str) -> None:
    """The command said `message` in one line and exited with 2."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and "model.safetensors" in err
    assert message in err


# ---- Whole files


@pytest.mark.parametrize("plan", ["reference", "numba", "triton", "flash"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_that_a_checkpoint_may_have_runs_under_every_plan(layer_of, gpt2, stored, plan):
    code, out, err = layer_of({name: w.to(stored) for name, w in gpt2.items()}, "--plan", plan, n_head="2")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert (result["config"]["H"], result["config"]["F"], result["dtype"]) == (2, F, "float32")
    assert 0 < result["total"]["error"] <= result["total"]["tolerance"]


@pytest.mark.parametrize("heads", [1, 2, 4, 64])
def test_the_metadata_say_the_number_of_heads(layer_of, gpt2, heads):
    code, out, _ = layer_of(gpt2, "--plan", "reference", n_head=str(heads))
    result = json.loads(out)
    assert code == 0 and result["config"]["H"] == heads
    assert result["total"]["error"] <= result["total"]["tolerance"]


def test_without_metadata_a_head_is_64_wide(layer_of, gpt2):
    code, out, _ = layer_of(gpt2, "--plan", "reference")
    assert code == 0 and json.loads(out)["config"]["H"] == C // 64


@pytest.mark.parametrize("name", ["h.².attn.c_attn.weight", "h.٣.x", "h.", "h", "h.last.x", f"h.{'9' * 5000}.x"])
def test_a_name_that_only_looks_like_a_layer_is_no_layer(layer_of, gpt2, name):
    named = {**gpt2, name: torch.ones(1)}
    assert layer_of(named, "--plan", "reference")[0] == 0
    refused(layer_of(named, "--index", "3"), "has layers 0 to 1; there is no layer 3")


# ---- Broken files


def test_a_file_that_is_not_whole_is_refused(layer_of, gpt2, tmp_path):
    assert layer_of(gpt2, "--plan", "reference")[0] == 0
    whole = (tmp_path / "model.safetensors").read_bytes()
    text = b"hello world, this is text\n" * 20
    for broken in (b"", whole[:8], whole[:100], whole[: len(whole) // 2], whole[:-1], whole + b"x", text):
        refused(layer_of(broken), "is not a whole safetensors file")


def test_tensors_with_and_without_the_prefix_are_refused(layer_of, gpt2):
    refused(layer_of({**gpt2, **{f"transformer.{name}": w + 1 for name, w in gpt2.items()}}), "both with and without")


@pytest.mark.parametrize("tensors", [{}, {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}])
def test_another_model_is_refused(layer_of, tensors):
    refused(layer_of(tensors), "it is not a GPT-2 checkpoint")


@pytest.mark.parametrize(
    "heads", ["abc", "", "0", "-2", "1.0", " 1", "+1", "²", "٢", "9" * 5000], ids=lambda heads: repr(heads[:4])
)
def test_a_number_of_heads_that_is_none_is_refused(layer_of, gpt2, heads):
    refused(layer_of(gpt2, n_head=heads), "it must be a whole number from 1")
    with pytest.raises(CheckpointError, match="whole number"):
        whole_number({"n_head": heads}, "n_head", "file")


@pytest.mark.parametrize("heads", ["5", "128"])
def test_heads_that_do_not_divide_the_width_are_refused(layer_of, gpt2, heads):
    refused(layer_of(gpt2, n_head=heads), f"C=64 is not a multiple of H={heads}")


def empty(shape: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {f"h.0.{name}": torch.zeros(size) for name, size in shape.items()}


NO_MLP = empty({"mlp.c_fc.weight": (C, 0), "mlp.c_fc.bias": (0,), "mlp.c_proj.weight": (0, C)})


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (NO_MLP, "F=0 must be at least 1"),
        (empty({"mlp.c_fc.weight": (0, 0)}), "expected (0, 0)"),
        (empty({"mlp.c_fc.weight": (0, F)}), "expected (0, 0)"),
        (empty({"mlp.c_fc.weight": (F, C)}), "expected"),
        (empty({"mlp.c_fc.weight": (F,)}), "is not a matrix"),
        (empty({"ln_1.weight": (C, 1)}), "expected (64,)"),
    ],
)
def test_sizes_that_no_layer_has_are_refused(layer_of, gpt2, replaced, message):
    refused(layer_of({**gpt2, **replaced}, n_head="1" if replaced is NO_MLP else "2"), message)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_not_floating_point_of_ours_are_refused_by_their_dtype(layer_of, gpt2, stored):
    name = "h.0.attn.c_attn.weight"
    refused(layer_of({**gpt2, name: torch.ones(C, 3 * C).to(stored)}), f"is {str(stored).removeprefix('torch.')};")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_that_is_no_number_is_refused(layer_of, gpt2, value):
    gpt2["h.0.attn.c_attn.bias"][3] = value
    refused(layer_of(gpt2), "'h.0.attn.c_attn.bias' has values that are not finite")


def test_a_weight_too_large_for_the_dtype_is_refused_and_not_declared_right(layer_of, gpt2):
    gpt2["h.0.attn.c_attn.weight"][3, 3] = 1e30
    code, out, err = layer_of(gpt2, "--dtype", "float16", "--plan", "reference")
    assert (code, out) == (2, "") and "not finite in float16; try float32" in err
    gpt2["h.0.attn.c_attn.weight"] = gpt2["h.0.attn.c_attn.weight"].double()
    gpt2["h.0.attn.c_attn.weight"][3, 3] = 1e300  # finite as stored
    code, out, err = layer_of(gpt2, "--plan", "reference")
    assert (code, out) == (2, "") and "not finite in float32" in err


def test_activations_that_overflow_are_wrong(layer_of, gpt2):
    gpt2["h.0.mlp.c_fc.bias"].fill_(6e4)  # fits float16; what the layer makes of it does not
    gpt2["h.0.mlp.c_proj.weight"].fill_(10.0)
    code, out, _ = layer_of(gpt2, "--dtype", "float16", "--plan", "reference")
    result = json.loads(out)
    assert code == 1 and result["total"]["error"] > result["total"]["tolerance"]
    assert "Infinity" not in out and "NaN" not in out  # which strict readers of JSON refuse


# ---- Sizes


@pytest.mark.parametrize("sizes", [{"C": 0}, {"H": 0}, {"H": -1}, {"F": 0}, {"F": -4}])
def test_a_config_needs_at_least_one_of_each(sizes):
    ((name, n),) = sizes.items()
    with pytest.raises(InputError, match=f"{name}={n} must be at least 1"):
        Config("small", **{"C": 4, "H": 2, "F": 8, **sizes})


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is a folder"):
        Layer.from_checkpoint(tmp_path)
