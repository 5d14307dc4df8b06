"""Check, then time; roofline; recordings. Measuring always yields rows of one shape."""

from gpukern.measure.check import Verdict, check, found_error, poisoned
from gpukern.measure.layers import LayerBench, plan_rows, provenance, sweep_tiles, tile_row
from gpukern.measure.limits import Limit, tile_limits, waves
from gpukern.measure.recordings import (
    NotRecorded,
    recorded_plan,
    recorded_plan_steps,
    recorded_tile,
    recorded_tiles,
)
from gpukern.measure.rows import RECORDED, Row, frame, read, write
from gpukern.measure.timing import Timing, time

__all__ = [
    "RECORDED",
    "LayerBench",
    "Limit",
    "NotRecorded",
    "Row",
    "Timing",
    "Verdict",
    "check",
    "found_error",
    "frame",
    "plan_rows",
    "poisoned",
    "provenance",
    "read",
    "recorded_plan",
    "recorded_plan_steps",
    "recorded_tile",
    "recorded_tiles",
    "sweep_tiles",
    "tile_limits",
    "tile_row",
    "time",
    "waves",
    "write",
]
