"""Time a kernel on the card: warmed up, cold in L2, many times, with its spread.

Two ways, and a Timing says which was used:

graph   one CUDA graph holds the work over rotated copies of its inputs, together larger than four times L2, so that
        every run finds its inputs in HBM. Its replay, divided by the number of copies, has no launch cost of the host.
events  device events around one run, after 256 MB were written to push the inputs out of L2. For work that cannot
        be captured. It includes what the host adds for kernels shorter than their launch.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpukern import device

_FLUSH_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Timing:
    """Quantiles of the time of one run in microseconds, how they were taken, and the SM clock just after."""

    median_us: float
    low_us: float  # 20 %
    high_us: float  # 80 %
    method: str
    clock_mhz: int | None


def copies_past_l2(n_bytes: int, most: int = 24) -> int:
    """Copies of `n_bytes` of inputs that together are larger than four times L2, between 1 and `most`."""
    return max(1, min(most, -(-4 * device.card().l2 // max(n_bytes, 1))))


def time(runs: Sequence[Callable[[], object]], budget_ms: float = 60.0) -> Timing:
    """Time the work that each of `runs` does on its own copy of the inputs.

    budget_ms  how long to measure, roughly; at least 5 and at most 100 samples are taken
    Raises DeviceError on a machine without a card: a time is never invented.
    """
    if device.simulated():
        raise device.DeviceError("the simulated GPU counts, it does not time. Recorded rows have times of real cards.")
    for run in runs:
        run()
    torch.cuda.synchronize()
    try:
        sample, n, method = _captured(runs).replay, len(runs), f"graph of {len(runs)} copies"
        flush = None
    except Exception:  # something in the work may not be captured, and each library says so in its own way
        torch.cuda.synchronize()
        sample, n, method = runs[0], 1, "events after L2 flush"
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    once = _sample_us(sample, flush)
    count = int(min(100, max(5, budget_ms * 1e3 / max(once, 1.0))))
    times = sorted(_sample_us(sample, flush) / n for _ in range(count))
    return Timing(statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5], method, _clock_mhz())


def _captured(runs) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _sample_us(sample: Callable, flush: torch.Tensor | None) -> float:
    if flush is not None:
        flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    sample()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _clock_mhz() -> int | None:
    try:
        return torch.cuda.clock_rate()
    except (RuntimeError, ModuleNotFoundError):  # needs nvidia-ml-py
        return None
