"""What the service says of itself: whether it lives, whether it is ready, and what callers may rely on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi.openapi.models import OpenAPI

from ipn_gateway.clock import Clock
from ipn_gateway.events import CATALOGUE
from ipn_gateway.web import problems
from ipn_gateway.web.app import create_app
from tests.web.conftest import problem

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ipn_gateway.runtime import Runtime


async def readiness(rt: Runtime) -> tuple[int, dict[str, Any]]:
    app = create_app(rt)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway.test") as client:
        answer = await client.get("/readyz")
        await app.state.slots.drained()
    return answer.status_code, answer.json()


async def test_a_process_that_can_work_is_ready(rt: Runtime, http) -> None:
    """Database, migrations, partitions and clock were looked at, and are fine."""
    status, found = await readiness(rt)

    assert (status, found["status"]) == (200, "ready")
    assert {name: check["ok"] for name, check in found["checks"].items()} == dict.fromkeys(
        ("database", "migrations", "partitions", "clock"), True
    )
    assert (await http.head("/readyz")).status_code == (await http.head("/healthz")).status_code == 200


async def test_without_its_database_it_lives_but_is_not_ready(rt: Runtime, http) -> None:
    """A restart would not help, so only `/readyz` says so, with reasons and without a 500."""
    await rt.db.close()

    status, found = await readiness(rt)

    assert (status, found["status"]) == (503, "unready")
    assert not any(check["ok"] for check in found["checks"].values())
    assert (await http.get("/healthz")).json() == {"status": "alive"}


async def test_a_host_clock_a_minute_off_is_not_ready(rt: Runtime) -> None:
    """Ids carry host time, and partitions are chosen by ids."""
    for off in (timedelta(seconds=70), -timedelta(seconds=70)):
        status, found = await readiness(replace(rt, clock=Clock(off)))

        assert status == 503
        assert [name for name, check in found["checks"].items() if not check["ok"]] == ["clock"]
    assert (await readiness(replace(rt, clock=Clock(timedelta(seconds=50)))))[0] == 200


async def test_pending_migrations_are_not_ready_but_a_newer_database_is(rt: Runtime) -> None:
    """An upgrade rolls over one process after the other: the old ones go on."""
    async with rt.db.transaction("test") as tx:
        await tx.execute("UPDATE alembic_version SET version_num = '9999'")
    assert (await readiness(rt))[0] == 200

    async with rt.db.transaction("test") as tx:
        await tx.execute("DELETE FROM alembic_version")
    status, found = await readiness(rt)

    assert status == 503
    assert "ipn-gateway migrate" in found["checks"]["migrations"]["reason"]


async def test_partitions_that_end_soon_are_not_ready(rt: Runtime, clock) -> None:
    """A week before intake would have nowhere to write."""
    clock.advance(days=130)

    status, found = await readiness(rt)

    assert status == 503
    assert [name for name, check in found["checks"].items() if not check["ok"]] == ["partitions"]


async def test_the_contract_is_published_without_a_key(http, rt: Runtime) -> None:
    """Exactly the promised members, and the numbers that the code runs on."""
    published = (await http.get("/v1/contract")).json()

    assert set(published) == {"version", "inbound", "outbound", "events", "idempotency", "rate_limit", "retention"}
    outbound = published["outbound"]
    assert {"schedule_seconds", "jitter", "timeout_seconds", "connect_timeout_seconds", "success", "signature", "headers"} <= set(outbound)
    assert outbound["schedule_seconds"] == list(rt.settings.retry_schedule) == [0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400]
    assert (outbound["jitter"], outbound["timeout_seconds"], outbound["connect_timeout_seconds"]) == (0.1, 15, 5)
    assert outbound["headers"] == ["webhook-id", "webhook-timestamp", "webhook-signature"]
    assert [event["type"] for event in published["events"]] == list(CATALOGUE)
    assert all(event["schema"]["properties"].keys() == {"id", "type", "timestamp", "data"} for event in published["events"])
    assert len(published["idempotency"]["operations"]) >= 12
    assert published["retention"]["notification_deliveries_days"] == 400


def test_the_openapi_document_is_valid(app: FastAPI) -> None:
    """It has the form of OpenAPI 3.1, every reference leads somewhere, and each operation has a name of its own."""
    document = app.openapi()

    OpenAPI.model_validate(document)
    text = json.dumps(document)
    for reference in set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text)):
        assert reference in document["components"]["schemas"], reference
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert not re.search(r"HTTPValidationError", text)
    assert set(document["webhooks"]) == set(CATALOGUE)


def test_a_webhook_is_described_as_it_is_sent(app: FastAPI) -> None:
    """Its three headers, which type it is, when, and what each answer to it leads to; code that is made of it has readable names."""
    document = app.openapi()

    for name, webhook in document["webhooks"].items():
        sent, answers = webhook["post"], webhook["post"]["responses"]
        shape = document["components"]["schemas"][sent["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        assert sent["operationId"] == f"send_{name.replace('.', '_')}"
        assert [(part["name"], part["in"], part["required"]) for part in sent["parameters"]] == [
            (header, "header", True) for header in ("webhook-id", "webhook-timestamp", "webhook-signature")
        ]
        assert shape["properties"]["type"]["const"] == name
        assert shape["properties"]["timestamp"]["format"] == "date-time"
        assert set(answers) == {"2XX", "410", "429", "503", "default"}
        assert [code for code, answer in answers.items() if "Retry-After" in answer.get("headers", {})] == ["429", "503", "default"]


def test_a_secret_that_is_left_out_of_a_repeat_is_optional(app: FastAPI) -> None:
    """Of every operation whose repeat leaves something out: a client that was made of the document reads both answers."""
    document = app.openapi()
    left_out = 0

    for path in document["paths"].values():
        for call in path.values():
            for member in call.get("x-idempotency", {}).get("recovery", {}).get("repeat", {}).get("left_out", ()):
                (answer,) = (response for status, response in call["responses"].items() if status.startswith("2"))
                shape = document["components"]["schemas"][answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
                left_out += 1
                assert member not in shape["required"]
                assert "shown once" in shape["properties"][member]["description"]
                assert "default" not in shape["properties"][member]
    assert left_out == 2


def test_a_change_has_no_defaults(app: FastAPI) -> None:
    """What is left out of a PATCH stays: no member is required, or has a value that it would get."""
    changes = [call["patch"] for call in app.openapi()["paths"].values() if "patch" in call]

    assert len(changes) == 2
    for call in changes:
        shape = call["requestBody"]["content"]["application/json"]["schema"]
        assert "required" not in shape
        assert not any("default" in member for member in shape["properties"].values())


def test_every_number_that_is_taken_has_its_limits_in_words_of_json_schema(app: FastAPI) -> None:
    """And none in those of Python, which nobody reads there."""
    text = json.dumps([call.get("requestBody") for path in app.openapi()["paths"].values() for call in path.values()])

    assert not re.search(r'"(ge|gt|le|lt|max_digits|decimal_places)":', text)


def test_every_operation_under_v1_asks_for_the_key_and_describes_its_errors(app: FastAPI) -> None:
    """Except the contract, which is open; those with a body describe it, those with a path the 404."""
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            if not path.startswith("/v1/") or path == "/v1/contract":
                continue
            where = f"{method} {path}"
            assert operation["security"] == [{"ApiKey": []}], where
            assert {"400", "401", "403", "503"} <= set(operation["responses"]), where
            assert ("404" in operation["responses"]) == ("{" in path), where
            assert ("requestBody" in operation) == (method in {"post", "patch"}), where
            assert all("application/problem+json" in answer["content"] for code, answer in operation["responses"].items() if code[0] == "4")


async def test_the_documentation_page_needs_nothing_from_outside(http) -> None:
    """No script, no other host, and every path is on it."""
    page = await http.get("/docs")
    document = (await http.get("/openapi.json")).json()

    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", page.text)
    assert set(re.findall(r'href="([^"#]*)', page.text)) - {""} == {"openapi.json", "v1/contract", "problems"}
    assert all(path in page.text for path in document["paths"])


def test_every_problem_is_in_the_catalogue_once() -> None:
    """The slugs of the contract with their status; errors that are never answered have no page."""
    found = {slug: kind.status for slug, kind in problems.catalogue().items()}

    assert (
        found.items()
        >= {
            "unauthorized": 401,
            "forbidden": 403,
            "not-found": 404,
            "method-not-allowed": 405,
            "payload-too-large": 413,
            "unsupported-media-type": 415,
            "validation-failed": 422,
            "unknown-parameter": 400,
            "malformed-notification": 400,
            "signature-invalid": 401,
            "order-exists": 409,
            "state-conflict": 409,
            "rate-limited": 429,
            "overloaded": 503,
            "idempotency-key-missing": 400,
            "idempotency-key-invalid": 400,
            "idempotency-key-reused": 422,
            "idempotency-in-progress": 409,
            "idempotency-indeterminate": 409,
            "idempotency-unavailable": 503,
        }.items()
    )


async def test_every_problem_has_a_page(http) -> None:
    """For people as HTML, for programs as JSON; the list leads to each of them."""
    listed = await http.get("/problems")

    for slug, kind in problems.catalogue().items():
        page = await http.get(f"/problems/{slug}", headers={"Accept": "text/html,*/*"})
        data = await http.get(f"/problems/{slug}", headers={"Accept": "application/problem+json"})

        assert page.headers["content-type"].startswith("text/html")
        assert kind.title in page.text
        assert data.json()["type"] == f"/problems/{slug}"
        assert f"problems/{slug}" in listed.text
    assert problem(await http.get("/problems/nothing")) == (404, "not-found")
    assert problem(await http.get("/problems/<script>")) == (404, "not-found")


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_documents_are_the_same_each_time(http, path: str) -> None:
    """Making them twice changes nothing."""
    assert (await http.get(path)).text == (await http.get(path)).text
