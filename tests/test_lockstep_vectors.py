"""16 bytes a thread at once, on the simulated GPU: one request, checked for alignment and bounds."""

import numpy as np
import pytest
from numba import cuda, float32

from gpukern import device, simulate
from gpukern.kernels.intrinsics import load4, smid, store4

pytestmark = pytest.mark.skipif(not device.simulated(), reason="looks at what the simulated GPU reports")


@cuda.jit
def copy(x, out, first):
    i = 4 * cuda.grid(1) + first
    if i < out.size:
        store4(out, i, load4(x, i))


@cuda.jit
def reverse(x, out):
    s = cuda.shared.array((16, 16), float32)
    t = cuda.threadIdx.x
    store4(s, 4 * t, load4(x, 4 * t))
    cuda.syncthreads()
    a, b, c, d = load4(s, 4 * (63 - t))
    store4(out, 4 * t, (d, c, b, a))


def arrays(n=256):
    return np.arange(n, dtype=np.float32), np.zeros(n, np.float32)


def test_a_quarter_of_the_requests_for_the_same_sectors():
    x, out = arrays()
    report = simulate.run(copy, 1, 64, x, out, 0)
    assert report.faults == [] and np.array_equal(x, out)
    assert (report.counters["global_load_requests"], report.counters["global_load_sectors"]) == (2, 32)
    assert (report.counters["global_store_requests"], report.counters["global_store_sectors"]) == (2, 32)
    assert report.compiled.features["vector_loads"] == report.compiled.features["vector_stores"] == 1


def test_in_shared_memory_a_quarter_of_a_warp_goes_at_once():
    x, out = arrays()
    report = simulate.run(reverse, 1, 64, x, out)
    assert report.faults == [] and np.array_equal(x[::-1], out)
    assert report.counters["shared_load_wavefronts"] == report.counters["shared_store_wavefronts"] == 8


def test_what_does_not_begin_at_16_bytes_is_a_fault():
    x, out = arrays()
    fault = simulate.run(copy, 1, 64, x, out, 1).faults[0]
    assert (fault.kind, fault.array, fault.index, fault.count) == ("misaligned", "x", (1,), 64)
    assert [f.kind for f in simulate.run(copy, 1, 64, x[1:], out, 0).faults] == ["misaligned"]


def test_past_the_end_is_out_of_bounds():
    x, out = arrays()
    faults = simulate.run(copy, 1, 64, x[:250], out, 0).faults
    assert [(f.kind, f.array, f.count) for f in faults] == [("out_of_bounds", "x by fours", 2)]


def test_threads_that_meet_race():
    @cuda.jit
    def kernel(x, out):
        store4(out, 4 * (cuda.threadIdx.x // 2), load4(x, 4 * cuda.threadIdx.x))

    assert {f.kind for f in simulate.run(kernel, 1, 64, *arrays()).faults} == {"race"}


def test_only_float32_laid_one_after_the_other():
    for wrong in (np.zeros(64, np.float64), np.zeros(64, np.float32)[::2]):
        with pytest.raises(Exception, match="contiguous float32 arrays"):
            simulate.run(copy, 1, 4, wrong, wrong, 0)


def test_the_simulated_gpu_has_no_sms_to_name():
    @cuda.jit
    def who(out):
        out[0] = smid()

    with pytest.raises(simulate.Refused, match=r"test_lockstep_vectors.py:\d+: .*`smid`"):
        simulate.run(who, 1, 1, np.zeros(1, np.uint32))
