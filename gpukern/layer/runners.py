"""Which operation runs a part of a plan, what it gets from the layer and the state, and what it makes."""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, fields

from gpukern.kernels import OPS
from gpukern.kernels.decode_layer import decode_layer
from gpukern.kernels.mlp import norm_mlp_up
from gpukern.layer.plan import Part
from gpukern.layer.stages import STAGES
from gpukern.op import InputError, Op, Version

_OPS = ChainMap(OPS, {op.name: op for op in (norm_mlp_up, decode_layer)})  # and two that only a layer has use for


@dataclass(frozen=True)
class Runner:
    """name: of an operation; arguments: (weights, config, state) -> what it gets; makes: the tensor that it returns."""

    name: str
    arguments: Callable[..., dict]
    makes: str

    @property
    def op(self) -> Op:
        return _OPS[self.name]


def runner(part: Part) -> Runner:
    """What runs the stages of a part. Raises InputError if no one kernel does."""
    if part.stages not in RUNNERS:
        known = ", ".join(map("+".join, RUNNERS))
        raise InputError(f"no kernel runs {part.name} as one part; those that one runs are {known}.")
    return RUNNERS[part.stages]


def version(part: Part) -> Version:
    """The kernel version that a part names. Raises InputError if there is none."""
    op = runner(part).op
    if op.name == "matmul" and part.version in _MATVEC:
        return OPS["matvec"].versions[_MATVEC[part.version]]
    if part.version not in op.versions:
        raise InputError(f"{op.name} has no version {part.version!r}; known are {', '.join(op.versions)}.")
    return op.versions[part.version]


# A product of few rows is an operation of its own, with the arguments of matmul: names of its versions in a plan.
_MATVEC = {"triton_matvec": "triton"}
# Versions that want an output's weights side by side in memory.
COLUMNS = ("triton_decode", "triton_matvec", "triton_stages", "triton_one_kernel")


def tokens(tensor, state: dict):
    """Rows `[B * T, .]` as tokens `[B, T, .]`."""
    return tensor.view(*state["x"].shape[:2], -1)


def _rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1])


def _first_norm(w, config) -> tuple | None:
    return (w.first_gamma, w.first_beta, config.eps) if config.first_norm else None


def _place(s: dict) -> dict:
    """Where the new rows of K and V go."""
    return {"k_cache": s["cache"].k, "v_cache": s["cache"].v, "position": s["step"].S - s["step"].T}


def _qkv(w, config, s: dict) -> dict:
    return {"x": s["x"], "w": w.w_qkv, "bias": w.b_qkv, **_place(s), "norm": _first_norm(w, config)}


def _attention(w, config, s: dict) -> dict:
    return {"q": s["q"], "k": s["k"], "v": s["v"], "causal": True}


def _output(w, config, s: dict) -> dict:
    return {"a": _rows(s["attn"]), "w": w.w_o, "bias": w.b_o, "residual": _rows(s["x"])}


def _norm(w, config, s: dict) -> dict:
    return {"x": s["y"], "gamma": w.gamma, "beta": w.beta, "eps": config.eps}


def _mlp_up(w, config, s: dict) -> dict:
    return {"a": _rows(s["n"]), "w": w.w_1, "bias": w.b_1, "activation": "gelu"}


def _norm_mlp_up(w, config, s: dict) -> dict:
    return {**_norm(w, config, s), "w": w.w_1, "bias": w.b_1}


def _mlp_down(w, config, s: dict) -> dict:
    return {"a": _rows(s["h"]), "w": w.w_2, "bias": w.b_2, "residual": _rows(s["y"])}


def _decode_layer(w, config, s: dict) -> dict:
    weights = {field.name: getattr(w, field.name) for field in fields(w)}
    return {"x": s["x"], "weights": weights, **_place(s), "eps": config.eps}


# The tensors that an operation returns as rows, [B * T, .].
ROWS = ("y", "h", "z")

# stages of a part -> what runs them
RUNNERS = {
    ("qkv",): Runner("qkv", _qkv, "q"),
    ("scores",): Runner("scores", lambda w, config, s: {"q": s["q"], "k": s["k"]}, "scores"),
    ("softmax",): Runner("softmax", lambda w, config, s: {"x": s["scores"], "causal": True}, "probs"),
    ("values",): Runner("values", lambda w, config, s: {"p": s["probs"], "v": s["v"]}, "attn"),
    ("scores", "softmax", "values"): Runner("attention", _attention, "attn"),
    ("output",): Runner("matmul", _output, "y"),
    ("norm",): Runner("layernorm", _norm, "n"),
    ("mlp_up",): Runner("matmul", _mlp_up, "h"),
    ("norm", "mlp_up"): Runner("norm_mlp_up", _norm_mlp_up, "h"),
    ("mlp_down",): Runner("matmul", _mlp_down, "z"),
    tuple(STAGES): Runner("decode_layer", _decode_layer, "z"),
}
