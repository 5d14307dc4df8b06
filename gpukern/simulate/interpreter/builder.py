"""The arithmetic of Triton on NumPy: the object that every operation of the language ends in.

It keeps upstream's way (one NumPy array for a block, an array of one element for a scalar) and departs from it where a
card computes something else: bfloat16 and float8 are themselves and not their bits, float32 products of `tl.dot` are
rounded to tf32, minimum ignores NaN, conversions saturate. What it does not know it refuses.
"""

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter

from gpukern import device
from gpukern.simulate.interpreter import libdevice, lines
from gpukern.simulate.interpreter.values import Handle, as_tf32, converted, np_dtype
from gpukern.simulate.report import Refused

_MIN_DOT = min_dot_size(None)


def _binary(ufunc, flops: int = 0):
    def operation(self, a, b):
        out = ufunc(a.data, b.data)
        if flops:
            self.count_flops(out.size)
        return Handle(out, a.dtype.scalar)

    return operation


def _compare(ufunc):
    return lambda self, a, b: Handle(ufunc(a.data, b.data), tl.int1)


def _unordered(ufunc):
    """A comparison that is true if an operand is NaN."""
    return lambda self, a, b: Handle(~ufunc(a.data, b.data), tl.int1)


def _unary(ufunc):
    return lambda self, a: Handle(ufunc(a.data), a.dtype.scalar)


class Builder(interpreter.InterpreterBuilder):
    """What upstream's builder has for the compiler's, within a card's rules. launch: the Launch that is being run."""

    def __init__(self):
        super().__init__()
        self.options = interpreter.InterpreterOptions(
            debug=True,  # so that tl.device_assert asserts
            sanitize_overflow=False,  # integers wrap
            allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
        )
        self.launch = None

    def __getattr__(self, name: str):
        if name.startswith("create_"):
            raise Refused(f"`{name.removeprefix('create_')}` of Triton", lines.where(), language="triton")
        raise AttributeError(name)

    def count_flops(self, n: int) -> None:
        if self.launch.checks:
            self.launch.look()
            self.launch.count("flops", n)

    # Constants

    def get_int1(self, value):
        return Handle(np.array([value], np.bool_), tl.int1)

    def get_bf16(self, value):
        return Handle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)

    def get_null_value(self, type):
        return Handle(np.zeros(1, np_dtype(type)), type.scalar)

    def get_all_ones_value(self, type):
        dtype = np_dtype(type)
        return Handle(np.ones(1, dtype) if dtype.kind == "b" else np.full(1, -1).astype(dtype), type.scalar)

    def create_get_program_id(self, axis):
        return Handle(np.array([self.launch.program[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis):
        return Handle(np.array([self.launch.grid[axis]], np.int32), tl.int32)

    # Arithmetic

    create_fadd, create_fsub = _binary(np.add, 1), _binary(np.subtract, 1)
    create_fmul, create_fdiv = _binary(np.multiply, 1), _binary(np.divide, 1)
    create_precise_divf = create_fdiv
    create_frem = _binary(np.fmod)
    create_add, create_sub, create_mul = _binary(np.add), _binary(np.subtract), _binary(np.multiply)
    create_srem = create_urem = _binary(np.fmod)  # the sign of the dividend, as in C
    create_and, create_or, create_xor = _binary(np.bitwise_and), _binary(np.bitwise_or), _binary(np.bitwise_xor)
    create_shl, create_lshr = _binary(np.left_shift), _binary(np.right_shift)
    create_minsi = create_minui = create_minimumf = _binary(np.minimum)
    create_maxsi = create_maxui = create_maximumf = _binary(np.maximum)
    create_minnumf, create_maxnumf = _binary(np.fmin), _binary(np.fmax)

    create_icmpSLE = create_icmpULE = create_fcmpOLE = _compare(np.less_equal)
    create_icmpSLT = create_icmpULT = create_fcmpOLT = _compare(np.less)
    create_icmpSGE = create_icmpUGE = create_fcmpOGE = _compare(np.greater_equal)
    create_icmpSGT = create_icmpUGT = create_fcmpOGT = _compare(np.greater)
    create_icmpEQ = create_fcmpOEQ = _compare(np.equal)
    create_icmpNE = create_fcmpUNE = _compare(np.not_equal)
    create_fcmpULT, create_fcmpULE = _unordered(np.greater_equal), _unordered(np.greater)
    create_fcmpUGT, create_fcmpUGE = _unordered(np.less_equal), _unordered(np.less)

    create_floor, create_ceil, create_iabs, create_fabs = map(_unary, (np.floor, np.ceil, np.abs, np.abs))
    create_exp, create_exp2, create_log, create_log2 = map(_unary, (np.exp, np.exp2, np.log, np.log2))
    create_sin, create_cos, create_sqrt, create_precise_sqrt = map(_unary, (np.sin, np.cos, np.sqrt, np.sqrt))
    create_rsqrt = _unary(lambda x: 1 / np.sqrt(x))
    create_erf = _unary(lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy())

    def create_idiv(self, a, b):
        """Towards zero, as in C."""
        return Handle((a.data - np.fmod(a.data, b.data)) // b.data, a.dtype.scalar)

    create_sdiv = create_udiv = create_idiv

    def create_ashr(self, a, b):
        signed = np.dtype(f"int{8 * a.data.itemsize}")
        return Handle((a.data.view(signed) >> b.data.astype(signed)).view(a.data.dtype), a.dtype.scalar)

    def create_fma(self, x, y, z):
        """x * y + z, rounded once: float64 holds the product of two float32 exactly."""
        self.count_flops(2 * x.data.size)
        wide = (v.data.astype(np.float64) for v in (x, y, z))
        product = next(wide) * next(wide)
        return Handle((product + next(wide)).astype(z.data.dtype), z.dtype.scalar)

    def create_clampf(self, x, low, high, propagate_nan):
        if propagate_nan == tl.PropagateNan.ALL:
            return Handle(np.clip(x.data, low.data, high.data), x.dtype.scalar)
        return Handle(np.fmin(np.fmax(x.data, low.data), high.data), x.dtype.scalar)

    def create_select(self, condition, a, b):
        return Handle(np.where(condition.data, a.data, b.data), b.dtype.scalar)

    # Conversions

    def cast_impl(self, src, dst_type):
        return Handle(converted(src.data, np_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        dtype = np_dtype(dst_type)
        out = converted(src.data, dtype)
        if rounding_mode == ir.ROUNDING_MODE.RTZ and dtype.itemsize < src.data.itemsize:
            bits = out.view(f"uint{8 * dtype.itemsize}")
            beyond = np.abs(out.astype(src.data.dtype)) > np.abs(src.data)
            out = (bits - beyond.astype(bits.dtype)).view(dtype)  # one step towards zero
        return Handle(out, dst_type.scalar)

    def create_bitcast(self, src, dst_type):
        return Handle(np.ascontiguousarray(src.data).view(np_dtype(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # Blocks

    def create_make_range(self, ret_ty, start, stop):
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_splat(self, ret_ty, arg):
        return Handle(np.full(ret_ty.shape, arg.data.reshape(-1)[0], np_dtype(arg.dtype)), arg.dtype.scalar)

    def create_unsplat(self, arg):
        return Handle(arg.data.reshape(1), arg.dtype.scalar)

    def create_histogram(self, data, bins, mask):
        values = data.data if mask is None else data.data[mask.data]
        values = values[(values >= 0) & (values < bins)]
        return Handle(np.bincount(values, minlength=bins).astype(np.int32), tl.int32)

    def create_dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        least = dict(zip("MNK", _MIN_DOT(a.dtype, b.dtype), strict=True))
        sizes = {"M": a.data.shape[-2], "N": b.data.shape[-1], "K": a.data.shape[-1]}
        for axis, n in sizes.items():
            if n < least[axis]:
                raise device.LimitError(f"tl.dot with {axis}={n}: Triton needs at least {least[axis]} on this axis.")
        self.count_flops(2 * sizes["K"] * acc.data.size)
        x, y = a.data, b.data
        if a.dtype.is_fp32() and input_precision == ir.INPUT_PRECISION.TF32 and self.launch.tensor_cores_take_tf32:
            x, y = as_tf32(x), as_tf32(y)
        # An operand as float32, or for integers and float64 as float64, holds every value exactly.
        wide = np.float64 if x.dtype.itemsize == 8 or x.dtype.kind in "iu" else np.float32
        product = np.matmul(x.astype(wide, copy=False), y.astype(wide, copy=False))
        return Handle((product + acc.data).astype(acc.data.dtype, copy=False), acc.dtype.scalar)

    # Calls out of the language

    def create_extern_elementwise(self, library, path, symbol, arguments, result_type, is_pure):
        function = libdevice.function(symbol)
        if function is None or library or path:
            raise Refused(f"`{symbol}` of {path or library or 'libdevice'}", lines.where(), language="triton")
        out = function(*(a.data for a in arguments))
        return Handle(np.asarray(out).astype(np_dtype(result_type)), result_type.scalar)

    def create_inline_asm(self, *_):
        raise Refused("inline assembly", lines.where(), language="triton")

    def create_print(self, prefix, hex, values, is_signed):
        for value in values or [None]:
            shown = "" if value is None else np.vectorize(np.base_repr)(value.data, 16) if hex else value.data
            print(f"({', '.join(map(str, self.launch.program))}){prefix}{shown}")

    def create_assert(self, condition, message):
        if not condition.data.all():
            raise AssertionError(message or "tl.device_assert fails")

    def create_assume(self, condition):
        if not condition.data.all():
            raise AssertionError("tl.assume is told something that is not so")

    def create_barrier(self):
        self.launch.look()
        self.launch.count("barriers", 1)

    # Memory: pointers are addresses, memory.Memory knows whose

    def create_addptr(self, ptr, offset):
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return Handle(ptr.data + offset.data.astype(np.uint64) * np.uint64(size), ptr.dtype)

    def create_load(self, ptr, cache, eviction, is_volatile):
        return self.create_masked_load(ptr, None, None, cache, eviction, is_volatile)

    def create_masked_load(self, ptr, mask, other, cache_modifier, eviction_policy, is_volatile):
        dtype = ptr.get_element_ty()
        other = None if other is None else other.data
        mask = None if mask is None else mask.data
        return Handle(self.launch.memory.load(ptr.data, mask, other, np_dtype(dtype), is_volatile), dtype)

    def create_store(self, ptr, value, cache, eviction):
        self.create_masked_store(ptr, value, None, cache, eviction)

    def create_masked_store(self, ptr, value, mask, cache_modifier, eviction_policy):
        value_data = value.data.astype(np_dtype(ptr.get_element_ty()), copy=False)
        self.launch.memory.store(ptr.data, None if mask is None else mask.data, value_data)

    def create_tensor_pointer_load(self, ptr, boundary_check, padding, cache, eviction, is_volatile):
        pointers, mask = ptr.materialize_pointers(boundary_check)
        return self._padded_load(pointers, mask, padding)

    def create_tensor_pointer_store(self, ptr, value, boundary_check, cache, eviction):
        pointers, mask = ptr.materialize_pointers(boundary_check)
        self.create_masked_store(pointers, value, Handle(mask, tl.int1), cache, eviction)

    def create_descriptor_load(self, desc, indices, cache_modifier, eviction_policy):
        pointers, mask = desc.materialize_pointers(indices)
        return self._padded_load(pointers, mask, desc.padding)

    def create_descriptor_store(self, desc, value, indices):
        pointers, mask = desc.materialize_pointers(indices)
        self.create_masked_store(pointers, value, Handle(mask, tl.int1), None, None)

    def create_descriptor_reduce(self, kind, desc, value, indices):
        pointers, mask = desc.materialize_pointers(indices)
        self.launch.memory.atomic(kind.name.lower(), pointers.data, mask, value.data, "relaxed")

    def _padded_load(self, pointers, mask, padding):
        other = None
        if padding == ir.PADDING_OPTION.PAD_NAN:
            other = Handle(np.full(pointers.data.shape, np.nan, np_dtype(pointers.get_element_ty())), pointers.dtype)
        return self.create_masked_load(pointers, Handle(mask, tl.int1), other, None, None, False)

    def create_atomic_rmw(self, kind, ptr, value, mask, sem, scope):
        if value.data.size > 1 and ptr.data.size == 1:
            raise ValueError("Value argument cannot be block type if pointer argument is not a block")
        name = kind.name.lower().removeprefix("f").removeprefix("u")
        old = self.launch.memory.atomic(name, ptr.data, mask.data, value.data, sem.name.lower())
        return Handle(old, value.dtype.scalar)

    def create_atomic_cas(self, ptr, expected, value, sem, scope):
        old = self.launch.memory.atomic("cas", ptr.data, None, value.data, sem.name.lower(), expected.data)
        return Handle(old, expected.dtype.scalar)


builder = Builder()
