"""The tokenizer of GPT-NeoX 20B that ships with kittiwake."""

from __future__ import annotations

from pathlib import Path

import pytest

from kittiwake.errors import TokenizerError, UsageError
from kittiwake.text import gpt_neox
from kittiwake.text.tokenizer import Tokenizer, check_fits, default_tokenizer, load_tokenizer, with_ends


@pytest.fixture(scope="module")
def neox() -> Tokenizer:
    return load_tokenizer("gpt-neox")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\nThe following is a", [187, 510, 1563, 310, 247]),
        ("Hello world", [12092, 1533]),
        ("", []),
        (" ", [209]),
        ("\n\n", [535]),
        ("        x", [50270, 89]),
    ],
)
def test_known_texts(neox: Tokenizer, text: str, ids: list[int]) -> None:
    assert neox.encode(text) == ids
    assert neox.decode(ids) == text


def test_end_of_text_is_id_0_and_never_comes_from_text(neox: Tokenizer) -> None:
    assert (neox.vocab_size, neox.eos_ids, neox.kind) == (50277, (0,), "gpt-neox")
    assert 0 not in neox.encode("<|endoftext|>") and neox.decode(neox.encode("<|endoftext|>")) == "<|endoftext|>"
    assert neox.encode("<|endoftext|>", allow_special=True) == [0]
    assert neox.decode([0]) == "" and all(neox.is_valid(token) for token in (0, 50276)) and not neox.is_valid(50277)


def test_a_bundle_needs_no_copy_of_it(neox: Tokenizer) -> None:
    assert neox.files() == {} and neox.digest() == gpt_neox.GPT_NEOX_SHA256
    again = load_tokenizer(neox.kind, neox.files())
    assert again.digest() == neox.digest()
    with pytest.raises(TokenizerError, match=r"tokenizer 'gpt-neox' has the files: tokenizer\.json; expected: none"):
        load_tokenizer("gpt-neox", {"tokenizer.json": b"{}"})
    with pytest.raises(UsageError, match="end-of-text ids of tokenizer 'gpt-neox' are fixed"):
        load_tokenizer("gpt-neox", eos_ids=[1])


def test_it_goes_with_50277_rows(neox: Tokenizer) -> None:
    assert default_tokenizer(50277).kind == "gpt-neox"
    check_fits(neox, 50277)
    for rows in (256, 65536):
        with pytest.raises(TokenizerError, match=f"the tokenizer 'gpt-neox' .*{rows} rows"):
            check_fits(neox, rows)
    with pytest.raises(TokenizerError, match="50277 rows need tokenizer 'gpt-neox'"):
        check_fits(load_tokenizer("world"), 50277)


@pytest.mark.parametrize("damage", ["missing", "cut", "another"])
def test_a_damaged_installation_is_told(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lzma

    path = tmp_path / "t.json.xz"
    if damage == "cut":
        path.write_bytes(gpt_neox._FILE.read_bytes()[:1000])
    if damage == "another":
        path.write_bytes(lzma.compress(b"{}"))
    monkeypatch.setattr(gpt_neox, "_FILE", path)
    with pytest.raises(TokenizerError, match=r"t\.json\.xz (cannot be read|is not the tokenizer)") as caught:
        load_tokenizer("gpt-neox")
    assert caught.value.hint == "install kittiwake again"


# Ends that a checkpoint adds


def test_more_ends_leave_the_encoding_alone(neox: Tokenizer) -> None:
    assert with_ends(neox, []) is neox and with_ends(neox, [0]) is neox
    more = with_ends(neox, [0, 187])
    assert (more.eos_ids, neox.eos_ids) == ((0, 187), (0,))
    assert more.encode("a\nb") == neox.encode("a\nb") and more.decode([187]) == "\n"
