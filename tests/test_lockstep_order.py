"""Threads that wait for each other without barriers: locks, flags, fences, atomics; memory that is seen twice."""

import linecache

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, uint8, uint32

from gpukern.device import LimitError
from gpukern.simulate import Refused, run
from gpukern.simulate.lockstep import atomics, spinning

RNG = np.random.default_rng(0)


def name(kernel):
    return getattr(kernel, "__name__", None)


def faults(kernel, grid, block, *args, **options):
    return [(f.kind, f.array, f.index) for f in run(kernel, grid, block, *args, **options).faults]


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float32], ids=str)
def test_atomics_take_their_turns(dtype):
    steps = {
        "add": lambda old, v, e: old + v,
        "sub": lambda old, v, e: old - v,
        "max": lambda old, v, e: max(old, v),
        "exch": lambda old, v, e: v,
        "inc": lambda old, v, e: 0 if old >= v else old + 1,
        "dec": lambda old, v, e: v if old == 0 or old > v else old - 1,
        "cas": lambda old, v, e: v if old == e else old,
    }
    for places, threads in ((1, 40), (40, 40), (7, 40), (1, 1)):
        element = RNG.integers(0, places, threads)
        memory = RNG.integers(0, 9, places).astype(dtype)
        value, expected = RNG.integers(0, 9, (2, threads)).astype(dtype)
        for what, step in steps.items():
            if what == "sub" and dtype == np.uint64:
                continue  # NumPy warns where a card wraps
            now, old = memory.copy(), np.empty(threads, dtype)
            for t, place in enumerate(element):
                old[t] = now[place]
                now[place] = step(now[place], value[t], expected[t])
            changed = memory.copy()
            found, any_change = atomics.atomic(what, changed, element, value, expected)
            assert found.dtype == dtype and found.tolist() == old.tolist() and changed.tolist() == now.tolist()
            assert any_change or changed.tolist() == memory.tolist()


@cuda.jit
def add_under_a_lock(lock, total):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) == 1:
            pass
        total[0] = total[0] + cuda.blockIdx.x
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@cuda.jit
def each_thread_takes_the_lock(lock, total):
    done = False
    while not done:
        if cuda.atomic.cas(lock, 0, 0, 1) == 0:
            total[0] += cuda.grid(1)
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)
            done = True


@cuda.jit
def add_under_a_lock_of_the_block(lock, total):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) == 1:
            pass
    cuda.syncthreads()
    if cuda.threadIdx.x == 1:
        total[0] = total[0] + cuda.blockIdx.x
    cuda.threadfence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.exch(lock, 0, 0)


@pytest.mark.parametrize(
    "kernel, grid, block, total",
    [
        (add_under_a_lock, 200, 32, 199 * 100),
        (each_thread_takes_the_lock, 2, 64, 127 * 64),
        (add_under_a_lock_of_the_block, 20, 64, 19 * 10),
    ],
    ids=name,
)
def test_locks(kernel, grid, block, total):
    lock, found = np.zeros(1, np.int32), np.zeros(1, np.int64)
    assert faults(kernel, grid, block, lock, found) == []
    assert (lock[0], found[0]) == (0, total)


def test_a_scan_looks_back_at_the_blocks_before():
    @cuda.jit
    def kernel(x, out, sums, ready, turn):
        mine, before = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mine[0] = cuda.atomic.add(turn, 0, 1)
        cuda.syncthreads()
        b, v = mine[0], x[mine[0] * 32 + t]
        delta = 1
        while delta < 32:
            other = cuda.shfl_up_sync(0xFFFFFFFF, v, delta)
            if t >= delta:
                v += other
            delta *= 2
        if t == 31:
            before[0] = 0
            if b > 0:
                while cuda.atomic.add(ready, b - 1, 0) == 0:
                    pass
                before[0] = sums[b - 1]
            sums[b] = before[0] + v
            cuda.threadfence()
            cuda.atomic.exch(ready, b, 1)
        cuda.syncthreads()
        out[b * 32 + t] = v + before[0]

    x, out = RNG.integers(0, 9, 640), np.zeros(640, np.int64)
    zeros = np.zeros((2, 20), np.int32)
    assert faults(kernel, 20, 32, x, out, zeros[0], zeros[1], np.zeros(1, np.int32)) == []
    assert out.tolist() == np.cumsum(x).tolist()


def producer_and_consumer(fence):
    @cuda.jit
    def kernel(x, out):
        buffer, full = cuda.shared.array(32, float32), cuda.shared.array(1, int32)
        lane, produces = cuda.threadIdx.x % 32, cuda.threadIdx.x < 32
        if cuda.threadIdx.x == 0:
            full[0] = 0
        cuda.syncthreads()
        total = float32(0)
        for k in range(0, x.size, 32):
            if lane == 0:
                while cuda.atomic.add(full, 0, 0) == int32(produces):
                    pass
            cuda.syncwarp()
            if produces:
                buffer[lane] = x[k + lane]
            else:
                total += buffer[31 - lane]
            if fence:
                cuda.threadfence_block()
            cuda.syncwarp()
            if lane == 0:
                cuda.atomic.exch(full, 0, int32(produces))
        if not produces:
            out[lane] = total

    return kernel


def test_a_warp_produces_what_another_consumes():
    x, out = RNG.random(320, np.float32), np.zeros(32, np.float32)
    assert faults(producer_and_consumer(True), 1, 64, x, out) == []
    assert np.allclose(out, x.reshape(10, 32).sum(0)[::-1])
    assert {(kind, array) for kind, array, _ in faults(producer_and_consumer(False), 1, 64, x, out)} == {
        ("race", "buffer")
    }


@cuda.jit
def counts_its_tries(lock, out):
    tries = 0
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        tries += 1
    out[cuda.grid(1)] = tries


@cuda.jit
def waits_at_a_barrier_with_the_lock(lock, out):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass
    cuda.syncthreads()
    cuda.atomic.exch(lock, 0, 0)


@pytest.mark.parametrize("kernel", [counts_its_tries, waits_at_a_barrier_with_the_lock], ids=name)
def test_a_lock_that_nobody_gives_back_is_a_hang(kernel, monkeypatch):
    monkeypatch.setattr(spinning, "_MOST_POLLS", 500)
    (fault,) = run(kernel, 1, 32, np.zeros(1, np.int32), np.zeros(32, np.int64)).faults
    assert fault.kind == "hang" and "Whoever holds the lock" in fault.message


def test_one_looks_for_a_maximum_for_long_in_vain(monkeypatch):
    @cuda.jit
    def kernel(x, most):
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            cuda.atomic.max(most, 0, x[i])
            if i % 2:
                cuda.atomic.max(most, 0, 0)

    monkeypatch.setattr(spinning, "_MOST_POLLS", 50)
    most = np.zeros(1, np.int64)
    assert faults(kernel, 1, 32, np.arange(6400)[::-1].copy(), most) == [] and most[0] == 6399


# --- the same memory as two arrays ---


@cuda.jit
def real_parts(z, out):
    i = cuda.threadIdx.x
    z.real[i] = 1
    out[i] = z.real[31 - i]


@cuda.jit
def real_and_imaginary_parts(z, out):
    i = cuda.threadIdx.x
    z.real[i] = 1
    out[i] = z.imag[31 - i]


@cuda.jit
def halves_of_doubles(z, out):
    i = cuda.threadIdx.x
    z.view(np.int32)[4 * i] = 1
    out[i] = z[31 - i].real


@cuda.jit
def bytes_of_shared_doubles(z, out):
    s = cuda.shared.array(32, float64)
    i = cuda.threadIdx.x
    s[i] = 0
    cuda.syncthreads()
    s.view(np.uint8)[i] = 1
    out[i] = s[i // 8] if i < 8 else s[16 + i // 4]


@cuda.jit
def local_memory_half_written(z, out):
    words = cuda.local.array(2, float64)
    words.view(np.int32)[0] = 1
    out[cuda.threadIdx.x] = words[0]


@pytest.mark.parametrize(
    "kernel, expected",
    [
        (real_parts, [("race", "z.real", (31,))]),
        (real_and_imaginary_parts, []),
        (halves_of_doubles, [("race", "z", (31,))]),
        (bytes_of_shared_doubles, [("race", "s", (0,))]),
        (local_memory_half_written, [("uninitialised", "words", (0,))]),
    ],
    ids=name,
)
def test_memory_is_one_however_it_is_seen(kernel, expected):
    assert faults(kernel, 1, 32, np.zeros(32, np.complex128), np.zeros(32)) == expected


def test_a_view_that_is_not_aligned_is_refused():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[1:5].view(np.float32)[0]

    with pytest.raises(Refused, match=r"test_lockstep_order.py:\d+: .* a view of x as elements that do not lie"):
        run(kernel, 1, 1, np.zeros(8, np.uint8), np.zeros(1))


# --- what a fault says ---


def test_an_atomic_reads_what_must_have_been_written():
    @cuda.jit
    def histogram(x, out):
        bins = cuda.shared.array(8, int32)
        cuda.atomic.add(bins, x[cuda.threadIdx.x], 1)
        cuda.syncthreads()
        if cuda.threadIdx.x < 8:
            out[cuda.threadIdx.x] = bins[cuda.threadIdx.x]

    @cuda.jit
    def exchanged(out):
        s = cuda.shared.array(64, int32)
        cuda.atomic.exch(s, cuda.threadIdx.x, 5)
        cuda.syncthreads()
        out[cuda.threadIdx.x] = s[63 - cuda.threadIdx.x]

    assert faults(histogram, 1, 64, np.arange(64) % 8, np.zeros(8)) == [("uninitialised", "bins", (0,))]
    assert faults(exchanged, 1, 64, np.zeros(64)) == []


@cuda.jit
def first_of_shared(x, out):
    s = cuda.shared.array(0, uint8)
    s[cuda.threadIdx.x] = 1
    cuda.syncthreads()
    out[0, cuda.threadIdx.x] = s[cuda.threadIdx.x]


@cuda.jit
def swapped(x, out):
    i, j = cuda.grid(2)
    out[i, j] = x[j, i]


@cuda.jit
def left_neighbour(x, out):
    i = cuda.threadIdx.x
    out[0, i] = x[0, i - 1]


@cuda.jit
def too_far(x, out):
    out[0, cuda.threadIdx.x + 9] = 1


@cuda.jit
def private(x, out):
    a = cuda.local.array(2, float32)
    a[0] = a[1]
    out[0, cuda.threadIdx.x] = a[0]


@cuda.jit
def warp_neighbour(x, out):
    s = cuda.shared.array(8, float32)
    i = cuda.threadIdx.x
    s[i] = i
    out[0, i] = s[7 - i]


@cuda.jit
def any_neighbour(x, out):
    s = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    s[i] = i
    out[0, i % 8] = s[(i + 1) % 64]


@pytest.mark.parametrize(
    "kernel, block, words",
    [
        (first_of_shared, 1, "has shape (0,). A card reads or destroys what lies there. It is as long as the launch"),
        (swapped, (8, 2), "Guard it, as in `if i < out.shape[0] and j < out.shape[1]:`. Or are the axes swapped?"),
        (left_neighbour, 4, "silently. Guard it, as in `if i >= 0:`."),
        (too_far, 4, "A card reads or destroys what lies there. Guard it, as in `if i < out.shape[0] and j < out"),
        (private, 1, "which this thread has not written. A local array starts with anything in it"),
        (warp_neighbour, 8, "Threads of a warp need not run in step: put cuda.syncwarp()"),
        (any_neighbour, 64, "Nothing orders the two: put cuda.syncthreads() between them"),
    ],
    ids=name,
)
def test_what_a_fault_says(kernel, block, words):
    report = run(kernel, 1, block, np.zeros((2, 8)), np.zeros((2, 8)))
    assert words in report.faults[0].message
    assert report.faults[0].line.startswith("test_lockstep_order.py:")


def test_a_missing_fence_is_told():
    @cuda.jit
    def kernel(lock, total):
        while cuda.atomic.cas(lock, 0, 0, 1) == 1:
            pass
        total[0] += 1
        cuda.atomic.exch(lock, 0, 0)

    report = run(kernel, 3, 1, np.zeros(1, np.int32), np.zeros(1, np.int64))
    assert {f.kind for f in report.faults} == {"race"} and "cuda.threadfence() between" in report.faults[0].message


# --- launches ---


def test_bytes_of_shared_memory_are_a_whole_number():
    for shared in (-4, 4.5, "4"):
        with pytest.raises(LimitError, match="give a whole number, 0 or more"):
            add_under_a_lock[1, 32, 0, shared](np.zeros(1, np.int32), np.zeros(1, np.int64))


def test_a_grid_that_is_too_large_is_refused_at_once():
    with pytest.raises(Refused, match="268,435,456 threads; the most are 268,435,455"):
        add_under_a_lock[1 << 20, 256](np.zeros(1, np.int32), np.zeros(1, np.int64))


def test_a_program_may_have_many_blocks():
    steps = "".join(f"    if a > {j}:\n        a -= uint32(1)\n" for j in range(12))
    source = f"@cuda.jit(device=True)\ndef f(a):\n{steps}    return a\n\n\n@cuda.jit\ndef kernel(out):\n"
    source += "    a = uint32(cuda.grid(1))\n" + "    a = f(a)\n" * 60 + "    out[cuda.grid(1)] = a\n"
    linecache.cache["<many>"] = len(source), None, source.splitlines(True), "<many>"
    names = {"cuda": cuda, "uint32": uint32}
    exec(compile(source, "<many>", "exec"), names)
    out = np.ones(32)
    assert faults(names["kernel"], 1, 32, out) == [] and not out.any()
