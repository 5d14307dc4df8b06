"""The host's side of Numba-CUDA on the simulated card: arrays, launches, reductions, what is said of a kernel."""

import numpy as np
import pytest
import torch
from numba import cuda, float32, guvectorize, int32, vectorize

from gpukern import device
from gpukern.simulate import Refused


@cuda.jit
def increment(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1


@cuda.jit
def increment_all(x):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += 1


def test_device_arrays_are_sliced_assigned_and_copied():
    d = cuda.to_device(np.arange(10.0))
    d[2:4] = 7
    d[0] = d[5]
    d[5:] = cuda.to_device(np.zeros(5))
    d.copy_to_device(np.r_[d.copy_to_host()[:9], 4], stream=cuda.stream())
    h = np.ones(10)
    assert d.copy_to_host(h, stream=cuda.default_stream()) is h
    assert h.tolist() == [5, 1, 7, 7, 4, 0, 0, 0, 0, 4] and d[1] == 1
    assert [part.copy_to_host().tolist() for part in d.split(5)] == [h[:5].tolist(), h[5:].tolist()]
    assert d.reshape(2, 5).T.shape == (5, 2) and d.alloc_size == d.nbytes == 80 and d.is_c_contiguous()
    with pytest.raises(ValueError, match="shape"):
        d.copy_to_device(np.zeros(3))


def test_order_and_strides_of_new_arrays():
    assert cuda.device_array((2, 3), np.float32, order="F").strides == (4, 8)
    assert cuda.device_array((2, 3), np.float32, strides=(4, 8)).strides == (4, 8)
    assert cuda.device_array_like(np.zeros((2, 3), order="F")).strides == (8, 16)
    assert np.isnan(cuda.device_array(3, np.float32).copy_to_host()).all()


def test_what_can_be_copied_to_the_card():
    for value, dtype in (([1, 2], np.int64), (3.5, np.float64), (np.float32(2), np.float32), (True, np.bool_)):
        d = cuda.to_device(value)
        assert d.dtype == dtype and np.array_equal(d.copy_to_host(), value)
    with pytest.raises(TypeError, match="Python objects"):
        cuda.to_device(None)


def test_arrays_of_any_layout_are_changed_where_they_lie():
    x = np.zeros((8, 8))
    increment_all[1, 1](x[::2, 1:5])
    increment_all[1, 1](x.T)
    assert x.sum() == 80
    f, reverse = np.zeros((3, 4), order="F"), np.zeros(5)[::-1]
    increment_all[1, 1](f)
    increment[1, 8](reverse)
    assert (f == 1).all() and (reverse == 1).all()
    tensor = torch.zeros(8)
    increment[1, 8](tensor)
    increment[1, 8](cuda.as_cuda_array(tensor))
    assert tensor.tolist() == [2] * 8
    locked = np.zeros(4)
    locked.flags.writeable = False
    with pytest.raises(Exception, match="readonly"):
        increment[1, 4](locked)


def test_scalars_have_the_types_that_numba_gives_them():
    @cuda.jit
    def kernel(out, whole, real, truth, small, both, nothing):
        out[0] = whole * 1000000007
        out[1] = real + both[0] * both[1]
        out[2] = truth + small * small
        out[3] = 1 if nothing is None else 2

    out = np.zeros(4)
    kernel[1, 1](out, 3_000_000_000, 0.1, True, np.uint8(200), (2, 0.5), None)
    assert out.tolist() == [float(3_000_000_000 * 1000000007), 1.1, 40001, 1]


def test_wrong_launches_fail_as_numbas_do():
    x = np.zeros(3)
    with pytest.raises(ValueError, match="launch configuration"):
        increment(x)
    with pytest.raises(ValueError, match="griddim and blockdim"):
        increment[1, 2, 3, 4, 5](x)
    with pytest.raises(TypeError, match="sequence of integers"):
        increment[1.5, 2](x)
    with pytest.raises(TypeError, match="Signature mismatch: 2 argument types given, but function takes 1"):
        increment[1, 8](x, 2)
    with pytest.raises(ValueError, match="Numba type of <class 'dict'>"):
        increment[1, 8]({1: 2})

    @cuda.jit
    def reads_a_record(r):
        r.n += 1

    with pytest.raises(Refused, match="a record as an argument"):
        reads_a_record[1, 1](np.zeros(1, np.dtype([("n", "i8")], align=True))[0])


def test_every_way_to_configure_a_launch():
    x = np.zeros(100)
    increment[(1,), (128,), cuda.default_stream(), 0](x)
    increment[np.int64(1), np.int32(128)](x)
    increment.configure(1, 128, stream=0, sharedmem=0)(x)
    increment.forall(100, tpb=32)(x)
    increment.specialize(x)[1, 128](x)
    assert (x == 5).all()


@pytest.mark.parametrize(
    "options",
    [{"fastmath": True}, {"debug": True, "opt": False}, {"lineinfo": True}, {"max_registers": 32}, {"cache": True}],
    ids=str,
)
def test_options_of_the_compiler_are_accepted(options):
    x = np.zeros(4)
    cuda.jit(**options)(increment.py_func)[1, 4](x)
    assert (x == 1).all()


def test_declared_signatures_and_inlined_functions():
    @cuda.jit("float32(float32, float32)", device=True)
    def add(a, b):
        return a + b

    @cuda.jit(device=True, inline="always")
    def twice(a):
        return 2 * a

    @cuda.jit(["void(float32[:])", "void(float64[:])"])
    def kernel(out):
        out[0] = add(1, 2) + twice(3.5)

    a, b = np.zeros(1, np.float32), np.zeros(1)
    kernel[1, 1](a)
    kernel[1, 1](b)
    assert a[0] == b[0] == 10
    assert kernel.overloads[(float32[:],)].max_cooperative_grid_blocks(1024) == 2 * device.card().sms


def test_static_and_dynamic_shared_memory_together():
    @cuda.jit
    def kernel(out):
        a, b = cuda.shared.array(8, float32), cuda.shared.array(0, int32)
        t = cuda.threadIdx.x
        a[t], b[t] = t, 10 * t
        cuda.syncthreads()
        out[t] = a[7 - t] + b[7 - t]

    out = np.zeros(8)
    kernel[1, 8, 0, 32](out)
    assert out.tolist() == [11 * t for t in range(7, -1, -1)]


def test_reductions_of_numba():
    total = cuda.reduce(lambda a, b: a + b)
    assert total(np.arange(1000.0)) == 499_500 and total(cuda.to_device(np.arange(10)), init=5) == 50
    assert total(np.zeros(0)) == 0 and total(np.arange(3.0), size=2) == 1

    @cuda.Reduce
    def largest(a, b):
        return max(a, b)

    found = cuda.device_array(1, np.int64)
    largest(np.arange(5000), res=found)
    assert found.copy_to_host()[0] == 4999


def test_ufuncs_for_the_card():
    @vectorize(["float32(float32, float32)"], target="cuda")
    def add(a, b):
        return a + b

    @guvectorize(["void(float32[:], float32[:])"], "(n)->()", target="cuda")
    def row_sum(row, out):
        out[0] = row.sum()

    assert add(np.ones(3, np.float32), np.float32(2)).tolist() == [3, 3, 3]
    assert row_sum(np.ones((2, 3), np.float32)).tolist() == [3, 3]


def test_what_is_said_of_a_compiled_kernel():
    kernel = cuda.jit(increment.py_func)
    kernel[1, 4](np.zeros(4))
    (ptx,) = kernel.inspect_asm().values()
    assert ".visible .entry" in ptx and kernel.get_shared_mem_per_block("void(float64[::1])") == 0
    with pytest.raises(device.DeviceError, match=r"gpukern.inspect.compiled\(kernel, signature, card\)"):
        kernel.inspect_sass()


def test_the_card_and_its_streams():
    now = cuda.get_current_device()
    assert (32, device.card().sms) == (now.WARP_SIZE, now.MULTIPROCESSOR_COUNT)
    assert now.MAX_THREADS_PER_MULTI_PROCESSOR == 2048 and now.COMPUTE_CAPABILITY_MAJOR == 9
    with pytest.raises(AttributeError, match="does not know PCI_BUS_ID"):
        _ = now.PCI_BUS_ID
    assert cuda.current_context().get_memory_info() == (device.card().memory,) * 2
    with cuda.gpus[0] as card:
        assert card is cuda.gpus.lst[0] is cuda.gpus.current
    heard = []
    cuda.stream().add_callback(lambda stream, status, arg: heard.append((status, arg)), "done")
    with cuda.profiling(), cuda.pinned(np.zeros(2)), cuda.defer_cleanup(), cuda.mapped(np.zeros(8)) as seen:
        increment[1, 8](seen)
    assert heard == [(0, "done")] and seen.copy_to_host().tolist() == [1] * 8
    start, end = cuda.event(), cuda.event(timing=True)
    start.record()
    end.record(cuda.stream())
    end.synchronize()
    with pytest.raises(device.DeviceError, match="counts and does not time"):
        cuda.event_elapsed_time(start, end)


def test_the_transpose_of_a_device_array_is_a_copy():
    x = cuda.to_device(np.arange(6.0).reshape(2, 3))
    assert x.T.copy_to_host().tolist() == [[0, 3], [1, 4], [2, 5]] and x.T.is_c_contiguous()
    x.T[0] = 9
    assert x.copy_to_host()[0, 0] == 0
    with pytest.raises(NotImplementedError, match="non-2D"):
        _ = cuda.to_device(np.zeros(3)).T
