"""The weights of a layer: drawn from a seed, or read from a GPT-2 checkpoint in safetensors."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from gpukern.layer.config import Config
from gpukern.op import FLOATS, InputError, normal


class CheckpointError(InputError):
    """A checkpoint that cannot be read, is truncated, or lacks a tensor; the message names file and tensor."""


@dataclass(frozen=True)
class Weights:
    """The weights of one layer. Matrices are `[in, out]`, as GPT-2's Conv1D stores them."""

    w_qkv: torch.Tensor  # [C, 3C]: columns are Q's C, then K's, then V's
    b_qkv: torch.Tensor  # [3C]
    w_o: torch.Tensor  # [C, C]
    b_o: torch.Tensor  # [C]
    gamma: torch.Tensor  # [C]
    beta: torch.Tensor  # [C]
    w_1: torch.Tensor  # [C, F]
    b_1: torch.Tensor  # [F]
    w_2: torch.Tensor  # [F, C]
    b_2: torch.Tensor  # [C]
    first_gamma: torch.Tensor | None = None  # [C], GPT-2's norm before QKV
    first_beta: torch.Tensor | None = None  # [C]

    @classmethod
    def random(cls, config: Config, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Weights":
        """Weights drawn from `seed`, scaled so that every stage keeps its input's size. Never zeros or ones."""
        C, F = config.C, config.F
        kind = {"dtype": dtype, "device": device, "generator": torch.Generator().manual_seed(seed)}

        def matrix(n, m):
            return normal(n, m, scale=n**-0.5, **kind)

        def vector(n, mean=0.0):
            return normal(n, mean=mean, scale=0.1, **kind)

        drawn = {
            "w_qkv": matrix(C, 3 * C),
            "b_qkv": vector(3 * C),
            "w_o": matrix(C, C),
            "b_o": vector(C),
            "gamma": vector(C, mean=1.0),
            "beta": vector(C),
            "w_1": matrix(C, F),
            "b_1": vector(F),
            "w_2": matrix(F, C),
            "b_2": vector(C),
        }
        if config.first_norm:
            drawn |= {"first_gamma": vector(C, mean=1.0), "first_beta": vector(C)}
        return cls(**drawn)

    def to(self, dtype: torch.dtype, device: torch.device) -> "Weights":
        """The same weights in another dtype or on another device."""
        return self._map(lambda w: w.to(device=device, dtype=dtype))

    def require_finite(self, name: str) -> "Weights":
        """These weights, or a CheckpointError if one has a value that is no number in its dtype."""
        for field in fields(self):
            weight = getattr(self, field.name)
            if weight is not None and not bool(weight.isfinite().all()):
                dtype = str(weight.dtype).removeprefix("torch.")
                raise CheckpointError(f"{name}: {field.name} has values that are not finite in {dtype}; try float32.")
        return self

    def clone(self) -> "Weights":
        """The same weights in other memory."""
        return self._map(torch.clone)

    def columns(self) -> "Weights":
        """The same weights in other memory: a matrix `[in, out]` keeps its shape, but its columns lie one by one."""
        return self._map(lambda w: w.T.contiguous().T if w.dim() == 2 else w)

    def _map(self, change) -> "Weights":
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return Weights(**{name: w if w is None else change(w) for name, w in mine.items()})


# Ours -> GPT-2's name below "h.<layer>."
_GPT2_NAMES = {
    "w_qkv": "attn.c_attn.weight",
    "b_qkv": "attn.c_attn.bias",
    "w_o": "attn.c_proj.weight",
    "b_o": "attn.c_proj.bias",
    "gamma": "ln_2.weight",
    "beta": "ln_2.bias",
    "w_1": "mlp.c_fc.weight",
    "b_1": "mlp.c_fc.bias",
    "w_2": "mlp.c_proj.weight",
    "b_2": "mlp.c_proj.bias",
    "first_gamma": "ln_1.weight",
    "first_beta": "ln_1.bias",
}

_IN_LAYER = re.compile(r"h\.([0-9]{1,9})\.")  # the start of the name of a layer's tensor


def read_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors by GPT-2's names without any `transformer.` prefix, the file's metadata).

    Raises CheckpointError if the file is missing, is not safetensors, or is truncated.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder. Give the path of the .safetensors file in it.")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. Give the path of a GPT-2 checkpoint in safetensors.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tensors = {name.removeprefix("transformer."): file.get_tensor(name) for name in names}
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Download or copy it again; "
            "a .bin or .pt checkpoint must be converted to safetensors first."
        ) from error
    if len(tensors) < len(names):
        raise CheckpointError(
            f"{path} has tensors both with and without the prefix 'transformer.'; it must have one kind."
        )
    return tensors, metadata


def whole_number(metadata: dict[str, str], key: str, name: str) -> int | None:
    """A number of the metadata, at least 1, or None if the key is not there. Raises CheckpointError otherwise."""
    text = metadata.get(key)
    if text is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise CheckpointError(f"{name}: the metadata say {key}={text!r}; it must be a whole number from 1.")
    return int(text)


def gpt2_layer(tensors: dict[str, torch.Tensor], layer: int, name: str, heads: int | None = None):
    """(Config, Weights) of one layer of a GPT-2 checkpoint, in the checkpoint's dtype, on the CPU.

    heads  defaults to C / 64, the rule of every published GPT-2
    Raises CheckpointError naming the tensor that is missing or has the wrong shape, or the sizes that no layer has.
    """
    found = sorted({int(match[1]) for match in map(_IN_LAYER.match, tensors) if match})
    if not found:
        raise CheckpointError(f"{name} has no tensor like 'h.0.attn.c_attn.weight': it is not a GPT-2 checkpoint.")
    if layer not in found:
        raise CheckpointError(f"{name} has layers {found[0]} to {found[-1]}; there is no layer {layer}.")

    def tensor(key):
        full = f"h.{layer}.{key}"
        if full not in tensors:
            raise CheckpointError(f"{name}: tensor {full!r} is missing.")
        return tensors[full]

    drawn = {ours: tensor(theirs) for ours, theirs in _GPT2_NAMES.items()}
    for ours, theirs in _GPT2_NAMES.items():
        if ours.startswith("w_") and drawn[ours].dim() != 2:
            raise CheckpointError(f"{name}: 'h.{layer}.{theirs}' is not a matrix: {tuple(drawn[ours].shape)}.")
    C, F = drawn["w_1"].shape
    if heads is None:
        if C % 64 or not C:
            raise CheckpointError(f"{name}: C={C} is not a multiple of 64, so the number of heads must be given.")
        heads = C // 64
    shapes = {"w_qkv": (C, 3 * C), "b_qkv": (3 * C,), "w_o": (C, C), "b_1": (F,), "w_2": (F, C)}
    for ours, weight in drawn.items():
        want = shapes.get(ours, (C, F) if ours == "w_1" else (C,))
        if tuple(weight.shape) != want:
            raise CheckpointError(
                f"{name}: 'h.{layer}.{_GPT2_NAMES[ours]}' has shape {tuple(weight.shape)}; expected {want} "
                "(GPT-2's Conv1D stores [in, out])."
            )
        if weight.dtype not in (*FLOATS, torch.float64):
            dtype = str(weight.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name}: 'h.{layer}.{_GPT2_NAMES[ours]}' is {dtype}; convert it to float32 or bfloat16."
            )
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"{name}: 'h.{layer}.{_GPT2_NAMES[ours]}' has values that are not finite numbers.")
    try:
        config = Config(name, C=C, H=heads, F=F, first_norm=True)
    except InputError as error:  # the file's sizes are no layer's
        raise CheckpointError(str(error)) from error
    return config, Weights(**drawn)
