"""The whole n-gram layer, table on disk, against transformers' module with random weights in every parameter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kittiwake.checkpoints.reader import FilePlace
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.engine.batch import Batch
from kittiwake.families.qwen4exp.ngram import NgramHash, next_history
from kittiwake.families.qwen4exp.ngram_reader import NgramReader
from kittiwake.ops.ngram_mix.cpu import ngram_mix
from tests.oracles import transformers_ngram

VOCAB, EOS, STREAMS, WIDTH = 60, 5, 3, 32
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "hc_count": STREAMS, "num_hidden_layers": 4, "ple_layer_ids": [1, 3],
    "ple_embed_dim": 48, "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 50, "eos_token_id": EOS,
    "make_ngram_vocab_size_divisible_by": 128, "seed": 77, "ple_conv_kernel_size": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not transformers_ngram.is_available(), reason=transformers_ngram.SKIP_REASON)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_layer_agrees_with_transformers(tmp_path: Path, rank: int) -> None:
    rng = np.random.default_rng(rank)
    ids = rng.integers(0, VOCAB, 40)
    ids[[0, 7, 8, 20]] = EOS
    theirs = transformers_ngram.run(CONFIG, rank, ids.tolist())

    hashing = NgramHash.derive(VOCAB, 3, 4, 50, rank, 77, EOS)
    table = theirs["ple_embedding.ngram_embedding.weight"]
    assert len(table) == hashing.total_rows(128)
    assert np.array_equal(theirs["ple_embedding.layer_multipliers"], hashing.multipliers)
    path = tmp_path / "table"
    path.write_bytes(table.tobytes())
    reader = NgramReader(RowTable([FilePlace(path, 0, table.nbytes, "F32")], table.shape[1]), hashing)

    columns = STREAMS * WIDTH
    norms = [1 + theirs[f"norm_{name}.weight"] for name in ("key", "query", "conv")]
    taps = np.ascontiguousarray(theirs["conv1d.weight"][:, 0].T)
    state = np.zeros((1, 3 * 3, columns), np.float32)
    history = np.full((1, 2), -1, dtype=np.int64)
    for first, last in ((0, 1), (1, 20), (20, 40)):
        part, starts = ids[first:last], np.array([0, last - first])
        assert np.array_equal(hashing.rows(part, starts, history), theirs["rows"][first:last])
        batch = Batch(part, starts, np.array([0]), np.zeros(0, np.int64))
        rows = reader.take(reader.begin(batch, history))[: last - first]
        history = next_history(part, starts, history)
        kv = np.concatenate([rows @ theirs[f"{name}_proj.weight"].T for name in ("key", "value")], axis=1)
        x = theirs["hidden"][first:last].copy()
        gated, normed = np.empty_like(x), np.empty_like(x)
        slots = np.array([0])
        ngram_mix(x, kv, STREAMS, *norms, taps, 3, np.float32(1e-6), starts, slots, state, gated, normed)
        expected = theirs["hidden"][first:last] + theirs["out"][first:last]
        np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    reader.close()
