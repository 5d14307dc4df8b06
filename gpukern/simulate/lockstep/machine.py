"""The machine: groups of threads at one program counter, run in lockstep, parted at branches and joined again.

There is no mask here. A *group* is the threads that stand at the same block, with their registers; running the block
runs all of them at once. A branch on which they disagree parts the group in two, a syncthreads parks it, and groups
that reach the same block are joined. As long as all threads agree there is one group, and nothing is parted or copied.
"""

import math

import numpy as np

from gpukern.simulate.lockstep import races
from gpukern.simulate.lockstep.barriers import Barriers
from gpukern.simulate.lockstep.group import Group, join
from gpukern.simulate.lockstep.memory import POISON, Space, per_thread, take
from gpukern.simulate.lockstep.spinning import PATIENCE, TURN, Spinning, Stopped
from gpukern.simulate.report import Access, Refused

# Threads that run at once. Enough to make NumPy's cost per call small, few enough to stay in the processor's cache.
IN_FLIGHT = 1 << 15
_SHARED_IN_FLIGHT = 1 << 25  # bytes
MOST_TRACED = 4096  # accesses kept for the figures
_MOST_STEPS = 2_000_000  # of blocks run by a group, after which a kernel is taken to hang


class Machine(Barriers, Spinning):
    """Runs a program for `blocks` consecutive blocks of the grid at a time, all their threads in flight together."""

    def __init__(self, code, grid, block, report, shared_bytes: int, whole_grid: bool, trace=None, checks=True):
        """code: a lower.Code. whole_grid: the kernel synchronises the grid, so all its blocks must be in flight.

        trace: the block whose accesses the report keeps. checks: count, and look for races?
        """
        self.code = code
        self.report = report
        self.lines = report.lines
        self.traced, self.checks = trace, checks
        self.ran = [[0, 0] for _ in code.blocks]  # for each block of code: warps, and threads, that ran it
        self.grid, self.block = grid, block
        self.block_size = math.prod(block)
        self.grid_size = math.prod(grid)
        if self.grid_size * self.block_size >= races.MOST_THREADS:
            threads = f"{self.grid_size * self.block_size:,} threads; the most are {races.MOST_THREADS - 1:,}"
            raise Refused(f"a grid of {threads} (fewer blocks, each with a loop, do the same)", code.name)
        self.most_blocks = self.grid_size if whole_grid else max(1, IN_FLIGHT // self.block_size)
        if shared_bytes and not whole_grid:
            self.most_blocks = min(self.most_blocks, max(1, _SHARED_IN_FLIGHT // shared_bytes))
        self.shared_limit = shared_bytes
        self.shared_bytes = -(-shared_bytes // 16) * 16
        self.live = code.live
        # For each thread, when it last published what it had done: to the grid, to its block.
        self.fenced = np.zeros((2, self.grid_size * self.block_size), np.int64) if code.fences else None
        self.clock = 1
        self.changes = self.tries = 0  # stores and atomics that changed memory, and atomics that did not
        self.polls = 0  # of the latter since the last change, those that may ask for a lock or a flag
        self.shadows, self.spaces = [], []
        self.shared, self.constants = Space("shared", np.empty(0, np.uint8)), {}
        self._lines, self._line_ids = [""], {}

    # --- one batch of blocks after the other ---

    def run(self, arguments: dict) -> None:
        """Run the whole grid. arguments: the registers that the kernel starts with."""
        with np.errstate(all="ignore"):
            for first in range(0, self.grid_size, self.most_blocks):
                self._start(first, min(self.most_blocks, self.grid_size - first))
                self.wait(0, Group(self, np.arange(self.threads), dict(arguments)))
                try:
                    self._run()
                except Stopped:
                    break
                for shadow in self.shadows:
                    shadow.settle(keep=shadow.space.kind == "global")
        if self.checks:
            self._sum_up()

    def _sum_up(self) -> None:
        """Count what is known only at the end."""
        for pc, (warps, threads) in enumerate(self.ran):
            if warps:
                self.count("steps", self.code.line_of_block[pc], warps)
                self.count("active_lanes", self.code.line_of_block[pc], threads)
                for line, n in self.code.flops[pc].items():
                    self.count("flops", line, n * threads)
        for space in self.spaces:
            first = self.code.line_of_block[0]
            self.count("global_load_unique_bytes", first, np.count_nonzero(space.loaded) * space.granule)
            if space.shadow is not None:
                stored = np.count_nonzero(space.shadow.writes) * space.granule
                self.count("global_store_unique_bytes", first, stored)

    def _start(self, first: int, blocks: int) -> None:
        self.blocks, self.threads = blocks, blocks * self.block_size
        self.first_thread = first * self.block_size
        self.trace_lanes = None
        if self.traced is not None and first <= self.traced < first + blocks:
            self.trace_lanes = np.array([0, self.block_size]) + (self.traced - first) * self.block_size
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
        self.spinning, self.stuck, self.seen, self.patience = {}, {}, {}, PATIENCE
        self.tick()
        self.block_sync = self.clock
        self.warp_sync = np.full(self.warp_of[-1] + 1, self.clock)
        self.grid_sync = self.clock if first == 0 else self.grid_sync
        if self.shared_bytes:
            size = blocks * self.shared_bytes
            if len(self.shared.data) != size:
                self.shadows = [s for s in self.shadows if s.space is not self.shared]
                self.shared = Space("shared", np.empty(size, np.uint8), self.code.granule(self.code.shared_granule))
                if self.checks:
                    self.shared.shadow = races.Shadow(self, self.shared)
                    self.shadows.append(self.shared.shadow)
            self.shared.data[:] = POISON
            if self.checks:
                self.shared.shadow.restart()
        self.local = {}

    def _coordinates(self, thread: np.ndarray, block: np.ndarray) -> dict:
        """The special registers. A coordinate that is the same for all threads is kept once."""
        found = {"lane": self.lane_of.astype(np.int32), "thread": thread, "lanes": np.arange(self.threads)}
        for prefix, number, size in (("t", thread, self.block), ("b", block, self.grid)):
            for axis, n in zip("xyz", size, strict=True):
                one_only = n == 1 or (prefix == "b" and self.blocks == 1)
                found[prefix + axis] = (number % n).astype(np.int32)[0 if one_only else slice(None)]
                number = number // n
        for prefix, size in (("bd", self.block), ("gd", self.grid)):
            found |= {prefix + axis: np.int32(n) for axis, n in zip("xyz", size, strict=True)}
        return found

    # --- the schedule ---

    def wait(self, pc: int, group: Group) -> None:
        self.waiting.setdefault(pc, []).append(group)
        self.spinning.pop(pc, None)  # who was there alone is not alone now
        self.stuck.pop(pc, None)

    def _run(self) -> None:
        """Always run the threads with the least program counter, until all have left.

        Those that spin (on a lock, a flag) come after the others, and only if others have changed memory.
        """
        blocks, steps = self.code.blocks, 0
        while self.waiting or self.parked:
            ready = self.ready()
            if not ready:
                self.no_thread_can_go_on()
                continue
            pc, others = ready[0], ready[1] if len(ready) > 1 else math.inf
            try:
                group = join(self.waiting.pop(pc))
            except TypeError as error:
                raise Refused(str(error), self.code.line_of_block[pc]) from None
            if self.spinning and pc in self.code.meets:
                behind = self.behind(group)
                if behind.any() and not behind.all():
                    self.waiting[pc] = [group.part(np.flatnonzero(behind))]
                    group = group.part(np.flatnonzero(~behind))
            size, turn_ends = len(self.waiting), steps + TURN
            changes, last_try = self.changes, self.tries + self.patience
            try:
                while True:
                    if self.checks:
                        ran = self.ran[pc]
                        ran[0] += group.warps.count
                        ran[1] += group.n
                    pc = blocks[pc](group)
                    steps += 1
                    if pc is None or pc >= others or len(self.waiting) != size or steps == turn_ends:
                        break
                    if self.tries >= last_try and self.changes == changes or self.spinning and pc in self.code.meets:
                        break
            except (Refused, MemoryError):
                raise
            except Exception as error:  # of NumPy, mostly: nothing that its user should have to understand
                raise Refused(f"what stands here ({error})", self.code.line_of_block[pc]) from error
            if pc is None:
                continue
            if steps > _MOST_STEPS:
                self.hang(
                    pc,
                    f"within {_MOST_STEPS:,} steps; it is still at",
                    "Look at what ends the loop there. If it is only long, give it less to do: each trip is a step.",
                )
            self.wait(pc, group)
            in_vain = self.tries >= last_try and self.changes == changes
            if in_vain or steps >= turn_ends:
                self.look_for_spinning(pc, group, in_vain)
            if steps >= turn_ends:  # a long way: those that spin need not wait for its end
                self.spinning = {at: since for at, since in self.spinning.items() if since == self.changes}

    def count(self, name: str, line: str, n: int) -> None:
        """Count n more of `name` for a line of the source."""
        self.lines[name, line] += n

    def keep_access(self, group: Group, view, index: tuple, element, doing: str, line: str) -> None:
        """Keep an access for the figures, if threads of the traced block take part."""
        a, b = np.searchsorted(group.lanes, self.trace_lanes)
        trace = self.report.trace
        if a == b or len(trace) == MOST_TRACED:
            return
        some = np.arange(a, b)

        def of_those(value) -> np.ndarray:
            return per_thread(value, group.n)[some].copy()

        shape = tuple(int(of_those(n)[0]) for n in view.shape)
        index = tuple(
            of_those(i if not isinstance(i, int) or i >= 0 else n + i) for i, n in zip(index, shape, strict=True)
        )
        address = of_those(element) * view.flat.itemsize
        if view.space.kind == "shared":
            address -= self.block_of[group.lanes[a]] * self.shared_bytes
        elif view.space.kind == "global":
            address += view.space.address
        threads = group.lanes[some] - self.trace_lanes[0]
        step, size = len(trace), view.flat.itemsize
        trace.append(Access(step, line, view.space.kind, doing, view.name, shape, size, threads, index, address))

    def tick(self) -> None:
        self.clock += 1
        if self.clock >= races.MOST_CLOCK:
            raise Refused("a kernel that passes more than 16 million barriers", self.code.name)

    # --- names, for messages ---

    def stamp(self, group: Group, line: str, clock: int):
        """The entries of a shadow's table for an access by `group`."""
        if line not in self._line_ids:
            self._line_ids[line] = min(len(self._lines), 255)
            self._lines.append(line)
        return group.global_threads | (clock << races._CLOCK | self._line_ids[line] << races._LINE)

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
