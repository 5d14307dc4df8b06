"""The small trained model: the course's layers in a row, between an embedding and its transpose, write text."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from gpukern.layer.layer import Layer
from gpukern.layer.plan import Plan
from gpukern.layer.weights import CheckpointError, gpt2_layer, read_checkpoint, whole_number
from gpukern.op import InputError

TRAINED = Path(__file__).parent / "trained" / "model.safetensors"


def encode(text: str, vocabulary: list[str]) -> list[int]:
    """Token ids of `text`: at each position the longest piece that fits. Decoding is joining the pieces."""
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    longest = max(map(len, vocabulary))
    tokens, at = [], 0
    while at < len(text):
        piece = next((p for n in range(longest, 0, -1) if (p := text[at : at + n]) in ids), None)
        if piece is None:
            raise InputError(f"the vocabulary has no {text[at]!r}; it knows letters, spaces and plain punctuation.")
        tokens.append(ids[piece])
        at += len(piece)
    return tokens


def trained_layer(index: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    """Layer `index` of the trained model, as config "trained"."""
    tensors, metadata = read_checkpoint(TRAINED)
    config, weights = gpt2_layer(tensors, index, "trained", whole_number(metadata, "n_head", "trained"))
    return Layer(config, lambda: weights, dtype)


class TextModel:
    """A GPT-2-shaped model whose layers run by the course's plans; what is around them is plain PyTorch.

    path   a checkpoint written by `gpukern.layer.train`: its metadata hold the vocabulary
    dtype  of weights, activations and caches
    Raises CheckpointError if the file is broken or has no vocabulary.
    """

    def __init__(self, path: str | Path = TRAINED, dtype: torch.dtype = torch.float32):
        tensors, self.metadata = read_checkpoint(path)
        heads, layers = (whole_number(self.metadata, key, str(path)) for key in ("n_head", "n_layer"))
        around = [tensors.get(name) for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")]
        if None in (heads, layers) or any(tensor is None for tensor in around) or "vocabulary" not in self.metadata:
            raise CheckpointError(
                f"{path} has no vocabulary, or lacks a part: it was not written by gpukern.layer.train."
            )
        read = [gpt2_layer(tensors, i, Path(path).stem, heads) for i in range(layers)]
        self.layers = [Layer(config, lambda weights=weights: weights, dtype) for config, weights in read]
        self.vocabulary = _vocabulary(self.metadata["vocabulary"], path)
        V, C = len(self.vocabulary), self.layers[0].config.C
        on = self.layers[0].device
        for tensor, shape in zip(around, ((V, C), (None, C), (C,), (C,)), strict=True):
            fits = tensor.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
            if not fits or not bool(tensor.to(dtype).isfinite().all()):
                raise CheckpointError(
                    f"{path}: the embedding or the last norm does not fit C={C} and {V} pieces of text."
                )
        self.wte, self.wpe, self.gamma, self.beta = (tensor.to(on, dtype) for tensor in around)

    @property
    def context(self) -> int:
        """The most tokens the model was trained to attend to."""
        return self.wpe.shape[0]

    def logits(self, tokens: torch.Tensor, caches: list, plan: Plan | str) -> torch.Tensor:
        """tokens: `[B, T]`, the next ones of the caches' sequences. Returns `[B, V]`, the scores of what follows."""
        start = caches[0].length
        x = self.wte[tokens] + self.wpe[start : start + tokens.shape[1]]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.run(x, cache, plan)
        return F.layer_norm(x[:, -1], self.gamma.shape, self.gamma, self.beta) @ self.wte.T

    def write(self, prompt: str, new: int, plan: Plan | str = "triton") -> Iterator[str]:
        """Continue `prompt` by `new` tokens, the likeliest each time: an iterator of their text, as it comes.

        One prefill over the prompt, then one decode step a token. Raises InputError if prompt and text do not fit.
        """
        ids = encode(prompt, self.vocabulary)
        if not ids or new < 1:
            raise InputError("give a prompt of at least one character, and at least one new token.")
        if len(ids) + new > self.context:
            raise InputError(
                f"{len(ids)} tokens of prompt and {new} new ones do not fit the model's {self.context}; ask for fewer."
            )
        return self._write(ids, new, plan)

    def _write(self, ids: list[int], new: int, plan: Plan | str) -> Iterator[str]:
        caches = [layer.cache(1, len(ids) + new) for layer in self.layers]
        tokens = torch.tensor([ids], device=self.wte.device)
        for _ in range(new):
            tokens = self.logits(tokens, caches, plan).argmax(-1, keepdim=True)
            yield self.vocabulary[int(tokens)]


def _vocabulary(stored: str, path) -> list[str]:
    """The pieces of text that the metadata hold as JSON."""
    try:
        pieces = json.loads(stored)
    except ValueError:
        pieces = None
    whole = isinstance(pieces, list) and all(isinstance(piece, str) and piece for piece in pieces)
    if not whole or not pieces or len(set(pieces)) < len(pieces):
        raise CheckpointError(f"{path}: the vocabulary is not a list of different pieces of text.")
    return pieces
