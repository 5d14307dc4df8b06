"""matmul in Triton by programs that stay: as many as the SMs hold at once, each of which walks over tiles.

Tiles are loaded and stored through tensor descriptors, by the card's copy engine (TMA, compute capability 9.0).
Source: Triton's tutorial 09, *Persistent Matmul*.
"""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.descriptors import launch_with_scratch
from gpukern.kernels.gelu.triton_ladder import gelu_tile
from gpukern.kernels.matmul import triton_ladder
from gpukern.kernels.matmul.triton_ladder import GROUP, matmul, require_dot_tile, require_product


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile [BM, BN]."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _matmul_persistent_kernel(
    a_ptr,
    w_ptr,
    bias_ptr,  # or None
    residual_ptr,  # or None
    out_ptr,  # contiguous
    M,
    N,
    K,
    stride_am,
    stride_w,  # from one row of w to the next; from one column to the next, if they are what lies side by side
    stride_rm,
    COLUMNS: tl.constexpr,  # do the elements of a column of w lie side by side, and not those of a row?
    GELU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Tiles p, p + programs, p + 2 programs ... of the output, in the grouped order.

    The two loops are flattened into one, so that the first loads of a tile overlap with the epilogue of the one before.
    """
    a_tiles = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_am, 1], [BM, BK])
    if COLUMNS:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [N, K], [stride_w, 1], [BN, BK])
    else:
        w_tiles = tl.make_tensor_descriptor(w_ptr, [K, N], [stride_w, 1], [BK, BN])
    out_tiles = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BM, BN // 4])
    if residual_ptr is not None:
        residual_tiles = tl.make_tensor_descriptor(residual_ptr, [M, N], [stride_rm, 1], [BM, BN // 4])
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, GROUP)
        m0, n0 = tile_m * BM, tile_n * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in tl.range(0, K, BK):
            a = a_tiles.load([m0, k0])  # past the end there are zeros
            w = w_tiles.load([n0, k0]).T if COLUMNS else w_tiles.load([k0, n0])
            acc = tl.dot(a, w, acc, input_precision="ieee")

        # In quarters: the tile that waits in shared memory to be stored is small, which leaves room for the loads.
        left, right = _halves(acc, BM, BN)
        for half in tl.static_range(2):
            first, second = _halves(left if half == 0 else right, BM, BN // 2)
            for quarter in tl.static_range(2):
                n1 = n0 + half * (BN // 2) + quarter * (BN // 4)
                part = first if quarter == 0 else second
                if bias_ptr is not None:
                    n = n1 + tl.arange(0, BN // 4)
                    part += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
                if GELU:
                    part = gelu_tile(part)
                if residual_ptr is not None:
                    part += residual_tiles.load([m0, n1]).to(tl.float32)
                out_tiles.store([m0, n1], part.to(out_ptr.dtype.element_ty))


def matmul_persistent(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 256,
    BK: int = 64,
    warps: int = 8,
    stages: int = 4,
) -> torch.Tensor:
    """As matmul, by programs that stay and walk over tiles, which the copy engine loads and stores.

    As many programs start as the SMs hold at once, and no thread computes or holds addresses of a and w: in the
    compiled kernel tma copies appear, asynchronous copies by threads vanish, and larger tiles fit the registers.

    A descriptor wants rows (of w also: columns) whose elements lie side by side, and which begin at multiples of 16
    bytes, those of the output too. Where that is not so, and for float32, which no tensor core multiplies with all its
    digits, `matmul` runs: with the same tile, of float32 half as deep, which is as many bytes. Arguments and errors as
    matmul_naive.
    """
    M, N, K = require_product(a, w, bias, activation, residual)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    device.check_launch(1, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, a.dtype))
    columns = w.stride(0) == 1 and w.stride(1) != 1
    described = [a, w.T if columns else w] + ([residual] if residual is not None else [])
    if a.dtype == torch.float32 or not all(map(_describable, described)) or N * a.itemsize % 16 or BN < 32 or K == 0:
        return matmul(a, w, bias, activation, residual, BM, BN, _depth(BK, a.dtype), warps, stages)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    tiles = triton.cdiv(M, BM) * triton.cdiv(N, BN)
    grid = (min(tiles, device.card().sms * programs_per_sm(BM, BN, BK, warps, stages, a.dtype)),)
    strides = [_row_stride(tensor) for tensor in described]

    def launch():
        _matmul_persistent_kernel[grid](
            a, w, bias, residual, out, M, N, K, *strides[:2], strides[2] if residual is not None else 0,
            COLUMNS=columns, GELU=activation == "gelu", BM=BM, BN=BN, BK=BK, GROUP=GROUP,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    launch_with_scratch(launch)
    return out


def _describable(tensor: torch.Tensor) -> bool:
    """Can a descriptor describe this matrix? Its rows lie side by side and begin at multiples of 16 bytes."""
    aligned = tensor.data_ptr() % 16 == 0 and _row_stride(tensor) * tensor.itemsize % 16 == 0
    return tensor.stride(1) == 1 and _row_stride(tensor) > 0 and aligned


def _row_stride(tensor: torch.Tensor) -> int:
    """From one row to the next; of a single row nothing depends on it, and it may be any multiple of 16."""
    return tensor.stride(0) if tensor.shape[0] > 1 else triton.cdiv(tensor.shape[1], 16) * 16


def _depth(BK: int, dtype: torch.dtype) -> int:
    """BK of a tile of this type that has the bytes of a 16-bit tile of BK."""
    return max(16, BK * 2 // dtype.itemsize)


def programs_per_sm(BM: int, BN: int, BK: int, warps: int, stages: int, dtype: torch.dtype) -> int:
    """How many programs an SM of this card holds at once, by shared memory and by registers, of which a thread needs
    its part of the output tile and about as many as 64 beside it."""
    card, threads = device.card(), 32 * warps
    shared = shared_bytes(BM, BN, BK, warps, stages, dtype) + 1024  # the system's own, a block
    registers = min(BM * BN // threads + 64, card.registers_per_thread)
    return max(1, min(card.shared_per_sm // shared, card.registers_per_sm // (threads * registers)))


def shared_bytes(
    BM: int, BN: int, BK: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None
) -> int:
    """Shared memory of one program on `on`, in bytes, but for barriers: the tiles of a and w in flight, and a quarter
    each of the output's tile and the residual's, if there is one."""
    depth = _depth(BK, dtype)
    quarters = 0 if dtype.itemsize == 4 else 2 * BM * BN // 4 * dtype.itemsize
    return triton_ladder.shared_bytes(BM, BN, depth, warps, stages, dtype, on) + quarters
