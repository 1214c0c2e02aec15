"""The CUDA path of RWKV-4 to RWKV-7 without a card: whole models, interpreted and emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.errors import ModelError
from kittiwake.families.cuda_model import check_weights
from kittiwake.families.rwkv7_cuda import Rwkv7Cuda
from tests.emulator import kernels
from tests.ops.without_card import run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_rwkv_cuda.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not kernels.IS_AVAILABLE, reason="g++ is not installed: it compiles kernels for the host")
def test_whole_models_in_the_interpreter_and_the_emulator() -> None:
    run_interpreted(INTERPRETED, "--timeout=0")


def test_rows_of_outputs_are_padded_as_products_load_them() -> None:
    """Ranks of a layer may be multiples of 8 where those of the widest layer are not."""
    model = object.__new__(Rwkv7Cuda)
    model._rooms, model.most_rows, model.element, model.place = {}, 32, torch.float16, torch.device("cpu")
    wide = model.outputs("projected", 5, 3 * 64 + 13)
    assert wide.shape == (5, 205) and wide.stride() == (208, 1)
    assert model.outputs("projected", 3, 3 * 64 + 13).data_ptr() == wide.data_ptr()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, torch.nan], "not finite"),
        ([torch.inf], "not finite"),
        ([-torch.inf, 0], "not finite"),
        ([-65505, 1], "65504"),
    ],
)
def test_weights_that_float16_cannot_hold_are_refused(values: list[float], said: str) -> None:
    with pytest.raises(ModelError, match=f"x holds values .*{said}"):
        check_weights("x", torch.tensor(values), torch.float16)
    check_weights("x", torch.tensor([-65504.0, 65504.0]), torch.float16)
    check_weights("x", torch.tensor([1e30]), torch.bfloat16)
