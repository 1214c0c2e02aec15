"""The table of slots: its verbs, and that no slot ever sees another's state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kittiwake.engine.states import SCRATCH_SLOT, PartKind, SavedState, StatePart, StateSpec, StateTable
from kittiwake.errors import StateError

SPEC = StateSpec(
    3,
    (
        StatePart("shift", (4,)),
        StatePart("wkv", (2, 3, 5)),
        StatePart("rows", (8, 2), "float16", PartKind.OPEN_ROWS),
    ),
)
NAMES = ("shift", "wkv", "rows")


def fill(table: StateTable, slot: int, value: float, position: int = 7) -> None:
    for name in NAMES:
        table.part(name)[:, slot] = value
    table.positions[slot] = position


def holds(table: StateTable, slot: int, value: float) -> bool:
    return all((table.part(name)[:, slot] == value).all() for name in NAMES)


def test_parts_have_a_place_for_every_layer_and_slot_and_the_scratch_slot() -> None:
    table = StateTable(SPEC, 4)
    assert {name: table.part(name).shape for name in NAMES} == {
        "shift": (3, 5, 4),
        "wkv": (3, 5, 2, 3, 5),
        "rows": (3, 5, 8, 2),
    }
    assert table.part("rows").dtype == np.float16
    assert SPEC.slot_bytes == 3 * (16 + 120 + 32)
    assert table.nbytes == 5 * SPEC.slot_bytes
    assert table.positions.tolist() == [0] * 5


def test_every_slot_is_given_once_and_never_the_scratch_slot() -> None:
    table = StateTable(SPEC, 3)
    slots = [table.allocate() for _ in range(3)]
    assert sorted(slots) == [1, 2, 3] and SCRATCH_SLOT not in slots
    assert table.free_slots == 0
    with pytest.raises(StateError, match="all 3 state slots are taken"):
        table.allocate()
    table.free(2)
    assert table.free_slots == 1
    assert table.allocate() == 2


def test_an_allocated_slot_is_clear_whatever_was_in_it() -> None:
    table = StateTable(SPEC, 2)
    slot = table.allocate()
    fill(table, slot, np.nan)
    table.free(slot)
    assert table.allocate() == slot
    assert holds(table, slot, 0) and table.positions[slot] == 0


def test_a_part_begins_with_what_its_family_says() -> None:
    spec = StateSpec(2, (StatePart("num", (3,)), StatePart("top", (3,), fill=-1e38)))
    table = StateTable(spec, 2)
    slot, other = table.allocate(), table.allocate()
    for name, value in (("num", 0), ("top", np.float32(-1e38))):
        assert (table.part(name) == value).all()  # the scratch slot too
    for name in ("num", "top"):
        table.part(name)[:] = 5
    table.clear(slot)
    assert (table.part("num")[:, slot] == 0).all() and (table.part("top")[:, slot] == np.float32(-1e38)).all()
    assert (table.part("top")[:, other] == 5).all()


def test_clearing_touches_one_slot_only() -> None:
    table = StateTable(SPEC, 3)
    slots = [table.allocate() for _ in range(3)]
    for slot in (SCRATCH_SLOT, *slots):
        fill(table, slot, slot + 1)
    table.clear(slots[1])
    assert holds(table, slots[1], 0) and table.positions[slots[1]] == 0
    for slot in (SCRATCH_SLOT, slots[0], slots[2]):
        assert holds(table, slot, slot + 1) and table.positions[slot] == 7


def test_what_is_saved_is_a_copy_and_is_restored_into_any_slot() -> None:
    table = StateTable(SPEC, 2)
    home, away = table.allocate(), table.allocate()
    fill(table, home, 2.5, 11)
    saved = table.save(home)
    assert saved.position == 11 and saved.nbytes == SPEC.slot_bytes
    fill(table, home, 9.0, 12)
    table.restore(away, saved)
    assert holds(table, away, 2.5) and table.positions[away] == 11
    assert holds(table, home, 9.0) and table.positions[home] == 12
    fill(table, away, 1.0)
    assert all((part == 2.5).all() for part in saved.parts.values())


@pytest.mark.parametrize("slot", [SCRATCH_SLOT, -1, 2, 3, 4])
def test_slots_nobody_took_are_refused(slot: int) -> None:
    table = StateTable(SPEC, 3)
    saved = table.save(table.allocate())
    for verb in (table.free, table.save, lambda slot: table.restore(slot, saved)):
        with pytest.raises(StateError, match=f"slot {slot} is not a taken slot"):
            verb(slot)
    assert table.free_slots == 2


def test_a_slot_is_not_freed_twice() -> None:
    table = StateTable(SPEC, 1)
    slot = table.allocate()
    table.free(slot)
    with pytest.raises(StateError, match="not a taken slot"):
        table.free(slot)
    assert table.free_slots == 1


def _other(saved: SavedState, **parts: np.ndarray) -> SavedState:
    return replace(saved, parts={**saved.parts, **parts})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": np.zeros(1, np.float32)}, r"\['more', 'rows', 'shift', 'wkv'\]"),
        ({"wkv": np.zeros((3, 2, 5, 3), np.float32)}, r"'wkv' is float32 \(3, 2, 5, 3\).*float32 \(3, 2, 3, 5\)"),
        ({"shift": np.zeros((3, 4), np.float64)}, r"'shift' is float64"),
        ({"shift": np.zeros((2, 4), np.float32)}, r"'shift' is float32 \(2, 4\)"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(change: dict[str, np.ndarray], message: str) -> None:
    table = StateTable(SPEC, 1)
    slot = table.allocate()
    fill(table, slot, 3.0)
    with pytest.raises(StateError, match=message):
        table.restore(slot, _other(table.save(slot), **change))
    assert holds(table, slot, 3.0) and table.positions[slot] == 7


def test_a_table_without_slots_is_refused() -> None:
    with pytest.raises(StateError, match="at least one slot, asked for 0"):
        StateTable(SPEC, 0)
