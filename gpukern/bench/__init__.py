"""`gpukern bench simulator`: what the simulated GPU costs, as ratios within one run, beside other simulators.

Every time is taken in this run, on this machine: only their ratios mean anything elsewhere.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numba import cuda, float32

from gpukern import device, simulate
from gpukern.bench import numba_kernels

_HERE = Path(__file__).parent
_REPEATS = 5


@dataclass
class Result:
    """One comparison. ratio: how many times `of` costs `against`; wanted: what the ratio must keep to, in words."""

    what: str
    of: str
    against: str
    ratio: float
    wanted: str
    ok: bool

    def __str__(self):
        said = f"{self.what:36} {self.of} / {self.against} = {self.ratio:.3g}"
        return f"{said:100} ({self.wanted})"


@cuda.jit
def empty():
    pass


@cuda.jit
def multiply(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * y[i]


@cuda.jit
def trips(out, n):
    i = cuda.grid(1)
    total = float32(0)
    for _ in range(n):
        total += 1
    out[i] = total


@cuda.jit
def ways(out, n):
    i = cuda.grid(1)
    way = cuda.laneid % n
    for w in range(n):
        if way == w:
            out[i] = w


def simulator(only: str = "") -> Iterator[Result]:
    """All comparisons whose name holds `only`. Raises DeviceError where kernels run on a card."""
    if not device.simulated():
        raise device.DeviceError("this process runs kernels on its card: set GPUKERN_DEVICE=simulated.")
    torch.set_num_threads(1)  # as the other interpreter's process has it
    for part in (_numba, _triton, _limits, _checks, _growth):
        for result in part(only):
            if only in result.what:
                yield result


def _numba(only: str) -> Iterator[Result]:
    """Against Numba's own simulator, every counter and every check on. It takes seconds a launch: one is enough."""
    names = [name for name in numba_kernels.launches() if only in f"numba {name}"]
    for name in names:
        ours = numba_kernels.seconds(_REPEATS, name)[name]
        theirs = _elsewhere("numba_kernels.py", {"NUMBA_ENABLE_CUDASIM": "1"}, 1, name)[name]
        least = 100 if name == "matmul" else 50
        ratio = theirs / ours
        yield Result(
            f"numba {name}", "Numba's own simulator", "the simulated GPU", ratio, f">= {least}", ratio >= least
        )


def _triton(only: str) -> Iterator[Result]:
    """Against Triton's own interpreter."""
    try:
        from gpukern.bench import triton_kernels
    except ImportError:  # Triton installs on Linux only
        return
    for name, least in (("softmax", 2), ("matmul", 1)):
        if only not in f"triton {name}":
            continue
        ours = triton_kernels.seconds(_REPEATS, name)[name]
        theirs = _elsewhere("triton_kernels.py", {"TRITON_INTERPRET": "1"}, _REPEATS, name)[name]
        ratio = theirs / ours
        yield Result(
            f"triton {name}", "Triton's interpreter", "the simulated GPU", ratio, f">= {least}", ratio >= least
        )


def _limits(only: str) -> Iterator[Result]:
    """What is bounded in seconds and bytes; the bound is the other side of the ratio."""
    if only in "empty kernel, 10^6 threads":
        taken = _fastest(lambda: empty[3907, 256]())
        yield Result("empty kernel, 10^6 threads", "its time", "half a second", taken / 0.5, "<= 1", taken <= 0.5)
    what = "10^7 threads, memory"
    if only in what:
        kilobytes = int(
            subprocess.run([sys.executable, "-c", _MANY_THREADS], capture_output=True, text=True, check=True).stdout
        )
        yield Result(what, "all memory of the process", "1 GB", kilobytes * 1024 / 1e9, "<= 1", kilobytes * 1024 <= 1e9)


_MANY_THREADS = """
import resource, numpy as np, gpukern
from gpukern.bench import multiply
x, y, out = np.ones((3, 10**7), np.float32)
multiply[10**7 // 256 + 1, 256](x, 2 * y, out)
assert (out == 2).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _checks(only: str) -> Iterator[Result]:
    """What counting and checking cost, against the same launch without."""
    for name, (kernel, grid, block, arguments, _) in numba_kernels.launches().items():
        if only not in f"checks of {name}":
            continue
        kernel[grid, block](*arguments)  # compiled
        with_them = _fastest(lambda k=kernel, g=grid, b=block, a=arguments: simulate.run(k, g, b, *a, trace=None))
        without = _fastest(
            lambda k=kernel, g=grid, b=block, a=arguments: simulate.run(k, g, b, *a, trace=None, checks=False)
        )
        ratio = with_them / without
        yield Result(f"checks of {name}", "with counters and checks", "without", ratio, "<= 3", ratio <= 3)


def _growth(only: str) -> Iterator[Result]:
    """How cost grows: with threads, with trips of a loop, with the ways a warp parts."""
    out = np.zeros(1 << 20, np.float32)
    x = np.ones(1 << 20, np.float32)
    for what, small, large, launch in (
        ("growth: 16 times the threads", 1 << 12, 1 << 16, lambda n: multiply[n // 256, 256](x, x, out[:n])),
        ("growth: 16 times the threads again", 1 << 16, 1 << 20, lambda n: multiply[n // 256, 256](x, x, out[:n])),
        ("growth: 16 times the trips", 64, 1024, lambda n: trips[16, 256](out, n)),
        ("growth: 32 ways instead of 2", 2, 32, lambda n: ways[16, 256](out, n)),
    ):
        if only in what:
            ratio = _fastest(lambda: launch(large)) / _fastest(lambda: launch(small))  # noqa: B023 (called at once)
            times = large // small
            yield Result(what, f"{large:,}", f"{small:,}", ratio, f"<= {2 * times}", ratio <= 2 * times)


def _fastest(call) -> float:
    """Seconds of the fastest of some calls, after one that compiles."""
    call()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _elsewhere(script: str, variables: dict, repeats: int, only: str) -> dict:
    """The seconds of the same launches in a process that knows nothing of gpukern."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")}
    command = [sys.executable, str(_HERE / script), str(repeats), only]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def peers(only: str = ""):
    """The library's kernels and plans beside their peers: see gpukern.bench.library, which needs a card and Triton."""
    from gpukern.bench import library

    return library.peers(only)


BENCHES = {"simulator": simulator, "peers": peers}
