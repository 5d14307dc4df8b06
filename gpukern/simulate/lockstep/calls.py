"""The CUDA functions of a kernel: what source each call becomes."""

import numpy as np
from numba import cuda
from numba.cuda import types

from gpukern.simulate.lockstep.arrays import local_array, shared_array
from gpukern.simulate.lockstep.kinds import dtype_of, is_number
from gpukern.simulate.lockstep.operations import FUNCTIONS


def _grid(low, value, signature, _):
    """cuda.grid(n): the thread's place in the whole grid."""
    axes = "xyz"[: low.scope.type(value.args[0].name).literal_value]
    parts = [f'g.special("t{a}") + g.special("b{a}").astype(int64) * g.special("bd{a}")' for a in axes]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _gridsize(low, value, signature, _):
    axes = "xyz"[: low.scope.type(value.args[0].name).literal_value]
    parts = [f'g.special("gd{a}").astype(int64) * g.special("bd{a}")' for a in axes]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _range(low, value, signature, _):
    """range(start, stop, step) as (next value, how many are left, step)."""
    number = signature.args[0]
    one = low.code.constant(dtype_of(number).type(1))
    zero = low.code.constant(dtype_of(number).type(0))
    args = [low.operand(v, number) for v in value.args]
    start, stop, step = [zero, args[0], one] if len(args) == 1 else (args + [one])[:3]
    return f"({start}, trips({start}, {stop}, {step}), {step})"


def _len(low, value, signature, _):
    over = low.scope.type(value.args[0].name)
    if isinstance(over, types.Array):
        return f"{low.read(value.args[0])}.shape[0]"
    if isinstance(over, types.RangeType):
        return f"{low.read(value.args[0])}[1]"
    if isinstance(over, types.StringLiteral):
        return low.code.constant(np.int64(len(over.literal_value)))
    if not isinstance(over, types.BaseTuple):
        low.refuse(f"len() of {over}")
    return low.code.constant(np.int64(len(over)))


def _slice(low, value, signature, _):
    parts = []
    for v in value.args:
        none = isinstance(low.scope.type(v.name), types.NoneType)
        parts.append("None" if none else low.operand(v, types.intp))
    if len(parts) == 1:
        parts = ["None", parts[0]]
    return f"({', '.join((parts + ['None'])[:3])})"


def _atomic(name: str):
    def call(low, value, signature, target):
        array, *rest = value.args
        if name == "compare_and_swap":  # of element 0
            index, arguments = "(0,)", rest
        else:
            index, arguments = _atomic_index(low, rest[0]), rest[1:]
        dtype = signature.args[0].dtype
        operands = [low.operand(v, dtype) for v in arguments]
        expected = f", expected={operands[0]}" if name in ("cas", "compare_and_swap") else ""
        is_read = _is_read(low, target)
        low.code.asks_atomics |= is_read
        wanted = "" if is_read else ", wanted=False"
        kind = "cas" if expected else name
        return f'g.atomic("{kind}", {low.read(array)}, {index}, {operands[-1]}, "{low.line}"{expected}{wanted})'

    return call


def _atomic_index(low, variable) -> str:
    given = low.scope.type(variable.name)
    if isinstance(given, types.BaseTuple):
        parts = [_place(low.cast(f"{low.read(variable)}[{n}]", t, types.intp), t) for n, t in enumerate(given)]
    else:
        parts = [_place(low.operand(variable, types.intp), given)]
    return f"({', '.join(parts)},)"


def _place(source: str, given) -> str:
    return str(given.literal_value) if isinstance(given, types.IntegerLiteral) else source  # a literal -1 is meant


def _is_read(low, target) -> bool:
    """Does anything read the variable to which the result goes?"""
    name = target.name
    for block in low.scope.typed.ir.blocks.values():
        for statement in block.body:
            reads = (
                statement.list_vars()
                if statement.is_terminator
                else [v for v in statement.list_vars() if v is not getattr(statement, "target", None)]
            )
            if any(v.name == name for v in reads):
                return True
    return False


def _shuffle(kind: str):
    def call(low, value, signature, _):
        low.code.meets.add(low.pc)
        mask, given, by = (low.operand(v, t) for v, t in zip(value.args, signature.args, strict=True))
        return f'g.shuffle("{kind}", {mask}, {given}, {by}, "{low.line}")'

    return call


def _vote(kind: str):
    def call(low, value, signature, _):
        low.code.meets.add(low.pc)
        mask, predicate = (low.operand(v, t) for v, t in zip(value.args, signature.args, strict=True))
        source = f'g.vote("{kind}", {mask}, {predicate}, "{low.line}")'
        return f"{source}.astype({low.dtype(signature.return_type)})" if kind == "ballot" else source

    return call


def _match(kind: str):
    def call(low, value, signature, _):
        low.code.meets.add(low.pc)
        mask, given = (low.operand(v, t) for v, t in zip(value.args, signature.args, strict=True))
        return f'g.match("{kind}", {mask}, {given}, "{low.line}")'

    return call


def _sync_warp(low, value, signature, _):
    low.code.meets.add(low.pc)
    mask = low.read(value.args[0]) if value.args else "0xFFFFFFFF"
    low.lines.append(f'g.sync_warp({mask}, "{low.line}")')
    return None


def _fence(scope: str):
    """What the thread wrote before, others may read: it announces so by an atomic that they wait for."""

    def call(low, value, signature, _):
        low.code.fences = True
        low.lines.append(f'g.fence("{scope}")')
        return None

    return call


def _nothing(low, value, signature, _):
    """A nap, a group that is only a name."""
    return None


def _complex(low, value, signature, _):
    parts = [low.operand(v, t) for v, t in zip(value.args, signature.args, strict=True)]
    source = parts[0] if len(parts) == 1 else f"({parts[0]} + 1j * ({parts[1]}))"
    return f"({source}).astype({low.dtype(signature.return_type)})"


def _round_to(low, value, signature, _):
    """round(x) and round(x, digits)."""
    if len(value.args) == 1:
        return low._apply(FUNCTIONS, round, list(value.args), signature)[0]
    x, digits = (low.operand(v, t) for v, t in zip(value.args, signature.args, strict=True))
    return f"round_to({x}, {digits})"


def _enumerate(low, value, signature, _):
    inside = low.start(low.operand(value.args[0], signature.args[0]), signature.args[0])
    count = low.operand(value.args[1], types.intp) if len(value.args) > 1 else low.code.constant(np.int64(0))
    return f"({count}, {inside})"


def _zip(low, value, signature, _):
    return (
        f"({''.join(low.start(low.operand(v, t), t) + ', ' for v, t in zip(value.args, signature.args, strict=True))})"
    )


def _nd_iter(low, value, signature, _):
    over = low.scope.type(value.args[0].name)
    if len(value.args) != 1 or not isinstance(over, types.Array):
        low.refuse("np.nditer of several arrays")
    return low.start_of_flat(low.read(value.args[0]))


def _nd_index(low, value, signature, _):
    if len(value.args) == 1 and isinstance(low.scope.type(value.args[0].name), types.BaseTuple):
        shape = low.operand(value.args[0], signature.args[0])
    else:
        shape = f"({''.join(low.operand(v, types.intp) + ', ' for v in value.args)})"
    return low.start_of_indices(shape)


def _sum(low, value, signature, _):
    over = low.scope.type(value.args[0].name)
    if len(value.args) > 1 or not (isinstance(over, types.BaseTuple) and all(map(is_number, over))):
        low.refuse(f"sum of {over}")
    source, result = low.read(value.args[0]), signature.return_type
    return " + ".join(low.cast(f"{source}[{n}]", t, result) for n, t in enumerate(over))


def _cached_load(low, value, signature, _):
    """A load or a store that says how to cache it."""
    index = _atomic_index(low, value.args[1])
    return f'g.load({low.read(value.args[0])}, {index}, "{low.line}")'


def _cached_store(low, value, signature, _):
    array, index = low.read(value.args[0]), _atomic_index(low, value.args[1])
    stored = low.operand(value.args[2], low.scope.type(value.args[0].name).dtype)
    low.lines.append(f'g.store({array}, {index}, {stored}, "{low.line}")')
    return None


SPECIAL = {
    sum: _sum,
    complex: _complex,
    round: _round_to,
    enumerate: _enumerate,
    zip: _zip,
    iter: lambda low, value, signature, _: low.start(low.read(value.args[0]), low.scope.type(value.args[0].name)),
    np.nditer: _nd_iter,
    np.ndindex: _nd_index,
    np.ndenumerate: _nd_iter,
    range: _range,
    len: _len,
    slice: _slice,
    cuda.grid: _grid,
    cuda.gridsize: _gridsize,
    cuda.shared.array: shared_array,
    cuda.local.array: local_array,
    cuda.const.array_like: lambda low, value, signature, _: low.read(value.args[0]),
    cuda.syncwarp: _sync_warp,
    cuda.threadfence: _fence("grid"),
    cuda.threadfence_block: _fence("block"),
    cuda.threadfence_system: _fence("grid"),
    cuda.nanosleep: _nothing,
    cuda.cg.this_grid: _nothing,
    cuda.activemask: lambda low, value, signature, _: "g.active_mask()",
    cuda.lanemask_lt: lambda low, value, signature, _: '((1 << g.special("lane").astype(int64)) - 1).astype(uint32)',
    cuda.shfl_sync: _shuffle("idx"),
    cuda.shfl_up_sync: _shuffle("up"),
    cuda.shfl_down_sync: _shuffle("down"),
    cuda.shfl_xor_sync: _shuffle("xor"),
    cuda.all_sync: _vote("all"),
    cuda.any_sync: _vote("any"),
    cuda.eq_sync: _vote("eq"),
    cuda.ballot_sync: _vote("ballot"),
    cuda.match_any_sync: _match("any"),
    cuda.match_all_sync: _match("all"),
}
SPECIAL |= {
    getattr(cuda, name): _cached_load for name in ("ldca", "ldcg", "ldcs", "ldcv", "ldlu") if hasattr(cuda, name)
}
SPECIAL |= {getattr(cuda, name): _cached_store for name in ("stcg", "stcs", "stwb", "stwt") if hasattr(cuda, name)}
_ATOMICS = "add sub max min nanmax nanmin and_ or_ xor inc dec exch cas compare_and_swap"
SPECIAL |= {getattr(cuda.atomic, name): _atomic(name) for name in _ATOMICS.split()}


def special(key):
    """How a call of `key` becomes source, or None. An intrinsic says by its `lockstep` which access it stands for."""
    try:
        return _VECTORS.get(getattr(key, "lockstep", None)) or SPECIAL.get(key)
    except TypeError:  # not hashable
        return None


def _load4(low, value, signature, _):
    array, element = value.args
    return f'g.load4({low.read(array)}, {low.operand(element, types.intp)}, "{low.line}")'


def _store4(low, value, signature, _):
    array, element, values = value.args
    parts = low.operand(values, signature.args[2])
    low.lines.append(f'g.store4({low.read(array)}, {low.operand(element, types.intp)}, {parts}, "{low.line}")')
    return None


_VECTORS = {"load4": _load4, "store4": _store4}


def is_native(key, signature) -> bool:
    """Is a call of this function an operation of the machine's own, and not laid in?"""
    try:
        hash(key)
    except TypeError:
        return False
    if key in (max, min) and len(signature.args) == 1:
        return isinstance(signature.args[0], types.BaseTuple)
    return key in SPECIAL or key in (int, float) or (key in FUNCTIONS and all(map(is_number, signature.args)))
