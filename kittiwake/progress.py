"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``: units are bytes or items, told by ``what``; ``total`` is 0 while it is not known."""
