"""The language of kernels: each construct gives what Python gives, or is refused with its line."""

import cmath
import math
import operator
from collections import namedtuple
from enum import Enum, IntEnum

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32, int32, njit, uint32
from numba.cuda import bf16, fp16, libdevice

from gpukern.simulate import Refused, run

N = 8
BODY = np.dtype([("x", "f4"), ("n", "i4"), ("p", "f8", (2,))], align=True)
Point = namedtuple("Point", "a b")
TABLE = np.arange(8.0).reshape(2, 4)
NUMBERS = (1, 2, 3)


class Color(IntEnum):
    RED = 1
    BLUE = 5


class Way(Enum):
    UP = 1
    DOWN = 2


@cuda.jit(device=True)
def scaled(a, b=2, c=1.5):
    return a * b + c


@cuda.jit(device=True)
def maybe(t):
    if t > 3:
        return t * 2
    return None


@cuda.jit(device=True)
def product(a, *rest):
    return rest[0] * rest[1] + a + len(rest)


@cuda.jit(device=True)
def first_at_least(a, limit):
    for i in range(a.size):
        if a[i] >= limit:
            return i, True
    return -1, False


@cuda.jit(device=True)
def is_down(way):
    return way is Way.DOWN


@njit
def doubled(a):
    return 2 * a


def loops(x, out, t):
    s = 0.0
    for v in x:
        s += v
    for v in x[:t]:
        s += 100 * v
    for i, v in enumerate(x, 1):
        s += i * v
    for a, b, c in zip(x, range(t, 9), NUMBERS):  # noqa: B905
        s += a * b + c
    for i, j in np.ndindex(2, 3):
        s += i * j
    return s


def loops_over_tables(x, out, t):
    s = 0.0
    for row in TABLE:
        for v in row:
            s = s * 0.5 + v
    for v in TABLE.flat:
        s += v
    for (i, j), v in np.ndenumerate(TABLE):
        s += i * v - j
    r = range(2, 9, 3)
    for i in r:
        s += i
    return s + len(r) + TABLE.flat[t]


def loop_exits(x, out, t):
    i = 0
    while i < t:
        if i == 4:
            break
        i += 1
    else:
        i = 100
    for j in range(10):
        if j < t:
            continue
        for k in range(5):
            if k > j:
                break
            i += k
        else:
            i += 1000
        if j > 6:
            break
    return i


def calls(x, out, t):
    both = (1, 2.0, x[t])
    found, there = first_at_least(x, t)
    return (
        scaled(x[t]) + scaled(x[t], 3) + scaled(c=x[t], a=1) + scaled(*both) + product(1, x[t], 2.0)
        + found + there + doubled(t) + (lambda a: a * 3)(t)
    )  # fmt: skip


def optional(x, out, t):
    found = maybe(t)
    if found is None:
        return -1
    return found + 1


def tuples(x, out, t):
    pair = ((1, x[t]), (2.0, 3))
    (a, b), c = pair
    joined = (1, 2) + (3.5,)
    here = 1 if (t, 1) == (2, 1) else 0
    before = 1 if (t, 1) < (2, 5) else 0
    among = 1 if t in (2, 5) else 0
    s = sum((1, t)) + max((1, t, 3)) + min(4.0, x[t], 9)
    return a + b + c[0] + c[-1] + joined[2] + len(joined) + NUMBERS[t % 3] + here + 10 * before + 20 * among + s


def named(x, out, t):
    p = Point(b=t, a=2.5)
    return p.a * 10 + p.b + p[1] + len(p)


def enums(x, out, t):
    return (Color.BLUE + t if t == Color.RED else Color.RED) + Way.DOWN.value + (10 if is_down(Way.DOWN) else 0)


def truth(x, out, t):
    a, b = t > 3, t < 6
    c = (t and x[t]) or 7
    return (a & b) * 4 + (a | b) * 2 + (a ^ b) + (not a) + c + (1 if 1 < t <= 5 != t else 0) + (a + a)


def complex_numbers(x, out, t):
    z = complex(x[t], 2.0)
    w = z * z.conjugate() + 1j * z - z / (1 + 2j)
    return w.real + abs(z) + w.imag + (z**2).real + cmath.exp(z * 0.1).real + cmath.phase(z)


def mathematics(x, out, t):
    a, b = math.frexp(x[t] + 1)
    c, d = math.modf(x[t] * 1.25)
    q, r = divmod(t, 3)
    e = round(x[t] * 1.2345, 2) + round(x[t] * 10 + 4, -1) + round(2.5)
    return a + b * 10 + c + d + q * 7 + r + e + math.ldexp(x[t], 2) + math.remainder(x[t], 3.0) + math.gamma(x[t] + 1)


def whole_numbers(x, out, t):
    return (-t) // 3 * 100 + (-t) % 3 + (t // -3) * 1000 + t**2 + 2**t + (-8 >> t) + (t << 3) + (~t & 5) + (t ^ 3)


def slices(x, out, t):
    a, b, c = x[::2], x[::-1], x[-3:]
    local = cuda.local.array(4, float32)
    local[:] = 0
    local[1:3] = 2
    square = x.reshape(2, 4)
    return a[t // 2] + 10 * b[t] + c[t % 3] + x[-1] + local[0] + local[1] + local[2] + square[t // 4, t % 4] + len(c)


def reductions(x, out, t):
    return x.sum() + np.sum(x) + x.argmax() + x.any() + x.all() + np.searchsorted(x, x[t])


def two_arrays(x, out, t):
    s = 0.0
    both = (x, x[1:])
    for i in range(2):
        s += both[i][t % 4]
    for a in (x, x[2:]):
        s += a[1]
    return s


def casts(x, out, t):
    return int(x[t] * 1.7) + float(t) + bool(t) + float32(t) * np.float32(0.5) + np.int32(3.9) + type(x[t])(2)


CONSTRUCTS = [
    loops, loops_over_tables, loop_exits, calls, optional, tuples, named, enums, truth, complex_numbers, mathematics,
    whole_numbers, slices, reductions, two_arrays,
]  # fmt: skip


class _Host:
    """What a construct finds under the name `cuda` when Python runs it."""

    class local:
        array = staticmethod(lambda shape, dtype: np.zeros(shape, np.float32))


@pytest.mark.parametrize("construct", CONSTRUCTS, ids=lambda f: f.__name__)
def test_a_construct_gives_what_python_gives(construct, monkeypatch):
    called = cuda.jit(construct, device=True)

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = called(x, out, t)

    x, out = np.arange(N, dtype=np.float32), np.zeros(N)
    assert run(kernel, 1, N, x, out).faults == []
    own = {"cuda": _Host, "scaled": scaled.py_func, "maybe": maybe.py_func, "product": product.py_func}
    own |= {"first_at_least": first_at_least.py_func, "is_down": is_down.py_func, "doubled": doubled.py_func}
    for name, value in own.items():
        monkeypatch.setitem(construct.__globals__, name, value)
    expected = [construct(x.astype(np.float64), out, t) for t in range(N)]
    assert np.allclose(out, expected, rtol=1e-6), (out, expected)


def test_views_and_casts():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[0, t] = x.view(np.int32)[t]
        out[1, t] = TABLE[..., 1][t % 2] + x[:, None][t, 0] + TABLE.T[t % 4, 0] + x[t : t + 1].item()
        out[2, t] = int(x[t] * 1.7) + float(t) + bool(t) + float32(t) * np.float32(0.5) + np.int32(3.9)
        out[3, t] = np.int8(x[t] * 100 - 300) + int32(float32(1e20) * (x[t] - 3))

    x, out = np.arange(N, dtype=np.float32), np.zeros((4, N))
    assert run(kernel, 1, N, x, out).faults == []
    t = np.arange(N)
    assert out[0].tolist() == x.view(np.int32).tolist()
    assert out[1].tolist() == (TABLE[t % 2, 1] + x + TABLE[0, t % 4] + x).tolist()
    assert out[2].tolist() == ((x * 1.7).astype(int) + t + (t > 0) + t * 0.5 + 3).tolist()
    ends = np.where(t > 3, 2**31 - 1, np.where(t < 3, -(2**31), 0))  # a card holds a float at the end of the type
    assert out[3].tolist() == ((t * 100 - 300).astype(np.int8) + ends).tolist()


def test_records():
    @cuda.jit
    def kernel(a, out):
        s = cuda.shared.array(8, BODY)
        t = cuda.threadIdx.x
        r = a[t]
        r.x = t * 3
        a[t]["n"] += t
        a[t].p[1] = a.x[t] + 0.5
        s[t] = a[t]
        cuda.syncthreads()
        total = 0.0
        for body in s:
            total += body.x
        out[t] = s[7 - t].p[1] + a["n"][t] * 100 + total * 1000
        cuda.atomic.add(a["n"], 0, 1)

    a, out = np.zeros(N, BODY), np.zeros(N)
    a["n"] = 7
    assert [f.kind for f in run(kernel, 1, N, a, out).errors] == ["race"]  # a["n"][0] is read while it is added to
    t = np.arange(N)
    assert a["x"].tolist() == (t * 3).tolist() and a["p"][:, 1].tolist() == (t * 3 + 0.5).tolist()
    assert a["n"].tolist() == [15, *(7 + t[1:])]
    assert out[1:].tolist() == (((7 - t) * 3 + 0.5) + (7 + t) * 100 + 84_000)[1:].tolist()


def test_whole_arrays_are_assigned():
    @cuda.jit
    def kernel(a, b, c):
        t = cuda.threadIdx.x
        a[t] = t
        a[t, 1:] = 9
        b[..., t] = t
        if t == 0:
            c[()] = 5

    a, b, c = np.zeros((4, 3)), np.zeros((2, 2, 4)), np.zeros(())
    assert run(kernel, 1, 4, a, b, c).faults == []
    assert a.tolist() == [[t, 9, 9] for t in range(4)] and (b == np.arange(4)).all() and c == 5


@pytest.mark.parametrize("types", [("uint64", "int64"), ("uint8", "int8"), ("int32", "uint64")], ids=str)
def test_whole_numbers_of_mixed_signs_stay_whole(types):
    @cuda.jit
    def kernel(a, b, out):
        i = cuda.threadIdx.x
        out[0, i] = a[i] + b[i]
        out[1, i] = a[i] * b[i]
        out[2, i] = a[i] & b[i]
        out[3, i] = a[i] - b[i]
        out[4, i] = -a[i]
        out[5, i] = ~b[i]

    a, b = np.array([1, 100, 7, 90], types[0]), np.array([100, 3, 127, 5], types[1])
    out = np.zeros((6, 4), np.int64)
    run(kernel, 1, 4, a, b, out)
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    assert out.tolist() == [
        *(f(wide_a, wide_b).tolist() for f in (operator.add, operator.mul, operator.and_, operator.sub)),
        (-a).astype(np.int64).tolist(),
        (~b).astype(np.int64).tolist(),
    ]


def test_where_a_card_raises_nothing():
    @cuda.jit
    def kernel(x, n, out):
        t = cuda.threadIdx.x
        out[0] = n // (n - n) + n % (n - n) + n**-1 + 1**-5 * 4
        out[1] = x[0] / (x[0] - x[0])
        out[2] = math.gamma(x[0] * 0)
        out[3] = math.sqrt(-x[0])
        if x[t] > 0:
            raise ValueError("nobody hears this")
        out[4] = 1

    out = np.zeros(5)
    run(kernel, 1, 1, np.array([3.0]), 5, out)
    assert out[:3].tolist() == [4, math.inf, math.inf] and np.isnan(out[3]) and out[4] == 0


def test_float16_and_bfloat16():
    @cuda.jit
    def kernel(h, out):
        t = cuda.threadIdx.x
        a = fp16.hfma(h[t], h[t], fp16.hadd(h[t], h[t]))
        out[0, t] = fp16.hmax(a, h[t]) + fp16.hsqrt(h[t]) + math.sin(h[t]) + abs(-h[t])
        b = bf16.bfloat16(h[t])
        out[1, t] = float32(bf16.hsqrt(b * b + b))

    h, out = np.linspace(1, 2, N).astype(np.float16), np.zeros((2, N), np.float32)
    assert run(kernel, 1, N, h, out).faults == []
    a = (h.astype(np.float32) ** 2 + (h + h).astype(np.float32)).astype(np.float16)
    assert out[0].tolist() == (a + np.sqrt(h) + np.sin(h) + h).astype(np.float32).tolist()
    b = h.astype(ml_dtypes.bfloat16)
    assert out[1].tolist() == np.sqrt(b * b + b).astype(np.float32).tolist()


def test_the_functions_of_libdevice_and_vectors():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        s, c = libdevice.sincosf(x[t])
        v = cuda.float32x4(cuda.float32x2(1, x[t]), s, c)
        out[0, t] = v.z + v.w + v.y
        out[1, t] = libdevice.rsqrtf(x[t] + 1) + libdevice.saturatef(x[t]) + libdevice.rint(2.5)
        out[2, t] = libdevice.float_as_int(x[t]) + libdevice.clz(t) + t.bit_count()

    x, out = np.arange(N, dtype=np.float32), np.zeros((3, N))
    assert run(kernel, 1, N, x, out).faults == []
    t = np.arange(N)
    assert np.allclose(out[0], np.sin(x) + np.cos(x) + x)
    assert np.allclose(out[1], 1 / np.sqrt(x + 1) + np.minimum(x, 1) + 2)
    bits = [32 - int(n).bit_length() + int(n).bit_count() for n in t]
    assert out[2].tolist() == (x.view(np.int32) + bits).tolist()


def test_warp_functions_keep_to_their_mask():
    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        mask = uint32(0x0000FFFF) if t < 16 else uint32(0xFFFF0000)
        out[0, t] = cuda.ballot_sync(mask, t % 2 == 0)
        out[1, t] = cuda.all_sync(mask, t < 16)
        out[2, t] = cuda.any_sync(mask, t == 20)
        out[3, t] = cuda.match_any_sync(mask, t % 4 // 3) & 0xFFFFFFFF
        out[4, t] = cuda.shfl_down_sync(0xFFFFFFFF, x[t], 36)  # the five low bits count: 4

    x, out = np.arange(32.0), np.zeros((5, 32), np.int64)
    run(kernel, 1, 32, x, out)
    low = np.arange(32) < 16
    assert out[0].tolist() == np.where(low, 0x5555, 0x55550000).tolist()
    assert out[1].tolist() == low.tolist() and out[2].tolist() == (~low).tolist()
    same = np.where(np.arange(32) % 4 == 3, 0x88888888, 0x77777777)
    assert out[3].tolist() == np.where(low, same & 0xFFFF, same & 0xFFFF0000).tolist()
    assert out[4].tolist() == [min(t + 4, t if t > 27 else 31) for t in range(32)]


def test_print_formats_as_printf(capsys):
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        print("at", t, x[t], t > 0, (t, 2.5), "100%")

    run(kernel, 1, 2, np.array([0.5, 2.0]))
    assert capsys.readouterr().out == "at 0 0.500000 False (0, 2.500000) 100%\nat 1 2.000000 True (1, 2.500000) 100%\n"


@cuda.jit(device=True)
def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


def _recursion(x, t):
    x[t] = factorial(t)


def _list(x, t):
    a = [1, 2, 3]
    x[t] = a[t]


def _copied_slice(x, t):
    x[:] = x


def _ufunc(x, t):
    x[t] = np.exp(x[t])


def _array_sum(x, t):
    y = x + x
    x[t] = y[t]


def _attempt(x, t):
    try:
        x[t] = 1
    except Exception:
        x[t] = 2


def _packed(x, t):
    s = cuda.local.array(2, PACKED)
    s[0].b = 1
    x[t] = s[0].b


PACKED = np.dtype([("a", "i1"), ("b", "f8")])
REFUSED = {
    _recursion: "calls itself",
    _list: r"list\(int64\)",
    _copied_slice: "an assignment to a slice of an array",
    _ufunc: r"np.exp, which Numba-CUDA does not compile \(use math.exp\)",
    _array_sum: "`add` of array",
    _attempt: "mark_try_block",
    _packed: "a packed record",
}


@pytest.mark.parametrize("construct", REFUSED, ids=lambda f: f.__name__.strip("_"))
def test_what_is_refused_says_what_and_where(construct):
    called = cuda.jit(construct, device=True)

    @cuda.jit
    def kernel(x):
        called(x, cuda.threadIdx.x)

    with pytest.raises(Refused, match=rf"test_lockstep_language.py:\d+: .*{REFUSED[construct]}"):
        kernel[1, 4](np.ones(4))
