"""Kernels whose counters are held against Nsight Compute's: each access pattern, width and shape once.

A case is launched in the same way on a card (`hardware.py`) and on the simulated GPU (tests/test_validation.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numba import cuda, float32, float64, int8, int16, int32, int64

from gpukern.kernels.intrinsics import load4, store4

CASES = {}


@dataclass
class Case:
    """One launch. arguments: makes them, arrays on the card; the last array is the result.

    differs  {counter: why the compiled kernel has another number than its source}
    """

    name: str
    kernel: object
    grid: object
    block: object
    arguments: Callable
    shared: int = 0
    differs: dict = field(default_factory=dict)
    meta: dict = field(default_factory=dict)  # of a Triton kernel

    def launch(self, arguments) -> None:
        if self.block is None:
            self.kernel[self.grid](*arguments, **self.meta)
        else:
            self.kernel[self.grid, self.block, 0, self.shared](*arguments)

    @staticmethod
    def result(arguments) -> float:
        """The sum of what the kernel wrote: its last array."""
        out = [a for a in arguments if hasattr(a, "shape") and a.shape][-1]
        return float(np.abs(out.copy_to_host() if hasattr(out, "copy_to_host") else out.cpu().numpy()).sum(dtype="f8"))


def case(name: str, kernel, grid, block, arguments, shared: int = 0, **differs: str) -> None:
    assert name not in CASES
    CASES[name] = Case(name, kernel, grid, block, arguments, shared, differs)


def values(*shape: int, dtype=np.float32, most: int = 64):
    """Small whole numbers, all distinct in a row as far as they go; sums of them are exact."""
    n = int(np.prod(shape))
    return cuda.to_device((np.arange(n) * 7 % most).astype(dtype).reshape(shape))


def column_major(*shape: int):
    return cuda.to_device(np.asfortranarray(values(*shape).copy_to_host()))


def zeros(*shape: int, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype))


# --- one array in, one out ---


@cuda.jit
def copy(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i]


case("copy", copy, 256, 256, lambda: (values(65536), zeros(65536)))
case("copy, last warp cut", copy, 8, 128, lambda: (values(1000), zeros(1000)))
case("copy, blocks of 48", copy, 21, 48, lambda: (values(1000), zeros(1000)))
case("copy, blocks of 100", copy, 10, 100, lambda: (values(1000), zeros(1000)))
for dtype in ("int8", "int16", "float16", "int64", "float64"):
    case(f"copy {dtype}", copy, 16, 256, lambda dtype=dtype: (values(4096, dtype=dtype), zeros(4096, dtype=dtype)))
case("copy from element 1", copy, 16, 256, lambda: (values(4097)[1:], zeros(4096)))
case("copy float64 from element 1", copy, 4, 256, lambda: (values(1025, dtype="f8")[1:], zeros(1024, dtype="f8")))
case("copy every 2nd", copy, 16, 256, lambda: (values(8192)[::2], zeros(4096)))
case("copy every 8th", copy, 16, 256, lambda: (values(32768)[::8], zeros(4096)))
case("copy every 33rd", copy, 4, 256, lambda: (values(33792)[::33], zeros(1024)))
case("copy backwards", copy, 16, 256, lambda: (values(4096)[::-1], zeros(4096)))


@cuda.jit
def saxpy(a, x, y, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = a * x[i] + y[i]


case("saxpy, grid-stride", saxpy, 8, 256, lambda: (np.float32(2), values(10000), values(10000), zeros(10000)))


@cuda.jit
def gather(x, where, out):
    i = cuda.grid(1)
    out[i] = x[where[i]]


def shuffled(n: int, groups: int = 1):
    order = np.random.default_rng(7).permutation(n // groups)
    return cuda.to_device((order[:, None] * groups + np.arange(groups)).ravel().astype(np.int32))


case("gather at random", gather, 16, 256, lambda: (values(4096), shuffled(4096), zeros(4096)))
case("gather runs of 8", gather, 16, 256, lambda: (values(4096), shuffled(4096, 8), zeros(4096)))
case(
    "gather runs of 2", gather, 16, 256, lambda: (values(4096, dtype="f8"), shuffled(4096, 2), zeros(4096, dtype="f8"))
)


@cuda.jit
def scatter(x, where, out):
    i = cuda.grid(1)
    out[where[i]] = x[i]


case("scatter at random", scatter, 16, 256, lambda: (values(4096), shuffled(4096), zeros(4096)))


@cuda.jit
def broadcast(x, out):
    i = cuda.grid(1)
    out[i] = x[cuda.blockIdx.x] + x[i // 32]


case("broadcast", broadcast, 16, 256, lambda: (values(4096), zeros(4096)))


@cuda.jit
def every_other(x, out):
    i = cuda.grid(1)
    if i % 2 == 0:
        out[i] = x[i]


case("every other thread", every_other, 16, 256, lambda: (values(4096), zeros(4096)))


@cuda.jit
def diverge(x, out):
    i = cuda.grid(1)
    if x[i] < 30:
        out[i] = x[i] * 2
    else:
        out[4096 + i] = x[i]


case(
    "two sides of a branch",
    diverge,
    16,
    256,
    lambda: (values(4096), zeros(8192)),
    global_load_requests="x[i] is loaded once and kept in a register",
    global_load_sectors="x[i] is loaded once and kept in a register",
)


@cuda.jit
def collatz(x, out):
    i = cuda.grid(1)
    n = x[i]
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    out[i] = steps


case("collatz", collatz, 4, 128, lambda: (values(512, dtype="int64"), zeros(512, dtype="int64")))


@cuda.jit
def square(x, out):
    i = cuda.grid(1)
    out[i] = x[i] * x[i]


for dtype in ("complex64", "complex128"):
    case(f"square {dtype}", square, 4, 256, lambda dtype=dtype: (values(1024, dtype=dtype), zeros(1024, dtype=dtype)))


@cuda.jit
def private(x, out):
    mine = cuda.local.array(8, float32)
    i = cuda.grid(1)
    for j in range(8):
        mine[j] = x[i, j]
    total = float32(0)
    for j in range(8):
        total += mine[int32(mine[j]) % 8]
    out[i] = total


case("local array", private, 4, 64, lambda: (values(256, 8), zeros(256)))


# --- matrices ---


@cuda.jit
def rows(x, out):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        out[i, j] = x[i, j]


@cuda.jit
def columns(x, out):
    j, i = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        out[i, j] = x[i, j]


case("matrix, x down the rows", rows, (8, 8), (16, 16), lambda: (values(128, 128), zeros(128, 128)))
case("matrix, x along the rows", columns, (8, 8), (16, 16), lambda: (values(128, 128), zeros(128, 128)))
case("matrix, odd sizes", columns, (4, 12), (32, 8), lambda: (values(91, 103), zeros(91, 103)))
case("matrix, blocks of 5 x 7", columns, (20, 13), (5, 7), lambda: (values(91, 100), zeros(91, 100)))
case("matrix, column-major", columns, (8, 8), (16, 16), lambda: (column_major(128, 128), zeros(128, 128)))


@cuda.jit
def cube(x, out):
    k, j, i = cuda.grid(3)
    if i < x.shape[0] and j < x.shape[1] and k < x.shape[2]:
        out[i, j, k] = x[i, j, k] + 1


case("cube", cube, (4, 3, 5), (8, 4, 2), lambda: (values(10, 11, 30), zeros(10, 11, 30)))


def transposed(width: int):
    @cuda.jit
    def transpose(x, out):
        tile = cuda.shared.array((32, width), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * 32, cuda.blockIdx.x * 32
        for j in range(0, 32, 8):
            tile[ty + j, tx] = x[row + ty + j, column + tx]
        cuda.syncthreads()
        for j in range(0, 32, 8):
            out[column + ty + j, row + tx] = tile[tx, ty + j]

    return transpose


@cuda.jit
def transpose_naive(x, out):
    j, i = cuda.grid(2)
    out[j, i] = x[i, j]


case("transpose, naive", transpose_naive, (8, 8), (32, 8), lambda: (values(64, 256), zeros(256, 64)))
case("transpose, tile", transposed(32), (8, 4), (32, 8), lambda: (values(128, 256), zeros(256, 128)))
case("transpose, padded tile", transposed(33), (8, 4), (32, 8), lambda: (values(128, 256), zeros(256, 128)))
case("transpose, tile of 34", transposed(34), (8, 4), (32, 8), lambda: (values(128, 256), zeros(256, 128)))


def matmul_naive(swapped: bool):
    @cuda.jit
    def matmul(a, b, out):
        n, m = cuda.grid(2)
        if swapped:
            m, n = n, m
        if m < out.shape[0] and n < out.shape[1]:
            acc = float32(0)
            for k in range(a.shape[1]):
                acc += a[m, k] * b[k, n]
            out[m, n] = acc

    return matmul


def product(M: int, N: int, K: int):
    return lambda: (values(M, K, most=8), values(K, N, most=8), zeros(M, N))


case("matmul, coalesced", matmul_naive(False), (4, 4), (16, 16), product(64, 64, 64))
case("matmul, x down the rows", matmul_naive(True), (4, 4), (16, 16), product(64, 64, 64))
case("matmul, odd sizes", matmul_naive(False), (2, 5), (32, 8), product(37, 45, 29))


def matmul_tiled(n: int):
    @cuda.jit
    def matmul(a, b, out):
        a_tile = cuda.shared.array((n, n), float32)
        b_tile = cuda.shared.array((n, n), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        column, row = cuda.grid(2)
        acc = float32(0)
        for k0 in range(0, a.shape[1], n):
            a_tile[ty, tx] = 0
            b_tile[ty, tx] = 0
            if row < a.shape[0] and k0 + tx < a.shape[1]:
                a_tile[ty, tx] = a[row, k0 + tx]
            if k0 + ty < b.shape[0] and column < b.shape[1]:
                b_tile[ty, tx] = b[k0 + ty, column]
            cuda.syncthreads()
            for k in range(n):
                acc += a_tile[ty, k] * b_tile[k, tx]
            cuda.syncthreads()
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = acc

    return matmul


FOUR_AT_ONCE = dict.fromkeys(
    ("shared_load_requests", "shared_load_wavefronts"), "four neighbours a_tile[ty, k] are loaded at once, as LDS.128"
)
case("matmul, tiles of 16", matmul_tiled(16), (4, 4), (16, 16), product(64, 64, 64), **FOUR_AT_ONCE)
case("matmul, tiles of 32", matmul_tiled(32), (2, 2), (32, 32), product(64, 64, 64), **FOUR_AT_ONCE)
case("matmul, tiles of 16, odd sizes", matmul_tiled(16), (3, 3), (16, 16), product(37, 45, 29), **FOUR_AT_ONCE)


# --- shared memory ---


def strided(dtype, stride: int, offset: int = 0):
    size = 32 * max(stride, 1) + offset

    @cuda.jit
    def kernel(x, out):
        s = cuda.shared.array(size, dtype)
        i = cuda.threadIdx.x
        for j in range(i, size, cuda.blockDim.x):
            s[j] = x[j]
        cuda.syncthreads()
        out[i] = s[i % 32 * stride + offset]

    return kernel, size


for name, dtype, strides in (
    ("float32", float32, (0, 1, 2, 3, 4, 8, 16, 31, 32)),
    ("float64", float64, (0, 1, 2, 3, 4, 8, 16)),
    ("int16", int16, (1, 2, 3, 4, 32, 64)),
    ("int8", int8, (1, 2, 3, 4, 5, 8, 64, 128)),
):
    for stride in strides:
        kernel, size = strided(dtype, stride)
        case(
            f"shared {name}, stride {stride}",
            kernel,
            1,
            32,
            lambda size=size, name=name: (values(size, dtype=name), zeros(32, dtype=name)),
        )
kernel, size = strided(float64, 1, 1)
case("shared float64 from element 1", kernel, 1, 32, lambda: (values(33, dtype="f8"), zeros(32, dtype="f8")))


def shared_gather(dtype):
    @cuda.jit
    def kernel(x, where, out):
        s = cuda.shared.array(256, dtype)
        t = cuda.threadIdx.x
        i = cuda.grid(1)
        s[t] = x[i]
        cuda.syncthreads()
        at = where[t]
        if at >= 0:
            out[i] = s[at]

    return kernel


def gathered(name: str, pattern) -> None:
    """A warp reads s[pattern(t)]; threads where it is negative do not."""
    where = np.array([pattern(t) for t in range(256)], np.int32)
    for dtype in (float32, float64):
        case(
            f"shared {dtype}, {name}",
            SHARED_GATHER[dtype],
            2,
            256,
            lambda dtype=str(dtype): (values(512, dtype=dtype), cuda.to_device(where), zeros(512, dtype=dtype)),
        )


SHARED_GATHER = {dtype: shared_gather(dtype) for dtype in (float32, float64)}
RANDOM = np.random.default_rng(3).permutation(256)
FEW = np.random.default_rng(4).integers(0, 40, 256)
gathered("at random", lambda t: RANDOM[t])
gathered("at random of 40", lambda t: FEW[t])
gathered("pairs read the same", lambda t: t // 2)
gathered("fours read the same", lambda t: t // 4)
gathered("lanes t and t + 2 read the same", lambda t: t & ~2)
gathered("lanes t and t + 4 read the same", lambda t: t & ~4)
gathered("halves of a warp read the same", lambda t: t % 16)
gathered("each half of a warp reads one", lambda t: t // 16)
gathered("pairs, 32 apart", lambda t: t // 2 * 16 % 256)
gathered("even lanes only", lambda t: t if t % 2 == 0 else -1)
gathered("even lanes only, 16 apart", lambda t: t * 16 % 256 if t % 2 == 0 else -1)
gathered("first half only", lambda t: t if t % 32 < 16 else -1)
gathered("first half only, 2 apart", lambda t: t * 2 % 256 if t % 32 < 16 else -1)
gathered("every 4th lane only", lambda t: t if t % 4 == 0 else -1)
gathered("one lane only", lambda t: t if t % 32 == 5 else -1)
gathered("lane 0 elsewhere", lambda t: 200 if t % 32 == 0 else t)


def shared_scatter(dtype):
    @cuda.jit
    def kernel(x, where, out):
        s = cuda.shared.array(256, dtype)
        t = cuda.threadIdx.x
        i = cuda.grid(1)
        s[t] = 0
        cuda.syncthreads()
        at = where[t]
        if at >= 0:
            s[at] = x[i]
        cuda.syncthreads()
        out[i] = s[t]

    return kernel


SHARED_SCATTER = {dtype: shared_scatter(dtype) for dtype in (float32, float64)}


def scattered(name: str, pattern) -> None:
    """A warp writes s[pattern(t)]; threads where it is negative do not."""
    where = np.array([pattern(t) for t in range(256)], np.int32)
    for dtype in (float32, float64):
        case(
            f"shared {dtype}, written {name}",
            SHARED_SCATTER[dtype],
            2,
            256,
            lambda dtype=str(dtype): (values(512, dtype=dtype), cuda.to_device(where), zeros(512, dtype=dtype)),
        )


scattered("at random", lambda t: RANDOM[t])
scattered("backwards", lambda t: 255 - t)
scattered("2 apart", lambda t: t * 2 if t < 128 else -1)
scattered("16 apart", lambda t: t * 16 % 256 + t // 16)
scattered("even lanes only", lambda t: t if t % 2 == 0 else -1)
scattered("even lanes only, 16 apart", lambda t: t * 8 % 256 + t // 32 if t % 2 == 0 else -1)
scattered("every 4th lane only", lambda t: t if t % 4 == 0 else -1)
scattered("one lane only", lambda t: t if t % 32 == 5 else -1)


# --- 16 bytes a thread ---


@cuda.jit
def copy_by_fours(x, out):
    i = 4 * cuda.grid(1)
    if i < out.size:
        store4(out, i, load4(x, i))


case("copy by fours", copy_by_fours, 16, 256, lambda: (values(16384), zeros(16384)))
case("copy by fours, cut", copy_by_fours, 4, 96, lambda: (values(1000), zeros(1000)))


@cuda.jit
def read_by_fours(x, where, out):
    s = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    for j in range(4):
        s[t + 256 * j] = x[t + 256 * j]
    cuda.syncthreads()
    at = where[t]
    if at >= 0:
        a, b, c, d = load4(s, 4 * at)
        out[t] = a + b + c + d


@cuda.jit
def write_by_fours(x, where, out):
    s = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    for j in range(4):
        s[t + 256 * j] = 0
    cuda.syncthreads()
    at = where[t]
    if at >= 0:
        v = x[t]
        store4(s, 4 * at, (v, v + 1, v + 2, v + 3))
    cuda.syncthreads()
    for j in range(4):
        out[t + 256 * j] = s[t + 256 * j]


def by_fours(name: str, pattern, written: bool = True) -> None:
    where = np.array([pattern(t) for t in range(256)], np.int32)
    case(
        f"shared by fours, {name}",
        read_by_fours,
        1,
        256,
        lambda: (values(1024), cuda.to_device(where), zeros(256)),
    )
    if written:  # no two threads write one place
        case(
            f"shared by fours, written {name}",
            write_by_fours,
            1,
            256,
            lambda: (values(256), cuda.to_device(where), zeros(1024)),
        )


by_fours("in order", lambda t: t)
by_fours("backwards", lambda t: 255 - t)
by_fours("at random", lambda t: RANDOM[t])
by_fours("at random of 40", lambda t: FEW[t], written=False)
by_fours("all the same", lambda t: 0, written=False)
by_fours("pairs read the same", lambda t: t // 2, written=False)
by_fours("fours read the same", lambda t: t // 4, written=False)
by_fours("eights read the same", lambda t: t // 8, written=False)
by_fours("lanes t and t + 2 read the same", lambda t: t & ~2, written=False)
by_fours("lanes t and t + 4 read the same", lambda t: t & ~4, written=False)
by_fours("quarters of a warp read the same", lambda t: t % 8, written=False)
by_fours("pairs, 8 apart", lambda t: t // 2 * 8 % 256, written=False)
by_fours("8 apart", lambda t: t * 8 % 256 + t // 32)
by_fours("2 apart", lambda t: t * 2 % 256 + t // 128)
by_fours("even lanes only", lambda t: t if t % 2 == 0 else -1)
by_fours("every 4th lane only", lambda t: t if t % 4 == 0 else -1)
by_fours("first half only", lambda t: t if t % 32 < 16 else -1)
by_fours("first of every 8 lanes", lambda t: t if t % 8 == 0 else -1)
by_fours("one half in pairs", lambda t: t // 2 if t % 32 < 16 else t, written=False)


@cuda.jit
def stencil(x, out):
    s = cuda.shared.array(130, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t + 1] = x[i]
    if t == 0 and i > 0:
        s[0] = x[i - 1]
    if t == 127 and i + 1 < x.size:
        s[129] = x[i + 1]
    cuda.syncthreads()
    if 0 < i < x.size - 1:
        out[i] = s[t] + s[t + 1] + s[t + 2]


case("stencil with a halo", stencil, 8, 128, lambda: (values(1024), zeros(1024)))


@cuda.jit
def scan(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] = x[i]
    step = 1
    while step < 256:
        cuda.syncthreads()
        add = float32(0)
        if t >= step:
            add = s[t - step]
        cuda.syncthreads()
        s[t] += add
        step *= 2
    out[i] = s[t]


LAST_KEPT = dict.fromkeys(
    ("shared_load_requests", "shared_load_wavefronts"), "the thread's own s[t], just written, is still in a register"
)
case("scan", scan, 4, 256, lambda: (values(1024), zeros(1024)), **LAST_KEPT)


@cuda.jit
def tree_interleaved(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    step = 1
    while step < 256:
        cuda.syncthreads()
        if t % (2 * step) == 0:
            s[t] += s[t + step]
        step *= 2
    if t == 0:
        out[cuda.blockIdx.x] = s[0]


@cuda.jit
def tree_strided(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    step = 1
    while step < 256:
        cuda.syncthreads()
        at = 2 * step * t
        if at < 256:
            s[at] += s[at + step]
        step *= 2
    if t == 0:
        out[cuda.blockIdx.x] = s[0]


@cuda.jit
def tree_sequential(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[cuda.grid(1)]
    step = 128
    while step > 0:
        cuda.syncthreads()
        if t < step:
            s[t] += s[t + step]
        step //= 2
    if t == 0:
        out[cuda.blockIdx.x] = s[0]


@cuda.jit
def tree_shuffled(x, out):
    s = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    v = x[cuda.grid(1)]
    step = 16
    while step > 0:
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, step)
        step //= 2
    if t % 32 == 0:
        s[t // 32] = v
    cuda.syncthreads()
    if t == 0:
        total = float32(0)
        for w in range(8):
            total += s[w]
        out[cuda.blockIdx.x] = total


FOUR = "four neighbours s[w] are loaded at once, as LDS.128"
for name, kernel in (
    ("interleaved", tree_interleaved),
    ("strided", tree_strided),
    ("sequential", tree_sequential),
    ("shuffled", tree_shuffled),
):
    why = {} if name != "shuffled" else dict.fromkeys(("shared_load_requests", "shared_load_wavefronts"), FOUR)
    case(f"tree reduction, {name}", kernel, 8, 256, lambda: (values(2048), zeros(8)), **why)


@cuda.jit
def histogram_global(x, out):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(out, x[i], 1)


@cuda.jit
def histogram_shared(x, out):
    s = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    if t < 64:
        s[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(s, x[i], 1)
    cuda.syncthreads()
    if t < 64:
        cuda.atomic.add(out, t, s[t])


case("histogram, global atomics", histogram_global, 16, 256, lambda: (values(4000, dtype="i4"), zeros(64, dtype="i4")))
case("histogram, shared atomics", histogram_shared, 4, 256, lambda: (values(4000, dtype="i4"), zeros(64, dtype="i4")))


@cuda.jit
def dynamic(x, out):
    a = cuda.shared.array(0, float32)
    t = cuda.threadIdx.x
    a[t] = x[cuda.grid(1)]
    a[t + cuda.blockDim.x] = 2 * a[t]
    cuda.syncthreads()
    out[cuda.grid(1)] = a[2 * cuda.blockDim.x - 1 - t]


case("dynamic shared memory", dynamic, 4, 128, lambda: (values(512), zeros(512)), shared=1024, **LAST_KEPT)


@cuda.jit
def tickets(out, taken):
    i = cuda.grid(1)
    out[cuda.atomic.add(taken, 0, 1)] = i
    cuda.atomic.max(taken, 1, i)


case("atomics that give the old value", tickets, 4, 64, lambda: (zeros(256, dtype="i8"), zeros(2, dtype="i8")))


@cuda.jit
def two_arrays(x, out):
    a = cuda.shared.array((8, 33), float32)
    b = cuda.shared.array((8, 32), int64)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    a[ty, tx] = x[ty, tx]
    b[ty, tx] = tx * ty
    cuda.syncthreads()
    out[ty, tx] = a[tx % 8, ty] + b[tx % 8, ty]


case("two shared arrays", two_arrays, 1, (32, 8), lambda: (values(8, 32), zeros(8, 32)))


@cuda.jit
def softmax(x, out):
    s = cuda.shared.array(128, float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    most = float32(-1e30)
    for j in range(t, x.shape[1], 128):
        most = max(most, x[row, j])
    s[t] = most
    half = 64
    while half > 0:
        cuda.syncthreads()
        if t < half:
            s[t] = max(s[t], s[t + half])
        half //= 2
    cuda.syncthreads()
    most = s[0]
    cuda.syncthreads()
    total = float32(0)
    for j in range(t, x.shape[1], 128):
        total += x[row, j] - most
    s[t] = total
    half = 64
    while half > 0:
        cuda.syncthreads()
        if t < half:
            s[t] += s[t + half]
        half //= 2
    cuda.syncthreads()
    total = s[0]
    for j in range(t, x.shape[1], 128):
        out[row, j] = (x[row, j] - most) / total


case("rows, three passes", softmax, 6, 128, lambda: (values(6, 300), zeros(6, 300)))
case(
    "rows, three passes, width 1000",
    softmax,
    6,
    128,
    lambda: (values(6, 1000), zeros(6, 1000)),
    **dict.fromkeys(
        ("global_load_requests", "global_store_requests"),
        "the loop is unrolled by four: in the last warp, lanes with another number of trips load apart",
    ),
)
