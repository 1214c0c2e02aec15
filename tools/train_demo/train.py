"""Train the demo model: RWKV-7, 8 layers, width 256, vocabulary 6,144, on public-domain books.

The learning rate follows the wall clock (`--seconds`): warm-up, constant, then linear to zero over the last part,
which also uses longer sequences. `OUT/control.json`, read at every line of the log, may change `dropout` and `deadline`
(the unix time of the end) of a running training. Writes OUT/train_log.jsonl, OUT/latest.pth (float32 weights),
OUT/state.pt (to resume), and at the end OUT/rwkv7-demo.pth (bfloat16), OUT/rwkv7-demo-fp32.pth, OUT/metrics.json,
OUT/samples.txt and OUT/DONE.

    python train.py --books books/train-*.jsonl.xz --heldout books/heldout.jsonl.xz --lambada lambada_test.jsonl \
        --tokenizer tokenizer.json --out run/ --seconds 1500
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import lzma
import math
import multiprocessing
import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

import wkv7
from evaluate import HeldOut, bits_per_byte, full_evaluation, load_heldout, nats, sample_texts, windows
from model import Config, Model, block, head_loss, keep_mask


def encode_books(path: str, tokenizer_path: str, limit: int | None = None) -> np.ndarray:
    """Token ids of one file of books as uint16, id 0 before each book; a `.xz` of raw uint16 ids is taken as it is."""
    if not path.endswith(".jsonl.xz"):
        with lzma.open(path, "rb") as file:
            return np.frombuffer(file.read(), dtype=np.uint16)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][:limit]
    parts: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch_fast(texts):
        parts += [np.zeros(1, np.uint16), np.asarray(encoding.ids, dtype=np.uint16)]
    return np.concatenate(parts)


class Batches:
    """Endless batches: each epoch cuts all tokens into windows at a fresh random offset and shuffles them."""

    def __init__(self, ids: Tensor, tokens: int, seed: int) -> None:
        """Take all training ids [n] and the tokens of a batch."""
        self.ids, self.tokens = ids, tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.starts = torch.empty(0, dtype=torch.long, device=ids.device)
        self.at = 0
        self.steps = 0

    def next(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each [tokens], made of sequences of `steps`."""
        count = self.tokens // steps
        if steps != self.steps or self.at + count > len(self.starts):
            self.steps, self.at = steps, 0
            offset = int(torch.randint(steps, (1,), generator=self.generator))
            number = (len(self.ids) - 1 - offset) // steps
            self.starts = (torch.randperm(number, generator=self.generator) * steps + offset).to(self.ids.device)
        starts = self.starts[self.at : self.at + count]
        self.at += count
        rows = self.ids[starts[:, None] + torch.arange(steps + 1, device=self.ids.device)].long()
        return rows[:, :-1].flatten(), rows[:, 1:].flatten()


def orthogonalise(x: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix, batched: [n, rows, columns], rows <= columns."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """Momentum with orthogonalised updates (K. Jordan, 2024) for matrices, all of one shape in one batch."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float, decay: float, dtype: torch.dtype) -> None:
        """Take the matrices; `decay` is decoupled weight decay, `dtype` that of the orthogonalisation."""
        self.momentum, self.decay, self.dtype = momentum, decay, dtype
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers = {s: torch.zeros(len(g), *s, device=g[0].device) for s, g in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float, momentum: float | None = None) -> None:
        """One update at learning rate `rate`."""
        momentum = self.momentum if momentum is None else momentum
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group if p.grad is not None]).float()
            buffer = self.buffers[shape].lerp_(gradient, 1.0 - momentum)
            update = gradient.lerp(buffer, momentum).to(self.dtype)
            tall = shape[0] > shape[1]
            update = orthogonalise(update.mT if tall else update)
            update = (update.mT if tall else update).float() * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1.0 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)


def optimizers(model: Model, arguments: argparse.Namespace) -> tuple[Muon, torch.optim.AdamW, list[float]]:
    """Muon for the large matrices of the blocks, AdamW for all else; also AdamW's peak rates by group."""
    muon: list[Tensor] = []
    groups: dict[str, list[Tensor]] = {"emb": [], "head": [], "low_rank": [], "vector": []}
    for name in model.names:
        parameter = model.tensor(name)
        if name == "emb.weight":
            groups["emb"].append(parameter)
        elif name == "head.weight":
            groups["head"].append(parameter)
        elif name.endswith(("receptance.weight", "key.weight", "value.weight", "output.weight")):
            muon.append(parameter)
        elif name.split(".")[-1] in {"w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"}:
            groups["low_rank"].append(parameter)
        else:
            groups["vector"].append(parameter)
    rates = {"emb": arguments.rate_emb, "head": arguments.rate_head, "low_rank": 2e-3, "vector": 2e-3}
    decays = {"emb": 0.05, "head": 0.1, "low_rank": 0.05, "vector": 0.0}
    adam = torch.optim.AdamW(
        [{"params": groups[g], "lr": rates[g], "weight_decay": decays[g]} for g in groups],
        betas=(0.9, 0.98),
        eps=1e-10,
        fused=torch.cuda.is_available(),
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return Muon(muon, 0.95, arguments.decay_muon, dtype), adam, [rates[g] for g in groups]


def compile_model(model: Model, arguments: argparse.Namespace, device: str) -> bool:
    """Compile the block (once for all layers) and the loss, try them on random tokens; on failure stay eager."""
    tokens = arguments.tokens
    ids = torch.randint(model.config.vocabulary, (tokens,), device=device)
    keep = keep_mask(tokens, arguments.steps, device, model.dtype)
    wkv7.SEQUENCE.steps = arguments.steps
    with torch.no_grad():
        eager = float(model.loss(ids, ids, keep))
    try:
        model.run_block = torch.compile(block, fullgraph=True, dynamic=False)
        model.run_head_loss = torch.compile(head_loss, fullgraph=True, dynamic=False)
        loss = model.loss(ids, ids, keep, torch.zeros((), device=device), compiled=True)
        loss.backward()
        if not abs(float(loss.detach()) - eager) < 0.02:
            raise RuntimeError(f"compiled loss {float(loss.detach())} against {eager}")
        return True
    except Exception as error:
        print("torch.compile failed, running eagerly:", repr(error)[:2000], flush=True)
        model.run_block, model.run_head_loss = block, head_loss
        return False
    finally:
        model.zero_grad(set_to_none=True)
        for parameter in model.stand_in:
            parameter.grad = None


def save(value: object, path: str) -> None:
    """torch.save that never leaves half a file under `path`."""
    torch.save(value, path + ".tmp")
    os.replace(path + ".tmp", path)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", nargs="+", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--lambada")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=1500.0, help="wall clock of the training proper")
    parser.add_argument("--deadline", type=float, default=0.0, help="unix time at which training ends (over --seconds)")
    parser.add_argument("--decay-part", type=float, default=0.4, help="last part of the time with a falling rate")
    parser.add_argument("--long-part", type=float, default=0.3, help="last part of the time with --long-steps")
    parser.add_argument("--warm-up", type=int, default=200, help="steps")
    parser.add_argument("--tokens", type=int, default=131072, help="a step")
    parser.add_argument("--steps", type=int, default=1024, help="sequence length")
    parser.add_argument("--long-steps", type=int, default=4096)
    parser.add_argument("--rate-muon", type=float, default=0.02)
    parser.add_argument("--decay-muon", type=float, default=0.04)
    parser.add_argument("--rate-emb", type=float, default=3e-3)
    parser.add_argument("--rate-head", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fade-dropout", action="store_true", help="let the dropout fall with the learning rate")
    parser.add_argument("--library", help="kernels already built; their checks and timings are skipped")
    parser.add_argument("--no-report", action="store_true", help="leave the final evaluation to evaluate.py")
    parser.add_argument("--evaluate-every", type=float, default=45.0, help="seconds")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--weights", help="start from these weights")
    parser.add_argument("--seen", type=int, default=0, help="tokens that --weights saw, for the log")
    parser.add_argument("--state", help="resume from this OUT/state.pt, optimizers included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit", type=int, help="for a dry run: books a file, thousands of characters a held-out book"
    )
    return parser.parse_args()


def main() -> None:
    """Prepare, train, evaluate."""
    arguments = parse()
    began = time.time()
    out, device = arguments.out, arguments.device
    os.makedirs(out, exist_ok=True)
    torch.manual_seed(arguments.seed)
    cuda = device == "cuda"

    def note(text: str) -> None:
        print(f"[{time.time() - began:7.1f}] {text}", flush=True)

    # Encode in other processes while this one compiles.
    tokenizer = Tokenizer.from_file(arguments.tokenizer)
    pool = concurrent.futures.ProcessPoolExecutor(
        min(len(arguments.books) + 1, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    )
    jobs = [pool.submit(encode_books, path, arguments.tokenizer, arguments.limit) for path in arguments.books]
    held_limit = arguments.limit * 1000 if arguments.limit else None
    held_job = pool.submit(load_heldout, arguments.heldout, tokenizer, held_limit)

    model = Model(
        Config(layers=arguments.layers, width=arguments.width, vocabulary=tokenizer.get_vocab_size()),
        torch.bfloat16 if cuda else torch.float32,
    ).to(device)
    note(f"{sum(model.tensor(n).numel() for n in model.names)} parameters")
    parts = {arguments.steps: (1, 4), arguments.long_steps: (4, 4)}
    compiled = False
    if cuda and arguments.library:
        wkv7.load_library(arguments.library)
    elif cuda:
        wkv7.load_library(wkv7.build_library(os.path.join(out, "build")))
        note("kernels built")
        note(f"kernels agree with float64: largest relative error {max(wkv7.verify().values()):.1e}")
        for steps in parts:
            forward, backward, times = wkv7.choose_parts(arguments.tokens, model.config.heads, steps)
            parts[steps] = forward, backward
            shown = ", ".join(f"{name} {time_ms:.2f} ms" for name, time_ms in times.items())
            note(f"{steps} steps: parts {parts[steps]}; {shown}")
    if cuda:
        wkv7.SEQUENCE.parts_forward, wkv7.SEQUENCE.parts_backward = parts[arguments.steps]
        compiled = compile_model(model, arguments, device)
        note(f"compiled: {compiled}")
    ids = torch.from_numpy(np.concatenate([job.result() for job in jobs]).astype(np.int32)).to(device)
    held: HeldOut = held_job.result()
    pool.shutdown()
    note(f"{len(ids)} training tokens, {sum(map(len, held.books))} held-out tokens of {held.bytes} bytes")
    probe = HeldOut([ids[: min(len(ids), 400_000)].cpu()], 1)

    muon, adam, peaks = optimizers(model, arguments)
    adam_parameters = [p for g in adam.param_groups for p in g["params"]]
    step = seen = 0
    if arguments.state:
        state = torch.load(arguments.state, map_location=device, weights_only=True)
        model.load(state["weights"])
        adam.load_state_dict(state["adam"])
        muon.buffers = dict(zip(muon.buffers, state["muon"], strict=True))
        step, seen = state["step"], state["seen"]
    elif arguments.weights:
        model.load(torch.load(arguments.weights, map_location=device, weights_only=True))
        step, seen = arguments.seen // arguments.tokens, arguments.seen
    batches = Batches(ids, arguments.tokens, arguments.seed + step)
    rate = torch.full((), arguments.dropout, device=device)
    keeps = {s: keep_mask(arguments.tokens, s, device, model.dtype) for s in parts}
    log = open(os.path.join(out, "train_log.jsonl"), "a", encoding="utf-8")  # noqa: SIM115
    start = time.time()
    end = arguments.deadline or start + arguments.seconds
    evaluated = logged = start
    first_step, losses, factor = step, [], 1.0
    warm_from = step
    lead = 20 if cuda else 2  # steps between two lines of the log, where the device is waited for
    dropout = arguments.dropout
    control = os.path.join(out, "control.json")

    def evaluate_now(entry: dict[str, object]) -> None:
        entry["heldout_bits_per_byte"] = round(bits_per_byte(model, held), 5)
        cut = windows(probe.books, arguments.long_steps, arguments.long_steps)
        entry["train_probe_nats"] = round(nats(model, *cut) / (len(probe.books[0]) - 1), 5)

    while True:
        now = time.time()
        progress = min(1.0, (now - start) / max(end - start, 1e-9))
        if progress >= 1.0:
            break
        factor = min(1.0, (1.0 - progress) / arguments.decay_part) * min(
            1.0, (step - warm_from + 1) / arguments.warm_up
        )
        steps = arguments.long_steps if progress > 1.0 - arguments.long_part else arguments.steps
        rate.fill_(dropout * factor if arguments.fade_dropout else dropout)
        wkv7.SEQUENCE.steps = steps
        wkv7.SEQUENCE.parts_forward, wkv7.SEQUENCE.parts_backward = parts[steps]
        inputs, targets = batches.next(steps)
        loss = model.loss(inputs, targets, keeps[steps], rate, compiled=compiled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adam_parameters, 1.0)
        for group, peak in zip(adam.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        adam.step()
        muon.step(arguments.rate_muon * factor, min(0.95, 0.85 + 0.1 * (step - warm_from) / 300))
        adam.zero_grad(set_to_none=True)
        for matrices in muon.groups.values():
            for parameter in matrices:
                parameter.grad = None
        losses.append(loss.detach())
        step += 1
        seen += arguments.tokens
        if len(losses) < lead:
            continue
        mean = float(torch.stack(losses).mean())
        now = time.time()
        entry: dict[str, object] = {
            "step": step,
            "time_s": round(now - start, 2),
            "tokens": seen,
            "epochs": round(seen / len(ids), 3),
            "sequence": steps,
            "lr": round(arguments.rate_muon * factor, 6),
            "dropout": round(float(rate), 3),
            "train_nats": round(mean, 5),
            "tokens_per_s": round(len(losses) * arguments.tokens / (now - logged)),
        }
        losses = []
        if os.path.exists(control):
            with open(control, encoding="utf-8") as file:
                wishes = json.load(file)
            dropout, end = wishes.get("dropout", dropout), wishes.get("deadline", end)
        if not math.isfinite(mean):
            note("the loss is not finite: stopping")
            raise SystemExit(1)
        if now - evaluated > arguments.evaluate_every:
            evaluate_now(entry)
            save(model.export(), os.path.join(out, "latest.pth"))
            resume = {"weights": model.export(), "adam": adam.state_dict(), "muon": list(muon.buffers.values())}
            save(resume | {"step": step, "seen": seen}, os.path.join(out, "state.pt"))
            evaluated = time.time()
            note(f"step {step}: {entry}")
        log.write(json.dumps(entry) + "\n")
        log.flush()
        logged = time.time()

    # The end: what is reported is the bfloat16 model, as it ships.
    save(model.export(), os.path.join(out, "rwkv7-demo-fp32.pth"))
    save(model.export(), os.path.join(out, "latest.pth"))
    save(model.export(torch.bfloat16), os.path.join(out, "rwkv7-demo.pth"))
    note("weights saved")
    trained = time.time() - start
    if arguments.no_report:
        log.close()
        with open(os.path.join(out, "DONE"), "w", encoding="utf-8") as file:
            file.write(json.dumps({"steps": step, "tokens_seen": seen, "seconds": trained}) + "\n")
        return
    held_float = bits_per_byte(model, held)
    model.load(model.export(torch.bfloat16))
    result = full_evaluation(model, tokenizer, held, arguments.lambada if cuda else None)
    result |= {"heldout_bits_per_byte_windows_4096_float32_weights": held_float, "steps": step, "tokens_seen": seen}
    result |= {"training_tokens": len(ids), "epochs": seen / len(ids), "seconds": trained}
    result |= {"tokens_per_second": (step - first_step) * arguments.tokens / trained, "arguments": vars(arguments)}
    with open(os.path.join(out, "metrics.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    log.write(json.dumps({"step": step, "time_s": round(trained, 2), "tokens": seen,
                          "heldout_bits_per_byte": result["heldout_bits_per_byte_windows_4096"]}) + "\n")  # fmt: skip
    log.close()
    note(json.dumps(result, indent=1))
    with open(os.path.join(out, "samples.txt"), "w", encoding="utf-8") as file:
        file.write(sample_texts(model, tokenizer, 200 if cuda else 8))
    with open(os.path.join(out, "DONE"), "w", encoding="utf-8") as file:
        file.write("done\n")
    note("done")


if __name__ == "__main__":
    main()
