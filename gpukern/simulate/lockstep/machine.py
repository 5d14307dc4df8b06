"""The machine: groups of threads at one program counter, run in lockstep, parted at branches and joined again.

There is no mask here. A *group* is the threads that stand at the same block, with their registers; running the block
runs all of them at once. A branch on which they disagree parts the group in two, a syncthreads parks it, and groups
that reach the same block are joined. As long as all threads agree there is one group, and nothing is parted or copied.
"""

import math

import numpy as np

from gpukern.simulate.lockstep import races
from gpukern.simulate.lockstep.coalescing import Warps
from gpukern.simulate.lockstep.faults import Refused
from gpukern.simulate.lockstep.memory import POISON, Space, merge, take
from gpukern.simulate.lockstep.access import Access
from gpukern.simulate.lockstep.warp import WarpFunctions

# Threads that run at once. Enough to make NumPy's cost per call small, few enough to stay in the processor's cache.
IN_FLIGHT = 1 << 15
_SHARED_IN_FLIGHT = 1 << 25  # bytes
# Blocks run in a row while other threads wait, before those get a turn (they may hold the lock that is waited for).
_PATIENCE = 4_000
_MOST_STEPS = 3_000_000


class Group(Access, WarpFunctions):
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
        m.count("branches", line, self.warps.count)
        if condition.ndim == 0:
            return yes if condition else no
        agree = np.count_nonzero(condition)
        if agree == self.n:
            return yes
        if agree == 0:
            return no
        taken = np.add.reduceat(condition, self.warps.starts, dtype=np.int64)
        m.count("divergent_branches", line, np.count_nonzero((taken > 0) & (taken < self.warps.sizes)))
        m.wait(yes, self.part(np.flatnonzero(condition), m.live[yes]))
        m.wait(no, self.part(np.flatnonzero(~condition), m.live[no]))
        return None

    def barrier(self, pc: int, kind: str, line: str, predicate=None, result: str | None = None):
        """Wait for the block (or, kind "grid", for all blocks)."""
        m = self.machine
        m.count("barriers", line, self.warps.count)
        m.parked.append((pc, kind, line, self, predicate, result))
        return m.release() if self.n == m.threads else None

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


class Machine:
    """Runs a program for `blocks` consecutive blocks of the grid at a time, all their threads in flight together."""

    def __init__(self, code, grid: tuple, block: tuple, report, shared_bytes: int, whole_grid: bool):
        """code: a lower.Code. whole_grid: the kernel synchronises the grid, so all its blocks must be in flight."""
        self.code = code
        self.report = report
        self.count = report_counter(report)
        self.grid, self.block = grid, block
        self.block_size = math.prod(block)
        self.grid_size = math.prod(grid)
        self.most_blocks = self.grid_size if whole_grid else max(1, IN_FLIGHT // self.block_size)
        if shared_bytes and not whole_grid:
            self.most_blocks = min(self.most_blocks, max(1, _SHARED_IN_FLIGHT // shared_bytes))
        self.shared_limit = shared_bytes
        self.shared_bytes = -(-shared_bytes // 16) * 16
        self.live = code.live
        self.fenced = np.zeros(self.grid_size * self.block_size, np.int64) if code.fences else None
        self.clock = 1
        self.shadows = []
        self.shared, self.constants = None, {}
        self._lines, self._line_ids = [""], {}
        if self.grid_size * self.block_size >= races.MOST_THREADS:
            raise Refused(f"a grid of {self.grid_size * self.block_size:,} threads", code.name)

    # --- one batch of blocks after the other ---

    def run(self, arguments: dict) -> None:
        """Run the whole grid. arguments: the registers that the kernel starts with."""
        with np.errstate(all="ignore"):
            for first in range(0, self.grid_size, self.most_blocks):
                self._start(first, min(self.most_blocks, self.grid_size - first))
                self.wait(0, Group(self, np.arange(self.threads), dict(arguments)))
                self._run()
                for shadow in self.shadows:
                    shadow.settle(keep=shadow.space.kind == "global")

    def _start(self, first: int, blocks: int) -> None:
        self.blocks, self.threads = blocks, blocks * self.block_size
        self.first_thread = first * self.block_size
        lanes = np.arange(self.threads)
        self.block_of = lanes // self.block_size
        thread = lanes % self.block_size
        self.lane_of = thread % 32
        self.warp_of = self.block_of * -(-self.block_size // 32) + thread // 32
        in_warp = np.minimum(self.block_size - thread // 32 * 32, 32)  # the last warp of a block may be short
        self.warp_size_of = (1 << in_warp) - 1  # the bits of the lanes that the thread's warp has
        self.specials = self._coordinates(thread, self.block_of + first)
        self.alive = np.full(blocks, self.block_size)
        self.waiting, self.parked = {}, []
        self.tick()
        self.block_sync = self.clock
        self.warp_sync = np.full(self.warp_of[-1] + 1, self.clock)
        self.grid_sync = self.clock if first == 0 else self.grid_sync
        if self.shared_bytes:
            size = blocks * self.shared_bytes
            if self.shared is None or len(self.shared.data) != size:
                self.shadows = [s for s in self.shadows if s.space is not self.shared]
                self.shared = Space("shared", np.empty(size, np.uint8), self.code.shared_granule)
                self.shared.shadow = races.Shadow(self, self.shared)
                self.shadows.append(self.shared.shadow)
            self.shared.data[:] = POISON
            self.shared.shadow.restart()
        self.local = {}

    def _coordinates(self, thread: np.ndarray, block: np.ndarray) -> dict:
        """The special registers. A coordinate that is the same for all threads is kept once."""
        found = {"lane": self.lane_of.astype(np.int32), "thread": thread, "lanes": np.arange(self.threads)}
        for prefix, number, size in (("t", thread, self.block), ("b", block, self.grid)):
            for axis, n in zip("xyz", size):
                one_only = n == 1 or (prefix == "b" and self.blocks == 1)
                found[prefix + axis] = (number % n).astype(np.int32)[0 if one_only else slice(None)]
                number = number // n
        for prefix, size in (("bd", self.block), ("gd", self.grid)):
            found |= {prefix + axis: np.int32(n) for axis, n in zip("xyz", size)}
        return found

    # --- the schedule ---

    def wait(self, pc: int, group: Group) -> None:
        self.waiting.setdefault(pc, []).append(group)

    def _run(self) -> None:
        """Always run the threads with the least program counter, until all have left."""
        blocks, steps, patience = self.code.blocks, 0, _PATIENCE
        while True:
            if not self.waiting:
                if not self.parked:
                    return
                self.release()
                continue
            pcs = sorted(self.waiting)
            pc = pcs[0]
            if patience <= 0:
                patience = _PATIENCE
                pc = pcs[-1]  # out of turn
            try:
                group = join(self.waiting.pop(pc))
            except TypeError as error:
                raise Refused(str(error), self.code.line_of_block[pc]) from None
            others = min(self.waiting, default=math.inf)
            size = len(self.waiting)
            while pc is not None:
                pc = blocks[pc](group)
                steps += 1
                patience -= 1
                if steps > _MOST_STEPS:
                    self._hang()
                if len(self.waiting) != size or (pc is not None and pc >= others) or patience <= 0:
                    break
            patience = patience if pc is not None and pc < others else _PATIENCE
            if pc is not None:
                self.wait(pc, group)
            elif not self.waiting and not self.parked:
                return

    def _hang(self) -> None:
        raise RuntimeError(
            f"{self.code.name}: the threads have run {_MOST_STEPS:,} steps and do not come to an end. Does a loop wait for "
            "something that no thread does, or does its condition never change?"
        )

    def release(self):
        """Let the parked threads go on whose block has arrived as a whole; returns their program counter if all have.

        If no thread can run and no block is complete, the barrier is divergent: a fault, after which all go on.
        """
        if len(self.parked) == 1 and self.parked[0][3].n == self.threads:
            pc, kind, line, group, predicate, result = self.parked.pop()
            self._met(None, kind)
            self._deliver(group, kind, predicate, result)
            return pc
        arrived = {}
        for pc, kind, _, group, _, _ in self.parked:
            here = np.bincount(self.block_of[group.lanes], minlength=self.blocks)
            arrived[pc, kind] = arrived.get((pc, kind), 0) + here
        ready = {}
        for (pc, kind), here in arrived.items():
            done = (here == self.alive) & (here > 0)
            ready[pc, kind] = done if kind != "grid" or (here == self.alive).all() else done & False
        complete = any(done.any() for done in ready.values())
        if not complete:
            self._divergent(arrived)
            ready = {key: here > 0 for key, here in arrived.items()}
        left_early = (self.alive < self.block_size) & (self.alive > 0)
        parked, self.parked, gone = self.parked, [], np.zeros(self.blocks, bool)
        merged = {}
        for pc, kind, line, group, predicate, result in parked:
            go = ready[pc, kind][self.block_of[group.lanes]]
            if complete and (go & left_early[self.block_of[group.lanes]]).any():
                self._left_early(group, np.flatnonzero(go & left_early[self.block_of[group.lanes]]), line)
            if predicate is not None:
                group.r["$predicate"] = predicate
            if go.any():
                merged.setdefault((pc, kind, result), []).append(group.part(np.flatnonzero(go)))
                gone |= ready[pc, kind]
            if not go.all():
                stays = group.part(np.flatnonzero(~go))
                self.parked.append((pc, kind, line, stays, stays.r.pop("$predicate", None), result))
        kinds = {kind for (_, kind, _) in merged}
        self._met(gone, "grid" if kinds == {"grid"} else "sync")
        for (pc, kind, result), groups in merged.items():
            group = join(groups)
            self._deliver(group, kind, group.r.pop("$predicate", None), result)
            self.wait(pc, group)
        return None

    def _met(self, blocks, kind: str) -> None:
        """The blocks (None: all) met at a barrier: what they did before it is ordered with what they do now."""
        every = blocks is None or blocks.all()
        for shadow in self.shadows:
            shadow.settle(keep=not every or shadow.space.kind == "global")
        self.tick()
        if every:
            self.block_sync = self.clock
        else:
            if type(self.block_sync) is not np.ndarray:
                self.block_sync = np.full(self.blocks, self.block_sync)
            self.block_sync[blocks] = self.clock
        if kind == "grid":
            self.grid_sync = self.clock

    def _deliver(self, group: Group, kind: str, predicate, result) -> None:
        """syncthreads_count, _and, _or: every thread gets the answer of its block."""
        if predicate is None:
            return
        block = self.block_of[group.lanes]
        true = np.bincount(block, weights=np.broadcast_to(predicate != 0, group.n), minlength=self.blocks)
        here = np.bincount(block, minlength=self.blocks)
        answer = {"count": true, "and": (true == here) & (here > 0), "or": true > 0}[kind]
        group.r[result] = answer.astype(np.int32)[block]

    def tick(self) -> None:
        self.clock += 1
        if self.clock >= races.MOST_CLOCK:
            raise Refused("a kernel that passes more than 16 million barriers", self.code.name)

    # --- names, for messages ---

    def stamp(self, group: Group, line: str):
        if line not in self._line_ids:
            self._line_ids[line] = min(len(self._lines), 255)
            self._lines.append(line)
        return group.global_threads | (self.clock << races._CLOCK | self._line_ids[line] << races._LINE)

    def line_of(self, number: int) -> str:
        return self._lines[number]

    def common(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """What threads a and b have in common at the least: races.SAME (they are one), WARP, BLOCK or GRID."""
        block_a, block_b = a // self.block_size, b // self.block_size
        same_warp = a % self.block_size // 32 == b % self.block_size // 32
        inside = np.where(a == b, races.SAME, np.where(same_warp, races.WARP, races.BLOCK))
        return np.where(block_a == block_b, inside, races.GRID)

    def who(self, thread: int) -> str:
        """A thread of the grid by its coordinates."""
        block, inside = divmod(thread, self.block_size)
        return f"thread {self._xyz(inside, self.block)} of block {self._xyz(block, self.grid)}"

    @staticmethod
    def _xyz(number: int, size: tuple):
        used = max((axis + 1 for axis in range(3) if size[axis] > 1), default=1)
        found = []
        for n in size[:used]:
            found.append(number % n)
            number //= n
        return found[0] if used == 1 else tuple(found)

    def name_of(self, space: Space, byte: int, view, place: int) -> tuple:
        """The array and index of a byte of a space, seen through the view with which it was accessed."""
        offset = int(take(view.offset, [place])[0]) if type(view.offset) is np.ndarray else int(view.offset)
        element, index = byte // view.flat.itemsize - offset, []
        strides = [int(take(s, [place])[0]) if type(s) is np.ndarray else int(s) for s in view.strides]
        for axis in sorted(range(len(strides)), key=lambda a: -abs(strides[a])):
            at, element = divmod(element, strides[axis]) if strides[axis] else (0, element)
            index.append((axis, at))
        return view.name, tuple(at for _, at in sorted(index))

    # --- barriers that are not met by all ---

    def _divergent(self, arrived: dict) -> None:
        where = {}
        for pc, kind, line, group, _, _ in self.parked:
            where.setdefault((pc, kind, line), []).append(self.who(int(group.global_threads[0])))
        places = [f"{names[0]} waits at {line}" for (_, _, line), names in where.items()]
        line = self.parked[0][2]
        threads = [names[0] for names in where.values()]
        if any(kind == "grid" for _, kind, _, _, _, _ in self.parked):
            advice = "Every thread of the grid must reach the same grid.sync()."
        else:
            advice = "Every thread of a block must reach the same syncthreads(): move it out of the branch or loop."
        self.report.add("divergent_barrier", f"{' while '.join(places)}. {advice}", line, threads)

    def _left_early(self, group: Group, which: np.ndarray, line: str) -> None:
        me = self.who(int(group.global_threads[which[0]]))
        self.report.add(
            "divergent_barrier",
            f"{me} waits at {line}, but other threads of its block have returned before it. Let every thread reach the "
            "barrier: guard the work, not the whole kernel, with the bounds check.",
            line,
            [me],
            count=len(which),
        )


def report_counter(report):
    """report.lines[name, line] += n, as cheaply as Python can."""
    lines = report.lines

    def count(name: str, line: str, n: int) -> None:
        lines[name, line] += n

    return count
