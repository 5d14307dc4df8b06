"""A plan: an ordered partition of the eight stages. Bytes, FLOPs, launches and round trips follow from it.

A tensor that crosses a boundary between two parts is written to memory by one kernel and read back by the next. A
tensor that is made and used inside one part never leaves the SM. That is all that fusion is.

One token at a time is other work than many: a matrix product becomes a matrix times a vector. So a plan may name other
parts for decode; `plan.at(step)` is the plan with the parts that run at a step, and all that is derived is of those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from gpukern.layer import stages
from gpukern.layer.config import Config, Step
from gpukern.layer.stages import CACHED, STAGES
from gpukern.op import InputError

_TENSORS = ("x", *(tensor for stage in STAGES.values() for tensor in stage.writes))


@dataclass(frozen=True)
class Part:
    """Neighbouring stages that one kernel runs: the kernel's version, and its tile where it is not the default."""

    stages: tuple[str, ...]
    version: str
    tile: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "+".join(self.stages)


@dataclass(frozen=True)
class Plan:
    """An ordered partition of the eight stages into parts. Raises InputError if it is not one.

    decode  the parts for one token of one sequence, where they are others
    """

    name: str
    parts: tuple[Part, ...]
    decode: tuple[Part, ...] = ()

    def __post_init__(self):
        for parts in (self.parts, self.decode) if self.decode else (self.parts,):
            order = [stage for part in parts for stage in part.stages]
            if order != list(STAGES):
                raise InputError(
                    f"plan {self.name!r} is not an ordered partition of the eight stages: it has {', '.join(order)}; "
                    f"expected {', '.join(STAGES)}."
                )

    def at(self, step: Step) -> "Plan":
        """The plan whose parts are those that run at `step`."""
        return Plan(self.name, self.decode if self.decode and step.B * step.T == 1 else self.parts)

    def with_tile(self, stage: str, tile: Mapping[str, int]) -> "Plan":
        """The same plan with another tile for the part that runs `stage`. Raises InputError for an unknown stage."""
        if stage not in STAGES:
            raise InputError(f"unknown stage {stage!r}; known are {', '.join(STAGES)}.")

        def changed(parts):
            return tuple(replace(part, tile=dict(tile)) if stage in part.stages else part for part in parts)

        return replace(self, parts=changed(self.parts), decode=changed(self.decode))


@dataclass(frozen=True)
class Cost:
    """What one part must move and compute. Bytes by what they are; `round_trips` by tensor name.

    A tensor that crosses a boundary counts whole, once for each way. (A kernel may skip what the causal mask hides.)
    """

    part: Part
    activations_read: int
    cache_read: int
    weights_read: int
    written: int
    flops: int
    round_trips: tuple[str, ...]  # tensors that it reads back from memory because an earlier part wrote them

    @property
    def bytes(self) -> int:
        return self.activations_read + self.cache_read + self.weights_read + self.written


@dataclass(frozen=True)
class Crossing:
    """A tensor that part `writer` leaves in memory for part `reader` (indices into the plan), and its size."""

    tensor: str
    writer: int
    reader: int
    bytes: int


def costs(plan: Plan, config: Config, step: Step, dtype: torch.dtype) -> list[Cost]:
    """One Cost a part, in order, derived from the partition alone."""
    return [part_cost(part, config, step, dtype) for part in plan.parts]


def part_cost(part: Part, config: Config, step: Step, dtype: torch.dtype) -> Cost:
    """What one part must move and compute. How the stages around it are cut makes no difference to it."""
    members = [STAGES[name] for name in part.stages]
    made = {tensor for stage in members for tensor in stage.writes}
    needed = {tensor for stage in members for tensor in stage.reads}
    read_later = {tensor for stage in STAGES.values() if stage not in members for tensor in stage.reads}
    outside = [tensor for tensor in _TENSORS if tensor in needed - made]
    leaving = [tensor for tensor in made if tensor in read_later or tensor in CACHED or tensor == "z"]
    weights = [w for name in part.stages for w in stages.weights(name, config)]

    def n_bytes(tensors):
        return dtype.itemsize * sum(stages.elements(tensor, config, step) for tensor in tensors)

    return Cost(
        part,
        activations_read=n_bytes(outside),
        cache_read=dtype.itemsize * sum(stages.cached(config, step) for tensor in CACHED if tensor in needed),
        weights_read=n_bytes(weights),
        written=n_bytes(leaving),
        flops=sum(stages.flops(name, config, step) for name in part.stages),
        round_trips=tuple(tensor for tensor in outside if tensor != "x"),
    )


def crossings(plan: Plan, config: Config, step: Step, dtype: torch.dtype) -> list[Crossing]:
    """Every tensor that a part hands to a later one through memory, once for each reader."""
    found = []
    for reader, part in enumerate(plan.parts):
        needed = {tensor for name in part.stages for tensor in STAGES[name].reads}
        for tensor, writer in _writers(plan).items():
            if tensor in needed and writer < reader:
                found.append(Crossing(tensor, writer, reader, stages.elements(tensor, config, step) * dtype.itemsize))
    return found


def boundary_bytes(plan: Plan, config: Config, step: Step, dtype: torch.dtype) -> list[int]:
    """For each of the len(parts) - 1 boundaries: bytes written to memory before it and read back after it."""
    result = []
    for boundary in range(len(plan.parts) - 1):
        open_here = {c.tensor: c.bytes for c in crossings(plan, config, step, dtype) if c.writer <= boundary < c.reader}
        result.append(2 * sum(open_here.values()))
    return result


def _writers(plan: Plan) -> dict[str, int]:
    return {t: i for i, part in enumerate(plan.parts) for name in part.stages for t in STAGES[name].writes}


def _singles(version: str) -> tuple[Part, ...]:
    return tuple(Part((name,), version) for name in STAGES)


_ATTENTION = ("scores", "softmax", "values")
_NORM_MLP_UP = ("norm", "mlp_up")

_FLASH = (Part(("qkv",), "triton"), Part(_ATTENTION, "triton_flash"), *_singles("triton")[4:])
_FUSED = (
    Part(("qkv",), "triton"),
    Part(_ATTENTION, "triton_flash_descriptors"),
    Part(("output",), "triton"),
    Part(_NORM_MLP_UP, "triton"),
    Part(("mlp_down",), "triton"),
)
_FUSED_DECODE = (
    Part(("qkv",), "triton_decode"),
    Part(_ATTENTION, "triton_split_kv"),
    Part(("output",), "triton_matvec"),
    Part(_NORM_MLP_UP, "triton_decode"),
    Part(("mlp_down",), "triton_matvec"),
)

PLANS = {
    plan.name: plan
    for plan in (
        Plan("reference", _singles("torch")),
        Plan("numba", _singles("numba")),
        Plan("triton", _singles("triton")),
        Plan("flash", _FLASH),
        Plan("fused", _FUSED, decode=_FUSED_DECODE),
        Plan("one_kernel", _FUSED, decode=(Part(tuple(STAGES), "triton_one_kernel"),)),
        Plan("compile", (Part(tuple(STAGES), "torch_compile"),)),
    )
}
ALIASES = {"eager": "reference"}  # PyTorch's operations as they come: what others call the eager layer

# Versions that only a card runs: torch.compile writes kernels for it, and a barrier wants all programs at once.
CARD_ONLY = ("torch_compile", "triton_one_kernel")


def plan(name: str) -> Plan:
    """The plan called `name`. Raises InputError naming the known ones."""
    name = ALIASES.get(name, name)
    if name not in PLANS:
        raise InputError(f"unknown plan {name!r}; known are {', '.join(PLANS)}.")
    return PLANS[name]
