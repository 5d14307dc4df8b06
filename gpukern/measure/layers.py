"""Measure a layer: every part of a plan, a plan as a whole, one part with many tiles.

The functions take the layer and its plans as they come (nothing of gpukern.layer is imported): a layer knows how to run
a part, what it costs, and what its exact answer is. Where there is no card, the same calls return recorded rows.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version

import torch

from gpukern import device, inspect
from gpukern.measure.check import Verdict, found_error, poisoned
from gpukern.measure.recordings import NotRecorded, recorded_plan, recorded_tile
from gpukern.measure.rows import TILE, Row
from gpukern.measure.timing import copies_past_l2, time
from gpukern.op import InputError

_MOST_BYTES = 8e9  # of copies held for one measurement


def plan_rows(layer, plan, step) -> list[Row]:
    """One Row a part of `plan` at `step`, in order, then one with part="all", the layer as a whole in one graph.

    Measured on a card. Without one: recorded rows of the same sizes, or NotRecorded, which names the nearest.
    """
    plan = plan.at(step)
    if device.simulated():
        rows = recorded_plan(layer.config.name, plan.name, step, layer.dtype)
        if len(rows) != len(plan.parts) + 1:
            raise NotRecorded(f"plan {plan.name} in {len(plan.parts)} parts", None, "")
        for part, row in zip(plan.parts, rows, strict=False):
            _require_same(layer, part, step, row)
        return rows
    bench = LayerBench(layer, step)
    return [*(bench.row(part, plan.name) for part in plan.parts), bench.whole(plan)]


def tile_row(layer, part, step) -> Row:
    """One part with one tile: measured on a card, recorded without one (or NotRecorded)."""
    if device.simulated():
        tile = layer.tile(part, step)
        row = recorded_tile(layer.config.name, part.name, step, layer.dtype, part.version, tile)
        _require_same(layer, part, step, row)
        return row
    return _bench(layer, step).row(part)


def sweep_tiles(layer, parts: Iterable, step) -> Iterator[Row]:
    """One Row for each of `parts` (the same stages with other tiles or versions), as each is measured.

    Raises DeviceError without a card.
    """
    if device.simulated():
        raise device.DeviceError("a sweep is measured on a CUDA card, and this machine has none; see recorded_tiles.")
    bench = LayerBench(layer, step)
    for part in parts:
        yield bench.row(part)


def _require_same(layer, part, step, row: Row) -> None:
    """Refuse a recorded row of another kernel, another tile or other sizes than the part that was asked for."""
    cost, tile = layer.part_cost(part, step), layer.tile(part, step)
    if (row.part, row.version, row.tile) != (part.name, part.version, tile):
        sizes = " ".join(f"{name}={n}" for name, n in tile.items())
        raise NotRecorded(
            f"{part.name} by {part.version} with {sizes or 'no tile'}", row, f"by {row.version} {row.tile}"
        )
    if (row.bytes, row.flops) != (cost.bytes, cost.flops):
        c = layer.config
        asked = f"{part.name} of a layer C={c.C} H={c.H} F={c.F} named {c.name!r}"
        raise NotRecorded(asked, row, f"C={row.C} H={row.H} F={row.F}")


@functools.lru_cache(maxsize=2)
def _bench(layer, step) -> "LayerBench":
    return LayerBench(layer, step)


class LayerBench:
    """A layer at one step with all tensors between its stages in memory, in as many copies as it takes to pass L2.

    layer, step  as the layer's `inputs(step)` wants them
    """

    def __init__(self, layer, step):
        self.layer, self.step = layer, step
        self._copies = []
        self._exact = {}

    def row(self, part, plan: str = "") -> Row:
        """Check one part against float64 on the tensors that come before it, then time it."""
        cost = self.layer.part_cost(part, self.step)
        row = self._blank(part.name, part.version, cost.bytes, cost.flops, plan)
        row = replace(row, **{name: n for name, n in self.layer.tile(part, self.step).items() if name in TILE})
        copies = self._at_least(copies_past_l2(cost.bytes, most=240))
        try:
            with inspect.watch_triton() as resources:
                verdict = self._check([part], copies[0])
            row = replace(row, error=verdict.error, tolerance=verdict.tolerance, launches=self._launches([part]))
            row = replace(row, registers=resources.registers, shared=resources.shared, spills=resources.spills)
            if not verdict.ok:
                return replace(row, status=str(verdict))
            timing = time([functools.partial(_run, [part], *copy) for copy in copies], budget_ms=20)
            if not (again := self._check([part], copies[0])).ok:
                return replace(row, status=f"{again}, after it was timed")
        except Exception as failure:
            return replace(row, status=why_not(failure))
        finally:
            self._restore(part)
        return self._timed(row, timing)

    def whole(self, plan) -> Row:
        """The whole layer by `plan`: checked end to end against float64, then all parts timed as one piece of work."""
        costs = self.layer.costs(plan, self.step)
        row = self._blank("all", plan.name, sum(c.bytes for c in costs), sum(c.flops for c in costs), plan.name)
        copies = self._at_least(copies_past_l2(row.bytes, most=240))
        try:
            verdict = self._check(plan.parts, copies[0])
            row = replace(row, error=verdict.error, tolerance=verdict.tolerance, launches=self._launches(plan.parts))
            if not verdict.ok:
                return replace(row, status=str(verdict))
            return self._timed(row, time([functools.partial(_run, plan.parts, *copy) for copy in copies], budget_ms=40))
        except Exception as failure:
            return replace(row, status=why_not(failure))
        finally:
            self._restore(plan.parts[0])

    def run_once(self, parts) -> None:
        """Run `parts` on the first copy, unchecked and untimed: it makes the compilers do their work."""
        _run(parts, *self._at_least(1)[0])

    def _check(self, parts, copy) -> Verdict:
        """Run `parts` into poisoned memory and compare: one part with its own exact answer, all with the layer's."""
        layer, state = copy
        alone = parts[0] if len(parts) == 1 and len(parts[0].stages) < 8 else None
        if (key := alone.name if alone else "all") not in self._exact:
            self._exact[key] = layer.exact_part(alone, state) if alone else layer.exact(*layer.inputs(self.step))
        if "qkv" in parts[0].stages:
            for cached in (state["k"], state["v"]):
                cached[:, :, -self.step.T :] = float("nan")
        with poisoned():
            made = _run(parts, layer, state)
        out = layer.made(alone, made) if alone else made["z"]
        return Verdict(found_error(out, self._exact[key]), layer.tolerance(alone))

    def _at_least(self, count: int) -> list:
        """(layer, state) pairs, each in its own memory, each with the tensors of all stages filled in by PyTorch."""
        plan = self.layer.reference_plan
        held = 2 * sum(cost.bytes for cost in self.layer.costs(plan, self.step))
        count = max(1, min(count, int(_MOST_BYTES // held)))
        while len(self._copies) < count:
            layer = self.layer.copy() if self._copies else self.layer
            self._copies.append((layer, _run(plan.parts, layer, layer.start(*layer.inputs(self.step)))))
        return self._copies[:count]

    def _restore(self, part) -> None:
        """Give the caches back the rows that PyTorch wrote, so that later parts are checked on the same keys."""
        if "qkv" in part.stages:
            for layer, state in self._copies:
                _run(self.layer.reference_plan.parts[:1], layer, state)

    def _launches(self, parts) -> int | None:
        """Kernels launched: one a part for ours; unknown for what PyTorch or its compiler does."""
        return None if any(part.version.startswith("torch") for part in parts) else len(parts)

    def _blank(self, part: str, kernel: str, n_bytes: int, flops: int, plan: str) -> Row:
        c, s = self.layer.config, self.step
        _, M, N, K = self.layer.product(part, s) or (None,) * 4
        return Row(
            sweep="plans" if plan else "tiles",
            config=c.name,
            part=part,
            version=kernel,
            dtype=str(self.layer.dtype).removeprefix("torch."),
            B=s.B,
            T=s.T,
            S=s.S,
            C=c.C,
            H=c.H,
            F=c.F,
            plan=plan,
            M=M,
            N=N,
            K=K,
            bytes=n_bytes,
            flops=flops,
            source=device.mode(),
            **provenance(),
        )

    def _timed(self, row: Row, timing) -> Row:
        """Put the times in, unless they say that memory moved faster than the card can."""
        card = device.card()
        row = replace(row, method=timing.method, note=f"SM clock {timing.clock_mhz} MHz" if timing.clock_mhz else "")
        if card.bandwidth and row.bytes / timing.median_us * 1e6 > 1.05 * card.bandwidth and row.bytes > 4 * card.l2:
            seen, most = row.bytes / timing.median_us / 1e3, card.bandwidth / 1e9
            return replace(row, status=f"flagged: {seen:.0f} GB/s is more than the {most:.0f} GB/s of {card.name}")
        bound = card.bound(row.flops, row.bytes, self.layer.dtype)
        return replace(
            row,
            time_us=timing.median_us,
            low_us=timing.low_us,
            high_us=timing.high_us,
            share=bound and bound * 1e6 / timing.median_us,
        )


def _run(parts, layer, state: dict) -> dict:
    """Run `parts` on a copy of the state, so that the next run finds the same inputs; returns the copy."""
    state = dict(state)
    for part in parts:
        layer.run_part(part, state)
    return state


def why_not(failure: Exception) -> str:
    """What stands in a row instead of a time: a refusal (a limit, an argument), or any other failure of the kernel.

    A card whose context is lost, or whose memory is full, is not the kernel's to explain: that is raised again.
    """
    if isinstance(failure, torch.cuda.OutOfMemoryError | torch.AcceleratorError):
        raise failure
    kind = type(failure).__name__
    refusal = isinstance(failure, InputError | device.LimitError | device.DeviceError) or kind == "OutOfResources"
    message = " ".join(str(failure).split())[:160]
    return f"refused: {message}" if refusal else f"failed: {kind}: {message}"


@functools.cache
def provenance() -> dict[str, str]:
    """Card, driver, versions and date of a measurement made now, as Row's fields."""

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    return {
        "card": f"simulated {device.card().name}" if device.simulated() else device.card().name,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "numba": installed("numba"),
        "numba_cuda": installed("numba-cuda"),
        "date": date.today().isoformat(),
    }


def _driver() -> str:
    """The NVIDIA driver's version as its kernel module states it, or ''."""
    try:
        with open("/sys/module/nvidia/version") as file:
            return file.read().strip()
    except OSError:
        return ""
