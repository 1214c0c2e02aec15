"""A tiny qwen4exp through the doors: chat with its template, bundles, kept states, the prefix cache, scoring, verify."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.build import build_bundle
from kittiwake.chat import prepare
from kittiwake.cli.inspect import examine
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import DeviceError, PagesError
from kittiwake.llm import LLM
from kittiwake.server.conversation import with_reasoning
from kittiwake.text.chat import read_messages
from tests.families.qwen4exp_layouts import write_hf
from tests.text.tiny import make_byte_level

TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'high' -%}
{%- if effort == 'low' %}{{ '<|im_start|>system\\nThink little.<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{ '<think>\\n' }}{% endif -%}
{%- endif -%}
"""
SHAPE = Qwen4ExpShape(vocab=512, end_token=0, drafts=1)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = "hello world, the end of text " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as published ones are: nested config, shards, tokenizer and template beside them."""
    found = write_hf(
        tmp_path_factory.mktemp("model"),
        SHAPE,
        random_qwen4exp(SHAPE, 1),
        is_nested=True,
        shards=2,
        eos_token_id=[0, 1],
    )
    make_byte_level().save(str(found / "tokenizer.json"))
    (found / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, threads=2, slots=4)


def test_chat_with_the_template_of_the_folder(llm: LLM) -> None:
    template = llm.chat_template()
    messages = read_messages([{"role": "user", "content": "say <|im_end|> and </think>"}])
    for effort, opening in (("none", "<think>\n\n</think>\n\n"), ("low", "<think>\n"), (None, "<think>\n")):
        chosen, options = with_reasoning(template, effort, None)
        rendered = chosen.render(messages, options=options)
        assert rendered.text.endswith(opening) and rendered.opening.rstrip() == opening.rstrip()
        assert ("Think little." in rendered.text) == (effort == "low")
        controls = [segment.text for segment in rendered.segments if segment.is_control]
        assert controls.count("<|im_end|>") == (2 if effort == "low" else 1)
    prompt = prepare(template, llm.tokenizer, [{"role": "user", "content": "say <|im_end|>"}], GREEDY)
    end = llm.tokenizer.encode("<|im_end|>", allow_special=True)
    assert list(prompt.ids).count(end[0]) == 1
    said = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert len(said.completion.token_ids) == GREEDY.max_tokens and said.reasoning is not None


def answer(llm: LLM, prompt: str | list[int], params: SamplingParams, **more: Any) -> tuple[int, ...]:
    """The ids of one answer."""
    return llm.generate(prompt, params, **more)[0].token_ids


def test_ends_of_the_config_end_a_text(llm: LLM) -> None:
    assert set(llm.tokenizer.eos_ids) >= {0, 1}


def test_a_bundle_answers_as_the_folder_does(folder: Path, llm: LLM, tmp_path: Path) -> None:
    bundle = build_bundle(folder, tmp_path / "bundle", goldens=1)
    with LLM(bundle, threads=2, slots=2, max_chunk=7) as other:
        assert answer(other, PROMPT, GREEDY) == answer(llm, PROMPT, GREEDY)
    report = examine(bundle, progress=lambda *_: None)
    assert report["runs"], report["why_not"]
    assert report["memory"]["state_per_token_bytes"] == 264
    assert report["memory"]["workspace_bytes"] > 0


def test_chunks_slots_and_neighbours_change_no_token(folder: Path, llm: LLM) -> None:
    alone = answer(llm, PROMPT, GREEDY)
    texts = [PROMPT, PROMPT[5:], PROMPT[9:70], "x"]
    for options in ({"prefill_chunk": 3, "max_rows": 8, "max_chunk": 5}, {"max_chunk": 4096}):
        with LLM(folder, threads=2, slots=3, **options) as other:
            assert other.generate(texts, GREEDY)[0].token_ids == alone


def test_a_kept_state_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    first, rest = PROMPT[:70], PROMPT[70:]
    ids = llm.encode(first) + llm.encode(rest)
    whole = answer(llm, ids, GREEDY)
    kept = llm.prefill(llm.encode(first))
    llm.save_state(kept, tmp_path / "s.state")
    for state in (kept, llm.load_state(tmp_path / "s.state")):
        assert answer(llm, llm.encode(rest), GREEDY, start_from=state) == whole


def test_the_prefix_cache_changes_no_token(folder: Path, llm: LLM) -> None:
    expected = [answer(llm, PROMPT + tail, GREEDY) for tail in ("a", "b", "c")]
    with LLM(folder, threads=2, slots=3, cache_ram_bytes=64 << 20, cache_min_tokens=1) as cached:
        assert [answer(cached, PROMPT + tail, GREEDY) for tail in ("a", "b", "c")] == expected


def test_turns_of_a_chat_share_pages_and_change_no_bit(
    folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stop strings, for which text is taken back, forks, and a fresh start from a file in between."""
    monkeypatch.setattr("kittiwake.families.qwen4exp.state.PAGE_TOKENS", 8)
    with LLM(folder, threads=2, slots=3, cache_ram_bytes=64 << 20, cache_min_tokens=1, max_chunk=29) as cached:
        ids, states = llm.encode(PROMPT), []
        for turn in range(6):
            said = llm.generate(ids, GREEDY)[0].text
            params = replace(GREEDY, stop=(said[9:13],)) if turn % 2 else GREEDY
            found = cached.generate(ids, params, keep_state=True)[0]
            fresh = llm.generate(ids, params, keep_state=True)[0]
            assert found.finish_reason == ("stop" if turn % 2 else "length")
            assert found.token_ids == fresh.token_ids and found.state is not None and fresh.state is not None
            assert found.state.saved.digest == fresh.state.saved.digest and found.state.tokens == fresh.state.tokens
            states.append(found.state)
            ids = [*found.state.tokens, *llm.encode(f"turn {turn}")]
        stats = cached.engine.stats().cache
        assert stats is not None and stats.hits["memory"] == 5
        pages = [state.saved.pages for state in states]
        assert all(after[: len(before)] == before for before, after in pairwise(pages)) and len(pages[-1]) > 15
        cached.save_state(states[2], tmp_path / "2.state")
        loaded = cached.load_state(tmp_path / "2.state")
        forks = cached.generate(["a", "b"], GREEDY, start_from=loaded, keep_state=True)
        for text, fork in zip("ab", forks, strict=True):
            assert fork.token_ids == answer(llm, text, GREEDY, start_from=states[2]) and fork.state is not None
            assert fork.state.saved.pages[: len(pages[2])] == loaded.saved.pages
            assert not {*fork.state.saved.pages} & {*pages[2]}


def test_scores_are_those_of_any_cut(llm: LLM) -> None:
    ids = llm.encode(PROMPT)
    whole = llm.score(ids)
    pieces = np.concatenate(list(llm.score_stream([ids[:9], ids[9:40], ids[40:]])))
    assert whole.tobytes() == pieces[: len(whole)].tobytes()


def test_no_room_is_refused_before_any_state_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a text, and the room to work in for a chunk."""
    from kittiwake.engine.batch import Batch
    from kittiwake.engine.states import StateTable

    model = LLM(folder, threads=2, slots=1).engine.model
    table = StateTable(model.state_spec, 1, 1)
    slot = table.allocate()
    model.forward(Batch.pack([(slot, [5, 6, 7])]), table)
    before = {name: values.tobytes() for name, values in table.save(slot).parts.items()}
    with pytest.raises(PagesError):
        model.forward(Batch.pack([(slot, [5] * 300)]), table)

    def no_memory(*_: Any, **__: Any) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr("kittiwake.layers.linear.np.empty", no_memory)
    with pytest.raises(DeviceError, match="200 rows"):
        model.forward(Batch.pack([(slot, [5] * 200)]), table)
    monkeypatch.undo()
    assert table.positions[slot] == 3
    assert {name: values.tobytes() for name, values in table.save(slot).parts.items()} == before


def test_half_precision_and_full_differ_only_by_rounding(folder: Path, llm: LLM) -> None:
    with LLM.from_loaded(_in_float32(folder), EngineConfig(threads=2, slots=1)) as other:
        assert np.allclose(other.score(PROMPT), llm.score(PROMPT), rtol=1e-5, atol=1e-5)


def _in_float32(folder: Path) -> Any:
    from kittiwake.load import load_model

    return load_model(folder, EngineConfig(threads=2, dtype="fp32"))


def test_a_table_takes_no_memory(llm: LLM) -> None:
    described = llm.engine.model.describe()
    assert described["ngram_tables"] and described["state_bytes_per_token"] == 264
    assert torch.get_num_threads() >= 1
