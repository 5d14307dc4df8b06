"""The layer as torch.compile runs it: the mathematics in plain PyTorch, the kernels chosen by the compiler."""

import functools

import torch
import torch.nn.functional as F

from gpukern import device


def run_compiled(layer, state: dict) -> None:
    """Run all eight stages as one compiled function; leaves `z` in the state and the new rows in the cache.

    Raises DeviceError where there is no card: what the compiler would make for a CPU is not what the course shows.
    """
    if device.simulated():
        raise device.DeviceError(
            "the plan 'compile' needs a CUDA card: torch.compile makes its Triton kernels for it. "
            "Its recorded rows are shown by `gpukern layer --plan compile`; choose another plan to run here."
        )
    step, cache = state["step"], state["cache"]
    state["z"] = _compiled()(state["x"], layer.weights, layer.config, cache.k, cache.v, step.S - step.T)


@functools.cache
def _compiled():
    torch._dynamo.config.cache_size_limit = 256  # a sweep asks for many shapes; each is compiled for itself
    return torch.compile(_layer, dynamic=False)


def _layer(x, w, config, k_cache, v_cache, position):
    """x: `[B, T, C]` -> z: `[B, T, C]`; writes K and V of the new tokens at `position`."""
    B, T, C = x.shape
    S = position + T
    a = F.layer_norm(x, (C,), w.first_gamma, w.first_beta, config.eps) if config.first_norm else x
    heads = (a @ w.w_qkv + w.b_qkv).view(B, T, 3, config.H, config.D).permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
    q = heads[0]
    k_cache[:, :, position:S] = heads[1]
    v_cache[:, :, position:S] = heads[2]
    k, v = k_cache[:, :, :S], v_cache[:, :, :S]
    if T == 1 or T == S:
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
    else:  # a chunk onto a filled cache: token i sees up to column i + S - T, which is_causal would not say
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = attn.transpose(1, 2).reshape(B, T, C) @ w.w_o + w.b_o + x
    n = F.layer_norm(y, (C,), w.gamma, w.beta, config.eps)
    return F.gelu(n @ w.w_1 + w.b_1, approximate="tanh") @ w.w_2 + w.b_2 + y
