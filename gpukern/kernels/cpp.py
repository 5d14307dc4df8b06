"""CUDA C++: a kernel of a .cu file, compiled by NVRTC and launched by cuda.core, without nvcc.

NVRTC is NVIDIA's CUDA C++ compiler as a library: source text in, machine code out, in this process. It needs no card,
so a kernel is compiled for any card on any machine; only a launch needs one. cuda.core, NVIDIA's Python API for the
CUDA runtime, loads the code and launches it. Both come with `numba-cuda[cu13]`.

The kernels are templates, `template <typename T, int TILE> __global__ void matmul_kernel(...)`, and one instance is
named by its parameters, as C++ names it in `matmul_kernel<float, 16><<<grid, block>>>(...)`:

    _matmul_kernel = CppKernel(Path(__file__).with_name("matmul.cu"), "matmul_kernel")
    _matmul_kernel[torch.float32, 16](grid, block, a, w, out, M, N, K)
"""

import ctypes
import functools
import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from gpukern import device

# C++'s names of the types of tensors.
_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


class CppError(RuntimeError):
    """NVRTC refuses a kernel. words: what it says; line: "file.cu:12", where first, or "". The message has both."""

    def __init__(self, words: str, line: str = ""):
        super().__init__(f"{line}: {words}" if line else words)
        self.words, self.line = words, line


@dataclass(frozen=True)
class CppBinary:
    """One instance of a kernel, compiled for one compute capability.

    name    of the instance, as C++ writes it: "matmul_kernel<float, 16>"
    symbol  its name in the machine code
    ptx, cubin, log   the compiler's output, the assembler's, and what the assembler said: registers, spills
    code    the cuda.core.ObjectCode that a launch loads
    """

    name: str
    symbol: str
    ptx: str
    cubin: bytes
    log: str
    code: object


class CppKernel:
    """The `__global__` function template `name` of a .cu file; `kernel[parameters]` launches one instance of it.

    file  the source, which is read when an instance is first compiled
    name  of the function
    """

    def __init__(self, file: Path, name: str):
        self.file, self.name = Path(file), name
        self.compile = functools.cache(self._compile)
        self._loaded = functools.cache(self._load)

    def instance(self, parameters: tuple) -> str:
        """The instance as C++ writes it. parameters: dtypes, whole numbers and bools, in the template's order."""
        words = (str(p).lower() if isinstance(p, bool) else _TYPES.get(p, str(p)) for p in parameters)
        return f"{self.name}<{', '.join(words)}>"

    def __getitem__(self, parameters):
        """A function (grid, block, *arguments) that launches this instance on PyTorch's current stream.

        grid, block  blocks of the grid, threads of a block: tuples of up to three, x first
        arguments    tensors on the card or None for pointers, whole numbers for `long long`, floats for `float`
        Raises DeviceError where there is no card, CppError for what the compiler refuses.
        """
        parameters = parameters if isinstance(parameters, tuple) else (parameters,)
        return functools.partial(self._launch, parameters)

    def _launch(self, parameters: tuple, grid: tuple, block: tuple, *arguments) -> None:
        if device.simulated():
            raise device.DeviceError(
                f"{self.instance(parameters)} is CUDA C++, which needs a CUDA card: the simulated GPU runs Numba and "
                "Triton. gpukern.inspect.compiled shows what it is compiled to; choose another version to run here."
            )
        core = _cuda_core()
        (on,) = {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}
        with torch.cuda.device(on):
            stream = core.Stream.from_handle(torch.cuda.current_stream(on).cuda_stream)
            kernel = self._loaded(parameters, on.index)
            core.launch(stream, core.LaunchConfig(grid=grid, block=block), kernel, *map(_argument, arguments))

    def _load(self, parameters: tuple, index: int):
        """The instance as cuda.core launches it, loaded onto a card once."""
        _cuda_core().Device(index).set_current()
        made = self.compile(parameters, torch.cuda.get_device_capability(index))
        return made.code.get_kernel(made.name)

    def _compile(self, parameters: tuple, compute_capability: tuple[int, int]) -> CppBinary:
        """Compile one instance; kept, as `compile`. Raises CppError with file and line, DeviceError without NVRTC."""
        core, name, log = _cuda_core(), self.instance(parameters), io.StringIO()
        options = core.ProgramOptions(
            name=str(self.file),
            arch="sm_{}{}".format(*compute_capability),
            std="c++17",
            lineinfo=True,
            include_path=_include_folders(),
            ptxas_options=["-v"],
        )
        program = core.Program(self.file.read_text(), "c++", options)
        try:
            code = program.compile("cubin", name_expressions=(name,), logs=log)
            ptx = _ptx(program)
        except Exception as error:  # cuda.core's own kinds, which differ between its versions
            raise self._refusal(str(error)) from error
        finally:
            program.close()
            del program  # which the frames of an exception would keep, until cuda.core itself is gone
        return CppBinary(name, code.symbol_mapping[name].decode(), ptx, bytes(code.code), log.getvalue(), code)

    def _refusal(self, said: str) -> CppError:
        """NVRTC's complaint without the folder of the file; its line is the first that it names."""
        words = said.partition("compilation log:")[2].strip() or said
        words = words.replace(str(self.file), self.file.name)
        first, file, line, rest = re.match(r"(?s)((\S+)\((\d+)\): )?(.*)", words).group(1, 2, 3, 4)
        return CppError(rest, f"{file}:{line}") if first and file == self.file.name else CppError(words)


def _argument(value):
    """A kernel's argument as cuda.core passes it: it makes `long long` of an int, `double` of a float."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    return ctypes.c_float(value) if isinstance(value, float) else value


def _ptx(program) -> str:
    """The PTX of a program that was compiled to machine code. NVRTC keeps it; cuda.core gives one of the two."""
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = b" " * size
    (status,) = nvrtc.nvrtcGetPTX(program.handle, ptx)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CppError(f"NVRTC gives no PTX: {status.name}.")
    return ptx.decode().strip("\0\n")


@functools.cache
def _cuda_core():
    try:
        import cuda.core

        return cuda.core
    except ImportError as error:
        raise device.DeviceError(
            "CUDA C++ needs NVIDIA's cuda-core and NVRTC: pip install 'numba-cuda[cu13]' brings both."
        ) from error


@functools.cache
def _include_folders() -> list[str]:
    """Where cuda_fp16.h and cuda_bf16.h lie, and nv/target, which they include."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    if found[0] is None:
        raise device.DeviceError("the headers of the CUDA runtime are missing: pip install 'numba-cuda[cu13]'.")
    return [folder for folder in found if folder]
