from __future__ import annotations

import os
import warnings

import pytest
import torch

from kittiwake.bench.peers.flags import OwnFlags, read_flags, write_flags


def _set_everything() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, True)
    matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch._C._jit_set_autocast_mode(False)
    os.environ["RWKV_MADE_UP"] = "1"
    os.environ.pop("RWKV_OF_OURS", None)


def _break_down(peer: OwnFlags) -> None:
    with peer():
        _set_everything()
        raise ZeroDivisionError


def _told() -> dict[str, object]:
    """The settings; the one that reading sets is put back."""
    flags = read_flags()
    torch._C._jit_set_autocast_mode(flags["autocast_mode"])
    return flags


def test_what_a_peer_sets_stays_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_OF_OURS", "yes")
    before, peer = _told(), OwnFlags({"RWKV_V7_ON": "1"})
    with peer():
        assert os.environ["RWKV_V7_ON"] == "1"
        _set_everything()
        theirs = _told()
    assert _told() == before
    differing = [name for name in theirs if theirs[name] != before[name]]
    assert {"fp16_reductions", "bf16_reductions", "matmul_tf32", "dtype", "threads", "environment"} <= set(differing)
    with peer():
        assert _told() == theirs
    assert _told() == before


def test_settings_come_back_after_an_error_and_the_failed_change_is_forgotten() -> None:
    before, peer = _told(), OwnFlags()
    with peer():
        pass
    with pytest.raises(ZeroDivisionError):
        _break_down(peer)
    assert _told() == before
    with peer():
        assert _told() == before


def test_two_peers_do_not_see_each_other() -> None:
    first, second = OwnFlags(), OwnFlags()
    with first():
        torch.set_default_dtype(torch.float64)
    with second():
        assert torch.get_default_dtype() == torch.float32
    with first():
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_a_peers_warnings_are_not_ours() -> None:
    with OwnFlags()():
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)


def test_every_setting_can_be_written_back() -> None:
    before = _told()
    write_flags(before)
    assert _told() == before
