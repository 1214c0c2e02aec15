"""Who moves in a step, and by how much."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.request import KeptState, RequestOptions
from kittiwake.engine.scheduler import Plan, Request, Scheduler, Stage
from kittiwake.engine.states import StatePart, StateSpec, StateTable

SPEC = StateSpec(1, (StatePart("sum", (2,)),))


def make(slots: int = 8, chunk: int = 0, max_rows: int = 100) -> Scheduler:
    return Scheduler(StateTable(SPEC, slots), chunk, max_rows)


def request(
    number: int,
    tokens: int,
    *,
    fed: int = 0,
    start_from: KeptState | None = None,
    client: str = "",
    priority: int = 0,
    added_s: float = 0.0,
) -> Request:
    return Request(
        id=number,
        answer=cast(Any, None),
        tokens=list(range(100 * number, 100 * number + tokens)),
        fed=fed,
        keep_state=False,
        start_from=start_from,
        added_s=added_s,
        options=RequestOptions(client=client, priority=priority),
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
    ("chunk", "beside", "alone"),
    [(0, [9, 3], [10, 2]), (1, [1] * 12, [10, 2]), (5, [5, 5, 2], [10, 2]), (50, [9, 3], [10, 2])],
)
def test_a_prompt_is_read_in_chunks_beside_one_who_decodes_and_as_fast_as_can_be_alone(
    chunk: int, beside: list[int], alone: list[int]
) -> None:
    for others, expected in (([request(2, 2, fed=1)], beside), ([], alone)):
        scheduler = make(chunk=chunk, max_rows=10)
        one = request(1, 12)
        start(scheduler, *others, one)
        found = []
        while one.due:
            plan = scheduler.plan()
            assert all(other.id in counts(plan) for other in others)
            found.append(counts(plan)[1])
            assert (one in plan.complete) == (one.fed + found[-1] == 12)
            feed(plan)
            del one.tokens[12:]
        assert found == expected


def test_prompts_together_keep_within_the_chunk_while_somebody_decodes() -> None:
    scheduler = make(chunk=8, max_rows=100)
    start(scheduler, request(1, 2, fed=1), request(2, 50), request(3, 50), request(4, 3))
    for _ in range(10):
        plan = scheduler.plan()
        assert counts(plan)[1] == 1
        assert sum(count for part, count in plan.parts if part.due > 1) <= 8
        feed(plan)


def test_a_prompt_alone_has_a_bound_of_its_own() -> None:
    scheduler = Scheduler(StateTable(SPEC, 8), 3, 10, max_chunk=25)
    start(scheduler, request(1, 60))
    plan = scheduler.plan()
    assert counts(plan) == {1: 25} and plan.ahead == ((plan.parts[0][0].slot, list(range(125, 150))),)
    feed(plan)
    start(scheduler, request(2, 30))
    assert sum(counts(scheduler.plan()).values()) == 10
    scheduler.running.pop()
    start(scheduler, request(3, 2, fed=1))
    plan = scheduler.plan()
    assert counts(plan) == {1: 3, 3: 1} and len(plan.ahead[0][1]) == 3


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
    scheduler = make(max_rows=4)
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
        if chunk and any(part.due == 1 for part in scheduler.running):
            assert sum(count for part, count in plan.parts if part.due > 1) <= chunk
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


# Several clients


def run_out(scheduler: Scheduler, steps: int) -> list[int]:
    """Let requests of one token each have a slot for one step; who got one, in order."""
    order = []
    for step in range(steps):
        for one in scheduler.admit(float(step)):
            order.append(one.id)
        for one in list(scheduler.running):
            scheduler.remove(one)
    return order


def test_a_client_with_many_requests_does_not_keep_another_from_a_slot() -> None:
    scheduler = make(slots=4)
    for number in range(1, 101):
        scheduler.add(request(number, 3, client="many"))
    for number in range(101, 104):
        scheduler.add(request(number, 3, client="few"))
    admitted = [one.options.client for one in scheduler.admit(0.0)]
    assert sorted(admitted) == ["few", "few", "many", "many"]


def test_the_client_that_holds_fewer_slots_gets_the_next_one() -> None:
    scheduler = make(slots=3)
    start(scheduler, *(request(number, 3, client="a") for number in (1, 2, 3, 4)))
    late = request(9, 3, client="b")
    scheduler.add(late)
    scheduler.remove(scheduler.running[0])
    scheduler.admit(1.0)
    assert late in scheduler.running


def test_prefill_rows_are_shared_over_clients_however_many_prompts_each_has() -> None:
    scheduler = make(slots=8, chunk=10, max_rows=100)
    prompts = [request(number, 1000, client="a") for number in range(2, 7)]
    lone = request(7, 1000, client="b")
    start(scheduler, request(1, 2, fed=1, client="c"), *prompts, lone)
    for _ in range(40):
        feed(scheduler.plan())
    rows = sum(one.fed for one in prompts)
    assert abs(rows - lone.fed) <= 20
    assert max(one.fed for one in prompts) - min(one.fed for one in prompts) <= 20


def test_a_short_prompt_gets_through_beside_an_endless_one_of_another_client() -> None:
    scheduler = make(chunk=10, max_rows=100)
    start(scheduler, request(1, 2, fed=1, client="c"), request(2, 100_000, client="a"))
    for _ in range(50):
        feed(scheduler.plan())
    short = request(3, 15, client="b")
    start(scheduler, short)
    for _ in range(4):
        feed(scheduler.plan())
    assert short.fed >= 15


def test_a_client_that_comes_back_catches_up_on_nothing() -> None:
    scheduler = make(chunk=10, max_rows=100)
    decoder, busy = request(1, 2, fed=1, client="c"), request(2, 100_000, client="busy")
    start(scheduler, decoder, busy)
    for _ in range(100):
        feed(scheduler.plan())
    late = request(3, 100_000, client="late")
    start(scheduler, late)
    before = busy.fed
    for _ in range(40):
        feed(scheduler.plan())
    assert abs((busy.fed - before) - late.fed) <= 20  # level from now on, up to a chunk each


def test_priority_goes_first() -> None:
    scheduler = make(slots=1)
    for number, priority in ((1, -3), (2, 0), (3, 5), (4, 0), (5, 5)):
        scheduler.add(request(number, 1, priority=priority))
    assert run_out(scheduler, 5) == [3, 5, 2, 4, 1]


def test_a_low_priority_waits_but_not_for_ever() -> None:
    scheduler = make(slots=1)
    scheduler.add(request(1, 1, priority=-10))
    number, now_s = 2, 0.0
    while not any(one.id == 1 for one in scheduler.running):
        for one in list(scheduler.running):
            scheduler.remove(one)
        scheduler.add(request(number, 1, priority=10, client=f"client {number}", added_s=now_s))
        scheduler.admit(now_s)
        number, now_s = number + 1, now_s + 1.0
        assert now_s < 120, "starved"
    assert now_s > 90


def test_a_client_with_a_slot_waits_behind_newcomers_but_not_for_ever() -> None:
    """Those with fewer slots go first, so that clients that come anew all the time could keep it out."""
    scheduler = make(slots=2)
    holder = request(1, 1, client="a")
    start(scheduler, holder)
    second = request(2, 1, client="a")
    scheduler.add(second)
    number, now_s = 3, 0.0
    while second not in scheduler.running:
        for one in list(scheduler.running):
            if one is not holder:
                scheduler.remove(one)
        scheduler.add(request(number, 1, client=f"client {number}", added_s=now_s))
        scheduler.admit(now_s)
        number, now_s = number + 1, now_s + 0.5
        assert now_s < 20, "starved"


def test_figures_of_clients_that_are_gone_are_forgotten() -> None:
    scheduler = make(slots=2)
    for number in range(1, 5000):
        one = request(number, 1, client=f"client {number}")
        start(scheduler, one)
        feed(scheduler.plan())
        scheduler.remove(one)
    assert not scheduler.shares.slots
    assert len(vars(scheduler.shares)["_rows"]) == 0
    assert len(scheduler.waiting) == 0 and not list(scheduler.waiting)


def test_an_old_queue_of_one_client_does_not_hold_up_another_that_comes_later() -> None:
    scheduler = make(slots=4)
    for number in range(1, 500):
        scheduler.add(request(number, 1, client="many"))
    number, now_s, waited = 500, 0.0, []
    for step in range(200):
        now_s += 0.5
        if scheduler.running:
            scheduler.remove(scheduler.running[0])
        if step > 120 and step % 10 == 0:
            number += 1
            waited.append(request(number, 1, client="late", added_s=now_s))
            scheduler.add(waited[-1])
        scheduler.admit(now_s)
        assert all(one.admitted_s > 0 for one in waited), "each gets the next slot that is free"
    assert len(waited) > 5


def test_a_prompt_that_runs_for_long_does_not_hold_up_short_ones_of_others() -> None:
    scheduler = make(slots=8, chunk=10, max_rows=100)
    start(scheduler, request(1, 2, fed=1, client="c"), request(2, 100_000, client="a"))
    now_s = 1.0
    for _ in range(300):
        feed(scheduler.plan())
        now_s += 1.0
        scheduler.admit(now_s)
    shorts = [request(3 + index, 40, client="b", added_s=now_s) for index in range(3)]
    for one in shorts:
        scheduler.add(one)
    for _ in range(3 * 4 * 2 + 4):
        scheduler.admit(now_s)
        feed(scheduler.plan())
        now_s += 1.0
    assert all(one.fed >= 40 for one in shorts)


def test_rows_of_a_higher_priority_cost_its_client_less_but_leave_the_others_some() -> None:
    scheduler = make(slots=8, chunk=10, max_rows=100)
    high, low = request(2, 100_000, client="a", priority=10), request(3, 100_000, client="b", priority=-10)
    start(scheduler, request(1, 2, fed=1, client="c"), high, low)
    for _ in range(400):
        feed(scheduler.plan())
    assert low.fed >= 4000 / 40 and high.fed > 10 * low.fed


def test_a_low_priority_of_the_same_client_is_read_too_beside_high_ones() -> None:
    scheduler = make(slots=8, chunk=10, max_rows=100)
    high, low = request(2, 100_000, priority=10), request(3, 100_000, priority=-10)
    start(scheduler, request(1, 2, fed=1, client="c"), high, low)
    now_s = 0.0
    for _ in range(250):
        scheduler.admit(now_s)
        feed(scheduler.plan())
        now_s += 1.0
    assert 0 < low.fed < high.fed / 10


def test_a_prompt_stops_at_its_marks() -> None:
    scheduler = make(max_rows=100)
    one = request(1, 30)
    one.marks = [7, 20]
    start(scheduler, one)
    found = []
    while one.due:
        plan = scheduler.plan()
        found.append(counts(plan)[1])
        assert plan.complete == [one] and plan.batch().want_rows.tolist() == [found[-1] - 1]
        one.fed += found[-1]
        one.marks = [mark for mark in one.marks if mark > one.fed]
    assert found == [7, 13, 10]


def test_a_lone_prompt_tells_the_chunk_after_this_one() -> None:
    scheduler = make(max_rows=30)
    one = request(1, 70)
    start(scheduler, one)
    for expected in (one.tokens[30:60], one.tokens[60:70], None):
        plan = scheduler.plan()
        assert plan.ahead == (((one.slot, expected),) if expected else ())
        assert plan.batch().ahead == plan.ahead
        feed(plan)


def test_the_chunk_told_is_the_one_that_comes() -> None:
    scheduler = make(chunk=7, max_rows=30)
    one, decoding = request(1, 50), request(2, 20, fed=19)
    one.marks = [16, 40, 50]
    start(scheduler, one, decoding)
    told: list[tuple[int, list[int]]] = []
    for _ in range(20):
        plan = scheduler.plan()
        if told:
            slot, tokens = told[0]
            count = counts(plan)[1]
            assert slot == one.slot and tokens == one.tokens[one.fed : one.fed + count]
        told = list(plan.ahead)
        feed(plan)
        one.marks = [mark for mark in one.marks if mark > one.fed]
    assert one.fed >= 50 and not told


def test_of_several_prompts_nothing_is_told() -> None:
    scheduler = make(max_rows=30)
    start(scheduler, request(1, 70), request(2, 70))
    assert scheduler.plan().ahead == ()
