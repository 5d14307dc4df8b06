"""Shared and local arrays: where they lie, what they are called, and what the call that makes one becomes."""

import numpy as np
from numba.cuda import types
from numba.cuda.core import ir

from gpukern.simulate.lockstep.kinds import dtype_of
from gpukern.simulate.lockstep.memory import granule


def _shape_and_dtype(low, value, signature) -> tuple:
    """The shape of a shared or local array, and its element type."""
    given = dict(value.kws)
    shape = low.scope.type((value.args[0] if value.args else given["shape"]).name)
    shape = [shape] if not isinstance(shape, types.BaseTuple) else list(shape)
    sizes = tuple(int(n.literal_value) for n in shape)
    return sizes, dtype_of(signature.return_type.dtype)


def shared_array(low, value, signature, target):
    """Static arrays lie one after the other; arrays of size 0 all begin where the static ones end."""
    shape, dtype = _shape_and_dtype(low, value, signature)
    code = low.code
    code.shared_granule = min(code.shared_granule, granule(dtype))
    here = id(value)  # a device function has its array once, wherever and however often it is called
    if shape == (0,):
        offset = "g.machine.code.dynamic"
    elif here in code.shared_arrays:
        offset = code.shared_arrays[here]
    else:
        offset = code.shared_arrays[here] = -(-code.shared_static // 16) * 16
        code.shared_static = offset + int(np.prod(shape)) * dtype.itemsize
    return f'g.shared_array({offset}, {shape}, {low.dtype(signature.return_type.dtype)}, "{_name(low, target)}")'


def local_array(low, value, signature, target):
    shape, dtype = _shape_and_dtype(low, value, signature)
    low.code.local_arrays += 1
    dtype = low.dtype(signature.return_type.dtype)
    return f'g.local_array({low.code.local_arrays}, {shape}, {dtype}, "{_name(low, target)}")'


def _name(low, target) -> str:
    """The name of the variable that gets an array: `a`, also in `a, b = shared.array(...), shared.array(...)`."""
    made = {}
    for block in low.scope.typed.ir.blocks.values():
        made |= {s.target.name: s.value for s in block.body if isinstance(s, ir.Assign)}

    def source(value):
        """The name of the variable whose value `value` is."""
        if isinstance(value, ir.Var):
            return value.name if value.name == target.name else source(made.get(value.name))
        if isinstance(value, ir.Expr) and value.op == "static_getitem":
            items = made.get(value.value.name)
            if isinstance(items, ir.Expr) and items.op == "exhaust_iter":
                items = made.get(items.value.name)
            if isinstance(items, ir.Expr) and items.op == "build_tuple":
                return source(items.items[value.index])
        return None

    named = (name for name, value in made.items() if name[0] != "$" and source(value) == target.name)
    return (target.name if target.name[0] != "$" else next(named, target.name)).partition(".")[0]
