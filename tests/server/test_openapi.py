"""What our own OpenAPI document says is so: whatever fits it, and whatever does not, gets an answer that is in it."""

from __future__ import annotations

import json
import warnings

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from kittiwake.server.openapi import ERROR_SCHEMA, docs_page
from tests.server.ask import KEY, asking, in_loop
from tests.server.stub_engine import StubEngine

load_all_checks()
# Rules between fields (top_logprobs needs logprobs) are not in the document, so some of what fits it is refused.
LEFT_OUT = {"positive_data_acceptance"}
ENGINE = StubEngine()
APP = create_app(ENGINE, ServerConfig(api_keys=(KEY,), max_answer_tokens=32, max_prompts=8))
AUTH = {"Authorization": f"Bearer {KEY}"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, headers=AUTH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that make the requests
@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_in_the_document(case: schemathesis.Case) -> None:
    case.call_and_validate(headers=AUTH, excluded_checks=[CHECKS.get_one(name) for name in LEFT_OUT])
    ENGINE.states.clear()


@in_loop
async def test_the_document_names_everything() -> None:
    async with asking(StubEngine()) as client:
        document = (await client.get("/openapi.json")).json()
        page = await client.get("/docs")
    operations = {(method, path): one for path, methods in document["paths"].items() for method, one in methods.items()}
    assert {path for _, path in operations} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/v1/states",
        "/v1/states/{name}",
        "/v1/states/{name}/content",
        "/v1/states/{name}/fork",
        "/health",
        "/ready",
        "/metrics",
    }
    body = operations["post", "/v1/chat/completions"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "stream", "seed", "reasoning_effort"} <= set(body["properties"])
    assert body["additionalProperties"] is False
    assert "$ref" not in json.dumps(document)
    refusal = operations["post", "/v1/completions"]["responses"]["429"]["content"]["application/json"]["schema"]
    assert refusal == ERROR_SCHEMA
    assert "security" not in document
    assert "<script" not in page.text and "default-src 'none'" in page.headers["content-security-policy"]
    for _, path in operations:
        assert path in page.text


@in_loop
async def test_the_document_says_what_needs_a_key() -> None:
    async with asking(StubEngine(), api_keys=(KEY,)) as client:
        document = (await client.get("/openapi.json", headers=AUTH)).json()
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []


def test_the_page_escapes_what_it_shows() -> None:
    page = docs_page({"info": {"title": "<b>"}, "paths": {"/<i>": {"get": {"summary": "<u>"}}}})
    assert "<b>" not in page and "<i>" not in page and "<u>" not in page
