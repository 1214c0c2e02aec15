"""Held-out bits per byte, LAMBADA accuracy and sample texts of a demo model.

    python evaluate.py --weights rwkv7-demo.pth --tokenizer tokenizer.json --heldout books/heldout.jsonl.xz \
        --lambada lambada_test.jsonl --out results/
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from model import Config, Model, keep_mask
from wkv7 import CHUNK, SEQUENCE, build_cpu_library, build_library, load_cpu_library, load_library

BATCH = 256  # texts continued at a time
PROMPTS = [
    "It was a dark and stormy night",
    "The old sailor looked at the sea and said,",
    "Once upon a time there was a little girl who",
    '"My dear Watson," said Holmes,',
    "Chapter I\n\n",
    "The train had hardly left the station when",
    "She opened the letter with trembling hands.",
    "In the year 1872 a strange ship was seen",
]


@dataclass
class HeldOut:
    """Token ids of each book, led by the end-of-text token, and the size of all texts in UTF-8."""

    books: list[Tensor]
    bytes: int


def load_heldout(path: str, tokenizer: Tokenizer, limit: int | None = None) -> HeldOut:
    """Read and encode the held-out books (`limit`: only the first that many characters of each)."""
    books, size = [], 0
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"][:limit]
            size += len(text.encode())
            books.append(torch.tensor([0, *tokenizer.encode(text).ids], dtype=torch.int32))
    return HeldOut(books, size)


def set_steps(steps: int) -> None:
    """Choose the sequence length; many threads a state row when the sequences are few."""
    SEQUENCE.steps = steps
    SEQUENCE.parts_forward = SEQUENCE.parts_backward = 2


@torch.no_grad()
def nats(model: Model, rows: Tensor, wanted: Tensor, targets: Tensor, batch_tokens: int = 131072) -> float:
    """Sum of negative log likelihoods.

    rows: token ids [sequences, steps], each started from the zero state; targets: the next ids; wanted: which count.
    """
    sequences, steps = rows.shape
    device = model.tensor("emb.weight").device
    per_batch = max(1, batch_tokens // steps)
    total = torch.zeros((), dtype=torch.float64, device=device)
    saved = SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward
    set_steps(steps)
    for first in range(0, sequences, per_batch):
        ids = rows[first : first + per_batch].to(device).long().flatten()
        next_ids = targets[first : first + per_batch].to(device).long().flatten()
        count = wanted[first : first + per_batch].to(device).flatten()
        x = model.hidden(ids, keep_mask(len(ids), steps, device, model.dtype))
        for begin in range(0, len(ids), 32768):
            part = slice(begin, begin + 32768)
            losses = F.cross_entropy(model.logits(x[part]), next_ids[part], reduction="none")
            total += (losses.double() * count[part]).sum()
    SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward = saved
    return float(total)


def windows(books: list[Tensor], steps: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut books into windows of `steps` inputs, `stride` apart; the first window with a token scores it.

    Returns ids, wanted, targets, each [windows, steps]; short windows are padded on the right.
    """
    ids, wanted, targets = [], [], []
    for book in books:
        scored = 1  # tokens of the book scored so far; the leading end-of-text token is never a target
        start = 0
        while scored < len(book):
            piece = book[start : start + steps + 1]
            pad = steps + 1 - len(piece)
            position = torch.arange(start + 1, start + steps + 1)
            wanted.append((position >= scored) & (position < len(book)))
            ids.append(F.pad(piece, (0, pad))[:-1])
            targets.append(F.pad(piece, (0, pad))[1:])
            scored = start + len(piece)
            start += stride
    return torch.stack(ids), torch.stack(wanted), torch.stack(targets)


def bits_per_byte(model: Model, held: HeldOut, steps: int = 4096, stride: int | None = None) -> float:
    """Bits per byte over windows of `steps` tokens, each from the zero state; `stride` below `steps` gives context."""
    ids, wanted, targets = windows(held.books, steps, stride or steps)
    return nats(model, ids, wanted, targets) / math.log(2) / held.bytes


def streamed_bits_per_byte(model: Model, held: HeldOut) -> float:
    """Bits per byte with each book read from its first to its last token in one go, the state carried throughout."""
    total = 0.0
    for book in held.books:
        steps = (len(book) + CHUNK - 2) // CHUNK * CHUNK
        total += nats(model, *windows([book], steps, steps))
    return total / math.log(2) / held.bytes


def _padded_rows(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(p) for p in prompts])
    steps = (int(lengths.max()) + CHUNK - 1) // CHUNK * CHUNK
    rows = torch.zeros(len(prompts), steps, dtype=torch.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    return rows, lengths


@torch.no_grad()
def generate(
    model: Model,
    prompts: list[list[int]],
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    finished: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue token lists by up to `count` ids each (temperature 0: greedy).

    The prefix is read again for every token. `finished(n, ids)` may say that prompt n needs no more than `ids`.
    """
    device = model.tensor("emb.weight").device
    generator = torch.Generator(device=device).manual_seed(seed)
    saved = SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))  # batches of like lengths
    out: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), BATCH):
        active = order[first : first + BATCH]
        for _ in range(count):
            rows, lengths = _padded_rows([prompts[n] + out[n] for n in active])
            rows, lengths = rows.to(device), lengths.to(device)
            set_steps(rows.shape[1])
            x = model.hidden(rows.flatten().long(), keep_mask(rows.numel(), rows.shape[1], device, model.dtype))
            logits = model.logits(x.view(*rows.shape, -1)[torch.arange(len(active), device=device), lengths - 1])
            if temperature == 0.0:
                ids = logits.argmax(-1)
            else:
                probabilities, ranked = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
                outside = probabilities.cumsum(-1) - probabilities >= top_p
                probabilities = probabilities.masked_fill(outside, 0.0)
                pick = torch.multinomial(probabilities, 1, generator=generator)
                ids = ranked.gather(-1, pick).squeeze(-1)
            for n, token in zip(active, ids.tolist(), strict=True):
                out[n].append(token)
            if finished is not None:
                active = [n for n in active if not finished(n, out[n])]
                if not active:
                    break
    SEQUENCE.steps, SEQUENCE.parts_forward, SEQUENCE.parts_backward = saved
    return out


def lambada_accuracy(model: Model, tokenizer: Tokenizer, path: str, lead: bool, limit: int | None = None) -> float:
    """Share of LAMBADA passages whose last word comes out of 8 greedy tokens.

    The prompt goes up to the last space; the answer is the first whitespace-separated word of the continuation without
    trailing punctuation. `lead` puts the end-of-text token before the prompt.
    """
    prompts, gold = [], []
    with open(path, encoding="utf-8") as lines:
        for line in list(lines)[:limit]:
            prompt, word = json.loads(line)["text"].rsplit(" ", 1)
            prompts.append(([0] if lead else []) + tokenizer.encode(prompt).ids)
            gold.append(word)

    def answer(ids: list[int]) -> str:
        words = tokenizer.decode(ids).split()
        return words[0].rstrip(".,;:!?\"')]}") if words else ""

    def finished(n: int, ids: list[int]) -> bool:
        text = tokenizer.decode(ids).lstrip()
        whole = len(text.split(maxsplit=1)) > 1 or text != text.rstrip()  # the first word has ended
        return whole or not (gold[n].startswith(text) or text.startswith(gold[n]))  # or cannot become the answer

    answers = generate(model, prompts, 8, finished=finished)
    return sum(answer(ids) == word for ids, word in zip(answers, gold, strict=True)) / len(gold)


def sample_texts(model: Model, tokenizer: Tokenizer, count: int = 200) -> str:
    """Continuations of the prompts, sampled and greedy, as one text."""
    prompts = [tokenizer.encode(p).ids for p in PROMPTS]
    parts = []
    for title, temperature in (("temperature 0.8, top-p 0.9", 0.8), ("greedy", 0.0)):
        texts = generate(model, prompts, count, temperature, 0.9)
        for prompt, ids in zip(PROMPTS, texts, strict=True):
            ids = ids[: ids.index(0)] if 0 in ids else ids
            parts.append(f"=== {title} ===\n[{prompt}]{tokenizer.decode(ids)}\n")
    return "\n".join(parts)


def full_evaluation(
    model: Model, tokenizer: Tokenizer, held: HeldOut, lambada: str | None, limit: int | None = None
) -> dict[str, object]:
    """All numbers of the final report."""
    result: dict[str, object] = {
        "parameters": sum(model.tensor(n).numel() for n in model.names),
        "bytes_bf16": 2 * sum(model.tensor(n).numel() for n in model.names),
        "heldout_utf8_bytes": held.bytes,
        "heldout_tokens": sum(len(b) - 1 for b in held.books),
        "heldout_bits_per_byte_windows_4096": bits_per_byte(model, held),
        "heldout_bits_per_byte_streamed": streamed_bits_per_byte(model, held),
    }
    if lambada:
        result["lambada_accuracy_greedy"] = lambada_accuracy(model, tokenizer, lambada, lead=False, limit=limit)
        result["lambada_accuracy_greedy_with_leading_end_of_text"] = lambada_accuracy(
            model, tokenizer, lambada, lead=True, limit=limit
        )
    return result


def config_of(weights: dict[str, Tensor]) -> Config:
    """Read the sizes off the tensors."""
    return Config(
        layers=1 + max(int(n.split(".")[1]) for n in weights if n.startswith("blocks.")),
        width=weights["emb.weight"].shape[1],
        vocabulary=weights["emb.weight"].shape[0],
        rank_w=weights["blocks.0.att.w1"].shape[1],
        rank_a=weights["blocks.0.att.a1"].shape[1],
        rank_v=weights["blocks.1.att.v1"].shape[1],
        rank_g=weights["blocks.0.att.g1"].shape[1],
        ffn=weights["blocks.0.ffn.key.weight"].shape[0] // weights["emb.weight"].shape[1],
    )


def main() -> None:
    """Evaluate a `.pth` file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--lambada")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        load_library(build_library(os.path.join(arguments.out, "build")))
    else:
        load_cpu_library(build_cpu_library(os.path.join(arguments.out, "build")))
    weights = torch.load(arguments.weights, map_location="cpu", weights_only=True)
    model = Model(config_of(weights), torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    model.load(weights)
    model.to(arguments.device)
    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    held = load_heldout(arguments.heldout, tokenizer)
    result = full_evaluation(model, tokenizer, held, arguments.lambada)
    os.makedirs(arguments.out, exist_ok=True)
    with open(os.path.join(arguments.out, "metrics.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    with open(os.path.join(arguments.out, "samples.txt"), "w", encoding="utf-8") as file:
        file.write(sample_texts(model, tokenizer))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
