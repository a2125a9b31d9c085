"""Real processes that die by SIGKILL or are frozen in the middle of a keyed call: one effect at most, and none that is forgotten."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.idempotency import children
from tests.idempotency.service import BODY, Service, is_replay
from tests.web.conftest import problem

if TYPE_CHECKING:
    import httpx

PAYMENT = (
    *("idempotency.claim:statement_1", "{0}.begin:before_commit", "{0}.begin:after_commit"),
    *("transport.ask:before", "transport.ask:after"),
    *("{0}.record:before_commit", "{0}.record:after_commit", "{0}.receipt:before_commit", "{0}.receipt:after_commit"),
)
POINTS = {
    "notes": ("idempotency.claim:statement_1", "notes.write:statement_1", "notes.write:before_commit", "notes.write:after_commit"),
    "charges": tuple(point.format("charges") for point in PAYMENT),
    "payouts": tuple(point.format("payouts") for point in PAYMENT),
}
ACTS = {"notes": ["noted"], "charges": ["begun", "recorded", "receipt"], "payouts": ["begun", "recorded", "receipt"]}
BEHIND_THE_INTENT = {
    *("payouts.begin:after_commit", "transport.ask:before", "transport.ask:after", "payouts.record:before_commit"),
}


async def killed(service: Service, noun: str) -> None:
    """One process dies at each point of an operation, each with a key of its own, which is the point's name."""
    async with children.running(service.database_url, service.provider.url, *POINTS[noun]) as doomed:
        answers = [await child.post(noun, BODY, key=child.point) for child in doomed]

    assert answers == [None] * len(doomed)


async def repeated(service: Service, noun: str) -> dict[str, httpx.Response]:
    """The same calls at a process that lives, by point."""
    return {point: await service.post(noun, BODY, key=point) for point in POINTS[noun]}


async def acts_by_key(service: Service) -> dict[str, list[str]]:
    """What was done for each key, in order."""
    found: dict[str, list[str]] = {}
    for row in await service.rows("SELECT key, what FROM acts JOIN idempotency_keys ON id = key_id ORDER BY number"):
        found.setdefault(row["key"], []).append(row["what"])
    return found


@pytest.mark.case("S36", "S50", "S58", "S64", "S65", "S69", "S82")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("noun", ["notes", "charges"])
async def test_what_is_safe_to_repeat_is_done_once_wherever_its_process_dies(service: Service, noun: str) -> None:
    """409 while the lease of the dead lives, then the repeat goes on where it stopped: every step once, and one foreign effect a key."""
    await killed(service, noun)
    states = await service.rows("SELECT key, state, lease_expires_at IS NOT NULL AS leased FROM idempotency_keys")
    last = POINTS[noun][-1]

    assert {row["key"]: row["state"] for row in states} == dict.fromkeys(POINTS[noun], "in_progress") | {last: "completed"}
    assert all(row["leased"] == (row["state"] == "in_progress") for row in states)

    for point, answer in (await repeated(service, noun)).items():
        assert (answer.status_code, is_replay(answer)) == ((201, True) if point == last else (409, False)), point

    service.lease_ends()
    first = await repeated(service, noun)
    second = await repeated(service, noun)

    assert {point: answer.status_code for point, answer in first.items()} == dict.fromkeys(POINTS[noun], 201)
    assert [point for point, answer in first.items() if is_replay(answer)] == [last]
    assert {point: answer.content for point, answer in second.items()} == {point: answer.content for point, answer in first.items()}
    assert all(is_replay(answer) for answer in second.values())
    assert await acts_by_key(service) == dict.fromkeys(POINTS[noun], ACTS[noun])
    assert set(service.provider.effects.values()) <= {1}
    assert service.provider.done == (len(POINTS[noun]) if noun == "charges" else 0)


@pytest.mark.case("S36", "S50", "S59", "S60", "S61", "S64", "S65", "S69")
@pytest.mark.timeout(90)
async def test_what_must_not_be_repeated_waits_for_a_person_where_its_call_may_have_happened(service: Service) -> None:
    """Before the intent and after the record it goes on; in between its outcome is unknown, and it is never called again by itself."""
    await killed(service, "payouts")
    called = Counter(service.provider.keys)
    service.lease_ends()
    answers = await repeated(service, "payouts")
    again = [await service.post("payouts", BODY, key=point) for point in sorted(BEHIND_THE_INTENT) for _ in range(20)]

    assert {point for point, answer in answers.items() if answer.status_code != 201} == BEHIND_THE_INTENT
    assert {problem(answer) for answer in again} == {(409, "idempotency-indeterminate")}
    assert max(Counter(service.provider.keys).values()) == 1
    assert set(called) <= set(service.provider.keys)

    rows = {row["key"]: row for row in await service.rows()}
    done = await acts_by_key(service)
    for point, answer in answers.items():
        doubted = point in BEHIND_THE_INTENT

        assert rows[point]["state"] == ("indeterminate" if doubted else "completed")
        assert done[point] == (["begun"] if doubted else ACTS["payouts"])
        if doubted:
            assert answer.json()["reconciliation_id"] == f"idk_{rows[point]['id'].hex}"
            assert int(answer.headers["retry-after"]) >= 600


@pytest.mark.case("S36", "S40", "S41")
@pytest.mark.timeout(60)
async def test_the_claim_of_another_process_is_seen_while_it_works(service: Service) -> None:
    """Claimed and committed before anything else happens: whoever looks from elsewhere finds it in progress, and gets the answer later."""
    plan = service.provider.hold()
    async with children.running(service.database_url, service.provider.url, "-") as (owner,):
        working = service.start(owner.post("charges", BODY))
        await plan.reached.wait()
        during = await service.post("charges")
        row = await service.row()
        plan.go.set()
        answer = await working
        after = await service.post("charges")

    assert (row["state"], row["recovery_point"]) == ("in_progress", "charge")
    assert problem(during) == (409, "idempotency-in-progress")
    assert answer is not None
    assert (answer.status_code, after.status_code, is_replay(after)) == (201, 201, True)
    assert after.content == answer.content


@pytest.mark.case("S55", "S56", "S58")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("died_at", [None, "charges.receipt:before_commit"])
async def test_a_frozen_owner_that_wakes_after_its_lease_writes_nothing(service: Service, died_at: str | None) -> None:
    """Somebody else took over meanwhile, and has answered or has died too: the former owner stops, and says what is true now."""
    plan = service.provider.hold()
    async with children.running(service.database_url, service.provider.url, "-") as (owner,):
        working = service.start(owner.post("charges", BODY))
        await plan.reached.wait()
        owner.stop()
        service.lease_ends()
        if died_at:
            await service.dies(died_at, "charges")
        else:
            finished = await service.post("charges")
        before = await service.row()
        plan.go.set()
        owner.go_on()
        answer = await working

    assert answer is not None
    if died_at:
        assert problem(answer) == (409, "idempotency-in-progress")
    else:
        assert (answer.status_code, answer.content, is_replay(answer)) == (201, finished.content, True)
    assert await service.row() == before
    assert before["fence"] == 2
    assert service.provider.done == 1
    assert await service.acts() == ["begun", "recorded", "receipt"][: 2 if died_at else 3]


@pytest.mark.case("S55", "S59", "S61")
@pytest.mark.timeout(60)
async def test_a_frozen_owner_does_not_settle_what_was_found_unknown(service: Service) -> None:
    """Its payout happened, but a person may be deciding already: it writes nothing, and answers that the outcome is unknown."""
    plan = service.provider.hold()
    async with children.running(service.database_url, service.provider.url, "-") as (owner,):
        working = service.start(owner.post("payouts", BODY))
        await plan.reached.wait()
        owner.stop()
        service.lease_ends()
        repeat = await service.post("payouts")
        before = await service.row()
        plan.go.set()
        owner.go_on()
        answer = await working

    assert answer is not None
    assert problem(repeat) == problem(answer) == (409, "idempotency-indeterminate")
    assert answer.json()["reconciliation_id"] == repeat.json()["reconciliation_id"]
    assert await service.row() == before
    assert await service.acts() == ["begun"]
    assert service.provider.done == 1
