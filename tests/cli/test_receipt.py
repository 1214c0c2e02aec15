from __future__ import annotations

import json

from .conftest import Call, FakeLLM


def test_a_receipt_comes_only_when_asked_for(call: Call, llm: FakeLLM) -> None:
    assert "receipt" not in json.loads(call("run", "--prompt", "x", "--json").stdout)
    document = json.loads(call("run", "--prompt", "x", "--json", "--receipt").stdout)
    assert document["receipt"] == {"digest": llm.reply}
    assert call("run", "--prompt", "x", "--receipt").code == 2
