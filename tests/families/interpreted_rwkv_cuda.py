"""RWKV-4 to RWKV-7 as a card runs them: Triton interpreted, CUDA C++ emulated; test_rwkv_cuda.py runs this in a process
of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kittiwake.bench.rwkv4_shapes import Rwkv4Shape, random_rwkv4
from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape, random_rwkv5, random_rwkv6
from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateTable
from kittiwake.families import (
    cuda_model,
    rwkv4,
    rwkv4_cuda,
    rwkv5,
    rwkv5_cuda,
    rwkv6,
    rwkv6_cuda,
    rwkv7,
    rwkv7_cuda,
    rwkv56_cuda,
)
from kittiwake.families.contract import Model, ModelConfig
from kittiwake.families.cuda_model import CudaModel
from kittiwake.families.registry import recognise
from kittiwake.layers.cuda_linear import Choice, CudaGroup
from kittiwake.load import TensorDict
from kittiwake.ops import head_kernels
from kittiwake.ops.dynamic_mix import cuda as dynamic_mix
from kittiwake.ops.head_kernels import TILINGS
from kittiwake.ops.matmul import cuda as narrow
from kittiwake.ops.wkv4 import cuda as wkv4
from kittiwake.ops.wkv6 import cuda as wkv6
from kittiwake.ops.wkv7 import cuda as wkv7
from tests.emulator.kernels import EmulatedKernel
from tests.families.agreement import Run, assert_agrees
from tests.families.recorded_graphs import recorded_graphs
from tests.ops.interpreted_kernels import dot_in_order, make_interpretable
from tests.oracles.measure import relative_error

CPU = torch.device("cpu")
VOCAB = 24
Tensors = dict[str, torch.Tensor]
CASES: dict[str, tuple[Callable[..., Tensors], Any, Any, Any]] = {
    "4": (random_rwkv4, Rwkv4Shape(2, 20, vocab=VOCAB, ffn=30, attention=36), rwkv4_cuda.Rwkv4Cuda, rwkv4),
    "5.0": (random_rwkv5, Rwkv5Shape(2, 20, "5.0", 10, vocab=VOCAB), rwkv5_cuda.Rwkv5Cuda, rwkv5),
    "5.2": (random_rwkv5, Rwkv5Shape(2, 32, "5.2", 32, vocab=VOCAB), rwkv5_cuda.Rwkv5Cuda, rwkv5),
    "6": (random_rwkv6, Rwkv6Shape(2, 20, 3, 5, 10, vocab=VOCAB), rwkv6_cuda.Rwkv6Cuda, rwkv6),
    "6, heads of 32": (random_rwkv6, Rwkv6Shape(2, 64, 8, 16, 32, vocab=VOCAB), rwkv6_cuda.Rwkv6Cuda, rwkv6),
    "7": (random_rwkv7, replace(small(2, 64, 32), vocab=VOCAB), rwkv7_cuda.Rwkv7Cuda, rwkv7),
    "7, ranks of 8": (
        random_rwkv7,
        replace(small(2, 64, 32, rank_w=8, rank_a=24, rank_v=8, rank_g=40), vocab=VOCAB),
        rwkv7_cuda.Rwkv7Cuda,
        rwkv7,
    ),
}
INSIDE = ("6, heads of 32", "7, ranks of 8")
"""Whose steps make low-rank products themselves in 16 bits."""
IDS = [3, 9, 7, 11, 20, 7, 7, 19, 2, 5]
every_case = pytest.mark.parametrize("name", [name for name in CASES if name != INSIDE[1]])


@pytest.fixture(scope="module", autouse=True)
def _interpretable() -> Any:
    """CUDA's library of functions has no interpreter: a stand-in of the same meaning, not of the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        make_interpretable(patch)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)
        for module in (wkv4, head_kernels, dynamic_mix):
            patch.setattr(module, "CudaKernel", EmulatedKernel)
        patch.setattr(wkv7, "shared_memory_limit", lambda: 99 * 1024)
        patch.setattr(rwkv7_cuda, "HIDDEN_ROWS", 4)  # of the ten and more rows here
        tilings = TILINGS[1:2]
        patch.setattr(rwkv4_cuda, "kernels", cache(wkv4.Wkv4))
        patch.setattr(rwkv56_cuda, "kernels", cache(lambda *given: wkv6.Wkv6(*given, tilings)))
        patch.setattr(rwkv7_cuda, "kernels", cache(lambda *given: wkv7.Wkv7(*given, tilings)))
        yield


@cache
def read(name: str) -> tuple[Any, ModelConfig, TensorDict]:
    """The family of a case, its config and its tensors."""
    make, shape, _, _ = CASES[name]
    source = TensorDict(make(shape, 3))
    family = recognise(source)
    return family, family.read_config(source), source


@cache
def on_cpu(name: str) -> Model:
    family, config, source = read(name)
    model: Model = family.build(config, family.canonical(source, config), device="cpu", dtype="fp32", threads=1)
    return model


@cache
def on_card(name: str, dtype: str = "fp32") -> CudaModel:
    """The model of a card, its tensors in host memory."""
    _, _, made, module = CASES[name]
    family, config, source = read(name)
    model: CudaModel = made(config, module._sizes(config), family.state_spec(config), dtype, place=CPU)
    for tensor_name, tensor in family.canonical(source, config):
        model.load(tensor_name, tensor)
    return model


def table_of(model: Model, slots: int = 2) -> StateTable:
    return (
        CudaStateTable(model.state_spec, slots, CPU)
        if isinstance(model, CudaModel)
        else StateTable(model.state_spec, slots)
    )


def run(model: Model, ids: Sequence[int], pieces: Sequence[int] = ()) -> Run:
    """Logits at every position, and the state after the last."""
    states, rows, at = table_of(model), [], 0
    slot = states.allocate()
    for length in pieces or [len(ids)]:
        part = list(ids[at : at + length])
        rows.append(model.forward(Batch.pack([(slot, part)], [list(range(len(part)))]), states))
        at += length
    return np.concatenate(rows), dict(states.save(slot).parts)


@cache
def whole(name: str, dtype: str = "fp32") -> Run:
    return run(on_card(name, dtype), IDS)


@every_case
def test_logits_and_states_are_those_of_the_cpu(name: str) -> None:
    assert_agrees(whole(name), *run(on_cpu(name), IDS), tolerance=1e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_16_bits_round_and_keep_the_law(name: str) -> None:
    """As far as can be told here: emulated and interpreted sums round in two ways."""
    assert relative_error(whole(name, "fp16")[0], whole(name)[0]) < 0.03
    stepwise = run(on_card(name, "fp16"), IDS, [8, 1, 1])
    assert relative_error(stepwise[0], whole(name, "fp16")[0]) < 2e-3
    for part, array in whole(name, "fp16")[1].items():
        assert relative_error(stepwise[1][part], array) < 2e-3, part


@pytest.mark.parametrize("name", INSIDE)
def test_steps_make_low_rank_products_themselves_where_that_keeps_the_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = on_card(name, "fp16")

    def keeps_them() -> list[bool]:
        if name == INSIDE[1]:
            return [model._has_bits_of_launches_apart(index) for index in (0, -1)]
        return [model._has_low_bits_of_launches_apart()]

    assert not any(keeps_them())  # the interpreter adds in another order than the emulated instructions
    proof = "_keeps_bits" if name == INSIDE[1] else "_keeps_low_bits"
    for kept in {"_keeps_bits", proof}:
        monkeypatch.setattr(model, kept, True)
    monkeypatch.setattr(model, "_is_on_card", True)
    monkeypatch.setattr(cuda_model, "pick_products", lambda *_, **__: None)
    model.warm_up()
    assert not getattr(model, proof)
    monkeypatch.setattr(narrow, "CudaKernel", EmulatedKernel)
    narrow._product.cache_clear()
    monkeypatch.setattr(CudaGroup, "in_order", lambda group, rows: Choice("narrow", narrow.Narrow()))
    assert all(keeps_them())
    narrow._product.cache_clear()


@pytest.mark.parametrize("name", ["4", "6"])
def test_hidden_is_that_of_the_cpu(name: str) -> None:
    found = {}
    for model in (on_cpu(name), on_card(name)):
        states = table_of(model)
        hidden = {layer: np.full((4, model.config.width), np.nan, np.float32) for layer in range(3)}
        model.forward(Batch.pack([(states.allocate(), IDS[:4])]), states, hidden=hidden)
        found[model.device] = hidden
    for layer, rows in found["cpu"].items():
        assert relative_error(found["cuda"][layer], rows) < 1e-5, layer


@pytest.fixture
def has_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with recorded_graphs():
        for name in GRAPHED:
            monkeypatch.setattr(on_card(name), "_is_on_card", True)
        yield


GRAPHED = ("4", "5.0", "6, heads of 32", "7")


@pytest.mark.usefixtures("has_graphs")
@pytest.mark.parametrize("name", GRAPHED)
def test_replayed_steps_and_prompts_have_the_bits_of_launches(name: str) -> None:
    """One capture serves sequences in other slots and later steps; one of a prompt, another number of rows."""
    model, states = on_card(name), table_of(on_card(name), slots=3)
    assert isinstance(states, CudaStateTable)
    others, mine = [states.allocate() for _ in range(2)], states.allocate()
    for first, last in ((0, 3), (3, 7)):
        logits = model.forward(Batch.pack([(mine, IDS[first:last])]), states)
        assert logits[0].tobytes() == whole(name)[0][last - 1].tobytes()
    for at, slots in ((7, [others[0], mine]), (8, [mine, others[1]])):
        logits = model.forward(Batch.pack([(slot, [IDS[at]]) for slot in slots]), states)
        assert logits[slots.index(mine)].tobytes() == whole(name)[0][at].tobytes()
    drawn, slots_there = model.forward_to_draw(Batch.pack([(mine, IDS[9:])]), states)
    assert drawn[0].numpy().tobytes() == whole(name)[0][9].tobytes()
    assert slots_there is not None and slots_there.tolist() == [mine] and int(states.positions[mine]) == 10
    assert {shape.rows for shape in states.graphs} == {16, 2, 1}
    parts = states.save(mine).parts
    assert all(parts[part].tobytes() == array.tobytes() for part, array in whole(name)[1].items())
