"""What is kept of an answer and what of it is repeated, what is never kept, and who may hear it."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, StreamingResponse
from structlog.testing import capture_logs

from ipn_gateway import logs
from ipn_gateway.errors import (
    ConfigurationError,
)
from ipn_gateway.operations import Finished
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web import keyed
from ipn_gateway.web.app import create_app
from tests.idempotency import foreign
from tests.idempotency.service import Service, is_replay, told
from tests.make import Make
from tests.web.conftest import ENDPOINT, ORDER, Caller, problem

if TYPE_CHECKING:
    from ipn_gateway.runtime import Runtime

KIBIBYTES_64 = 64 * 1024


@pytest.mark.case("S74", "S75")
async def test_a_repeat_has_status_bytes_and_type_of_the_first(service: Service) -> None:
    """Byte for byte: order and spelling of members, escapes, other alphabets, no body at all, and what is no JSON. Only it is marked."""
    for finished in (
        Finished(201, b'{"b": 1.10, "a":1e2,  "a":2, "\\u00e9": "\xc3\xa9 \xe0\xa7\xa7"}'),
        Finished(204),
        Finished(200, b"\x00\xff\xfe binary \r\n", media_type="application/octet-stream"),
        Finished(200, "বাংলা".encode(), media_type="text/plain; charset=utf-8"),
        Finished(200, b"null"),
        Finished(202, b'{"job":"j1"}'),
        Finished(303, b"", (("Location", "/elsewhere"),)),
        Finished(299, b"{}"),
        Finished(418, b'{"detail":"short and stout"}', media_type="application/problem+json"),
    ):
        first, second = await service.tell(finished)

        assert told(second) == told(first) == (finished.status, finished.body)
        assert second.headers.get("content-type") == first.headers.get("content-type") == (finished.media_type if finished.body else None)
        assert (is_replay(first), is_replay(second)) == (False, True)
        assert "idempotent-replayed" not in first.headers


@pytest.mark.case("S76")
async def test_only_listed_headers_are_kept(service: Service) -> None:
    """Type, Location, ETag and what the operation declares, several of one name in order; nothing of a session, a moment or a hop."""
    kept = [("Location", "/v1/told/1"), ("ETag", '"1"'), ("Link", '</a>; rel="a"'), ("link", "</b>"), ("X-Balance", "10.00")]
    never = [
        *[("Set-Cookie", "session=of-the-first"), ("WWW-Authenticate", "Bearer"), ("Date", "Mon, 01 Jan 2024 00:00:00 GMT")],
        *[("traceparent", "00-1-1-01"), ("X-Request-Id", "r-1"), ("RateLimit-Remaining", "9"), ("Retry-After", "5")],
        *[("Connection", "close"), ("Keep-Alive", "timeout=5"), ("X-Anything", "else"), ("Server", "first"), ("Age", "3")],
    ]
    first, second = await service.tell(Finished(200, b"{}", (*never, *kept)))

    assert [first.headers.get(name) for name, _ in never] == [value for _, value in never]
    assert {name: second.headers.get_list(name) for name in ("Location", "ETag", "X-Balance")} == {
        name: first.headers.get_list(name) for name in ("Location", "ETag", "X-Balance")
    }
    assert second.headers.get_list("link") == ['</a>; rel="a"', "</b>"]
    assert set(second.headers) == {"content-length", "content-type", "location", "etag", "link", "x-balance", "idempotent-replayed"}


@pytest.mark.case("S77")
async def test_what_is_of_the_moment_is_made_anew_for_each_repeat(shop: Caller, rt: Runtime) -> None:
    """Quota and date are those of now; two repeats differ in them and in nothing else."""
    async with serving(create_app(rt)) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        caller = Caller(http, shop.key)
        answers = [await caller.post("/v1/orders", ORDER, idempotency_key="K1") for _ in range(3)]
    changing = {"date", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"}
    steady = [{name: value for name, value in answer.headers.items() if name not in changing} for answer in answers]

    assert [is_replay(answer) for answer in answers] == [False, True, True]
    assert steady[1] == steady[2] == steady[0] | {"idempotent-replayed": "true"}
    remaining = [int(answer.headers["ratelimit-remaining"]) for answer in answers]
    assert remaining == sorted(set(remaining), reverse=True)
    assert all("date" in answer.headers for answer in answers)


@pytest.mark.case("S83")
async def test_an_answer_that_is_too_large_to_keep_is_kept_in_short(service: Service) -> None:
    """64 KiB are kept as they are. Of more the effect is there once, and the repeat has status and headers and says where to read."""
    full, kept = await service.tell(Finished(201, b"x" * KIBIBYTES_64, media_type="text/plain"))
    larger, short = await service.tell(Finished(201, b"x" * (KIBIBYTES_64 + 1), (("Location", "/v1/told/1"),), media_type="text/plain"))

    assert told(kept) == told(full)
    assert len(larger.content) == KIBIBYTES_64 + 1
    assert (short.status_code, is_replay(short), short.headers["location"]) == (201, True, "/v1/told/1")
    assert short.headers["content-type"] == "application/json"
    assert set(short.json()) == {"omitted"}


@pytest.mark.case("S84")
@pytest.mark.parametrize("kind", [StreamingResponse, FileResponse])
@pytest.mark.parametrize("by", ["annotation", "response_class"])
def test_a_streamed_answer_cannot_be_keyed(kind: type[Response], by: str) -> None:
    """It could not be kept: such a route stops the start."""
    app = FastAPI()

    async def stream(call: Any) -> Response:
        raise AssertionError

    stream.__annotations__["call"] = Annotated[keyed.KeyedCall, keyed.of(foreign.NOTE, foreign.tenant)]
    if by == "annotation":
        stream.__annotations__["return"] = kind
    app.add_api_route("/v1/notes", stream, methods=["POST"], response_class=kind, response_model=None)

    with pytest.raises(ConfigurationError, match="streams"):
        list(keyed.declared(app.routes))


@pytest.mark.case("S85")
async def test_a_body_that_is_too_large_takes_no_key(service: Service) -> None:
    """413, with its length announced or in pieces without one; the same key then executes."""

    async def pieces() -> Any:
        for _ in range(3):
            yield b" " * 30_000

    form = {"Content-Type": "application/json"}
    async with serving(service.app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        headers = {"Idempotency-Key": "K1", "X-Tenant": "acme", **form}
        answers = [await http.post("/v1/notes", headers=headers, content=content) for content in (b" " * 70_000, pieces())]
        rows = await service.rows()
        fits = await http.post("/v1/notes", headers=headers, content=b"{}".ljust(KIBIBYTES_64))

    assert [problem(answer) for answer in answers] == [(413, "payload-too-large")] * 2
    assert rows == []
    assert (fits.status_code, is_replay(fits)) == (201, False)


@pytest.mark.case("S86")
async def test_of_work_that_goes_on_only_its_acceptance_is_kept(service: Service) -> None:
    """202, the job's id and address, for ever; how far it is says the job itself."""
    service.app.state.told = foreign.says(Finished(202, b'{"job":"job_1","status":"queued"}', (("Location", "/v1/notes"),)))
    first = await service.post("told")
    before = await service.http.get(first.headers["location"])
    await service.post("notes")
    service.clock.advance(minutes=10)
    repeat = await service.post("told")
    after = await service.http.get(repeat.headers["location"])

    assert (first.status_code, told(repeat), is_replay(repeat)) == (202, told(first), True)
    assert repeat.headers["location"] == first.headers["location"]
    assert (before.json(), after.json()) == (0, 1)


@pytest.mark.case("S87")
async def test_a_repeat_does_nothing_and_is_counted_apart(shop: Caller, rt: Runtime) -> None:
    """No event, no audit entry, no row anywhere; counters and log tell repeats from executions."""
    await Make(rt.db).order(order_id="ORD-7", status="paid_on_hold")
    await shop.post("/v1/endpoints", ENDPOINT)
    names = ("executed", "replays", "in_progress", "mismatches")
    counts: list[Any] = []
    for _ in range(4):
        before = {name: logs.counters[f"idempotency.{name}"] for name in names}
        answer = await shop.post("/v1/orders/ORD-7/release", {"reason": "looked at"}, idempotency_key="K1")
        async with rt.db.autocommit("test.count") as tx:
            rows = {t: await tx.value(f"SELECT count(*) FROM {t}") for t in ("events", "event_deliveries", "audit_log", "idempotency_keys")}
        counts.append(({name: logs.counters[f"idempotency.{name}"] - before[name] for name in names}, rows, answer.status_code))

    assert counts[0][0] == {"executed": 1, "replays": 0, "in_progress": 0, "mismatches": 0}
    assert [told_ for told_, _, _ in counts[1:]] == [{"executed": 0, "replays": 1, "in_progress": 0, "mismatches": 0}] * 3
    assert [rows for _, rows, _ in counts] == [counts[0][1]] * 4
    assert counts[0][1]["events"] == counts[0][1]["event_deliveries"] == 1


@pytest.mark.case("S135")
async def test_what_is_shown_once_is_not_kept(service: Service) -> None:
    """A member that the operation declares as secret is in the first answer only; the rest of it is repeated."""
    secret = secrets.token_hex(8)
    body = json.dumps({"id": "1", "secret": secret, "amount": "1.10"}).encode()
    service.app.state.told = foreign.says(Finished(201, body))
    first, second = await service.post("secrets"), await service.post("secrets")

    assert first.content == body
    assert second.json() == {"id": "1", "amount": "1.10"}
    assert secret not in str(await service.rows())


@pytest.mark.case("S135")
async def test_a_signing_secret_is_shown_once_however_often_it_is_asked_for(shop: Caller, rt: Runtime) -> None:
    """Of our own calls: one endpoint, one rotation, and repeats that leave the secret out; no table holds it readable."""
    created = [await shop.post("/v1/endpoints", ENDPOINT, idempotency_key="K1") for _ in range(2)]
    address = f"{created[0].headers['location']}/rotate-secret"
    rotated = [await shop.post(address, {}, idempotency_key="K1") for _ in range(2)]
    async with rt.db.autocommit("test.dump") as tx:
        kept = await tx.all(dict, "SELECT convert_from(response_body, 'UTF8') AS body FROM idempotency_keys")
        secrets_made = await tx.value("SELECT count(*) FROM endpoint_secrets")

    for first, second in (created, rotated):
        whole = first.json()
        assert whole.pop("secret").startswith("whsec_")
        assert (second.status_code, second.json(), is_replay(second)) == (first.status_code, whole, True)
    assert "whsec_" not in str(kept)
    assert secrets_made == 2
    assert len((await shop.get("/v1/endpoints")).json()["items"]) == 1


@pytest.mark.case("S137")
async def test_a_key_is_not_written_to_the_log(service: Service) -> None:
    """Keys may be personal: whatever is said of one is a digest."""
    key = "customer-7-of-acme"
    with capture_logs() as lines:
        await service.post("notes", key=key)
        await service.post("notes", key=key)
        await service.post("notes", {"amount": "7"}, key=key)
        await service.dies("transport.ask:after", "payouts", key=key)
        service.lease_ends()
        await service.post("payouts", key=key)

    assert lines
    assert key not in str(lines)
