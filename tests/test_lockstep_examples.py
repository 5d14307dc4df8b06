"""Correct kernels in the manner of Numba's documentation and of puzzle collections: right results, and no report."""

import math

import numpy as np
import pytest
from numba import cuda, float32, float64, int32
from numba.cuda.random import (
    create_xoroshiro128p_states,
    init_xoroshiro128p_states_cpu,
    xoroshiro128p_dtype,
    xoroshiro128p_uniform_float32,
)

from gpukern.simulate import run

RNG = np.random.default_rng(0)
TILE = 8
EXAMPLES = []


def example(function, marks=()):
    """An example: () -> (kernel, grid, block, args, the argument to look at, what must be in it[, shared bytes])."""
    EXAMPLES.append(pytest.param(function, id=function.__name__, marks=marks))
    return function


def slow_example(function):
    return example(function, pytest.mark.slow)


@pytest.mark.parametrize("made", EXAMPLES)
def test_example(made):
    kernel, grid, block, args, out, expected, *shared = made()
    report = run(cuda.jit(kernel), grid, block, *args, shared=shared[0] if shared else 0)
    assert report.faults == []
    assert np.allclose(out, expected, rtol=1e-5, atol=1e-5)


def rand(*shape):
    return RNG.random(shape, np.float32)


# --- Numba's documentation ---


@example
def vector_addition():
    def kernel(a, b, c):
        tid = cuda.grid(1)
        if tid < len(c):
            c[tid] = a[tid] + b[tid]

    a, b, c = rand(1000), rand(1000), np.zeros(1000, np.float32)
    return kernel, 4, 256, (a, b, c), c, a + b


@example
def grid_stride():
    def kernel(x):
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            x[i] *= 2

    x = rand(1000)
    return kernel, 2, 64, (x,), x, 2 * x


@example
def increment_2d():
    def kernel(x):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            x[i, j] += 1

    x = rand(19, 33)
    return kernel, (2, 3), (16, 16), (x,), x, x + 1


@example
def matrix_product():
    def kernel(A, B, C):
        i, j = cuda.grid(2)
        if i < C.shape[0] and j < C.shape[1]:
            tmp = 0.0
            for k in range(A.shape[1]):
                tmp += A[i, k] * B[k, j]
            C[i, j] = tmp

    A, B, C = rand(13, 7), rand(7, 21), np.zeros((13, 21), np.float32)
    return kernel, (1, 2), (16, 16), (A, B, C), C, A @ B


@example
def matrix_product_in_shared_tiles():
    def kernel(A, B, C):
        sA = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
        sB = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
        x, y = cuda.grid(2)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        tmp = float32(0.0)
        for i in range(cuda.gridDim.x):
            sA[ty, tx] = 0
            sB[ty, tx] = 0
            if y < A.shape[0] and (tx + i * TILE) < A.shape[1]:
                sA[ty, tx] = A[y, tx + i * TILE]
            if x < B.shape[1] and (ty + i * TILE) < B.shape[0]:
                sB[ty, tx] = B[ty + i * TILE, x]
            cuda.syncthreads()
            for j in range(TILE):
                tmp += sA[ty, j] * sB[j, tx]
            cuda.syncthreads()
        if y < C.shape[0] and x < C.shape[1]:
            C[y, x] = tmp

    A, B, C = rand(18, 23), rand(23, 20), np.zeros((18, 20), np.float32)
    return kernel, (3, 3), (TILE, TILE), (A, B, C), C, A @ B


@example
def heat_equation():
    def kernel(now, then, steps, k):
        i = cuda.grid(1)
        for step in range(steps):
            if step % 2 == 0:
                then[i] = now[i] + k * (now[max(i - 1, 0)] - 2 * now[i] + now[min(i + 1, now.size - 1)])
            else:
                now[i] = then[i] + k * (then[max(i - 1, 0)] - 2 * then[i] + then[min(i + 1, now.size - 1)])
            cuda.syncthreads()

    x = rand(64).astype(np.float64)
    now, then = x.copy(), np.zeros(64)
    for _ in range(6):
        x = x + 0.25 * (np.r_[x[0], x[:-1]] - 2 * x + np.r_[x[1:], x[-1]])
    return kernel, 1, 64, (now, then, 6, 0.25), now, x


@example
def reduction_in_shared_memory():
    def kernel(data):
        tid = cuda.threadIdx.x
        i = cuda.grid(1)
        shr = cuda.shared.array(128, int32)
        shr[tid] = data[i]
        cuda.syncthreads()
        s = 1
        while s < cuda.blockDim.x:
            if tid % (2 * s) == 0:
                shr[tid] += shr[tid + s]
            s *= 2
            cuda.syncthreads()
        if tid == 0:
            data[tid] = shr[tid]

    x = np.arange(128, dtype=np.int32)
    return kernel, 1, 128, (x,), x[:1], [x.sum()]


@example
def sessionize():
    def kernel(user, stamp, result):
        gid = cuda.grid(1)
        size = len(user)
        if gid >= size:
            return
        is_first = False
        if gid == 0 or user[gid] != user[gid - 1] or stamp[gid] - stamp[gid - 1] > 10:
            is_first = True
        cuda.atomic.add(result, user[gid], 1 if is_first else 0)

    user = np.sort(RNG.integers(0, 5, 200))
    stamp = np.cumsum(RNG.integers(0, 20, 200))
    new = np.r_[True, (user[1:] != user[:-1]) | (np.diff(stamp) > 10)]
    result = np.zeros(5, np.int64)
    return kernel, 2, 128, (user, stamp, result), result, np.bincount(user[new], minlength=5)


@slow_example
def monte_carlo_pi():
    def kernel(states, rounds, out):
        thread = cuda.grid(1)
        inside = 0
        for _ in range(rounds):
            x = xoroshiro128p_uniform_float32(states, thread)
            y = xoroshiro128p_uniform_float32(states, thread)
            if x**2 + y**2 <= 1.0:
                inside += 1
        out[thread] = 4.0 * inside / rounds

    states, out = create_xoroshiro128p_states(32, seed=1), np.zeros(32, np.float32)
    same = np.zeros(32, xoroshiro128p_dtype)
    init_xoroshiro128p_states_cpu(same, 1, 0)
    expected = []
    for thread in range(32):
        drawn = [xoroshiro128p_uniform_float32(same, thread) for _ in range(40)]
        hits = sum(x * x + y * y <= 1 for x, y in zip(drawn[::2], drawn[1::2], strict=True))
        expected.append(4 * hits / 20)
    return kernel, 1, 32, (states, 20, out), out, expected


@example
def sequential_rows_of_a_cooperative_grid():
    def kernel(M):
        col = cuda.grid(1)
        g = cuda.cg.this_grid()
        rows, cols = M.shape
        for row in range(1, rows):
            opposite = cols - col - 1
            M[row, col] = M[row - 1, opposite] + 1
            g.sync()

    M = np.zeros((6, 128), np.int32)
    M[0] = np.arange(128)
    expected = M.copy()
    for row in range(1, 6):
        expected[row] = expected[row - 1, ::-1] + 1
    return kernel, 4, 32, (M,), M, expected


@example
def a_ufunc_called_on_arrays():
    def kernel(r, x):
        np.sin(x, r)

    x, r = np.linspace(0, 6, 12), np.zeros(12)
    return kernel, 1, 1, (r, x), r, np.sin(x)


@example
def dynamic_shared_memory_as_two_arrays():
    def kernel(x, out):
        whole = cuda.shared.array(0, dtype=float32)
        first, second = whole[0:16], whole[16:32]
        t = cuda.threadIdx.x
        first[t] = x[t]
        second[15 - t] = x[t] * 10
        cuda.syncthreads()
        out[t] = first[15 - t] + second[t]

    x, out = rand(16), np.zeros(16, np.float32)
    return kernel, 1, 16, (x, out), out, 11 * x[::-1], 128


@example
def shared_memory_of_another_type():
    def kernel(x, out):
        s = cuda.shared.array(0, dtype=int32)
        f = s.view(np.float32)
        t = cuda.threadIdx.x
        f[t] = x[t]
        cuda.syncthreads()
        out[t] = f[31 - t]

    x, out = rand(32), np.zeros(32, np.float32)
    return kernel, 1, 32, (x, out), out, x[::-1], 128


@example
def histogram_in_shared_bins():
    def kernel(x, low, high, out):
        bins = cuda.shared.array(16, int32)
        t = cuda.threadIdx.x
        if t < 16:
            bins[t] = 0
        cuda.syncthreads()
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            bin = int32((x[i] - low) / (high - low) * 16)
            if 0 <= bin < 16:
                cuda.atomic.add(bins, bin, 1)
        cuda.syncthreads()
        if t < 16:
            cuda.atomic.add(out, t, bins[t])

    x, out = rand(2000), np.zeros(16, np.int32)
    return kernel, 3, 64, (x, 0.0, 1.0, out), out, np.histogram(x, 16, (0, 1))[0]


@example
def mandelbrot():
    def kernel(image, limit):
        i, j = cuda.grid(2)
        if i < image.shape[0] and j < image.shape[1]:
            c = complex(-2 + 3 * j / image.shape[1], -1 + 2 * i / image.shape[0])
            z = 0j
            for n in range(limit):
                z = z * z + c
                if z.real * z.real + z.imag * z.imag >= 4:
                    image[i, j] = n
                    return
            image[i, j] = limit

    def escape(c):
        z = 0
        for n in range(20):
            z = z * z + c
            if abs(z) >= 2:
                return n
        return 20

    image = np.zeros((16, 24), np.uint8)
    expected = [[escape(complex(-2 + 3 * j / 24, -1 + 2 * i / 16)) for j in range(24)] for i in range(16)]
    return kernel, (2, 3), (8, 8), (image, 20), image, expected


@cuda.jit(device=True)
def normal_cdf(d):
    k = 1.0 / (1.0 + 0.2316419 * math.fabs(d))
    poly = k * (0.31938153 + k * (-0.356563782 + k * (1.781477937 + k * (-1.821255978 + k * 1.330274429))))
    tail = 0.39894228040143267793994605993438 * math.exp(-0.5 * d * d) * poly
    return 1.0 - tail if d > 0 else tail


@example
def black_scholes():
    def kernel(call, put, S, X, T, r, v):
        i = cuda.grid(1)
        if i >= S.shape[0]:
            return
        root = math.sqrt(T[i])
        d1 = (math.log(S[i] / X[i]) + (r + 0.5 * v * v) * T[i]) / (v * root)
        d2 = d1 - v * root
        discount = math.exp(-1.0 * r * T[i])
        call[i] = S[i] * normal_cdf(d1) - X[i] * discount * normal_cdf(d2)
        put[i] = X[i] * discount * (1.0 - normal_cdf(d2)) - S[i] * (1.0 - normal_cdf(d1))

    S, X, T = 5 + 25 * RNG.random(100), 1 + 99 * RNG.random(100), 0.25 + 9 * RNG.random(100)
    call, put = np.zeros((2, 100))
    d1 = (np.log(S / X) + (0.02 + 0.045) * T) / (0.3 * np.sqrt(T))
    phi = [0.5 * (1 + math.erf(d / math.sqrt(2))) for d in d1]
    phi2 = [0.5 * (1 + math.erf(d / math.sqrt(2))) for d in d1 - 0.3 * np.sqrt(T)]
    return kernel, 1, 128, (call, put, S, X, T, 0.02, 0.3), call, S * phi - X * np.exp(-0.02 * T) * phi2


@example
def laplace_with_its_largest_error():
    def kernel(A, Anew, error):
        err = cuda.shared.array((8, 8), float64)
        ty, tx = cuda.threadIdx.x, cuda.threadIdx.y
        i, j = cuda.grid(2)
        err[ty, tx] = 0.0
        if 1 <= i < A.shape[0] - 1 and 1 <= j < A.shape[1] - 1:
            Anew[i, j] = 0.25 * (A[i, j + 1] + A[i, j - 1] + A[i - 1, j] + A[i + 1, j])
            err[ty, tx] = abs(Anew[i, j] - A[i, j])
        cuda.syncthreads()
        if ty == 0 and tx == 0:
            most = 0.0
            for row in err:
                for e in row:
                    most = max(most, e)
            cuda.atomic.max(error, 0, most)

    A, Anew, error = RNG.random((20, 20)), np.zeros((20, 20)), np.zeros(1)
    new = 0.25 * (A[1:-1, 2:] + A[1:-1, :-2] + A[:-2, 1:-1] + A[2:, 1:-1])
    return kernel, (3, 3), (8, 8), (A, Anew, error), error, abs(new - A[1:-1, 1:-1]).max()


@example
def game_of_life():
    def kernel(board, after):
        i, j = cuda.grid(2)
        rows, cols = board.shape
        if i >= rows or j >= cols:
            return
        alive = 0
        for di in (-1, 0, 1):
            for dj in (-1, 0, 1):
                if di != 0 or dj != 0:
                    alive += board[(i + di) % rows, (j + dj) % cols]
        after[i, j] = alive == 3 or (board[i, j] == 1 and alive == 2)

    board = RNG.integers(0, 2, (12, 17), np.int8)
    around = sum(np.roll(board, (a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1)) - board
    after = np.zeros_like(board)
    return kernel, (2, 3), (8, 8), (board, after), after, (around == 3) | ((board == 1) & (around == 2))


@example
def scan_of_a_block():
    def kernel(x, out):
        temp = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        temp[t] = x[t]
        offset = 1
        while offset < 64:
            cuda.syncthreads()
            add = temp[t - offset] if t >= offset else float32(0)
            cuda.syncthreads()
            temp[t] += add
            offset <<= 1
        out[t] = temp[t]

    x, out = rand(64), np.zeros(64, np.float32)
    return kernel, 1, 64, (x, out), out, np.cumsum(x)


@example
def transpose_in_a_padded_tile():
    def kernel(a, b):
        tile = cuda.shared.array((16, 17), float32)
        x, y = cuda.grid(2)
        if x < a.shape[1] and y < a.shape[0]:
            tile[cuda.threadIdx.y, cuda.threadIdx.x] = a[y, x]
        cuda.syncthreads()
        x = cuda.blockIdx.y * 16 + cuda.threadIdx.x
        y = cuda.blockIdx.x * 16 + cuda.threadIdx.y
        if x < b.shape[1] and y < b.shape[0]:
            b[y, x] = tile[cuda.threadIdx.x, cuda.threadIdx.y]

    a, b = rand(20, 35), np.zeros((35, 20), np.float32)
    return kernel, (3, 2), (16, 16), (a, b), b, a.T


@example
def particles_in_records():
    def kernel(bodies, dt):
        i = cuda.grid(1)
        if i < bodies.size:
            body = bodies[i]
            body.v -= 9.81 * dt
            body.x += body.v * dt
            if body["x"] < 0:
                body["x"] = 0
                bodies[i].hits += 1

    bodies = np.zeros(40, np.dtype([("x", "f8"), ("v", "f8"), ("hits", "i4")], align=True))
    bodies["x"] = RNG.random(40)
    fallen = bodies["x"] - 9.81 * 0.25
    return kernel, 2, 32, (bodies, 0.5), bodies["hits"], fallen < 0


@example
def a_filter_from_constant_memory():
    taps = np.array([0.25, 0.5, 0.25], np.float32)

    def kernel(x, out):
        weights = cuda.const.array_like(taps)
        i = cuda.grid(1)
        if 0 < i < x.size - 1:
            total = float32(0)
            for k, w in enumerate(weights):
                total += w * x[i + k - 1]
            out[i] = total

    x, out = rand(100), np.zeros(100, np.float32)
    return kernel, 2, 64, (x, out), out[1:-1], np.convolve(x, taps, "valid")


@example
def sum_by_a_warp_of_shuffles():
    def kernel(x, out):
        v = x[cuda.grid(1)]
        offset = 16
        while offset:
            v += cuda.shfl_down_sync(0xFFFFFFFF, v, offset)
            offset //= 2
        if cuda.laneid == 0:
            cuda.atomic.add(out, 0, v)

    x, out = rand(128), np.zeros(1, np.float32)
    return kernel, 2, 64, (x, out), out, x.sum()


@example
def compaction_by_ballot():
    def kernel(x, out, count):
        i = cuda.grid(1)
        keep = x[i] > 0.5
        mask = cuda.ballot_sync(0xFFFFFFFF, keep)
        place = 0
        if cuda.laneid == 0:
            place = cuda.atomic.add(count, 0, cuda.popc(mask))
        place = cuda.shfl_sync(0xFFFFFFFF, place, 0) + cuda.popc(mask & cuda.lanemask_lt())
        if keep:
            out[place] = x[i]

    x, out, count = rand(32), np.zeros(32, np.float32), np.zeros(1, np.int64)
    return kernel, 1, 32, (x, out, count), out, np.r_[x[x > 0.5], np.zeros((x <= 0.5).sum())]


@example
def bubble_sort_by_odd_and_even_pairs():
    def kernel(x):
        t = cuda.threadIdx.x
        for phase in range(x.size):
            i = 2 * t + phase % 2
            if i + 1 < x.size and x[i] > x[i + 1]:
                x[i], x[i + 1] = x[i + 1], x[i]
            cuda.syncthreads()

    x = rand(30)
    return kernel, 1, 15, (x,), x, np.sort(x)


# --- puzzles ---


@example
def puzzle_map():
    def kernel(out, a):
        out[cuda.threadIdx.x] = a[cuda.threadIdx.x] + 10

    a, out = rand(4), np.zeros(4, np.float32)
    return kernel, 1, 4, (out, a), out, a + 10


@example
def puzzle_zip_with_guard():
    def kernel(out, a, b, size):
        i = cuda.threadIdx.x
        if i < size:
            out[i] = a[i] + b[i]

    a, b, out = rand(4), rand(4), np.zeros(4, np.float32)
    return kernel, 1, 8, (out, a, b, 4), out, a + b


@example
def puzzle_map_2d():
    def kernel(out, a, size):
        i, j = cuda.threadIdx.x, cuda.threadIdx.y
        if i < size and j < size:
            out[i, j] = a[i, j] + 10

    a, out = rand(2, 2), np.zeros((2, 2), np.float32)
    return kernel, 1, (3, 3), (out, a, 2), out, a + 10


@example
def puzzle_broadcast():
    def kernel(out, a, b, size):
        i, j = cuda.threadIdx.x, cuda.threadIdx.y
        if i < size and j < size:
            out[i, j] = a[i, 0] + b[0, j]

    a, b, out = rand(3, 1), rand(1, 3), np.zeros((3, 3), np.float32)
    return kernel, 1, (4, 4), (out, a, b, 3), out, a + b


@example
def puzzle_blocks_2d():
    def kernel(out, a, size):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        j = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        if i < size and j < size:
            out[i, j] = a[i, j] + 10

    a, out = rand(5, 5), np.zeros((5, 5), np.float32)
    return kernel, (2, 2), (3, 3), (out, a, 5), out, a + 10


@example
def puzzle_shared():
    def kernel(out, a, size):
        shared = cuda.shared.array(4, float32)
        i, local = cuda.grid(1), cuda.threadIdx.x
        if i < size:
            shared[local] = a[i]
            cuda.syncwarp(cuda.activemask())
            out[i] = shared[local] + 10

    a, out = rand(8), np.zeros(8, np.float32)
    return kernel, 2, 4, (out, a, 8), out, a + 10


@example
def puzzle_pooling():
    def kernel(out, a, size):
        shared = cuda.shared.array(8, float32)
        i, local = cuda.grid(1), cuda.threadIdx.x
        if i < size:
            shared[local] = a[i]
        cuda.syncthreads()
        if i < size:
            total = float32(0)
            for j in range(max(0, local - 2), local + 1):
                total += shared[j]
            out[i] = total

    a, out = rand(8), np.zeros(8, np.float32)
    return kernel, 1, 8, (out, a, 8), out, [a[max(0, i - 2) : i + 1].sum() for i in range(8)]


@example
def puzzle_dot_product():
    def kernel(out, a, b):
        shared = cuda.shared.array(8, float32)
        t = cuda.threadIdx.x
        shared[t] = a[t] * b[t]
        cuda.syncthreads()
        if t == 0:
            out[0] = shared.sum()

    a, b, out = rand(8), rand(8), np.zeros(1, np.float32)
    return kernel, 1, 8, (out, a, b), out, a @ b


@example
def puzzle_convolution():
    def kernel(out, a, b, a_size, b_size):
        sa, sb = cuda.shared.array(12, float32), cuda.shared.array(4, float32)
        i, t = cuda.grid(1), cuda.threadIdx.x
        sa[t] = a[i] if i < a_size else float32(0)
        if t < b_size:
            sb[t] = b[t]
            sa[8 + t] = a[i + 8] if i + 8 < a_size else float32(0)
        cuda.syncthreads()
        if i < a_size:
            total = float32(0)
            for k in range(b_size):
                total += sa[t + k] * sb[k]
            out[i] = total

    a, b, out = rand(15), rand(4), np.zeros(15, np.float32)
    padded = np.r_[a, np.zeros(3)]
    return kernel, 2, 8, (out, a, b, 15, 4), out, [padded[i : i + 4] @ b for i in range(15)]


@example
def puzzle_prefix_sum():
    def kernel(out, a, size):
        cache = cuda.shared.array(8, float32)
        i, t = cuda.grid(1), cuda.threadIdx.x
        cache[t] = a[i] if i < size else float32(0)
        for k in range(3):
            cuda.syncthreads()
            if t % 2 ** (k + 1) == 0:
                cache[t] += cache[t + 2**k]
        if t == 0:
            out[cuda.blockIdx.x] = cache[0]

    a, out = rand(15), np.zeros(2, np.float32)
    return kernel, 2, 8, (out, a, 15), out, [a[:8].sum(), a[8:].sum()]


@example
def puzzle_axis_sum():
    def kernel(out, a, size):
        cache = cuda.shared.array(8, float32)
        t, batch = cuda.threadIdx.x, cuda.blockIdx.y
        cache[t] = a[batch, t] if t < size else float32(0)
        half = 4
        while half:
            cuda.syncthreads()
            if t < half:
                cache[t] += cache[t + half]
            half //= 2
        if t == 0:
            out[batch, 0] = cache[0]

    a, out = rand(4, 6), np.zeros((4, 1), np.float32)
    return kernel, (1, 4), 8, (out, a, 6), out, a.sum(1, keepdims=True)


@example
def puzzle_matrix_product():
    def kernel(out, a, b, size):
        sa, sb = cuda.shared.array((3, 3), float32), cuda.shared.array((3, 3), float32)
        i, j = cuda.grid(2)
        ti, tj = cuda.threadIdx.x, cuda.threadIdx.y
        total = float32(0)
        for k in range(0, size, 3):
            sa[ti, tj] = a[i, k + tj] if i < size and k + tj < size else float32(0)
            sb[ti, tj] = b[k + ti, j] if k + ti < size and j < size else float32(0)
            cuda.syncthreads()
            for m in range(min(3, size - k)):
                total += sa[ti, m] * sb[m, tj]
            cuda.syncthreads()
        if i < size and j < size:
            out[i, j] = total

    a, b, out = rand(8, 8), rand(8, 8), np.zeros((8, 8), np.float32)
    return kernel, (3, 3), (3, 3), (out, a, b, 8), out, a @ b
