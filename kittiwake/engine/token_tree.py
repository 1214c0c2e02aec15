"""Values under sequences of token ids, found by the longest beginning: a radix tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np

V = TypeVar("V")


def as_tokens(ids: list[int] | tuple[int, ...]) -> np.ndarray:
    """Token ids as the tree takes them: int32 [T]."""
    return np.asarray(ids, dtype=np.int32)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(len(one), len(other))
    if count == 0 or one[0] != other[0]:
        return 0
    differs = one[:count] != other[:count]
    first = int(differs.argmax())
    return first if differs[first] else count


class Node(Generic[V]):
    """The end of some sequence, or the place where two part. ``edge`` are the tokens since the node before."""

    __slots__ = ("children", "depth", "edge", "parent", "value")

    def __init__(self, parent: Node[V] | None, edge: np.ndarray, depth: int) -> None:
        self.parent, self.edge, self.depth = parent, edge, depth
        self.children: dict[int, Node[V]] = {}
        self.value: V | None = None

    @property
    def is_covered(self) -> bool:
        """Whether all longer sequences begin with one of them: whoever wants this one will rather want that."""
        return len(self.children) == 1 and next(iter(self.children.values())).value is not None

    def tokens(self) -> np.ndarray:
        """The whole sequence, int32 [depth]."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1]) if edges else np.empty(0, dtype=np.int32)


class TokenTree(Generic[V]):
    """Sequences int32 [T], each with a value. Only nodes with a value, or with two ways on, are there."""

    def __init__(self) -> None:
        self._root: Node[V] = Node(None, np.empty(0, dtype=np.int32), 0)

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def find(self, tokens: np.ndarray) -> tuple[Node[V] | None, int]:
        """The node of the longest sequence that ``tokens`` begin with, and how many tokens they share with any."""
        node, at, best = self._root, 0, None
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common_length(child.edge, tokens[at : at + len(child.edge)])
            at += same
            if same < len(child.edge):
                break
            node = child
            if node.value is not None:
                best = node
        return best, at

    def insert(self, tokens: np.ndarray, value: V) -> Node[V]:
        """Set the value of a sequence of at least one token; its node, which stays its node until it is removed."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = Node(node, tokens[at:].copy(), len(tokens))
                node.children[int(tokens[at])] = child
            else:
                same = common_length(child.edge, tokens[at : at + len(child.edge)])
                if same < len(child.edge):
                    child = _split(child, same)
            node, at = child, child.depth
        node.value = value
        return node

    def remove(self, node: Node[V]) -> None:
        """Take a value out, and the nodes that nothing needs any more."""
        node.value = None
        while node.parent is not None and node.value is None and not node.children:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is not None and node.value is None and len(node.children) == 1:
            _join(node)

    def __iter__(self) -> Iterator[Node[V]]:
        """Every node with a value."""
        ahead = [self._root]
        while ahead:
            node = ahead.pop()
            ahead.extend(node.children.values())
            if node.value is not None:
                yield node


def _split(child: Node[V], same: int) -> Node[V]:
    """A new node in the middle of an edge."""
    parent = child.parent
    assert parent is not None
    middle: Node[V] = Node(parent, child.edge[:same].copy(), parent.depth + same)
    parent.children[int(middle.edge[0])] = middle
    child.parent, child.edge = middle, child.edge[same:].copy()
    middle.children[int(child.edge[0])] = child
    return middle


def _join(node: Node[V]) -> None:
    """Let the only child of a node without value take its place."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.parent, child.edge = node.parent, np.concatenate([node.edge, child.edge])
    node.parent.children[int(child.edge[0])] = child
