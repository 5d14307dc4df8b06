"""Triton's language on the simulated GPU: each part means what it means to a compiler and a card, or is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from gpukern import device, simulate

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.cuda.libdevice import tanh  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

pytestmark = pytest.mark.skipif(not device.simulated(), reason="the simulated GPU is off where there is a card")

WIDTH = tl.constexpr(8)


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# Launching


def configurations(*blocks, **more):
    return [triton.Config({"BLOCK": block}, **more) for block in blocks]


def test_autotune_takes_the_first_configuration_that_the_card_takes():
    @triton.autotune([*configurations(16, num_warps=64), *configurations(32, 64, num_warps=2)], key=["n"])
    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, BLOCK, mask=i < n)

    x = torch.zeros(40)
    kernel[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, 40)
    assert x.tolist() == [32] * 40
    assert "BLOCK: 32" in simulate.last().config and simulate.last().block == (64, 1, 1)
    report = simulate.run(kernel, lambda meta: (triton.cdiv(40, meta["BLOCK"]),), None, x, 40)
    assert report.grid == (2, 1, 1) and "BLOCK: 32" in report.config


def test_autotune_prunes_resets_restores_and_calls_hooks():
    called = []

    def hook(arguments):
        called.append(arguments["BLOCK"])

    def prune(configs, arguments, **_):
        return [c for c in configs if c.kwargs["BLOCK"] > arguments["n"]]

    @triton.autotune(
        configurations(16, 64, 128, pre_hook=hook),
        key=["n"],
        prune_configs_by={"early_config_prune": prune},
        reset_to_zero=["out_ptr"],
    )
    @triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
    @triton.jit
    def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        i = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i) if EVEN else tl.load(x_ptr + i, mask=i < n, other=0.0)
        tl.atomic_add(out_ptr, tl.sum(x))

    out = torch.full((1,), 5.0)
    kernel[(1,)](torch.ones(40), out, 40)
    assert called == [64] and out.item() == 40
    kernel[(1,)](torch.ones(40), out, 40)  # the key is known now: nothing is reset, on a card as here
    assert out.item() == 80


def test_heuristics_around_autotune():
    @triton.heuristics({"TWICE": lambda arguments: 2 * arguments["n"]})
    @triton.autotune(configurations(16, 32), key=[])
    @triton.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, BLOCK), TWICE)

    x = torch.zeros(16)
    kernel[(1,)](x, 3)
    assert x.tolist() == [6] * 16


def make_kernel(scale, width):
    @triton.jit
    def twice(x):
        return scale * x

    @triton.jit
    def kernel(x_ptr):
        i = tl.arange(0, width)
        tl.store(x_ptr + i, twice(tl.load(x_ptr + i)) + WIDTH)

    return kernel


def test_closures_over_constants_and_globals():
    x = torch.ones(16)
    make_kernel(tl.constexpr(3), tl.constexpr(16))[(1,)](x)
    assert x.tolist() == [11] * 16
    make_kernel(tl.constexpr(5), tl.constexpr(16))[(1,)](x)
    assert x.tolist() == [63] * 16
    with pytest.raises(InterpreterError, match="scale is a int outside of the kernel.*scale = tl.constexpr"):
        make_kernel(3, tl.constexpr(16))[(1,)](x)


@triton.jit
def constants_kernel(x_ptr, out_ptr):
    i = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, WIDTH - x)
    tl.store(out_ptr + WIDTH + i, WIDTH // x)
    tl.store(out_ptr + 2 * WIDTH + i, tl.where(WIDTH > x, WIDTH % x, WIDTH << x))  # noqa: SIM300  (the order is the point)
    tl.store(out_ptr + 3 * WIDTH + i, (WIDTH == x) | (WIDTH <= x + 1))  # noqa: SIM300  (the order is the point)


def test_a_constant_on_the_left_of_a_tensor():
    x, out = torch.arange(1, 9, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    assert simulate.run(constants_kernel, 1, None, x, out).faults == []
    left = [8 - n for n in range(1, 9)], [8 // n for n in range(1, 9)]
    assert out.view(4, 8)[:2].tolist() == list(left)
    assert out.view(4, 8)[2:].tolist() == [[8 % n for n in range(1, 8)] + [8 << 8], [0] * 6 + [1] * 2]


def test_a_kernel_of_a_notebook_cell(tmp_path):
    """A cell has no file: its source is where `linecache` keeps it."""
    import linecache

    source = "@triton.jit\ndef kernel(x_ptr):\n    tl.store(x_ptr + 1, 2.0)\n"
    name = str(tmp_path / "ipykernel_1" / "12345.py")
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    cell = {"triton": triton, "tl": tl, "__name__": "__main__"}
    exec(compile(source, name, "exec"), cell)
    report = simulate.run(cell["kernel"], 1, None, torch.zeros(1))
    assert [fault.line for fault in report.faults] == ["12345.py:3"]
    assert report.source("12345.py:3") == "tl.store(x_ptr + 1, 2.0)"


def test_an_empty_grid_and_a_refused_launch_can_be_asked_for_all_that_a_report_has():
    for grid, kinds in ((0, []), ((1, 70000), ["limit"])):
        report = simulate.run(constants_kernel, grid, None, *torch.ones((2, 32), dtype=torch.int32))
        assert [fault.kind for fault in report.faults] == kinds and "constants_kernel" in repr(report)
        assert report.frame().empty and len(report.faults_frame()) == len(kinds)
        assert {name for name, value in report.derived.items() if value is not None} == {"bytes_moved", "least_bytes"}
        if kinds:
            with pytest.raises(device.DeviceError, match="refused before it ran"):
                _ = report.compiled
        else:
            assert report.compiled.registers > 0 and report.waves == 0


@triton.jit
def scalar_kernel(x_ptr, n, factor, flag, nothing, BLOCK: tl.constexpr = 8):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    x = x * factor.to(tl.float32)
    if flag:
        x = x + 1
    if nothing is None:
        x = x - n.to(tl.int64)
    tl.store(x_ptr + i, x)


def test_arguments():
    x = torch.ones(8)
    scalar_kernel[(1,)](x, 4, 0.5, True, None)
    assert x.tolist() == [-2.5] * 4 + [-3] * 4
    array = np.ones(8, np.float32)
    assert simulate.run(scalar_kernel, 1, None, array, 4, factor=2.0, flag=False, nothing=None).faults == []
    assert array.tolist() == [-2] * 4 + [-4] * 4
    with pytest.raises(TypeError, match="no parameter BLOCKS"):
        scalar_kernel[(1,)](x, 4, 0.5, True, None, BLOCKS=8)
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        scalar_kernel[(1,)](x, 4)
    with pytest.raises(ValueError, match="no argument 'y_ptr'"):
        simulate.run(scalar_kernel, 1, None, x, 4, 0.5, True, None, inputs="y_ptr")


# Python, as Triton reads it


@triton.jit
def control_kernel(x_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    i = tl.arange(0, BLOCK)
    inside = i < 6 and not (i < 2)
    either = i == 0 or i == 7
    steps, left = 0, n
    while left > 0:
        left = left // 2
        steps += 1
    big = 0
    for k in range(2, n, 3):
        big += k * 1000000000
    for k in tl.static_range(2):
        steps += k
    x = tl.where(inside, 1, 0) + tl.where(either, 10, 0) + min(steps, 100)
    tl.store(x_ptr + pid * BLOCK + i, x if pid < 1 else max(x, big))


def test_control_flow():
    x = torch.zeros(3, 8, dtype=torch.int32)
    control_kernel[(3,)](x, 2, BLOCK=8)
    row = [13, 3, 4, 4, 4, 4, 3, 13]
    assert x.tolist() == [row, row, [0] * 8]
    control_kernel[(3,)](x, 6, BLOCK=8)  # (2 + 5) * 10**9 wraps, as 32 bits do
    wrapped = (7 * 10**9 + 2**31) % 2**32 - 2**31
    assert wrapped < 0 and x[1].tolist() == [max(v + 1, wrapped) for v in row]


def refused_kernels():
    @triton.jit
    def chained(x_ptr):
        i = tl.arange(0, 8)
        tl.store(x_ptr + i, 1, mask=0 <= i < 4)

    @triton.jit
    def breaks(x_ptr):
        for k in range(4):
            tl.store(x_ptr + k, 1)
            break

    @triton.jit
    def ambiguous(x_ptr):
        if tl.load(x_ptr + tl.arange(0, 8)) > 0:
            tl.store(x_ptr, 1)

    @triton.jit
    def lambdas(x_ptr):
        tl.store(x_ptr, (lambda: 1)())

    @triton.jit
    def sequence(x_ptr):
        for k in (0, 2):
            tl.store(x_ptr + k, 1)

    @triton.jit
    def misspelled(x_ptr):
        tl.store(x_ptr, tl.no_such_function(1))

    @triton.jit
    def shapes(x_ptr):
        tl.store(x_ptr + tl.arange(0, 8), tl.arange(0, 4))

    @triton.jit
    def asserts(x_ptr):
        tl.device_assert(tl.load(x_ptr) > 1, "x is too small")

    @triton.jit
    def static(x_ptr):
        tl.static_assert(WIDTH == 9, "nine wide")

    @triton.jit
    def inner(x):
        return x + undefined_name  # noqa: F821

    @triton.jit
    def outer(x_ptr):
        tl.store(x_ptr, inner(1))

    @triton.jit
    def module(x_ptr):
        tl.store(x_ptr, np.exp(tl.load(x_ptr)))

    @triton.jit
    def python(x_ptr):
        tl.store(x_ptr, normal(tl.load(x_ptr)))

    @triton.jit
    def builtin(x_ptr):
        tl.store(x_ptr, abs(tl.load(x_ptr)))

    @triton.jit
    def returns(x_ptr):
        return tl.load(x_ptr)

    @triton.jit
    def element(x_ptr):
        x = tl.load(x_ptr + tl.arange(0, 8))
        tl.store(x_ptr, x[3])

    @triton.jit
    def assigns(x_ptr):
        x = tl.load(x_ptr + tl.arange(0, 8))
        x[3] = 1

    @triton.jit
    def pointer(x_ptr):
        tl.store(x_ptr, x_ptr[tl.program_id(0)])

    @triton.jit
    def grows(x_ptr):
        total = 0
        for k in range(3):
            total += tl.load(x_ptr + k)
        tl.store(x_ptr, total)

    @triton.jit
    def scatters(x_ptr):
        tl.atomic_max(x_ptr, tl.load(x_ptr + tl.arange(0, 8)))

    @triton.jit
    def converts(x_ptr):
        tl.store(x_ptr, tl.arange(0, 8).to(tl.float8e5).to(tl.float32))

    return {
        module: (2, "cannot call numpy.exp.*triton.language"),
        python: (2, "normal is a function of Python: decorate it with @triton.jit"),
        builtin: (2, "name 'abs' is not defined"),
        returns: (None, "a kernel returns nothing"),
        element: (3, "indexed with None and `:` only.*tl.sum"),
        assigns: (3, "tl.where"),
        pointer: (2, "indexed with None.*tl.load"),
        grows: (3, "total is int32 before the loop and fp32 after its first trip"),
        scatters: (2, "cannot be block type if pointer argument is not a block"),
        converts: (2, r"cannot cast int32\[constexpr\[8\]\] to"),
        chained: (3, "chain of comparisons"),
        breaks: (4, "`break`"),
        ambiguous: (2, "a block of 8 values is asked whether it is true"),
        lambdas: (2, "`lambda`"),
        sequence: (2, "goes over range"),
        misspelled: (2, "no_such_function"),
        shapes: (2, "incompatible|broadcast|shape"),
        asserts: (2, "x is too small"),
        static: (2, "nine wide"),
        outer: (None, "undefined_name"),
    }


def test_what_is_wrong_in_a_kernel_is_told_with_its_line_once():
    for kernel, (line, words) in refused_kernels().items():
        with pytest.raises(InterpreterError, match=words) as caught:
            kernel[(1,)](torch.ones(8))
        message = str(caught.value)
        assert message.count("InterpreterError") == 0, message
        if line is not None:
            assert message.startswith(f"test_triton_language.py:{kernel.fn.__code__.co_firstlineno + line}:"), message


@pytest.mark.parametrize(
    "arguments, meta, words",
    [
        ((8,), {}, "takes x_ptr, n, factor, flag, nothing, BLOCK: missing a required argument: 'factor'"),
        ((8, 1.0, True, None, 8, 9), {}, "too many positional"),
        ((8, 1.0, True, None), {"TILE": 8}, "has no parameter TILE; it has x_ptr"),
        ((np.ones(8), 1.0, True, None), {}, r"n is a NumPy array; .*torch.from_numpy\(n\)"),
        ((np.int64(8), 1.0, True, None), {}, r"n is a int64 of NumPy; .*n.item\(\)"),
        (([8], 1.0, True, None), {}, "n is a list; a kernel takes"),
        ((2**64, 1.0, True, None), {}, "does not fit into 64 bits"),
        ((torch.ones(1, device="meta"), 1.0, True, None), {}, "n is on meta; .* on the CPU"),
        ((torch.ones(1, dtype=torch.complex64), 1.0, True, None), {}, "n is torch.complex64"),
        ((8, 1.0, True, None), {"BLOCK": torch.tensor(8)}, "BLOCK is a constexpr"),
        ((8, 1.0, True, None), {"num_warps": "4"}, "num_warps='4'"),
    ],
)
def test_arguments_that_a_launch_does_not_take(arguments, meta, words):
    with pytest.raises(TypeError, match=words):
        scalar_kernel[(1,)](torch.ones(8), *arguments, **meta)


def test_a_grid_that_is_none():
    for grid in ("1", (1.5,), None, (), lambda meta: None):
        with pytest.raises(TypeError, match="the grid is .*: give one to three whole numbers"):
            scalar_kernel[grid](torch.ones(8), 8, 1.0, True, None)
    with pytest.raises(KeyError, match=r"meta\['TILE'\]; scalar_kernel is launched with .*BLOCK"):
        scalar_kernel[lambda meta: (meta["TILE"],)](torch.ones(8), 8, 1.0, True, None)


def test_what_is_not_known_is_refused_with_its_line():
    @triton.jit
    def assembly(x_ptr):
        x = tl.inline_asm_elementwise("mov.b32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        tl.store(x_ptr, x)

    @triton.jit
    def rounding(x_ptr):
        tl.store(x_ptr, libdevice.add_ru(tl.load(x_ptr), 1.0))

    for kernel, construct in ((assembly, "inline assembly"), (rounding, "__nv_fadd_ru")):
        first = kernel.fn.__code__.co_firstlineno
        with pytest.raises(simulate.Refused, match=f"test_triton_language.py:{first + 2}: .* cannot run .*{construct}"):
            kernel[(1,)](torch.ones(1))


def test_printing(capsys):
    @triton.jit
    def kernel(x_ptr):
        tl.static_print("compiling", 3)
        tl.device_print("x is", tl.load(x_ptr))
        print("done", 1)

    kernel[(2,)](torch.full((1,), 7.0))
    out = capsys.readouterr().out
    assert "compiling 3" in out and "(1, 0, 0) x is: [7.]" in out and "(1, 0, 0) done: [1]" in out


# Mathematics

FUNCTIONS = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "log": torch.log,
    "log2": torch.log2,
    "cbrt": lambda x: x ** (1 / 3),
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_sinf": torch.sin,
    "normcdf": torch.special.ndtr,
    "lgamma": torch.lgamma,
    "rint": torch.round,
    "round": lambda x: torch.floor(x + 0.5),
    "trunc": torch.trunc,
    "abs": torch.abs,
    "isnan": torch.isnan,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_libdevice(name):
    @triton.jit
    def kernel(x_ptr, out_ptr, FUNCTION: tl.constexpr):
        i = tl.arange(0, 64)
        tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i)).to(tl.float32))

    @triton.jit
    def through_module(x_ptr, out_ptr):
        i = tl.arange(0, 64)
        x = tl.load(x_ptr + i)
        tl.store(out_ptr + i, libdevice.pow(x, 2.0) + tanh(x) + tl.extra.cuda.libdevice.exp2(x))

    x, out = torch.rand(64) * 4 + 0.1, torch.empty(64)
    kernel[(1,)](x, out, getattr(triton.language.extra.cuda.libdevice, name))
    torch.testing.assert_close(out, FUNCTIONS[name](x).float(), rtol=1e-5, atol=1e-5)
    through_module[(1,)](x, out)
    torch.testing.assert_close(out, x**2 + x.tanh() + 2**x, rtol=1e-5, atol=1e-5)


@triton.jit
def mathematics_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, tl.sigmoid(x))
    tl.store(out_ptr + N + n, tl.softmax(x))
    tl.store(out_ptr + 2 * N + n, tl.math.erf(x) + tl.exp2(x) + tl.abs(x))
    tl.store(out_ptr + 3 * N + n, tl.math.rsqrt(x * x + 1) + tl.floor(x) + tl.ceil(x))
    tl.store(out_ptr + 4 * N + n, tl.clamp(x, -1.0, 1.0) + tl.sqrt_rn(x * x) + tl.div_rn(x, 3.0))
    tl.store(out_ptr + 5 * N + n, tl.math.fma(x, x, 1.0))
    tl.store(out_ptr + 6 * N + n, tl.sort(x))
    tl.store(out_ptr + 7 * N + n, tl.flip(x, 0))
    tl.store(out_ptr + 8 * N + n, tl.cumsum(x, reverse=True))
    tl.store(out_ptr + 9 * N + n, tl.gather(x, N - 1 - n, 0))


def test_mathematics():
    x, out = normal(64), torch.empty(10, 64)
    mathematics_kernel[(1,)](x, out, 64)
    wanted = [
        x.sigmoid(),
        x.softmax(0),
        x.erf() + x.exp2() + x.abs(),
        (x * x + 1).rsqrt() + x.floor() + x.ceil(),
        x.clamp(-1, 1) + x.abs() + x / 3,
        x * x + 1,
        x.sort().values,
        x.flip(0),
        x.flip(0).cumsum(0).flip(0),
        x.flip(0),
    ]
    torch.testing.assert_close(out, torch.stack(wanted), rtol=1e-5, atol=1e-5)


@triton.jit
def larger(a_value, a_index, b_value, b_index):
    a_wins = (a_value > b_value) | ((a_value == b_value) & (a_index < b_index))
    return tl.where(a_wins, a_value, b_value), tl.where(a_wins, a_index, b_index)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def reduction_kernel(x_ptr, out_ptr, index_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    index = tl.broadcast_to(n[None, :] * 10, (M, N))
    most, where = tl.reduce((x, index), 1, larger)
    tl.store(out_ptr + m, most)
    tl.store(index_ptr + m, where)
    tl.store(out_ptr + M + m, tl.reduce(x, 1, product))
    tl.store(out_ptr + 2 * M + m, tl.max(x, 1))
    least, at = tl.min(x, 1, return_indices=True)
    tl.store(out_ptr + 3 * M + m, least)
    tl.store(index_ptr + M + m, at)
    tl.store(index_ptr + 2 * M + m, tl.argmax(x, 1, tie_break_left=False))
    tl.store(out_ptr + 4 * M + m, tl.sum(x, axis=-1, keep_dims=True).reshape(M))
    tl.store(index_ptr + 3 * M + m, tl.xor_sum(index, 1))
    scanned = tl.associative_scan(x, 1, product)
    tl.store(out_ptr + 5 * M + m[:, None] * N + n[None, :], scanned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_and_scans_with_ones_own_function(dtype):
    x = normal(8, 16).to(dtype)
    out, index = torch.empty(5 * 8 + 8 * 16, dtype=dtype), torch.empty(4, 8, dtype=torch.int32)
    reduction_kernel[(1,)](x, out, index, 8, 16)
    close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert torch.equal(out[:8], x.max(1).values) and torch.equal(index[0], 10 * x.argmax(1).int())
    torch.testing.assert_close(out[8:16], x.float().prod(1).to(dtype), **close)
    assert torch.equal(out[16:24], x.max(1).values) and torch.equal(out[24:32], x.min(1).values)
    assert torch.equal(index[1], x.argmin(1).int()) and torch.equal(index[2], x.argmax(1).int())
    torch.testing.assert_close(out[32:40], x.float().sum(1).to(dtype), **close)
    xor = 0
    for n in range(16):
        xor ^= 10 * n
    assert index[3].tolist() == [xor] * 8
    torch.testing.assert_close(out[40:].reshape(8, 16), x.float().cumprod(1).to(dtype), **close)


@triton.jit
def integer_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, x * 1000003 + 7)
    tl.store(out_ptr + N + n, x // 3)
    tl.store(out_ptr + 2 * N + n, x % 3)
    tl.store(out_ptr + 3 * N + n, x >> 2)
    tl.store(out_ptr + 4 * N + n, (x.to(tl.uint32, bitcast=True) >> 2).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 5 * N + n, (x.to(tl.float32) * 1e9).to(tl.int32))
    tl.store(out_ptr + 6 * N + n, tl.histogram(n % 4, N))
    tl.store(out_ptr + 7 * N + n, libdevice.popc(x) * 100 + libdevice.clz(x))


def test_integers_wrap_divide_towards_zero_and_saturate():
    x = torch.tensor([5, -5, 2**31 - 1, -(2**31), 7, -7, 100000, 0], dtype=torch.int32)
    out = torch.empty(8, 8, dtype=torch.int32)
    integer_kernel[(1,)](x, out, 8)
    assert torch.equal(out[0], x * 1000003 + 7)
    assert out[1].tolist() == [math.trunc(v / 3) for v in x.tolist()]
    assert out[2].tolist() == [int(math.fmod(v, 3)) for v in x.tolist()]
    assert torch.equal(out[3], x >> 2)
    assert out[4].tolist() == [(v % 2**32) >> 2 for v in x.tolist()]
    most, least = 2**31 - 1, -(2**31)
    assert out[5].tolist() == [most, least, most, least, most, least, most, 0]
    assert out[6].tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    assert out[7, :2].tolist() == [229, 3100]


@pytest.mark.parametrize(
    "dtype, numpy", [(torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn), (torch.float8_e5m2, ml_dtypes.float8_e5m2)]
)
def test_float8(dtype, numpy):
    @triton.jit
    def kernel(x_ptr, out_ptr, N: tl.constexpr):
        n = tl.arange(0, N)
        tl.store(out_ptr + n, tl.load(x_ptr + n).to(out_ptr.dtype.element_ty))

    x = torch.tensor([0.3, 1.1, -2.7, 1e6, -1e6, 0.0, 3.0, 17.0])
    small, back = torch.empty(8, dtype=dtype), torch.empty(8)
    kernel[(1,)](x, small, 8)
    kernel[(1,)](small, back, 8)
    most = float(ml_dtypes.finfo(numpy).max)  # what is beyond it saturates
    assert back.tolist() == np.clip(x.numpy(), -most, most).astype(numpy).astype(np.float32).tolist()


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, B: tl.constexpr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    a, b = tl.load(a_ptr + i * B + j), tl.load(b_ptr + i * B + j)
    tl.store(out_ptr + i * B + j, tl.dot(a, b, input_precision=PRECISION))


@pytest.mark.parametrize(
    "card, precision, exact",
    [
        ("H200", None, False),
        ("A100", "tf32", False),
        ("H200", "ieee", True),
        ("H200", "tf32x3", True),
        ("T4", None, True),
    ],
)
def test_float32_products_lose_what_tf32_does_not_hold(card, precision, exact):
    a, b, out = torch.full((16, 16), 1 + 2.0**-12), torch.eye(16), torch.empty(16, 16)
    simulate.run(dot_kernel, 1, None, a, b, out, 16, precision, card=card)
    assert out[0, 0].item() == (1 + 2.0**-12 if exact else 1.0)


def test_dot_of_integers():
    a, b = torch.randint(-128, 128, (2, 32, 32), dtype=torch.int8)
    out = torch.empty(32, 32, dtype=torch.int32)
    dot_kernel[(1,)](a, b, out, 32, None)
    assert torch.equal(out, a.int() @ b.int())


@triton.jit
def atomics_kernel(out_ptr, old_ptr, x_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(old_ptr + n, tl.atomic_add(out_ptr + n * 0, x))
    tl.atomic_max(out_ptr + 1 + n * 0, x, mask=n < N - 1)
    tl.atomic_min(out_ptr + 2 + n * 0, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_atomics(dtype):
    x, out, old = torch.tensor([3, -1, 4, 9]).to(dtype), torch.zeros(3, dtype=dtype), torch.empty(4, dtype=dtype)
    report = simulate.run(atomics_kernel, 1, None, out, old, x, 4)
    assert report.faults == [] and out.tolist() == [15, 4, -1] and old.tolist() == [0, 3, 2, 6]


def test_an_atomic_of_bfloat16():
    @triton.jit
    def kernel(out_ptr, x_ptr, N: tl.constexpr):
        tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))), sem="relaxed")

    out = torch.zeros(1, dtype=torch.bfloat16)
    kernel[(3,)](out, torch.ones(16, dtype=torch.bfloat16), 16)
    assert out.item() == 48


@triton.jit
def half_bits_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n, mask=n != 3, other=7.5)
    tl.store(out_ptr + n, tl.sort(x))
    tl.store(out_ptr + N + n, tl.associative_scan(x, 0, tl.standard._elementwise_max))
    tl.store(out_ptr + 2 * N + n, tl.where(x > 0, x, 0.0))
    tl.store(out_ptr + 3 * N + n, x.to(tl.float32).to(tl.bfloat16, fp_downcast_rounding="rtz"))
    tl.store(out_ptr + 4 * N + n, (x.to(tl.float32) + 0.001).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_bfloat16_is_right_in_sorts_scans_and_roundings():
    x = normal(16).bfloat16()
    out = torch.empty(5, 16, dtype=torch.bfloat16)
    half_bits_kernel[(1,)](x, out, 16)
    x[3] = 7.5
    assert torch.equal(out[0], x.sort().values)
    assert torch.equal(out[1], x.float().cummax(0).values.bfloat16())
    assert torch.equal(out[2], x.clamp(min=0))
    assert torch.equal(out[3], x)
    cut = (x.float() + 0.001).numpy().view(np.uint32) & 0xFFFF0000
    assert out[4].float().tolist() == cut.view(np.float32).tolist()


@triton.jit
def big_dot_kernel(a_ptr, b_ptr, out_ptr, K, B: tl.constexpr, BK: tl.constexpr):
    i, k = tl.arange(0, B), tl.arange(0, BK)
    total = tl.zeros((B, B), tl.float32)
    for k0 in range(0, K, BK):
        a = tl.load(a_ptr + i[:, None] * K + k0 + k[None, :])
        total = tl.dot(a, tl.load(b_ptr + (k0 + k[:, None]) * B + i[None, :]), total)
    tl.store(out_ptr + i[:, None] * B + i[None, :], total)


@pytest.mark.slow  # it compiles
def test_shared_memory_keeps_to_the_card():
    a, b, out = torch.ones(128, 256).half(), torch.ones(256, 128).half(), torch.zeros(128, 128)
    report = simulate.run(big_dot_kernel, 1, None, a, b, out, 256, 128, 64, num_stages=5, card="RTX 4090")
    assert [fault.kind for fault in report.faults] == ["limit"] and "shared memory" in report.faults[0].message
    assert not out.any()  # nothing ran
    report = simulate.run(big_dot_kernel, 1, None, a, b, out, 256, 128, 64, num_stages=5, card="H200")
    assert report.faults == [] and (out == 256).all()
    assert report.compiled.shared > device.card("RTX 4090").shared_per_block
