"""device: the mode is decided once and in time, cards have the right facts, launches past a limit are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from numba import cuda, float32

from gpukern import device
from gpukern.device import CARDS, DeviceError, LimitError, check_launch

ROOT = Path(__file__).parent.parent
# Whether a process takes this machine for one with a card: PyTorch is who says so.
CARD, NO_CARD = True, False
# How numba.cuda and Triton are set up at the end: what a learner's own kernels would get.
STATE = """
import json, sys, triton
from numba import cuda
from gpukern import device
def kernel(): pass
json.dump({
    "mode": device.mode(),
    "device": str(device.torch_device()),
    "numba": [cuda.jit.__module__, cuda.as_cuda_array.__module__],
    "triton": type(triton.jit(kernel)).__name__,
}, sys.stdout)
"""
# In both modes Numba compiles; it is who runs the result that differs.
LOCKSTEP = ["numba.cuda.decorators", "gpukern.simulate.lockstep.host"]
DRIVER = ["numba.cuda.decorators", "numba.cuda.api"]
COUNTED = {"mode": "counted", "device": "cpu", "numba": LOCKSTEP, "triton": "InterpretedFunction"}
MEASURED = {"mode": "measured", "device": "cuda", "numba": DRIVER, "triton": "JITFunction"}


def python(card: bool, code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter, on a machine with or without a card. Only `environment` sets a mode."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("GPUKERN_DEVICE", "NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")
    }
    return subprocess.run(
        [sys.executable, "-c", f"import torch; torch.cuda.is_available = lambda: {card}\n{code}"],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Code that prints STATE; run from a file, because Triton reads the source of a kernel when it decorates it."""
    path = tmp_path_factory.mktemp("state") / "state.py"
    path.write_text(STATE)
    return f"import runpy; runpy.run_path({str(path)!r})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "early", "environment", "expected"),
    [
        (NO_CARD, "", {}, COUNTED),
        (CARD, "", {}, MEASURED),
        (CARD, "", {"GPUKERN_DEVICE": "cuda"}, MEASURED),
        (CARD, "", {"GPUKERN_DEVICE": "simulated"}, COUNTED),
        (CARD, "", {"NUMBA_ENABLE_CUDASIM": "1"}, COUNTED),
        (CARD, "", {"NUMBA_ENABLE_CUDASIM": "1", "GPUKERN_DEVICE": "cuda"}, MEASURED),
        (NO_CARD, "import numba", {}, COUNTED),
        (CARD, "import numba.cuda, triton", {}, MEASURED),
        (NO_CARD, "import numba.cuda, triton", {"TRITON_INTERPRET": "1"}, COUNTED),
        (CARD, "from numba import cuda", {"GPUKERN_DEVICE": "simulated"}, COUNTED),
    ],
)
def test_mode_is_decided_before_both_libraries_and_reaches_them(card, early, environment, expected, state):
    done = python(card, f"{early}\nimport gpukern\n{state}", **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(
    ("card", "early", "environment", "named"),
    [
        (NO_CARD, "import numba.cuda", {"NUMBA_ENABLE_CUDASIM": "1"}, ["numba.cuda"]),
        (CARD, "import numba.cuda", {"NUMBA_ENABLE_CUDASIM": "1", "GPUKERN_DEVICE": "cuda"}, ["numba.cuda"]),
        (NO_CARD, "import triton", {}, ["triton"]),
        (NO_CARD, "import numba.cuda, triton", {}, ["triton"]),
        (NO_CARD, "import numba.cuda, triton", {"NUMBA_ENABLE_CUDASIM": "1"}, ["numba.cuda", "triton"]),
    ],
)
def test_a_library_loaded_too_early_in_the_wrong_mode_is_named(card, early, environment, named):
    done = python(card, f"{early}\nimport gpukern", **environment)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert last.startswith("gpukern.device.DeviceError: " + " and ".join(named) + " was imported before gpukern")
    assert "Restart the kernel" in last and "`import gpukern` first" in last


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("cuda", "GPUKERN_DEVICE=cuda, but "), ("gpu", "GPUKERN_DEVICE='gpu' is not known: use 'cuda', 'simulated'")],
)
def test_a_mode_that_cannot_be_had_is_refused(value, complaint):
    done = python(NO_CARD, "import gpukern", GPUKERN_DEVICE=value)
    assert done.returncode != 0
    assert complaint in done.stderr.strip().splitlines()[-1]


def test_the_command_refuses_a_mode_in_one_line():
    done = python(
        NO_CARD, "import sys; sys.argv = ['gpukern', 'doctor', '--json']; import gpukern", GPUKERN_DEVICE="cuda"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: GPUKERN_DEVICE=cuda, but ") and len(done.stderr.splitlines()) == 1


def test_the_mode_of_this_process_is_consistent():
    assert device.mode() in device.MODES
    assert device.simulated() == (device.mode() == "counted") == (device.torch_device().type == "cpu")


# --- Cards


@pytest.mark.parametrize(("name", "fp32_cores_per_sm"), [("H200", 128), ("A100", 64), ("T4", 64), ("RTX 4090", 128)])
def test_card_facts_fit_together(name, fp32_cores_per_sm):
    card = device.card(name)
    assert card.name == name
    assert card.peak["float32"] == pytest.approx(card.sms * fp32_cores_per_sm * 2 * card.boost_mhz * 1e6, rel=0.01)
    assert card.peak["float16"] > card.peak["float32"]
    assert card.shared_static <= card.shared_per_block <= card.shared_per_sm
    assert card.threads_per_block <= card.warps_per_sm * card.warp
    assert card.registers_per_sm == 65536 and card.registers_per_thread == 255
    # The architecture's table: threads, blocks and shared memory of an SM, by compute capability.
    table = {(7, 5): (1024, 16, 64), (8, 0): (2048, 32, 164), (8, 9): (1536, 24, 100), (9, 0): (2048, 32, 228)}
    assert (card.warps_per_sm * 32, card.blocks_per_sm, card.shared_per_sm // 1024) == table[card.compute_capability]


def test_bound_is_the_larger_of_arithmetic_and_memory_time():
    h200 = device.card("H200")
    n = 4096
    matmul = h200.bound(2 * n**3, 3 * n * n * 2, torch.bfloat16)
    assert matmul == pytest.approx(2 * n**3 / 989.4e12)
    assert h200.bound(n, 3 * n * 4, torch.float32) == pytest.approx(3 * n * 4 / 4.8e12)
    assert device.card("T4").bound(1, 1, torch.bfloat16) is None, "a T4 has no fast bfloat16"


def test_an_unknown_card_is_refused_with_those_that_are_known():
    with pytest.raises(DeviceError, match="'H100'.*H200, A100, T4, RTX 4090"):
        device.card("H100")


def test_the_simulated_gpu_has_the_limits_of_the_recorded_card():
    if device.simulated():
        assert device.card() is CARDS["H200"]
    else:
        assert device.card().sms == torch.cuda.get_device_properties(0).multi_processor_count


def present_card(monkeypatch, name, sms, memory):
    """The card that gpukern makes out where the driver reports these."""
    properties = SimpleNamespace(
        name=name,
        multi_processor_count=sms,
        total_memory=memory,
        major=9,
        minor=0,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return device._present_card.__wrapped__()


def test_a_card_is_known_by_its_name_sms_and_memory(monkeypatch):
    assert present_card(monkeypatch, "NVIDIA H200", 132, 150_110_011_392) is CARDS["H200"]
    assert present_card(monkeypatch, "NVIDIA A100-SXM4-80GB", 108, 84_974_239_744) is CARDS["A100"]
    assert present_card(monkeypatch, "Tesla T4", 40, 15_828_320_256) is CARDS["T4"]
    assert present_card(monkeypatch, "NVIDIA GeForce RTX 4090", 128, 25_386_352_640) is CARDS["RTX 4090"]


@pytest.mark.parametrize(
    ("name", "sms", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 85_000_000_000),
        ("NVIDIA GH200 480GB", 132, 101_000_000_000),
        ("NVIDIA A100-SXM4-40GB", 108, 42_300_000_000),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 17_170_000_000),
    ],
)
def test_an_unknown_card_has_the_drivers_limits_and_no_made_up_peaks(monkeypatch, name, sms, memory):
    card = present_card(monkeypatch, name, sms, memory)
    assert (card.name, card.sms, card.memory, card.peak) == (name, sms, memory, {})
    assert (card.warps_per_sm, card.shared_per_block, card.l2) == (64, 232448, 50 * 2**20)
    assert card.bandwidth == pytest.approx(2 * 2.619e9 * 5120 / 8)
    assert card.bound(1, 1, torch.float32) is None


# --- Limits


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        (1, 1024, 0),
        ((2**31 - 1, 65535, 65535), (16, 16, 4), 227 * 1024),
        ((1,), (1, 1, 64), 0),
        ((7, 3), (32, 32), 48 * 1024),
    ],
)
def test_a_launch_within_the_limits_passes(grid, block, shared):
    check_launch(grid, block, shared, on=CARDS["H200"])


@pytest.mark.parametrize(
    ("grid", "block", "shared", "complaint"),
    [
        (1, 2048, 0, "a block of 2048 has 2048 threads; H200 allows 1024. Choose a smaller tile"),
        (1, (32, 33), 0, "32 x 33 has 1056 threads"),
        (1, (1, 1, 65), 0, "block.z is 65; H200 allows 64"),
        ((1, 65536), 32, 0, "grid.y is 65536; H200 allows 65535. Put the long axis on x"),
        ((1, 1, 70000), 32, 0, "grid.z is 70000"),
        (2**31, 32, 0, "grid.x is 2147483648"),
        (0, 32, 0, "grid.x is 0; it must be at least 1"),
        ((1, 1), (32, 0), 0, "block.y is 0"),
        ((1, -1), 32, 0, "grid.y is -1"),
        ((1, 1, 1, 1), 32, 0, "grid has 4 axes"),
        (1, (2, 2, 2, 2), 0, "block has 4 axes"),
        (1, 32, 227 * 1024 + 1, "a block wants 232,449 bytes of shared memory; H200 has 232,448"),
    ],
)
def test_a_launch_past_a_limit_is_refused(grid, block, shared, complaint):
    with pytest.raises(LimitError, match=complaint):
        check_launch(grid, block, shared, on=CARDS["H200"])


def test_limits_are_those_of_the_card_that_is_asked_for():
    check_launch(1, 32, 100 * 1024, on=CARDS["A100"])
    with pytest.raises(LimitError, match="T4 has 65,536"):
        check_launch(1, 32, 100 * 1024, on=CARDS["T4"])


# --- Tensors as Numba takes them


@cuda.jit
def _double_kernel(x, out):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = 2 * float32(x[i, j])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "broadcast"])
def test_a_kernel_reads_and_writes_the_tensor_itself(dtype, layout):
    base = torch.arange(1, 36, device=device.torch_device()).reshape(5, 7).to(dtype)
    x = {
        "contiguous": lambda: base,
        "transposed": lambda: base.T,
        "sliced": lambda: base[1::2, 2:6:3],
        "broadcast": lambda: base[:1].expand(3, 7),
    }[layout]()
    whole = torch.zeros(x.shape[0], 2 * x.shape[1], device=x.device, dtype=dtype)
    out = whole[:, ::2]
    _double_kernel[(1, 1), (8, 8), device.numba_stream()](device.numba_array(x), device.numba_array(out))
    assert torch.equal(out, 2 * x)
    assert not whole[:, 1::2].any(), "the kernel wrote between the elements of its output"


def test_numba_array_keeps_shape_strides_and_the_name_of_bfloat16():
    for dtype, named in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16), (torch.int64, np.int64)):
        tensor = torch.zeros(4, 6, device=device.torch_device(), dtype=dtype).T[1::2]
        array = device.numba_array(tensor)
        assert tuple(array.shape) == (3, 4)
        assert tuple(array.strides) == tuple(n * tensor.element_size() for n in tensor.stride())
        assert array.dtype == named


def test_numba_array_takes_parameters_and_empty_tensors():
    where = device.torch_device()
    assert device.numba_array(torch.ones(2, device=where, requires_grad=True)).shape == (2,)
    assert device.numba_array(torch.ones(0, 3, device=where, dtype=torch.bfloat16)).shape == (0, 3)


@pytest.mark.gpu
def test_numba_queues_behind_torch():
    x = torch.zeros(64, 64, device="cuda")
    out = torch.empty_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.add_(1)
        _double_kernel[(8, 8), (8, 8), device.numba_stream()](device.numba_array(x), device.numba_array(out))
        stream.synchronize()
    assert (out == 2).all()
