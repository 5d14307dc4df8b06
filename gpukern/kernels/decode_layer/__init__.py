"""decode_layer: one new token through the whole layer, all eight stages, as one operation.

`triton_stages` is five launches of one kernel, a stage each; `triton_one_kernel` is one launch, whose programs meet at
a barrier between the stages, and each asks for its next weights before it waits.

Cost for one token of a layer of width C and MLP width F at S tokens: each weight and each row of the cache once, which
is all that counts: 2 operations for each. x, z and the new rows of K and V beside them are small.
"""

import torch
import torch.nn.functional as F

from gpukern.kernels.attention import attention_torch
from gpukern.kernels.attention import reference as attention_reference
from gpukern.kernels.layernorm import reference as layernorm_reference
from gpukern.kernels.matmul import matmul_torch
from gpukern.kernels.matmul import reference as matmul_reference
from gpukern.kernels.qkv import qkv_torch, require_caches
from gpukern.kernels.qkv import reference as qkv_reference
from gpukern.op import InputError, Op, Version, normal, require

HEAD_SIZES = (16, 32, 64, 128)


def reference(x, weights, k_cache, v_cache, position: int, eps: float = 1e-5) -> tuple:
    """x: `[1, 1, C]`, weights by name (see `inputs`), caches: `[1, H, S, D]`; the token goes to row `position`.

    Returns z `[1, 1, C]` and copies of the two caches with the new row, all in float64.
    """
    w = weights
    q, k, v = qkv_reference(x, w["w_qkv"], w["b_qkv"], k_cache, v_cache, position, first_norm(w, eps))
    S = position + 1
    attn = attention_reference(q, k[:, :, :S], v[:, :, :S])[0]
    y = matmul_reference(attn, w["w_o"], w["b_o"], residual=x[0])
    n = layernorm_reference(y, w["gamma"], w["beta"], eps)
    h = matmul_reference(n, w["w_1"], w["b_1"], "gelu")
    return matmul_reference(h, w["w_2"], w["b_2"], residual=y)[None], k, v


def decode_layer_torch(x, weights, k_cache, v_cache, position: int, eps: float = 1e-5) -> tuple:
    """As `reference`, by PyTorch's own kernels in the dtype of `x`; writes into the caches."""
    w = weights
    q, k, v = qkv_torch(x, w["w_qkv"], w["b_qkv"], k_cache, v_cache, position, first_norm(w, eps))
    S = position + 1
    attn = attention_torch(q, k[:, :, :S], v[:, :, :S])[0]
    y = matmul_torch(attn, w["w_o"], w["b_o"], residual=x[0])
    n = F.layer_norm(y, y.shape[-1:], w["gamma"], w["beta"], eps)
    h = matmul_torch(n, w["w_1"], w["b_1"], "gelu")
    return matmul_torch(h, w["w_2"], w["b_2"], residual=y)[None], k, v


def first_norm(weights: dict, eps: float) -> tuple | None:
    """The norm before QKV as `qkv` takes it, or None."""
    return None if weights["first_gamma"] is None else (weights["first_gamma"], weights["first_beta"], eps)


def require_decode(x, weights: dict, k_cache, v_cache, position: int) -> tuple[int, int, int, int]:
    """(C, H, D, F) of arguments that fit together; refuses others."""
    require(x, "x", (1, 1, None))
    C = x.shape[2]
    require(k_cache, "k_cache", (1, None, None, None), like=x)
    _, H, S, D = k_cache.shape
    require(v_cache, "v_cache", (1, H, S, D), like=x)
    require_caches(k_cache, v_cache, position, 1)
    if D not in HEAD_SIZES or C != H * D:
        raise InputError(f"{H} heads of {D} in a width of {C}: C must be H * D, with D one of {HEAD_SIZES}.")
    if not k_cache.stride(3) == v_cache.stride(3) == 1:
        raise InputError("the caches must have the elements of a head side by side; make them [B, H, S, D] in memory.")
    require(weights["w_1"], "w_1", (C, None), like=x)
    F = weights["w_1"].shape[1]
    shapes = {"w_qkv": (C, 3 * C), "w_o": (C, C), "w_2": (F, C), "b_qkv": (3 * C,), "b_1": (F,)}
    for name, tensor in weights.items():
        if tensor is None and name.startswith("first_"):
            continue
        if name != "w_1":
            require(tensor, name, shapes.get(name, (C,)), like=x)
        if tensor.dim() == 1 and not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous; call .contiguous() first.")
    if not x.is_contiguous():
        raise InputError("x is not contiguous; call .contiguous() first.")
    return C, H, D, F


def inputs(shape, dtype, device, generator) -> dict:
    """Flags of `shape`: norm (one before QKV); columns (an output's weights side by side, as the kernels want them)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    C, H, F, S = (shape[axis] for axis in "CHFS")

    def matrix(K, N):
        drawn = normal(K, N, mean=K**-0.5 / 4, scale=K**-0.5, **kind)
        return drawn.T.contiguous().T if shape.get("columns") else drawn

    def vector(N, mean=0.0):
        return normal(N, mean=mean, scale=0.1, **kind)

    weights = {
        "first_gamma": vector(C, 1.0) if shape.get("norm") else None,
        "first_beta": vector(C) if shape.get("norm") else None,
        "w_qkv": matrix(C, 3 * C),
        "b_qkv": vector(3 * C),
        "w_o": matrix(C, C),
        "b_o": vector(C),
        "gamma": vector(C, 1.0),
        "beta": vector(C),
        "w_1": matrix(C, F),
        "b_1": vector(F),
        "w_2": matrix(F, C),
        "b_2": vector(C),
    }
    caches = {f"{name}_cache": normal(1, H, S, C // H, mean=0.3, **kind) for name in "kv"}
    return {
        "x": normal(1, 1, C, mean=0.5, **kind),
        "weights": weights,
        **caches,
        "position": shape.get("position", S - 1),
    }


def flops(shape) -> int:
    C, F, S, norms = shape["C"], shape["F"], shape.get("position", shape["S"] - 1) + 1, 1 + shape.get("norm", 0)
    products = 2 * (4 * C * C + 2 * C * F) + 4 * C * S
    return products + 4 * shape["H"] * S + 8 * norms * C + 3 * C + 4 * C + 9 * F


def least_bytes(shape, dtype) -> int:
    C, F, S, norms = shape["C"], shape["F"], shape.get("position", shape["S"] - 1) + 1, 1 + shape.get("norm", 0)
    weights = 4 * C * C + 2 * C * F + 5 * C + F + 2 * norms * C
    return (weights + 2 * (S - 1) * C + 4 * C) * dtype.itemsize


_TILE = {"programs": 128, "BN": 4, "splits": 4, "warps": 8, "stages": 4}

decode_layer = Op(
    name="decode_layer",
    summary="z[1, 1, C], and a new row of k_cache, v_cache[1, H, S, D], of x[1, 1, C] through a whole layer",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"C": 64, "H": 4, "F": 256, "S": 40, "columns": 1},
        {"C": 48, "H": 3, "F": 80, "S": 1},
        {"C": 96, "H": 3, "F": 144, "S": 131, "position": 97, "norm": 1, "columns": 1},
        {"C": 64, "H": 1, "F": 33, "S": 70, "norm": 1},
    ),
    flops=flops,
    bytes=least_bytes,
    tolerance={torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.decode_layer:decode_layer_torch"),
        "triton_stages": Version("triton", "gpukern.kernels.decode_layer.triton_stages:decode_layer_stages", _TILE),
        "triton_one_kernel": Version("triton", "gpukern.kernels.decode_layer.triton_stages:decode_layer", _TILE),
    },
)
