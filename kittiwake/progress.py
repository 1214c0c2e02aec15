"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``: units are bytes or items, told by ``what``; ``total`` is 0 while it is not known.

``what`` may end in ``: …``, the piece that is in work now; ``done`` then goes on counting from one piece to the next.
"""
