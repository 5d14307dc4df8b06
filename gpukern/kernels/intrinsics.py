"""What Numba-CUDA has no name for: loads and stores of 16 bytes at once, and who runs this block, and when.

Each is an instruction of the card, put into the kernel as it stands. The simulated GPU knows the vector accesses (one
request of 16 bytes a thread); it has no SMs and no clock, so it refuses the other two.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

_FOUR_FLOATS = ir.VectorType(ir.FloatType(), 4)


def _address(context, builder, array_type, array, element):
    """The address of element `element`, counted in memory order, of a contiguous float32 array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [element]), _FOUR_FLOATS.as_pointer(addrspace=0))


def _require_floats(array) -> None:
    if not (isinstance(array, types.Array) and array.dtype == types.float32 and array.layout == "C"):
        raise TypeError(f"16-byte accesses are for contiguous float32 arrays, not for {array}")


@intrinsic
def load4(typingctx, array, element):
    """(array)[element : element + 4] of a contiguous float32 array, counted in memory order, in one load.

    element  a multiple of 4; the array begins at a multiple of 16 bytes. A card faults otherwise.
    """
    _require_floats(array)
    signature = types.UniTuple(types.float32, 4)(array, types.intp)

    def codegen(context, builder, signature, args):
        loaded = builder.load(_address(context, builder, signature.args[0], *args), align=16)
        parts = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), n)) for n in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return signature, codegen


@intrinsic
def store4(typingctx, array, element, values):
    """(array)[element : element + 4] = values, a tuple of four float32, in one store. Conditions as for load4."""
    _require_floats(array)
    signature = types.void(array, types.intp, types.UniTuple(types.float32, 4))

    def codegen(context, builder, signature, args):
        array, element, values = args
        vector = ir.Constant(_FOUR_FLOATS, ir.Undefined)
        for n in range(4):
            part = builder.extract_value(values, n)
            vector = builder.insert_element(vector, part, ir.Constant(ir.IntType(32), n))
        builder.store(vector, _address(context, builder, signature.args[0], array, element), align=16)
        return context.get_dummy_value()

    return signature, codegen


def _special_register(name: str, bits: int, result):
    """A function of no arguments that reads a register of the card."""

    @intrinsic
    def read(typingctx):
        def codegen(context, builder, signature, args):
            function = ir.FunctionType(ir.IntType(bits), [])
            letter = {32: "r", 64: "l"}[bits]
            text = ir.InlineAsm(function, f"mov.u{bits} $0, %{name};", f"={letter}", side_effect=True)
            return builder.call(text, [])

        return result(), codegen

    read.__name__ = name
    return read


load4.lockstep, store4.lockstep = "load4", "store4"  # by these names the simulated GPU knows them
smid = _special_register("smid", 32, types.uint32)  # the number of the SM that runs this block
globaltimer = _special_register("globaltimer", 64, types.uint64)  # nanoseconds; on Hopper it ticks every 32
