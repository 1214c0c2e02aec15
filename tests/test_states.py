"""States as values: kept, forked, saved to files, tuned; always the bits of one uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.request import Completion, KeptState, SamplingParams
from kittiwake.errors import RequestError, StateError, StateFileError
from kittiwake.llm import LLM
from kittiwake.load import load_tensors

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SHAPE = small(2, 64, 16)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.pth"
    torch.save(random_rwkv7(SHAPE, seed=3), path)
    return path


@pytest.fixture(scope="module")
def llm(weights: Path) -> LLM:
    return LLM(weights, threads=1)


def one(llm: LLM, prompt: str | list[int], **options: object) -> Completion:
    return llm.generate([prompt], options.pop("params", GREEDY), **options)[0]  # type: ignore[arg-type]


def bits(state: KeptState | None) -> tuple[object, ...]:
    assert state is not None
    logits = b"" if state.logits is None else state.logits.tobytes()
    parts = sorted((name, array.tobytes()) for name, array in state.saved.parts.items())
    return state.tokens, state.initial, state.saved.position, logits, parts


def test_a_kept_state_goes_on_as_if_never_stopped(llm: LLM) -> None:
    whole = one(llm, "It was a dark night", keep_state=True, params=replace(GREEDY, max_tokens=16))
    first = one(llm, "It was a dark night", keep_state=True)
    rest = one(llm, "", start_from=first.state, keep_state=True)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert rest.prompt_tokens == 0
    assert bits(rest.state) == bits(whole.state)


def test_nothing_is_kept_unasked(llm: LLM) -> None:
    assert one(llm, "x").state is None
    assert [delta.state for delta in llm.stream("x", GREEDY)] == [None] * 8


def test_one_state_starts_many_requests_and_stays_what_it_was(llm: LLM) -> None:
    start = one(llm, "Shared beginning", keep_state=True).state
    assert start is not None
    before = bits(start)
    sampled = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    endings = ["", " and", " or else", " and"]
    forked = llm.generate(endings, sampled, start_from=start, keep_state=True)
    for ending, completion in zip(endings, forked, strict=True):
        ids = [*start.tokens, *llm.tokenizer.encode(ending)]
        alone = one(llm, ids, params=sampled, keep_state=True)
        assert completion.token_ids == alone.token_ids
        assert bits(completion.state) == bits(alone.state)
    assert bits(start) == before


def test_streaming_gives_the_same_state(llm: LLM) -> None:
    last = list(llm.stream("abc", GREEDY, keep_state=True))[-1]
    assert bits(last.state) == bits(one(llm, "abc", keep_state=True).state)


def test_a_state_for_each_prompt(llm: LLM) -> None:
    a = one(llm, "first", keep_state=True).state
    both = llm.generate(["x", "x"], GREEDY, start_from=[a, None])
    assert both[0].token_ids == one(llm, "x", start_from=a).token_ids
    assert both[1].token_ids == one(llm, "x").token_ids
    with pytest.raises(RequestError, match="2 prompts need one state"):
        llm.generate(["x", "x"], GREEDY, start_from=[a])


def test_text_cut_off_by_a_stop_string_is_not_in_the_state(llm: LLM) -> None:
    text = one(llm, "abc", params=replace(GREEDY, max_tokens=30)).text
    stop = text[5:7]
    cut = one(llm, "abc", params=replace(GREEDY, max_tokens=30, stop=(stop,)), keep_state=True)
    assert cut.state is not None
    assert llm.tokenizer.decode(cut.state.tokens) == "abc" + cut.text
    fresh = llm.logits(list(cut.state.tokens), rows=[-1])[0]
    assert cut.state.logits is not None
    assert cut.state.logits.tobytes() == fresh.tobytes()


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    cut=st.integers(0, 39),
    seed=st.integers(0, 9),
    drawn=st.integers(1, 5),
)
def test_any_cut_saved_to_a_file_continues_bit_for_bit(
    llm: LLM, tmp_path: Path, prompt: list[int], cut: int, seed: int, drawn: int
) -> None:
    params = SamplingParams(max_tokens=drawn, seed=seed, ignore_eos=True)
    kept = one(llm, prompt, params=params, keep_state=True).state
    assert kept is not None
    llm.save_state(kept, tmp_path / "a.state", replace=True)
    loaded = llm.load_state(tmp_path / "a.state")
    assert bits(loaded) == bits(kept)
    more = prompt[cut:]
    fresh = one(llm, [*kept.tokens, *more], params=params, keep_state=True)
    after = one(llm, more, params=params, keep_state=True, start_from=loaded)
    assert after.token_ids == fresh.token_ids
    assert bits(after.state) == bits(fresh.state)


def test_another_process_goes_on_with_the_same_bits(llm: LLM, weights: Path, tmp_path: Path) -> None:
    start = one(llm, "Once upon a time", keep_state=True).state
    assert start is not None
    llm.save_state(start, tmp_path / "a.state")
    code = f"""
import json
from kittiwake import LLM, SamplingParams
llm = LLM({str(weights)!r}, threads=1)
done = llm.generate(" more", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
                    start_from=llm.load_state({str(tmp_path / "a.state")!r}), keep_state=True)[0]
llm.save_state(done.state, {str(tmp_path / "b.state")!r})
print(json.dumps(done.token_ids))
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here = one(llm, " more", start_from=start, keep_state=True)
    assert json.loads(ran.stdout) == list(here.token_ids)
    assert bits(llm.load_state(tmp_path / "b.state")) == bits(here.state)


def test_states_of_other_models_and_dtypes_are_refused(llm: LLM, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    llm.save_state(one(llm, "abc", keep_state=True).state, path)  # type: ignore[arg-type]
    twin = tmp_path / "twin.pth"
    torch.save(random_rwkv7(SHAPE, seed=4), twin)
    with pytest.raises(StateError, match=r"model '.*', here '"):
        LLM(twin, threads=1).load_state(path)
    with pytest.raises(StateError, match="dtype 'bf16', here 'fp32'"):
        LLM(weights, threads=1, dtype="fp32").load_state(path)
    other = LLM.from_loaded(load_tensors(random_rwkv7(small(3, 64, 16), seed=3), EngineConfig(threads=1)))
    with pytest.raises(StateError, match="part"):
        one(other, "x", start_from=one(llm, "abc", keep_state=True).state)


def test_the_digest_tells_weights_apart_and_nothing_else(llm: LLM, weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.pth"
    copy.write_bytes(weights.read_bytes())
    assert LLM(copy, threads=1, dtype="fp32").loaded.digest() == llm.loaded.digest()
    twins = [load_tensors(random_rwkv7(SHAPE, seed=seed), EngineConfig(threads=1)) for seed in (5, 5, 6)]
    digests = [twin.digest() for twin in twins]
    assert digests[0] == digests[1] != digests[2]
    assert all(len(digest) == 64 for digest in digests)


def test_weights_changed_on_disk_have_no_digest(tmp_path: Path, weights: Path) -> None:
    copy = tmp_path / "copy.pth"
    copy.write_bytes(weights.read_bytes())
    opened = LLM(copy, threads=1)
    torch.save(random_rwkv7(SHAPE, seed=9), copy)
    with pytest.raises(Exception, match="changed while it was open"):
        opened.loaded.digest()


def _time_state(seed: int, heads: int = 4, size: int = 16, layers: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (heads, size, size)
    return {f"blocks.{i}.att.time_state": torch.randn(shape, generator=draw) for i in range(layers)}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_tuned_state_is_read_as_rows_of_values(llm: LLM, tmp_path: Path, suffix: str) -> None:
    tensors, path = _time_state(1), tmp_path / f"tuned{suffix}"
    torch.save(tensors, path) if suffix == ".pth" else save_file(tensors, path)
    tuned = llm.load_initial_state(path)
    wkv = tuned.saved.parts["wkv"]
    for layer in range(2):
        stored = tensors[f"blocks.{layer}.att.time_state"].numpy()  # [H, V, K]
        assert wkv[layer, 1, 2, 5] == stored[1, 5, 2]
    assert (tuned.saved.position, tuned.tokens, tuned.logits) == (0, (), None)
    assert not any(tuned.saved.parts[name].any() for name in ("att_shift", "ffn_shift"))
    turned = llm.load_initial_state(path, transpose=True)
    assert np.array_equal(turned.saved.parts["wkv"], wkv.swapaxes(-1, -2))
    assert turned.initial != tuned.initial


def test_a_tuned_state_steers_the_answer_and_needs_a_prompt(llm: LLM, tmp_path: Path) -> None:
    torch.save(_time_state(1), tmp_path / "tuned.pth")
    tuned = llm.load_initial_state(tmp_path / "tuned.pth")
    steered = one(llm, "abc", start_from=tuned, keep_state=True)
    assert steered.token_ids != one(llm, "abc").token_ids
    assert steered.state is not None
    assert steered.state.initial == tuned.initial
    with pytest.raises(RequestError, match="prompt is empty"):
        one(llm, "", start_from=tuned)
    for name, state in (("grown", steered.state), ("bare", tuned)):
        llm.save_state(state, tmp_path / name)
        assert bits(llm.load_state(tmp_path / name)) == bits(state)


def test_a_tuned_state_acts_as_the_oracle_says(llm: LLM, weights: Path, tmp_path: Path) -> None:
    """One token from a tuned state: the read-out r S of the reference scan, so that the orientation cannot be swapped."""
    from kittiwake.ops.wkv7.reference import scan

    tensors = _time_state(2)
    torch.save(tensors, tmp_path / "tuned.pth")
    state = np.stack([tensors["blocks.0.att.time_state"].numpy().transpose(0, 2, 1)]).astype(np.float32)
    r, zero = np.ones((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    y = scan(r, r, zero, zero, zero, zero, np.array([0, 1]), np.array([0]), state.copy())
    expected = np.stack([m @ np.ones(16, np.float32) for m in tensors["blocks.0.att.time_state"].numpy()])
    np.testing.assert_allclose(y[0], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(llm.load_initial_state(tmp_path / "tuned.pth").saved.parts["wkv"][0], state[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("blocks.1.att.time_state"), "lacks blocks.1.att.time_state"),
        (lambda t: t.update({"blocks.2.att.time_state": torch.zeros(4, 16, 16)}), "holds blocks.2.att.time_state"),
        (lambda t: t.update({"blocks.0.att.time_offset": torch.zeros(4)}), "holds blocks.0.att.time_offset"),
        (lambda t: t.update({"blocks.0.att.time_state": torch.zeros(4, 16, 8)}), "expected (4, 16, 16)"),
        (lambda t: t.update({"blocks.0.att.time_state": torch.zeros(64, 16)}), "expected (4, 16, 16)"),
        (lambda t: t.update({"blocks.0.att.time_state": torch.zeros(4, 16, 16, dtype=torch.int32)}), "torch.int32"),
        (lambda t: t.update({"blocks.0.att.time_state": torch.full((4, 16, 16), torch.nan)}), "not finite"),
    ],
)
def test_what_is_no_tuned_state_of_this_model_is_refused(llm: LLM, tmp_path: Path, change: object, said: str) -> None:
    tensors = _time_state(1)
    change(tensors)  # type: ignore[operator]
    torch.save(tensors, tmp_path / "tuned.pth")
    with pytest.raises(StateFileError) as caught:
        llm.load_initial_state(tmp_path / "tuned.pth")
    assert said in caught.value.message


def test_a_model_is_no_tuned_state(llm: LLM, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="no part of a tuned state"):
        llm.load_initial_state(weights)
    (tmp_path / "text.pth").write_bytes(b"hello")
    with pytest.raises(StateFileError):
        llm.load_initial_state(tmp_path / "text.pth")
