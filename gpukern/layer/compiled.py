"""The layer as torch.compile runs it: the mathematics in plain PyTorch, the kernels chosen by the compiler.

`generated` shows these kernels. The compiler's back end, Inductor, writes a Python program with the source of each
Triton kernel in it and a function that launches them in order, libraries' kernels between them. It writes Triton only
for tensors on a card, so a machine without one shows programs that were recorded.
"""

import ast
import datetime
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from gpukern import device
from gpukern.op import InputError

RECORDED = Path(__file__).parent.parent / "recorded"


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


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel of the program that the compiler wrote.

    name      as the program calls it; Inductor's names list the operations that were fused into it
    language  "triton", "cpp" (for a CPU), or "library": a kernel of cuBLAS or of PyTorch, which has no source here
    source    its source text; "" for a library's
    launches  how often one run of the layer launches it
    """

    name: str
    language: str
    source: str
    launches: int


def generated(layer, step) -> list[GeneratedKernel]:
    """The kernels that torch.compile makes of `layer` at `step`, in the order of their first launch.

    Compiled now on a card, recorded without one; see `program`, which also raises what this does.
    """
    return kernels_of(program(layer, step))


def program(layer, step) -> str:
    """The Python program that torch.compile writes for `layer` at `step`. Its first line says where it comes from.

    Raises InputError where there is no card and nobody has recorded this layer and step; the message names what was.
    """
    if not device.simulated():
        return _program(layer, step)
    name = _name(layer, step)
    found = {path.name.removesuffix(".py.txt"): path for path in sorted(RECORDED.glob("*/compile/*.py.txt"))}
    if name not in found:
        known = ", ".join(found) or "none yet"
        raise InputError(f"torch.compile's kernels for {name} were not recorded; those that were: {known}.")
    return found[name].read_text()


def record_program(layer, step) -> Path:
    """Keep the program that torch.compile writes on this card in `gpukern/recorded/<card>/compile/`; returns its path.

    Raises DeviceError without a card.
    """
    if device.simulated():
        raise device.DeviceError("torch.compile writes Triton for a CUDA card, and this machine has none.")
    card = re.sub(r"[^a-z0-9]+", "-", device.card().name.lower())
    path = RECORDED / card / "compile" / f"{_name(layer, step)}.py.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_program(layer, step))
    return path


def _name(layer, step) -> str:
    return f"{layer.config.name}-{str(layer.dtype).removeprefix('torch.')}-B{step.B}-T{step.T}-S{step.S}"


def _program(layer, step) -> str:
    """Compile the layer anew and catch the program on its way to be run."""
    import torch._inductor.config as settings
    from torch._inductor.utils import run_and_get_code

    x, cache = layer.inputs(step)
    with settings.patch(force_disable_caches=True), torch.no_grad():  # what comes from a cache is not written again
        run = torch.compile(_layer, dynamic=False)
        _, programs = run_and_get_code(run, x, layer.weights, layer.config, cache.k, cache.v, step.S - step.T)
    versions = f"torch {torch.__version__}, {datetime.date.today().isoformat()}"
    return f"# Written by torch.compile for {device.card().name}: {_name(layer, step)}, {versions}\n" + programs[0]


def kernels_of(program: str) -> list[GeneratedKernel]:
    """The kernels in a program that Inductor wrote: those it defines, and those of libraries that it calls."""
    tree = ast.parse(program)
    sources = {}  # name -> (language, source)
    for node in ast.walk(tree):
        # name = async_compile.triton("...", '''source''', device_str="cuda"); cpp_pybinding([types], '''source''')
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = _dotted(node.value.func)
            texts = [a.value for a in node.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if made.startswith("async_compile.") and texts:
                sources[node.targets[0].id] = made.split(".")[1].partition("_")[0], texts[-1].strip("\n") + "\n"
    launched = {}  # name -> how often
    for function in ast.walk(tree):
        # `call` runs them all; where it is split (a CUDA graph cannot hold some), `partition_0`, ... run what they say.
        if isinstance(function, ast.FunctionDef) and (
            function.name == "call" or function.name.startswith("partition_")
        ):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
                name = _dotted(call.func).removesuffix(".run")
                if name in sources or name.startswith(("extern_kernels.", "torch.ops.aten.")):
                    launched[name] = launched.get(name, 0) + 1
    return [GeneratedKernel(name, *sources.get(name, ("library", "")), n) for name, n in launched.items()]


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is one, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""
