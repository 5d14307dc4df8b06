"""Arguments of a kernel: tensors become pointers, numbers become scalars, constants stay what they are."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukern.simulate.interpreter import language
from gpukern.simulate.interpreter.values import Handle, np_dtype


def value_of(argument, kind: str, addresses):
    """What the kernel gets for an argument.

    kind       what its parameter is annotated with: "constexpr", a type such as "i64", or ""
    addresses  iterator over the addresses of the tensors that `tensors_of` finds, in its order
    """
    if kind == "constexpr" or argument is None or isinstance(argument, str | tl.dtype | tl.constexpr):
        return language.replaced(argument)
    if isinstance(argument, tuple):
        parts = [value_of(part, "", addresses) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, TensorDescriptor):
        return language.semantic.make_tensor_descriptor(
            value_of(argument.base, "", addresses),
            [value_of(int(n), "", addresses) for n in argument.shape],
            [*(value_of(int(n), "", addresses) for n in argument.strides[:-1]), tl.constexpr(1)],
            [tl.constexpr(n) for n in argument.block_shape],
            padding_option=argument.padding,
        )
    if isinstance(argument, bool | int | float):
        dtype = tl.str_to_ty(kind if kind[:1] in ("i", "u", "f", "b") else jit.mangle_type(argument), None)
        return tl.tensor(Handle(np.array([argument]).astype(np_dtype(dtype)), dtype), dtype)
    if hasattr(argument, "data_ptr"):
        dtype = tl.str_to_ty(jit.mangle_type(argument), None)
        return tl.tensor(Handle(np.array([next(addresses)], np.uint64), dtype), dtype)
    return argument


def check(name: str, value, kind: str) -> None:
    """Refuse what the launcher would: an argument that is neither a tensor on this device, a number nor a constant."""
    if isinstance(value, tuple):
        for n, part in enumerate(value):
            check(f"{name}[{n}]", part, kind)
    elif kind == "constexpr":
        if hasattr(value, "data_ptr") or isinstance(value, np.ndarray):
            raise TypeError(f"{name} is a constexpr, and a tensor is none: pass a number.")
    elif isinstance(value, np.ndarray):
        raise TypeError(f"{name} is a NumPy array; a Triton kernel takes tensors: pass torch.from_numpy({name}).")
    elif isinstance(value, np.generic):
        raise TypeError(f"{name} is a {type(value).__name__} of NumPy; pass a number of Python: {name}.item().")
    elif isinstance(value, TensorDescriptor):
        check(name, value.base, kind)
    elif hasattr(value, "data_ptr"):
        tensor = _base(value)
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            where = tensor.device if tensor.layout == torch.strided else tensor.layout
            raise TypeError(f"{name} is on {where}; the simulated GPU takes dense tensors on the CPU.")
        if tensor.is_complex():
            raise TypeError(f"{name} is {tensor.dtype}, which Triton has no type for: pass torch.view_as_real({name}).")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeError(f"{name}={value} does not fit into 64 bits.")
    elif isinstance(value, str | list | dict | set | bytes):
        raise TypeError(f"{name} is a {type(value).__name__}; a kernel takes tensors, numbers, tuples and constexprs.")


def type_of(argument) -> str:
    """The type of an argument as the compiler writes it, and what it knows of its divisibility."""
    name = jit.mangle_type(argument)
    if isinstance(argument, int) and not isinstance(argument, bool) and (argument == 1 or argument % 16 == 0):
        return f"{name}:{1 if argument == 1 else 16}"
    return f"{name}:1" if hasattr(argument, "data_ptr") and argument.data_ptr() % 16 else name


def _base(value):
    """The torch tensor under triton.reinterpret."""
    return value.base if isinstance(value, jit.TensorWrapper) else value


def tensors_of(name: str, value):
    """(name, tensor) of each tensor in an argument."""
    if isinstance(value, tuple):
        for n, part in enumerate(value):
            yield from tensors_of(f"{name}[{n}]", part)
    elif isinstance(value, TensorDescriptor):
        yield name, _base(value.base)
    elif hasattr(value, "data_ptr"):
        yield name, _base(value)
