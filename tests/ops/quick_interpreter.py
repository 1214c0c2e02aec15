"""A plugin of pytest that makes Triton's interpreter quicker and changes nothing that it computes.

Before every launch, and again for every call of one function by another, the interpreter looks through all members of
Triton's language for those it replaces. Here they are found once, and replaced once a launch. It makes types, shapes and
constants anew for every value, and asks after each sum of whole numbers, by five more operations on tensors, whether it
fits: here what is the same is made once, and the question is asked of NumPy.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BUILTINS = {
    place: tuple(name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member))
    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}
"""What the interpreter may have to replace, found before it has replaced anything."""
_patch_lang = interpreter._patch_lang
_patched: set[int] = set()
_languages: dict[int, frozenset[int]] = {}
"""Which of the language's two modules a module sees."""
_patch_builtin = interpreter._patch_builtin

# What a launch replaces


def _patch_known_builtins(place: Any, builder: Any, *scope: Any) -> None:
    if place not in BUILTINS:
        _patch_builtin(place, builder, *scope)
        return
    for name in BUILTINS[place]:
        member = getattr(place, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(place, name, member, builder, *scope)


def _patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A builtin that is given the interpreter's semantic, whatever it is called with."""
    function = getattr(member, "__wrapped__", member)

    def called(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **options)

    scope.set_attr(place, name, called)


def _patch_once(function: Any) -> Any:
    """Replace what ``function`` sees of the language unless a launch that has not ended already did."""
    names = function.__globals__
    if id(names) not in _languages:
        _languages[id(names)] = frozenset(id(value) for value in names.values() if value is tl or value is tl.core)
    found = _languages[id(names)] - _patched
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


# Types and shapes

_unwrap, _dtype_eq, _init_block_type = tl.core._unwrap_if_constexpr, tl.dtype.__eq__, tl.block_type.__init__
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Shape and count as tensors have them, so that a shape is one object."""
_blocks: dict[tuple[tuple[int, ...], str], Any] = {}
"""Types of blocks by their shape and the name of what they hold."""
_NO_SHAPE = (tl.tuple([]), tl.constexpr(1))
_PLAIN = frozenset((int, float, bool, tl.tensor, tl.dtype, tl.block_type, tl.pointer_type))


def _known_unwrap(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is tl.constexpr else _unwrap(value)


def _same_dtype(self: Any, other: Any) -> bool:
    return self is other or bool(_dtype_eq(self, other))


def _known_block_type(_: type, element: Any, shape: Any) -> Any:
    sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
    return _blocks.get((sizes, element.name)) or _make_block_type(element, shape, sizes)


def _make_block_type(element: Any, shape: Any, sizes: tuple[int, ...]) -> Any:
    made = object.__new__(tl.block_type)
    _init_block_type(made, element, shape)
    made.sizes = sizes
    made.of_tensor = _shapes.setdefault(
        sizes, (tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(made.numel))
    )
    _blocks[sizes, element.name] = made
    return made


def _like(block: Any, element: Any) -> Any:
    """The type of a block of the same shape."""
    return _blocks.get((block.sizes, element.name)) or _make_block_type(element, block.shape, block.sizes)


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = kind.of_tensor if type(kind) is tl.block_type else _NO_SHAPE


def _known_np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if isinstance(element, tl.pointer_type):
        return _get_np_dtype(element)
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _get_np_dtype(element)
    return _np_dtypes[element.name]


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or data.itemsize > max(1, dtype.itemsize):
        self.__post_init__()


# What every operation asks

_operands, _constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
_cast, _broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
_with_numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""What becomes of an operation's two sides where one is a number: the other's type, and the number as a tensor."""
_constants: dict[tuple[Any, str], Any] = {}
_WIDE: dict[str, tuple[Callable[[int, int], int], Any]] = {
    "add": (operator.add, np.add),
    "sub": (operator.sub, np.subtract),
    "mul": (operator.mul, np.multiply),
}


def _quick_operands(
    self: Any,
    left: Any,
    right: Any,
    left_may_point: bool = False,
    right_may_point: bool = False,
    is_checked: bool = True,
    divides: bool = False,
) -> Any:
    """Both sides of an operation as tensors of the same shape, and of the same type but for pointers."""
    rest = (left_may_point, right_may_point, is_checked, divides)
    if type(left) is type(right) is tl.tensor:
        ours, other = left.dtype, right.dtype
        is_same = ours is other and type(ours) is tl.dtype and not divides
        if is_same or (left_may_point and type(ours) is tl.pointer_type and (other is tl.int32 or other is tl.int64)):
            return _quick_broadcast(self, left, right)
        return _operands(self, left, right, *rest)
    kind = type(right)
    if type(left) is not tl.tensor or not (kind is int or kind is float) or right != right:
        return _operands(self, left, right, *rest)
    key = (id(left.shape), left.dtype.name, kind, right or str(right), rest)  # a zero has a sign
    if key not in _with_numbers:
        made = _operands(self, left, right, *rest)
        _with_numbers[key] = made[0].dtype, made[1]
        return made
    wanted, number = _with_numbers[key]
    return left if left.dtype.is_ptr() else _quick_cast(self, left, wanted), number


def _quick_cast(self: Any, given: Any, kind: Any, *rest: Any, **more: Any) -> Any:
    return given if given.dtype is kind else _cast(self, given, kind, *rest, **more)


def _quick_broadcast(self: Any, left: Any, right: Any) -> Any:
    if left.shape is right.shape:
        return left, right
    if left.shape is _NO_SHAPE[0]:
        return _splat(self, left, right.type), right
    if right.shape is _NO_SHAPE[0]:
        return left, _splat(self, right, left.type)
    return _broadcast(self, left, right)


def _splat(self: Any, value: Any, like: Any) -> Any:
    kind = _like(like, value.dtype)
    return self.tensor(self.builder.create_splat(kind, value.handle), kind)


def _known_constant(self: Any, value: Any, dtype: Any) -> Any:
    if dtype is None or value != value:
        return _constant(self, value, dtype)
    key = (value or str(value), dtype.name)  # a zero has a sign
    if key not in _constants:
        _constants[key] = _constant(self, value, dtype)
    return _constants[key]


def _assert_it_fits(self: Any, left: Any, right: Any, operation: Any) -> None:
    """AssertionError where a sum, a difference or a product of whole numbers of up to 32 bits overflows."""
    kind, name = left.type.scalar, operation.__name__
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    assert kind == right.type.scalar
    a, b = left.handle.data, right.handle.data
    if a.size == b.size == 1:
        least = most = _WIDE[name][0](int(a.item()), int(b.item()))
    else:
        made = _WIDE[name][1](a, b, dtype=np.int64)
        least, most = made.min(), made.max()
    fits = kind.get_int_min_value() <= least and most <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


interpreter._patch_builtin, interpreter._patch_attr = _patch_known_builtins, _patch_attr
interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _known_np_dtype
interpreter.TensorHandle.__init__ = _init_handle
tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = _known_unwrap, _same_dtype
tl.block_type.__new__, tl.block_type.__init__ = _known_block_type, lambda self, *_: None
tl.block_type.to_ir, tl.block_type.with_element_ty = lambda self, _: self, _like
tl.tensor.__init__ = _init_tensor
TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant = _quick_operands, _known_constant
TritonSemantic.cast, TritonSemantic.broadcast_impl_value = _quick_cast, _quick_broadcast
TritonSemantic.binary_op_sanitize_overflow_impl = _assert_it_fits
