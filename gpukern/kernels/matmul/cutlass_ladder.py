"""matmul with CUTLASS, NVIDIA's library of matrix kernels, in its Python language CuTe: for Hopper, in 16-bit types.

CuTe's idea is the *layout*, a function from coordinates to addresses. A matrix, a tile of it, the swizzled copy of that
tile in shared memory, and the elements that one thread holds are all layouts; the library partitions one by another,
and what is left to write is the order of things. Here: one warp, the producer, has the copy engine (TMA) bring tiles of
a and w into a ring of stages; groups of four warps, the consumers, multiply them (wgmma). A barrier for each stage says
that it is full, another that it is used up. So no thread spends registers or instructions on addresses of loads, and
none waits for memory as long as the ring is ahead.

Against the Triton version: the same instructions, with the roles of the warps written down instead of chosen by a
compiler. Needs the extra `cutlass`.
"""

import functools

import cutlass
import cutlass.utils.hopper_helpers as hopper
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gpukern import device
from gpukern.op import InputError, require

_TYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
_ALIGNED = 8  # elements of 2 bytes: the copy engine wants rows that start at multiples of 16 bytes


class _MatmulKernel:
    """The kernel of one tile, one pair of orders in memory and one epilogue."""

    def __init__(self, tile: tuple[int, int, int], stages: int, a_rows: bool, w_rows: bool, epilogue: tuple):
        self.tile, self.stages = tile, stages
        self.a_rows, self.w_rows = a_rows, w_rows  # rows side by side in memory, or columns
        self.has_bias, self.has_gelu, self.has_residual = epilogue
        self.consumers = tile[0] // 64 * 4  # warps: a group of four multiplies 64 rows

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        a_step: cutlass.Int64,  # elements from one row (or column) to the next, a multiple of 8
        w: cute.Pointer,
        w_step: cutlass.Int64,
        bias: cute.Pointer,
        residual: cute.Pointer,
        r_m: cutlass.Int64,
        r_n: cutlass.Int64,
        out: cute.Pointer,
        M: cutlass.Int32,
        N: cutlass.Int32,
        K: cutlass.Int32,
        stream: CUstream,
    ):
        """On the host: lay out the matrices, make the copy engine's descriptors, launch."""
        BM, BN, BK = self.tile
        a_step, w_step = cute.assume(a_step, divby=_ALIGNED), cute.assume(w_step, divby=_ALIGNED)
        a = cute.make_tensor(a, cute.make_layout((M, K), stride=(a_step, 1) if self.a_rows else (1, a_step)))
        # CuTe counts the second operand as [N, K], whatever its order in memory.
        w = cute.make_tensor(w, cute.make_layout((N, K), stride=(1, w_step) if self.w_rows else (w_step, 1)))
        bias = cute.make_tensor(bias, cute.make_layout((M, N), stride=(0, 1)))  # the same row M times
        residual = cute.make_tensor(residual, cute.make_layout((M, N), stride=(r_m, r_n)))
        out = cute.make_tensor(out, cute.make_layout((M, N), stride=(cutlass.Int64(N), 1)))

        dtype = a.element_type
        a_order, w_order = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(w)
        mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, a_order.sm90_mma_major_mode(), w_order.sm90_mma_major_mode(), cutlass.Float32,
            (BM // 64, 1, 1), (64, BN),
        )  # fmt: skip
        a_shared = hopper.make_smem_layout_a(a_order, self.tile, dtype, self.stages)  # (BM, BK, stages), swizzled
        w_shared = hopper.make_smem_layout_b(w_order, self.tile, dtype, self.stages)  # (BN, BK, stages)
        copy = cpasync.CopyBulkTensorTileG2SOp()
        copy_a, a = cpasync.make_tiled_tma_atom(copy, a, cute.slice_(a_shared, (None, None, 0)), (BM, BK))
        copy_w, w = cpasync.make_tiled_tma_atom(copy, w, cute.slice_(w_shared, (None, None, 0)), (BN, BK))

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(a_shared)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(w_shared)], 1024]

        self.shared = Shared
        self.kernel(copy_a, a, copy_w, w, bias, residual, out, mma, a_shared, w_shared).launch(
            grid=(cute.ceil_div(M, BM), cute.ceil_div(N, BN), 1),
            block=(32 * (self.consumers + 1), 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        copy_a: cute.CopyAtom,
        a: cute.Tensor,
        copy_w: cute.CopyAtom,
        w: cute.Tensor,
        bias: cute.Tensor,
        residual: cute.Tensor,
        out: cute.Tensor,
        mma: cute.TiledMma,
        a_shared: cute.ComposedLayout,
        w_shared: cute.ComposedLayout,
    ):
        """One block computes one tile BM x BN of the output."""
        BM, BN, BK = self.tile
        dtype = out.element_type
        tile = cute.arch.block_idx()[:2]
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        shared = SmemAllocator().allocate(self.shared)
        a_ring = shared.a.get_tensor(a_shared.outer, swizzle=a_shared.inner)
        w_ring = shared.w.get_tensor(w_shared.outer, swizzle=w_shared.inner)
        one = (None, None, 0)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.consumers),
            tx_count=sum(cute.size_in_bytes(dtype, cute.slice_(s, one)) for s in (a_shared, w_shared)),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        a_tiles = cute.local_tile(a, (BM, BK), (tile[0], None))  # (BM, BK, rounds)
        w_tiles = cute.local_tile(w, (BN, BK), (tile[1], None))  # (BN, BK, rounds)
        rounds = cute.size(a_tiles, mode=[2])

        if warp == self.consumers:  # the producer
            alone = cute.make_layout(1)
            a_to, a_from = cpasync.tma_partition(
                copy_a, 0, alone, cute.group_modes(a_ring, 0, 2), cute.group_modes(a_tiles, 0, 2)
            )
            w_to, w_from = cpasync.tma_partition(
                copy_w, 0, alone, cute.group_modes(w_ring, 0, 2), cute.group_modes(w_tiles, 0, 2)
            )
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for k in cutlass.range(rounds, unroll=1):
                ring.producer_acquire(state)  # waits until the stage is used up; the barrier then expects its bytes
                full = ring.producer_get_barrier(state)
                cute.copy(copy_a, a_from[None, k], a_to[None, state.index], tma_bar_ptr=full)
                cute.copy(copy_w, w_from[None, k], w_to[None, state.index], tma_bar_ptr=full)
                state.advance()
            ring.producer_tail(state)
        else:
            group = mma.get_slice(cute.arch.make_warp_uniform(thread // 128) * 128)
            a_part = mma.make_fragment_A(group.partition_A(a_ring))  # not registers: descriptors of shared memory
            w_part = mma.make_fragment_B(group.partition_B(w_ring))
            mine = mma.get_slice(thread)
            out_part = mine.partition_C(cute.local_tile(out, (BM, BN), tile))
            acc = cute.make_rmem_tensor(out_part.shape, cutlass.Float32)
            acc.fill(0.0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            used = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            for k in cutlass.range(rounds, unroll=1):
                ring.consumer_wait(full)
                warpgroup.fence()
                for i in cutlass.range_constexpr(cute.size(a_part, mode=[2])):  # 16 of the BK columns at a time
                    cute.gemm(mma, acc, a_part[None, None, i, full.index], w_part[None, None, i, full.index], acc)
                warpgroup.commit_group()
                full.advance()
                if k > 0:  # the product before this one is done: its stage may be filled again
                    warpgroup.wait_group(1)
                    ring.consumer_release(used)
                    used.advance()
            warpgroup.wait_group(0)
            ring.consumer_release(used)

            at = mine.partition_C(cute.local_tile(cute.make_identity_tensor(out.shape), (BM, BN), tile))
            bias_part = mine.partition_C(cute.local_tile(bias, (BM, BN), tile))
            residual_part = mine.partition_C(cute.local_tile(residual, (BM, BN), tile))
            for i in cutlass.range(cute.size(acc), unroll_full=True):
                if cute.elem_less(at[i], out.shape):
                    value = acc[i]
                    if cutlass.const_expr(self.has_bias):
                        value += bias_part[i].to(cutlass.Float32)
                    if cutlass.const_expr(self.has_gelu):
                        u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
                        value = value / (1.0 + cute.math.exp(-2.0 * u))
                    if cutlass.const_expr(self.has_residual):
                        value += residual_part[i].to(cutlass.Float32)
                    out_part[i] = value.to(dtype)


@functools.cache
def _compiled(dtype: torch.dtype, tile: tuple, stages: int, a_rows: bool, w_rows: bool, epilogue: tuple, *options):
    """The compiled kernel, for any sizes; needs no card. options: more of cute.compile."""
    kernel = _MatmulKernel(tile, stages, a_rows, w_rows, epilogue)
    aligned, free = (make_ptr(_TYPES[dtype], 16, cute.AddressSpace.gmem, assumed_align=n) for n in (16, 2))
    sizes = (1, 1, 1)
    return cute.compile[(cute.GPUArch("sm_90a"), *options)](
        kernel, aligned, _ALIGNED, aligned, _ALIGNED, free, free, 1, 1, aligned, *sizes, CUstream(0)
    )


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 256,
    BK: int = 64,
    stages: int = 4,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, float16 or bfloat16; bias: `[N]`, contiguous; activation: None or "gelu".

    residual    `[M, N]`, any strides
    BM, BN, BK  tile: 64 or 128; 64, 128 or 256; 32, 64 or 128
    stages      of the ring, from 2

    A matrix that the copy engine cannot read (neither rows nor columns side by side, or not at multiples of 16 bytes)
    is copied first. Returns activation(a @ w + bias) + residual, `[M, N]`, added up in float32 and rounded once.
    Raises InputError for other arguments, LimitError for a ring too large, DeviceError without a card of Hopper's kind.
    """
    require(a, "a", (None, None), dtypes=tuple(_TYPES))
    M, K = a.shape
    require(w, "w", (K, None), like=a, dtypes=tuple(_TYPES))
    N = w.shape[1]
    if bias is not None:
        require(bias, "bias", (N,), like=a, dtypes=tuple(_TYPES))
        if not bias.is_contiguous():
            raise InputError("bias is not contiguous; call .contiguous() first.")
    if activation not in (None, "gelu"):
        raise InputError(f'activation={activation!r} is not known; use None or "gelu".')
    if residual is not None:
        require(residual, "residual", (M, N), like=a, dtypes=tuple(_TYPES))
    for name, n, known in (("BM", BM, (64, 128)), ("BN", BN, (64, 128, 256)), ("BK", BK, (32, 64, 128))):
        if n not in known:
            raise InputError(f"{name}={n!r} is not one of {', '.join(map(str, known))}.")
    if not isinstance(stages, int) or stages < 2:
        raise InputError(f"stages={stages!r} must be a whole number from 2: one is filled while one is used.")
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    grid = (-(-M // BM), -(-N // BN))
    device.check_launch(grid, 32 * (BM // 64 * 4 + 1), shared_bytes(BM, BN, BK, stages, a.dtype))
    if device.simulated() or device.card().compute_capability[0] != 9:
        raise device.DeviceError(
            "this version of matmul is CUTLASS for Hopper, which needs a CUDA card of compute capability 9.0 (H100, "
            "H200). Choose another version to run here."
        )
    a, a_step, a_rows = _for_copy_engine(a)
    w, w_step, w_rows = _for_copy_engine(w)
    epilogue = (bias is not None, activation == "gelu", residual is not None)
    run = _compiled(a.dtype, (BM, BN, BK), stages, a_rows, w_rows, epilogue)
    bias = out if bias is None else bias
    residual = out if residual is None else residual
    stream = CUstream(torch.cuda.current_stream().cuda_stream)
    run(
        _pointer(a, 16), a_step, _pointer(w, 16), w_step, _pointer(bias, 2), _pointer(residual, 2), *residual.stride(),
        _pointer(out, 16), M, N, max(K, 1), stream,
    )  # fmt: skip
    return out


def shared_bytes(BM: int, BN: int, BK: int, stages: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Shared memory of one block, in bytes: the ring, two barriers a stage, and what aligns both."""
    return stages * (BM + BN) * BK * dtype.itemsize + 2 * 1024


def _for_copy_engine(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """x or a copy that the copy engine can read; elements from one row (column) to the next; True for rows."""
    for along, across, rows in ((1, 0, True), (0, 1, False)):
        step = x.stride(across)
        fits = x.stride(along) == 1 and step % _ALIGNED == 0 and step >= x.shape[along]
        if fits and x.numel() > 0 and x.data_ptr() % 16 == 0:
            return x, step, rows
    width = -(-max(x.shape[1], 1) // _ALIGNED) * _ALIGNED
    padded = torch.zeros(max(x.shape[0], 1), width, dtype=x.dtype, device=x.device)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded, width, True


def _pointer(tensor: torch.Tensor, aligned: int):
    return make_ptr(_TYPES[tensor.dtype], tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=aligned)
