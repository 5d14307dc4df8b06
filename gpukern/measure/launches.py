"""What a launch costs: microseconds of the host for each way to launch one small kernel, and of a node in a CUDA graph.

In decode a kernel runs for a few microseconds. Where the host needs longer than that to launch the next one, the card
waits: the layer is bound by launches. The ways differ in how much is decided anew on every launch.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl
from numba import cuda

from gpukern import device
from gpukern.measure.layers import provenance
from gpukern.measure.recordings import NotRecorded
from gpukern.measure.rows import Row, read

N = 1024  # elements that a launch copies: two pointers and a number for arguments, and next to no work
_QUEUED = 200  # launches a sample: fewer than a stream's queue holds, so that the host never waits for the card
_SAMPLES = 30


@triton.jit
def copy_triton(x_ptr, out_ptr, N, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out_ptr + n, tl.load(x_ptr + n, mask=n < N), mask=n < N)


@cuda.jit
def copy_numba(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i]


def launch_rows(more: Mapping[str, object] | None = None) -> list[Row]:
    """One Row a way to launch, time_us its microseconds a launch; without a card the recorded ones, or NotRecorded.

    more  name -> what launches `copy_triton` in another way, called as `launcher[grid](x, out, N, BN=1024)`

    Each way is checked before it is timed: a launch that does not copy has a status instead of a time.
    """
    if device.simulated():
        rows = list(read("launches"))
        if not rows:
            raise NotRecorded("what a launch costs", None, "")
        return [row for row in rows if row.card == device.card().name] or rows
    x = torch.randn(N, device="cuda")
    return [_row(name, *way) for name, way in ways(x, torch.empty_like(x), more or {}).items()]


def ways(x: torch.Tensor, out: torch.Tensor, more: Mapping[str, object]) -> dict[str, tuple]:
    """{name: (launch, x, out)}: each `launch()` copies x into out, `[N]` both. The last one is for a graph."""
    grid = (triton.cdiv(N, 1024),)

    def by_triton():
        return copy_triton[grid](x, out, N, BN=1024)

    launches = {"torch": lambda: out.copy_(x), "triton": by_triton}
    if not device.simulated():  # where Triton compiles, a launch returns the kernel; it takes every parameter, in order
        compiled = by_triton()
        launches["triton, compiled kernel"] = lambda: compiled[*grid, 1, 1](x, out, N, 1024)
    for name, launcher in more.items():
        launches[name] = lambda launcher=launcher: launcher[grid](x, out, N, BN=1024)
    arrays = device.numba_array(x), device.numba_array(out)
    launches["numba, device arrays"] = lambda: copy_numba[N // 256, 256, device.numba_stream()](*arrays)
    launches["numba, torch tensors"] = lambda: copy_numba[N // 256, 256, device.numba_stream()](
        device.numba_array(x), device.numba_array(out)
    )
    launches["node of a CUDA graph"] = by_triton
    return {name: (launch, x, out) for name, launch in launches.items()}


def _row(name: str, launch: Callable, x: torch.Tensor, out: torch.Tensor) -> Row:
    row = Row(
        sweep="launches", config="one kernel", part="copy", version=name, dtype="float32", B=1, T=1, S=1, C=N, H=1, F=N,
        bytes=2 * N * x.element_size(), flops=0, launches=1, source=device.mode(), **provenance(),
    )  # fmt: skip
    if not copies(launch, x, out):
        return replace(row, status="WRONG: it does not copy")
    graph = _graph(launch) if name == "node of a CUDA graph" else None
    times = sorted(_replay_us(graph) if graph else _host_us(launch) for _ in range(_SAMPLES))
    method = f"device events, graph of {_QUEUED} nodes" if graph else f"host clock, {_QUEUED} launches queued"
    low, high = times[_SAMPLES // 5], times[_SAMPLES * 4 // 5]
    return replace(row, time_us=statistics.median(times), low_us=low, high_us=high, method=method)


def copies(launch: Callable, x: torch.Tensor, out: torch.Tensor) -> bool:
    """Does `launch` copy x into out? Asked with NaN in out, so that an element that is not written shows."""
    out.fill_(float("nan"))
    launch()
    return torch.equal(out, x)


def _host_us(launch: Callable) -> float:
    """Microseconds from call to return of a launch, while the card keeps up or the queue has room."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_QUEUED):
        launch()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - start) * 1e6 / _QUEUED


def _graph(launch: Callable) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_QUEUED):
            launch()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / _QUEUED
