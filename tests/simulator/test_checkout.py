"""The hosted payment page and the control API's payments."""

from html.parser import HTMLParser

import pytest


class Form(HTMLParser):
    """The first form of a page: where it goes and its hidden fields."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = dict(attrs)
        if tag == "form":
            self.action = have.get("action")
        if tag == "input":
            self.fields[have["name"] or ""] = have["value"] or ""


async def act(provider, key: str, action: str):
    return await provider.client.post(f"/pay/{key}", data={"action": action})


@pytest.mark.parametrize(
    ("action", "status", "way_back"),
    [
        ("pay", "VALID", "http://shop.test/success"),
        ("risky", "VALID", "http://shop.test/success"),
        ("fail", "FAILED", "http://shop.test/fail"),
        ("cancel", "CANCELLED", "http://shop.test/cancel"),
        ("expire", "EXPIRED", "http://shop.test/fail"),
        ("unattempted", "UNATTEMPTED", None),
    ],
)
async def test_every_button_notifies_and_sends_the_browser_back(provider, listener, action: str, status: str, way_back: str | None) -> None:
    """The listener and the browser get the same signed fields, each on its own way; who leaves is sent nowhere."""
    key = (await provider.init(ipn_url=listener.url, value_a="a & <b>"))["sessionkey"]

    response = await act(provider, key, action)
    await provider.simulator.drained(seconds=5)

    form = Form(response.text)
    posted = listener.posts()[0]
    assert (posted["status"], posted["tran_id"], posted["value_a"]) == (status, "ORD-1", "a & <b>")
    assert posted.get("risk_level", "0") == ("1" if action == "risky" else "0")
    assert (form.action, form.fields) == ((way_back, posted) if way_back else (None, {}))


async def test_a_declined_customer_may_try_again_and_pay_twice(provider, listener) -> None:
    """Three attempts under one tran_id: one failed, two paid with different val_ids, all announced."""
    key = (await provider.init(ipn_url=listener.url))["sessionkey"]

    for action in ("fail", "pay", "pay"):
        await act(provider, key, action)
    await provider.simulator.drained(seconds=5)

    elements = (await provider.query(tran_id="ORD-1"))["element"]
    assert [one["status"] for one in elements] == ["FAILED", "VALID", "VALID"]
    assert len({one["val_id"] for one in elements}) == 3
    assert len(listener.bodies) == 3
    assert (await provider.state())["payments"] == {"FAILED": 1, "VALID": 2}


async def test_the_page_asks_for_the_sum_and_escapes_what_the_merchant_wrote(provider) -> None:
    """Product and order come from outside, so they are escaped; every way to end has its button."""
    key = (await provider.init(product_name="<script>alert(1)</script>", total_amount="12.5", currency="USD"))["sessionkey"]

    page = (await provider.client.get(f"/pay/{key}")).text

    assert "12.50 USD" in page
    assert "<script>" not in page
    assert all(f'value="{action}"' in page for action in ("pay", "risky", "fail", "cancel", "unattempted", "expire"))


async def test_an_expired_session_takes_no_more_attempts(provider) -> None:
    """After the time ran out the page is gone, and nothing more is recorded."""
    key = (await provider.init())["sessionkey"]
    await act(provider, key, "expire")

    late = await act(provider, key, "pay")

    assert late.status_code == (await provider.client.get(f"/pay/{key}")).status_code == 410
    assert (await provider.state())["payments"] == {"EXPIRED": 1}


async def test_an_unknown_session_or_button_changes_nothing(provider) -> None:
    """404 for a session that was never opened, 400 for a button that is not there."""
    key = (await provider.init())["sessionkey"]

    assert (await provider.client.get("/pay/unknown")).status_code == 404
    assert (await act(provider, "unknown", "pay")).status_code == 404
    assert (await act(provider, key, "steal")).status_code == 400
    assert (await provider.state())["payments"] == {}


async def test_the_index_lists_sessions_and_attempts(provider) -> None:
    """A person who opens the simulator sees what happened."""
    key = (await provider.init())["sessionkey"]
    paid = await provider.pay()

    page = (await provider.client.get("/")).text

    assert f"/pay/{key}" in page
    assert paid["val_id"] in page


async def test_a_payment_of_a_session_takes_its_amount_and_values(provider, listener) -> None:
    """Without a browser: what is left out comes from the order's newest session, its listener too."""
    await provider.init(ipn_url=listener.url, total_amount="20.00", currency="USD", value_d="sess-1")

    paid = await provider.pay(amount=None, send_ipn=True)
    await provider.simulator.drained(seconds=5)

    assert (paid["currency_amount"], paid["currency_type"], paid["amount"], paid["value_d"]) == ("20.00", "USD", "2468.00", "sess-1")
    assert listener.posts() == [paid]
    assert (await provider.client.get("/simulator/payments", params={"tran_id": "ORD-1"})).json() == [paid]


@pytest.mark.parametrize("bad", [{"amount": None}, {"currency": "XXX"}, {"store_id": "nobody"}, {"card": "gold"}, {"amount": "0"}])
async def test_a_payment_that_cannot_be_made_is_refused(provider, bad: dict) -> None:
    """A missing amount or an unknown word is an error, and no attempt is recorded."""
    body = {"tran_id": "ORD-9", "amount": "10.00"} | bad

    assert (await provider.client.post("/simulator/payments", json=body)).status_code == 422
    assert (await provider.state())["payments"] == {}


async def test_a_status_of_ones_own_is_sent_like_a_cancellation(provider) -> None:
    """An unknown word reaches the listener and the query with the 16 fields of a negative."""
    odd = await provider.pay(status="ON_THE_MOON")

    assert len(odd) == 16 + 3
    assert (await provider.query(tran_id="ORD-1"))["element"][0]["status"] == "ON_THE_MOON"


async def test_knobs_can_be_turned_while_it_runs(provider) -> None:
    """From then on every notification is lost; the control API says when nothing is left to be sent."""
    await provider.client.put("/simulator/knobs", json={"lose": 1})
    await provider.pay(send_ipn=True, ipn_url="http://127.0.0.1:9/")

    assert (await provider.client.post("/simulator/drain")).json() == {"drained": True}
    assert (await provider.state())["ipns"]["lost"] == 1


async def test_an_unknown_refund_cannot_be_decided(provider) -> None:
    """404, and nothing happens."""
    response = await provider.client.post("/simulator/refunds", json={"refund_ref_id": "none", "status": "refunded"})

    assert response.status_code == 404
