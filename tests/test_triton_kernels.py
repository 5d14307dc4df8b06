"""Correct Triton kernels, as tutorials and puzzles have them: right on the simulated GPU, and nothing is reported."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gpukern import bench, device, simulate

triton = pytest.importorskip("triton", reason="Triton installs on Linux only")
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not device.simulated(), reason="the simulated GPU is off where there is a card"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated"),
]


def clean(kernel, grid, *args, **meta):
    """Run; nothing may be found."""
    report = simulate.run(kernel, grid, None, *args, **meta)
    assert report.faults == []
    return report


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=mask) + tl.load(y_ptr + i, mask=mask), mask=mask)


def test_add_and_its_counters():
    x, y, out = normal(1000), normal(1000, seed=1), torch.empty(1000)
    report = clean(add_kernel, lambda meta: (triton.cdiv(1000, meta["BLOCK"]),), x, y, out, 1000, BLOCK=256)
    assert torch.equal(out, x + y)
    counters = {name: n for name, n in report.counters.items() if n}
    assert counters == {
        "global_load_requests": 8,
        "global_load_sectors": 250,
        "global_load_unique_bytes": 8000,
        "global_store_requests": 4,
        "global_store_sectors": 125,
        "global_store_unique_bytes": 4000,
        "flops": 1024,  # the masked lanes compute, too
    }
    assert (report.grid, report.block, report.language) == ((4, 1, 1), (128, 1, 1), "triton")
    (load, *_, store) = report.trace
    assert (load.doing, load.array, store.doing, store.array) == ("load", "x_ptr", "store", "out_ptr")
    assert load.threads.tolist() == load.index[0].tolist() == list(range(256))
    assert (load.address == 4 * load.index[0]).all()
    assert report.frame()["global_load_requests"].sum() == 8


@triton.jit
def strided_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i * stride))


@pytest.mark.parametrize("stride, sectors", [(1, 8), (2, 16), (8, 64), (16, 64)])
def test_sectors_of_a_strided_load(stride, sectors):
    report = clean(strided_kernel, 1, normal(1024)[: 64 * stride], torch.empty(64), stride, BLOCK=64)
    assert report.counters["global_load_sectors"] == sectors
    shifted = clean(strided_kernel, 1, normal(1024)[1 : 1 + 64 * stride], torch.empty(64), stride, BLOCK=64)
    assert shifted.counters["global_load_sectors"] == sectors + (stride == 1)


@triton.jit
def softmax_kernel(out_ptr, x_ptr, x_stride, out_stride, n_rows, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    start, step = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(start, n_rows, step, num_stages=STAGES):
        n = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + n, mask=n < n_cols, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + n, e / tl.sum(e, axis=0), mask=n < n_cols)


def test_persistent_softmax_of_a_view():
    x, out = normal(13, 90)[:, 5:82], torch.empty(13, 77)
    clean(softmax_kernel, (4,), out, x, x.stride(0), 77, 13, 77, BLOCK=128, STAGES=4, num_warps=8, outputs="out_ptr")
    torch.testing.assert_close(out, x.softmax(-1))


@triton.jit
def leaky(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    in_group = GROUP * across
    first_m = pid // in_group * GROUP
    size_m = min(tl.cdiv(M, BM) - first_m, GROUP)
    pid_m, pid_n = first_m + pid % in_group % size_m, pid % in_group // size_m
    tl.assume(pid_m >= 0)
    m = (pid_m * BM + tl.arange(0, BM)) % M
    n = (pid_n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + (m[:, None] * sam + k[None, :] * sak)
    b_ptrs = b_ptr + (k[:, None] * sbk + n[None, :] * sbn)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=k[None, :] < K - k0 * BK, other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < K - k0 * BK, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BK * sak
        b_ptrs += BK * sbk
    if ACTIVATION == "leaky":
        total = leaky(total)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + scm * m[:, None] + scn * n[None, :], total.to(tl.float16), mask=mask)


def test_matmul_in_groups():
    a, b, c = normal(70, 45).half(), normal(45, 50, seed=1).half(), torch.empty(70, 50, dtype=torch.float16)
    grid = lambda meta: (triton.cdiv(70, meta["BM"]) * triton.cdiv(50, meta["BN"]),)  # noqa: E731
    arguments = a, b, c, 70, 50, 45, *a.stride(), *b.stride(), *c.stride()
    report = clean(matmul_kernel, grid, *arguments, BM=32, BN=16, BK=16, GROUP=2, ACTIVATION="leaky", num_stages=3)
    wanted = torch.nn.functional.leaky_relu(a.float() @ b.float())
    torch.testing.assert_close(c.float(), wanted, atol=2e-2, rtol=1e-2)
    (dots,) = (n for (name, line), n in report.lines.items() if name == "flops" and "tl.dot" in report.source(line))
    assert dots == 12 * 3 * 2 * 32 * 16 * 16


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > p
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, tl.where(keep, x / (1 - p), 0.0), mask=i < n)


def test_dropout():
    x, out, again = torch.ones(1000), torch.empty(1000), torch.empty(1000)
    clean(dropout_kernel, (8,), x, out, 1000, 0.25, 7, BLOCK=128)
    clean(dropout_kernel, (4,), x, again, 1000, 0.25, 7, BLOCK=256)
    assert torch.equal(out, again) and 0.7 < (out > 0).float().mean() < 0.8
    torch.testing.assert_close(out[out > 0], torch.full((int((out > 0).sum()),), 4 / 3))


@triton.jit
def layer_norm_kernel(x_ptr, out_ptr, weight_ptr, bias_ptr, mean_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    out_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        x = tl.where(n < N, x - mean, 0.0)
        square += x * x
    rstd = 1 / tl.sqrt(tl.sum(square, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        mask = n < N
        x = tl.load(x_ptr + n, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(weight_ptr + n, mask=mask) + tl.load(bias_ptr + n, mask=mask)
        tl.store(out_ptr + n, y, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layer_norm(dtype):
    x, weight, bias = (normal(5, 77) + 3).to(dtype), normal(77, seed=1).to(dtype), normal(77, seed=2).to(dtype)
    out, mean = torch.empty_like(x), torch.empty(5)
    clean(layer_norm_kernel, (5,), x, out, weight, bias, mean, 77, 77, 1e-5, BLOCK=32, outputs=("out_ptr", "mean_ptr"))
    wanted = torch.nn.functional.layer_norm(x.float(), (77,), weight.float(), bias.float())
    torch.testing.assert_close(out.float(), wanted, atol={4: 1e-4, 2: 4e-2}[x.element_size()], rtol=1e-2)


@triton.jit
def weight_gradient_kernel(dy_ptr, part_ptr, lock_ptr, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    group = row % GROUPS
    lock_ptr += group
    count_ptr = lock_ptr + GROUPS
    part_ptrs = part_ptr + group * N + n
    part = tl.load(dy_ptr + row * N + n, mask=n < N, other=0.0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    count = tl.load(count_ptr)
    if count == 0:
        tl.atomic_xchg(count_ptr, 1)
    else:
        part += tl.load(part_ptrs, mask=n < N)
    tl.store(part_ptrs, part, mask=n < N)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def test_sums_under_a_lock():
    dy, part, locks = normal(12, 20), torch.zeros(3, 20), torch.zeros(6, dtype=torch.int32)
    report = clean(weight_gradient_kernel, (12,), dy, part, locks, 20, GROUPS=3, BLOCK=32)
    torch.testing.assert_close(part.sum(0), dy.sum(0))
    assert report.counters["barriers"] == 12 and report.counters["atomics"] == 27


@triton.jit
def asin_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, libdevice.asin(x), mask=i < n)


def test_libdevice_asin():
    x, out = torch.linspace(-1, 1, 100), torch.empty(100)
    clean(asin_kernel, (2,), x, out, 100, BLOCK=64)
    torch.testing.assert_close(out, x.asin())


@triton.jit
def grouped_kernel(a_ptrs, b_ptrs, c_ptrs, sizes_ptr, GROUPS: tl.constexpr, PROGRAMS: tl.constexpr, B: tl.constexpr):
    tile = tl.program_id(0)
    done = 0
    for g in range(GROUPS):
        M, N, K = tl.load(sizes_ptr + 3 * g), tl.load(sizes_ptr + 3 * g + 1), tl.load(sizes_ptr + 3 * g + 2)
        across = tl.cdiv(N, B)
        tiles = tl.cdiv(M, B) * across
        while tile >= done and tile < done + tiles:
            a_ptr = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float16))
            b_ptr = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float16))
            c_ptr = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float16))
            m = (tile - done) // across * B + tl.arange(0, B)
            n = (tile - done) % across * B + tl.arange(0, B)
            k = tl.arange(0, B)
            total = tl.zeros((B, B), dtype=tl.float32)
            for k0 in range(0, K, B):
                tl.multiple_of(k0, B)
                a = tl.load(a_ptr + m[:, None] * K + k0 + k[None, :])
                b = tl.load(b_ptr + (k0 + k[:, None]) * N + n[None, :])
                total += tl.dot(a, b)
            tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(tl.float16))
            tile += PROGRAMS
        done += tiles


def grouped_launch(short=0):
    sizes = [(32, 16, 48), (16, 32, 16), (48, 48, 16)]
    a = [normal(M, K).half() for M, N, K in sizes]
    b = [normal(K, N, seed=1).half() for M, N, K in sizes]
    c = [torch.zeros(M - short, N).half() for M, N, K in sizes]
    addresses = [torch.tensor([t.data_ptr() for t in group]) for group in (a, b, c)]
    report = simulate.run(grouped_kernel, (4,), None, *addresses, torch.tensor(sizes).int().reshape(-1), 3, 4, B=16)
    return report, [x.float() @ y.float() for x, y in zip(a, b, strict=True)], c


def test_a_grouped_matmul_through_pointers_in_memory():
    with FakeTensorMode():
        _only_a_shape = torch.empty(4)  # as a compiler keeps them alive: pointers lead past it
    report, wanted, c = grouped_launch()
    assert report.faults == []
    for got, want in zip(c, wanted, strict=True):
        torch.testing.assert_close(got.float(), want, atol=5e-2, rtol=1e-2)
    report, _, _ = grouped_launch(short=1)
    assert [f.kind for f in report.faults] == ["out_of_bounds"]


@triton.jit
def persistent_kernel(a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    across, tiles = tl.cdiv(N, BN), tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True, warp_specialize=False):
        m, n = tile // across * BM, tile % across * BN
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in tl.range(0, K, BK):
            total = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, total)
        c_desc.store([m, n], total.to(tl.float16))


def test_a_persistent_matmul_with_descriptors():
    a, b, c = normal(40, 64).half(), normal(48, 64, seed=1).half(), torch.zeros(40, 48).half()
    descriptors = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (a, b, c)]
    clean(persistent_kernel, (4,), *descriptors, 40, 48, 64, BM=16, BN=16, BK=16, outputs="c_desc")
    torch.testing.assert_close(c.float(), a.float() @ b.float().T, atol=5e-2, rtol=1e-2)


@triton.jit
def split_k_kernel(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr, SPLITS: tl.constexpr):
    i = tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k0 in range(tl.program_id(0) * B, K, B * SPLITS):
        a = tl.load(a_ptr + i[:, None] * K + k0 + i[None, :])
        total += tl.dot(a, tl.load(b_ptr + (k0 + i[:, None]) * B + i[None, :]), input_precision="ieee")
    tl.atomic_add(c_ptr + i[:, None] * B + i[None, :], total, sem="relaxed")


def test_split_k_with_atomics():
    a, b, c = normal(16, 128), normal(128, 16, seed=1), torch.zeros(16, 16)
    report = clean(split_k_kernel, (4,), a, b, c, 128, B=16, SPLITS=4)
    torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)
    assert report.counters["atomics"] == 4


@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, T, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :], mask=m[:, None] < T, other=0.0)
    most, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    for n0 in range(0, T, BN):
        n = n0 + tl.arange(0, BN)
        k = tl.load(k_ptr + n[None, :] * D + d[:, None], mask=n[None, :] < T, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where((n[None, :] <= m[:, None]) & (n[None, :] < T), scores, -float("inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.math.exp2((scores - now[:, None]) * 1.4426950408889634)
        scaled = tl.math.exp2((most - now) * 1.4426950408889634)
        v = tl.load(v_ptr + n[:, None] * D + d[None, :], mask=n[:, None] < T, other=0.0)
        out = out * scaled[:, None] + tl.dot(weights, v, input_precision="ieee")
        total = total * scaled + tl.sum(weights, 1)
        most = now
    tl.store(out_ptr + m[:, None] * D + d[None, :], out / total[:, None], mask=m[:, None] < T)


def test_fused_attention():
    q, k, v = (normal(37, 16, seed=seed) for seed in range(3))
    out = torch.empty(37, 16)
    clean(flash_kernel, (3,), q, k, v, out, 37, 1 / math.sqrt(16), BM=16, BN=16, D=16, outputs="out_ptr")
    wanted = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)


# Puzzles: small programs, each with one idea.


@triton.jit
def outer_kernel(x_ptr, y_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    x, y = tl.load(x_ptr + m, mask=m < M), tl.load(y_ptr + n, mask=n < N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.maximum(x[:, None] * y[None, :], 0.0), mask=mask)


def test_outer_product_with_relu():
    x, y, out = normal(33), normal(17, seed=1), torch.empty(33, 17)
    clean(outer_kernel, (3, 2), x, y, out, 33, 17, BM=16, BN=16, outputs="out_ptr", inputs=("x_ptr", "y_ptr"))
    torch.testing.assert_close(out, (x[:, None] * y).relu())


@triton.jit
def long_sum_kernel(x_ptr, out_ptr, T, BLOCK: tl.constexpr):
    row, total = tl.program_id(0), 0.0
    for t0 in range(0, T, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * T + t, mask=t < T))  # where the mask is off, a card has 0
    tl.store(out_ptr + row, total)


def test_a_long_sum():
    x, out = normal(4, 200), torch.empty(4)
    clean(long_sum_kernel, (4,), x, out, 200, BLOCK=64)
    torch.testing.assert_close(out, x.sum(1), atol=1e-4, rtol=1e-4)


@triton.jit
def convolution_kernel(x_ptr, w_ptr, out_ptr, H, W, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = at // W, at % W
    total = tl.zeros((BLOCK,), tl.float32)
    for dy in tl.static_range(SIZE):
        for dx in tl.static_range(SIZE):
            inside = (y + dy < H) & (x + dx < W) & (at < H * W)
            total += tl.load(x_ptr + at + dy * W + dx, mask=inside, other=0.0) * tl.load(w_ptr + dy * SIZE + dx)
    tl.store(out_ptr + at, total, mask=at < H * W)


def test_convolution():
    x, w, out = normal(9, 11), normal(3, 3, seed=1), torch.empty(9, 11)
    clean(convolution_kernel, (4,), x, w, out, 9, 11, SIZE=3, BLOCK=32, outputs="out_ptr")
    padded = torch.nn.functional.pad(x, (0, 2, 0, 2))
    torch.testing.assert_close(out, torch.nn.functional.conv2d(padded[None, None], w[None, None])[0, 0])


@triton.jit
def quantised_kernel(packed_ptr, scale_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    packed = tl.load(packed_ptr + n // 8)
    four = (packed >> (n % 8 * 4)) & 0xF
    tl.store(out_ptr + n, (four - 8).to(tl.float32) * tl.load(scale_ptr + n // 16))


def test_unpacking_four_bit_numbers():
    values = torch.arange(64) * 5 % 16
    packed = (values.reshape(8, 8) << torch.arange(0, 32, 4)).sum(1).to(torch.int32)
    scale, out = normal(4), torch.empty(64)
    clean(quantised_kernel, (1,), packed, scale, out, N=64)
    torch.testing.assert_close(out, (values - 8).float() * scale.repeat_interleave(16))


@triton.jit
def add_pairs(a_gate, a_value, b_gate, b_value):
    return a_gate * b_gate, b_gate * a_value + b_value


@triton.jit
def recurrence_kernel(gate_ptr, x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + n
    gate = tl.load(gate_ptr + at, mask=n < N, other=1.0)
    x = tl.load(x_ptr + at, mask=n < N, other=0.0)
    _, h = tl.associative_scan((gate, x), 0, add_pairs)
    tl.store(out_ptr + at, h, mask=n < N)


def test_a_linear_recurrence_by_an_associative_scan():
    gate, x, out = torch.rand(2, 27), normal(2, 27), torch.empty(2, 27)
    clean(recurrence_kernel, (2,), gate, x, out, 27, BLOCK=32)
    h, wanted = torch.zeros(2), []
    for t in range(27):
        h = gate[:, t] * h + x[:, t]
        wanted.append(h)
    torch.testing.assert_close(out, torch.stack(wanted, 1))


@triton.jit
def overlapping_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < N) * 2, mask=i < N)


def test_views_of_one_storage():
    memory = normal(64)
    wanted = 2 * memory[:32]
    clean(overlapping_kernel, (2,), memory[:32], memory[32:], 32, BLOCK=16)  # neighbours
    assert torch.equal(memory[32:], wanted)
    clean(overlapping_kernel, (2,), memory[:32], memory[:32], 32, BLOCK=16)  # in place
    assert torch.equal(memory[:32], wanted)


@triton.jit
def stream_k_kernel(
    a_ptr, b_ptr, c_ptr, done_ptr, M, N, K, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Each program takes an equal share of all steps of all tiles; who has a tile's last step stores, others add."""
    of_a_tile = tl.cdiv(K, BK)
    step, last = tl.program_id(0) * steps, (tl.program_id(0) + 1) * steps
    while step < last:
        end = tl.minimum(step + of_a_tile - step % of_a_tile, last)
        tile = step // of_a_tile
        m = tile // tl.cdiv(N, BN) * BM + tl.arange(0, BM)
        n = tile % tl.cdiv(N, BN) * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for s in range(step, end):
            k = s % of_a_tile * BK + tl.arange(0, BK)
            a = tl.load(a_ptr + m[:, None] * K + k, mask=(m[:, None] < M) & (k < K), other=0.0)
            b = tl.load(b_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        c, seen = c_ptr + m[:, None] * N + n, (m[:, None] < M) & (n < N)
        if end % of_a_tile == 0:
            tl.store(c, acc, mask=seen)
            if step % of_a_tile != 0:
                tl.atomic_xchg(done_ptr + tile, 1)
        else:
            while tl.atomic_cas(done_ptr + tile, 1, 1) != 1:
                pass
            tl.atomic_add(c, acc, mask=seen)
        step = end


def test_stream_k_waits_for_a_later_program():
    a, b, c = normal(30, 80), normal(80, 32, seed=1), torch.empty(30, 32)
    arguments = a, b, c, torch.zeros(4, dtype=torch.int32), 30, 32, 80, 4
    report = simulate.run(stream_k_kernel, 5, None, *arguments, BM=16, BN=16, BK=16, outputs="c_ptr")
    assert report.faults == []
    torch.testing.assert_close(c, a @ b)


@triton.jit
def meets_kernel(x_ptr, out_ptr, count_ptr, ROUNDS: tl.constexpr, AFTER: tl.constexpr):
    me, all = tl.program_id(0), tl.num_programs(0)
    for round in range(ROUNDS):
        x = tl.load(x_ptr + round * all + (me + 1) % all)
        tl.store(x_ptr + (round + 1) * all + me, x + 1)
        tl.atomic_add(count_ptr, 1)
        if AFTER:
            while tl.atomic_add(count_ptr, 0) < (round + 1) * all:
                pass
    tl.store(out_ptr + me, tl.load(x_ptr + ROUNDS * all + me))


def test_programs_that_meet_at_barriers_over_the_grid():
    def launch(after):
        x, out = torch.zeros(4, 6), torch.zeros(6)
        x[0] = torch.arange(6)
        return simulate.run(meets_kernel, 6, None, x, out, torch.zeros(1, dtype=torch.int32), 3, after), out

    report, out = launch(True)
    assert report.faults == [] and out.tolist() == [(n + 3) % 6 + 3 for n in range(6)]
    assert {fault.kind for fault in launch(False)[0].faults} == {"race"}


@pytest.mark.slow
def test_the_checks_cost_less_than_they_save():
    """With all of them, softmax is at least twice as fast as in Triton's own interpreter, and matmul is not slower."""
    results = {result.what: result.ratio for result in bench.simulator("triton")}
    assert results["triton softmax"] >= 2 and results["triton matmul"] >= 1, results
