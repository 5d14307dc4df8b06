"""Launching a Triton kernel that makes tensor descriptors: 128 bytes of memory each, which the launcher must give."""

import contextvars
from collections.abc import Callable

import torch
import triton

from gpukern import device


def launch_with_scratch(launch: Callable[[], object]) -> None:
    """Call `launch` with memory for descriptors at hand. The allocator that the caller may have set stays as it is."""

    def run():
        triton.set_allocator(_scratch)
        launch()

    contextvars.copy_context().run(run)


def _scratch(size: int, alignment: int, stream) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device=device.torch_device())
