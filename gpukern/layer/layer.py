"""The live layer: weights, a KV cache, and a plan that says which kernels run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from gpukern import device
from gpukern.layer.config import CONFIGS, Config, Step
from gpukern.layer.graph import LayerGraph
from gpukern.layer.plan import PLANS, Cost, Part, Plan, costs, part_cost
from gpukern.layer.plan import plan as named_plan
from gpukern.layer.runners import COLUMNS, ROWS, RUNNERS, runner, tokens, version
from gpukern.layer.stages import STAGES, product
from gpukern.layer.tiles import tile_for
from gpukern.layer.weights import Weights, gpt2_layer, read_checkpoint, whole_number
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


# The largest error (op.error) of a whole layer against float64: eight kernels, each of which rounds once to the dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class Layer:
    """One transformer layer. `run` steps it by a plan; `exact` gives the float64 answer that plans are held to.

    config   sizes of the layer
    weights  a function that draws or reads them; called when they are first needed, so that asking for the bytes of a
             layer, or for its recorded rows, costs nothing
    dtype    of weights, activations and cache: float32, float16 or bfloat16
    """

    def __init__(self, config: Config, weights: Callable[[], Weights], dtype: torch.dtype):
        if dtype not in TOLERANCE:
            raise InputError(f"a layer cannot be {dtype}; use float32, float16 or bfloat16.")
        self.config, self.dtype, self.device = config, dtype, device.torch_device()
        self._weights = weights

    @cached_property
    def weights(self) -> Weights:
        return self._weights().to(self.dtype, self.device).require_finite(self.config.name)

    @cached_property
    def columns(self) -> Weights:
        """The weights once more, in other memory: an output's lie side by side, as kernels for one token want them."""
        return self.weights.columns()

    @classmethod
    def random(cls, config: Config | str, dtype=torch.float32, seed: int = 0) -> "Layer":
        """A layer with weights drawn from `seed`. `config` may be a name: tiny, gpt2, c4096."""
        if isinstance(config, str):
            if config not in CONFIGS:
                raise InputError(f"unknown config {config!r}; known are {', '.join(CONFIGS)}, trained.")
            config = CONFIGS[config]
        return cls(config, lambda: Weights.random(config, dtype, device.torch_device(), seed), dtype)

    @classmethod
    def from_checkpoint(cls, path, layer: int = 0, heads: int | None = None, dtype=torch.float32) -> "Layer":
        """One layer of a GPT-2 checkpoint in safetensors. Raises CheckpointError if it is not one."""
        tensors, metadata = read_checkpoint(path)
        heads = heads or whole_number(metadata, "n_head", str(path))
        config, weights = gpt2_layer(tensors, layer, str(path), heads)
        return cls(config, lambda: weights, dtype)

    def copy(self) -> "Layer":
        """The same layer in other memory; measurements rotate over copies so that L2 does not hold the weights."""
        return Layer(self.config, self.weights.clone, self.dtype)

    def costs(self, plan: Plan, step: Step) -> list[Cost]:
        """What each part of the plan must move and compute in this layer's dtype."""
        return costs(plan, self.config, step, self.dtype)

    def part_cost(self, part: Part, step: Step) -> Cost:
        """What one part must move and compute in this layer's dtype."""
        return part_cost(part, self.config, step, self.dtype)

    def tile(self, part: Part, step: Step) -> dict[str, int]:
        """The tile that a part runs with at `step`: its own, over the rule of tiles.py, over its version's default."""
        if part.version == "torch_compile":
            return {}
        default = version(part).tile
        for name in part.tile:
            if name not in default:
                known = ", ".join(default) or "none"
                raise InputError(f"{part.name} by {part.version!r} has no tile size {name!r}; it has {known}.")
        return {**default, **tile_for(part.stages, part.version, self.config, step), **part.tile}

    def product(self, part: str, step: Step) -> tuple[int, int, int, int] | None:
        """(batch, M, N, K) of the matrix product of a part that is one stage, or None."""
        return product(part, self.config, step)

    @property
    def reference_plan(self) -> Plan:
        """Eight parts, each PyTorch's own."""
        return PLANS["reference"]

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
        for part in plan.at(state["step"]).parts:
            self.run_part(part, state)
        cache.length = state["step"].S
        return state["z"]

    def graph(self, step: Step, plan: Plan | str = "triton") -> LayerGraph:
        """One step by a plan as a CUDA graph, to be called as `run(x, cache)`. Without a card it runs plainly."""
        return LayerGraph(self, step, named_plan(plan) if isinstance(plan, str) else plan)

    def start(self, x: torch.Tensor, cache: Cache) -> dict:
        """The state that parts read and write: the tensors of stages.py by name, and `step`. Checks x and the cache."""
        require(x, "x", (None, None, self.config.C), dtypes=(self.dtype,))
        B, T = x.shape[:2]
        if x.device.type != self.device.type:
            raise InputError(f"x is on {x.device}, the layer on {self.device}; move x with .to(layer.device).")
        if cache.k.shape[0] != B:
            held = cache.k.shape[0]
            raise InputError(f"x holds {B} sequences, the cache {held}; make one with layer.cache({B}, room).")
        for name in ("k", "v"):
            require(getattr(cache, name), f"cache.{name}", (B, self.config.H, None, self.config.D), like=x)
        step = Step(B, T, cache.length + T)
        if cache.room < step.S:
            raise InputError(f"the cache has room for {cache.room} tokens; {step.S} are needed. Make a larger one.")
        return {"x": x, "cache": cache, "step": step, "k": cache.k[:, :, : step.S], "v": cache.v[:, :, : step.S]}

    def run_part(self, part: Part, state: dict) -> None:
        """Run one part: its kernel reads tensors of `state` and adds those it makes."""
        if part.version == "torch_compile":
            from gpukern.layer.compiled import run_compiled

            return run_compiled(self, state)
        kernel, run = version(part), runner(part)
        weights = self.columns if part.version in COLUMNS else self.weights
        out = kernel(**run.arguments(weights, self.config, state), **self.tile(part, state["step"]))
        out = out[0] if isinstance(out, tuple) else out  # the caches that it returns, too, are in the state
        state[run.makes] = tokens(out, state) if run.makes in ROWS else out

    def exact(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The float64 answer of `run`, by the operations' references, with weights as stored. Cache unchanged."""
        state = self.start(x, cache)
        for name in STAGES:
            state |= self._exact_stage(name, state)
        return state["z"]

    def exact_part(self, part: Part, state: dict) -> torch.Tensor | tuple:
        """The float64 answer of one part: what `run_part` must make of the same `state`. State unchanged."""
        state = dict(state)
        for name in part.stages:
            state |= self._exact_stage(name, state)
        return self.made(part, state)

    def made(self, part: Part, state: dict) -> torch.Tensor | tuple:
        """What a part made: its last stage's tensor; for `qkv` alone q and the keys and values up to S."""
        if part.stages == ("qkv",):
            return state["q"], state["k"], state["v"]
        return state[STAGES[part.stages[-1]].writes[0]]

    def tolerance(self, part: Part | None = None) -> float:
        """The largest error that passes: of one part against `exact_part`, or of the whole layer against `exact`."""
        if part is None or len(part.stages) == len(STAGES) or part.stages not in RUNNERS:
            return TOLERANCE[self.dtype]
        return RUNNERS[part.stages].op.tolerance[self.dtype]

    def _exact_stage(self, name: str, state: dict) -> dict:
        run = RUNNERS[(name,)]
        out = run.op.reference(**run.arguments(self.weights, self.config, state))
        if run.makes == "q":
            S = state["step"].S
            return {"q": out[0], "k": out[1][:, :, :S], "v": out[2][:, :, :S]}
        return {run.makes: tokens(out, state) if run.makes in ROWS else out}
