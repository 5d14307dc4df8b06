"""vector_add in CUDA C++: the language that Numba-CUDA is a Python spelling of. The kernel is in vector_add.cu."""

from pathlib import Path

import torch

from gpukern import device
from gpukern.kernels.cpp import CppKernel
from gpukern.op import InputError, require, require_whole

_vector_add_kernel = CppKernel(Path(__file__).with_name("vector_add.cu"), "vector_add_kernel")


def vector_add(x: torch.Tensor, y: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x, y: `[N]`, contiguous. `threads` a block, of which there are ceil(N / threads). Returns x + y, `[N]`.

    The kernel is the one in Numba, statement by statement, so registers and sectors should be about the same; a pointer
    knows no stride, which Numba's arrays carry along as arguments. Needs a CUDA card.
    """
    require(x, "x", (None,))
    require(y, "y", tuple(x.shape), like=x)
    require_whole(threads=threads)
    if not (x.is_contiguous() and y.is_contiguous()):
        raise InputError("vector_add wants contiguous vectors; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    grid = (-(-out.numel() // threads),)
    device.check_launch(grid, threads)
    _vector_add_kernel[x.dtype](grid, (threads,), x, y, out, out.numel())
    return out
