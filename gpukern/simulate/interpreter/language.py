"""`tl` during a launch: every operation bound to the simulated GPU's builder, then put back.

Upstream's interpreter does this too, by searching the modules of the language again for each call of a function, which
is most of its time. Here the list of replacements is made once, and applied once a launch.
"""

import contextlib
import functools
import inspect
import operator

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice as any_libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice

from gpukern.simulate.interpreter import lines, reductions, types
from gpukern.simulate.interpreter.builder import builder
from gpukern.simulate.interpreter.values import Handle
from gpukern.simulate.report import Refused

semantic = types.Semantic(builder)


def tensor_range(first, last=None, step=1, **_):
    """`range` and `tl.range`: the loop's variable is a scalar tensor. The compiler's hints do nothing."""
    first, last = (0, first) if last is None else (first, last)
    bounds = [b.value if isinstance(b, tl.constexpr) else b for b in (first, last, step)]
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    wide = wide or any(isinstance(b, int) and not -(2**31) <= b < 2**31 for b in bounds)
    kind, dtype = (np.int64, tl.int64) if wide else (np.int32, tl.int32)
    for n in range(*map(int, map(_index, bounds))):
        yield tl.tensor(Handle(np.array([n], kind), dtype), dtype)


def _item(tensor, slices, **_):
    """tensor.__getitem__: only ways to insert an axis."""
    for part in slices if isinstance(slices, tuple | list | tl.tuple) else (slices,):
        part = part.value if isinstance(part, tl.constexpr) else part
        if part is not None and not (isinstance(part, slice) and part == slice(None)):
            raise TypeError(
                "a tensor is indexed with None and `:` only, which insert an axis. To read memory, use "
                "tl.load(pointer + offset); to take an element of a block, tl.sum(tl.where(offsets == n, block, 0))."
            )
    return _upstream_item(tensor, slices, _semantic=semantic)


def _no_assignment(*_):
    raise TypeError("a block has no elements to assign to: use tl.where, or tl.store(pointer + offset, value).")


_upstream_item = tl.tensor.__getitem__


def _static_range(first, last=None, step=1, **_):
    """`tl.static_range`: unrolled, so that the variable is a constant."""
    first, last = (0, first) if last is None else (first, last)
    return range(*map(_index, (first, last, step)))


def _index(value) -> int:
    if isinstance(value, tl.tensor) and value.dtype.is_floating():
        raise TypeError(f"a bound of range is a {value.dtype}; it must be an integer.")
    return value.__index__() if isinstance(value, tl.tensor | tl.constexpr) else value


def _static_assert(condition, message="") -> None:
    assert condition, message or "tl.static_assert fails"


def _map_elementwise(*_, **__):
    raise Refused("tl.map_elementwise", lines.where(), language="triton")


def _hint(x, values):
    """tl.multiple_of and its like tell the compiler something that the simulated GPU has no use for."""
    values = values if isinstance(values, list | tuple) else [values]
    if isinstance(x, tl.tensor) and len(values) != max(1, len(x.shape)):
        raise ValueError(f"a hint of {len(values)} values for a tensor of {len(x.shape)} axes.")
    return x


def truth(value) -> bool:
    """What `if` and `while` of a kernel ask."""
    if not isinstance(value, tl.tensor):
        return bool(value)
    if value.type.is_block() and value.handle.data.size > 1:
        raise TypeError(
            f"a block of {value.handle.data.size} values is asked whether it is true, and each may differ. Use "
            "tl.where(condition, a, b), or reduce the block to a scalar first."
        )
    return bool(value.handle.data.all())


def _transposed(tensor):
    return semantic.permute(tensor, (*range(len(tensor.shape) - 2), len(tensor.shape) - 1, len(tensor.shape) - 2))


def _constant_first(upstream, operation):
    """An operator of tl.constexpr: with a tensor on its right the result is a tensor and no constant."""
    return lambda self, other: operation(self.value, other) if type(other) is tl.tensor else upstream(self, other)


def _bound(member):
    """A builtin of the language with our semantics."""
    return functools.partial(getattr(member, "__wrapped__", member), _semantic=semantic)


def _bound_method(member):
    member = getattr(member, "__wrapped__", member)

    def method(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return method


@functools.cache
def _replacements() -> list:
    """(object, name, what it is during a launch, what it is otherwise)"""
    new = dict(types.REPLACEMENTS)
    for module in (tl, tl.core, tl.math, cuda_libdevice):
        for name, member in inspect.getmembers(module):
            if tl.core.is_builtin(member):
                new[module, name] = _bound(member)
    for name, _ in inspect.getmembers(any_libdevice, inspect.isfunction):
        if hasattr(cuda_libdevice, name):
            new[any_libdevice, name] = _bound(getattr(cuda_libdevice, name))
    for kind in (tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(kind):
            if tl.core.is_builtin(member):
                new[kind, name] = _bound_method(member)
    for module in (tl, tl.core):
        new[module, "reduce"] = reductions.reduce
        new[module, "associative_scan"] = reductions.scan
        new[module, "range"], new[module, "static_range"] = tensor_range, _static_range
        new[module, "static_assert"], new[module, "static_print"] = _static_assert, print
        if hasattr(tl, "map_elementwise"):
            new[module, "map_elementwise"] = _map_elementwise
        for name in ("multiple_of", "max_contiguous", "max_constancy"):
            new[module, name] = _hint
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
        operation = getattr(operator, f"__{name}__")
        new[tl.constexpr, f"__{name}__"] = _constant_first(getattr(tl.constexpr, f"__{name}__"), operation)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        new[tl.constexpr, f"__{name}__"] = _constant_first(
            getattr(tl.constexpr, f"__{name}__"), getattr(operator, name)
        )
    new[tl.dtype, "to_ir"] = lambda self, builder: self
    new[tl.tensor, "__index__"] = lambda self: int(self.handle.data.item())
    # Triton's own code asks `if mask`, which means: is there one?
    new[tl.tensor, "__bool__"] = lambda self: self.type.is_block() or bool(self.handle.data.all())
    new[tl.tensor, "__repr__"] = tl.tensor.__str__  # its type, which is what an error of Triton means by a tensor
    new[tl.tensor, "__getitem__"], new[tl.tensor, "__setitem__"] = _item, _no_assignment
    new[tl.tensor, "T"] = property(_transposed)
    return [(where, name, value, where.__dict__.get(name, _ABSENT)) for (where, name), value in new.items()]


_ABSENT = object()


@functools.cache
def _by_value() -> dict:
    """For names that a kernel's module imported from the language: id of the value -> its replacement."""
    modules = (tl, tl.core, tl.math, cuda_libdevice, any_libdevice)
    return {id(old): new for where, _, new, old in _replacements() if where in modules}


def replaced(value):
    """What a name of a kernel's module means during a launch."""
    return _by_value().get(id(value), value) if inspect.isroutine(value) or inspect.isclass(value) else value


@contextlib.contextmanager
def patched():
    """Inside the `with`, the language works on the simulated GPU."""
    for where, name, new, _ in _replacements():
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, _, old in _replacements():
            if old is _ABSENT:
                delattr(where, name)
            else:
                setattr(where, name, old)
