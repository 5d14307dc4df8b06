"""attention in Numba-CUDA: three kernels in a row, the scores and the weights going through memory."""

import torch

from gpukern.kernels.scores.numba_ladder import scores
from gpukern.kernels.softmax.numba_ladder import softmax
from gpukern.kernels.values.numba_ladder import values


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """q: `[B, H, T, D]`, k and v: `[B, H, S, D]`, any strides. Returns `[B, T, H D]`, the heads merged.

    With `causal`, query i sees key j if j <= i + S - T.
    """
    return values(softmax(scores(q, k), causal), v)
