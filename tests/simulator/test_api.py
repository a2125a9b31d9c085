"""The provider's API: session init, validator, transaction query and refund, with their quirks."""

from decimal import Decimal

import pytest


async def test_a_session_init_gives_a_page_to_send_the_customer_to(provider) -> None:
    """SUCCESS comes with a session key, a page URL and text for numbers."""
    answer = await provider.init()

    assert (answer["status"], answer["failedreason"]) == ("SUCCESS", "")
    assert answer["GatewayPageURL"].endswith(f"/pay/{answer['sessionkey']}")
    assert len(answer["sessionkey"]) <= 50
    assert answer["is_direct_pay_enable"] == "0"
    assert (await provider.client.get(answer["GatewayPageURL"])).status_code == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store_passwd": "wrong"}, "Credential"),
        ({"store_id": "nobody"}, "Credential"),
        ({"cus_phone": ""}, "cus_phone is missing"),
        ({"emi_option": None}, "emi_option is missing"),
        ({"tran_id": "x" * 31}, "tran_id is longer than 30"),
        ({"success_url": "http://shop.test/" + "x" * 255}, "success_url is longer than 255"),
        ({"cancel_url": "javascript:alert(1)"}, "cancel_url is not an http(s) URL"),
        ({"total_amount": "9.99"}, "10.00 to 500000.00"),
        ({"total_amount": "500000.01"}, "10.00 to 500000.00"),
        ({"total_amount": "0.08", "currency": "USD"}, "10.00 to 500000.00"),
        ({"total_amount": "1e3"}, "not a decimal number"),
        ({"total_amount": "-20"}, "not a decimal number"),
        ({"total_amount": "10.001"}, "not a decimal number"),
        ({"currency": "XXX"}, "currency is not supported"),
        ({"shipping_method": "balloon"}, "shipping_method is not"),
        ({"product_profile": "air"}, "product_profile is not"),
    ],
)
async def test_a_bad_session_init_fails_with_a_reason(provider, changes: dict, reason: str) -> None:
    """A refused init is FAILED with status 200, says why, and opens nothing."""
    answer = await provider.init(**changes)

    assert answer["status"] == "FAILED"
    assert reason in answer["failedreason"]
    assert (await provider.state())["sessions"] == 0


@pytest.mark.parametrize(("amount", "currency"), [("10.00", "BDT"), ("500000.00", "BDT"), ("0.10", "USD"), ("4051.86", "USD")])
async def test_the_limits_hold_after_conversion(provider, amount: str, currency: str) -> None:
    """The smallest and largest amounts are accepted; other currencies are converted to BDT first."""
    assert (await provider.init(total_amount=amount, currency=currency))["status"] == "SUCCESS"


async def test_a_multipart_init_and_a_repeated_order_are_accepted(provider) -> None:
    """Some libraries post multipart; a second session of one tran_id moves no money and is tolerated."""
    form = {name: (None, value) for name, value in provider.form().items()}
    first = await provider.client.post("/gwprocess/v4/api.php", files=form)

    second = await provider.init()

    assert first.json()["status"] == second["status"] == "SUCCESS"
    assert first.json()["sessionkey"] != second["sessionkey"]
    assert (await provider.state())["inits"] == {"calls": 2, "by_tran_id": {"ORD-1": 2}}


async def test_the_validator_says_validated_from_the_second_question_on(provider) -> None:
    """Asking is harmless: only `status` changes, and `validated_on` stays what it was."""
    paid = await provider.pay(values=["a", "b", "c", "d"])

    first, second = await provider.validate(paid["val_id"]), await provider.validate(paid["val_id"])

    assert (first["status"], second["status"]) == ("VALID", "VALIDATED")
    assert first | {"status": "VALIDATED"} == second
    assert (first["APIConnect"], first["amount"], first["store_amount"], first["value_d"]) == ("DONE", "100.00", "97.5", "d")
    assert (first["offer_avail"], first["isTokeizeSuccess"]) == (1, 0)
    assert (await provider.state())["validator"] == {"calls": 2, "by_val_id": {paid["val_id"]: 2}}


async def test_parameter_names_are_read_without_regard_to_case(provider) -> None:
    """Plugins write Store_Id and Store_Passwd."""
    paid = await provider.pay()
    params = {"Val_Id": paid["val_id"], "Store_Id": "testbox", "STORE_PASSWD": "qwerty", "v": "1", "format": "json"}

    answer = await provider.client.get("/validator/api/validationserverAPI.php", params=params)

    assert answer.json()["status"] == "VALID"


async def test_the_validator_knows_only_the_stores_own_payments(start) -> None:
    """An invented val_id and another store's end the same way; wrong credentials say nothing about the payment."""
    provider = await start(other_stores={"other": "pw"})
    theirs = await provider.pay(store_id="other")
    negative = await provider.pay(status="UNATTEMPTED")

    for val_id in (theirs["val_id"], "invented"):
        assert await provider.validate(val_id) == {"status": "INVALID_TRANSACTION", "APIConnect": "DONE"}
    assert negative["val_id"] == ""
    assert await provider.validate("") == {"APIConnect": "INVALID_REQUEST"}
    assert await provider.validate(theirs["val_id"], store_passwd="wrong") == {"APIConnect": "FAILED"}
    assert await provider.validate(theirs["val_id"], store_id="nobody") == {"APIConnect": "FAILED"}
    assert (await provider.validate(theirs["val_id"], store_id="other", store_passwd="pw"))["status"] == "VALID"


async def test_a_foreign_currency_is_settled_in_taka(provider) -> None:
    """`amount` and `currency` are the settlement, `currency_amount` and `currency_type` what the merchant asked."""
    paid = await provider.pay(amount="100.00", currency="USD", risk=True)

    answer = await provider.validate(paid["val_id"])

    assert (answer["amount"], answer["currency"]) == ("12340.00", "BDT")
    assert (answer["currency_amount"], answer["currency_type"], answer["currency_rate"]) == ("100.00", "USD", "123.4000")
    assert (answer["risk_level"], answer["risk_title"]) == ("1", "Not Safe")
    assert Decimal(answer["store_amount"]) == Decimal("12031.50")


async def test_identifiers_differ_within_one_second(provider) -> None:
    """Many payments in one second of a standing clock have different val_id and bank_tran_id, with its stamp in front."""
    paid = [await provider.pay(tran_id=f"ORD-{number}") for number in range(50)]

    for name in ("val_id", "bank_tran_id"):
        assert len({one[name] for one in paid}) == 50
        assert all(one[name].startswith("260714120335") for one in paid)
    assert {one["tran_date"] for one in paid} == {"2026-07-14 12:03:30"}


async def test_an_identifier_that_was_drawn_before_is_drawn_again(provider) -> None:
    """Even when chance repeats itself within a second, no two payments share a val_id."""
    provider.simulator.bank.chance.seed(1)
    first = await provider.pay()
    provider.simulator.bank.chance.seed(1)

    second = await provider.pay()

    assert (first["val_id"] != second["val_id"], first["bank_tran_id"] != second["bank_tran_id"]) == (True, True)


async def test_an_unknown_order_still_has_one_element(provider) -> None:
    """Count 0, and an element INVALID all the same."""
    assert await provider.query(tran_id="NOBODY") == {
        "APIConnect": "DONE",
        "no_of_trans_found": 0,
        "element": [{"tran_id": "NOBODY", "status": "INVALID"}],
    }


async def test_an_open_session_is_processing_and_its_count_is_text(provider) -> None:
    """A session nobody paid yet is one PROCESSING element; by session key it is one flat object."""
    key = (await provider.init())["sessionkey"]

    by_order, by_session = await provider.query(tran_id="ORD-1"), await provider.query(sessionkey=key)

    assert by_order["no_of_trans_found"] == "1"
    assert by_order["element"] == [{"tran_id": "ORD-1", "status": "PROCESSING", "val_id": ""}]
    assert by_session == {"APIConnect": "DONE", "sessionkey": key, "tran_id": "ORD-1", "status": "PROCESSING", "val_id": ""}
    assert (await provider.query(sessionkey="other"))["status"] == "INVALID"


async def test_attempts_of_one_order_coexist(provider) -> None:
    """A failed and a paid attempt are both listed; the paid one is VALIDATED after the validator was asked."""
    key = (await provider.init())["sessionkey"]
    failed, paid = await provider.pay(status="FAILED"), await provider.pay()

    before = await provider.query(tran_id="ORD-1")
    await provider.validate(paid["val_id"])
    after = await provider.query(tran_id="ORD-1")

    assert before["no_of_trans_found"] == 2
    assert [(one["status"], one["val_id"]) for one in before["element"]] == [("FAILED", ""), ("VALID", paid["val_id"])]
    assert before["element"][0]["bank_tran_id"] == failed["bank_tran_id"]
    assert [one["status"] for one in after["element"]] == ["FAILED", "VALIDATED"]
    assert (await provider.query(sessionkey=key))["val_id"] == paid["val_id"]
    assert (await provider.state())["queries"] == {"calls": 3, "by_tran_id": {"ORD-1": 3}}


async def test_a_query_needs_credentials_and_something_to_look_for(provider) -> None:
    """Wrong credentials and an empty question have an APIConnect other than DONE and nothing else."""
    assert await provider.query(tran_id="ORD-1", store_passwd="wrong") == {"APIConnect": "FAILED"}
    assert await provider.query() == {"APIConnect": "INVALID_REQUEST"}


def refund_of(paid: dict, **changes: str) -> dict:
    return {"bank_tran_id": paid["bank_tran_id"], "refund_trans_id": "R-1", "refund_amount": "40.00", "refund_remarks": "late"} | changes


async def test_a_refund_is_accepted_once_and_done_when_asked_again(provider) -> None:
    """`success`, then `processing` for the same refund_trans_id; its query says processing, later refunded."""
    paid = await provider.pay()

    accepted = await provider.query(**refund_of(paid))
    repeated = await provider.query(**refund_of(paid))
    polls = [await provider.query(refund_ref_id=accepted["refund_ref_id"]) for _ in range(3)]

    assert (accepted["status"], accepted["trans_id"], accepted["errorReason"]) == ("success", "ORD-1", "")
    assert (repeated["status"], repeated["refund_ref_id"]) == ("processing", "")
    assert [poll["status"] for poll in polls] == ["processing", "refunded", "refunded"]
    assert polls[0]["refunded_on"] == ""
    assert polls[1]["refunded_on"] == "2026-07-14 12:03:35"
    assert (await provider.state())["refunds"] == {
        "calls": 2,
        "by_refund_trans_id": {"R-1": 2},
        "queries": 3,
        "accepted": 1,
        "accepted_by_refund_trans_id": {"R-1": 1},
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"refund_trans_id": ""}, "refund_trans_id is missing"),
        ({"refund_remarks": ""}, "refund_remarks is missing"),
        ({"refund_trans_id": "x" * 31}, "longer than 30"),
        ({"refund_amount": "100.01"}, "more than what is left"),
        ({"refund_amount": "0"}, "not positive"),
        ({"refund_amount": "NaN"}, "not positive"),
        ({"refund_amount": "much"}, "not a number"),
        ({"bank_tran_id": "nobody"}, "not known"),
    ],
)
async def test_a_bad_refund_fails_with_a_reason(provider, changes: dict, reason: str) -> None:
    """A refused refund is `failed` and nothing is recorded."""
    paid = await provider.pay()

    answer = await provider.query(**refund_of(paid, **changes))

    assert answer["status"] == "failed"
    assert reason in answer["errorReason"]
    assert (await provider.state())["refunds"]["accepted"] == 0


async def test_refunds_together_never_exceed_the_payment(provider) -> None:
    """Partial refunds add up; a cancelled one gives its amount back."""
    paid = await provider.pay()
    first = await provider.query(**refund_of(paid, refund_amount="60.00"))

    too_much = await provider.query(**refund_of(paid, refund_trans_id="R-2", refund_amount="40.01"))
    await provider.client.post("/simulator/refunds", json={"refund_ref_id": first["refund_ref_id"], "status": "cancelled"})
    whole = await provider.query(**refund_of(paid, refund_trans_id="R-3", refund_amount="100"))

    assert too_much["status"] == "failed"
    assert (await provider.query(refund_ref_id=first["refund_ref_id"]))["status"] == "cancelled"
    assert whole["status"] == "success"


async def test_a_refund_of_another_store_is_not_known(start) -> None:
    """Neither the payment nor the refund of another store can be named."""
    provider = await start(other_stores={"other": "pw"})
    theirs = await provider.pay(store_id="other")
    accepted = await provider.query(**refund_of(theirs), store_id="other", store_passwd="pw")

    assert (await provider.query(**refund_of(theirs)))["status"] == "failed"
    assert (await provider.query(refund_ref_id=accepted["refund_ref_id"]))["status"] == ""
    assert await provider.query(**refund_of(theirs), store_passwd="wrong") == {"APIConnect": "FAILED"}
