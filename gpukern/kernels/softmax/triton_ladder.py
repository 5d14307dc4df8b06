"""softmax in Triton: three passes over memory, then one kernel that reads a row once, then rows of any width.

Everywhere the largest element is at least `LOWEST`, so that a row of -inf has weights exp(-inf) = 0 and not NaN.
"""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.layernorm.triton_ladder import require_registers, rows_each
from gpukern.op import InputError, require, require_power_of_two

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; -inf - -inf would be NaN, -inf - this is -inf


@triton.jit
def _visible(row, T, S, CAUSAL: tl.constexpr):
    """How many columns a row sees: the first ones. Never more than S, as row % T < T."""
    return tl.maximum((row % T).to(tl.int32) + 1 + S - T, 0) if CAUSAL else S


@triton.jit
def _load_seen(x_ptr, n, visible, S, EVICT: tl.constexpr):
    """Columns n of rows at x_ptr in float32; -inf past the first `visible` of them.

    It loads up to the next multiple of 16 columns, so that 16 bytes are loaded at once also where a row sees fewer.
    """
    mask = (n < tl.cdiv(visible, 16) * 16) & (n < S)
    x = tl.load(x_ptr + n, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return tl.where(n < visible, x, -float("inf"))


@triton.jit
def _row_max_kernel(x_ptr, top_ptr, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """First pass: the largest element that one row sees."""
    row = tl.program_id(0).to(tl.int64)
    visible, n = _visible(row, T, S, CAUSAL), tl.arange(0, BN)
    top = LOWEST
    for n0 in tl.range(0, visible, BN):
        x = _load_seen(x_ptr + row * S, n0 + n, visible, S, "")
        top = tl.maximum(top, tl.max(x, axis=0))
    tl.store(top_ptr + row, top)


@triton.jit
def _row_sum_kernel(x_ptr, top_ptr, total_ptr, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """Second pass: the sum of exp(x - max) over what one row sees."""
    row = tl.program_id(0).to(tl.int64)
    visible, n = _visible(row, T, S, CAUSAL), tl.arange(0, BN)
    top, total = tl.load(top_ptr + row), 0.0
    for n0 in tl.range(0, visible, BN):
        x = _load_seen(x_ptr + row * S, n0 + n, visible, S, "")
        total += tl.sum(tl.exp(x - top), axis=0)
    tl.store(total_ptr + row, total)


@triton.jit
def _row_quotient_kernel(x_ptr, top_ptr, total_ptr, out_ptr, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """Third pass: the weights of one row; those that it does not see are 0, whatever the others are."""
    row = tl.program_id(0).to(tl.int64)
    visible, n = _visible(row, T, S, CAUSAL), tl.arange(0, BN)
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing
    for n0 in tl.range(0, S, BN):
        weight = tl.exp(_load_seen(x_ptr + row * S, n0 + n, visible, S, "") - top) * inverse
        tl.store(out_ptr + row * S + n0 + n, tl.where(n0 + n < visible, weight, 0.0), mask=n0 + n < S)


def softmax_three_pass(x: torch.Tensor, causal: bool = False, BN: int = 1024, warps: int = 4) -> torch.Tensor:
    """x: `[..., T, S]`, contiguous. Returns the softmax over S, same shape, by three kernels: max, sum, quotient.

    It is the formula as it stands, and what an array library without a fused softmax does: x is loaded three times, and
    a maximum and a sum of each row are stored and loaded between. One program a row, BN columns (a power of two) at a
    time. causal: row i sees column j if j <= i + S - T. A row that sees nothing, or only -inf, is 0.
    """
    T, S, rows, out = _checked(x, BN, warps)
    if out.numel() == 0:
        return out
    BN = min(BN, triton.next_power_of_2(S))  # no lanes that a short row can not fill
    top, total = torch.empty((2, rows), dtype=torch.float32, device=x.device)
    tile = {"CAUSAL": causal, "BN": BN, "num_warps": warps}
    _row_max_kernel[(rows,)](x, top, T, S, **tile)
    _row_sum_kernel[(rows,)](x, top, total, T, S, **tile)
    _row_quotient_kernel[(rows,)](x, top, total, out, T, S, **tile)
    return out


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, rows, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr = 1):
    """BM rows of up to BN columns, which stay in registers from the one load to the one store."""
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]  # [BM, 1]
    n = tl.arange(0, BN)[None, :]
    visible = tl.where(row < rows, _visible(row, T, S, CAUSAL), 0)
    x = _load_seen(x_ptr + row * S, n, visible, S, "")  # [BM, BN]
    weight = tl.exp(x - tl.maximum(tl.max(x, axis=1, keep_dims=True), LOWEST))
    total = tl.sum(weight, axis=1, keep_dims=True)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing
    tl.store(out_ptr + row * S + n, tl.where(n < visible, weight * inverse, 0.0), mask=(row < rows) & (n < S))


def softmax(x: torch.Tensor, causal: bool = False, BN: int = 4096, warps: int = 8) -> torch.Tensor:
    """As softmax_three_pass, in one kernel: the row stays in registers, so x is loaded once instead of three times.

    BN: elements that a program holds, a power of two. Shorter rows share a program, where there are enough to fill the
    card: each thread then has more loads on their way. Rows longer than BN do not fit, and go to softmax_online.
    """
    T, S, rows, out = _checked(x, BN, warps)
    if out.numel() == 0:
        return out
    width = triton.next_power_of_2(S)
    if width > BN:
        return softmax_online(x, causal, BN, warps)
    require_registers(S, width, warps)
    BM = min(BN // width, rows_each(rows, warps))
    _softmax_kernel[(triton.cdiv(rows, BM),)](x, out, rows, T, S, CAUSAL=causal, BN=width, BM=BM, num_warps=warps)
    return out


@triton.jit
def _softmax_online_kernel(x_ptr, out_ptr, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """One row, read twice: the first pass finds maximum and sum together, the second writes the quotients.

    Each lane keeps the sum of its columns relative to the largest of them so far; a larger one rescales it. Only at the
    end are the lanes put together. Tiles that the row does not see are never read.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * S
    out_ptr += row * S
    visible, n = _visible(row, T, S, CAUSAL), tl.arange(0, BN)
    tops = tl.full((BN,), LOWEST, dtype=tl.float32)
    totals = tl.zeros((BN,), dtype=tl.float32)
    for n0 in tl.range(0, visible, BN):  # evict_last: the second pass finds the row in the L2
        x = _load_seen(x_ptr, n0 + n, visible, S, "evict_last")
        new_tops = tl.maximum(tops, x)
        totals = totals * tl.exp(tops - new_tops) + tl.exp(x - new_tops)
        tops = new_tops

    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp(tops - top), axis=0)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing
    for n0 in tl.range(0, S, BN):
        weight = tl.exp(_load_seen(x_ptr, n0 + n, visible, S, "evict_first") - top) * inverse
        tl.store(out_ptr + n0 + n, tl.where(n0 + n < visible, weight, 0.0), mask=n0 + n < S)


def softmax_online(x: torch.Tensor, causal: bool = False, BN: int = 4096, warps: int = 32) -> torch.Tensor:
    """As softmax, for rows of any width: BN columns at a time, so x is loaded twice, and registers do not grow with S.

    Two passes instead of three, as maximum and sum are found in one: Milakov and Gimelshein, *Online normalizer
    calculation for softmax* (arXiv 1805.02867).
    """
    T, S, rows, out = _checked(x, BN, warps)
    if out.numel() == 0:
        return out
    BN = min(BN, triton.next_power_of_2(S))
    _softmax_online_kernel[(rows,)](x, out, T, S, CAUSAL=causal, BN=BN, num_warps=warps)
    return out


def _checked(x: torch.Tensor, BN: int, warps: int) -> tuple[int, int, int, torch.Tensor]:
    """Refuse what the kernels do not take. Returns T, S, the number of rows and memory for the output."""
    require(x, "x", (None,) * max(2, getattr(x, "ndim", 2)))
    require_power_of_two(BN=BN, warps=warps)
    if not x.is_contiguous():
        raise InputError("softmax wants contiguous rows; call .contiguous() first.")
    out = torch.empty_like(x)
    T, S = x.shape[-2:]
    rows = out.numel() // max(S, 1)
    device.check_launch(max(rows, 1), 32 * warps)
    return T, S, rows, out
