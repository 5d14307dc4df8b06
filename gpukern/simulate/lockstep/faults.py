"""What a run finds: faults, each with its line, its threads and what to do; and the report that holds them."""

from collections import Counter
from dataclasses import dataclass, field

# The kinds a Fault can have. A warning does not stop a launch; every other kind does.
KINDS = ("out_of_bounds", "negative_index", "uninitialised", "race", "divergent_barrier", "divergent_warp", "hang")
WARNINGS = ("same_value_race",)

COUNTERS = (
    "global_load_requests",
    "global_load_sectors",
    "global_store_requests",
    "global_store_sectors",
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
)


class Refused(NotImplementedError):
    """The simulated GPU cannot run this construct: the message names it, its line, and what to do."""

    def __init__(self, construct: str, line: str):
        super().__init__(
            f"{line}: the simulated GPU cannot run {construct}. Write it in another way, run the kernel on a card, or, "
            "in a program without gpukern, under NUMBA_ENABLE_CUDASIM=1: Numba's own simulator, which checks less."
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
    threads  the first threads that have it, as ((thread x, y, z), (block x, y, z))
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


class Report:
    """What one launch counted and found.

    counters  {name of COUNTERS: number} of the whole launch
    lines     {(name, "file.py:12"): number}: the same for each source line
    faults    list of Fault, warnings too; empty for a correct kernel
    """

    def __init__(self):
        self.lines = Counter()
        self.faults = []
        self._known = {}

    @property
    def counters(self) -> dict:
        total = dict.fromkeys(COUNTERS, 0)
        for (name, _), n in self.lines.items():
            total[name] += int(n)
        return total

    @property
    def errors(self) -> list:
        """The faults that are not warnings."""
        return [fault for fault in self.faults if fault.kind not in WARNINGS]

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

    def __repr__(self):
        rows = [f"  {name:28} {n:>12,}" for name, n in self.counters.items() if n]
        rows += [f"  {fault.kind}: {fault.message}" for fault in self.faults] or ["  no faults"]
        return "\n".join(["Report", *rows])
