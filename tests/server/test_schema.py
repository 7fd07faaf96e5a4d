"""The app against its own OpenAPI: whatever a client sends, the answer is documented and never a 500."""

from __future__ import annotations

from collections import Counter

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from octavo.server.app import create_app
from tests.helpers.serving import running, tiny_engine

QUICK = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


def verify(case: schemathesis.Case, seen: Counter[tuple[str, int]]) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"
    response = case.call()
    assert response.status_code < 500
    seen[case.operation.path, response.status_code] += 1
    wanted = [checks.status_code_conformance, checks.content_type_conformance, checks.negative_data_rejection]
    if not (isinstance(case.body, dict) and case.body.get("stream")):
        wanted.append(checks.response_schema_conformance)
    case.validate_response(response, checks=wanted)


def check(cases: SearchStrategy[schemathesis.Case], seen: Counter[tuple[str, int]]) -> None:
    @QUICK
    @given(case=cases)
    def run(case: schemathesis.Case) -> None:
        verify(case, seen)

    run()


def test_streams_are_documented() -> None:
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }
    with running(tiny_engine()) as server:
        schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(server.service))
        for path, body in bodies.items():
            case = schema[path]["POST"].Case(body=body | {"stream": True}, media_type="application/json")
            response = case.call()
            assert response.headers["content-type"][0].startswith("text/event-stream"), response.headers
            case.validate_response(response, checks=[checks.status_code_conformance, checks.content_type_conformance])


def test_every_answer_is_documented() -> None:
    seen: Counter[tuple[str, int]] = Counter()
    with running(tiny_engine()) as server:
        schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(server.service))
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 10
        for operation in operations:
            for mode in GenerationMode:
                if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                    continue
                check(operation.as_strategy(generation_mode=mode), seen)
    assert sum(count for (_, status), count in seen.items() if status == 200) >= 20, seen
