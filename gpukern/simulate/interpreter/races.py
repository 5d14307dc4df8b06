"""Data races: two programs at one place, one of them writing, not both atomic, and nothing that orders the two.

The simulated GPU runs one program after the other; on a card they run in any order, or at once. Beside each region lies
a shadow that remembers for each place the last write and the last read: which program, on which line, and when.

What orders programs are atomics on one element (a lock, a ticket, a flag): what a program did before an atomic with
release semantics is ordered before what another does after an atomic with acquire semantics on the same element, if
that one came later; and so on from program to program. Triton's atomics are both unless `sem` says otherwise.
"""

import numpy as np

from gpukern.simulate.interpreter import lines

# An entry, in 64 bits: when (24) | line (10) | atomic (1) | program + 1 (28). Zero: never.
_WHO, _ATOMIC, _LINE, _WHEN = (1 << 28) - 1, 28, 29, 39
MOST_LINES, _LATEST = 1 << 10, (1 << 24) - 1
_MOST_NOTES = 1 << 21  # places


class Order:
    """Which programs are ordered, by the atomics of a launch."""

    def __init__(self):
        self.log = []  # (program, address, acquires, releases), in the order of the simulation
        self._known = None, None

    @property
    def now(self) -> int:
        return min(len(self.log), _LATEST)

    def add(self, program: int, address: int, acquires: bool, releases: bool) -> None:
        if acquires or releases:
            self.log.append((program, address, acquires, releases))

    def before(self, program: int) -> dict:
        """{program: when}: what each program did until then is ordered before what `program` does now.

        Backwards through the log: a release counts if somebody who is ordered before `program` acquired it later.
        """
        key = program, len(self.log)
        if self._known[0] != key:
            known, wanted = {program: len(self.log)}, set()
            for when in range(len(self.log) - 1, -1, -1):
                who, address, acquires, releases = self.log[when]
                if releases and address in wanted:
                    known.setdefault(who, when)
                if acquires and who in known:
                    wanted.add(address)
            self._known = key, known
        return self._known[1]


class Shadow:
    """Who last wrote and last read each granule of a region.

    What the running program reads is only noted, and entered when it ends or waits: so the table of reads has those of
    others.
    """

    def __init__(self, launch, granules: int):
        self.launch = launch
        self.writes = np.zeros(granules, np.int64)
        self.reads = np.zeros(granules, np.int64)
        self.notes, self.noted = [], 0
        self.written = False

    def refine(self, times: int) -> None:
        self.settle()
        self.writes, self.reads = np.repeat(self.writes, times), np.repeat(self.reads, times)

    def read(self, places, tensor, atomic: bool) -> None:
        entry = self._entry(atomic)
        if self.written:
            self._check(self.writes, places, tensor, "loads", "stores to", atomic)
        self.notes.append((places, entry))
        self.noted += places.stop - places.start if type(places) is slice else len(places)
        if len(self.notes) == 1:
            self.launch.unsettled.append(self)
        if self.noted > _MOST_NOTES:
            self.settle()

    def write(self, places, tensor, same) -> None:
        """same: of granules, does the write leave them as they are?"""
        self._check(self.writes, places, tensor, "stores to", "stores to", False, same)
        self._check(self.reads, places, tensor, "stores to", "loads", False)
        self.writes[places] = self._entry(False)
        self.written = True

    def atomic(self, places, tensor) -> None:
        entry = self._entry(True)
        self._check(self.writes, places, tensor, "changes", "stores to", True)
        self._check(self.reads, places, tensor, "changes", "loads", True)
        self.writes[places] = entry
        self.reads[places] = entry
        self.written = True

    def settle(self) -> None:
        """The running program ends, or lets others run: enter what it read."""
        for places, entry in self.notes:
            self.reads[places] = entry
        self.notes, self.noted = [], 0

    def count_unique(self, granule: int) -> None:
        """Distinct bytes that were loaded and stored, by the line that did so last."""
        for table, name in ((self.reads, "global_load_unique_bytes"), (self.writes, "global_store_unique_bytes")):
            counts = np.bincount(table[table != 0] >> _LINE & MOST_LINES - 1)
            for line in np.flatnonzero(counts):
                self.launch.count_at(name, self.launch.lines[line], int(counts[line]) * granule)

    def report_own(self, tensor, where: np.ndarray, lost: np.ndarray, size: int) -> None:
        """Lanes of one store met at an element. lost: those whose value is not what the element has now."""
        launch = self.launch
        me, own = launch.who(), "give each lane its own element, or use tl.atomic_add."
        if lost.any():
            kind, values, element, n = "race", "different values", int(where[np.argmax(lost)]), int(lost.sum())
            advice = f"One of its lanes wins, and none is sure to: {own}"
        else:
            places, times = np.unique(where, return_counts=True)
            kind, values, element = "same_value_race", "the same value twice", int(places[np.argmax(times > 1)])
            n, advice = int((times - 1).sum()), f"If they were to count or to add, one is lost: {own}"
        index = launch.memory.index_of(tensor, element * size)
        what = f"{me} stores {values} to {tensor.name}[{index}] ({lines.where()}) in one tl.store. {advice}"
        launch.fault(kind, what, [me, me], tensor.name, (index,), n)

    def _entry(self, atomic: bool) -> int:
        launch = self.launch
        return launch.order.now << _WHEN | launch.line_number() << _LINE | int(atomic) << _ATOMIC | launch.number + 1

    def _check(self, table, places, tensor, doing: str, other: str, atomic: bool, same=None) -> None:
        """Report the places where another program's entry is not ordered before now."""
        entries = table[places]
        if not entries.any():
            return
        hit = (entries != 0) & (entries & _WHO != self.launch.number + 1)
        if atomic:
            hit &= entries >> _ATOMIC & 1 == 0
        if not hit.any():
            return
        if self.launch.order.log:
            before = self.launch.order.before(self.launch.number)
            for key in np.unique(entries[hit] & ~np.int64((MOST_LINES - 1) << _LINE)):
                when = before.get(int(key & _WHO) - 1)
                if when is not None and int(key >> _WHEN) <= when:
                    hit &= (entries & ~np.int64((MOST_LINES - 1) << _LINE)) != key
            if not hit.any():
                return
        self._report(entries, hit, places, tensor, doing, other, same is not None and same(hit))

    def _report(self, entries, hit, places, tensor, doing: str, other: str, same: bool) -> None:
        launch = self.launch
        first = int(np.argmax(hit))
        entry = int(entries[first])
        place = places.start + first if type(places) is slice else int(places[first])
        index = launch.memory.index_of(tensor, place * tensor.region.granule)
        me, you = launch.who(), launch.who((entry & _WHO) - 1)
        there = ":".join(map(str, launch.lines[entry >> _LINE & MOST_LINES - 1]))
        if entry >> _ATOMIC & 1:
            other = "changes atomically"
        what = f"{me} {doing} {tensor.name}[{index}] ({lines.where()}), which {you} {other} ({there})"
        if same:
            kind, advice = (
                "same_value_race",
                "Both store the same value, so the result stands; let one program store it.",
            )
        else:
            kind = "race"
            advice = "Programs run in any order: use tl.atomic_add, give each program its own place, or launch twice."
        launch.fault(kind, f"{what}. {advice}", [me, you], tensor.name, (index,), int(hit.sum()))
