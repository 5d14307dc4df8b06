"""Loops over arrays, tuples, ranges, and over several of them at once, as source.

An iterator under way is a tuple (next place, how many are left, step, what it goes through); taking the next element
moves it on. `enumerate` is (count, iterator inside), `zip` a tuple of iterators.
"""

import numpy as np
from numba.cuda import types
from numba.cuda.core import ir


class Iteration:
    """The loops of a BlockLowering."""

    def _getiter(self, value: ir.Expr) -> tuple:
        signature = self.scope.typed.calltypes[value]
        return self.start(self.operand(value.value, signature.args[0]), signature.args[0]), signature.return_type

    def start(self, source: str, over) -> str:
        """An iterator at its first element."""
        if isinstance(over, types.UniTuple):
            return self._from_zero(str(len(over)), source)
        if isinstance(over, types.Array):
            return self._from_zero(f"{source}.shape[0]", source)
        if isinstance(over, types.RangeType | types.IteratorType) and not isinstance(over, types.Generator):
            return source
        self.refuse(f"a loop over {over} (loop over range instead)")

    def start_of_flat(self, source: str) -> str:
        return self._from_zero(f"{source}.size", source)

    def start_of_indices(self, shape: str) -> str:
        return self._from_zero(f"math.prod({shape}, start={self._number(1)})", shape)

    def _from_zero(self, count: str, source: str) -> str:
        count = self._number(int(count)) if count.isdigit() else count
        return f"({self._number(0)}, {count}, {self._number(1)}, {source})"

    def _number(self, n: int) -> str:
        return self.code.constant(np.int64(n))

    def _iternext(self, value: ir.Expr) -> tuple:
        """The pair (element, is there one?); the iterator moves on."""
        pair = self.scope.typed.calltypes[value].return_type
        item, there, moved = self._next(self.read(value.value), self.scope.type(value.value.name))
        self.lines.append(f"pair = ({item}, {there})")
        self.write(value.value.name, moved)
        return "pair", pair

    def _next(self, name: str, over) -> tuple:
        """Source of the next element, of whether there is one, and of the iterator after it."""
        if isinstance(over, types.EnumerateType):
            item, there, moved = self._next(f"{name}[1]", over.source_type)
            return f"({name}[0], {item})", there, f"({name}[0] + 1, {moved})"
        if isinstance(over, types.ZipType):
            parts = [self._next(f"{name}[{n}]", t) for n, t in enumerate(over.source_types)]
            if not parts:
                self.refuse("zip of nothing")
            items, there, moved = zip(*parts, strict=True)
            return f"({', '.join(items)},)", " & ".join(f"({t})" for t in there), f"({', '.join(moved)},)"
        rest = "" if isinstance(over, types.RangeIteratorType) else f", {name}[3]"
        moved = f"({name}[0] + {name}[2], {name}[1] - 1, {name}[2]{rest})"
        return self._element(name, over), f"{name}[1] > 0", moved

    def _element(self, name: str, over) -> str:
        if isinstance(over, types.RangeIteratorType):
            return f"{name}[0]"
        if isinstance(over, types.UniTupleIter):
            return f'choose(g, {name}[3], {name}[0], "{self.line}")'
        if isinstance(over, types.NumpyNdIndexType):
            return f"unravel({name}[3], {name}[0])"
        whole = f'element(g, {name}[3], flat_index({name}[3], {name}[0]), {name}[1] > 0, "{self.line}")'
        if isinstance(over, types.ArrayIterator):
            array = over.array_type
            if array.ndim > 1:
                return f"{name}[3].slice(({name}[0],))"
            if isinstance(array.dtype, types.Record):
                return f'record(g, {name}[3], (inside({name}[0], {name}[3].shape[0]),), "{self.line}")'
            return whole
        if isinstance(over, types.NumpyNdEnumerateType):
            return f"(unravel({name}[3].shape, {name}[0]), {whole})"
        if isinstance(over, types.NumpyNdIterType):
            return f"{name}[3].slice(flat_index({name}[3], {name}[0]))"
        return whole
