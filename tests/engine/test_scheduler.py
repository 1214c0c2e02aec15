"""Who moves in a step, and by how much."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.request import KeptState
from kittiwake.engine.scheduler import Plan, Request, Scheduler, Stage
from kittiwake.engine.states import StatePart, StateSpec, StateTable

SPEC = StateSpec(1, (StatePart("sum", (2,)),))


def make(slots: int = 8, chunk: int = 0, max_rows: int = 100) -> Scheduler:
    return Scheduler(StateTable(SPEC, slots), chunk, max_rows)


def request(number: int, tokens: int, *, fed: int = 0, start_from: KeptState | None = None) -> Request:
    return Request(
        id=number,
        answer=cast(Any, None),
        tokens=list(range(100 * number, 100 * number + tokens)),
        fed=fed,
        keep_state=False,
        start_from=start_from,
        added_s=0.0,
    )


def counts(plan: Plan) -> dict[int, int]:
    return {part.id: count for part, count in plan.parts}


def feed(plan: Plan) -> None:
    """What the engine does after a forward, drawing one token for each request that has eaten all."""
    for part, count in plan.parts:
        part.fed += count
        if part.due == 0:
            part.tokens.append(0)


def start(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.add(one)
    scheduler.admit(1.0)


def test_slots_go_to_those_who_came_first() -> None:
    scheduler = make(slots=2)
    requests = [request(number, 3) for number in range(1, 5)]
    start(scheduler, *requests)
    assert scheduler.running == requests[:2] and list(scheduler.waiting) == requests[2:]
    assert [one.stage for one in requests] == [Stage.RUNNING] * 2 + [Stage.WAITING] * 2
    assert requests[0].slot != requests[1].slot
    assert requests[0].admitted_s == 1.0 and requests[2].admitted_s == 0.0
    slot = requests[1].slot
    scheduler.remove(requests[1])
    scheduler.admit(2.0)
    assert scheduler.running == [requests[0], requests[2]]
    assert (requests[2].slot, requests[2].admitted_s) == (slot, 2.0)
    assert list(scheduler.waiting) == requests[3:]


def test_removing_works_wherever_a_request_stands_and_once() -> None:
    scheduler = make(slots=1)
    running, waiting = request(1, 3), request(2, 3)
    start(scheduler, running, waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.waiting and not scheduler.running
    for one in (waiting, running):
        assert one.stage is Stage.DONE
        scheduler.remove(one)
    scheduler.add(request(3, 1))
    scheduler.admit(0.0)
    assert len(scheduler.running) == 1


def test_a_kept_state_is_in_the_slot_before_anything_runs() -> None:
    states = StateTable(SPEC, 2)
    scheduler = Scheduler(states, 0, 100)
    slot = states.allocate()
    states.part("sum")[:, slot] = 4.5
    states.positions[slot] = 9
    kept = KeptState(states.save(slot), (1,) * 9, cast(Any, None))
    states.free(slot)
    one, other = request(1, 3, start_from=kept), request(2, 3)
    start(scheduler, one, other)
    assert (states.part("sum")[:, one.slot] == 4.5).all() and states.positions[one.slot] == 9
    assert not states.part("sum")[:, other.slot].any() and states.positions[other.slot] == 0


def test_prompts_and_decode_rows_share_a_step_in_the_order_of_arrival() -> None:
    scheduler = make(max_rows=20)
    start(scheduler, request(1, 12), request(2, 5, fed=4), request(3, 3), request(4, 9))
    plan = scheduler.plan()
    assert counts(plan) == {1: 12, 2: 1, 3: 3, 4: 4}
    assert [part.id for part, _ in plan.parts] == [1, 2, 3, 4]
    assert [one.id for one in plan.complete] == [1, 2, 3]
    batch = plan.batch()
    assert batch.starts.tolist() == [0, 12, 13, 16, 20]
    assert batch.token_ids.tolist() == [*range(100, 112), 204, *range(300, 303), *range(400, 404)]
    assert batch.want_rows.tolist() == [11, 12, 15]
    assert batch.slots.tolist() == [part.slot for part, _ in plan.parts]


@pytest.mark.parametrize(
    ("chunk", "expected"), [(0, [10, 2]), (1, [1] * 12), (5, [5, 5, 2]), (12, [10, 2]), (50, [10, 2])]
)
def test_a_prompt_is_fed_in_chunks_within_the_rows_of_a_step(chunk: int, expected: list[int]) -> None:
    scheduler = make(chunk=chunk, max_rows=10)
    one = request(1, 12)
    start(scheduler, one)
    found = []
    while one.due:
        plan = scheduler.plan()
        assert plan.complete == ([one] if one.fed + plan.parts[0][1] == 12 else [])
        found.append(plan.parts[0][1])
        one.fed += found[-1]
    assert found == expected


def test_decode_rows_come_before_prompts() -> None:
    scheduler = make(max_rows=4)
    start(scheduler, request(1, 50), request(2, 9, fed=8), request(3, 7, fed=6), request(4, 2, fed=1))
    assert counts(scheduler.plan()) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_with_fewer_rows_than_decoders_everyone_moves_in_turn() -> None:
    scheduler = make(max_rows=3)
    requests = [request(number, 2, fed=1) for number in range(1, 9)]
    start(scheduler, *requests)
    moved: Counter[int] = Counter()
    for step in range(1, 25):
        plan = scheduler.plan()
        assert len(plan.parts) == 3
        moved.update(counts(plan))
        feed(plan)
        assert sum(moved.values()) == 3 * step
        assert max(moved[one.id] for one in requests) - min(moved[one.id] for one in requests) <= 1
    assert set(moved.values()) == {9}


def test_a_prompt_left_out_is_served_before_one_that_was_not() -> None:
    scheduler = make(chunk=4, max_rows=4)
    one, other = request(1, 40), request(2, 8)
    start(scheduler, one, other)
    order = []
    while other.due:
        plan = scheduler.plan()
        order.append(counts(plan))
        for part, count in plan.parts:
            part.fed += count
    assert order == [{1: 4}, {2: 4}, {1: 4}, {2: 4}]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(0, 6),
    st.integers(1, 9),
)
def test_every_prompt_is_eaten_once_in_order_within_the_budget(
    lengths: list[int], slots: int, chunk: int, max_rows: int
) -> None:
    scheduler = make(slots, chunk, max_rows)
    requests = [request(number, length) for number, length in enumerate(lengths)]
    eaten: dict[int, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        scheduler.add(one)
    for _ in range(sum(lengths) + len(lengths)):
        scheduler.admit(0.0)
        plan = scheduler.plan()
        if not plan.parts:
            break
        batch = plan.batch()
        assert batch.rows <= max_rows
        assert all(count <= chunk for _, count in plan.parts if chunk)
        for index, (part, count) in enumerate(plan.parts):
            eaten[part.id] += batch.token_ids[batch.starts[index] : batch.starts[index + 1]].tolist()
            part.fed += count
            if part.due == 0:
                scheduler.remove(part)
    assert eaten == {one.id: one.tokens for one in requests}
    assert not scheduler.running and not scheduler.waiting


def test_a_prompt_moves_on_even_while_decoders_alone_could_fill_every_step() -> None:
    scheduler = make(max_rows=2)
    start(scheduler, request(1, 1), request(2, 1), request(3, 4))
    eaten: Counter[int] = Counter()
    for _ in range(8):
        plan = scheduler.plan()
        eaten.update(counts(plan))
        feed(plan)
    assert eaten[3] >= 4
    assert min(eaten[1], eaten[2]) >= 4
