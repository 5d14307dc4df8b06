"""Triton kernels on the simulated GPU: Triton's interpreter, made right, strict and fast.

From upstream come the language (`triton.language` with its types, promotions and errors) and the idea: a block is a
NumPy array, and the programs of a grid run one after the other. The rest is here:

    launch      runs the programs and collects the report; autotuning
    arguments   what a kernel gets for what it is launched with
    functions   the kernel's Python, rewritten where Triton means something else by it; lines: where it stands
    language    `tl` while a kernel runs; types: its types and checks, made cheap
    builder     the arithmetic, and what is refused; values: bfloat16, float8, tf32 and conversions
    libdevice   CUDA's library of mathematics
    reductions  tl.reduce and tl.associative_scan
    turns       the programs one after the other; one that waits lets others run
    memory      loads, stores and atomics, each held against the extent of its tensor (regions)
    watch       what they leave behind: counters, the trace, faults; races: two programs at one place

Requests count programs: one for each tl.load or tl.store of a program that has a lane whose mask is on. Sectors are the
distinct 32 bytes that it touches. Floating-point operations: one an element for + - * /, two for tl.fma, 2 M N K for
tl.dot, n - 1 for the sum of n. `steps`, lanes and branches are not counted: a program's threads are the compiler's.

Shared memory is the compiler's too: `report.compiled.shared` says how much it takes.
"""

from gpukern.simulate.interpreter.launch import install, run

__all__ = ["install", "run"]
