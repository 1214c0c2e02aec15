from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from tests.server.ask import HI, asking, error_of, in_loop
from tests.server.stub_engine import StubEngine

BYTES = {"content-type": "application/octet-stream"}


@in_loop
async def test_a_state_from_birth_to_end() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        made = await client.post("/v1/states", json={"name": "base", "prompt": "abc"})
        assert made.status_code == 201
        assert made.json() == {
            "id": "base",
            "object": "state",
            "created": 1_700_000_000,
            "tokens": 3,
            "bytes": 1024,
            "digest": None,
            "initial": None,
        }
        assert (await client.post("/v1/states/base/fork", json={"name": "two"})).status_code == 201
        listed = (await client.get("/v1/states")).json()
        assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["base", "two"]
        assert (await client.get("/v1/states/two")).json()["tokens"] == 3
        gone = await client.delete("/v1/states/base")
        assert gone.json() == {"id": "base", "object": "state.deleted", "deleted": True}
        for answer in (
            await client.get("/v1/states/base"),
            await client.delete("/v1/states/base"),
            await client.get("/v1/states/base/content"),
            await client.post("/v1/states/base/fork", json={"name": "x"}),
            await client.post("/v1/completions", json={"prompt": "a", "state": "base"}),
            await client.post("/v1/chat/completions", json={"messages": HI, "state": "base"}),
        ):
            assert answer.status_code == 404 and error_of(answer)["code"] == "state_not_found"
        taken = await client.post("/v1/states", json={"name": "two", "prompt": "a"})
        assert taken.status_code == 409 and error_of(taken)["type"] == "conflict_error"


@in_loop
async def test_a_request_from_a_state_and_into_one() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        await client.post("/v1/states", json={"name": "base", "prompt": "abc"})
        ask = {"prompt": "d", "state": "base", "keep_state": "after"}
        assert (await client.post("/v1/completions", json=ask)).status_code == 200
        assert (engine.submitted[-1].start_from, engine.submitted[-1].keep_as) == ("base", "after")
        assert (await client.get("/v1/states/after")).status_code == 200
        more = await client.post("/v1/states", json={"name": "more", "prompt": "x", "state": "after"})
        assert more.status_code == 201 and engine.submitted[-1].start_from == "after"
        refused = await client.post("/v1/completions", json={**ask, "n": 2})
        assert refused.status_code == 400 and error_of(refused)["param"] == "keep_state"


@in_loop
async def test_a_chat_goes_on_where_a_state_stopped() -> None:
    engine = StubEngine()

    def seen(number: int) -> str:
        return engine.tokenizer.decode(engine.submitted[number].prompt_ids)

    async with asking(engine) as client:
        first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        assert (await client.post("/v1/states", json={"name": "base", "messages": first})).status_code == 201
        next_turn = {"messages": [{"role": "user", "content": "And?"}], "state": "base"}
        assert (await client.post("/v1/chat/completions", json=next_turn)).status_code == 200
        told = {"name": "more", "messages": [{"role": "assistant", "content": "Yes."}], "state": "base"}
        assert (await client.post("/v1/states", json=told)).status_code == 201
        await client.put("/v1/states/tuned", content=b"weights", headers=BYTES)
        assert (await client.post("/v1/chat/completions", json={**next_turn, "state": "tuned"})).status_code == 200
    assert seen(0) == "System: Be kind.\n\nUser: Hi"
    assert seen(1) == "\n\nUser: And?\n\nAssistant:"
    assert seen(2) == "\n\nAssistant: Yes."
    assert seen(3) == "User: And?\n\nAssistant:"


@in_loop
async def test_uploads_and_downloads() -> None:
    engine = StubEngine()
    async with asking(engine, max_state_bytes=100) as client:
        made = await client.put("/v1/states/tuned?transpose=true", content=b"x" * 100, headers=BYTES)
        assert made.status_code == 201 and made.json()["tokens"] == 0 and made.json()["initial"] == "ef" * 32
        assert engine.imported["tuned"] == b"x" * 100
        got = await client.get("/v1/states/tuned/content")
        assert got.content == b"state tuned" and got.headers["content-type"] == "application/octet-stream"
        assert 'filename="tuned.state"' in got.headers["content-disposition"]
        for headers, content, status in (
            (BYTES, b"x" * 101, 413),
            (BYTES, b"", 400),
            ({"content-type": "multipart/form-data; boundary=x"}, b"x", 415),
            ({**BYTES, "content-encoding": "gzip"}, b"x", 415),
        ):
            answer = await client.put("/v1/states/other", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            error_of(answer)
        assert (await client.put("/v1/states/tuned", content=b"x", headers=BYTES)).status_code == 409
        damaged = await client.put("/v1/states/other", content=b"damaged", headers=BYTES)
        assert damaged.status_code == 422 and error_of(damaged)["message"] == "the upload is damaged"
        assert (await client.put("/v1/states/other?transpose=maybe", content=b"x", headers=BYTES)).status_code == 400
    assert not list(Path(tempfile.gettempdir()).glob("kittiwake-*load-*"))


@in_loop
async def test_a_download_is_whole_whatever_part_of_it_is_asked_for() -> None:
    async with asking(StubEngine()) as client:
        await client.post("/v1/states", json={"name": "base", "prompt": "abc"})
        for part in ("bytes=0-3", "bytes=nonsense", "items=1-2", "bytes=999999-", "bytes=0-1,3-4"):
            got = await client.get("/v1/states/base/content", headers={"range": part})
            assert (got.status_code, got.content, got.headers["accept-ranges"]) == (200, b"state base", "none")


@in_loop
async def test_files_in_between_that_find_no_room_are_told_with_507(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        await client.post("/v1/states", json={"name": "base", "prompt": "abc"})
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
        for answer in (
            await client.put("/v1/states/other", content=b"x", headers=BYTES),
            await client.get("/v1/states/base/content"),
        ):
            assert answer.status_code == 507 and "nowhere" not in error_of(answer)["message"]
    assert list(engine.states) == ["base"]


@in_loop
async def test_names_of_states() -> None:
    async with asking(StubEngine()) as client:
        for name in ("..", ".a", "a b", "a%2Fb", "a" * 65, "%0a", "a%0a", "\u00e9"):
            for method in ("GET", "DELETE"):
                answer = await client.request(method, f"/v1/states/{name}")
                assert answer.status_code in (400, 404, 405), (name, answer.text)
                error_of(answer)
        for name in ("a", "A-1_b.c", "a" * 64):
            assert (await client.post("/v1/states", json={"name": name, "prompt": "a"})).status_code == 201


@in_loop
async def test_reading_a_long_prompt_ends_when_the_client_goes() -> None:
    engine = StubEngine()
    ended = []

    async def forever(name: str, submission: object) -> object:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(name)
        return None

    engine.make_state = forever  # type: ignore[method-assign, assignment]
    app = create_app(engine, ServerConfig())
    sent = [{"type": "http.request", "body": b'{"name": "a", "prompt": "b"}', "more_body": False}]

    async def receive() -> dict[str, object]:
        if sent:
            return sent.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/states", "raw_path": b"/v1/states", "query_string": b""}
    await app({**scope, "headers": headers, "client": ("127.0.0.1", 1), "root_path": ""}, receive, send)  # type: ignore[arg-type]
    assert ended == ["a"]


@in_loop
async def test_reading_a_prompt_has_a_deadline_too() -> None:
    engine = StubEngine()

    async def forever(*_: object) -> object:
        await asyncio.sleep(30)
        return None

    engine.make_state = engine.score = forever  # type: ignore[method-assign, assignment]
    async with asking(engine, request_timeout_s=0.05) as client:
        made = await client.post("/v1/states", json={"name": "a", "prompt": "b"})
        scored = await client.post(
            "/v1/completions", json={"prompt": "b", "echo": True, "logprobs": 0, "max_tokens": 0}
        )
    for answer in (made, scored):
        assert answer.status_code == 504 and error_of(answer)["code"] == "deadline"
