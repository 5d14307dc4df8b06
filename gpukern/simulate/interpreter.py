"""Triton's interpreter, made right for bfloat16 and held to a card's limits.

By itself it keeps a bfloat16 as its 16 bits and then adds and multiplies those bits as integers, accepts any grid and
any number of warps, and multiplies tiles that no tensor core takes. `install` replaces its builder, the object that
every `tl` operation ends in, by one that does not.
"""

import types

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from gpukern import device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # NumPy arithmetic on it rounds each result to nearest even, as a card does

_np_dtype = interpreter._get_np_dtype
_patch_language = interpreter._patch_lang
_run = interpreter.InterpretedFunction.run
_sum = interpreter.ReduceOps.sum
_MIN_DOT = min_dot_size(None)
_LANGUAGE = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def install() -> None:
    """Use the rules below for every kernel of this process."""
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # `_checked_run` has done it, once a launch
    interpreter.interpreter_builder.__class__ = Builder
    interpreter.ReduceOps.sum = _sum_in_pairs
    interpreter.InterpretedFunction.run = _checked_run


def _get_np_dtype(dtype):
    return BFLOAT16 if dtype.scalar == tl.bfloat16 else _np_dtype(dtype)


def _sum_in_pairs(reduction, x):
    """`tl.sum`. It does not widen bfloat16, on a card either; but there threads add in a tree, so that the error stays
    small, where NumPy adds one after the other until the sum is too large to grow."""
    if x.dtype.scalar != tl.bfloat16:
        return _sum(reduction, x)
    out = x.handle.data
    axes = tuple(range(out.ndim)) if reduction.axis is None else (reduction.axis,)
    for axis in axes:
        while out.shape[axis] > 1:
            first, second = np.split(out, 2, axis)
            out = first + second
    return reduction.to_tensor(out if reduction.keep_dims else out.squeeze(axes), x.dtype)


def _checked_run(kernel, *args, grid, warmup, **options):
    """Launch `kernel`; a broken limit is a LimitError, not an InterpreterError that quotes one."""
    _check_warps(options.get("num_warps", 4))
    language = _patch_language(_LANGUAGE)  # upstream does this again in every call of a function: most of its time
    try:
        with np.errstate(all="ignore"):  # a card does not warn of inf and NaN
            return _run(kernel, *args, grid=grid, warmup=warmup, **options)
    except InterpreterError as error:
        cause = error
        while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, device.LimitError):
            raise cause from None
        raise
    finally:
        language.restore()


def _check_warps(warps: int) -> None:
    card = device.card()
    if warps < 1 or warps & (warps - 1):
        raise device.LimitError(f"num_warps={warps} is not a power of two; choose 1, 2, 4, 8, 16 or 32.")
    if warps * card.warp > card.threads_per_block:
        raise device.LimitError(
            f"num_warps={warps} is a block of {warps * card.warp} threads; {card.name} allows {card.threads_per_block}."
        )


class Builder(interpreter.InterpreterBuilder):
    """What upstream's builder does, for bfloat16 as well, and within limits."""

    def set_grid_dim(self, nx, ny, nz):
        if nx and ny and nz:  # an empty grid launches nothing, on a card as here
            device.check_launch((nx, ny, nz), 1)
        super().set_grid_dim(nx, ny, nz)

    def get_bf16(self, value):
        return interpreter.TensorHandle(np.array([value], dtype=BFLOAT16), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_fma(self, x, y, z):
        """x * y + z, rounded once."""
        if z.dtype.scalar != tl.bfloat16:
            return super().create_fma(x, y, z)
        x, y, z = (_as_float32(handle).data for handle in (x, y, z))
        return interpreter.TensorHandle((x * y + z).astype(BFLOAT16), tl.bfloat16)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        least = dict(zip("MNK", _MIN_DOT(a.dtype, b.dtype), strict=True))
        sizes = {"M": a.data.shape[-2], "N": b.data.shape[-1], "K": a.data.shape[-1]}
        for axis, n in sizes.items():
            if n < least[axis]:
                raise device.LimitError(f"tl.dot with {axis}={n}: Triton needs at least {least[axis]} on this axis.")
        return super().create_dot(_as_float32(a), _as_float32(b), d, input_precision, max_num_imprecise_acc)


def _as_float32(handle):
    """A bfloat16 handle as float32, which holds every bfloat16 and every product of two exactly; others as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(handle.data.astype(np.float32), tl.float32)
