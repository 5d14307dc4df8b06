"""Inside compiled kernels, in both languages and for several cards; what the compilers refuse; occupancy."""

import inspect as python_inspect
import linecache
import os
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numba import cuda, float32, float64, int8, void
from triton.language.extra import libdevice

from gpukern import device, inspect, kernels, simulate
from gpukern.inspect import numba_compiler, tools, triton_compiler
from gpukern.kernels.gelu import numba_ladder as gelu_numba
from gpukern.kernels.gelu import triton_ladder as gelu_triton
from gpukern.kernels.matmul.triton_ladder import _matmul_kernel
from gpukern.op import Op

ROWS = void(float32[::1], float32[::1])
POINTERS = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
SCALE = tl.constexpr(3.0)


@cuda.jit(device=True)
def twice(x):
    return x * float32(2)


@cuda.jit("float32(float32)", device=True)
def thrice(x):  # declared: Numba compiles it when it is decorated, and never again
    return x * float32(3)


@cuda.jit
def scale_rows(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = thrice(twice(x[i]))


@triton.jit
def double(x):
    return x + x


@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr = 256):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, double(x) * SCALE, mask=i < n)


@triton.jit
def turn(x_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out_ptr + i * N + j, tl.trans(tl.load(x_ptr + i * N + j)))


@triton.jit
def product(a_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    tl.store(out_ptr + m[:, None] * N + m[None, :], tl.dot(a, tl.trans(a)))


def line_of(function, text: str) -> str:
    """ "file.py:12" of the line of `function` that contains `text`."""
    lines, first = python_inspect.getsourcelines(function)
    return f"test_inspect.py:{first + next(n for n, line in enumerate(lines) if text in line)}"


# ---------------------------------------------------------------- Numba


def test_a_numba_kernel_has_registers_ptx_and_sass():
    made = inspect.compiled(scale_rows, "void(float32[::1], float32[::1])", "H200")
    assert (made.language, made.kernel, made.card.name) == ("numba", "scale_rows", "H200")
    assert 8 <= made.registers <= 32 and made.spills == 0 and made.local == 0 and made.shared == 0
    assert ".target sm_90a" in made.ptx and made.cubin[:4] == b"\x7fELF"
    assert "LDG" in made.sass and "STG" in made.sass and made.why_no_sass == ""
    assert f"registers        {made.registers}" in repr(made) and "compiled for H200" in repr(made)


def test_types_may_be_numbas_or_those_of_example_arguments_and_are_compiled_once():
    made = inspect.compiled(scale_rows, ROWS, "T4")
    assert ".target sm_75" in made.ptx
    for same in ((float32[::1], float32[::1]), [np.zeros(4, np.float32)] * 2, (torch.zeros(4), torch.zeros(4))):
        assert inspect.compiled(scale_rows, same, "T4") is made
    half = inspect.compiled(scale_rows, (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)), "A100")
    assert half is not made and "b16" in half.ptx


def test_compiling_leaves_the_simulated_gpu_as_it_was():
    before = {name: vars(numba_compiler.CUDADispatcher)[name] for name in ("compile_device", "get_call_template")}
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    simulate.run(scale_rows, 1, 4, x, out)
    stores = [twice.overloads, thrice.overloads]
    kept = [dict(store) for store in stores]
    inspect.compiled(scale_rows, ROWS, "A100")
    assert [twice.overloads, thrice.overloads] == stores and [dict(store) for store in stores] == kept
    assert {name: vars(numba_compiler.CUDADispatcher)[name] for name in before} == before
    out[:] = 0
    assert simulate.run(scale_rows, 1, 4, x, out).faults == []
    assert out.tolist() == [0, 6, 12, 18]


def test_shared_arrays_are_counted_where_they_come_to_lie():
    @cuda.jit
    def mixed(x, out):
        small, wide = cuda.shared.array(3, int8), cuda.shared.array(16, float64)
        i = cuda.threadIdx.x
        wide[i], small[i % 3] = x[i], i
        cuda.syncthreads()
        out[i] = wide[15 - i] + small[(i + 1) % 3]

    made = inspect.compiled(mixed, ROWS, "T4")
    assert 16 * 8 + 3 <= made.shared <= 16 * 8 + 8 and made.features["barriers"] == 1


def test_options_of_the_decorator_hold():
    def many(x, out):
        part = cuda.local.array(40, float32)
        for i in range(40):
            part[i] = x[i]
        total = float32(0)
        for i in range(40):
            for j in range(40):
                total += part[i] * part[j]
        cuda.atomic.add(out, 0, total)

    free, tight = cuda.jit(many), cuda.jit(max_registers=24)(many)
    free, tight = (inspect.compiled(kernel, ROWS, "A100") for kernel in (free, tight))
    assert free.registers > 24 and free.spills == 0
    assert tight.registers <= 24 and tight.spills > 0 and tight.local > 40 * 4
    assert tight.features["atomics"] == 1
    assert free.threads is None and free.max_threads <= 1024
    bounded = inspect.compiled(cuda.jit(launch_bounds=128)(many), ROWS, "A100")
    assert bounded.threads == bounded.max_threads == 128


def test_what_numba_refuses_comes_with_its_words_and_the_line():
    @cuda.jit
    def runtime_shape(x, out):
        part = cuda.shared.array(x.size, float32)
        out[0] = part[0]

    @cuda.jit
    def python_object(x, out):
        out[0] = {"a": 1}["b"].upper()

    @cuda.jit
    def returns(x, out):
        return x[0]

    @cuda.jit(device=True)
    def attribute(x):
        return x.nothing

    @cuda.jit
    def calls(x, out):
        out[0] = attribute(x[0])

    @cuda.jit
    def too_large(x, out):
        part = cuda.shared.array(20000, float32)
        part[cuda.threadIdx.x] = x[0]
        cuda.syncthreads()
        out[0] = part[5]

    for kernel, where, text, words in (
        (runtime_shape, runtime_shape, "shared.array", "must be a constant"),
        (python_object, python_object, "upper", "upper"),
        (returns, returns, "return x", "A kernel returns nothing"),
        (calls, attribute, "nothing", "Unknown attribute 'nothing' of type float32"),
        (too_large, too_large, "@cuda", "80,000 bytes of shared arrays; a block has 49,152"),
    ):
        with pytest.raises(inspect.CompileError, match=words) as refused:
            inspect.compiled(kernel, ROWS, "H200")
        assert refused.value.line == line_of(where.py_func, text)
        assert "Traceback" not in str(refused.value) and len(str(refused.value).splitlines()) <= 3
    assert isinstance(refused.value.__cause__, type(None))


def test_the_compilers_own_error_is_the_cause():
    @cuda.jit
    def adds(x, out):
        out[0] = x + "a"

    with pytest.raises(inspect.CompileError) as refused:
        inspect.compiled(adds, ROWS, "H200")
    assert "TypingError" in type(refused.value.__cause__).__name__


def test_without_an_assembler_there_is_ptx_and_the_reason(monkeypatch):
    monkeypatch.setattr(numba_compiler.driver, "_have_nvjitlink", lambda: False)
    monkeypatch.setattr(tools, "find", lambda name: [])

    @cuda.jit
    def copy(x, out):
        out[0] = x[0]

    copy.targetoptions["lto"] = False  # as Numba decides where nvJitLink is missing
    made = inspect.compiled(copy, ROWS, "A100")
    assert "st.global" in made.ptx and made.cubin is made.registers is made.spills is made.sass is None
    assert "no assembler" in made.why_no_sass and "no assembler" in repr(made) and made.max_threads is None


def test_ptxas_assembles_where_nvjitlink_is_missing(monkeypatch, tmp_path):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(
        "#!/bin/sh\n"
        "echo '8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads; Used 12 registers' >&2\n"
        'for last; do :; done\nprintf cubin > "$last"\n'
    )
    ptxas.chmod(0o755)
    monkeypatch.setattr(numba_compiler.driver, "_have_nvjitlink", lambda: False)
    monkeypatch.setattr(tools, "find", lambda name: [str(ptxas)] if name == "ptxas" else [])

    @cuda.jit
    def copy(x, out):
        out[0] = x[0]

    copy.targetoptions["lto"] = False  # as Numba decides where nvJitLink is missing
    made = inspect.compiled(copy, ROWS, "A100")
    assert (made.registers, made.local, made.spills, made.cubin) == (12, 8, 12, b"cubin")
    assert made.sass is None and "no nvdisasm" in made.why_no_sass


# ---------------------------------------------------------------- Triton


def test_a_triton_kernel_has_registers_ptx_and_sass():
    made = inspect.compiled(scale, POINTERS, "H200", BLOCK=1024, num_warps=8)
    assert (made.language, made.kernel, made.threads) == ("triton", "scale", 256)
    assert 8 <= made.registers <= 64 and made.spills == 0 and made.shared == 0
    assert ".target sm_90a" in made.ptx and made.cubin[:4] == b"\x7fELF" and "STG" in made.sass
    assert "0f40400000" in made.ptx  # 3.0, the global constexpr


def test_pointers_and_numbers_are_specialised_as_a_launch_does():
    x = torch.zeros(1025)
    even = inspect.compiled(scale, (x, x, 1024), "A100", BLOCK=1024)
    odd_pointer = inspect.compiled(scale, (x[1:], x, 1024), "A100", BLOCK=1024)
    odd_number = inspect.compiled(scale, (x, x, 1025), "A100", BLOCK=1024)
    assert even.features["vector_loads"] == 2 and even.features["vector_stores"] == 2
    assert odd_pointer.features["vector_loads"] == 0 and odd_pointer.features["vector_stores"] == 2
    assert odd_number.features["vector_loads"] == 0
    assert inspect.compiled(scale, {**POINTERS, "n": "i32:16"}, "A100", BLOCK=1024).ptx == even.ptx
    assert inspect.compiled(scale, {**POINTERS, "x_ptr": "*fp32:1", "n": "i32:16"}, "A100", BLOCK=1024).ptx == (
        odd_pointer.ptx
    )
    one = inspect.compiled(scale, {**POINTERS, "n": "i32:1"}, "A100", BLOCK=1024)
    assert one.ptx == inspect.compiled(scale, (x.numpy(), x.numpy(), 1), "A100", BLOCK=1024).ptx
    assert one.ptx.count(".param .u32") < even.ptx.count(".param .u32")  # compiled in, and no parameter any more


def test_a_matmul_multiplies_with_what_its_card_has():
    a = torch.zeros(512, 512, dtype=torch.float16)
    arguments = (a, a, None, None, a, 512, 512, 512, 512, 1, 512, 1, 0, 0)
    meta = {"GELU": False, "BM": 64, "BN": 64, "BK": 32, "num_warps": 4}
    made = {card: inspect.compiled(_matmul_kernel, arguments, card, **meta) for card in ("H200", "A100", "T4")}
    assert made["H200"].features["wgmma"] > 0 and made["H200"].features["mma"] == 0
    assert "HGMMA" in made["H200"].sass
    assert made["A100"].features["mma"] > 0 and made["A100"].features["wgmma"] == 0
    assert made["A100"].features["async_copies"] > 0 and "HMMA" in made["A100"].sass
    assert made["T4"].features["async_copies"] == 0 and made["T4"].spills > 0 and made["T4"].registers == 255
    assert inspect.compiled(_matmul_kernel, arguments, "H200", **meta) is made["H200"]
    assert made["H200"].shared > 64 * 32 * 2 * 2


def test_a_descriptor_is_copied_by_the_engine_where_a_card_has_one():
    @triton.jit
    def copy(x_ptr, out_ptr):
        x = tl.make_tensor_descriptor(x_ptr, [64, 64], [64, 1], [32, 32])
        out = tl.make_tensor_descriptor(out_ptr, [64, 64], [64, 1], [32, 32])
        out.store([0, 0], x.load([32, 0]))

    pointers = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    assert inspect.compiled(copy, pointers, "H200").features["tma"] == 2
    assert inspect.compiled(copy, pointers, "A100").features["tma"] == 0


def test_kernels_of_a_function_bring_what_they_use():
    width, factor = tl.constexpr(64), tl.constexpr(2.5)

    @triton.jit
    def inner(x):
        return libdevice.tanh(x) * factor

    @triton.jit
    def outer(x_ptr, out_ptr):
        i = tl.arange(0, width)
        x = gelu_triton.gelu_tile(inner(tl.load(x_ptr + i)))
        tl.store(out_ptr + i, x + tl.sum(x))

    made = inspect.compiled(outer, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, "H200")
    assert "ex2.approx" in made.ptx and "0f40200000" in made.ptx  # an exponential of tanh, and 2.5
    factor = tl.constexpr(4.0)  # the variable of the enclosing function: another kernel now
    assert inspect.compiled(outer, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, "H200").ptx != made.ptx


def test_a_kernel_of_a_notebooks_cell_compiles_and_its_line_is_told():
    cell = "tile = tl.constexpr(24)\n\n@triton.jit\ndef fill(x_ptr):\n    tl.store(x_ptr + tl.arange(0, tile), 1.0)\n"
    file = "/tmp/ipykernel_1/2.py"  # as IPython calls a cell, which is no file
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    names = {"triton": triton, "tl": tl, "__name__": "__main__"}
    exec(compile(cell, file, "exec"), names)
    with pytest.raises(inspect.CompileError, match=r"^2\.py:5: arange's range must be a power of 2\n    tl\.store"):
        inspect.compiled(names["fill"], {"x_ptr": "*fp32"}, "A100")
    names["tile"] = tl.constexpr(32)
    assert inspect.compiled(names["fill"], {"x_ptr": "*fp32"}, "A100").registers


def test_autotuned_kernels_and_heuristics_are_compiled_as_they_are_launched():
    tuned = triton.autotune([triton.Config({"BLOCK": 512}, num_warps=2), triton.Config({"BLOCK": 64})], key=["n"])(
        scale
    )
    assert inspect.compiled(tuned, POINTERS, "A100").threads == 64
    chosen = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})(scale)
    x = torch.zeros(500)
    assert (
        inspect.compiled(chosen, (x, x, 500), "A100").ptx == inspect.compiled(scale, (x, x, 500), "A100", BLOCK=512).ptx
    )


def test_what_triton_refuses_comes_with_its_words_and_the_line():
    @triton.jit
    def inner(x):
        return x + undefined  # noqa: F821

    @triton.jit
    def calls(x_ptr, out_ptr, n):
        tl.store(out_ptr, inner(tl.load(x_ptr)))

    @triton.jit
    def raises(x_ptr, out_ptr, n):
        raise ValueError

    @triton.jit
    def asks(a_ptr, out_ptr, N: tl.constexpr):
        n = tl.arange(0, N)
        a = tl.load(a_ptr + n[:, None] * N + n[None, :])
        tl.store(out_ptr + n[:, None] * N + n[None, :], tl.dot(a, a, tl.zeros((N, N), tl.int32)))

    @triton.jit
    def gives(x_ptr, out_ptr, n):
        return tl.load(x_ptr)

    array, tile = {"a_ptr": "*fp16", "out_ptr": "*fp32"}, {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    for kernel, types, meta, where, text, words in (
        (scale, POINTERS, {"BLOCK": 48}, scale, "arange", "power of 2"),
        (product, array, {"N": 16, "K": 8}, product, "tl.dot", "K >= 16"),
        (
            turn,
            tile,
            {"N": 256, "num_warps": 16},
            turn,
            "@triton",
            "wants 262,144 bytes of shared memory a block; T4 has",
        ),
        (calls, POINTERS, {}, inner, "undefined", ": undefined is not defined"),
        (raises, POINTERS, {}, raises, "ValueError", "unsupported AST node type: Raise"),
        (scale, POINTERS, {"num_warps": 3}, scale, "@triton", "num_warps must be a power of 2"),
        (scale, POINTERS, {"TILE": 3}, scale, "@triton", "TILE was specified but unrecognised"),
        (scale, POINTERS, {"num_warps": 64}, scale, "@triton", "2048 threads; T4 allows 1024"),
        (scale, {**POINTERS, "x_ptr": "*fp33"}, {}, scale, "@triton", "Triton knows no fp33"),
        (asks, array, {"N": 32}, asks, "tl.dot", r": assert acc.type.shape == ret_ty.shape"),
        (gives, POINTERS, {}, gives, "@triton", "A kernel returns none"),
    ):
        with pytest.raises(inspect.CompileError, match=words) as refused:
            inspect.compiled(kernel, types, "T4", **meta)
        assert refused.value.line == (line_of(where.fn, text) if where else "")
        assert "Traceback" not in str(refused.value)


def test_a_kernel_may_not_use_python_objects_that_cannot_be_brought():
    class Thing:
        pass

    thing, layer = Thing(), torch.nn.Linear(1, 1)

    @triton.jit
    def uses(x_ptr):
        tl.store(x_ptr, thing)

    @triton.jit
    def calls(x_ptr):
        tl.store(x_ptr, layer)

    for kernel, words in (
        (uses, "Cannot access global variable thing"),
        (calls, "Unsupported function referenced: Linear"),
    ):
        with pytest.raises(inspect.CompileError, match=words):
            inspect.compiled(kernel, {"x_ptr": "*fp32"}, "A100")


def test_a_worker_that_ends_or_hangs_is_told_and_replaced(monkeypatch):
    inspect.compiled(scale, POINTERS, "A100", BLOCK=32)
    triton_compiler._worker.process.kill()
    triton_compiler._worker.process.wait()
    with pytest.raises(inspect.CompileError, match="ended before it had an answer"):
        inspect.compiled(scale, POINTERS, "A100", BLOCK=64)
    inspect.compiled(scale, POINTERS, "A100", BLOCK=64)
    process = triton_compiler._worker.process
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(triton_compiler, "PATIENCE", 0.1)
    with pytest.raises(inspect.CompileError, match=r"did not answer within 0\.1 s"):
        inspect.compiled(scale, POINTERS, "A100", BLOCK=128)
    assert process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert inspect.compiled(scale, POINTERS, "A100", BLOCK=128).registers


def test_an_interrupted_compilation_leaves_no_answer_behind(monkeypatch):
    def interrupt(pipe, timeout):
        raise KeyboardInterrupt

    wide = inspect.compiled(scale, POINTERS, "A100", BLOCK=512).ptx
    monkeypatch.setattr(triton_compiler.Connection, "poll", interrupt)
    with pytest.raises(KeyboardInterrupt):
        inspect.compiled(scale, POINTERS, "A100", BLOCK=16)
    monkeypatch.undo()
    assert inspect.compiled(scale, POINTERS, "H200", BLOCK=512).ptx != wide
    assert inspect.compiled(scale, POINTERS, "H200", BLOCK=512).card.name == "H200"


# ---------------------------------------------------------------- both


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(device.DeviceError, match="no facts about a card called 'GTX'"):
        inspect.compiled(scale, POINTERS, "GTX")
    with pytest.raises(TypeError, match="is no kernel"):
        inspect.compiled(print, ROWS, "H200")
    with pytest.raises(TypeError, match="takes 2 arguments; the signature has 1"):
        inspect.compiled(scale_rows, "void(float32[:])", "H200")
    with pytest.raises(TypeError, match="is no signature of Numba"):
        inspect.compiled(scale_rows, "void(float33[:])", "H200")
    with pytest.raises(TypeError, match="only Triton has meta"):
        inspect.compiled(scale_rows, ROWS, "H200", num_warps=4)
    with pytest.raises(TypeError, match="no type or value for n"):
        inspect.compiled(scale, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, "H200")
    with pytest.raises(TypeError, match="no parameter y_ptr"):
        inspect.compiled(scale, {**POINTERS, "y_ptr": "*fp32"}, "H200")
    with pytest.raises(TypeError, match="is no signature of a Triton kernel"):
        inspect.compiled(scale, "void(float32[:])", "H200")


def test_importing_inspect_imports_no_compiler():
    code = """
        import sys, types
        sys.modules["gpukern"] = types.ModuleType("gpukern")  # without what importing gpukern decides
        sys.modules["gpukern"].__path__ = ["gpukern"]
        import gpukern.inspect
        assert gpukern.inspect.occupancy(256, 32, 0, 'H200').blocks == 8
        assert not {"numba", "triton"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.slow
def test_on_a_machine_with_a_card_the_same_is_compiled(tmp_path):
    """Where Triton compiles and Numba is as it came, as with a card; PyTorch says that there is one."""
    (tmp_path / "there.py").write_text(
        textwrap.dedent("""
        import torch
        torch.cuda.is_available = lambda: True
        from gpukern import device, inspect
        from gpukern.kernels.gelu import numba_ladder, triton_ladder
        assert device.mode() == "measured"
        arguments = torch.zeros(64), torch.zeros(64)
        print(inspect.compiled(triton_ladder._gelu_kernel, (*arguments, 64), "A100", BN=64).ptx)
        print("----")
        print(inspect.compiled(numba_ladder._gelu_kernel, arguments, "T4").ptx)
        """)
    )
    environment = {name: v for name, v in os.environ.items() if not name.startswith(("TRITON_", "NUMBA_"))}
    environment |= {"GPUKERN_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(["."] + sys.path)}
    command = [sys.executable, str(tmp_path / "there.py")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    arguments = torch.zeros(64), torch.zeros(64)
    here = [
        inspect.compiled(gelu_triton._gelu_kernel, (*arguments, 64), "A100", BN=64).ptx,
        inspect.compiled(gelu_numba._gelu_kernel, arguments, "T4").ptx,
    ]
    names = r"_Z\w+"  # Numba's hold the number of functions compiled before
    there, here = ([re.sub(names, "", ptx).strip() for ptx in both] for both in (said.split("----\n"), here))
    assert there == here


OPS = [op for op in vars(kernels).values() if isinstance(op, Op)]


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_kernel_of_the_library_compiles_for_every_card(op, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    from gpukern.simulate.lockstep import launch

    launches = []
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *args, grid, warmup, **meta: launches.append((kernel, args, meta))
    )
    monkeypatch.setattr(
        launch, "run", lambda kernel, grid, block, args, **_: launches.append((kernel, args, {})) or simulate.Report()
    )
    for name, version in op.versions.items():
        if version.language in ("numba", "triton"):  # test_cpp.py compiles the others
            before = len(launches)
            version(**op.draw(op.shapes[0], op.dtypes[min(1, len(op.dtypes) - 1)], torch.device("cpu")))
            assert len(launches) > before, name
    for kernel, args, meta in launches:
        for card in ("H200", "T4"):
            made = inspect.compiled(kernel, args, card, **meta)
            assert 0 < made.registers <= 255 and made.sass
            assert inspect.occupancy(made.threads or 32, made.registers, made.shared, card).blocks >= 1


# ---------------------------------------------------------------- occupancy


# (card, threads, registers, bytes of shared memory): blocks, by cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13.0
# for an SM that gives all it can to shared memory.
OCCUPANCY = {
    ("H200", 256, 32, 0): (8, "threads"),
    ("H200", 32, 16, 0): (32, "blocks"),
    ("H200", 33, 16, 0): (32, "threads"),
    ("H200", 1024, 32, 0): (2, "threads"),
    ("H200", 1024, 33, 0): (1, "registers"),
    ("H200", 1024, 64, 0): (1, "registers"),
    ("H200", 256, 65, 0): (3, "registers"),
    ("H200", 128, 255, 0): (2, "registers"),
    ("H200", 64, 32, 227 * 1024): (1, "shared memory"),
    ("H200", 64, 32, 113 * 1024): (2, "shared memory"),
    ("H200", 64, 32, 113 * 1024 + 1): (1, "shared memory"),
    ("A100", 256, 32, 40 * 1024): (4, "shared memory"),
    ("A100", 256, 32, 40 * 1024 + 1): (3, "shared memory"),
    ("T4", 256, 32, 16 * 1024): (4, "threads"),
    ("T4", 128, 32, 16 * 1024 + 1): (3, "shared memory"),
    ("T4", 1024, 64, 0): (1, "threads"),
    ("RTX 4090", 1024, 32, 0): (1, "threads"),
    ("RTX 4090", 512, 40, 0): (3, "threads"),
    ("RTX 4090", 512, 41, 0): (2, "registers"),
}


@pytest.mark.parametrize("asked", OCCUPANCY, ids=str)
def test_occupancy_is_nvidias(asked):
    card, threads, registers, shared = asked
    blocks, limited_by = OCCUPANCY[asked]
    found = inspect.occupancy(threads, registers, shared, card)
    warps = blocks * -(-threads // 32)
    assert found == inspect.Occupancy(blocks, warps, warps / device.card(card).warps_per_sm, limited_by)


def test_registers_that_nobody_knows_limit_nothing():
    assert inspect.occupancy(256, None, 0, "H200").fraction == 1.0


@pytest.mark.parametrize(
    "threads, registers, shared, words",
    [
        (1024, 65, 0, "Use at most 896 threads"),
        (1025, 16, 0, "1025 threads"),
        (256, 256, 0, "256 registers a thread"),
        (256, 32, 227 * 1024 + 1, "shared memory"),
    ],
)
def test_what_cannot_be_launched_has_no_occupancy(threads, registers, shared, words):
    with pytest.raises(device.LimitError, match=words):
        inspect.occupancy(threads, registers, shared, "H200")


def test_occupancy_is_of_whole_numbers():
    for threads, registers, shared in ((128.0, 32, 0), ("128", 32, 0), (128, 32.5, 0), (128, 32, None)):
        with pytest.raises(TypeError, match="it is a whole number"):
            inspect.occupancy(threads, registers, shared, "T4")
    with pytest.raises(device.LimitError, match="-1 bytes"):
        inspect.occupancy(128, 32, -1, "T4")


def test_a_kernel_of_no_module_compiles(tmp_path):
    source = "@triton.jit\ndef kernel(x_ptr):\n    tl.store(x_ptr, 2.0)\n"
    name = str(tmp_path / "cell.py")
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    cell = {"triton": triton, "tl": tl}
    exec(compile(source, name, "exec"), cell)
    assert inspect.compiled(cell["kernel"], {"x_ptr": "*fp32"}, "T4").registers > 0
