"""The declared sweeps, and how `gpukern record` measures them on a card and keeps their rows.

Each sweep is a list of jobs; a job is one layer at one step with the parts (tiles) or the plans to measure there. First
worker processes compile every kernel into Triton's cache, because the compiler takes far longer than the measurement;
then one process measures alone.
"""

import contextlib
import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpukern import device, measure
from gpukern.layer import MATRIX_STAGES, PLANS, Layer, Part, Step, text
from gpukern.op import InputError

ATTENTION = ("scores", "softmax", "values")


@dataclass(frozen=True)
class Job:
    """One layer (by config and dtype) at one step, with the parts or plans to measure there."""

    config: str
    dtype: torch.dtype
    step: Step
    parts: tuple[Part, ...] = ()
    plans: tuple[str, ...] = ()

    def layer(self) -> Layer:
        if self.config == "trained":
            return text.trained_layer(dtype=self.dtype)
        return Layer.random(self.config, self.dtype)

    def __str__(self) -> str:
        s = self.step
        return f"{self.config} {self.step.phase} B={s.B} T={s.T} S={s.S} {str(self.dtype).removeprefix('torch.')}"


def _grid(**sizes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


# A tile of 16 rows is for decode, where the product has one row; larger ones are for prefill.
_PREFILL_TILES = _grid(BM=(32, 64, 128, 256), BN=(32, 64, 128, 256), BK=(32, 64, 128), warps=(4, 8), stages=(2, 3, 4))
_DECODE_TILES = _grid(BM=(16,), BN=(16, 32, 64, 128), BK=(64, 128, 256), warps=(4, 8), stages=(2, 4))
_ATTENTION_TILES = _grid(BM=(32, 64, 128), BN=(32, 64, 128), warps=(4, 8), stages=(1, 2, 3, 4))
_NUMBA_TILES = _grid(BM=(8, 16, 32), BN=(8, 16, 32), BK=(8, 16, 32))

_TILE_STEPS = {"gpt2": (Step(1, 1024, 1024), Step(1, 1, 1024)), "c4096": (Step(1, 2048, 2048), Step(1, 1, 2048))}


def tile_jobs() -> Iterator[Job]:
    """BM x BN x BK x warps x stages for every matrix stage, BM x BN x warps x stages for attention; PyTorch beside."""
    for config, steps in _TILE_STEPS.items():
        for step in steps:
            tiles = _PREFILL_TILES if step.phase == "prefill" else _DECODE_TILES
            for stage in MATRIX_STAGES:
                parts = [Part((stage,), "torch"), *(Part((stage,), "triton", tile) for tile in tiles)]
                if config == "gpt2" and step.phase == "prefill":
                    parts += [Part((stage,), "numba", tile) for tile in _NUMBA_TILES]
                yield Job(config, torch.bfloat16, step, tuple(parts))
            if step.phase == "prefill":
                parts = [Part(ATTENTION, "torch"), *(Part(ATTENTION, "triton_flash", t) for t in _ATTENTION_TILES)]
                yield Job(config, torch.bfloat16, step, tuple(parts))


def plan_jobs() -> Iterator[Job]:
    """Every plan over T, S and B: in bfloat16 at the sizes that people run, in float32 at those a CPU simulates."""
    everything = tuple(PLANS)
    prefill = [Step(B, T, T) for B, T in ((1, 512), (1, 2048), (1, 16), (1, 128), (1, 1024), (8, 128))]
    decode = [Step(B, 1, S) for B, S in ((1, 2048), (1, 128), (1, 512), (1, 8192), (8, 2048))]
    for config in ("gpt2", "c4096"):
        for step in (*prefill, *decode):
            yield Job(config, torch.bfloat16, step, plans=everything)
    for config in ("tiny", "trained"):
        for step in (Step(1, 16, 16), Step(1, 1, 128), Step(1, 128, 128), Step(1, 1, 16)):
            yield Job(config, torch.float32, step, plans=everything)


SWEEPS: dict[str, Callable[[], Iterator[Job]]] = {"tiles": tile_jobs, "plans": plan_jobs}


def record(sweep: str, say: Callable[[str], None], only: str = "") -> list[measure.Row]:
    """Measure a sweep on this machine's card and keep its rows in `gpukern/recorded/<card>/`.

    only  a part of a job's name ("gpt2 decode"): measure just those, and replace just their rows; the others keep the
          run that they came from
    The rows are written after every job, so what an interrupted recording has measured is kept.
    Raises DeviceError without a card.
    """
    if device.simulated():
        raise device.DeviceError("recording needs a CUDA card: a time is never invented. This machine has none.")
    if sweep not in SWEEPS:
        raise InputError(f"unknown sweep {sweep!r}; known are {', '.join(SWEEPS)}.")
    jobs = [job for job in SWEEPS[sweep]() if only in str(job)]
    if not jobs:
        raise InputError(f"no job of sweep {sweep!r} has {only!r} in its name; one is {next(SWEEPS[sweep]())!s}.")
    say(f"{len(jobs)} jobs; compiling in {_workers()} processes")
    _compile(sweep, only)
    folder = measure.RECORDED / re.sub(r"[^a-z0-9]+", "-", device.card().name.lower())
    done = {_key(job.config, job.step, job.dtype, job.parts) for job in jobs}
    rows = [row for row in measure.read(sweep) if row.card == device.card().name and _of(row) not in done]
    for number, job in enumerate(jobs, 1):
        new = list(_measure(job))
        rows += new
        measure.write(folder, sweep, rows)
        fine = sum(row.status == "ok" for row in new)
        say(f"{number}/{len(jobs)} {job}: {fine} of {len(new)} rows have a time")
    return rows


def _key(config, step, dtype, parts) -> tuple:
    return config, step.B, step.T, step.S, str(dtype).removeprefix("torch."), parts[0].name if parts else ""


def _of(row: measure.Row) -> tuple:
    return row.config, row.B, row.T, row.S, row.dtype, "" if row.plan else row.part


def _measure(job: Job) -> Iterator[measure.Row]:
    layer = job.layer()
    yield from measure.sweep_tiles(layer, job.parts, job.step)
    for name in job.plans:
        yield from measure.plan_rows(layer, PLANS[name], job.step)


def _workers() -> int:
    return max(1, min(14, (os.cpu_count() or 2) - 2))


def _compile(sweep: str, only: str) -> None:
    """Run every kernel of the sweep once in worker processes; what they compile stays in the compilers' caches."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_compile_share, args=(sweep, only, i, _workers())) for i in range(_workers())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _compile_share(sweep: str, only: str, mine: int, workers: int) -> None:
    work = 0
    for job in SWEEPS[sweep]():
        if only not in str(job):
            continue
        bench = None
        for pieces in [(part,) for part in job.parts] + [PLANS[name].at(job.step).parts for name in job.plans]:
            work += 1
            if work % workers != mine:
                continue
            bench = bench or measure.LayerBench(job.layer(), job.step)
            with contextlib.suppress(Exception):  # the measuring process will meet it again and write it down
                bench.run_once(pieces)
