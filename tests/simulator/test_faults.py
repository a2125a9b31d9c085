"""Answers that go wrong on request, over real sockets where a connection is cut."""

import asyncio

import httpx
import pytest

VALIDATOR = "/validator/api/validationserverAPI.php"
CREDENTIALS = {"store_id": "testbox", "store_passwd": "qwerty"}


def refund_of(paid: dict) -> dict[str, str]:
    return {"bank_tran_id": paid["bank_tran_id"], "refund_trans_id": "R-1", "refund_amount": "40.00", "refund_remarks": "late"}


async def ask(provider, val_id: str):
    return await provider.client.get(VALIDATOR, params=CREDENTIALS | {"val_id": val_id})


@pytest.mark.parametrize(
    ("kind", "status", "begins"),
    [("html", 200, "<html>"), ("empty", 200, ""), ("status500", 500, "Internal"), ("apiconnect", 200, '{"APIConnect": "FAILED"}')],
)
async def test_an_unreadable_answer_records_nothing(provider, kind: str, status: int, begins: str) -> None:
    """The next question after the fault is still the first one: VALID, not VALIDATED."""
    paid = await provider.pay()
    await provider.fault(path="validator", kind=kind)

    broken = await ask(provider, paid["val_id"])

    assert broken.status_code == status
    assert broken.text.startswith(begins)
    assert bool(broken.text) == bool(begins)
    assert (await provider.validate(paid["val_id"]))["status"] == "VALID"


async def test_apiconnect_says_what_it_was_told(provider) -> None:
    """Every word but DONE says nothing about the payment."""
    await provider.fault(path="query", kind="apiconnect", value="REQUEST_FROM_INVALID_SOURCE 203.0.113.9")

    assert await provider.query(tran_id="ORD-1") == {"APIConnect": "REQUEST_FROM_INVALID_SOURCE 203.0.113.9"}


async def test_a_fault_counts_down_and_waits_for_its_order(provider) -> None:
    """`times` answers of the named path about the named order go wrong, no other."""
    one, two = await provider.pay(tran_id="ORD-1"), await provider.pay(tran_id="ORD-2")
    await provider.fault(path="validator", kind="invalid_transaction", times=2, tran_id="ORD-1")

    answers = [(await provider.validate(paid["val_id"]))["status"] for paid in (two, one, one, one)]

    assert answers == ["VALID", "INVALID_TRANSACTION", "INVALID_TRANSACTION", "VALID"]
    assert (await provider.state())["faults"] == []


async def test_a_fault_without_count_stays_until_it_is_deleted(provider) -> None:
    """`times` null means always; deleting the faults ends it."""
    paid = await provider.pay()
    await provider.fault(path="validator", kind="pending", times=None)

    stuck = [await provider.validate(paid["val_id"]) for _ in range(3)]
    await provider.client.delete("/simulator/faults")

    assert [answer["status"] for answer in stuck] == ["PENDING"] * 3
    assert (await provider.validate(paid["val_id"]))["status"] == "VALID"


async def test_a_query_may_lose_its_list_or_its_order(provider) -> None:
    """`element` as one object, and a list the other way round, are both seen."""
    await provider.pay(status="FAILED")
    paid = await provider.pay()
    await provider.fault(path="query", kind="element_dict")
    await provider.fault(path="query", kind="reversed")

    as_object, turned = await provider.query(tran_id="ORD-1"), await provider.query(tran_id="ORD-1")

    assert as_object["element"]["val_id"] == paid["val_id"]
    assert [one["status"] for one in turned["element"]] == ["VALID", "FAILED"]


@pytest.mark.parametrize(("kind", "word"), [("processing", "PROCESSING"), ("pending", "PENDING")])
async def test_a_query_may_not_know_yet(provider, kind: str, word: str) -> None:
    """Every element says so, and none names a val_id."""
    await provider.pay()
    await provider.fault(path="query", kind=kind)

    answer = await provider.query(tran_id="ORD-1")

    assert [(one["status"], one["val_id"]) for one in answer["element"]] == [(word, "")]


async def test_a_query_may_deny_a_paid_order(provider) -> None:
    """Count 0 and INVALID, as for an order that it never saw."""
    await provider.pay()
    await provider.fault(path="query", kind="invalid_transaction")

    answer = await provider.query(tran_id="ORD-1")

    assert (answer["no_of_trans_found"], answer["element"]) == (0, [{"tran_id": "ORD-1", "status": "INVALID"}])


async def test_members_of_an_answer_can_be_replaced(provider) -> None:
    """Another amount, another order or a flipped type can be put into any answer, in every element of a list."""
    paid = await provider.pay()
    await provider.fault(path="validator", kind="fields", fields={"currency_amount": "1.00", "offer_avail": "1", "value_a": None})
    await provider.fault(path="query", kind="fields", fields={"amount": 100})

    answer, listed = await provider.validate(paid["val_id"]), await provider.query(tran_id="ORD-1")

    assert (answer["currency_amount"], answer["offer_avail"]) == ("1.00", "1")
    assert "value_a" not in answer
    assert listed["element"][0]["amount"] == 100
    assert (await provider.validate(paid["val_id"]))["status"] == "VALIDATED"


async def test_a_fault_does_not_hide_wrong_credentials(provider) -> None:
    """An answer that is not DONE is not reshaped."""
    await provider.fault(path="query", kind="processing")

    assert await provider.query(tran_id="ORD-1", store_passwd="wrong") == {"APIConnect": "FAILED"}


async def test_a_reset_happens_before_anything_is_recorded(served) -> None:
    """The client sees its connection cut; the next question is the first."""
    paid = await served.pay()
    await served.fault(path="validator", kind="reset")

    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await ask(served, paid["val_id"])

    assert (await served.validate(paid["val_id"]))["status"] == "VALID"
    assert (await served.state())["validator"]["calls"] == 2


async def test_a_connection_is_cut_with_a_reset_and_not_with_an_orderly_end(served) -> None:
    """The client's socket reports ECONNRESET, as when a provider's machine dies."""
    await served.fault(path="query", kind="reset")
    url = served.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)

    writer.write(b"GET /validator/api/merchantTransIDvalidationAPI.php?tran_id=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await reader.read()

    writer.close()


async def test_a_lost_answer_leaves_the_question_recorded(served) -> None:
    """The validation reached the provider, its answer did not: the next one says VALIDATED on first effective use."""
    paid = await served.pay()
    await served.fault(path="validator", kind="record_then_reset")

    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await ask(served, paid["val_id"])

    assert (await served.validate(paid["val_id"]))["status"] == "VALIDATED"


async def test_a_refund_whose_answer_was_lost_happened_all_the_same(served) -> None:
    """Money moved, its refund_ref_id is unknown, and asking again says only `processing`."""
    paid = await served.pay()
    await served.fault(path="refund", kind="record_then_reset")

    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await served.query(**refund_of(paid))

    assert (await served.query(**refund_of(paid)))["status"] == "processing"
    assert (await served.state())["refunds"]["accepted"] == 1


@pytest.mark.parametrize("kind", ["record_then_hang", "record_then_status500"])
async def test_what_was_asked_may_be_done_and_its_answer_lost(served, kind: str) -> None:
    """The session is open and the money moved, once for the one refund_trans_id, whatever became of the answers."""
    paid = await served.pay()
    refund = CREDENTIALS | refund_of(paid)
    patience = httpx.Timeout(10, read=0.2)
    await served.fault(path="init", kind=kind)
    await served.fault(path="refund", kind=kind)

    calls = [served.client.post("/gwprocess/v4/api.php", data=served.form(), timeout=patience)]
    calls += [served.client.get("/validator/api/merchantTransIDvalidationAPI.php", params=refund, timeout=patience)]
    lost = await asyncio.gather(*calls, return_exceptions=True)
    await until(served, hanging=0)

    expected = httpx.ReadTimeout if kind == "record_then_hang" else httpx.Response
    assert [type(answer) for answer in lost] == [expected] * 2
    assert (await served.state())["sessions"] == 1
    assert (await served.query(**refund_of(paid)))["status"] == "processing"
    assert (await served.state())["refunds"]["accepted_by_refund_trans_id"] == {"R-1": 1}


async def test_an_answer_may_come_late_after_what_was_asked_is_done(provider) -> None:
    """A client that waits gets the true answer in the end."""
    paid = await provider.pay()
    await provider.fault(path="refund", kind="record_then_hang", seconds=0.05)

    assert (await provider.query(**refund_of(paid)))["status"] == "success"


async def test_a_provider_may_refuse_for_reasons_of_its_own(provider) -> None:
    """`failed` says no in the words of each call, and nothing happens."""
    paid = await provider.pay()
    for path in ("init", "refund", "validator"):
        await provider.fault(path=path, kind="failed", value="Store is sleeping")

    init, refund = await provider.init(), await provider.query(**refund_of(paid))
    validated = await provider.validate(paid["val_id"])
    accepted = await provider.query(**refund_of(paid))
    await provider.fault(path="refund_query", kind="failed", value="Card closed")
    asked = await provider.query(refund_ref_id=accepted["refund_ref_id"])

    assert (init["status"], init["failedreason"], init["GatewayPageURL"]) == ("FAILED", "Store is sleeping", "")
    assert (refund["status"], refund["errorReason"], refund["refund_ref_id"]) == ("failed", "Store is sleeping", "")
    assert (validated["status"], (await provider.validate(paid["val_id"]))["status"]) == ("FAILED", "VALID")
    assert accepted["status"] == "success"
    assert (asked["status"], asked["errorReason"]) == ("cancelled", "Card closed")
    assert (await provider.state())["sessions"] == 0


async def test_an_answer_that_hangs_goes_on_when_released(served) -> None:
    """Deleting the faults releases it; then it is answered and recorded as usual."""
    paid = await served.pay()
    await served.fault(path="validator", kind="hang")

    async with asyncio.TaskGroup() as group:
        answer = group.create_task(served.validate(paid["val_id"]))
        await until(served, hanging=1)
        await served.client.delete("/simulator/faults")

    assert answer.result()["status"] == "VALID"
    assert (await served.state())["hanging"] == 0


async def test_a_client_that_gives_up_leaves_nothing_recorded(served) -> None:
    """When the client goes while the answer hangs, the question was never answered."""
    paid = await served.pay()
    await served.fault(path="validator", kind="hang")

    with pytest.raises(httpx.ReadTimeout):
        await served.client.get(VALIDATOR, params=CREDENTIALS | {"val_id": paid["val_id"]}, timeout=httpx.Timeout(10, read=0.2))
    await until(served, hanging=0)

    assert (await served.validate(paid["val_id"]))["status"] == "VALID"


async def test_without_a_socket_a_cut_connection_is_an_error_of_the_call(provider) -> None:
    """An application that is called in the same process raises what a client would see."""
    await provider.fault(path="query", kind="reset")

    with pytest.raises(ConnectionResetError):
        await provider.query(tran_id="ORD-1")


async def test_an_order_with_an_answer_by_session_may_be_denied_too(provider) -> None:
    """The flat answer has no list; it denies the transaction as the validator would."""
    key = (await provider.init())["sessionkey"]
    await provider.fault(path="query", kind="invalid_transaction")
    await provider.fault(path="query", kind="element_dict")

    denied, untouched = await provider.query(sessionkey=key), await provider.query(sessionkey=key)

    assert denied == {"status": "INVALID_TRANSACTION", "APIConnect": "DONE"}
    assert untouched["status"] == "PROCESSING"


async def test_a_slow_answer_comes_after_its_seconds(provider) -> None:
    """`hang` with `seconds` is a slow answer."""
    paid = await provider.pay()
    await provider.fault(path="validator", kind="hang", seconds=0.05)

    assert (await provider.validate(paid["val_id"]))["status"] == "VALID"


@pytest.mark.parametrize("body", [{"path": "nowhere", "kind": "html"}, {"path": "query", "kind": "magic"}, {"path": "query"}])
async def test_a_fault_that_does_not_exist_is_refused(provider, body: dict) -> None:
    """A misspelt fault is an error and not a test that passes for nothing."""
    response = await provider.client.post("/simulator/faults", json=body)

    assert response.status_code == 422


async def until(provider, **wanted: int) -> None:
    """Ask for the state until it is as wanted; the test's own limit ends it otherwise."""
    while {name: (await provider.state())[name] for name in wanted} != wanted:
        pass
