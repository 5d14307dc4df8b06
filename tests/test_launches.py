"""What a launch costs and how it is made cheap; what torch.compile launches; streams that overlap, and one alone."""

import types

import pytest
import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels import launching
from gpukern.kernels.launching import Launcher, launch_key
from gpukern.layer import Layer, Step, compiled
from gpukern.layer.compiled import GeneratedKernel, generated, kernels_of
from gpukern.measure import NotRecorded, Row, launches, rows, streams
from gpukern.op import InputError

DEVICE = device.torch_device()


@triton.jit
def _scale_kernel(x_ptr, out_ptr, factor, N, offset=1, BN: tl.constexpr = 16):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + n, mask=n < N)
    tl.store(out_ptr + n, x * factor + offset, mask=n < N)


# ---- The launcher


def test_the_launcher_launches_what_the_kernel_would():
    x = torch.arange(100.0, device=DEVICE)
    launch = Launcher(_scale_kernel)
    for N, BN in ((100, 32), (100, 32), (16, 32), (1, 16), (37, 64)):  # multiple of 16 or not, and one
        for start in (0, 1, 4):  # aligned to 16 bytes or not
            out = torch.full((105,), torch.nan, device=DEVICE)
            part = out[start:]
            launch[(triton.cdiv(N, BN),)](x, part, 2.0, N, BN=BN, num_warps=1)
            assert torch.equal(part[:N], x[:N] * 2 + 1) and part[N:].isnan().all() and out[:start].isnan().all()


def key(*arguments, constexprs=(), **meta):
    return launch_key(constexprs or (False,) * len(arguments), arguments, meta)


def test_the_key_changes_with_what_triton_specialises_on():
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    different = [
        key(x, 7), key(x[1:], 7), key(x.half(), 7), key(x.bfloat16(), 7), key(None, 7),
        key(x, 1), key(x, 16), key(x, 1 << 31), key(x, 1 << 40 | 1), key(x, 1 << 63), key(x, 7.0), key(x, True),
        key(x, None), key(x, 7, 7), key(x, 7, BN=16), key(x, 7, BN=32), key(x, 7, BN=16, num_warps=8),
        key(x, 7, BN=1), key(x, 7, BN=True), key(x, 7, constexprs=(False, True)), key(x, 8, constexprs=(False, True)),
        key(x, 1, constexprs=(False, True)), key(x, True, constexprs=(False, True)),
    ]  # fmt: skip
    assert None not in different and len(set(different)) == len(different)


def test_the_key_stays_where_the_kernel_is_the_same():
    x, y = torch.zeros(64), torch.ones(3, 5)
    for one, other in (((x, 7), (y, 9)), ((x, 16), (x, 1024)), ((x[4:], 0), (y, -32)), ((x, 1.5), (x, -2.0))):
        assert key(*one) == key(*other)
    assert key(x, "what only Triton knows") is None and key(x, y=y) is None


def test_the_key_knows_what_triton_knows():
    """Two launches with the same key are, to Triton's own function, launches of the same kernel."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    x = torch.zeros(64)
    values = [
        x,
        x[1:],
        x[4:],
        x.half(),
        x.double(),
        None,
        0,
        1,
        2,
        16,
        -16,
        -1,
        2**31 - 1,
        2**31,
        -(2**31),
        2**63,
        0.5,
        True,
    ]
    found = {}
    for value in values:
        theirs = native_specialize_impl(BaseBackend, value, False, True, True)
        assert found.setdefault(key(value), theirs) == theirs, value


@pytest.fixture
def card(monkeypatch):
    """A card that is none: `launched` has what reached it, `asked` what Triton was asked to launch."""
    seen = types.SimpleNamespace(launched=[], asked=[], stream=11)

    class Kernel:
        params = _scale_kernel.params if hasattr(_scale_kernel, "params") else ()

        def __getitem__(self, grid):
            def launch(*arguments, **meta):
                seen.asked.append((grid, arguments, meta))
                number = len(seen.asked)
                return types.SimpleNamespace(
                    run=lambda *a: seen.launched.append((number, a)), function=f"f{number}", packed_metadata="packed"
                )

            return launch

    def parameter(name, default=None, is_constexpr=False):
        return types.SimpleNamespace(name=name, default=default, is_constexpr=is_constexpr)

    seen.kernel = Kernel()
    seen.kernel.params = [
        *map(parameter, ("x_ptr", "out_ptr", "factor", "N")), parameter("offset", 1), parameter("BN", 16, True)
    ]  # fmt: skip
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda on: seen.stream))
    monkeypatch.setattr(launching.triton.runtime, "driver", driver)
    return seen


def test_a_kernel_is_looked_up_once_and_then_launched_directly(card):
    launch, x, out = Launcher(card.kernel), torch.zeros(64), torch.zeros(64)
    for N in (7, 9, 11):
        launch[(2,)](x, out, 2.0, N, BN=32, num_warps=1)
    assert len(card.asked) == 1, "the first launch is Triton's"
    card.stream = 12
    launch[3, 4](x[4:], out, 3.0, 5, BN=32, num_warps=1)
    (_, first), (_, second), (number, last) = card.launched
    assert first == (
        2, 1, 1, 11, "f1", "packed", None, None, None, x.data_ptr(), out.data_ptr(), 2.0, 9, 1, 32,
    )  # fmt: skip
    assert second[12] == 11
    assert (number, last[:4], last[9:]) == (1, (3, 4, 1, 12), (x.data_ptr() + 16, out.data_ptr(), 3.0, 5, 1, 32))

    launch[(2,)](x[1:], out, 2.0, 7, BN=32, num_warps=1)  # another alignment
    launch[(2,)](x, out, 2.0, 16, BN=32, num_warps=1)  # a multiple of 16
    launch[(2,)](x, out, 2.0, 7, BN=64, num_warps=1)  # another constexpr
    assert len(card.asked) == 4 and len(card.launched) == 3
    launch[(2,)](x, out, 2.0, 7, BN=64, num_warps=1)
    assert card.launched[-1][0] == 4


def test_who_watches_launches_sees_them(card, monkeypatch):
    launch, x = Launcher(card.kernel), torch.zeros(64)
    launch[(1,)](x, x, 2.0, 7, BN=16)
    with monkeypatch.context() as watching:
        watching.setattr(launching.JITFunction, "run", lambda *a, **k: None)  # as inspect.watch_triton does
        launch[(1,)](x, x, 2.0, 7, BN=16)
    hooks = launching.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        launch[(1,)](x, x, 2.0, 7, BN=16)
    finally:
        hooks.remove(print)
    launch[(1,)](x, x, "a descriptor", 7, BN=16)
    assert len(card.asked) == 4 and not card.launched


@pytest.mark.gpu
def test_a_direct_launch_is_right_and_cheaper():
    x = torch.randn(launches.N, device="cuda")
    found = {row.version: row for row in launches.launch_rows({"launcher": Launcher(launches.copy_triton)})}
    assert all(row.status == "ok" and row.time_us > 0 for row in found.values()), found
    assert found["launcher"].time_us < found["triton"].time_us
    assert found["node of a CUDA graph"].time_us < found["triton, compiled kernel"].time_us
    assert x.is_cuda


# ---- The cost of a launch


def test_every_way_to_launch_copies():
    x = torch.randn(launches.N, device=DEVICE)
    found = launches.ways(x, torch.empty_like(x), {"launcher": Launcher(launches.copy_triton)})
    assert {"torch", "triton", "launcher", "numba, device arrays", "numba, torch tensors"} <= found.keys()
    for name, way in found.items():
        assert launches.copies(*way), name
    assert not launches.copies(lambda: None, x, torch.empty_like(x))


def test_without_a_card_launches_are_recorded_ones(monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    monkeypatch.setattr(launches, "read", lambda sweep: ())
    with pytest.raises(NotRecorded, match="launch"):
        launches.launch_rows()
    row = Row("launches", "one kernel", "copy", "triton", "float32", 1, 1, 1, 1024, 1, 1024, time_us=10.0, card="H200")
    monkeypatch.setattr(launches, "read", lambda sweep: (row,))
    assert launches.launch_rows() == [row]


def test_rows_of_launches_are_kept(tmp_path, monkeypatch):
    row = Row("launches", "one kernel", "copy", "triton", "float32", 1, 1, 1, 1024, 1, 1024, time_us=10.25, card="H200")
    monkeypatch.setattr(rows, "RECORDED", tmp_path)
    rows.write(tmp_path / "h200", "launches", [row])
    (kept,) = rows.read("launches")
    rows.read.cache_clear()
    assert (kept.version, kept.time_us, kept.source) == ("triton", 10.25, "recorded")


# ---- What torch.compile launches

PROGRAM = """
async_compile = AsyncCompile()

# Topologically Sorted Source Nodes: [n], Original ATen: [aten.native_layer_norm]
triton_per_fused_native_layer_norm_0 = async_compile.triton('triton_per_fused_native_layer_norm_0', '''
import triton
@triton.jit
def triton_per_fused_native_layer_norm_0(in_ptr0, out_ptr2, xnumel, r0_numel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

triton_poi_fused_add_1 = async_compile.triton('triton_poi_fused_add_1', '''
def triton_poi_fused_add_1(in_ptr0): pass
''', device_str='cuda')

class Runner:
    def call(self, args):
        arg0_1, = args
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 64), (64, 1), torch.bfloat16)
            stream0 = get_raw_stream(0)
            triton_per_fused_native_layer_norm_0.run(arg0_1, buf0, 4, 64, stream=stream0)
            extern_kernels.mm(buf0, arg0_1, out=buf1)
            buf4 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf1, buf1, buf1)
            triton_poi_fused_add_1.run(buf1, stream=stream0)
            extern_kernels.mm(buf1, arg0_1, out=buf2)
            triton_poi_fused_add_1.run(buf2, stream=stream0)
        return (buf2, )

def benchmark_compiled_module(times=10):
    fn = lambda: call([arg0_1])
"""


def test_kernels_of_a_generated_program():
    found = kernels_of(PROGRAM)
    assert [(k.name, k.language, k.launches) for k in found] == [
        ("triton_per_fused_native_layer_norm_0", "triton", 1),
        ("extern_kernels.mm", "library", 2),
        ("torch.ops.aten._scaled_dot_product_flash_attention.default", "library", 1),
        ("triton_poi_fused_add_1", "triton", 2),
    ]
    assert found[0].source.startswith("import triton\n@triton.jit\n") and found[1].source == ""
    assert "def triton_per_fused_native_layer_norm_0(in_ptr0" in found[0].source


def test_without_a_card_the_programs_are_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    monkeypatch.setattr(compiled, "RECORDED", tmp_path)
    layer, step = Layer.random("tiny"), Step(1, 1, 16)
    with pytest.raises(InputError, match="tiny-float32-B1-T1-S16 were not recorded.*none yet"):
        generated(layer, step)
    (tmp_path / "h200" / "compile").mkdir(parents=True)
    (tmp_path / "h200" / "compile" / "tiny-float32-B1-T1-S16.py.txt").write_text("# Written ...\n" + PROGRAM)
    assert generated(layer, step) == kernels_of(PROGRAM)
    with pytest.raises(InputError, match="S8 were not recorded; those that were: tiny-float32-B1-T1-S16"):
        generated(layer, Step(1, 1, 8))
    with pytest.raises(device.DeviceError, match="CUDA card"):
        compiled.record_program(layer, step)


def test_what_was_recorded_can_be_read():
    for path in compiled.RECORDED.glob("*/compile/*.py.txt"):
        text = path.read_text()
        found = kernels_of(text)
        assert text.startswith("# Written by torch.compile for ") and any(k.language == "triton" for k in found), path
        assert all("@triton.jit" in k.source for k in found if k.language == "triton"), path


@pytest.mark.slow
def test_the_compiler_here_writes_programs_of_this_form():
    """Inductor's C++ for the CPU, written but not compiled: its Triton stands in the same program, in the same way."""
    import torch._inductor.config as settings
    from torch._inductor.utils import get_code

    layer, cpu = Layer.random("tiny"), torch.device("cpu")
    x, cache = layer.inputs(Step(1, 4, 4))
    tensors = x.to(cpu), layer.weights.to(torch.float32, cpu), layer.config, cache.k.to(cpu), cache.v.to(cpu)
    with torch.no_grad(), settings.patch(force_disable_caches=True):
        text = get_code(torch.compile(compiled._layer, dynamic=False), *tensors, 0)[0]
    found = kernels_of(text)
    assert sum(k.launches for k in found if k.name == "extern_kernels.mm") == 4
    assert sum(k.language == "cpp" for k in found) >= 3
    assert all(isinstance(k, GeneratedKernel) and (k.source or k.language == "library") for k in found)


@pytest.mark.gpu
def test_the_kernels_of_the_layer_on_this_card():
    found = generated(Layer.random("tiny", torch.bfloat16), Step(1, 1, 16))
    ours = [k for k in found if k.language == "triton"]
    assert ours and all("@triton.jit" in k.source for k in ours)
    assert 4 <= sum(k.launches for k in found) <= 20


# ---- Streams


def test_without_a_card_streams_say_that_they_need_one(monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    x = torch.ones(8)
    for call in (streams.overlap, lambda: streams.on_two_streams(torch.neg, torch.neg, x, x),
                 lambda: streams.on_one_stream(torch.neg, torch.neg, x, x)):  # fmt: skip
        with pytest.raises(device.DeviceError, match="streams need a CUDA card"):
            call()


def test_the_work_of_the_example_is_what_it_says():
    x = torch.rand(1500, device=DEVICE)
    wanted = x.clone()
    for _ in range(3):
        wanted = wanted * x + x
    assert torch.allclose(streams.iterated(x, steps=3), wanted)


class Stream:
    """A stream that writes down what it is told."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def wait_stream(self, other):
        self.said.append(f"{self.name} waits for {other.name}")


def test_every_tensor_that_crosses_streams_is_waited_for_and_recorded(monkeypatch):
    said, now = [], []
    here, beside = Stream("here", said), Stream("beside", said)

    class Tensor:
        def __init__(self, name):
            self.name = name

        def record_stream(self, stream):
            said.append(f"{self.name} is used on {stream.name}")

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            now.append(self.stream.name)

        def __exit__(self, *_):
            now.pop()

    def work(name):
        def run(tensor):
            said.append(f"{name}({tensor.name}) on {(now or ['here'])[-1]}")
            return Tensor(name)

        return run

    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(streams, "_beside", lambda: beside)
    streams.on_two_streams(work("a"), work("b"), Tensor("x"), Tensor("y"))
    assert said == [
        "beside waits for here", "b(y) on beside", "y is used on beside",
        "a(x) on here", "here waits for beside", "b is used on here",
    ]  # fmt: skip


@pytest.mark.gpu
def test_two_streams_overlap_and_one_does_not():
    found = streams.overlap()
    assert found.overlapped == {"on_one_stream": False, "on_two_streams": True}
    assert found.ratio > 1.5


@pytest.mark.gpu
def test_streams_are_right_while_memory_is_reused():
    for i in range(50):
        x, y = (torch.full((1 << 15,), float(value), device="cuda") for value in (i, i + 1))
        a, b = streams.on_two_streams(lambda t: t + 1, lambda t: streams.iterated(t, 0) + 2, x, y)
        del x, y
        torch.full((1 << 15,), -1.0, device="cuda")  # takes the memory of x and y if it may
        assert (a == i + 1).all() and (b == i + 3).all()
