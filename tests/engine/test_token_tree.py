"""The radix tree finds what a look at every sequence finds, and keeps nothing that it does not need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.token_tree import Node, TokenTree, as_tokens, common_length

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def nodes(tree: TokenTree[int]) -> list[Node[int]]:
    found, ahead = [], [vars(tree)["_root"]]
    while ahead:
        node = ahead.pop()
        found.append(node)
        ahead.extend(node.children.values())
    return found


def check_shape(tree: TokenTree[int]) -> None:
    """Only nodes that something needs, each under the first token of its edge, at its depth."""
    for node in nodes(tree):
        for token, child in node.children.items():
            assert child.parent is node and int(child.edge[0]) == token
            assert child.depth == node.depth + len(child.edge)
        if node.parent is not None:
            assert node.value is not None or len(node.children) >= 2


def brute(texts: dict[tuple[int, ...], int], query: list[int]) -> tuple[int, int | None, int]:
    """(length of the longest beginning, its value, tokens shared with any)."""
    best = max((text for text in texts if tuple(query[: len(text)]) == text), key=len, default=())
    common = max((common_length(as_tokens(text), as_tokens(query)) for text in texts), default=0)
    return len(best), texts.get(best), common


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, st.randoms())
def test_it_finds_what_looking_at_every_text_finds(
    inserted: list[list[int]], queries: list[list[int]], draw: object
) -> None:
    tree: TokenTree[int] = TokenTree()
    texts: dict[tuple[int, ...], int] = {}
    where: dict[tuple[int, ...], Node[int]] = {}
    for value, text in enumerate(inserted):
        where[tuple(text)] = tree.insert(as_tokens(text), value)
        texts[tuple(text)] = value
        check_shape(tree)
    order = list(texts)
    draw.shuffle(order)  # type: ignore[attr-defined]
    while True:
        assert sorted(node.value for node in tree if node.value is not None) == sorted(texts.values())
        for query in [*queries, *inserted]:
            node, common = tree.find(as_tokens(query))
            length, value, shared = brute(texts, query)
            assert (node.depth if node else 0, node.value if node else None, common) == (length, value, shared)
        for text, node in where.items():
            assert tuple(node.tokens().tolist()) == text  # a node stays that of its text, whatever is split around it
            longer = [other for other in texts if len(other) > len(text) and other[: len(text)] == text]
            first = min(longer, key=len, default=())
            assert node.is_covered == (bool(longer) and all(other[: len(first)] == first for other in longer))
        if not order:
            break
        gone = order.pop()
        tree.remove(where.pop(gone))
        del texts[gone]
        check_shape(tree)
    assert not tree


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [([], [1], 0), ([1], [2], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1)],
)
def test_common_length(one: list[int], other: list[int], count: int) -> None:
    assert common_length(as_tokens(one), as_tokens(other)) == count


def test_edges_are_copies() -> None:
    """A short edge must not keep a long text in memory."""
    tree: TokenTree[int] = TokenTree()
    text = np.arange(1000, dtype=np.int32)
    tree.insert(text, 1)
    tree.insert(np.concatenate([text[:500], text[:1]]), 2)
    assert all(node.edge.base is None for node in nodes(tree))
