"""The shapes of the layer: a model's sizes (Config) and one step's sizes (Step), in the course's one alphabet."""

from dataclasses import dataclass

from gpukern.op import InputError


@dataclass(frozen=True)
class Config:
    """Sizes of one transformer layer.

    C model width, H heads, F MLP width; D = C / H.
    first_norm  True where a LayerNorm stands before QKV (GPT-2): it is a prologue of stage 1
    """

    name: str
    C: int
    H: int
    F: int
    first_norm: bool = False
    eps: float = 1e-5

    def __post_init__(self):
        for name, n in (("C", self.C), ("H", self.H), ("F", self.F)):
            if n < 1:
                raise InputError(f"{self.name}: {name}={n} must be at least 1.")
        if self.C % self.H:
            raise InputError(f"{self.name}: C={self.C} is not a multiple of H={self.H}")

    @property
    def D(self) -> int:
        return self.C // self.H


@dataclass(frozen=True)
class Step:
    """One run of the layer: B sequences, T new tokens each, S tokens attended to (the T new ones are the last of S).

    Prefill is S = T on an empty cache; decode is T = 1; a chunk of T > 1 tokens onto a filled cache is S > T.
    """

    B: int
    T: int
    S: int

    def __post_init__(self):
        for name, n in (("B", self.B), ("T", self.T), ("S", self.S)):
            if n < 1:
                raise InputError(f"{name}={n}: a step needs at least one of it.")
        if self.S < self.T:
            raise InputError(f"S={self.S} tokens attended to cannot be fewer than the T={self.T} new ones.")

    @property
    def phase(self) -> str:
        return "decode" if self.T == 1 and self.S > 1 else "prefill"

    @property
    def pairs(self) -> int:
        """Query-key pairs that the causal mask lets see each other, in one head of one sequence."""
        return self.T * self.S - self.T * (self.T - 1) // 2


CONFIGS = {
    config.name: config
    for config in (
        Config("tiny", C=64, H=4, F=256),
        Config("gpt2", C=768, H=12, F=3072),
        Config("c4096", C=4096, H=32, F=16384),
    )
}
