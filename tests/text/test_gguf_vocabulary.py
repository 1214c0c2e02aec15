"""Vocabularies inside GGUF files: the ids of the tokenizer.json they were made from, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kittiwake.errors import CheckpointError, InputFileError, TokenizerError
from kittiwake.text.bpe import HFTokenizer, byte_alphabet
from kittiwake.text.chat import read_messages
from kittiwake.text.gguf_vocabulary import PATTERNS, TEMPLATE, read_template, read_tokenizer_json
from kittiwake.text.templates import choose_template
from tests.oracles import transformers_gguf_tokenizer
from tests.text.gguf_metadata import CONTROL, NORMAL, USER_DEFINED, add_keys, vocabulary
from tests.text.tiny import make_qwen

ROWS = 384
MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</tool_call>", "<|fim_prefix|>", "@@plain@@"]
WORDS = ["it's", "THE'RE", "hello world", " ", "\n", "\r\n ", "é", "e\u0301", "क्षि", "สวัสดี", "12", "!?", "_\u0301x"]
texts = st.text(max_size=40) | st.lists(st.sampled_from(MARKS + WORDS)).map("".join)
Keys = dict[str, Any]


def values_of(keys: Keys) -> Callable[[str, int], Sequence[Any]]:
    """Arrays as an open file gives them."""
    return lambda key, _most_bytes: list(keys[key])


def read(keys: Keys, rows: int = ROWS) -> HFTokenizer:
    return HFTokenizer(read_tokenizer_json(keys, values_of(keys), "m.gguf", rows), "m.gguf")


class Both:
    """One tokenizer as its folder's file, and from what a converter makes of it."""

    def __init__(self, pre: str) -> None:
        self.pre, self.backend = pre, make_qwen(pre)
        self.folder = HFTokenizer(self.backend.to_str().encode())
        self.keys = vocabulary(self.backend, ROWS, pre)
        self.gguf = read(self.keys)


@pytest.fixture(scope="module", params=list(PATTERNS))
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


@pytest.fixture(scope="module")
def keys() -> Keys:
    """Of a file in order; copy it before changing it."""
    return vocabulary(make_qwen(), ROWS)


@given(text=texts)
def test_ids_are_those_of_the_folders_file(both: Both, text: str) -> None:
    for special in (False, True):
        ids = both.folder.encode(text, allow_special=special)
        assert both.gguf.encode(text, allow_special=special) == ids
    assert both.gguf.decode(both.gguf.encode(text)) == both.folder.decode(both.folder.encode(text))


def test_the_rest_is_that_of_the_folders_file_too(both: Both) -> None:
    folder, gguf = both.folder, both.gguf
    assert (gguf.kind, gguf.vocab_size, gguf.eos_ids) == ("hf", folder.vocab_size, folder.eos_ids)
    assert gguf.control_texts == folder.control_texts
    # the one difference: a converter marks as control what looks special, and control tokens have no bytes
    marked = both.backend.token_to_id("<|fim_prefix|>")
    for token in range(gguf.vocab_size):
        assert gguf.is_valid(token) == folder.is_valid(token)
        assert gguf.token_bytes(token) == (b"" if token == marked else folder.token_bytes(token))
    again = HFTokenizer(gguf.files()["tokenizer.json"])
    assert (again.digest(), again.encode("hello <think>")) == (gguf.digest(), gguf.encode("hello <think>"))


def test_the_pre_tokenizers_differ_where_they_should(both: Both) -> None:
    other = Both("qwen2" if both.pre == "qwen35" else "qwen35")
    split = {one.pre: [part for part, _ in one.backend.pre_tokenizer.pre_tokenize_str("क्षि")] for one in (both, other)}
    assert len(split["qwen35"]) == 1 < len(split["qwen2"])


@pytest.mark.skipif(not transformers_gguf_tokenizer.is_available(), reason=transformers_gguf_tokenizer.SKIP_REASON)
def test_ids_are_those_of_transformers(both: Both, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "qwen4exp")
    add_keys(writer, both.keys)
    writer.add_tensor("w", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    samples = [
        "hello world, it's THE'RE 12345!?\n\n  x\r\n\ty ",
        "<|im_start|>user\nsay <think>\n@@plain@@</think><|im_end|>\n<|fim_prefix|>",
        "क्षि का नाम है สวัสดีครับ é _\u0301x 你好 \U0001f642\u200d.",
        "",
    ]
    found = [both.gguf.encode(text, allow_special=True) for text in samples]
    assert found == transformers_gguf_tokenizer.encode(path, samples)


def test_text_that_spells_control_tokens_stays_text(both: Both) -> None:
    for mark in MARKS[:-1]:
        assert both.backend.token_to_id(mark) not in both.gguf.encode(mark)
        assert both.gguf.encode(mark, allow_special=True) == [both.backend.token_to_id(mark)]
        assert both.gguf.decode(both.gguf.encode(mark)) == mark


def test_ids_keep_their_place_whatever_lies_between(keys: Keys) -> None:
    """Added tokens in front and behind a hole, and what old converters call the ids in it."""
    tokens, types = [*keys["tokenizer.ggml.tokens"]], [*keys["tokenizer.ggml.token_type"]]
    tokens[370], types[370] = "<|late|>", CONTROL
    types[360] = USER_DEFINED
    found = read(keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert found.vocab_size == 371
    assert found.encode("<|late|>", allow_special=True) == [370]
    assert not found.is_valid(360)
    assert found.encode("[PAD360]") == read(keys).encode("[PAD360]")


def changed(name: str, value: Any) -> Callable[[Keys], Keys]:
    return lambda keys: keys | {f"tokenizer.ggml.{name}": value}


def put(name: str, at: int, value: Any) -> Callable[[Keys], Keys]:
    def change(keys: Keys) -> Keys:
        values = [*keys[f"tokenizer.ggml.{name}"]]
        values[at] = value
        return keys | {f"tokenizer.ggml.{name}": values}

    return change


def without(name: str) -> Callable[[Keys], Keys]:
    return lambda keys: {key: value for key, value in keys.items() if key != f"tokenizer.ggml.{name}"}


DAMAGE: dict[str, tuple[Callable[[Keys], Keys], type[InputFileError], str]] = {
    "another pre-tokenizer": (changed("pre", "llama-bpe"), TokenizerError, r"tokenizer\.ggml\.pre is 'llama-bpe'.*--tok"),
    "no pre-tokenizer": (without("pre"), TokenizerError, r"tokenizer\.ggml\.pre is None.* qwen2, qwen35 are read"),
    "a pre-tokenizer that is a list": (changed("pre", ["qwen2"]), TokenizerError, r"pre is \['qwen2'\]"),
    "no tokens": (without("tokens"), CheckpointError, r"lacks the key tokenizer\.ggml\.tokens"),
    "no types": (without("token_type"), CheckpointError, r"lacks the key tokenizer\.ggml\.token_type"),
    "no merges": (without("merges"), CheckpointError, r"lacks the key tokenizer\.ggml\.merges"),
    "a token too few": (lambda keys: keys, CheckpointError, r"tokens holds 384 tokens, the model has 383 rows"),
    "tokens that are numbers": (changed("tokens", [1.5] * ROWS), CheckpointError, r"tokens holds 1\.5 at 0, expected str"),
    "a token twice": (put("tokens", 5, "!"), CheckpointError, r"tokens holds '!' at 0 and again at 5"),
    "a token like a control token": (put("tokens", 5, "<think>"), CheckpointError, r"holds '<think>' at 5 and again at 343"),
    "an empty token": (put("tokens", 5, ""), CheckpointError, r"tokens holds an empty token at 5"),
    "a type too few": (changed("token_type", [NORMAL] * 9), CheckpointError, r"token_type holds 9 values, .*tokens 384"),
    "a type of bytes": (put("token_type", 5, 6), CheckpointError, r"token_type holds 6 for token 5, '&'; expected 1"),
    "a type that is none": (put("token_type", 5, "x"), CheckpointError, r"token_type holds 'x' for token 5"),
    "a type that is a truth": (put("token_type", 5, True), CheckpointError, r"token_type holds True for token 5"),
    "merges that are numbers": (changed("merges", [7]), CheckpointError, r"merges holds 7 at 0, expected strings"),
    "a merge of one": (put("merges", 3, "hello"), CheckpointError, r"merges holds 'hello' at 3, expected two tokens"),
    "a merge of three": (put("merges", 3, "h e l"), CheckpointError, r"merges holds 'h e l' at 3, expected two tokens"),
    "a merge of nothing": (put("merges", 3, ""), CheckpointError, r"merges holds '' at 3, expected two tokens"),
    "a merge of an unknown token": (put("merges", 3, "zzz h"), CheckpointError, r"'zzz h' at 3, and 'zzz' is no token"),
    "a merge to an unknown token": (put("merges", 3, "z z"), CheckpointError, r"'z z' at 3, and 'zz' is no token"),
    "a merge of a control token": (put("merges", 3, "h <think>"), CheckpointError, r"and '<think>' is no token .* merged"),
    "an end that is no token": (changed("eos_token_id", ROWS), CheckpointError, r"eos_token_id is 384, expected the id"),
    "an end that is a text": (changed("eot_token_id", "x"), CheckpointError, r"eot_token_id is 'x', expected the id"),
    "a beginning that is a truth": (changed("bos_token_id", True), CheckpointError, r"bos_token_id is True, expected"),
    "a token before each text": (changed("add_bos_token", True), TokenizerError, r"add_bos_token is True, expected false"),
    "a space before each text": (changed("add_space_prefix", 1), TokenizerError, r"add_space_prefix is 1, expected false"),
    "an unknown key": (changed("fold_case", True), TokenizerError, r"the unknown key tokenizer\.ggml\.fold_case = True"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_does_not_fit_is_refused_by_key_and_value(kind: str, keys: Keys) -> None:
    change, error, message = DAMAGE[kind]
    with pytest.raises(error, match=message) as caught:
        read(change(keys), ROWS - (kind == "a token too few"))
    assert caught.value.message.startswith("m.gguf")


def test_a_merge_twice_is_refused(keys: Keys) -> None:
    merges = [*keys["tokenizer.ggml.merges"]]
    with pytest.raises(CheckpointError, match=f"at {len(merges)}, as at 4"):
        read(keys | {"tokenizer.ggml.merges": [*merges, merges[4]]})


def test_a_vocabulary_that_would_lose_text_is_refused(keys: Keys) -> None:
    bell = keys["tokenizer.ggml.tokens"].index(byte_alphabet()[7])
    with pytest.raises(TokenizerError, match=r"m\.gguf has no token for 1 of the bytes of UTF-8, the first 0x07"):
        read(put("tokens", bell, "another")(keys))


def test_a_template_names_the_tokens_of_the_file(keys: Keys) -> None:
    """A text that stands alone, its own first line end and all."""
    text = "\n{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ pad_token }}"
    found = read_template(keys | {TEMPLATE: text}, values_of(keys), "m.gguf")
    assert found is not None and found.endswith(text)
    tokenizer = read(keys)
    template = choose_template(None, tokenizer, model=Path("m.gguf"), bundled=found)
    assert template is not None and template.name == "in m.gguf"
    rendered = template.render(read_messages([{"role": "user", "content": "hi <|im_end|>"}]))
    assert rendered.text == "\n<|im_end|>hi <|im_end|><|endoftext|>"
    assert [part.text for part in rendered.segments if part.is_control] == ["<|im_end|>", "<|endoftext|>"]
    assert template.stop_ids == tuple(tokenizer.encode("<|im_end|>", allow_special=True))


def test_a_file_may_have_no_template(keys: Keys) -> None:
    assert read_template(keys, values_of(keys), "m.gguf") is None
    world = {"tokenizer.ggml.model": "rwkv", TEMPLATE: "rwkv-world"}
    assert read_template(world, values_of(world), "m.gguf") is None
    alone = {TEMPLATE: "{{ messages }}"}
    assert read_template(alone, values_of(alone), "m.gguf") == "{{ messages }}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, r"tokenizer\.chat_template is 7, expected a text"),
        (["{{ messages }}"], r"tokenizer\.chat_template is \['{{ messages }}'\], expected a text"),
        ("chatml", r"tokenizer\.chat_template is 'chatml', which reads no messages"),
        (
            "messages" + "é" * (1 << 19),
            r"tokenizer\.chat_template takes 1,048,\d+ bytes, at most 1,048,576",
        ),
    ],
)
def test_a_template_that_is_none_is_refused(value: Any, message: str, keys: Keys) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_template(keys | {TEMPLATE: value}, values_of(keys), "m.gguf")


def test_a_template_with_a_token_that_is_none_is_refused(keys: Keys) -> None:
    bad = keys | {TEMPLATE: "{{ messages }}", "tokenizer.ggml.eos_token_id": 999}
    with pytest.raises(CheckpointError, match=r"eos_token_id is 999, expected the id of a token, 0 to 383"):
        read_template(bad, values_of(bad), "m.gguf")


def test_the_file_is_one_that_the_library_writes_alike(keys: Keys) -> None:
    """A tokenizer.json like any other: strict JSON in UTF-8, which the library gives back as it was."""
    raw = read_tokenizer_json(keys, values_of(keys), "m.gguf", ROWS)
    spec = json.loads(raw)
    again = json.loads(Tokenizer.from_str(raw.decode()).to_str())
    assert again["model"]["vocab"] == spec["model"]["vocab"]
    assert [" ".join(pair) for pair in again["model"]["merges"]] == spec["model"]["merges"]
    for key in ("added_tokens", "normalizer", "pre_tokenizer"):
        assert again[key] == spec[key]
