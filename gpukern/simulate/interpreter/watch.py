"""What an access to memory leaves behind: counters, notes for the races, the trace, and faults in words."""

import numpy as np

from gpukern.simulate.interpreter import lines
from gpukern.simulate.interpreter.regions import Tensor
from gpukern.simulate.report import SECTOR, Access

ALLOCATION = (1 << 46) - 1  # the bits of an address that count from the start of the allocation
_MASK = "Give the access a mask, as in mask=offsets < n (for a block pointer: boundary_check)."


class Watch:
    """The part of Memory that looks at accesses. It has launch, regions, tensors and checks."""

    def _count(self, tensor, address, step, neighbours: bool, size: int, doing: str) -> None:
        launch = self.launch
        if doing == "atomic":
            launch.count("atomics", 1)
            return
        if neighbours:
            sectors = (int(address[-1]) + size - 1) // SECTOR - int(address[0]) // SECTOR + 1
        else:
            sector = address >> np.uint64(5)
            if step.min() < 0:
                sector = np.sort(sector)
            sectors = int(np.count_nonzero(sector[1:] != sector[:-1])) + 1
        launch.count(f"global_{doing}_requests", 1)
        launch.count(f"global_{doing}_sectors", sectors)

    def _note_load(self, tensor, where, dtype, volatile: bool) -> None:
        region = tensor.region
        places = region.granules_of(where, dtype.itemsize)
        region.shadow.read(places, tensor, volatile)
        if region.ready is not None and not region.ready[places].all():
            self._uninitialised(tensor, places)

    def _note_store(self, tensor, where, new, bits) -> None:
        region = tensor.region
        places = region.granules_of(where, bits.itemsize)

        def same(granules):
            """Do the elements of these granules get the value that they have?"""
            now = region.flat(bits)[where] == np.ascontiguousarray(new).view(bits)
            return bool(np.repeat(now, len(granules) // len(now))[granules].all())

        region.shadow.write(places, tensor, same)
        self._note_written(tensor, places)

    def _note_atomic(self, tensor, where, dtype, reads: bool) -> None:
        region = tensor.region
        places = region.granules_of(where, dtype.itemsize)
        region.shadow.atomic(places, tensor)
        if reads and region.ready is not None and not region.ready[places].all():
            self._uninitialised(tensor, places, "changes", "Set it to 0 (torch.zeros) before the launch.")
        self._note_written(tensor, places)

    def _note_written(self, tensor, places) -> None:
        region = tensor.region
        if region.ready is not None:
            region.ready[places] = True
        for first, last, name in region.inputs:
            places = np.arange(places.start, places.stop) if type(places) is slice else places
            byte = places * region.granule
            wrong = (byte >= first) & (byte < last)
            if wrong.any():
                index = self.index_of(tensor, int(byte[np.argmax(wrong)]))
                me = self.launch.who()
                what = f"{me} writes {tensor.name}[{index}] ({lines.where()}), which lies in the input {name}. "
                advice = "Whoever launched the kernel still needs it: write to an output."
                self.launch.fault("input_written", what + advice, [me], tensor.name, (index,), int(wrong.sum()))

    @staticmethod
    def index_of(tensor: Tensor, byte: int) -> int:
        """Elements between the tensor's first and a byte of its region."""
        size = tensor.like.element_size() if tensor.like is not None else 1
        return (byte - tensor.first) // size

    def _uninitialised(self, tensor, places, does="loads", advice="Store it first.") -> None:
        region = tensor.region
        missing = ~region.ready[places]
        place = int(np.argmax(missing)) + places.start if type(places) is slice else int(places[np.argmax(missing)])
        index = self.index_of(tensor, place * region.granule)
        me = self.launch.who()
        what = f"{me} {does} {tensor.name}[{index}] ({lines.where()}), which nobody has written. "
        advice = f"An output starts with anything in it. {advice}"
        self.launch.fault("uninitialised", what + advice, [me], tensor.name, (index,), int(missing.sum()))

    def _out_of_bounds(self, tensor, offset: np.ndarray, size: int, doing: str) -> None:
        me, line = self.launch.who(), lines.where()
        does = {"load": "loads", "store": "stores to", "atomic": "changes"}[doing]
        if tensor is None:
            what = f"{me} {does} the address {int(offset[0]):#x} ({line}), where no tensor lies. "
            self.launch.fault(
                "out_of_bounds", what + "Compute addresses from a pointer argument.", [me], None, None, len(offset)
            )
            return
        index = int(offset[0]) // size
        has = f"{tensor.name} has {tensor.size // size} elements from its pointer on"
        if tensor.like is not None and not tensor.like.is_contiguous():
            has += f" (shape {tuple(tensor.like.shape)}, strides {tensor.like.stride()})"
        why, advice = "A card reads or destroys what lies there.", _MASK
        if 0 <= offset[0] <= tensor.size - size:
            has = has.replace("elements", "places", 1) + ", and no element of it lies there"
            advice = f"Compute offsets with the tensor's strides. {_MASK}"
        elif index < 0:
            why = "That is before its first element: a pointer went below the start."
            if index < -tensor.size:  # so far that it is no slip of a few elements
                advice = f"Beyond 2**31 a 32-bit offset wraps: compute it from tl.program_id(0).to(tl.int64). {_MASK}"
        what = f"{me} {does} {tensor.name}[{index}] ({line}), but {has}. {why} {advice}"
        self.launch.fault("out_of_bounds", what, [me], tensor.name, (index,), len(offset))

    def _trace(self, tensor, address, offset, lanes, size: int, doing: str) -> None:
        lanes = np.arange(len(offset)) if lanes is None else lanes
        where = (address & np.uint64(ALLOCATION)).view(np.int64)  # from the start of the allocation
        step = len(self.launch.report.trace)
        index = (offset.view(np.int64) // size,)
        elements = tensor.size // size
        self.launch.report.trace.append(
            Access(step, lines.where(), "global", doing, tensor.name, (elements,), size, lanes, index, where)
        )

    def settle(self, outputs: tuple, line: str) -> None:
        """After the run: unique bytes, and outputs that were not written."""
        for region in self.regions if self.checks else ():
            region.shadow.count_unique(region.granule)
        for tensor in self.tensors:
            if self.checks and tensor.name.partition("[")[0] in outputs:
                missing = np.argwhere(~tensor.elements(tensor.region.ready).all(-1))
                if len(missing):
                    self._not_written(tensor.name, tuple(map(int, missing[0])), len(missing), line)

    def _not_written(self, name: str, index: tuple, count: int, line: str) -> None:
        at = f"{name}[{', '.join(map(str, index))}]"
        what = f"no program writes {at}" + (f" nor {count - 1:,} more elements" if count > 1 else "")
        what += f" of the output {name}. They keep what lay in memory: launch enough programs, and let each element "
        self.launch.report.add("uninitialised", what + "have its lane.", line, (), name, index, count)
