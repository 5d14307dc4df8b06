"""A group: the threads that stand at one block, with their registers; parted at branches, joined where they meet."""

import numpy as np

from gpukern.simulate.lockstep import races
from gpukern.simulate.lockstep.access import Access
from gpukern.simulate.lockstep.coalescing import Warps
from gpukern.simulate.lockstep.memory import merge, take
from gpukern.simulate.lockstep.vectors import VectorAccess
from gpukern.simulate.lockstep.warp import WarpFunctions


class Group(Access, VectorAccess, WarpFunctions):
    """Threads at one program counter. lanes: their numbers in the machine, ascending. r: their registers."""

    def __init__(self, machine, lanes: np.ndarray, registers: dict):
        self.machine = machine
        self.lanes = lanes
        self.n = len(lanes)
        self.r = registers
        self._warps = self._global = None
        self._special = {}

    @property
    def warps(self) -> Warps:
        if self._warps is None:
            m = self.machine
            self._warps = Warps(m.warp_of.take(self.lanes), m.lane_of.take(self.lanes))
        return self._warps

    @property
    def global_threads(self) -> np.ndarray:
        """The threads' numbers in the whole grid, blocks one after the other."""
        if self._global is None:
            self._global = self.lanes + self.machine.first_thread
        return self._global

    @property
    def since_block(self):
        """The clock at the last barrier of each thread's block (one number if the same for all)."""
        since = self.machine.block_sync
        return since[self.machine.block_of[self.lanes]] if type(since) is np.ndarray else since

    def since(self, common: np.ndarray, which: np.ndarray) -> np.ndarray:
        """The clock when the threads `which` last met all those they have `common` with them: warp, block or grid."""
        m, lanes = self.machine, self.lanes[which]
        block = m.block_sync[m.block_of[lanes]] if type(m.block_sync) is np.ndarray else m.block_sync
        warp = np.maximum(block, m.warp_sync[m.warp_of[lanes]])
        return np.where(common == races.GRID, m.grid_sync, np.where(common == races.BLOCK, block, warp))

    def special(self, name: str):
        """A special register: tx, ty, tz, bx, by, bz, lane (one for each thread), or a dimension of block or grid."""
        if name not in self._special:
            self._special[name] = take(self.machine.specials[name], self.lanes)
        return self._special[name]

    def part(self, which: np.ndarray, keep=None) -> "Group":
        """The threads at the places `which`, with the registers named in `keep` (all, if None)."""
        names = self.r if keep is None else keep
        return Group(self.machine, self.lanes[which], {k: take(self.r[k], which) for k in names if k in self.r})

    # --- how a block ends; each returns the next program counter, or None when the group is no more ---

    def branch(self, condition, yes: int, no: int, line: str):
        """All the same way, or parted in two."""
        m = self.machine
        if m.checks:
            m.count("branches", line, self.warps.count)
        if condition.ndim == 0:
            return yes if condition else no
        agree = np.count_nonzero(condition)
        if agree == self.n:
            return yes
        if agree == 0:
            return no
        if m.checks:
            taken = np.add.reduceat(condition, self.warps.starts, dtype=np.int64)
            m.count("divergent_branches", line, np.count_nonzero((taken > 0) & (taken < self.warps.sizes)))
        m.wait(yes, self.part(np.flatnonzero(condition), m.live[yes]))
        m.wait(no, self.part(np.flatnonzero(~condition), m.live[no]))
        return None

    def barrier(self, pc: int, kind: str, line: str, predicate=None, result: str | None = None):
        """Wait for the block (or, kind "grid", for all blocks)."""
        m = self.machine
        if m.checks:
            m.count("barriers", line, self.warps.count)
        m.parked.append((pc, kind, line, self, predicate, result))
        return m.release_all() if self.n == m.threads else None

    def exit(self):
        self.machine.alive -= np.bincount(self.machine.block_of[self.lanes], minlength=self.machine.blocks)
        return None


def join(groups: list[Group]) -> Group:
    """One group of the threads of several that stand at the same block."""
    if len(groups) == 1:
        return groups[0]
    lanes = np.concatenate([g.lanes for g in groups])
    order = np.argsort(lanes)
    sizes = [g.n for g in groups]
    registers = {}
    for name in set().union(*(g.r for g in groups)):
        # A register that some have not set is one they will not read: any value will do.
        have = next(g.r[name] for g in groups if name in g.r)
        spare = take(have, np.zeros(1, np.int64))
        values = [g.r.get(name) if name in g.r else _alike(spare, g.n) for g in groups]
        registers[name] = merge(values, sizes, order)
    return Group(groups[0].machine, lanes[order], registers)


def _alike(value, n: int):
    """The first thread's value, for n threads."""
    return take(value, np.zeros(n, np.int64))
