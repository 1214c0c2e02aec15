"""A plugin of pytest that makes Triton's interpreter quicker and changes nothing that it computes.

Before every launch, and again for every call of one function by another, the interpreter looks through all members of
Triton's language for those it replaces, and it makes its table of types anew for every value. Here the members and the
types are found once, and members are replaced once a launch.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

BUILTINS = {
    place: tuple(name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member))
    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}
"""What the interpreter may have to replace, found before it has replaced anything."""
_patch_lang = interpreter._patch_lang
_patched: set[int] = set()
_patch_builtin, _get_np_dtype = interpreter._patch_builtin, interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def _patch_known_builtins(place: Any, builder: Any, *scope: Any) -> None:
    if place not in BUILTINS:
        _patch_builtin(place, builder, *scope)
        return
    for name in BUILTINS[place]:
        member = getattr(place, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(place, name, member, builder, *scope)


def _patch_once(function: Any) -> Any:
    """Replace what ``function`` sees of the language unless a launch that has not ended already did."""
    found = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core} - _patched
    if not found:
        return SimpleNamespace(restore=lambda: None)
    scope = _patch_lang(function)
    restore = scope.restore
    _patched.update(found)

    def ended() -> None:
        restore()
        _patched.difference_update(found)

    scope.restore = ended
    return scope


def _known_np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if isinstance(element, tl.pointer_type):
        return _get_np_dtype(element)
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _get_np_dtype(element)
    return _np_dtypes[element.name]


interpreter._patch_builtin, interpreter._get_np_dtype = _patch_known_builtins, _known_np_dtype
interpreter._patch_lang = _patch_once
