"""Numba's own compiler, stopped half-way: the typed form of a kernel, on a machine without a card.

Numba compiles a `@cuda.jit` function in three steps: Python bytecode becomes a control-flow graph of simple
statements (its IR); type inference gives every variable a type and every operation a signature; and the typed graph is
lowered to LLVM and PTX. The first two need no GPU. What they give is what the simulated GPU executes, so promotions,
widths, refusals (`TypingError`), frozen globals and the choice of branches that can never run are the compiler's own.
"""

import contextlib
import math
from dataclasses import dataclass

from numba.core.errors import NumbaError as CoreNumbaError
from numba.cuda import types, typing, utils
from numba.cuda.compiler import (
    CUDACompiler,
    CUDATranslateBytecode,
    DefaultPassBuilder,
    TranslateByteCode,
    compile_extra,
)
from numba.cuda.core import ir
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.core.errors import NumbaError
from numba.cuda.core.typed_passes import NopythonTypeInference, PreLowerStripPhis
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.flags import CUDAFlags

from gpukern import device
from gpukern.simulate.report import Refused


@dataclass
class Typed:
    """A function for one tuple of argument types.

    ir         Numba's IR: blocks of statements, each ending in a jump, a branch or a return
    typemap    name of a variable -> its type
    calltypes  expression or store -> its signature
    signature  the types of arguments and result
    """

    ir: ir.FunctionIR
    typemap: dict
    calltypes: dict
    signature: typing.Signature
    objectmode: bool = False  # Numba's dispatcher asks for this, and for an entry point
    entry_point: int | None = None

    def max_cooperative_grid_blocks(self, blockdim, dynsmemsize: int = 0) -> int:
        """The most blocks that the card holds at once, and that may synchronise their grid. blockdim: threads."""
        card = device.card()
        threads = math.prod(blockdim) if isinstance(blockdim, tuple | list) else blockdim
        return card.sms * min(card.blocks_per_sm, card.warps_per_sm // -(-threads // card.warp))

    @property
    def fndesc(self):
        """Numba asks for this name only where a function calls itself."""
        loc = self.ir.loc
        raise Refused("a function that calls itself", f"{loc.filename.rsplit('/', 1)[-1]}:{loc.line}")


@register_pass(mutates_CFG=False, analysis_only=True)
class _Stop(FunctionPass):
    """The end of our pipeline, where Numba would go on to make machine code: hand over what there is."""

    _name = "gpukern_stop"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        signature = typing.signature(state.return_type, *state.args)
        state.cr = Typed(state.func_ir, state.typemap, state.calltypes, signature)
        return False


class _Frontend(CUDACompiler):
    """Numba's CUDA pipeline up to and including type inference."""

    def define_pipelines(self):
        passes = PassManager("gpukern")
        for step, why in DefaultPassBuilder.define_untyped_pipeline(self.state).passes:
            passes.add_pass(CUDATranslateBytecode if step is TranslateByteCode else step, why)
        passes.add_pass(NopythonTypeInference, "type inference")
        passes.add_pass(PreLowerStripPhis, "phi nodes become assignments")
        passes.add_pass(_Stop, "stop before code generation")
        passes.finalize()
        return [passes]


@contextlib.contextmanager
def _clearly(function):
    """Where Numba's compiler fails on a construct by an exception that is no message, say so with the line."""
    try:
        yield
    except TypeError as error:
        if "Signature mismatch" in str(error):  # the kernel was called with too many arguments, or too few
            raise
        raise _refused(function, error) from error
    except (Refused, NumbaError, CoreNumbaError, SyntaxError, MemoryError):
        raise
    except Exception as error:
        raise _refused(function, error) from error


def _refused(function, error: Exception) -> Refused:
    code = function.__code__
    line = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
    return Refused(f"{code.co_name}, at which Numba's compiler fails ({type(error).__name__}: {error})", line)


def typed(function, argument_types: tuple, return_type=None) -> Typed:
    """`function` typed for `argument_types`. Raises Numba's TypingError as the real compiler does."""
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"  # no exception for a division by zero, as on the card
    flags.compute_capability = device.card().compute_capability
    with utils.numba_target_override(), _clearly(function):
        return compile_extra(
            typingctx=cuda_target.typing_context,
            targetctx=cuda_target.target_context,
            func=function,
            args=argument_types,
            return_type=return_type,
            flags=flags,
            locals={},
            pipeline_class=_Frontend,
        )


def typed_kernel(dispatcher: CUDADispatcher, argument_types: tuple) -> Typed:
    """As `typed`, for a kernel, which returns nothing."""
    return typed(dispatcher.py_func, argument_types, types.none)


def compile_device(self, args, return_type=None) -> Typed:
    """Stands in for CUDADispatcher.compile_device: type inference calls it where a kernel calls a device function."""
    if args not in self.overloads:
        with self._compiling_counter:
            self.overloads[args] = typed(self.py_func, args, return_type)
    return self.overloads[args]
