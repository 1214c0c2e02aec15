"""``verify``: the law of exactness, proved on the model at hand.

Every case runs the model in a way that must not matter and compares float32 logits and states with those of each
sequence run alone, one token a step. Equal means every bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kittiwake.config import EngineConfig
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import SamplingParams
from kittiwake.load import Loaded
from kittiwake.progress import Progress
from kittiwake.verify import cache_laws, long_laws, value_laws
from kittiwake.verify.trace import Table, Trace, fingerprint

LENGTHS = (1, 2, 5, 17, 40, 66)
WIDTHS = range(1, 18)
ROW_COUNTS = (3, 4, 5, 15, 16, 31, 33, 63, 64, 65, 127, 129, 200, 257, 300, 513)
"""Total rows of a batch, around the borders where another implementation takes over."""
CHUNKS = (1, 2, 3, 7, 16, 64, 0)
SPLITS = 18
CROWDS = 18
SLOT_MOVES = 9


@dataclass(frozen=True)
class LawResult:
    """How many cases of a law were run, and how many were not equal."""

    name: str
    cases: int
    differing: int


@dataclass
class _Bench:
    """What the laws run on."""

    loaded: Loaded
    traces: list[Trace]
    draw: random.Random

    @property
    def vocab(self) -> int:
        return self.loaded.model.config.vocab_size

    def table(self, slots: int) -> Table:
        return Table(self.loaded.model, slots)

    def filler(self, rows: int) -> list[int]:
        """Random tokens that nobody compares."""
        return [self.draw.randrange(self.vocab) for _ in range(rows)]

    def pieces(self, length: int) -> list[int]:
        """A random split of a length, 1s among the pieces."""
        out = []
        while length:
            out.append(1 if self.draw.random() < 0.3 else self.draw.randint(1, length))
            length -= out[-1]
        return out


Law = Callable[[_Bench], Iterator[bool]]


def verify(loaded: Loaded, config: EngineConfig, seed: int = 0, progress: Progress | None = None) -> list[LawResult]:
    """Run every law; ``seed`` draws tokens, splits and crowds. Goldens of a bundle are one law more on the CPU."""
    bench = _Bench(loaded, [], random.Random(seed))
    total = len(LAWS) + 2
    for index, length in enumerate(LENGTHS):
        if progress is not None:
            progress("reference runs", index, len(LENGTHS))
        bench.traces.append(Trace(loaded.model, bench.filler(length)))
    laws = _laws_for(loaded)
    results = []
    for index, (name, law) in enumerate(laws.items()):
        if progress is not None:
            progress(f"law: {name}", index, total)
        outcomes = list(law(bench))
        results.append(LawResult(name, len(outcomes), outcomes.count(False)))
    if progress is not None:
        progress("laws", total, total)
    return results


def _laws_for(loaded: Loaded) -> dict[str, Law]:
    """The laws of a model. Goldens are recorded on a CPU: on another device a near tie may turn, which breaks no law."""
    laws = dict(LAWS)
    config = loaded.model.config
    more = {**(_OF_SELECTORS if config.selection_budget else {}), **(_OF_NGRAMS if config.ngram_tokens else {})}
    laws |= {name: _on_loaded(law) for name, law in more.items()}
    if loaded.goldens and loaded.model.device == "cpu":
        laws["goldens of the bundle"] = _goldens
    return laws


def _on_loaded(law: Callable[[Loaded, random.Random], Iterator[bool]]) -> Law:
    return lambda bench: law(bench.loaded, bench.draw)


def _chunked(bench: _Bench) -> Iterator[bool]:
    """Prompts cut at random, in chunks of every size, with a remainder of 1, and whole."""
    table = bench.table(1)

    def run(trace: Trace, pieces: list[int]) -> bool:
        slot = table.states.allocate()
        same = table.follows(trace, slot, pieces)
        table.states.free(slot)
        return same

    for trace in bench.traces:
        length = len(trace.ids)
        yield run(trace, [length])
        if length > 1:
            yield run(trace, [length - 1, 1])
            yield run(trace, [1, length - 1])
    for index in range(SPLITS):
        trace = bench.traces[2 + index % (len(bench.traces) - 2)]
        yield run(trace, bench.pieces(len(trace.ids)))


def _crowd(bench: _Bench) -> Iterator[bool]:
    """A sequence among others that prefill and decode at its side, its place in the batch drawn at random."""
    for index in range(CROWDS):
        trace = bench.traces[2 + index % (len(bench.traces) - 2)]
        table = bench.table(8)
        others = [table.states.allocate() for _ in range(bench.draw.randint(1, 7))]
        mine = table.states.allocate()
        at, same = 0, True
        for length in bench.pieces(len(trace.ids)):
            sequences = [(slot, bench.filler(bench.draw.choice((1, 1, 3, 20)))) for slot in others]
            place = bench.draw.randint(0, len(sequences))
            sequences.insert(place, (mine, trace.ids[at : at + length]))
            at += length
            same &= table.step(sequences)[place] == trace.marks[at - 1]
        yield same


def _widths(bench: _Bench) -> Iterator[bool]:
    """Decoding in batches of 1 to 17 sequences, each compared."""
    trace = bench.traces[-2]
    for width in WIDTHS:
        table = bench.table(width)
        slots = [table.states.allocate() for _ in range(width)]
        same = True
        # everyone stands at another place of the same sequence, so that no two rows of a batch are alike
        for index, slot in enumerate(slots):
            table.step([(slot, trace.ids[: index + 1])])
        for step in range(3):
            marks = table.step([(slot, [trace.ids[i + 1 + step]]) for i, slot in enumerate(slots)])
            same &= all(mark == trace.marks[i + 1 + step] for i, mark in enumerate(marks))
        yield same


def _rows(bench: _Bench) -> Iterator[bool]:
    """The same chunk in batches of many row counts: the borders between implementations."""
    trace = bench.traces[2]
    length = len(trace.ids)
    for rows in ROW_COUNTS:
        table = bench.table(2)
        mine, other = table.states.allocate(), table.states.allocate()
        if rows <= length:
            yield table.step([(mine, trace.ids[:rows])])[0] == trace.marks[rows - 1]
        else:
            sequences = [(other, bench.filler(rows - length)), (mine, trace.ids)]
            yield table.step(sequences)[1] == trace.marks[-1]


def _moved(bench: _Bench) -> Iterator[bool]:
    """A state saved in one slot and gone on with in another, at a random place."""
    for index in range(SLOT_MOVES):
        trace = bench.traces[2 + index % (len(bench.traces) - 2)]
        cut = bench.draw.randint(1, len(trace.ids) - 1)
        table = bench.table(4)
        slots = [table.states.allocate() for _ in range(4)]
        home, away = bench.draw.sample(slots, 2)
        table.step([(home, trace.ids[:cut])])
        table.step([(away, bench.filler(3))])
        table.states.restore(away, table.states.save(home))
        yield table.step([(away, trace.ids[cut:])])[0] == trace.marks[-1]


def _reused(bench: _Bench) -> Iterator[bool]:
    """A slot that served somebody else before."""
    table = bench.table(1)
    for index in range(SLOT_MOVES):
        slot = table.states.allocate()
        table.step([(slot, bench.filler(1 + index))])
        table.states.free(slot)
        trace = bench.traces[index % len(bench.traces)]
        slot = table.states.allocate()
        yield table.step([(slot, trace.ids)])[0] == trace.marks[-1]
        table.states.free(slot)


def _twins(bench: _Bench) -> Iterator[bool]:
    """Two identical sequences in one batch."""
    for trace in bench.traces:
        table = bench.table(2)
        sequences = [(table.states.allocate(), trace.ids) for _ in range(2)]
        yield table.step(sequences) == [trace.marks[-1]] * 2


_REQUESTS = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=0.7, top_k=20, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=1.3, seed=5, ignore_eos=True),
    SamplingParams(
        max_tokens=14,
        temperature=0.0,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        ignore_eos=True,
    ),
    SamplingParams(
        max_tokens=11, temperature=0.9, min_p=0.02, repetition_penalty=1.2, logprobs=True, seed=6, ignore_eos=True
    ),
    SamplingParams(
        max_tokens=10,
        temperature=1.1,
        top_k=50,
        top_p=0.8,
        sampling_order="rwkv",
        frequency_penalty=0.5,
        logprobs=True,
        top_logprobs=3,
        seed=7,
        ignore_eos=True,
    ),
)
_BIASES = (3.0, -1.5, -100.0)


def _requests(bench: _Bench) -> list[SamplingParams]:
    """The requests that answers are compared of; the last one has a bias on tokens that this model has."""
    tokenizer = bench.loaded.tokenizer
    valid = (token for token in range(bench.vocab) if tokenizer.is_valid(token))
    bias = dict(zip(valid, _BIASES, strict=False))
    return [*_REQUESTS, SamplingParams(max_tokens=8, seed=8, logit_bias=bias, logprobs=True, ignore_eos=True)]


def _answers(bench: _Bench, order: list[int], chunk: int, slots: int, together: bool) -> dict[int, tuple[object, str]]:
    """Drive an engine; for each request its tokens with their log-probabilities, and its kept state's fingerprint.

    Raises the error that ended a request.
    """
    loaded, params = bench.loaded, _requests(bench)
    engine = Engine(loaded.model, loaded.tokenizer, slots=slots, prefill_chunk=chunk, max_rows=2048)
    ids: dict[int, int] = {}
    tokens: dict[int, list[object]] = {request: [] for request in order}
    marks: dict[int, str] = {}
    waiting = list(order)
    while waiting or engine.has_work:
        for request in waiting if together else waiting[:1]:
            prompt = bench.traces[1 + request % (len(bench.traces) - 1)].ids
            ids[request] = engine.add(prompt, params[request], keep_state=True)
        waiting = [] if together else waiting[1:]
        engine.step()
        for request, number in list(ids.items()):
            for delta in engine.collect(number):
                if delta.error is not None:
                    raise delta.error
                tokens[request].append((delta.token_ids, delta.logprobs))
                if delta.state is not None and delta.state.logits is not None:
                    marks[request] = fingerprint(delta.state.logits, delta.state.saved.parts)
                if delta.finish_reason is not None:
                    del ids[request]
    return {request: (tuple(tokens[request]), marks.get(request, "no state")) for request in order}


def _arrival(bench: _Bench) -> Iterator[bool]:
    """Requests through the engine in several orders, together and one after another, with few slots and many."""
    requests = list(range(len(_requests(bench))))
    alone = {request: _answers(bench, [request], 0, 1, True)[request] for request in requests}
    for index in range(8):
        order = bench.draw.sample(requests, len(requests))
        yield _answers(bench, order, 0, (1, 2, 8)[index % 3], index % 2 == 0) == alone


def _engine_chunks(bench: _Bench) -> Iterator[bool]:
    """Requests through the engine with prompts in chunks of 1 to unlimited."""
    requests = list(range(len(_requests(bench))))
    alone = {request: _answers(bench, [request], 0, 1, True)[request] for request in requests}
    for chunk in CHUNKS:
        yield _answers(bench, requests, chunk, 4, chunk % 2 == 0) == alone


def _samples(bench: _Bench) -> Iterator[bool]:
    """Several samples of one prompt, eaten once, against as many requests of their own."""
    loaded = bench.loaded
    for index, params in enumerate(params for params in _requests(bench) if params.temperature > 0):
        prompt, several = bench.traces[1 + index % (len(bench.traces) - 1)].ids, replace(params, n=3)
        found: list[list[object]] = []
        for slots, shared in ((1, False), (1 + index % 4, True)):
            engine = Engine(loaded.model, loaded.tokenizer, slots=slots, prefill_chunk=index % 3, max_rows=2048)
            if shared:
                numbers = engine.add_samples(prompt, several)
            else:
                numbers = [engine.add(prompt, several.for_sample(sample)) for sample in range(several.n)]
            while engine.has_work:
                engine.step()
            deltas = [delta for number in numbers for delta in engine.collect(number)]
            found.append([(delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) for delta in deltas])
        yield found[0] == found[1]


def _goldens(bench: _Bench) -> Iterator[bool]:
    """The greedy answers recorded when the bundle was built."""
    loaded = bench.loaded
    engine = Engine(loaded.model, loaded.tokenizer, slots=8, prefill_chunk=0, max_rows=2048)
    for golden in loaded.goldens or ():
        count = len(golden.completion_ids)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        number = engine.add(golden.prompt_ids, params)
        tokens: list[int] = []
        while engine.has_work:
            engine.step()
            tokens += [token for delta in engine.collect(number) for token in delta.token_ids]
        same_ids = loaded.tokenizer.encode(golden.prompt) == list(golden.prompt_ids)
        yield same_ids and tokens == list(golden.completion_ids)


LAWS: dict[str, Law] = {
    "chunked = stepwise": _chunked,
    "alone = in a crowd": _crowd,
    "batch widths 1 to 17": _widths,
    "row counts": _rows,
    "moved slot": _moved,
    "reused slot": _reused,
    "two identical requests": _twins,
    "order of arrival": _arrival,
    "prefill chunk 1 to unlimited": _engine_chunks,
    "n samples = n requests": _samples,
    "restored = fresh, from memory": lambda bench: value_laws.restored(bench.loaded, bench.traces, bench.draw),
    "restored = fresh, from a file": lambda bench: value_laws.restored_from_file(
        bench.loaded, bench.traces, bench.draw
    ),
    "forked = fresh": lambda bench: value_laws.forked(bench.loaded, bench.traces, bench.draw),
    "cached = fresh, from memory": lambda bench: cache_laws.from_memory(bench.loaded, bench.traces, bench.draw),
    "cached = fresh, from disk": lambda bench: cache_laws.from_disk(bench.loaded, bench.traces, bench.draw),
    "scored = generated log-probabilities": lambda bench: value_laws.scored(bench.loaded, bench.traces, bench.draw),
}

_OF_SELECTORS = {
    "chunks of 1 to 4,096 tokens": long_laws.chunk_sizes,
    "beyond the budget, cut anywhere": long_laws.long_texts,
    "both sides of the budget in one batch": long_laws.both_sides,
    "restored within a block": long_laws.kept_within_a_block,
    "rewound within a block": long_laws.rewound_within_a_block,
    "cached within a block": cache_laws.within_a_block,
}
"""Laws of models that choose what they attend to."""
_OF_NGRAMS = {
    "ends inside n-grams": long_laws.ends_in_ngrams,
    "rows read ahead": long_laws.read_ahead,
}
"""Laws of models that look n-grams up."""
