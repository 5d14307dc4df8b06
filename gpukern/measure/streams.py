"""Streams: two kernels that do not need each other, on one stream and on two.

A stream is a queue: what is put into it runs in order. Kernels in different streams have no order, and run at the same
time where the card has room. So what does not fit a whole card on its own, as the small kernels of decode, gains; a
kernel that fills all SMs does not. And the order that one stream gave for nothing must now be said, twice:

- The second stream must wait for what made its inputs, and the first for the results: `wait_stream`.
- PyTorch's allocator gives memory back to the stream that it was allocated on. A tensor that another stream still reads
  when Python drops it would be overwritten by the next allocation: `record_stream` tells the allocator.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numba import cuda

from gpukern import device
from gpukern.measure.layers import provenance

_SAMPLES = 20


@dataclass(frozen=True)
class Overlap:
    """Medians of microseconds for the two pieces of work on one stream and on two, and for each alone.

    overlapped  did the second begin before the first had ended? By events on the card, on one stream and on two
    """

    first_us: float
    second_us: float
    one_stream_us: float
    two_streams_us: float
    overlapped: dict[str, bool]
    card: str

    @property
    def ratio(self) -> float:
        """Time on one stream over time on two: 1 if nothing overlaps, at most 2."""
        return self.one_stream_us / self.two_streams_us


def on_two_streams(first: Callable, second: Callable, x: torch.Tensor, y: torch.Tensor) -> tuple:
    """(first(x), second(y)), the second on a stream of its own; right whatever comes before and after on this stream.

    first, second  functions of a tensor on the card that return a new one
    """
    _require_card()
    here, beside = torch.cuda.current_stream(), _beside()
    beside.wait_stream(here)  # y may still be in the making
    with torch.cuda.stream(beside):
        b = second(y)
    y.record_stream(beside)  # y belongs to `here`: do not reuse its memory until `beside` has read it
    a = first(x)
    here.wait_stream(beside)  # whatever reads b comes after
    b.record_stream(here)  # b belongs to `beside`, and is read here
    return a, b


def on_one_stream(first: Callable, second: Callable, x: torch.Tensor, y: torch.Tensor) -> tuple:
    """(first(x), second(y)), one after the other."""
    _require_card()
    return first(x), second(y)


def overlap(first: Callable | None = None, second: Callable | None = None, n: int = 1 << 15) -> Overlap:
    """Measure both ways, with work that leaves most of the card free unless `first` and `second` say otherwise.

    first, second  functions of a tensor `[n]`; default: `iterated`, whose 32 blocks occupy 32 SMs at most
    Both ways are checked to give the same before they are timed. Raises DeviceError without a card.
    """
    _require_card()
    first, second = first or iterated, second or iterated
    x, y = torch.rand(n, device="cuda"), torch.rand(n, device="cuda")
    wanted = first(x), second(y)
    for way in (on_one_stream, on_two_streams):
        for made, right in zip(way(first, second, x, y), wanted, strict=True):
            if not torch.equal(made, right):
                raise RuntimeError(f"{way.__name__} gives another result.")
    return Overlap(
        first_us=_median_us(lambda: first(x)),
        second_us=_median_us(lambda: second(y)),
        one_stream_us=_median_us(lambda: on_one_stream(first, second, x, y)),
        two_streams_us=_median_us(lambda: on_two_streams(first, second, x, y)),
        overlapped={way.__name__: _overlapped(way, first, second, x, y) for way in (on_one_stream, on_two_streams)},
        card=provenance()["card"],
    )


def _require_card() -> None:
    if device.simulated():
        raise device.DeviceError(
            "streams need a CUDA card: on the simulated GPU a launch has ended when it returns, so nothing can overlap."
        )


_streams = {}  # device -> the stream beside its current one; streams are few, and making one takes long


def _beside() -> torch.cuda.Stream:
    on = torch.cuda.current_device()
    if on not in _streams:
        _streams[on] = torch.cuda.Stream()
    return _streams[on]


@cuda.jit
def _iterate_kernel(x, out, steps):
    i = cuda.grid(1)
    if i < out.size:
        value = x[i]
        for _ in range(steps):
            value = value * x[i] + x[i]
        out[i] = value


def iterated(x: torch.Tensor, steps: int = 500_000) -> torch.Tensor:
    """x: `[n]`. Blocks of 1024 threads; so many steps on each element that a launch is short beside them."""
    out = torch.empty_like(x)
    grid = -(-out.numel() // 1024)
    _iterate_kernel[grid, 1024, device.numba_stream()](device.numba_array(x), device.numba_array(out), steps)
    return out


def _median_us(run: Callable) -> float:
    run()
    times = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _overlapped(way: Callable, first: Callable, second: Callable, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Did one of the two begin before the other had ended? By events in the streams that they run on."""
    events = {}

    def watched(name, work):
        def run(tensor):
            begin, end = events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begin.record()
            out = work(tensor)
            end.record()
            return out

        return run

    torch.cuda.synchronize()
    way(watched("first", first), watched("second", second), x, y)
    torch.cuda.synchronize()
    (first_begin, first_end), (second_begin, second_end) = events["first"], events["second"]
    return first_begin.elapsed_time(second_end) > 0 and second_begin.elapsed_time(first_end) > 0
