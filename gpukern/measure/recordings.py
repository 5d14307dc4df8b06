"""Recorded rows by what was asked: never interpolated; what was not recorded says so and offers the nearest."""

import math

import torch

from gpukern import device
from gpukern.measure.rows import Row, read
from gpukern.op import InputError


class NotRecorded(LookupError):
    """Nobody has recorded that point. `nearest` is the closest Row that there is, or None."""

    def __init__(self, asked: str, nearest: Row | None, place: str):
        offer = f"the nearest is {place}" if nearest else "nothing like it was recorded"
        super().__init__(f"{asked} was not recorded; {offer}.")
        self.message, self.nearest = str(self), nearest


def _rows(sweep: str) -> list[Row]:
    """The rows of one card: of this machine's (simulated) card if it was recorded, else of the first that was."""
    rows = read(sweep)
    cards = [row.card for row in rows]
    card = device.card().name if device.card().name in cards else next(iter(cards), "")
    return [row for row in rows if row.card == card]


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _at(step) -> str:
    return f"B={step.B} T={step.T} S={step.S}"


def _distance(row: Row, step) -> float:
    return sum(abs(math.log2(getattr(row, axis) / getattr(step, axis))) for axis in "BTS")


def recorded_plan(config: str, plan: str, step, dtype) -> list[Row]:
    """The recorded rows of a plan at a step: its parts in order, then part="all". Raises NotRecorded."""
    rows = [r for r in _rows("plans") if (r.config, r.plan, r.dtype) == (config, plan, _name(dtype))]
    found = [r for r in rows if (r.B, r.T, r.S) == (step.B, step.T, step.S)]
    if found:
        return found
    same_phase = [r for r in rows if r.part == "all" and r.phase == step.phase]
    nearest = min(same_phase, key=lambda r: _distance(r, step), default=None)
    raise NotRecorded(
        f"plan {plan}, config {config}, {_name(dtype)}, {_at(step)}", nearest, nearest and f"{_at(nearest)}"
    )


def recorded_plan_steps(config: str, phase: str, dtype="bfloat16") -> list[tuple[int, int, int]]:
    """(B, T, S) of every step that some plan was recorded at, smallest first."""
    rows = [r for r in _rows("plans") if (r.config, r.phase, r.dtype, r.part) == (config, phase, _name(dtype), "all")]
    return sorted({(r.B, r.T, r.S) for r in rows})


def recorded_tiles(config: str, part: str, step=None, dtype="bfloat16") -> list[Row]:
    """The whole recorded tile sweep of a part at `step` (every step if None), refused tiles included."""
    rows = [r for r in _rows("tiles") if (r.config, r.part, r.dtype) == (config, part, _name(dtype))]
    return [r for r in rows if step is None or (r.B, r.T, r.S) == (step.B, step.T, step.S)]


def recorded_tile(config: str, part: str, step, dtype, version: str, tile: dict) -> Row:
    """The recorded row of one tile. Raises NotRecorded with the nearest tile of the same sweep."""
    rows = [r for r in recorded_tiles(config, part, step, dtype) if r.version == version]
    for row in rows:
        if row.tile == tile:
            return row

    def distance(row):
        return sum(abs(math.log2(row.tile[name] / n)) if name in row.tile else 9 for name, n in tile.items())

    for name, n in tile.items():
        if not isinstance(n, int) or n < 1:
            raise InputError(f"{name}={n!r} must be a whole number from 1.")
    nearest = min((r for r in rows if r.status == "ok"), key=distance, default=None)
    asked = " ".join(f"{name}={n}" for name, n in tile.items())
    place = nearest and " ".join(f"{name}={n}" for name, n in nearest.tile.items())
    raise NotRecorded(f"{part} of {config}, {_name(dtype)}, {_at(step)}, tile {asked}", nearest, place)
