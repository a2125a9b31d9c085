"""Manual acts over HTTP: what they need in body and scope, what they answer, and that each is what the audit log says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ipn_gateway import ids, tenants
from tests.make import SOURCE, TENANT, Make, ago
from tests.web.conftest import Caller, pointers, problem

if TYPE_CHECKING:
    from ipn_gateway.db import Database
    from ipn_gateway.runtime import Runtime

CONFIRMED = {
    "order_id": "ORD-1",
    "operation_id": "V-1",
    "effect": "paid",
    "status": "VALID",
    "account": "teststore",
    "amount": "120.00",
    "currency": "BDT",
    "provider_transaction_id": "BANK-1",
    "risk": False,
    "settled_amount": None,
    "settled_currency": None,
    "net_amount": None,
    "paid_at": None,
}
EVIDENCE = {"amount": "100.00", "currency": "BDT", "provider_transaction_id": "BANK-1"}


@pytest.fixture
def db(rt: Runtime) -> Database:
    """Rows are made in the database of the application."""
    return rt.db


async def waiting(make: Make, outcome: str = "held", **given: Any) -> str:
    """A delivery that waits for a person; its public id."""
    row = {"order_id": "ORD-1", "operation_id": "V-1", "outcome": outcome, "reason": "amount"} | given
    delivery = await make.notification_delivery(**row)
    await make.inbox(notification_delivery_id=delivery["id"], order_id=row["order_id"], operation_id=row["operation_id"], state=outcome)
    return ids.show(ids.NOTIFICATION_DELIVERY, delivery["id"])


async def audited(rt: Runtime) -> list[dict[str, Any]]:
    async with rt.db.autocommit("test") as tx:
        return await tx.all(dict, "SELECT actor, action, target, reason FROM audit_log WHERE action NOT LIKE 'source.%%' ORDER BY id", {})


async def test_release_and_cancel_answer_with_the_order(api: Caller, make: Make, rt: Runtime) -> None:
    """200 each time; the actor in the audit log is the key."""
    await make.order(order_id="ORD-1", status="paid_on_hold", reason="risk")
    await make.order(order_id="ORD-2")

    for _ in range(2):
        released = await api.post("/v1/orders/ORD-1/release", {"reason": "checked"})
        cancelled = await api.post("/v1/orders/ORD-2/cancel", {"reason": "out of stock"})

        assert (released.status_code, released.json()["status"], released.json()["reason"]) == (200, "paid", None)
        assert (cancelled.status_code, cancelled.json()["status"], cancelled.json()["reason"]) == (200, "cancelled", "merchant")
        assert released.json() == (await api.get("/v1/orders/ORD-1")).json()
    entries = await audited(rt)
    assert [(entry["action"], entry["target"], entry["reason"]) for entry in entries] == [
        ("order.release", "ORD-1", "checked"),
        ("order.cancel", "ORD-2", "out of stock"),
    ]
    assert all(entry["actor"].startswith("key:key_") for entry in entries)
    assert problem(await api.post("/v1/orders/ORD-2/release", {"reason": "x"})) == (409, "state-conflict")
    assert problem(await api.post("/v1/orders/ORD-1/cancel", {"reason": "x"})) == (409, "state-conflict")


async def test_apply_books_what_was_confirmed(api: Caller, make: Make) -> None:
    """More than is due sends order.paid, then order.overpaid. The same again is a 200, the other decision a 409."""
    await make.order(order_id="ORD-1")
    delivery = await waiting(make, confirmed=CONFIRMED)
    path = f"/v1/notification-deliveries/{delivery}/resolve"

    answer = await api.post(path, {"decision": "apply", "reason": "agreed"})

    assert answer.status_code == 200
    assert (answer.json()["outcome"], answer.json()["resolution"], answer.json()["id"]) == ("applied", "apply", delivery)
    order = (await api.get("/v1/orders/ORD-1")).json()
    assert (order["status"], order["amount_paid"]) == ("paid", "120.00")
    assert [(payment["amount"], payment["provider_transaction_id"]) for payment in order["payments"]] == [("120.00", "BANK-1")]
    listed = (await api.get("/v1/events", order_id="ORD-1")).json()["items"]
    assert [event["type"] for event in sorted(listed, key=lambda event: event["sequence"])] == ["order.paid", "order.overpaid"]
    assert (await api.post(path, {"decision": "apply", "reason": "again"})).status_code == 200
    assert problem(await api.post(path, {"decision": "dismiss", "reason": "no"})) == (409, "state-conflict")


async def test_a_dead_one_needs_evidence_to_be_applied(api: Caller, make: Make) -> None:
    """A 422 that points at it; with it, it is applied."""
    await make.order(order_id="ORD-1")
    path = f"/v1/notification-deliveries/{await waiting(make, 'dead', reason='no_verdict')}/resolve"
    apply = {"decision": "apply", "reason": "seen in the panel"}

    assert pointers(await api.post(path, apply)) == ["#/evidence"]
    answer = await api.post(path, apply | {"evidence": EVIDENCE})

    assert (answer.status_code, answer.json()["outcome"]) == (200, "applied")
    assert (await api.get("/v1/orders/ORD-1")).json()["status"] == "paid"


async def test_dismissing_ends_the_waiting(api: Caller, make: Make) -> None:
    """A conflict is only dismissed."""
    await make.order(order_id="ORD-1", status="paid")
    delivery = await waiting(make, "conflict", reason="second_payment")
    path = f"/v1/notification-deliveries/{delivery}/resolve"

    assert problem(await api.post(path, {"decision": "apply", "reason": "x"})) == (409, "state-conflict")
    answer = await api.post(path, {"decision": "dismiss", "reason": "refunded"})

    assert answer.status_code == 200
    assert [answer.json()[name] for name in ("outcome", "reason", "resolution")] == ["conflict", "second_payment", "dismiss"]


async def test_replays_are_answered_with_the_delivery_or_a_count(shop: Caller, rt: Runtime) -> None:
    """One by its id, with an empty body, without the raw one; many by source and outcome, counted first with a dry run."""
    for _ in range(3):
        await shop.http.post(f"/ipn/{SOURCE}", content=b"tran_id=ORD-1&status=VALID&amount=1.00&val_id=V1&verify_sign=x&verify_key=status")
    first = (await shop.get("/v1/notification-deliveries")).json()["items"][0]

    one = await shop("POST", f"/v1/notification-deliveries/{first['id']}/replay")
    body = {"source": SOURCE, "outcome": "rejected", "reason": "new password", "since": "2020-01-01T00:00:00Z"}
    many = [await shop.post("/v1/notification-deliveries/replay", body | {"dry_run": dry}) for dry in (True, False)]

    assert (one.status_code, one.json()) == (200, first | {"raw_body_base64": None})
    assert [(answer.status_code, answer.json()["count"], answer.json()["refused"]) for answer in many] == [(200, 0, 3)] * 2
    assert many[0].json() == {
        "source": SOURCE,
        "outcome": "rejected",
        "since": "2020-01-01T00:00:00.000000Z",
        "until": None,
        "dry_run": True,
        "count": 0,
        "refused": 3,
        "settled": 0,
        "next_cursor": None,
    }
    assert [entry["reason"] for entry in await audited(rt)] == [None]


async def test_a_replay_of_a_span_that_ends_before_it_begins_is_refused(shop: Caller) -> None:
    """Nothing is in it, which nobody can have meant."""
    body = {"source": SOURCE, "outcome": "rejected", "reason": "new password", "since": "2026-07-02T00:00:00Z"}

    answer = await shop.post("/v1/notification-deliveries/replay", body | {"until": "2026-07-01T00:00:00Z"})

    assert pointers(answer) == ["#/until"]


async def test_a_replay_of_ten_thousand_takes_several_calls(shop: Caller, make: Make, rt: Runtime) -> None:
    """Each looks at no more than 2,000, so that none runs without bound, and gives the cursor of the next; together they come to all."""
    one = await make.notification_delivery(outcome="rejected", reason="signature", proof="refused")
    async with rt.db.transaction("test") as tx:
        await tx.execute(
            """INSERT INTO notification_deliveries
                      (tenant_id, id, source_id, provider, via, headers, raw_body, sha256, proof, order_id, outcome, reason, decided_at)
               SELECT tenant_id, (left(id::text, 24) || lpad(to_hex(n), 12, '0'))::uuid,
                      source_id, provider, via, headers, raw_body, sha256, proof, order_id, outcome, reason, decided_at
                 FROM notification_deliveries, generate_series(1, 9999) AS n WHERE id = %(id)s""",
            one,
        )
    body = {"source": SOURCE, "outcome": "rejected", "reason": "new password"}

    answers = [(await shop.post("/v1/notification-deliveries/replay", body)).json()]
    while (cursor := answers[-1]["next_cursor"]) and len(answers) < 10:
        answers.append((await shop.post("/v1/notification-deliveries/replay", body | {"cursor": cursor})).json())

    assert {answer["refused"] for answer in answers[:5]} == {2_000}
    assert sum(answer["refused"] for answer in answers) == 10_000
    assert len(answers) <= 6


async def test_what_is_resolved_waits_no_more(shop: Caller, stranger: Caller, make: Make) -> None:
    """`waiting=true` lists what a person has to decide, and only that; `outcome` goes on listing what was."""
    await make.order(order_id="ORD-1", source_id=SOURCE)
    open_ones = [await waiting(make, outcome, operation_id=f"V-{outcome}") for outcome in ("held", "conflict", "dead")]
    dismissed = await waiting(make, "held", operation_id="V-4", confirmed=CONFIRMED | {"operation_id": "V-4"})
    await make.inbox(order_id="ORD-1")
    path = "/v1/notification-deliveries"
    await shop.post(f"{path}/{dismissed}/resolve", {"decision": "dismiss", "reason": "refunded"})

    async def listed(caller: Caller, **query: str) -> list[str]:
        return [item["id"] for item in (await caller.get(path, **query)).json()["items"]]

    assert await listed(shop, waiting="true") == open_ones[::-1]
    assert await listed(shop, outcome="held") == [dismissed, open_ones[0]]
    assert await listed(shop, outcome="held", waiting="true") == [open_ones[0]]
    assert await listed(shop, source="other-shop", waiting="true") == []
    assert await listed(stranger, waiting="true") == []
    assert len(await listed(shop, waiting="false")) == 5
    assert problem(await shop.get(path, waiting="perhaps")) == (422, "validation-failed")
    first = (await shop.get(path, waiting="true", limit=2)).json()
    rest = (await shop.get(path, waiting="true", cursor=first["next_cursor"])).json()
    assert [item["id"] for item in (*first["items"], *rest["items"])] == open_ones[::-1]
    assert (await shop.get(f"{path}/{open_ones[0]}")).json() in rest["items"]


async def test_a_redelivery_is_answered_with_the_event_delivery(api: Caller, make: Make) -> None:
    """Due at once; a dead one is pending again. The body may be empty."""
    made = await make.event_delivery(status="dead", attempt_count=10)
    path = f"/v1/event-deliveries/{ids.show(ids.EVENT_DELIVERY, made['id'])}"

    answers = [await api("POST", f"{path}/redeliver"), await api.post(f"{path}/redeliver", {"reason": "they lost it"})]

    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "pending")] * 2
    assert answers[0].json()["next_attempt_at"] is not None
    assert answers[1].json() == (await api.get(path)).json()


WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/orders/ORD-1/release", {}, ["#/reason"]),
    ("/v1/orders/ORD-1/release", {"reason": "  "}, ["#/reason"]),
    ("/v1/orders/ORD-1/release", {"reason": None}, ["#/reason"]),
    ("/v1/orders/ORD-1/release", {"reason": "x" * 501}, ["#/reason"]),
    ("/v1/orders/ORD-1/cancel", {}, ["#/reason"]),
    ("RESOLVE", {"reason": "x"}, ["#/decision"]),
    ("RESOLVE", {"decision": "accept", "reason": "x"}, ["#/decision"]),
    ("RESOLVE", {"decision": "dismiss"}, ["#/reason"]),
    ("RESOLVE", {"decision": "apply", "reason": "x", "evidence": EVIDENCE}, ["#/evidence"]),
    ("RESOLVE", {"decision": "apply", "reason": "x", "evidence": EVIDENCE | {"amount": "1e3"}}, ["#/evidence/amount"]),
    ("RESOLVE", {"decision": "apply", "reason": "x", "evidence": EVIDENCE | {"amount": "-1"}}, ["#/evidence/amount"]),
    ("RESOLVE", {"decision": "apply", "reason": "x", "evidence": EVIDENCE | {"amount": 1}}, ["#/evidence/amount"]),
    ("RESOLVE", {"decision": "apply", "reason": "x", "evidence": EVIDENCE | {"currency": "XXQ"}}, ["#/evidence/currency"]),
    (
        "RESOLVE",
        {"decision": "apply", "reason": "x", "evidence": EVIDENCE | {"provider_transaction_id": " "}},
        ["#/evidence/provider_transaction_id"],
    ),
    ("/v1/notification-deliveries/replay", {"outcome": "rejected", "reason": "x"}, ["#/source"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "reason": "x"}, ["#/outcome"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "outcome": "gone", "reason": "x"}, ["#/outcome"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "outcome": "rejected"}, ["#/reason"]),
    ("/v1/notification-deliveries/replay", {"source": "other", "outcome": "rejected", "reason": "x"}, ["#/source"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "outcome": "rejected", "reason": "x", "since": "today"}, ["#/since"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "outcome": "rejected", "reason": "x", "dry_run": "yes"}, ["#/dry_run"]),
    ("/v1/notification-deliveries/replay", {"source": SOURCE, "outcome": "rejected", "reason": "x", "cursor": "ndl_1"}, ["#/cursor"]),
]


async def test_a_body_that_cannot_be_is_a_422_that_points_at_it(shop: Caller, make: Make, rt: Runtime) -> None:
    """And nothing happens."""
    await make.order(order_id="ORD-1", status="paid_on_hold", reason="risk", source_id=SOURCE)
    resolve = f"/v1/notification-deliveries/{await waiting(make, confirmed=CONFIRMED)}/resolve"

    for path, body, expected in WRONG:
        answer = await shop.post(path.replace("RESOLVE", resolve), body)
        assert pointers(answer) == expected, (path, json.dumps(body))
    assert await audited(rt) == []


async def test_another_tenant_s_things_are_not_there_whatever_the_body(api: Caller, stranger: Caller, make: Make, rt: Runtime) -> None:
    """404 for everything, also with a body that cannot be; nothing happens."""
    await make.order(order_id="ORD-1", status="paid_on_hold")
    delivery = await waiting(make, confirmed=CONFIRMED)
    event_delivery = ids.show(ids.EVENT_DELIVERY, (await make.event_delivery(status="delivered"))["id"])
    paths = [
        "/v1/orders/ORD-1/release",
        "/v1/orders/ORD-1/cancel",
        f"/v1/notification-deliveries/{delivery}/resolve",
        f"/v1/notification-deliveries/{delivery}/replay",
        f"/v1/event-deliveries/{event_delivery}/redeliver",
    ]

    for path in paths:
        for body in ({}, {"reason": "x", "decision": "apply"}):
            assert problem(await stranger.post(path, body)) == (404, "not-found"), path
    for path in (
        "/v1/orders/ORD-9/release",
        "/v1/orders/a%20b/cancel",
        "/v1/notification-deliveries/ndl_1/resolve",
        "/v1/event-deliveries/x/redeliver",
    ):
        assert problem(await api.post(path, {"reason": "x", "decision": "apply"})) == (404, "not-found"), path
    assert await audited(rt) == []


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [("money", ["release", "cancel", "resolve"]), ("write", ["replay", "redeliver", "replay_many"]), ("read", []), ("admin", [])],
)
async def test_each_act_needs_its_scope(api: Caller, make: Make, rt: Runtime, scope: str, allowed: list[str]) -> None:
    """`money` for what moves orders and money, `write` for running and sending again."""
    await make.order(order_id="ORD-1", status="paid_on_hold", source_id=SOURCE)
    delivery = await waiting(make, confirmed=CONFIRMED)
    event_delivery = ids.show(ids.EVENT_DELIVERY, (await make.event_delivery(status="delivered", delivered_at=ago(hours=1)))["id"])
    caller = Caller(api.http, (await tenants.create_key(rt.db, TENANT, [scope])).key)
    acts = {
        "release": ("/v1/orders/ORD-1/release", {"reason": ""}),
        "cancel": ("/v1/orders/ORD-1/cancel", {"reason": ""}),
        "resolve": (f"/v1/notification-deliveries/{delivery}/resolve", {}),
        "replay": (f"/v1/notification-deliveries/{delivery}/replay", {"reason": 1}),
        "replay_many": ("/v1/notification-deliveries/replay", {}),
        "redeliver": (f"/v1/event-deliveries/{event_delivery}/redeliver", {"reason": 1}),
    }

    answers = {name: (await caller.post(path, body)).status_code for name, (path, body) in acts.items()}

    assert {name for name, status in answers.items() if status != 403} == set(allowed)
    assert {status for status in answers.values() if status != 403} <= {422}
