"""layernorm in Triton: a row that stays in registers; rows of any width, read twice; the residual added on the way."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.vector_add.triton_ladder import vector_add
from gpukern.op import InputError, require, require_power_of_two

PER_THREAD = 16  # elements: rows so short that a thread would get fewer share a program


@triton.jit
def _layernorm_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    out_ptr,
    rows,
    C,
    eps,
    BC: tl.constexpr,
    BM: tl.constexpr = 1,
    residual_ptr=None,  # added to x first
    sum_ptr=None,  # where that sum is kept
):
    """BM rows of C elements in a tile [BM, BC]; they are read once, both passes of the variance are over registers."""
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]  # [BM, 1]
    c = tl.arange(0, BC)[None, :]
    mask = (row < rows) & (c < C)
    x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * C + c, x, mask=mask)
    gamma = tl.load(gamma_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + c, mask=c < C, other=0.0).to(tl.float32)

    mean = tl.sum(x, axis=1, keep_dims=True) / C
    centred = tl.where(mask, x - mean, 0.0)  # a lane past the end is not a 0 - mean
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / C
    out = centred * tl.rsqrt(variance + eps) * gamma + beta
    tl.store(out_ptr + row * C + c, out, mask=mask)


def layernorm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, warps: int = 4
) -> torch.Tensor:
    """x: `[..., C]`, gamma, beta: `[C]`, contiguous. Returns the normalised rows, shape of x.

    Short rows share a program, where there are enough to fill the card. Raises LimitError for a row that `warps` warps
    have no registers for.
    """
    return _in_registers(x, None, gamma, beta, eps, False, warps)


@triton.jit
def _layernorm_two_pass_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    out_ptr,
    C,
    eps,
    BC: tl.constexpr,
    residual_ptr=None,  # added to x first
    sum_ptr=None,  # where that sum is kept
):
    """One row, BC columns at a time, read twice: mean and variance in the first pass, the output in the second.

    Each lane keeps mean and squared distances of its columns by Welford's update, which loses no digits to a large mean
    as E[x^2] - mean^2 would; at the end the lanes are put together by Chan's formula.
    """
    row = tl.program_id(0).to(tl.int64)
    start = row * C
    lane = tl.arange(0, BC)
    means = tl.zeros((BC,), dtype=tl.float32)
    squares = tl.zeros((BC,), dtype=tl.float32)
    for c0 in tl.range(0, C, BC):  # evict_last: the second pass finds the row in the L2
        at, mask = start + c0 + lane, c0 + lane < C
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if sum_ptr is not None:
            tl.store(sum_ptr + at, x, mask=mask)
        step = tl.where(mask, x - means, 0.0)
        means += step / (c0 // BC + 1)
        squares += step * tl.where(mask, x - means, 0.0)

    count = (C - lane + BC - 1) // BC  # columns that a lane has seen
    mean = tl.sum(count * means, axis=0) / C
    variance = tl.sum(squares + count * (means - mean) * (means - mean), axis=0) / C
    rstd = tl.rsqrt(variance + eps)
    for c0 in tl.range(0, C, BC):
        c, mask = c0 + lane, c0 + lane < C
        x = tl.load(x_ptr + start + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + start + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gamma = tl.load(gamma_ptr + c, mask=mask, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + start + c, (x - mean) * rstd * gamma + beta, mask=mask)


def layernorm_two_pass(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, BC: int = 16384, warps: int = 32
) -> torch.Tensor:
    """As layernorm, for rows of any width: BC columns (a power of two) at a time, so registers do not grow with C.

    x is loaded twice; the second time from the L2, if the rows that are in work fit there.
    Source: Welford, *Note on a method for calculating corrected sums of squares and products* (1962); Chan, Golub and
    LeVeque, *Updating formulae and a pairwise algorithm for computing sample variances* (1979).
    """
    return _two_pass(x, None, gamma, beta, eps, False, BC, warps)


def residual_two_kernels(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-5,
    keep_sum: bool = False,
    warps: int = 8,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The layernorm of x + residual, by vector_add and layernorm: the sum goes to memory and comes back.

    x, residual: `[..., C]`, gamma, beta: `[C]`, contiguous. Returns the normalised rows; with keep_sum the sum, too.
    """
    _check(x, residual, gamma, beta, warps)
    total = vector_add(x.view(-1), residual.view(-1)).view(x.shape)
    out = layernorm(total, gamma, beta, eps, warps)
    return (out, total) if keep_sum else out


def residual_layernorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-5,
    keep_sum: bool = False,
    warps: int = 8,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As residual_two_kernels, in one: the sum is made in the registers that are normalised.

    One launch instead of two; the sum is not loaded again, and not stored unless it is asked for, so that 3 elements
    move for each of x (4 with the sum) and not 5. Raises LimitError for a row that does not fit the registers.
    """
    return _in_registers(x, residual, gamma, beta, eps, keep_sum, warps)


def residual_two_pass(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-5,
    keep_sum: bool = False,
    BC: int = 16384,
    warps: int = 32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As residual_layernorm, for rows of any width: BC columns at a time; x and residual are loaded twice."""
    return _two_pass(x, residual, gamma, beta, eps, keep_sum, BC, warps)


def _in_registers(x, residual, gamma, beta, eps, keep_sum, warps):
    C, rows = _check(x, residual, gamma, beta, warps)
    BC = triton.next_power_of_2(C)
    require_registers(C, BC, warps)
    out, total = torch.empty_like(x), torch.empty_like(x) if keep_sum else None
    if out.numel():
        BM = max(1, min(PER_THREAD * 32 * warps // BC, rows_each(rows, warps)))
        _layernorm_kernel[(triton.cdiv(rows, BM),)](
            x, gamma, beta, out, rows, C, eps, BC=BC, BM=BM, residual_ptr=residual, sum_ptr=total, num_warps=warps
        )
    return (out, total) if keep_sum else out


def _two_pass(x, residual, gamma, beta, eps, keep_sum, BC, warps):
    C, rows = _check(x, residual, gamma, beta, warps)
    require_power_of_two(BC=BC)
    BC = min(BC, triton.next_power_of_2(C))
    require_registers(BC, BC, warps)
    out, total = torch.empty_like(x), torch.empty_like(x) if keep_sum else None
    if out.numel():
        _layernorm_two_pass_kernel[(rows,)](
            x, gamma, beta, out, C, eps, BC=BC, residual_ptr=residual, sum_ptr=total, num_warps=warps
        )
    return (out, total) if keep_sum else out


def _check(x, residual, gamma, beta, warps) -> tuple[int, int]:
    """Refuse what no kernel here takes. Returns C and the number of rows."""
    require(x, "x", (None,) * max(1, getattr(x, "ndim", 1)))
    C = x.shape[-1]
    tensors = {"x": x, "gamma": gamma, "beta": beta}
    require(gamma, "gamma", (C,), like=x)
    require(beta, "beta", (C,), like=x)
    if residual is not None:
        require(residual, "residual", tuple(x.shape), like=x)
        tensors["residual"] = residual
    require_power_of_two(warps=warps)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous; call .contiguous() first.")
    rows = x.numel() // max(C, 1)
    device.check_launch(max(rows, 1), 32 * warps)
    return C, rows


def rows_each(rows: int, warps: int) -> int:
    """The most rows (a power of two) that a program of `warps` warps may take and leave programs to fill the card."""
    card = device.card()
    full = card.sms * max(1, card.warps_per_sm // warps)
    return 1 << (max(1, rows // full).bit_length() - 1)


def require_registers(columns: int, tile: int, warps: int) -> None:
    """Refuse a tile of which each thread of `warps` warps would get more elements than it has registers."""
    most = device.card().registers_per_thread
    if tile // (32 * warps) > most:
        raise device.LimitError(
            f"a row of {columns} is {tile // (32 * warps)} values for each thread of {warps} warps, and a thread has "
            f"{most} registers. Use more warps."
        )
