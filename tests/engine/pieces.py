"""A tokenizer of sixteen tokens that hold every trouble: parts of characters, several letters, holes, control tokens."""

from __future__ import annotations

from kittiwake.text.table import TokenTable

PIECES: tuple[bytes | None, ...] = (
    b"",  # 0 end of text
    b"a",
    b"b",
    b"c",
    b"ab",  # 4
    b"\n",
    "안".encode(),  # 6
    b"\xeb",  # 7: the first of 녕's three bytes
    b"\x85\x95",  # 8: the other two
    b"\xeb\x85",  # 9
    b"\x95c",  # 10: the last one, and a letter
    None,  # 11: a hole
    b"",  # 12: a control token that ends nothing
    b"abc",
    b"\xff",  # 14: no UTF-8 anywhere
    b"x\xeb",  # 15: a letter, and 녕 begins
)
END = 0
HOLE = 11
CONTROL = 12


class PieceTokenizer(TokenTable):
    """Encodes the letters a, b, c and the line end only: what the tests write themselves."""

    kind = "pieces"

    def __init__(self) -> None:
        super().__init__(PIECES, (END,))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [PIECES.index(char.encode()) for char in text]

    def files(self) -> dict[str, bytes]:
        return {}

    def digest(self) -> str:
        return "pieces"
