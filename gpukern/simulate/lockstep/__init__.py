"""Numba-CUDA kernels in lockstep, on a CPU: what a warp does, in a few files of Python.

How a launch goes, and where to read on:

    frontend    Numba's own compiler types the kernel, as for a card, and stops before it makes machine code
    program     the typed functions become one flat program of blocks, numbered so that threads find together again
                (callees: device functions are laid in, and the Python with which Numba implements its own)
    lower       each block becomes one Python function (blocks, expressions, attributes, calls, arrays, methods,
                iteration: what becomes what; operations, arithmetic, views: what that computes; kinds: the types)
    machine     runs the threads with the least program counter, all of them at once with NumPy (group, barriers),
                those that spin on a lock or a flag last (spinning)
    access      every load, store and atomic (atomics): in bounds? what does it cost? (memory, coalescing) is it a
                race? (races)
    launch      arguments in, a report.Report out; host: what the host calls (device_array, card), `install`

Why Numba's typed IR, and not the kernel's Python. Lowering the source would need a second compiler: its promotions
(int32 + int32 is int64, float32 / int is float64), its refusals (a run-time shared shape, a list), its frozen globals
and its pruned branches would all be ours to imitate, and each mistake would be green here and red on a card. The IR has
them, with device functions typed for each call, in a dozen kinds of statements. Its price is that it follows Numba's
internals (one file, `frontend`), and that a kernel costs some tenths of a second to type before its first launch.

Why groups and not masks. A vector machine may run every thread through both sides of a branch and throw half away, or
keep those that are together together. The second is what a card does, costs what is active, needs no mask in any
operation, and leaves values that are the same for all threads (loop counters, sizes, tile offsets) as single numbers.

How cost grows. With the number of blocks that threads run together, times a NumPy call for each operation: about a
microsecond until some thousand threads are in flight, then in proportion to them. Uniform loops cost their trips; a
loop that threads leave one by one costs its longest trip, with fewer threads each time; a branch on which a group parts
costs both sides, and a copy of the registers that live on. Memory grows with the threads in flight (`machine.IN_FLIGHT`
at most, or a block) and, for arrays that are written, with eight bytes an element for the race check.
"""

from gpukern.simulate.lockstep.host import install
from gpukern.simulate.lockstep.launch import run

__all__ = ["install", "run"]
