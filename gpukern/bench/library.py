"""`gpukern bench peers`: the library's kernels and plans beside what a user would take instead, in one run."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpukern.bench.race import Outcome, Work, compile_ahead, measured_rates, race, require_card
from gpukern.kernels import OPS
from gpukern.layer import PLANS, Layer, Step
from gpukern.op import error

BF16, FP32 = torch.bfloat16, torch.float32
_BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def peers(only: str = "") -> Iterator[Outcome]:
    """One Outcome for each piece of work whose name holds `only`. Raises DeviceError without a card."""
    require_card()
    compile_ahead(works, only)
    rates = measured_rates()
    for work in works(only):
        yield race(work, rates)
        torch.cuda.empty_cache()


def works(only: str = "") -> Iterator[Work]:
    """The pieces of work whose name holds `only`."""
    for make in (_layers, _matmuls, _attention, _matvec, _rows, _numba):
        yield from (work for work in make() if only in work.name)


def _random(*size: int, dtype=BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device="cuda") * scale).to(dtype)


def _against(op: str):
    """The error of a result against the operation's reference."""
    return lambda out, **inputs: error(out, OPS[op].reference(**inputs))


def _two_heads(out, q, k, v, causal) -> float:
    """The error of the first two heads of the first sequence: float64 scores of all would not fit in memory."""
    expected = OPS["attention"].reference(q[:1, :2], k[:1, :2], v[:1, :2], causal)
    return error(out[:1, :, : expected.shape[-1]], expected)


def _tiled(name: str, version, tiles: tuple) -> Iterator[tuple]:
    """(name with its tile, the version with that tile): the default one, and those of `tiles`, by the names it has."""
    for tile in dict.fromkeys((tuple(version.tile.values()), *tiles)):
        sizes = dict(zip(version.tile, tile, strict=True))
        yield f"{name} {' '.join(map(str, tile))}", functools.partial(version, **sizes)


# Tiles worth a race, beside a version's default; in the order of its names.
_TILES = {
    ("matmul", "triton"): (
        *((128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 8, 4), (64, 256, 64, 8, 3)),
        *((128, 64, 128, 4, 3), (64, 128, 128, 4, 3), (128, 64, 64, 4, 4), (128, 128, 64, 8, 2), (64, 64, 128, 4, 3)),
    ),
    ("matmul", "triton_persistent"): ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3)),
    ("matmul", "cutlass"): ((128, 256, 64, 3), (128, 128, 64, 4), (128, 128, 64, 6), (64, 128, 64, 6)),
    ("matmul", "numba_vectorised"): ((128, 128, 16), (128, 128, 8)),
    ("attention", "triton_flash"): ((128, 128, 8, 2),),
    ("attention", "triton_flash_descriptors"): ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
    ("attention", "triton_split_kv"): ((64, 4, 4, 3), (64, 4, 4, 4), (128, 8, 4, 3), (64, 16, 4, 3)),
    ("matvec", "triton"): (
        *((1, 4096, 4, 1), (2, 2048, 4, 1), (2, 1024, 2, 1), (1, 2048, 4, 1), (4, 512, 2, 1), (4, 1024, 4, 1)),
        *((1, 1024, 1, 1), (1, 2048, 2, 1), (2, 512, 1, 1), (4, 1024, 2, 1), (2, 2048, 8, 1), (1, 4096, 8, 1)),
    ),
    ("matvec", "triton_split_k"): (
        *((256, 32, 16, 8, 1), (512, 16, 8, 8, 1), (128, 64, 16, 8, 1), (128, 64, 32, 8, 1)),
        *((256, 32, 8, 8, 4), (128, 64, 16, 8, 4), (128, 64, 32, 8, 3)),
    ),
    ("residual_layernorm", "triton"): ((8,), (16,)),
    ("copy", "numba_vectorised"): ((256, 2), (512, 4)),
    ("softmax", "triton"): ((4096, 4), (4096, 16), (2048, 4), (1024, 4)),
    ("reduction", "numba_last_block"): ((256, 8), (512, 2), (1024, 2)),
    ("transpose", "numba_vectorised"): ((128,), (512,)),
}


def _raced(op: str, *languages: str, without: tuple = ()) -> dict:
    """{name and tile: call} of the versions in these languages, each with its default tile and those of _TILES."""
    return {
        called: call
        for name, version in OPS[op].versions.items()
        if version.language in languages and name not in without
        for called, call in _tiled(name, version, _TILES.get((op, name), ()))
    }


def _layers() -> Iterator[Work]:
    for config, step, floor in (
        ("c4096", Step(1, 1, 2048), 1 / 0.97),
        ("gpt2", Step(1, 1, 2048), 1 / 0.80),
        ("gpt2", Step(1, 512, 512), 1.0),
        ("gpt2", Step(1, 2048, 2048), 1.0),
        ("c4096", Step(1, 2048, 2048), 1 / 1.08),
    ):
        layer = Layer.random(config, BF16)
        cost = layer.costs(PLANS["compile"], step)
        first = [layer]

        def inputs(layer=layer, step=step, first=first):
            mine = first.pop() if first else layer.copy()
            _ = mine.weights, mine.columns  # made now: not while a graph is captured
            x, cache = mine.inputs(step)
            return {"layer": mine, "x": x, "cache": cache}

        names = [name for name in PLANS if name not in ("reference", "eager", "numba", "compile")]
        yield Work(
            f"layer {config} {step.phase} B={step.B} T={step.T} S={step.S}",
            inputs,
            {name: _by_plan(name) for name in names},
            {"torch.compile": _by_plan("compile")},
            floor,
            sum(c.bytes for c in cost),
            sum(c.flops for c in cost),
            lambda out, layer, x, cache: error(out, layer.exact(x, cache)),
            layer.tolerance(),
        )


def _by_plan(name: str):
    """The layer by a plan, at the same step each time."""

    def plan(layer, x, cache):
        length = cache.length
        out = layer.run(x, cache, name)
        cache.length = length
        return out

    return plan


def _matmuls() -> Iterator[Work]:
    large = [(2048, 12288, 4096), (2048, 4096, 4096), (2048, 16384, 4096), (2048, 4096, 16384)]
    large += [(4096, 4096, 4096), (8192, 8192, 8192)]
    small = [(2048, 2304, 768), (2048, 768, 768), (2048, 3072, 768), (2048, 768, 3072)]
    for sizes, floor in [(s, 0.94) for s in large] + [(s, 0.78) for s in small]:
        M, N, K = sizes
        ours = _raced("matmul", "triton", "cutlass", without=("triton_naive", "triton_grouped"))
        yield Work(
            f"matmul bfloat16 {M}x{N}x{K}",
            lambda M=M, N=N, K=K: {"a": _random(M, K), "w": _random(K, N, scale=K**-0.5)},
            ours,
            {"cuBLAS": lambda a, w: a @ w},
            floor,
            2 * (M * K + K * N + M * N),
            2 * M * N * K,
            _against("matmul"),
            OPS["matmul"].tolerance[BF16],
        )


def _sdpa(backend: SDPBackend):
    def run(q, k, v, causal):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] == k.shape[2])
        return out.transpose(1, 2).flatten(2)

    return run


def _attention() -> Iterator[Work]:
    for B, H, T, S, D, floor, backends in (
        (4, 32, 2048, 2048, 128, 1.3, ("SDPA flash",)),
        (1, 32, 1, 2048, 128, 1 / 0.95, tuple(_BACKENDS)),
        (1, 32, 1, 32768, 128, 1 / 1.02, tuple(_BACKENDS)),
    ):
        pairs = T * (T + 1) // 2 if T == S else T * S
        yield Work(
            f"attention bfloat16 B={B} H={H} T={T} S={S} D={D}",
            lambda B=B, H=H, T=T, S=S, D=D: {
                "q": _random(B, H, T, D),
                "k": _random(B, H, S, D),
                "v": _random(B, H, S, D),
                "causal": True,
            },
            _raced("attention", "triton", without=("triton",)),
            {name: _sdpa(_BACKENDS[name]) for name in backends},
            floor,
            2 * B * H * D * 2 * (T + S),
            4 * B * H * D * pairs,
            _two_heads,
            OPS["attention"].tolerance[BF16],
        )


def _matvec() -> Iterator[Work]:
    for N, K in ((12288, 4096), (4096, 16384)):
        for layout in ("[K, N]", "[N, K]"):
            rows = layout == "[N, K]"

            def inputs(N=N, K=K, rows=rows):
                w = _random(N, K, scale=K**-0.5).t() if rows else _random(K, N, scale=K**-0.5)
                return {"a": _random(1, K), "w": w}

            yield Work(
                f"matvec bfloat16 {K}x{N} stored {layout}",
                inputs,
                _raced("matvec", "triton"),
                {"read probe": _read},
                0.92,
                2 * N * K,
                2 * N * K,
                _against("matvec"),
                OPS["matvec"].tolerance[BF16],
            )


def _rows() -> Iterator[Work]:
    for M, N in ((16384, 4096), (65536, 1024)):
        for op, more in (("residual_layernorm", ("residual",)), ("softmax", ())):

            def inputs(M=M, N=N, op=op, more=more):
                made = {"x": _random(M, N)}
                if op == "residual_layernorm":
                    made |= {"gamma": _random(N), "beta": _random(N)}
                return made | {name: _random(M, N) for name in more}

            reads = 1 + len(more)
            yield Work(
                f"{op} bfloat16 {M}x{N}",
                inputs,
                _raced(op, "triton"),
                _copies(reads + 1),
                0.95,
                2 * M * N * (reads + 1),
                0,
                _against(op),
                OPS[op].tolerance[BF16],
            )


def _numba() -> Iterator[Work]:
    n = 4096
    yield Work(
        f"numba matmul float32 {n}x{n}x{n}",
        lambda: {"a": _random(n, n, dtype=FP32), "w": _random(n, n, dtype=FP32, scale=n**-0.5)},
        _raced("matmul", "numba", without=("numba_naive", "numba_coalesced")),
        {"cuBLAS, TF32 off": lambda a, w: a @ w},
        0.70,
        4 * 3 * n * n,
        2 * n**3,
        _against("matmul"),
        4 * OPS["matmul"].tolerance[FP32],  # which is for a few hundred products; rounding grows with their root
    )
    for op, shape in (("copy", (1 << 28,)), ("transpose", (16384, 16384)), ("reduction", (1 << 28,))):
        peers = {"sum": lambda x: x.sum()} if op == "reduction" else _copies(2)
        x_bytes = 4 * torch.Size(shape).numel()
        yield Work(
            f"numba {op} float32 {'x'.join(map(str, shape))}",
            lambda shape=shape: {"x": _random(*shape, dtype=FP32)},
            _raced(op, "numba"),
            peers,
            0.90,
            x_bytes * (1 if op == "reduction" else 2),
            0,
            _against(op),
            OPS[op].tolerance[FP32],
        )


def _copies(streams: int) -> dict:
    """As many bytes as the work reads and writes in streams of the size of x, by PyTorch; the fastest way counts."""

    def copied(x, **_):
        return x.clone()

    def computed(x, residual=None, **_):
        return x + residual if streams == 3 else x * 1

    return {"copy": copied, "an elementwise kernel": computed} if streams == 2 else {"x + residual": computed}


def _read(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    from gpukern.bench.probes import read

    return read(w)
