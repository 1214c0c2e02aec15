from __future__ import annotations

import pytest

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from kittiwake.server.gate import is_loopback
from tests.server.ask import HI, KEY, asking, error_of, in_loop
from tests.server.stub_engine import StubEngine

PATHS = [
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/states"),
    ("POST", "/v1/states"),
    ("PUT", "/v1/states/a"),
    ("GET", "/v1/states/a/content"),
    ("POST", "/v1/states/a/fork"),
    ("DELETE", "/v1/states/a"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
]


@in_loop
async def test_nothing_but_health_is_open_where_a_key_is_set() -> None:
    async with asking(StubEngine(), api_keys=(KEY, "another-key")) as client:
        for method, path in PATHS:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": f"Basic {KEY}"},
                {"authorization": KEY},
            ):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, headers)
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert KEY not in answer.text
        assert (await client.get("/health")).status_code == 200
        for key in (KEY, "another-key"):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200


@in_loop
async def test_requests_say_whose_they_are() -> None:
    engine = StubEngine()
    async with asking(engine, api_keys=(KEY, "another-key")) as client:
        for key in ("another-key", KEY):
            headers = {"authorization": f"bearer {key}"}
            await client.post("/v1/chat/completions", json={"messages": HI}, headers=headers)
    assert [one.client for one in engine.submitted] == ["1@127.0.0.1", "0@127.0.0.1"]


@in_loop
async def test_a_page_with_its_own_name_for_this_machine_is_turned_away() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            answer = await client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 403 and error_of(answer)["code"] == "wrong_host"
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "a.localhost"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
    async with asking(engine, api_keys=(KEY,)) as client:
        headers = {"host": "models.example", "authorization": f"Bearer {KEY}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@in_loop
async def test_states_need_a_key_where_others_can_reach_the_server() -> None:
    async with asking(StubEngine(), host="0.0.0.0", allow_anonymous=True) as client:
        assert (await client.get("/v1/models", headers={"host": "models.example"})).status_code == 200
        for method, path in PATHS:
            if path.startswith("/v1/states"):
                assert (await client.request(method, path)).status_code == 403, (method, path)
        for name in ("state", "keep_state"):
            for path, ask in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HI})):
                answer = await client.post(f"/v1/{path}", json={**ask, name: "theirs"})
                assert answer.status_code == 403 and "states need an API key" in error_of(answer)["message"]
                assert (await client.post(f"/v1/{path}", json={**ask, name: None})).status_code == 200


@in_loop
async def test_ids_of_requests() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        made = (await client.get("/health")).headers["x-request-id"]
        assert made.startswith("req_") and made != (await client.get("/health")).headers["x-request-id"]
        own = await client.post("/v1/chat/completions", json={"messages": HI}, headers={"x-request-id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1" == engine.submitted[-1].request_id
        for odd in ("a b", "x" * 129, "\u00e9".encode(), "a\tb"):
            assert (
                (await client.get("/health", headers={"x-request-id": odd})).headers["x-request-id"].startswith("req_")
            )  # type: ignore[dict-item]
        assert "x-request-id" in (await client.get("/nothing")).headers


@in_loop
async def test_cors_is_off_unless_asked_for() -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with asking(StubEngine()) as client:
        answer = await client.options("/v1/chat/completions", headers=ask)
        assert answer.status_code == 405
        answer = await client.get("/v1/models", headers=ask)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with asking(StubEngine(), cors_origins=("https://page.example",), api_keys=(KEY,)) as client:
        answer = await client.options("/v1/chat/completions", headers=ask)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        refused = await client.get("/v1/models", headers=ask)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.options("/v1/models", headers={**ask, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@in_loop
async def test_a_fault_of_ours_is_told_without_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    engine = StubEngine()

    async def broken() -> str:
        raise RuntimeError("a secret of the inside")

    engine.metrics_text = broken  # type: ignore[method-assign]
    async with asking(engine) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 500 and error_of(answer)["type"] == "server_error"
    assert "secret" not in answer.text and "a secret of the inside" in caplog.text


@in_loop
async def test_what_is_not_there() -> None:
    async with asking(StubEngine()) as client:
        answer = await client.get("/v1/embeddings")
        assert answer.status_code == 404 and "/v1/embeddings" in error_of(answer)["message"]
        answer = await client.get("/v1/chat/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        error_of(answer)
        answer = await client.post("/v1/chat/completions/", json={"messages": HI})
        assert answer.status_code == 404 and "location" not in answer.headers
        error_of(answer)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@in_loop
async def test_nothing_in_the_address_is_taken_and_ignored() -> None:
    async with asking(StubEngine()) as client:
        for path in ("/v1/models?limit=1", "/v1/states?a", "/v1/states/a?transpose=true"):
            answer = await client.get(path)
            assert answer.status_code == 400 and error_of(answer)["code"] == "unsupported_parameter"
        assert (await client.get("/health?t=1")).status_code == 200


@in_loop
async def test_a_wrong_method_is_told_all_that_there_are() -> None:
    async with asking(StubEngine()) as client:
        for path, methods in (
            ("/v1/states/a", "DELETE, GET, PUT"),
            ("/v1/states", "GET, POST"),
            ("/metrics", "GET, HEAD"),
            ("/v1/chat/completions", "POST"),
        ):
            answer = await client.request("PATCH", path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods)
        for path in ("/health", "/ready"):
            assert (await client.head(path)).status_code == 200
        head = await client.head("/metrics")
        assert head.status_code == 200 and head.content == b"" and "version=0.0.4" in head.headers["content-type"]


@in_loop
async def test_health_and_readiness() -> None:
    engine = StubEngine(is_ready=False)
    async with asking(engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        loading = await client.get("/ready")
        assert loading.status_code == 503 and loading.headers["retry-after"] == "1"
        error_of(loading)
        engine.is_ready = True
        assert (await client.get("/ready")).json() == {"status": "ready", "model": "stub"}
        engine.is_alive = False
        gone = await client.get("/health")
        assert gone.status_code == 503 and error_of(gone)["code"] == "engine_gone"


@in_loop
async def test_a_probe_that_speaks_http_1_0_needs_no_host() -> None:
    sent = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.0", "method": "GET", "path": "/health", "raw_path": b"/health"}
    scope |= {"query_string": b"", "headers": [], "client": ("127.0.0.1", 1), "root_path": ""}
    await create_app(StubEngine(), ServerConfig())(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 200
