"""Row: the one shape of everything measured, and how rows are kept.

A recording is a folder of `gpukern/recorded/`, named after the card. A sweep there is two files: `<sweep>.csv`, its
rows, and `<sweep>.json`, the runs they come from (card, driver, library versions, date), which the column `run` counts
from 0. Read back, a row's `source` is `recorded`.
"""

import csv
import functools
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

RECORDED = Path(__file__).parent.parent / "recorded"
TILE = ("BM", "BN", "BK", "splits", "programs", "warps", "stages", "threads")
_PROVENANCE = ("card", "driver", "torch", "triton", "numba", "numba_cuda", "date")


@dataclass(frozen=True)
class Row:
    """One measurement. Fields that do not apply are None (numbers) or "" (text).

    sweep     which sweep it belongs to: "tiles" or "plans"
    config    layer config; B, T, S its step; C, H, F its sizes
    plan      name of the plan, for rows of a plan
    part      the part or stage measured ("qkv", "scores+softmax+values"); "all" is the whole layer
    version   kernel version; BM..stages its tile
    M, N, K   the matrix product, where the part is one
    time_us   median microseconds of one run; low_us and high_us the 20 % and 80 % quantiles
    method    how it was timed
    bytes, flops  least bytes and FLOPs, derived, not counted
    share     of the roofline bound of the card, 0 to 1
    error     against the float64 reference, and tolerance, the largest that passes
    status    "ok", or why there is no time: "WRONG: ...", "refused: ...", "failed: ...", "flagged: ..."
    source    "measured", "counted" or "recorded"
    """

    sweep: str
    config: str
    part: str
    version: str
    dtype: str
    B: int
    T: int
    S: int
    C: int
    H: int
    F: int
    plan: str = ""
    M: int | None = None
    N: int | None = None
    K: int | None = None
    BM: int | None = None
    BN: int | None = None
    BK: int | None = None
    splits: int | None = None
    programs: int | None = None
    warps: int | None = None
    stages: int | None = None
    threads: int | None = None
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    method: str = ""
    bytes: int | None = None
    flops: int | None = None
    launches: int | None = None
    share: float | None = None
    error: float | None = None
    tolerance: float | None = None
    registers: int | None = None
    shared: int | None = None
    spills: int | None = None
    status: str = "ok"
    note: str = ""
    source: str = "measured"
    card: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    numba: str = ""
    numba_cuda: str = ""
    date: str = ""

    @property
    def tile(self) -> dict[str, int]:
        """The tile, without the sizes that the kernel does not have."""
        sizes = {name: getattr(self, name) for name in TILE}
        return {name: n for name, n in sizes.items() if n is not None}

    @property
    def phase(self) -> str:
        return "decode" if self.T == 1 and self.S > 1 else "prefill"

    @property
    def tflops(self) -> float | None:
        return None if self.time_us is None or self.flops is None else self.flops / self.time_us / 1e6

    @property
    def gbytes_per_s(self) -> float | None:
        return None if self.time_us is None or self.bytes is None else self.bytes / self.time_us / 1e3

    @property
    def provenance(self) -> str:
        """One line: where the numbers come from."""
        return f"{self.source} on {self.card}, {self.date}" if self.card else self.source


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a DataFrame, columns in the order of Row's fields."""
    return pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(Row)])


def write(folder: Path, sweep: str, rows: list[Row]) -> None:
    """Keep the rows of one sweep, each file whole or not at all. Columns that are empty in every row are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(dict.fromkeys(tuple(getattr(row, name) for name in _PROVENANCE) for row in rows))
    names = [f.name for f in fields(Row) if f.name not in (*_PROVENANCE, "source", "sweep")]
    table = []
    for row in rows:
        run = runs.index(tuple(getattr(row, name) for name in _PROVENANCE))
        table.append({name: _text(getattr(row, name)) for name in names} | {"run": run})
    names = ["run", *(name for name in names if any(line[name] for line in table))]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    _replace(folder / f"{sweep}.csv", text.getvalue())
    runs = [dict(zip(_PROVENANCE, run, strict=True)) for run in runs]
    _replace(folder / f"{sweep}.json", json.dumps({"runs": runs}, indent=1) + "\n")
    read.cache_clear()


def _text(value) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _replace(path: Path, text: str) -> None:
    """Write beside and rename, so that an interrupted recording leaves the old file."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.replace(path)


@functools.cache
def read(sweep: str) -> tuple[Row, ...]:
    """All recorded rows of a sweep, from every card there is a recording of."""
    types = {f.name: f.type for f in fields(Row)}
    rows = []
    for path in sorted(RECORDED.glob(f"*/{sweep}.csv")):
        runs = json.loads(path.with_suffix(".json").read_text())["runs"]
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                known = runs[int(line.pop("run"))]
                values = {name: _value(types[name], text) for name, text in line.items()}
                rows.append(Row(sweep=sweep, source="recorded", **values, **known))
    return tuple(rows)


def _value(kind, text: str):
    if kind is str:
        return text
    if text == "":
        return None
    return float(text) if "float" in str(kind) else int(text)
