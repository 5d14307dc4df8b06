"""The eight stages, and what each of them reads and writes. Everything the course says of bytes is derived from here.

A tensor is named once: `x` in; `q k v`; `scores`; `probs`; `attn`; `y` (after W_O and the residual); `n` (normalised);
`h` (MLP hidden); `z` out. `k` and `v` live in the KV cache, so they are always written to memory.
"""

from dataclasses import dataclass

from gpukern.layer.config import Config, Step


@dataclass(frozen=True)
class Stage:
    """One stage: its number, what it computes, the tensors it reads and writes, and its weights."""

    number: int
    name: str
    computes: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...] = ()


STAGES = {
    stage.name: stage
    for stage in (
        Stage(1, "qkv", "Q, K, V at once from x", ("x",), ("q", "k", "v"), ("w_qkv", "b_qkv")),
        Stage(2, "scores", "Q Kᵀ / √D", ("q", "k"), ("scores",)),
        Stage(3, "softmax", "causal mask, softmax", ("scores",), ("probs",)),
        Stage(4, "values", "softmax weights × V", ("probs", "v"), ("attn",)),
        Stage(5, "output", "× W_O, plus the residual", ("attn", "x"), ("y",), ("w_o", "b_o")),
        Stage(6, "norm", "LayerNorm", ("y",), ("n",), ("gamma", "beta")),
        Stage(7, "mlp_up", "× W_1, then GELU", ("n",), ("h",), ("w_1", "b_1")),
        Stage(8, "mlp_down", "× W_2, plus the residual", ("h", "y"), ("z",), ("w_2", "b_2")),
    )
}

CACHED = ("k", "v")  # kept in memory for the tokens to come
MATRIX_STAGES = ("qkv", "output", "mlp_up", "mlp_down")


def elements(tensor: str, config: Config, step: Step) -> int:
    """Elements of a tensor or a weight. `k` and `v` count the T new rows; the S - T old ones are `cached`."""
    B, T, S, C, H, F = step.B, step.T, step.S, config.C, config.H, config.F
    sizes = {
        **dict.fromkeys(("x", "q", "k", "v", "attn", "y", "n", "z"), B * T * C),
        **dict.fromkeys(("scores", "probs"), B * H * T * S),
        "h": B * T * F,
        "w_qkv": C * 3 * C,
        "b_qkv": 3 * C,
        "w_o": C * C,
        "w_1": C * F,
        "b_1": F,
        "w_2": F * C,
        **dict.fromkeys(("b_o", "b_2", "gamma", "beta", "first_gamma", "first_beta"), C),
    }
    return sizes[tensor]


def cached(config: Config, step: Step) -> int:
    """Elements of K (or of V) that earlier steps left in the cache and this step reads."""
    return step.B * (step.S - step.T) * config.C


def weights(stage: str, config: Config) -> tuple[str, ...]:
    """Weights that a stage reads; GPT-2's first norm belongs to stage 1."""
    first = ("first_gamma", "first_beta") if stage == "qkv" and config.first_norm else ()
    return first + STAGES[stage].weights


def product(stage: str, config: Config, step: Step) -> tuple[int, int, int, int] | None:
    """(batch, M, N, K) of a stage's matrix product, or None. The batch of `scores` and `values` is B * H."""
    B, T, S, C, F = step.B, step.T, step.S, config.C, config.F
    return {
        "qkv": (1, B * T, 3 * C, C),
        "scores": (B * config.H, T, S, config.D),
        "values": (B * config.H, T, config.D, S),
        "output": (1, B * T, C, C),
        "mlp_up": (1, B * T, F, C),
        "mlp_down": (1, B * T, C, F),
    }.get(stage)


def flops(stage: str, config: Config, step: Step) -> int:
    """Floating-point operations of the stage's mathematics: what the causal mask hides is not counted.

    Matrix products count 2 a multiply-add. Element-wise work is small beside them: softmax counts 4 a visible score
    (subtract, exponential, sum, divide), LayerNorm 8 and GELU 8 an element, bias and residual 1 an element.
    """
    B, T, C, H, F = step.B, step.T, config.C, config.H, config.F
    visible = B * H * step.pairs
    return {
        "qkv": 2 * B * T * C * 3 * C + B * T * 3 * C + (8 * B * T * C if config.first_norm else 0),
        "scores": 2 * visible * config.D,
        "softmax": 4 * visible,
        "values": 2 * visible * config.D,
        "output": 2 * B * T * C * C + 2 * B * T * C,
        "norm": 8 * B * T * C,
        "mlp_up": 2 * B * T * C * F + 9 * B * T * F,
        "mlp_down": 2 * B * T * F * C + 2 * B * T * C,
    }[stage]
