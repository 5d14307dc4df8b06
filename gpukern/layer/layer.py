"""The live layer: weights, a KV cache, and a plan that says which kernels run."""

import math
from dataclasses import dataclass

import torch

from gpukern import device
from gpukern.kernels import OPS
from gpukern.layer.config import CONFIGS, Config, Step
from gpukern.layer.plan import Part, Plan
from gpukern.layer.plan import plan as named_plan
from gpukern.layer.stages import STAGES
from gpukern.layer.weights import Weights, gpt2_layer, read_checkpoint
from gpukern.op import InputError, normal, require


@dataclass
class Cache:
    """The keys and values of the tokens seen so far: `[B, H, room, D]`, of which `length` are filled."""

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0

    @property
    def room(self) -> int:
        return self.k.shape[2]

    def clone(self) -> "Cache":
        return Cache(self.k.clone(), self.v.clone(), self.length)


class Layer:
    """One transformer layer. `run` steps it by a plan; `exact` gives the float64 answer that plans are held to.

    config, weights, dtype, device as given to the constructor; weights are moved there.
    """

    def __init__(self, config: Config, weights: Weights, dtype: torch.dtype, on: torch.device | None = None):
        self.config, self.dtype, self.device = config, dtype, on or device.torch_device()
        self.weights = weights.to(dtype, self.device)

    @classmethod
    def random(cls, config: Config | str, dtype=torch.float32, seed: int = 0) -> "Layer":
        """A layer with weights drawn from `seed`. `config` may be a name: tiny, gpt2, c4096."""
        if isinstance(config, str):
            if config not in CONFIGS:
                raise InputError(f"unknown config {config!r}; known are {', '.join(CONFIGS)}, trained.")
            config = CONFIGS[config]
        return cls(config, Weights.random(config, dtype, device.torch_device(), seed), dtype)

    @classmethod
    def from_checkpoint(cls, path, layer: int = 0, heads: int | None = None, dtype=torch.float32) -> "Layer":
        """One layer of a GPT-2 checkpoint in safetensors. Raises CheckpointError if it is not one."""
        tensors, metadata = read_checkpoint(path)
        heads = heads or (int(metadata["n_head"]) if "n_head" in metadata else None)
        return cls(*gpt2_layer(tensors, layer, str(path), heads), dtype)

    def cache(self, batch: int, room: int) -> Cache:
        """An empty cache for `batch` sequences of up to `room` tokens."""
        shape = (batch, self.config.H, room, self.config.D)
        return Cache(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv"))

    def inputs(self, step: Step, seed: int = 0) -> tuple[torch.Tensor, Cache]:
        """Random x `[B, T, C]` and a cache that already holds S - T random tokens: what a measurement needs."""
        kind = {"dtype": self.dtype, "device": self.device, "generator": torch.Generator().manual_seed(seed)}
        x = normal(step.B, step.T, self.config.C, **kind)
        cache = self.cache(step.B, step.S)
        cache.length = step.S - step.T
        for tensor in (cache.k, cache.v):
            tensor[:, :, : cache.length] = normal(step.B, self.config.H, cache.length, self.config.D, **kind)
        return x, cache

    def run(self, x: torch.Tensor, cache: Cache, plan: Plan | str = "triton") -> torch.Tensor:
        """x: `[B, T, C]`, any T >= 1. Appends T tokens to the cache and returns z, `[B, T, C]`."""
        plan = named_plan(plan) if isinstance(plan, str) else plan
        state = self.start(x, cache)
        for part in plan.parts:
            self.run_part(part, state)
        cache.length = state["step"].S
        return state["z"]

    def start(self, x: torch.Tensor, cache: Cache) -> dict:
        """The state that parts read and write: the tensors of stages.py by name, and `step`. Checks x and the cache."""
        require(x, "x", (None, None, self.config.C), dtypes=(self.dtype,))
        B, T = x.shape[:2]
        if x.device.type != self.device.type:
            raise InputError(f"x is on {x.device}, the layer on {self.device}; move x with .to(layer.device).")
        if cache.k.shape[0] != B:
            raise InputError(f"x holds {B} sequences, the cache {cache.k.shape[0]}; make one with layer.cache({B}, room).")
        step = Step(B, T, cache.length + T)
        if step.S > cache.room:
            raise InputError(f"the cache has room for {cache.room} tokens; {step.S} are needed. Make a larger one.")
        return {"x": x, "cache": cache, "step": step, "k": cache.k[:, :, : step.S], "v": cache.v[:, :, : step.S]}

    def run_part(self, part: Part, state: dict) -> None:
        """Run one part: its kernel reads tensors of `state` and adds those it makes."""
        if part.version == "torch_compile":
            from gpukern.layer.compiled import run_compiled

            return run_compiled(self, state)
        if part.stages not in _RUNNERS:
            raise InputError(f"no kernel runs {part.name} as one part yet; known are {', '.join(map('+'.join, _RUNNERS))}.")
        op, arguments, makes = _RUNNERS[part.stages]
        versions = OPS[op].versions
        if part.version not in versions:
            raise InputError(f"{op} has no version {part.version!r}; known are {', '.join(versions)}.")
        out = versions[part.version](**arguments(self, state), **part.tile)
        # Matrix stages see the tokens as rows; what they make is [B, T, .] again for the next stage.
        rows = makes in ("y", "h", "z")
        state[makes] = out[0] if makes == "q" else out.view(*state["x"].shape[:2], -1) if rows else out

    def exact(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The float64 answer of `run`, by the operations' references, with weights as they are stored. Cache unchanged."""
        state = self.start(x, cache.clone())
        for name in STAGES:
            op, arguments, makes = _RUNNERS[(name,)]
            out = OPS[op].reference(**arguments(self, state))
            if makes == "q":
                state["q"], k, v = out
                state["k"], state["v"] = k[:, :, : state["step"].S], v[:, :, : state["step"].S]
            else:
                state[makes] = out.view(*x.shape[:2], -1) if makes in ("y", "h", "z") else out
        return state["z"]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _qkv(layer: Layer, s: dict) -> dict:
    w, cache = layer.weights, s["cache"]
    norm = (w.first_gamma, w.first_beta, layer.config.eps) if layer.config.first_norm else None
    return {
        "x": s["x"],
        "w": w.w_qkv,
        "bias": w.b_qkv,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "position": s["step"].S - s["step"].T,
        "norm": norm,
    }


def _mlp_up(layer: Layer, s: dict) -> dict:
    return {"a": _rows(s["n"]), "w": layer.weights.w_1, "bias": layer.weights.b_1, "activation": "gelu"}


# stages of a part -> (operation, its arguments from layer and state, the tensor it makes)
_RUNNERS = {
    ("qkv",): ("qkv", _qkv, "q"),
    ("scores",): ("scores", lambda _, s: {"q": s["q"], "k": s["k"]}, "scores"),
    ("softmax",): ("softmax", lambda _, s: {"x": s["scores"], "causal": True}, "probs"),
    ("values",): ("values", lambda _, s: {"p": s["probs"], "v": s["v"]}, "attn"),
    ("scores", "softmax", "values"): (
        "attention",
        lambda _, s: {"q": s["q"], "k": s["k"], "v": s["v"], "causal": True},
        "attn",
    ),
    ("output",): (
        "matmul",
        lambda m, s: {"a": _rows(s["attn"]), "w": m.weights.w_o, "bias": m.weights.b_o, "residual": _rows(s["x"])},
        "y",
    ),
    ("norm",): (
        "layernorm",
        lambda m, s: {"x": s["y"], "gamma": m.weights.gamma, "beta": m.weights.beta, "eps": m.config.eps},
        "n",
    ),
    ("mlp_up",): ("matmul", _mlp_up, "h"),
    ("mlp_down",): (
        "matmul",
        lambda m, s: {"a": _rows(s["h"]), "w": m.weights.w_2, "bias": m.weights.b_2, "residual": _rows(s["y"])},
        "z",
    ),
}
