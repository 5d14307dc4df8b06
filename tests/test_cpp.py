"""CUDA C++ and CUTLASS: compiled on any machine, run on a card only: there test_kernels.py runs them on all shapes."""

import importlib
import importlib.util
import math
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from gpukern import device, inspect
from gpukern.kernels import OPS, cpp
from gpukern.kernels.cpp import CppKernel
from gpukern.measure import poisoned
from gpukern.op import FLOATS, InputError, error

ROOT = Path(__file__).parent.parent
DEVICE = device.torch_device()
NEEDS_CUTLASS = "needs CUTLASS, an extra of the course"  # as conftest.py allows it
CPP = [(op, name) for op in OPS.values() for name, version in op.versions.items() if version.language == "cuda"]


def kernel_of(op, name) -> CppKernel:
    """The CppKernel beside a version's launcher."""
    module = sys.modules[op.versions[name].function.__module__]
    (kernel,) = (value for value in vars(module).values() if isinstance(value, CppKernel))
    return kernel


def instance_of(op, name, dtype, monkeypatch) -> tuple:
    """The parameters of the template that the launcher chooses, and its grid, block and arguments."""
    launched = []
    shape = {"N": 37, "M": 33, "K": 7, "B": 1, "T": 2, "C": 5, "bias": 1, "gelu": 1, "residual": 1}
    monkeypatch.setattr(CppKernel, "_launch", lambda *arguments: launched.append(arguments))
    op.versions[name](**op.draw(shape, dtype, DEVICE))
    ((kernel, parameters, grid, block, *arguments),) = launched
    assert kernel is kernel_of(op, name)
    return parameters, grid, block, arguments


def test_the_first_kernel_a_product_and_a_stage_are_written_in_cpp():
    assert {op.name for op, _ in CPP} >= {"vector_add", "matmul", "layernorm"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op, name", CPP, ids=lambda value: getattr(value, "name", value))
def test_compiles_for_every_card(op, name, dtype, monkeypatch):
    parameters, _, block, arguments = instance_of(op, name, dtype, monkeypatch)
    for card in device.CARDS if dtype == torch.bfloat16 else ["H200"]:
        made = inspect.compiled(kernel_of(op, name), parameters, card)
        assert (made.language, made.card.name) == ("cuda", card)
        assert ".target sm_{}{}".format(*made.card.compute_capability) in made.ptx
        assert made.registers, made.why_no_cubin
        assert 0 < made.registers <= 255 and made.local <= 16
        assert math.prod(block) <= made.max_threads
        assert len(arguments) == len(re.findall(r"\.param \.[a-z]\d+", made.ptx)), "the launcher's arguments"
        assert not re.search(r"\b(add|mul|fma|sub)[.\w]*\.(b?f16|f64)", made.ptx), "arithmetic is in float32"
        assert len(re.findall(r"\bst\.global", made.ptx)) >= 1 and "cvt.rn.f16.f64" not in made.ptx


def test_what_the_compiler_made_of_them():
    matmul, layernorm = (kernel_of(OPS[name], "cuda_cpp") for name in ("matmul", "layernorm"))
    tiled = inspect.compiled(matmul, (torch.float32, 16, 32, 8, False), "H200")
    assert "HFMA" not in tiled.sass and tiled.sass.count("FFMA") >= 8
    assert tiled.threads == 16 * 32 and tiled.features["barriers"] == 2
    assert tiled.ptx.count("fma.rn.f32") == 8, "the loop over BK is unrolled"
    assert tiled.shared == OPS["matmul"].versions["cuda_cpp"].shared_bytes(
        {"BM": 16, "BN": 32, "BK": 8}, dtype=torch.float32
    )
    assert "ex2" in inspect.compiled(matmul, (torch.float32, 16, 16, 16, True), "H200").ptx
    shuffled = inspect.compiled(layernorm, (torch.float32,), "H200")
    assert shuffled.ptx.count("shfl.sync.bfly") == 2 * 5, "two sums in five rounds each"
    assert shuffled.shared == 0 and shuffled.features["barriers"] == 0


@pytest.mark.parametrize("op, name", CPP, ids=lambda value: getattr(value, "name", value))
def test_a_grid_covers_the_output(op, name, monkeypatch):
    _, grid, block, _ = instance_of(op, name, torch.float32, monkeypatch)
    covered = {"vector_add": (37,), "matmul": (37, 33), "layernorm": (2 * 32,)}[op.name]  # a warp for each of 2 rows
    across = {"matmul": grid[::-1]}.get(op.name, grid)
    for n, blocks, threads in zip(covered, across, block, strict=True):
        assert blocks * threads >= n > (blocks - 1) * threads


@pytest.mark.parametrize("op, name", CPP, ids=lambda value: getattr(value, "name", value))
def test_without_a_card_it_says_what_it_needs(op, name, monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    assert op.versions[name].needs_card
    with pytest.raises(device.DeviceError, match=f"{op.name}_kernel<float.*needs a CUDA card.*inspect.compiled"):
        op.versions[name](**op.draw(op.shapes[0], torch.float32, torch.device("cpu")))
    assert op.versions[name](**op.draw(op.shapes[-1], torch.float32, torch.device("cpu"))).numel() == 0


def test_arguments_as_cuda_core_takes_them():
    x = torch.ones(3)
    assert cpp._argument(x) == x.data_ptr() and cpp._argument(None) == 0 and cpp._argument(1 << 40) == 1 << 40
    assert cpp._argument(0.1).value == pytest.approx(0.1) and type(cpp._argument(0.1)).__name__ == "c_float"


SAXPY = """template <typename T, bool TWICE>
__global__ void saxpy(float a, const T* x, T* y, long long N) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) y[i] += (TWICE ? 2 : 1) * a * x[i];
}
"""


def test_a_kernel_of_ones_own_and_its_errors(tmp_path):
    file = tmp_path / "saxpy.cu"
    file.write_text(SAXPY)
    kernel = CppKernel(file, "saxpy")
    assert kernel.instance((torch.float32, True)) == "saxpy<float, true>"
    assert inspect.compiled(kernel, (torch.float32, True), "A100").kernel == "saxpy<float, true>"

    file.write_text(SAXPY.replace("a * x[i]", "b * x[i]"))
    with pytest.raises(inspect.CompileError, match=r'^saxpy\.cu:4: error: identifier "b" is undefined') as refused:
        inspect.compiled(CppKernel(file, "saxpy"), (torch.float32, False), "A100")
    assert refused.value.line == "saxpy.cu:4" and "y[i] += " in str(refused.value)
    with pytest.raises(cpp.CppError, match=r"^saxpy\.cu:4: "):
        CppKernel(file, "saxpy").compile((torch.float32, False), (9, 0))
    with pytest.raises(inspect.CompileError, match="which instance of function template"):
        inspect.compiled(kernel, (1, 2, 3), "A100")
    with pytest.raises(TypeError, match="template's parameters"):
        inspect.compiled(kernel, "void(float32[:])", "A100")
    with pytest.raises(TypeError, match="num_warps"):
        inspect.compiled(kernel, (torch.float32, True), "A100", num_warps=4)


def test_an_installation_without_nvrtc_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(device.DeviceError, match=r"pip install 'numba-cuda\[cu13\]'"):
        CppKernel(tmp_path / "x.cu", "x").compile((1,), (9, 0))


def test_the_sources_are_installed_with_the_package():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gpukern"]
    for op, name in CPP:
        source = kernel_of(op, name).file
        assert source.suffix == ".cu" and any(source in (ROOT / "gpukern").glob(pattern) for pattern in files)


# ---- CUTLASS

CUTLASS = OPS["matmul"].versions["cutlass"]


@pytest.fixture
def cutlass_ladder():
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip(NEEDS_CUTLASS)
    return importlib.import_module("gpukern.kernels.matmul.cutlass_ladder")


def test_where_cutlass_is_missing_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.delitem(sys.modules, "gpukern.kernels.matmul.cutlass_ladder", raising=False)
    with pytest.raises(ImportError, match=r"pip install nvidia-cutlass-dsl.*\[cutlass\]"):
        CUTLASS(torch.ones(8, 8), torch.ones(8, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(True, True), (True, False), (False, True)], ids=str)
def test_cutlass_compiles_to_tensor_cores_fed_by_the_copy_engine(order, dtype, cutlass_ladder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is kept is written there
    keep = cutlass_ladder.cute.KeepPTX(True)
    made = cutlass_ladder._compiled(dtype, (128, 128, 64), 4, *order, (True, True, True), keep)
    products, copies = (made.__ptx__.count(word) for word in ("wgmma.mma_async", "cp.async.bulk.tensor"))
    assert products == 64 // 16, "16 columns at a time"
    assert copies == sum(1 if along_k else 2 for along_k in (order[0], not order[1])), "boxes of 64 columns at most"
    assert ".local" not in made.__ptx__


SHAPES = (*OPS["matmul"].shapes, {"M": 129, "N": 264, "K": 200, "bias": 1, "gelu": 1, "residual": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [{}, {"BM": 64, "BN": 64, "BK": 32, "stages": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cutlass_agrees_with_the_reference(shape, dtype, tile, cutlass_ladder):
    inputs = OPS["matmul"].draw(shape, dtype, DEVICE)
    with poisoned():
        out = CUTLASS(**inputs, **tile)
    assert error(out, OPS["matmul"].reference(**inputs)) <= OPS["matmul"].tolerance[dtype]


@pytest.mark.gpu
def test_cutlass_takes_matrices_as_they_lie_in_memory(cutlass_ladder):
    wide = torch.randn(300, 400, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(64, 72, device=DEVICE, dtype=torch.bfloat16)
    for a in (
        wide[:70, :64],
        wide[3:73, 5:69],
        wide.T[:70, :64],
        wide[::2, ::3][:70, :64],
        wide[:1, :64].expand(70, 64),
    ):
        for b in (w, w.T[:64, :60], w.T.contiguous()[:64, :60]):
            assert error(CUTLASS(a, b), a.double() @ b.double()) <= OPS["matmul"].tolerance[torch.bfloat16]


def test_cutlass_refuses_what_it_cannot_compute(cutlass_ladder):
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(InputError, match="float32; supported are float16, bfloat16"):
        CUTLASS(a.float(), a.float())
    for tile, names in (
        ({"BM": 32}, "BM=32"),
        ({"BN": 512}, "BN=512"),
        ({"BK": 16}, "BK=16"),
        ({"stages": 1}, "stages=1"),
    ):
        with pytest.raises(InputError, match=names):
            CUTLASS(a, a, **tile)
    with pytest.raises(device.LimitError, match="shared memory"):
        CUTLASS(a, a, stages=8)
    assert CUTLASS(a[:0], a).shape == (0, 16)


def test_cutlass_without_a_card_says_what_it_needs(cutlass_ladder, monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    with pytest.raises(device.DeviceError, match=r"compute capability 9\.0"):
        CUTLASS(a, a)
