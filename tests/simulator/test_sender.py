"""The sender: knobs, repeatable chance, counts, and forgeries that keep or lose their hash."""

import hashlib
from dataclasses import replace
from urllib.parse import parse_qsl

import pytest

from ipn_gateway.simulator.forgeries import FORGERIES, kinds_for
from ipn_gateway.simulator.sender import Knobs, Sender, plan
from ipn_gateway.simulator.sslcommerz import HASH_FIELDS, sign
from ipn_gateway.simulator.world import seeded

PASSWD = "qwerty"
BASE = {"tran_id": "ORD-1", "amount": "100.00", "bank_tran_id": "B1", "tran_date": "2026-07-14 12:02:58", "store_id": "testbox"}
PAID = sign(
    BASE | {"val_id": "V1", "status": "VALID", "currency_amount": "100.00", "error": "", "risk_level": "0", "risk_title": "Safe"}, PASSWD
)
CANCELLED = sign(BASE | {"status": "CANCELLED", "currency_amount": "100.00", "error": "Cancelled by User"}, PASSWD)
BAD_DAY = Knobs(duplicate=0.5, reorder=0.3, delay_seconds=0.2, lose=0.3, forge=0.5)


def hash_matches(fields: dict[str, str]) -> bool:
    """Apply the public rule, as a listener without further rules would apply it."""
    secret = hashlib.md5(PASSWD.encode()).hexdigest()
    pairs = {name: fields[name] for name in fields["verify_key"].split(",")} | {"store_passwd": secret}
    text = "&".join(f"{name}={value}" for name, value in sorted(pairs.items()))
    return hashlib.md5(text.encode()).hexdigest() == fields["verify_sign"]


def test_one_seed_gives_one_plan() -> None:
    """The same seed and notifications give the same sends; another seed gives others."""
    one, same, other = ([plan(PAID, BAD_DAY, chance) for _ in range(50)] for chance in (seeded(7), seeded(7), seeded(8)))

    assert one == same
    assert one != other


def test_knobs_do_not_shift_each_other() -> None:
    """Turning one knob leaves what the others decide as it was: each plan draws the same number of times."""
    calm, forging = seeded(7), seeded(7)
    without = [plan(PAID, replace(BAD_DAY, forge=0), calm) for _ in range(50)]
    with_forgeries = [plan(PAID, BAD_DAY, forging) for _ in range(50)]

    assert [(one.lost, one.held) for one in without] == [(one.lost, one.held) for one in with_forgeries]


def test_a_good_day_sends_each_notification_once() -> None:
    """All knobs at 0: one genuine shot, at once, not held."""
    calm = plan(PAID, Knobs(), seeded(1))

    assert [(shot.kind, shot.wait_seconds) for shot in calm.shots] == [("genuine", 0.0)]
    assert (calm.lost, calm.held) == (False, False)


def test_the_worst_day_does_everything() -> None:
    """All knobs at 1: what is lost is not sent, not even twice; a forgery goes out all the same."""
    lost = plan(PAID, Knobs(lose=1, duplicate=1, reorder=1, forge=1), seeded(1))
    kept = plan(PAID, Knobs(duplicate=1, reorder=1, forge=1, delay_seconds=3), seeded(1))

    assert (lost.lost, lost.held, len(lost.shots)) == (True, False, 1)
    assert [shot.kind for shot in kept.shots[:2]] == ["genuine", "duplicate"]
    assert kept.shots[0].body == kept.shots[1].body
    assert kept.held
    assert all(0 <= shot.wait_seconds <= 3 for shot in kept.shots)


@pytest.mark.parametrize("bad", [{"lose": 1.1}, {"forge": -0.1}, {"delay_seconds": -1}])
def test_knobs_out_of_range_are_refused(bad: dict) -> None:
    """A probability is 0 to 1, and a delay is not negative."""
    with pytest.raises(ValueError, match="must"):
        Knobs(**bad)


MATCHING = {"folded_status", "folded_order", "swallowed_amount", "odd_key", "doubled_field"}


@pytest.mark.parametrize("kind", FORGERIES)
def test_each_forgery_keeps_or_loses_its_hash_as_described(kind: str) -> None:
    """Foldings, odd keys and swallowed or doubled fields verify under the public rule; crude alterations do not."""
    pairs = FORGERIES[kind](CANCELLED)

    matches = "verify_sign" in dict(pairs) and hash_matches(dict(reversed(pairs)))
    assert matches == (kind in MATCHING)
    assert pairs != list(CANCELLED.items())


def test_a_folded_status_turns_a_cancellation_into_a_payment() -> None:
    """VALID is posted and not covered by the hash, which is unchanged."""
    forged = dict(FORGERIES["folded_status"](CANCELLED))

    assert (forged["status"], forged["error"]) == ("VALID", "Cancelled by User&status=CANCELLED")
    assert "status" not in forged["verify_key"].split(",")
    assert forged["verify_sign"] == CANCELLED["verify_sign"]


def test_a_paid_notification_cannot_hide_its_status_but_its_order() -> None:
    """In a paid one other names stand between `error` and `status`; `tran_date` and `tran_id` are always neighbours."""
    assert "folded_status" not in kinds_for(PAID)
    assert "folded_status" in kinds_for(CANCELLED)
    assert hash_matches(dict(FORGERIES["folded_order"](PAID)))


async def test_payments_are_announced_to_the_listener(start, listener) -> None:
    """The genuine notification arrives byte for byte as signed, and is counted with the answer's status."""
    provider = await start(ipn_url=listener.url)
    paid = await provider.pay(send_ipn=True)
    await provider.simulator.drained(seconds=5)

    state = await provider.state()
    assert listener.posts() == [paid]
    assert (state["ipns"]["sent"], state["ipns"]["acknowledged"], state["ipns"]["statuses"]) == (1, 1, {"200": 1})


async def test_a_duplicate_is_the_same_bytes(start, listener) -> None:
    """Two POSTs with equal bodies; one is counted as sent, one as duplicate."""
    provider = await start(ipn_url=listener.url, knobs=Knobs(duplicate=1, delay_seconds=0.02))
    await provider.pay(send_ipn=True)
    await provider.simulator.drained(seconds=5)

    ipns = (await provider.state())["ipns"]
    assert listener.bodies[0] == listener.bodies[1]
    assert (len(listener.bodies), ipns["sent"], ipns["duplicates"], ipns["acknowledged"]) == (2, 1, 1, 2)


async def test_a_lost_notification_never_arrives(start, listener) -> None:
    """It is counted as lost; only a query finds the payment."""
    provider = await start(ipn_url=listener.url, knobs=Knobs(lose=1))
    await provider.pay(send_ipn=True)
    await provider.simulator.drained(seconds=5)

    assert listener.bodies == []
    assert (await provider.state())["ipns"]["lost"] == 1
    assert (await provider.query(tran_id="ORD-1"))["element"][0]["status"] == "VALID"


async def test_a_held_notification_arrives_after_the_next_one(start, listener) -> None:
    """Reordered means: a later notification overtakes it, however long that takes."""
    provider = await start(ipn_url=listener.url, knobs=Knobs(reorder=1), ipn_hold_seconds=60)
    await provider.pay(tran_id="ORD-1", send_ipn=True)
    provider.simulator.sender.knobs = Knobs()
    await provider.pay(tran_id="ORD-2", send_ipn=True)
    await provider.simulator.drained(seconds=5)

    assert [post["tran_id"] for post in listener.posts()] == ["ORD-2", "ORD-1"]
    assert (await provider.state())["ipns"]["reordered"] == 1


async def test_a_held_notification_does_not_wait_for_ever(start, listener) -> None:
    """When nothing overtakes it, it goes by itself or when drained."""
    provider = await start(ipn_url=listener.url, knobs=Knobs(reorder=1), ipn_hold_seconds=60)
    await provider.pay(send_ipn=True)

    assert await provider.simulator.drained(seconds=5)
    assert len(listener.bodies) == 1


async def test_what_is_still_to_be_sent_at_the_end_is_given_up() -> None:
    """Shutting down waits for open sends for a while, and never longer."""
    sender = Sender(Knobs(delay_seconds=3600), seeded(1))

    async with sender.running(drain_seconds=0.01):
        sender.send("http://127.0.0.1:9/", PAID)
        assert not await sender.drained(seconds=0.01)

    assert await sender.drained(seconds=0)
    assert sender.counts.sent == 0


async def test_forgeries_go_beside_the_genuine_one_and_are_counted_apart(start, listener) -> None:
    """Their kinds and the statuses of their answers are counted, and never as sent or acknowledged."""
    provider = await start(ipn_url=listener.url, knobs=Knobs(forge=1))
    listener.status = 401
    for number in range(20):
        await provider.pay(tran_id=f"ORD-{number}", send_ipn=True)
    await provider.simulator.drained(seconds=5)

    ipns = (await provider.state())["ipns"]
    assert len(listener.bodies) == 40
    assert (ipns["sent"], ipns["acknowledged"], sum(ipns["forged"].values())) == (20, 0, 20)
    assert len(ipns["forged"]) > 3
    assert ipns["statuses"] == ipns["forged_statuses"] == {"401": 20}


async def test_a_listener_that_cannot_be_reached_is_recorded_and_not_tried_again(start) -> None:
    """No retry schedule is published, so there is none; the failure is counted by its class."""
    provider = await start(ipn_url="http://127.0.0.1:9/ipn/shop")
    await provider.pay(send_ipn=True)
    await provider.simulator.drained(seconds=5)

    ipns = (await provider.state())["ipns"]
    assert (ipns["sent"], ipns["acknowledged"], ipns["failed"]) == (1, 0, 1)
    assert ipns["statuses"] == {"ClientConnectorError": 1}


async def test_a_notification_can_be_sent_again_altered(provider, listener) -> None:
    """The answer of the listener comes back; what is altered is signed anew unless told otherwise."""
    paid = await provider.pay(ipn_url=listener.url)
    altered = {"ipn_url": listener.url, "overrides": {"amount": "69"}, "remove": ["error"]}

    again = await provider.client.post("/simulator/ipn", json={"ipn_url": listener.url, "times": 2})
    await provider.client.post("/simulator/ipn", json=altered)
    await provider.client.post("/simulator/ipn", json=altered | {"resign": False})

    first, second, signed, unsigned = listener.posts()
    assert [answer["status"] for answer in again.json()["answers"]] == [200, 200]
    assert again.json()["answers"][0]["body"] == "taken"
    assert first == second == paid
    assert (signed["amount"], "error" in signed, hash_matches(signed)) == ("69", False, True)
    assert unsigned["verify_sign"] == paid["verify_sign"]
    assert (await provider.state())["ipns"]["forged"] == {"altered": 2}


async def test_a_forgery_of_a_kind_can_be_asked_for(provider, listener) -> None:
    """It is made from the named order's newest attempt."""
    await provider.pay(tran_id="ORD-1", status="CANCELLED")
    await provider.pay(tran_id="ORD-2")

    await provider.client.post("/simulator/ipn", json={"ipn_url": listener.url, "tran_id": "ORD-1", "forge": "folded_status"})

    assert [(post["tran_id"], post["status"]) for post in listener.posts()] == [("ORD-1", "VALID")]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"tran_id": "NOBODY"}, 404), ({}, 422), ({"ipn_url": "http://x.test", "forge": "magic"}, 422), ({"colour": "red"}, 422)],
)
async def test_a_notification_that_cannot_be_sent_is_refused(provider, body: dict, status: int) -> None:
    """An unknown attempt, no listener, an unknown forgery and an unknown member are errors."""
    await provider.pay()

    assert (await provider.client.post("/simulator/ipn", json=body)).status_code == status


def test_every_forgery_can_be_encoded_and_read_back() -> None:
    """The body is a form whose pairs are those of the forgery."""
    chance = seeded(3)
    shots = [shot for _ in range(200) for shot in plan(CANCELLED, Knobs(forge=1), chance).shots if shot.kind != "genuine"]

    assert {shot.kind for shot in shots} == set(FORGERIES)
    for shot in shots:
        pairs = parse_qsl(shot.body.decode(), keep_blank_values=True)
        assert pairs == FORGERIES[shot.kind](CANCELLED)
        assert any(name not in HASH_FIELDS for name, _ in pairs)
