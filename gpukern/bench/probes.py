"""How fast a card reads: a kernel that reads and does next to nothing, the limit that decode work is held against."""

import torch
import triton
import triton.language as tl

from gpukern import device


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for j in tl.static_range(LOADS):  # many loads under way at once, which is what it takes to fill the memory's pipe
        i = (program * LOADS + j) * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(x_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + program, tl.xor_sum(total, 0))


def read(x: torch.Tensor, BLOCK: int = 2048, LOADS: int = 4, warps: int = 8) -> torch.Tensor:
    """Read every byte of a tensor (dense, of a multiple of 4 bytes) once; returns one int32 a program."""
    dense = x if x.is_contiguous() else x.t()
    words = dense.view(-1).view(torch.int32)
    programs = triton.cdiv(words.numel(), BLOCK * LOADS)
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    device.check_launch(programs, warps * 32)
    _read_kernel[(programs,)](words, out, words.numel(), BLOCK, LOADS, num_warps=warps)
    return out
