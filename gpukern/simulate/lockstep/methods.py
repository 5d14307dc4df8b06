"""The methods of arrays and numbers that Numba emits itself: what source each call becomes."""

from numba.cuda import types

from gpukern.simulate.lockstep.kinds import dtype_of
from gpukern.simulate.lockstep.memory import granule


def _view(low, owner, value, signature):
    array, result = low.scope.type(owner.name), signature.return_type
    old, new = dtype_of(array.dtype).itemsize, dtype_of(result.dtype).itemsize
    if max(old, new) % min(old, new):
        low.refuse(f"a view of {array.dtype} as {result.dtype}")
    low.code.view_granule = min(low.code.view_granule, granule(dtype_of(result.dtype)))
    return f'retyped({low.read(owner)}, {low.dtype(result.dtype)}, "{low.line}")'


def _reshape(low, owner, value, signature):
    array = low.scope.type(owner.name)
    if array.layout != "C":
        low.refuse("reshape of an array that is not C-contiguous")
    if len(value.args) == 1 and isinstance(low.scope.type(value.args[0].name), types.BaseTuple):
        given = low.scope.type(value.args[0].name)
        shape = [low.cast(f"{low.read(value.args[0])}[{n}]", t, types.intp) for n, t in enumerate(given)]
    else:
        shape = [low.operand(v, types.intp) for v in value.args]
    return f"reshaped({low.read(owner)}, ({''.join(n + ', ' for n in shape)}))"


def _transpose(low, owner, value, signature):
    if value.args:
        low.refuse("transpose with axes")
    return f"{low.read(owner)}.T"


def _item(low, owner, value, signature):
    array = low.scope.type(owner.name)
    if not isinstance(array, types.Array):
        return low.read(owner)
    index = ", ".join(["0"] * array.ndim)
    return f'g.load({low.read(owner)}, ({index}{"," if index else ""}), "{low.line}")'


def _conjugate(low, owner, value, signature):
    return f"np.conjugate({low.read(owner)})"


# Methods that Numba emits itself, by the key of their type.
METHODS = {
    "array.view": _view,
    "array.reshape": _reshape,
    "array.transpose": _transpose,
    "array.item": _item,
    "number.item": _item,
    "complex.conjugate": _conjugate,
    "number.conjugate": _conjugate,
}
