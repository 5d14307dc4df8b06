"""What one launch on the simulated GPU counted and found: counters, faults, and a trace of one block to draw."""

import linecache
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gpukern import device

if TYPE_CHECKING:
    import pandas

# The kinds a Fault can have. A warning does not stop a launch; every other kind does.
KINDS = (
    "limit",  # the card does not take this launch: block, grid, shared memory or registers
    "out_of_bounds",
    "negative_index",
    "misaligned",
    "uninitialised",
    "input_written",
    "race",
    "divergent_barrier",
    "divergent_warp",
    "hang",
)
WARNINGS = ("same_value_race",)

# Requests, sectors, wavefronts and conflicts are counted as Nsight Compute counts them (GUIDE.md says each).
COUNTERS = (
    "global_load_requests",
    "global_load_sectors",
    "global_load_unique_bytes",
    "global_store_requests",
    "global_store_sectors",
    "global_store_unique_bytes",
    "shared_load_requests",
    "shared_load_wavefronts",
    "shared_load_bank_conflicts",
    "shared_store_requests",
    "shared_store_wavefronts",
    "shared_store_bank_conflicts",
    "atomics",
    "barriers",
    "branches",
    "divergent_branches",
    "steps",
    "active_lanes",
    "flops",
)
SECTOR = 32  # bytes


class Refused(NotImplementedError):
    """The simulated GPU cannot run this construct: the message names it, its line, and what to do."""

    def __init__(self, construct: str, line: str, language: str = "numba"):
        other = (
            "NUMBA_ENABLE_CUDASIM=1: Numba's own simulator"
            if language == "numba"
            else "TRITON_INTERPRET=1: Triton's own interpreter"
        )
        super().__init__(
            f"{line}: the simulated GPU cannot run {construct}. Write it in another way, run the kernel on a card, or, "
            f"in a program without gpukern, under {other}, which checks less."
        )


class FaultError(RuntimeError):
    """A launch found faults; `.report` holds them all."""

    def __init__(self, report: "Report"):
        super().__init__("\n".join(f"{fault.kind}: {fault.message}" for fault in report.errors))
        self.report = report


@dataclass
class Fault:
    """One fault, told once for its line and array however many threads have it.

    kind     one of KINDS or WARNINGS
    message  what is wrong, and what to do
    line     "file.py:12", where the access or the barrier stands
    threads  the first threads (or programs) that have it, in words: "thread 3 of block 0", "program 7"
    array    name of the array in the kernel, or None
    index    the index of the first thread, or None
    count    how many times it happened
    """

    kind: str
    message: str
    line: str
    threads: list = field(default_factory=list)
    array: str | None = None
    index: tuple | None = None
    count: int = 1


@dataclass
class Access:
    """One access to memory by the traced block (or program), all its threads together: what figures draw.

    step      place in time: accesses of one step are one instruction of the source
    line      "file.py:12"
    space     "global", "shared" or "local"; doing: "load", "store" or "atomic"
    array     its name in the kernel; shape: its shape there; itemsize: bytes of an element
    threads   [n] who takes part: the thread's number in its block (in Triton: the lane of the tile, flattened)
    index     one [n] array for each axis of the array: what each thread accesses
    address   [n] bytes: in global memory from the start of the allocation, in shared memory from the block's start
    """

    step: int
    line: str
    space: str
    doing: str
    array: str
    shape: tuple
    itemsize: int
    threads: np.ndarray
    index: tuple
    address: np.ndarray


@dataclass
class Report:
    """What one launch counted and found.

    kernel     its name; language: "numba" or "triton"
    card       the device.Card whose rules were kept
    grid       blocks (programs) in x, y, z; block: threads in x, y, z (Triton: 32 a warp)
    shared     bytes of shared memory a block, as launched (Triton: None, until `compiled` is asked)
    lines      {(name of COUNTERS, "file.py:12"): number}: the counters, for each line of the source
    faults     list of Fault, warnings too; empty for a correct kernel
    trace      list of Access of one block, in order
    """

    kernel: str = ""
    language: str = "numba"
    card: device.Card | None = None
    grid: tuple = (1, 1, 1)
    block: tuple = (1, 1, 1)
    shared: int | None = 0
    lines: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)
    trace: list = field(default_factory=list)
    config: str | None = None  # what @triton.autotune took, in its words
    first_line: str = ""  # "file.py:12", where the kernel begins
    files: dict = field(default_factory=dict, repr=False)  # "file.py" -> where it lies, to show its lines
    compile: Callable | None = field(default=None, repr=False)  # () -> inspect.Compiled of the same kernel and types
    _known: dict = field(default_factory=dict, repr=False)

    @property
    def counters(self) -> dict:
        """{name of COUNTERS: number} of the whole launch."""
        total = dict.fromkeys(COUNTERS, 0)
        for (name, _), n in self.lines.items():
            total[name] += int(n)
        return total

    @property
    def errors(self) -> list:
        """The faults that are not warnings."""
        return [fault for fault in self.faults if fault.kind not in WARNINGS]

    @property
    def derived(self) -> dict:
        """What follows from the counters; None where nothing was counted to divide by.

        sectors_per_load_request, sectors_per_store_request   4 for 32 neighbouring floats, 32 at the worst
        bytes_moved          of all global sectors; least_bytes: of the distinct bytes loaded and stored
        bytes_over_least     bytes_moved / least_bytes: 1 is perfect reuse and coalescing. Caches are not simulated
        flops_per_byte       arithmetic intensity: floating-point operations over bytes_moved
        lanes_per_step       active lanes of a warp, of 32, averaged over the blocks of code that warps ran
        """
        n = self.counters
        moved = SECTOR * (n["global_load_sectors"] + n["global_store_sectors"])
        least = n["global_load_unique_bytes"] + n["global_store_unique_bytes"]
        return {
            "sectors_per_load_request": _ratio(n["global_load_sectors"], n["global_load_requests"]),
            "sectors_per_store_request": _ratio(n["global_store_sectors"], n["global_store_requests"]),
            "bytes_moved": moved,
            "least_bytes": least,
            "bytes_over_least": _ratio(moved, least),
            "flops_per_byte": _ratio(n["flops"], moved),
            "lanes_per_step": _ratio(n["active_lanes"], n["steps"]),
        }

    @property
    def compiled(self):
        """The kernel compiled for the card (inspect.Compiled): registers, shared memory, spills, PTX. Takes a moment.

        Raises inspect.CompileError if the compiler refuses it.
        """
        if self.compile is None:
            raise device.DeviceError("this launch was refused before it ran, so there is no kernel to compile for it.")
        return self.compile()

    @property
    def occupancy(self):
        """Theoretical occupancy of an SM (inspect.Occupancy), from threads, shared memory and compiled registers."""
        from gpukern import inspect

        made = self.compiled
        shared = max(self.shared or 0, made.shared or 0)
        return inspect.occupancy(math.prod(self.block), made.registers, shared, self.card.name)

    @property
    def waves(self) -> float:
        """How many times the grid fills all SMs of the card: blocks / (SMs x blocks that fit on one)."""
        return math.prod(self.grid) / (self.card.sms * self.occupancy.blocks)

    def add(self, kind: str, message: str, line: str, threads=(), array=None, index=None, count: int = 1) -> None:
        """Record a fault; a second one of the same kind, line and array only raises the count of the first."""
        fault = self._known.get((kind, line, array))
        if fault is None:
            fault = Fault(kind, message, line, list(threads), array, index, count)
            self._known[kind, line, array] = fault
            self.faults.append(fault)
        else:
            fault.count += count

    def finish(self) -> "Report":
        """Drop warnings of a place that has a race as well: the race says more."""
        races = {(fault.line, fault.array) for fault in self.faults if fault.kind == "race"}
        self.faults = [f for f in self.faults if f.kind not in WARNINGS or (f.line, f.array) not in races]
        return self

    def frame(self) -> "pandas.DataFrame":
        """One row for each line of the source that counted anything, one column a counter, the source beside it."""
        import pandas

        where = sorted({line for _, line in self.lines}, key=_line_key)
        columns = {name: [int(self.lines.get((name, line), 0)) for line in where] for name in COUNTERS}
        used = {name: column for name, column in columns.items() if any(column)}
        return pandas.DataFrame({"source": [self.source(line) for line in where], **used}, index=where)

    def faults_frame(self) -> "pandas.DataFrame":
        """One row for each fault."""
        import pandas

        return pandas.DataFrame([asdict(fault) for fault in self.faults], columns=list(Fault.__dataclass_fields__))

    def source(self, line: str) -> str:
        """The text of "file.py:12", or "" where it cannot be read."""
        file, _, number = line.rpartition(":")
        return linecache.getline(self.files.get(file, ""), int(number)).strip() if number.isdigit() else ""

    def figure(self, kind: str = "lanes", **options):
        """A matplotlib Figure of the traced block: "lanes", "access", "sectors" or "banks" (see figures.access)."""
        from gpukern.figures import access

        return access.draw(kind, self.trace, **options)

    def __repr__(self):
        what = f"{self.kernel}[{_size(self.grid)}" + (f", {_size(self.block)}]" if self.language == "numba" else "]")
        on = f" on the simulated {self.card.name}" if self.card else ""
        rows = [f"  {name:28} {n:>14,}" for name, n in self.counters.items() if n]
        derived = {name: n for name, n in self.derived.items() if n is not None}
        rows += [f"  {name:28} {n:>14{',' if isinstance(n, int) else '.4g'}}" for name, n in derived.items()]
        rows += [f"  {fault.kind}: {fault.message}" for fault in self.faults] or ["  no faults"]
        return "\n".join([f"{what}{on}", *rows])


# The report of the last launch of this process, normal or by `simulate.run`; `simulate.last()` gives it.
_last: Report | None = None


def keep(report: Report) -> None:
    """Make `report` the last one."""
    global _last
    _last = report


def last() -> Report:
    """The report of the last launch of this process, in either language. Raises DeviceError before the first."""
    if _last is None:
        raise device.DeviceError("nothing was launched on the simulated GPU yet.")
    return _last


def _ratio(a: int, b: int) -> float | None:
    return a / b if b else None


def _size(xyz: tuple) -> str:
    used = max((axis + 1 for axis in range(len(xyz)) if xyz[axis] > 1), default=1)
    return str(xyz[0]) if used == 1 else f"({', '.join(map(str, xyz[:used]))})"


def _line_key(line: str) -> tuple:
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdigit() else 0
