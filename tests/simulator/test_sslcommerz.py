"""The wire format: golden vectors of notifications, hashes and validator answers."""

from dataclasses import replace
from decimal import Decimal
from urllib.parse import parse_qsl

import pytest

from ipn_gateway.simulator.sslcommerz import CARDS, Attempt, encode, ipn_fields, query_element, sign, validator_answer

PASSWD = "demo_pass@ssl"
V1 = Attempt(
    status="VALID",
    store_id="demos64b1",
    tran_id="ORD-2026-000481",
    tran_date="2026-07-14 12:02:58",
    amount=Decimal("1250.50"),
    currency_type="BDT",
    currency_amount=Decimal("1250.50"),
    currency_rate=Decimal("1.0000"),
    val_id="2607141203317Qm4ZtVb1xYd2Rk",
    bank_tran_id="260714120330Hk2LsWq9PzTf",
    store_amount=Decimal("1225.49"),
    card=CARDS["bkash"],
    values=("", "", "", "sess-77"),
)
V2 = Attempt(
    status="CANCELLED",
    store_id="demos64b1",
    tran_id="ORD-2026-000482",
    tran_date="2026-07-14 12:10:05",
    amount=Decimal("800.00"),
    currency_type="BDT",
    currency_amount=Decimal("800.00"),
    currency_rate=Decimal(1),
    error="Cancelled by User",
)
V3 = Attempt(
    status="VALID",
    store_id="demos64b1",
    tran_id="ORD-2026-000483",
    tran_date="2026-07-14 12:08:40",
    amount=Decimal("12340.00"),
    currency_type="USD",
    currency_amount=Decimal("100.00"),
    currency_rate=Decimal("123.4000"),
    val_id="2607141209121Qa0BcDe4FgHi5Jk",
    bank_tran_id="260714120911Zx8CvBn7MmLk",
    store_amount=Decimal("12031.50"),
    card=CARDS["visa"],
    risky=True,
)
V1_BODY = (
    "tran_id=ORD-2026-000481&val_id=2607141203317Qm4ZtVb1xYd2Rk&amount=1250.50&card_type=BKASH-BKash&store_amount=1225.49&card_no="
    "&bank_tran_id=260714120330Hk2LsWq9PzTf&status=VALID&tran_date=2026-07-14+12%3A02%3A58&error=&currency=BDT"
    "&card_issuer=BKash+Mobile+Banking&card_brand=MOBILEBANKING&card_sub_brand=Classic&card_issuer_country=Bangladesh"
    "&card_issuer_country_code=BD&store_id=demos64b1&currency_type=BDT&currency_amount=1250.50&currency_rate=1.0000&base_fair=0.00"
    "&value_a=&value_b=&value_c=&value_d=sess-77&risk_level=0&risk_title=Safe"
    "&verify_sign=27865453d39d4a225462646e7d205f0b"
    "&verify_sign_sha2=8050048136c508d5f4634af574df57aa7c94e09fb96813d42b4862a409b84a09"
)
V1_VALIDATOR = {
    "status": "VALID",
    "tran_date": "2026-07-14 12:02:58",
    "tran_id": "ORD-2026-000481",
    "val_id": "2607141203317Qm4ZtVb1xYd2Rk",
    "amount": "1250.50",
    "store_amount": "1225.49",
    "currency": "BDT",
    "bank_tran_id": "260714120330Hk2LsWq9PzTf",
    "card_type": "BKASH-BKash",
    "card_no": "",
    "card_issuer": "BKash Mobile Banking",
    "card_brand": "MOBILEBANKING",
    "card_issuer_country": "Bangladesh",
    "card_issuer_country_code": "BD",
    "currency_type": "BDT",
    "currency_amount": "1250.50",
    "currency_rate": "1.0000",
    "base_fair": "0.00",
    "value_a": "",
    "value_b": "",
    "value_c": "",
    "value_d": "sess-77",
    "emi_instalment": "0",
    "emi_amount": "0.00",
    "emi_description": "",
    "emi_issuer": "",
    "risk_title": "Safe",
    "risk_level": "0",
    "discount_percentage": "0",
    "discount_amount": "0.00",
    "discount_remarks": "",
    "APIConnect": "DONE",
    "validated_on": "2026-07-14 12:03:40",
    "gw_version": "",
    "offer_avail": 1,
    "isTokeizeSuccess": 0,
    "campaign_code": "",
}
GOLDEN = {
    "V1": (V1, "27865453d39d4a225462646e7d205f0b", "8050048136c508d5f4634af574df57aa7c94e09fb96813d42b4862a409b84a09"),
    "V2": (V2, "0ce8f1bd3563841b707d65bae3a8dc9d", "75e3a9ca3c356bdaf2345c28e28dd3eca549b1c9be4915615c2c539d500e0b63"),
    "V3": (V3, "e481fbd7943085470d7b189096607c29", "f7ac9ade70ed2dc4d0fba3e77871b377ed1e7b1413200ae340105a8d69ae1824"),
    "V1, an ampersand in the issuer": (
        replace(V1, card=replace(V1.card, issuer="A & B BANK, LTD.")),
        "5ecdd3360608d1a285df7cee7cb6cae9",
        "389c3c978be3bdd012ddc4a284bcff3d3b603cae9092e2bfea3a199cd9640b8b",
    ),
    "V1, a query string in value_a too": (
        replace(V1, card=replace(V1.card, issuer="A & B BANK, LTD."), values=("x=1&y=2", "", "", "sess-77")),
        "2f045d91a3077d117d4d974fe251647a",
        "31ef9dc8dfc8660024d8b32a9b82d3898aff495b916e128cdd27ce95177b24a7",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_hashes_match_the_golden_vectors(name: str) -> None:
    """Both hashes of every vector come out of the fields that the simulator makes of the attempt."""
    attempt, md5, sha256 = GOLDEN[name]

    signed = sign(ipn_fields(attempt), PASSWD)

    assert (md5, sha256) == (signed["verify_sign"], signed["verify_sign_sha2"])


def test_a_trailing_ampersand_is_hashed_as_it_is() -> None:
    """The plain rule removes nothing from the text; libraries that strip ampersands get another hash."""
    signed = sign(ipn_fields(replace(V1, values=("", "", "", "sess-77&"))), PASSWD)

    assert signed["verify_sign"] == "991ef296988c21cd1a4fab4a2578b18c"


def test_the_body_is_the_golden_one_byte_for_byte() -> None:
    """Order of fields and percent form are those of the golden body; verify_key follows with the 27 names."""
    body = encode(sign(ipn_fields(V1), PASSWD)).decode()

    start, _, key = body.partition("&verify_key=")
    assert start == V1_BODY
    assert len(key.split("%2C")) == 27


@pytest.mark.parametrize(("status", "count"), [("VALID", 27), ("FAILED", 23), ("CANCELLED", 16), ("UNATTEMPTED", 27), ("EXPIRED", 16)])
def test_each_status_has_its_own_set_of_fields(status: str, count: int) -> None:
    """A parser that requires the fields of a paid notification breaks on the negatives."""
    fields = ipn_fields(replace(V2, status=status, bank_tran_id="1"))

    assert len(fields) == count
    assert ("val_id" in fields) == (status in {"VALID", "UNATTEMPTED"})
    assert ("store_amount" in fields) == (status in {"VALID", "UNATTEMPTED"})
    assert ("card_type" in fields) == (status not in {"CANCELLED", "EXPIRED"})


def test_signing_again_replaces_the_old_hashes() -> None:
    """Signing is repeatable: the hash fields are never covered by the hash."""
    once = sign(ipn_fields(V1), PASSWD)

    assert sign(once, PASSWD) == once
    assert sign(once, "another")["verify_sign"] != once["verify_sign"]


def test_the_validator_answer_is_the_golden_one() -> None:
    """Every member of the golden answer is there with its type; text for numbers, but for two integers."""
    answer = validator_answer(V1, status="VALID", validated_on="2026-07-14 12:03:40")

    assert {name: answer[name] for name in V1_VALIDATOR} == V1_VALIDATOR
    assert [name for name, value in answer.items() if not isinstance(value, str)] == ["offer_avail", "isTokeizeSuccess"]


def test_the_validator_loses_trailing_zeros_of_the_store_amount() -> None:
    """97.50 is `97.50` in the notification and `97.5` in the validator's answer; 100.00 there is `100`."""
    paid = replace(V1, store_amount=Decimal("97.50"))

    assert ipn_fields(paid)["store_amount"] == "97.50"
    assert validator_answer(paid, status="VALID", validated_on="")["store_amount"] == "97.5"
    assert validator_answer(replace(V1, store_amount=Decimal("100.00")), status="VALID", validated_on="")["store_amount"] == "100"


def test_a_query_element_names_the_error_and_has_no_credentials_word() -> None:
    """An element is the validator's view without APIConnect, plus the error; one without money has an empty val_id."""
    paid, unpaid = query_element(V1, validated_on=""), query_element(replace(V2, status="FAILED"), validated_on="")

    assert (paid["status"], paid["error"], paid["bank_gw"]) == ("VALID", "", "BKASH")
    assert "APIConnect" not in paid
    assert query_element(V1, validated_on="2026-07-14 12:03:40")["status"] == "VALIDATED"
    assert (unpaid["val_id"], unpaid["status"], unpaid["error"]) == ("", "FAILED", "Cancelled by User")


def test_text_of_any_script_survives_encoding() -> None:
    """Values are UTF-8 on the wire, percent-encoded, and come back unchanged."""
    fields = sign(ipn_fields(replace(V1, values=("বাংলা & más", "", "", ""))), PASSWD)

    assert dict(parse_qsl(encode(fields).decode(), keep_blank_values=True)) == fields
