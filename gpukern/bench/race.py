"""Several ways to do one piece of work, timed against each other in one run: cold inputs, every result checked.

Each contender is captured in a CUDA graph over rotated copies of the inputs, together past four times L2 (or as many as
fit, and then the row says so), so that neither the host's launches nor a warm L2 are part of a time.
"""

import contextlib
import multiprocessing
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpukern import device
from gpukern.measure.timing import copies_past_l2

_MOST_BYTES = 16e9  # of copies held for one piece of work
_TRIAL_ROUNDS, _ROUNDS = 4, 16


@dataclass(frozen=True)
class Work:
    """One piece of work.

    name       what, with its shapes
    inputs     () -> one copy of the inputs, tensors on the card by name
    ours       {name of a version: (**inputs) -> result}; the fastest in a trial goes on
    peers      the same for what a user would take instead; the fastest in a trial goes on
    floor      the least speed against the peer, peer's time / our time
    bytes      that must be moved at the least, flops: that must be computed
    error      (result, **inputs) -> its op.error against float64; tolerance: the largest that passes
    """

    name: str
    inputs: Callable[[], dict]
    ours: dict[str, Callable]
    peers: dict[str, Callable]
    floor: float
    bytes: float
    flops: float
    error: Callable
    tolerance: float


@dataclass
class Outcome:
    """Who won, and by how much. Times in microseconds: median, and the 20 % and 80 % quantiles of `ours` and `peer`.

    speed   peer's time / our time
    tried   {name: microseconds in the trial} of all contenders that ran, failed: {name: why} of the others
    bound   what a card cannot beat here: "memory" or "arithmetic"; limit_us: that time, by the rates of this run
    """

    work: str
    ours: str
    peer: str
    ours_us: float
    peer_us: float
    ours_spread: tuple
    peer_spread: tuple
    speed: float
    floor: float
    ok: bool
    limit_us: float
    bound: str
    error: float
    method: str
    clock_mhz: float | None
    watts: float | None
    tried: dict
    failed: dict

    def __str__(self):
        return (
            f"{self.work:52} {self.ours_us:8.1f} us {self.ours:36} {self.peer_us:8.1f} us {self.peer:24} "
            f"{self.speed:5.3f}x (>= {self.floor:.3g})  limit {self.limit_us:.1f} us: {self.bound}"
            + "".join(f"\n      {name}: {why}" for name, why in self.failed.items())
        )


def race(work: Work, rates: dict) -> Outcome:
    """Run one piece of work. rates: {"bytes_per_s", "flops_per_s"} as measured in this run (see `measured_rates`).

    A contender that fails, or whose result is wrong, is left out and named in `failed`.
    """
    one = work.inputs()
    held = sum(t.numel() * t.element_size() for t in _tensors(one))
    copies = [one]
    for _ in range(min(copies_past_l2(int(work.bytes), most=240), max(1, int(_MOST_BYTES // max(held, 1)))) - 1):
        copies.append(work.inputs())
    failed, graphs, errors = {}, {}, {}
    for side in ("ours", "peers"):
        for name, function in getattr(work, side).items():
            try:
                out = function(**one)
                if side == "ours":
                    errors[name] = work.error(out, **one)
                    if not errors[name] <= work.tolerance:
                        raise ValueError(f"wrong: error {errors[name]:.2g}, more than {work.tolerance:.2g}")
                graphs[side, name] = _captured(function, copies)
            except Exception as failure:
                failed[name] = str(failure).splitlines()[0][:200] if str(failure) else type(failure).__name__
    for side in ("ours", "peers"):
        if not any(s == side for s, _ in graphs):
            raise RuntimeError(f"{work.name}: none of {side} ran: {failed}")
    trial = _times(graphs, _TRIAL_ROUNDS, len(copies))
    best = {}
    for key in sorted(trial, key=lambda k: statistics.median(trial[k]), reverse=True):
        best[key[0]] = key  # the fastest of each side comes last
    final = _times({key: graphs[key] for key in best.values()}, _ROUNDS, len(copies))
    ours, peer = (sorted(final[best[side]]) for side in ("ours", "peers"))
    memory, arithmetic = work.bytes / rates["bytes_per_s"] * 1e6, work.flops / rates["flops_per_s"] * 1e6
    clock, watts = _state()
    speed = statistics.median(peer) / statistics.median(ours)
    return Outcome(
        work.name,
        best["ours"][1],
        best["peers"][1],
        statistics.median(ours),
        statistics.median(peer),
        _spread(ours),
        _spread(peer),
        speed,
        work.floor,
        speed >= work.floor,
        max(memory, arithmetic),
        "memory" if memory > arithmetic else "arithmetic",
        errors[best["ours"][1]],
        f"graphs of {len(copies)} copies of {held / 1e6:.3g} MB",
        clock,
        watts,
        {name: statistics.median(times) for (_, name), times in trial.items()},
        failed,
    )


def compile_ahead(works: Callable, only: str) -> None:
    """Run every contender of `works(only)` once, shared out over worker processes: their compilers take the longest.

    What they compile stays in the compilers' caches on disk. works: a module's function, so that a worker can find it.
    """
    context = multiprocessing.get_context("spawn")
    n = max(1, min(12, (os.cpu_count() or 2) - 2))
    workers = [context.Process(target=_compile_share, args=(works, only, mine, n)) for mine in range(n)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _compile_share(works: Callable, only: str, mine: int, n: int) -> None:
    number = 0
    for work in works(only):
        inputs = None
        for function in work.ours.values():
            number += 1
            if number % n == mine:
                inputs = inputs or work.inputs()
                with contextlib.suppress(Exception):  # the run will meet it again, and names it
                    function(**inputs)


def measured_rates() -> dict:
    """The rates of this card in this run: of a copy of 1 GB, and of cuBLAS in bfloat16 at 8192 cubed on random data."""
    x = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    graphs = {
        "copy": _captured(lambda: torch.mul(x, 1, out=y), [{}]),  # a kernel: a copy in a graph may be the copy engine's
        "product": _captured(lambda: a @ b, [{}]),
    }
    times = _times(graphs, 12, 1)
    seconds = {name: min(t) / 1e6 for name, t in times.items()}  # a limit: the best there was
    return {"bytes_per_s": 2 * x.numel() * 2 / seconds["copy"], "flops_per_s": 2 * 8192**3 / seconds["product"]}


def _captured(function: Callable, copies: list) -> torch.cuda.CUDAGraph:
    """A graph that does the work once on every copy. What it makes is kept by the graph's own memory."""
    for copy in copies[:2]:
        function(**copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            function(**copy)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _times(graphs: dict, rounds: int, runs: int) -> dict:
    """{name: microseconds of one run, a list}: forth and back through all graphs, so that none is always the first."""
    events = []
    for turn in range(rounds):
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events.append((name, start, end))
    torch.cuda.synchronize()
    times = {name: [] for name in graphs}
    for name, start, end in events:
        times[name].append(start.elapsed_time(end) * 1e3 / runs)
    return times


def _spread(times: list) -> tuple:
    return times[len(times) // 5], times[len(times) * 4 // 5]


def _tensors(inputs: dict) -> list:
    found = []
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict | list | tuple):
            found += _tensors(value if isinstance(value, dict) else dict(enumerate(value)))
    return found


def _state() -> tuple:
    """The SM clock in MHz and the power in watts, just after the work."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        clock, watts = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
        return float(clock), float(watts)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None, None


def require_card() -> None:
    """Raises DeviceError on a machine without a card."""
    if device.simulated():
        raise device.DeviceError("`gpukern bench peers` times kernels, which needs a CUDA card; this machine has none.")
