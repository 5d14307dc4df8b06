"""Loads, stores and atomics of a group of threads: checked, counted, held against the shadow, then done."""

import numpy as np

from gpukern.simulate.lockstep import atomics
from gpukern.simulate.lockstep.memory import POISON, Space, View, granule, per_thread, take


class Access:
    """What a Group does with memory."""

    def load(self, view: View, index: tuple, line: str):
        """view[index] for every thread."""
        element, wrong = view.locate(index)
        if wrong is not None:
            return self._only_inside(view, index, wrong, line, "reads", "load", view.flat.dtype)
        if self.machine.checks:
            self._note(view, index, element, "load", line)
        if view.space.shadow is not None:
            view.space.shadow.read(self, element, view, line)
        return view.flat.take(element) if type(element) is np.ndarray else view.flat[element]

    def store(self, view: View, index: tuple, value, line: str) -> None:
        """view[index] = value; where several threads write one element, one of them wins."""
        element, wrong = view.locate(index)
        if wrong is not None:
            self._only_inside(view, index, wrong, line, "writes", "store", None, value)
            return
        if self.machine.checks:
            self._note(view, index, element, "store", line)
        if view.space.shadow is not None:
            view.space.shadow.write(self, element, view, line, value)
        if type(element) is not np.ndarray and type(value) is np.ndarray:
            value = value[-1]
        self.machine.tell(True)
        view.flat[element] = value

    def atomic(self, name: str, view: View, index: tuple, value, line: str, expected=None, wanted: bool = True):
        """One atomic operation for each thread, one after the other. Returns the old values (if wanted)."""
        element, wrong = view.locate(index)
        if wrong is not None:
            dtype = view.flat.dtype
            return self._only_inside(view, index, wrong, line, "changes", "atomic", dtype, value, name, expected)
        reads = wanted or name != "exch"
        if self.machine.checks:
            self._note(view, index, element, "atomic" if reads else "exchange", line)
        if view.space.shadow is not None:
            view.space.shadow.write(self, element, view, line, atomic=True, reads=reads)
        element, value = per_thread(element, self.n), per_thread(value, self.n)
        if not wanted and name in atomics.UFUNCS:
            self.machine.tell(True)
            atomics.UFUNCS[name].at(view.flat, element, value)
            return None
        expected = None if expected is None else per_thread(expected, self.n)
        old, changed = atomics.atomic(name, view.flat, element, value, expected)
        self.machine.tell(changed, name)
        return old

    def fence(self, scope: str) -> None:
        """threadfence: what these threads wrote is there for all; threadfence_block: for their block."""
        self.machine.fenced[0 if scope == "grid" else 1 :, self.global_threads] = self.machine.clock
        self.machine.tick()

    def shared_array(self, offset: int, shape: tuple, dtype: type, name: str) -> View:
        """The block's own array, `offset` bytes into its shared memory. Size 0: as long as the launch says."""
        m, dtype = self.machine, np.dtype(dtype)
        if shape[0] == 0:
            shape = (max(0, m.shared_limit - offset) // dtype.itemsize,)
        first = offset // dtype.itemsize
        if m.blocks > 1:
            first = first + m.block_of.take(self.lanes) * (m.shared_bytes // dtype.itemsize)
        return self._array(m.shared, first, shape, dtype, name)

    def constant_array(self, values: np.ndarray) -> View:
        """An array of the module, as it was when the kernel was compiled."""
        m = self.machine
        if id(values) not in m.constants:
            data = np.ascontiguousarray(values)
            m.constants[id(values)] = Space("constant", data.reshape(-1).view(np.uint8)), data.shape
        space, shape = m.constants[id(values)]
        return self._array(space, 0, shape, values.dtype, "constant")

    def local_array(self, number: int, shape: tuple, dtype: type, name: str) -> View:
        """The thread's own array; `number` says which of the kernel's."""
        m, size, dtype = self.machine, int(np.prod(shape)), np.dtype(dtype)
        if number not in m.local:
            data = np.full(m.threads * size * dtype.itemsize, POISON, np.uint8)
            space = m.local[number] = Space("local", data, m.code.granule(granule(dtype)))
            space.ready = np.zeros(space.granules, bool) if m.checks else None
        return self._array(m.local[number], self.lanes * size, shape, dtype, name)

    @staticmethod
    def _array(space, offset, shape, dtype, name) -> View:
        shape = tuple(np.int64(n) for n in shape)
        strides = tuple(np.int64(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return View(
            space, space.flat(dtype), np.int64(offset) if np.ndim(offset) == 0 else offset, shape, strides, name
        )

    def _note(self, view: View, index: tuple, element, doing: str, line: str) -> None:
        """Count an access, mark what it touches, and keep it if it belongs to the traced block."""
        space, m, warps, size = view.space, self.machine, self.warps, view.flat.itemsize
        if doing in ("atomic", "exchange"):
            m.count("atomics", line, warps.count)
        elif space.kind == "global":
            times = 2 if doing == "store" and view.flat.dtype.kind == "c" else 1  # Numba stores the parts one by one
            m.count(f"global_{doing}_requests", line, times * warps.count)
            m.count(f"global_{doing}_sectors", line, times * warps.sectors(element, size, space.address))
        elif space.kind == "shared":
            waves, conflicts = warps.wavefronts(element, size, doing == "load")
            m.count(f"shared_{doing}_requests", line, warps.count)
            m.count(f"shared_{doing}_wavefronts", line, waves)
            m.count(f"shared_{doing}_bank_conflicts", line, conflicts)
        reads = doing in ("load", "atomic")
        if space.loaded is not None and reads:
            for place in space.places(element, size):
                space.loaded[place] = True
        if space.ready is not None:
            for place in space.places(element, size):
                if reads and not space.ready[place].all():
                    self._uninitialised(view, space.ready[place], element, line)
                if doing != "load":
                    space.ready[place] = True
        if space.inputs and doing != "load":
            self._protect(view, index, element, line)
        if m.trace_lanes is not None:
            m.keep_access(self, view, index, element, "atomic" if doing == "exchange" else doing, line)

    def _uninitialised(self, view: View, ready, element, line: str) -> None:
        wrong = np.flatnonzero(~per_thread(ready, self.n))
        byte = int(per_thread(element, self.n)[wrong[0]]) * view.flat.itemsize
        array, at = self.machine.name_of(view.space, byte, view, int(wrong[0]))
        me = self.machine.who(int(self.global_threads[wrong[0]]))
        if view.space.kind == "local":
            whose, advice = "this thread has not", "A local array starts with anything in it: write it first."
        else:
            whose = "nobody has"
            advice = "Memory from cuda.device_array (or torch.empty) starts with anything in it: fill it first."
        what = f"{me} reads {array}[{', '.join(map(str, at))}] ({line}), which {whose} written. {advice}"
        self.machine.report.add("uninitialised", what, line, [me], array, at, len(wrong))

    def _protect(self, view: View, index: tuple, element, line: str) -> None:
        """A fault if an input is written."""
        byte = per_thread(element, self.n) * view.flat.itemsize
        for first, last, name in view.space.inputs:
            wrong = np.flatnonzero((byte >= first) & (byte < last))
            if len(wrong):
                at = tuple(int(per_thread(i, self.n)[wrong[0]]) for i in index)
                me = self.machine.who(int(self.global_threads[wrong[0]]))
                what = f"{me} writes {view.name}[{', '.join(map(str, at))}] ({line}), which lies in the input {name}. "
                advice = "Whoever launched the kernel still needs it: write to an output."
                self.machine.report.add("input_written", what + advice, line, [me], view.name, at, len(wrong))

    def _only_inside(self, view, index, wrong, line, doing, what, dtype, value=None, name=None, expected=None):
        """Report the threads that are out of bounds, and do the access for the others; those read poison."""
        wrong = per_thread(wrong, self.n)
        self._out_of_bounds(view, index, np.flatnonzero(wrong), line, doing)
        inside = np.flatnonzero(~wrong)
        result = None
        if dtype is not None:
            result = np.full(self.n * dtype.itemsize, POISON, np.uint8).view(dtype)
        if len(inside):
            some = self.part(inside, ())
            part = [take(x, inside) for x in (view, index, value, expected)]
            if what == "load":
                result[inside] = some.load(part[0], part[1], line)
            elif what == "store":
                some.store(part[0], part[1], part[2], line)
            else:
                result[inside] = some.atomic(name, part[0], part[1], part[2], line, part[3])
        return result

    def _out_of_bounds(self, view: View, index: tuple, wrong: np.ndarray, line: str, doing: str) -> None:
        first = wrong[:1]
        at = tuple(int(per_thread(i, self.n)[first[0]]) for i in index)
        shape = tuple(int(per_thread(n, self.n)[first[0]]) for n in view.shape)
        threads = [self.machine.who(int(t)) for t in self.global_threads[wrong[:4]]]
        what = (
            f"{threads[0]} {doing} {view.name}[{', '.join(map(str, at))}] ({line}), but {view.name} has shape {shape}"
        )
        kind, advice = "out_of_bounds", "A card reads or destroys what lies there."
        if any(i < 0 for i in at):
            kind, advice = "negative_index", "Numba counts a negative index from the end: another element, silently."
        what = f"{what}. {advice} {self._how_to_stay_inside(view, at, shape, int(first[0]))}"
        self.machine.report.add(kind, what, line, threads, view.name, at, len(wrong))

    def _how_to_stay_inside(self, view: View, at: tuple, shape: tuple, place: int) -> str:
        """What to do, when the thread at `place` of the group accesses index `at` of an array of `shape`."""
        m = self.machine
        if any(i < 0 for i in at):
            return "Guard it, as in `if i >= 0:`."
        if view.space.kind == "shared":
            first = int(per_thread(view.offset, self.n)[place]) * view.flat.itemsize
            if first - m.block_of[self.lanes[place]] * m.shared_bytes >= m.code.dynamic:
                return "It is as long as the launch says: kernel[grid, block, stream, bytes]."
        inside = [f"i < {view.name}.size"]
        if len(shape) > 1:
            inside = [f"{i} < {view.name}.shape[{axis}]" for axis, i in enumerate("ijklmn"[: len(shape)])]
        guard = f"Guard it, as in `if {' and '.join(inside)}:`."
        if len(shape) > 1 and all(0 <= i < n for i, n in zip(at[::-1], shape, strict=True)):
            guard += " Or are the axes swapped? threadIdx.x belongs to the last one."
        return guard
