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
    """

    name: str
    symbol: str
    ptx: str
    cubin: bytes
    log: str


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
        from cuda import core

        (on,) = {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}
        with torch.cuda.device(on):
            handle = torch.cuda.current_stream(on).cuda_stream  # 0 is CUDA's default stream
            stream = core.Stream.from_handle(handle) if handle else core.Device(on.index).default_stream
            kernel = self._loaded(parameters, on.index)
            core.launch(stream, core.LaunchConfig(grid=grid, block=block), kernel, *map(_argument, arguments))

    def _load(self, parameters: tuple, index: int):
        """The instance as cuda.core launches it, loaded onto a card once."""
        from cuda import core

        core.Device(index).set_current()
        made = self.compile(parameters, torch.cuda.get_device_capability(index))
        return core.ObjectCode.from_cubin(made.cubin).get_kernel(made.symbol)

    def _compile(self, parameters: tuple, compute_capability: tuple[int, int]) -> CppBinary:
        """Compile one instance; kept, as `compile`. Raises CppError with file and line, DeviceError without NVRTC."""
        nvrtc, name = _nvrtc(), self.instance(parameters)
        options = [
            "--gpu-architecture=sm_{}{}".format(*compute_capability),
            "--std=c++17",
            "--generate-line-info",
            "--ptxas-options=-v",
            "--no-cache",  # what comes out of the cache has no log, which says how many registers it takes
            *(f"--include-path={folder}" for folder in _include_folders()),
        ]
        program = _done(nvrtc.nvrtcCreateProgram(self.file.read_bytes(), str(self.file).encode(), 0, [], []))
        try:
            _done(nvrtc.nvrtcAddNameExpression(program, name.encode()))
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            log = _text(program, "ProgramLog").decode(errors="replace").strip("\0\n")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise self._refusal(log or status.name)
            symbol = _done(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode()
            return CppBinary(name, symbol, _text(program, "PTX").decode().strip("\0\n"), _text(program, "CUBIN"), log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _refusal(self, said: str) -> CppError:
        """NVRTC's complaint without the folder of the file; its line is the first that it names."""
        words = said.replace(str(self.file), self.file.name)
        first, file, line, rest = re.match(r"(?s)((\S+)\((\d+)\): )?(.*)", words).group(1, 2, 3, 4)
        return CppError(rest, f"{file}:{line}") if first and file == self.file.name else CppError(words)


def _argument(value):
    """A kernel's argument as cuda.core passes it: it makes `long long` of an int, `double` of a float."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    return ctypes.c_float(value) if isinstance(value, float) else value


def _done(answer: tuple):
    """What a call of NVRTC gave back; raises CppError if it failed."""
    status, *result = answer
    if status.value != 0:
        raise CppError(f"NVRTC: {status.name}.")
    return result[0] if result else None


def _text(program, what: str) -> bytes:
    """PTX, CUBIN or ProgramLog of a compiled program."""
    nvrtc = _nvrtc()
    text = b" " * _done(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    _done(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        return nvrtc
    except ImportError as error:
        raise device.DeviceError("CUDA C++ needs NVRTC: pip install 'numba-cuda[cu13]' brings it.") from error


@functools.cache
def _include_folders() -> list[str]:
    """Where cuda_fp16.h and cuda_bf16.h lie, and nv/target, which they include."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    if found[0] is None:
        raise device.DeviceError("the headers of the CUDA runtime are missing: pip install 'numba-cuda[cu13]'.")
    return [folder for folder in found if folder]
