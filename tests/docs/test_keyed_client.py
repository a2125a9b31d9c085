"""The client of `docs/examples/keyed_client/`: the key first, the same one while nobody knows, and an end before the gateway forgets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from docs import generate
from docs.examples.keyed_client import once
from docs.examples.keyed_client.once import Caller, OutcomeUnknownError
from ipn_gateway import sources, tenants
from ipn_gateway.settings import Settings
from ipn_gateway.simulator.serving import serving
from ipn_gateway.web.app import create_app
from ipn_gateway.web.publication import EXTENSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipn_gateway.faults import Faults
    from ipn_gateway.runtime import Runtime

PAGE = (Path(__file__).parents[2] / "docs/howto/idempotency-keys.md").read_text(encoding="utf-8")
BODY = {"order_id": "INV-1", "amount": "100.00", "currency": "BDT", "source": "shop"}
DONE = httpx.Response(201, json={"order_id": "INV-1"})


def problem(status: int, slug: str, **headers: str) -> httpx.Response:
    """A refusal as the gateway gives it."""
    return httpx.Response(status, json={"type": f"/problems/{slug}", "title": slug, "status": status, "detail": slug}, headers=headers)


@dataclass
class Played:
    """A gateway that answers what a test says, one after the other; an exception is an answer that got lost."""

    answers: list[httpx.Response | Exception]
    keys: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    intents: sqlite3.Connection = field(default_factory=lambda: sqlite3.connect(":memory:"))
    before: Callable[[], None] = lambda: None

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        self.before()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def post(self, body: dict[str, Any] = BODY, name: str = "order INV-1", *, again: bool = False) -> tuple[int, Any]:
        with httpx.Client(transport=httpx.MockTransport(self._answer), base_url="http://gateway.test") as http:
            return Caller(http, self.intents, self.waits.append).post(name, "/v1/orders", body, again=again)

    def close(self) -> None:
        self.intents.close()


@pytest.fixture
def played():
    """Makes gateways that are played, and forgets what their callers remember."""
    made: list[Played] = []

    def play(*answers: httpx.Response | Exception) -> Played:
        made.append(Played(list(answers)))
        return made[-1]

    yield play
    for each in made:
        each.close()


@pytest.mark.case("S42", "S131")
@pytest.mark.parametrize(
    "unknown",
    [
        httpx.ReadTimeout("no answer"),
        httpx.ConnectError("nobody there"),
        httpx.RemoteProtocolError("the connection ended"),
        httpx.Response(500, text="oops"),
        problem(502, "overloaded"),
        problem(503, "overloaded"),
        httpx.Response(504, text="<html>gateway timeout</html>"),
        problem(408, "request-timeout"),
        problem(429, "rate-limited"),
        problem(409, "idempotency-in-progress"),
        problem(409, "idempotency-indeterminate"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else f"{given.status_code}",
)
def test_the_same_key_is_used_while_the_outcome_is_unknown(played, unknown: Any) -> None:
    """After a timeout, a 5xx, a 429 or a 409 that says so, the same key is sent until something definite is answered."""
    gateway = played(unknown, unknown, DONE)

    outcome = gateway.post()

    assert outcome == (201, {"order_id": "INV-1"})
    assert len(gateway.keys) == 3
    assert len(set(gateway.keys)) == 1


@pytest.mark.case("S131")
def test_the_key_is_kept_before_the_first_attempt(played) -> None:
    """When the first request arrives, a restart would find its key; a caller that died goes on with it."""
    gateway = played(RuntimeError("the caller dies here"), DONE)
    kept: list[Any] = []
    gateway.before = lambda: kept.append(gateway.intents.execute("SELECT key FROM intents").fetchone()[0])

    with pytest.raises(RuntimeError):
        gateway.post()
    outcome = gateway.post()

    assert kept == gateway.keys
    assert len(set(gateway.keys)) == 1
    assert outcome[0] == 201


@pytest.mark.case("S10", "S131")
def test_keys_are_uuid4_and_one_for_each_intent(played) -> None:
    """Two intents with one body are two keys."""
    gateway = played(DONE)

    gateway.post(name="coffee 1")
    gateway.post(name="coffee 2")

    assert len(set(gateway.keys)) == 2
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", key) for key in gateway.keys)


def test_what_is_known_is_not_asked_again(played) -> None:
    """The outcome is kept, and given without a request."""
    gateway = played(DONE)

    outcomes = [gateway.post(), gateway.post()]

    assert outcomes == [(201, {"order_id": "INV-1"})] * 2
    assert len(gateway.keys) == 1


@pytest.mark.case("S79", "S131")
def test_a_new_key_needs_a_new_body_and_a_definite_refusal(played) -> None:
    """A refused request that was mended is a new one; while the first may have happened, another body is refused by the client itself."""
    gateway = played(problem(422, "validation-failed"), DONE)
    mended = BODY | {"amount": "99.00"}

    refused, done = gateway.post(), gateway.post(mended)

    assert (refused[0], done[0]) == (422, 201)
    assert len(set(gateway.keys)) == 2
    with pytest.raises(ValueError, match="may have happened"):
        gateway.post(BODY)


@pytest.mark.case("S79", "S131")
@pytest.mark.parametrize("refusal", [(404, "not-found"), (409, "state-conflict"), (422, "validation-failed")])
def test_what_was_mended_at_the_gateway_is_asked_again_when_told_so(played, refusal: tuple[int, str]) -> None:
    """A refusal is kept until the caller says `again`; then the same body goes out under a new key, and what is done stays done."""
    gateway = played(problem(*refusal), DONE)

    kept = [gateway.post()[0] for _ in range(2)]
    done = [gateway.post(again=True)[0] for _ in range(2)]

    assert (kept, done) == ([refusal[0]] * 2, [201, 201])
    assert len(gateway.keys) == len(set(gateway.keys)) == 2


@pytest.mark.case("S131")
def test_again_makes_no_new_key_while_nobody_knows(played) -> None:
    """What may have happened keeps its key, whatever the caller says."""
    gateway = played(problem(401, "unauthorized"), DONE)

    with pytest.raises(OutcomeUnknownError):
        gateway.post()
    outcome = gateway.post(again=True)

    assert outcome[0] == 201
    assert len(set(gateway.keys)) == 1


def test_another_body_waits_for_the_first(played) -> None:
    """As long as nobody knows what became of the first, nothing else is sent under its name."""
    gateway = played(problem(401, "unauthorized"))

    with pytest.raises(OutcomeUnknownError):
        gateway.post()
    with pytest.raises(ValueError, match="another body"):
        gateway.post(BODY | {"amount": "99.00"})

    assert len(gateway.keys) == 1


@pytest.mark.case("S44")
def test_other_conflicts_are_definite(played) -> None:
    """The type decides, not the status alone."""
    gateway = played(problem(409, "order-exists"))

    assert gateway.post()[0] == 409
    assert gateway.waits == []


@pytest.mark.case("S81")
def test_a_500_from_storage_is_definite(played) -> None:
    """The gateway marks what it has stored: asking again would bring the same."""
    gateway = played(problem(500, "internal-error"), problem(500, "internal-error", **{"Idempotent-Replayed": "true"}))

    assert gateway.post()[0] == 500
    assert len(gateway.keys) == 2


def test_retry_after_is_obeyed(played) -> None:
    """A hint that is longer than the backoff is waited for, an hour at most; without one the wait doubles, with jitter."""
    gateway = played(*[problem(503, "overloaded", **{"Retry-After": hint}) for hint in ("7", "99999", "soon")], DONE)

    gateway.post()

    assert gateway.waits[:2] == [7, once.WAIT_SECONDS_MAX]
    assert 2 <= gateway.waits[2] <= 4


@pytest.mark.case("S98")
def test_it_gives_up_before_the_gateway_forgets(played) -> None:
    """After all attempts nobody knows; a person may run it again with the same key, until the horizon, and then nothing is sent."""
    gateway = played(problem(503, "overloaded"))

    for age_hours in (once.HORIZON_HOURS - 1, once.HORIZON_HOURS + 1, 0):
        with pytest.raises(OutcomeUnknownError):
            gateway.post()
        gateway.intents.execute("UPDATE intents SET made_at = julianday('now') - ? / 24.0", (age_hours,))
        gateway.intents.commit()

    assert len(gateway.keys) == 2 * once.ATTEMPTS_MAX
    assert len(set(gateway.keys)) == 1
    assert max(gateway.waits) <= once.WAIT_SECONDS_MAX


@pytest.mark.case("S98")
def test_the_numbers_fit_together() -> None:
    """Attempts and a person's time are within the horizon, that is shorter than any retention, and the page says these numbers."""
    calls = [call for path in generate.openapi()["paths"].values() for call in path.values() if EXTENSION in call]
    retention = min(call[EXTENSION]["retention"]["hours"] for call in calls)
    automatic = once.ATTEMPTS_MAX * once.WAIT_SECONDS_MAX / 3600
    table = re.findall(r"^\| ([\w ,]+?) \| ([\w ,]+?) \|", PAGE, re.MULTILINE)

    assert automatic + once.PERSON_HOURS <= once.HORIZON_HOURS < retention == Settings().idempotency_retention_hours
    assert dict(table) | {"attempts, longest wait": "20, 3600 s", "horizon": "96 hours", "retention": "168 hours"} == dict(table)
    assert (once.ATTEMPTS_MAX, once.WAIT_SECONDS_MAX, once.HORIZON_HOURS, retention) == (20, 3600, 96, 168)
    assert f"within {once.PERSON_HOURS} hours" in PAGE


@pytest.mark.case("S91")
def test_the_library_under_it_repeats_nothing_by_itself(played) -> None:
    """Each request on the wire is one that the client decided on and waited for."""
    gateway = played(httpx.ConnectError("nobody there"), httpx.ReadError("cut"), DONE)

    gateway.post()

    assert len(gateway.keys) == 1 + len(gateway.waits) == 3


@pytest.mark.case("S42", "S90")
async def test_a_client_that_gave_up_waiting_gets_the_answer_of_the_first(
    rt: Runtime, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway is slower than the client's patience: the client is told that it is being done, waits, and gets the one order."""
    app, key = create_app(rt), (await tenants.create_key(rt.db, "acme")).key
    config = {"store_id": "testbox", "store_passwd": "qwerty", "mode": "sandbox"}
    await sources.create(rt.db, rt.vault, "acme", "shop", provider="sslcommerz", given=config, actor="test")
    loop, may_end, has_ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    waits: list[float] = []

    async def slow() -> None:
        await may_end.wait()

    async def done() -> None:
        has_ended.set()

    def wait(seconds: float) -> None:
        """The first wait follows the lost answer, the second one the 409: then the work may end."""
        waits.append(seconds)
        if len(waits) == 2:
            loop.call_soon_threadsafe(may_end.set)
            assert has_ended.wait(10)

    monkeypatch.setattr(once, "TIMEOUT_SECONDS", 0.5)
    faults.on |= {"orders.create:before_commit": slow, "orders.create:after_commit": done}
    async with serving(app) as url:
        status, order = await asyncio.to_thread(ordered, url, key, wait)
    await app.state.slots.drained()
    async with rt.db.autocommit("test") as tx:
        count = await tx.value("SELECT count(*) FROM orders")

    assert (status, order["order_id"], count) == (201, "INV-1", 1)
    assert len(waits) >= 2


def ordered(url: str, key: str, wait: Callable[[float], object]) -> tuple[int, Any]:
    """One order, by the client of the example."""
    intents = sqlite3.connect(":memory:")
    with contextlib.closing(intents), httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as http:
        return Caller(http, intents, wait).post("order INV-1", "/v1/orders", BODY)
