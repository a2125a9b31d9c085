"""SSLCOMMERZ: the shared suite, golden digests, and the freedom that its hash leaves."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipn_gateway.providers.base import Answer, Effect, InboundRequest, Malformed, Proof, Provider, ProviderConfig
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig
from tests.providers.contract import Expected, ProviderContract, answered, asserted
from tests.providers.sslcommerz import F0, SHOP, SHOP_BEFORE, STORE, V1, V2, V3, load, post, proof, sign, signed, validator_answer

if TYPE_CHECKING:
    from collections.abc import Mapping


class TestSslcommerz(ProviderContract):
    """The shared suite."""

    provider: ClassVar[Provider] = PROVIDER
    config: ClassVar[ProviderConfig] = SHOP
    config_before: ClassVar[ProviderConfig] = SHOP_BEFORE
    paid: ClassVar[Mapping[str, str]] = F0
    order_field: ClassVar[str] = "tran_id"
    status_field: ClassVar[str] = "status"
    amount_field: ClassVar[str] = "currency_amount"
    samples: ClassVar[Mapping[str, Expected]] = {
        "v1_valid": Expected(
            STORE, Proof.PROVED, "ORD-2026-000481", "VALID", Effect.PAID, "2607141203317Qm4ZtVb1xYd2Rk", Decimal("1250.50"), "BDT"
        ),
        "v1_ampersand_in_issuer": Expected(
            STORE, Proof.PROVED, "ORD-2026-000481", "VALID", Effect.PAID, "2607141203317Qm4ZtVb1xYd2Rk", Decimal("1250.50"), "BDT"
        ),
        "v1_equals_in_value": Expected(
            STORE, Proof.UNPROVED, "ORD-2026-000481", "VALID", Effect.PAID, "2607141203317Qm4ZtVb1xYd2Rk", Decimal("1250.50"), "BDT"
        ),
        "v1_gbk": Expected(
            STORE, Proof.PROVED, "ORD-2026-000481", "VALID", Effect.PAID, "2607141203317Qm4ZtVb1xYd2Rk", Decimal("1250.50"), "BDT"
        ),
        "v2_cancelled": Expected(STORE, Proof.PROVED, "ORD-2026-000482", "CANCELLED", Effect.CANCELLED, None, Decimal("800.00"), "BDT"),
        "v3_risk_usd": Expected(
            STORE, Proof.PROVED, "ORD-2026-000483", "VALID", Effect.PAID, "2607141209121Qa0BcDe4FgHi5Jk", Decimal("100.00"), "USD"
        ),
        "failed": Expected(STORE, Proof.PROVED, "ORD-2026-000484", "FAILED", Effect.FAILED, None, Decimal("50.00"), "BDT"),
        "f0_valid": Expected(SHOP, Proof.PROVED, "ORD-1001", "VALID", Effect.PAID, "V-1001", Decimal("1000.00"), "BDT"),
        "f1_folded_status": Expected(STORE, Proof.UNPROVED, "ORD-2026-000482", "VALID", Effect.PAID, None, Decimal("800.00"), "BDT"),
        "f2_folded_order": Expected(
            STORE, Proof.UNPROVED, "ORD-2026-000999", "VALID", Effect.PAID, "2607141203317Qm4ZtVb1xYd2Rk", Decimal("1250.50"), "BDT"
        ),
    }

    def request(self, fields: Mapping[str, str], config: ProviderConfig) -> InboundRequest:
        assert isinstance(config, SslcommerzConfig)
        return signed(fields, config)

    def confirmation(self, fields: Mapping[str, str]) -> list[Answer]:
        return [answered(validator_answer(fields))]


# --- the hash


@pytest.mark.case("B53")
@pytest.mark.parametrize(
    ("name", "fields", "config", "md5", "sha2"),
    [
        (
            "v1_valid",
            V1,
            STORE,
            "27865453d39d4a225462646e7d205f0b",
            "8050048136c508d5f4634af574df57aa7c94e09fb96813d42b4862a409b84a09",
        ),
        (
            "v2_cancelled",
            V2,
            STORE,
            "0ce8f1bd3563841b707d65bae3a8dc9d",
            "75e3a9ca3c356bdaf2345c28e28dd3eca549b1c9be4915615c2c539d500e0b63",
        ),
        (
            "v3_risk_usd",
            V3,
            STORE,
            "e481fbd7943085470d7b189096607c29",
            "f7ac9ade70ed2dc4d0fba3e77871b377ed1e7b1413200ae340105a8d69ae1824",
        ),
        (
            "f0_valid",
            F0,
            SHOP,
            "4511625dfc6268bf71ebde81ab800511",
            "08da54ea232b9d6cc74a31c6d7f08833a172073b0aa73df345806b5db631b677",
        ),
        (
            "v1_ampersand_in_issuer",
            {**V1, "card_issuer": "A & B BANK, LTD."},
            STORE,
            "5ecdd3360608d1a285df7cee7cb6cae9",
            "389c3c978be3bdd012ddc4a284bcff3d3b603cae9092e2bfea3a199cd9640b8b",
        ),
        (
            "v1_equals_in_value",
            {**V1, "card_issuer": "A & B BANK, LTD.", "value_a": "x=1&y=2"},
            STORE,
            "2f045d91a3077d117d4d974fe251647a",
            "31ef9dc8dfc8660024d8b32a9b82d3898aff495b916e128cdd27ce95177b24a7",
        ),
    ],
)
def test_golden_digests(name: str, fields: dict[str, str], config: SslcommerzConfig, md5: str, sha2: str) -> None:
    """The published digests are good, and no other is, for either algorithm."""
    posted = {**fields, "verify_sign": md5, "verify_sign_sha2": sha2, "verify_key": ",".join(fields)}

    assert (sign(fields, config), sign(fields, config, algorithm="sha256")) == (md5, sha2)
    assert proof(post(posted), config) is not Proof.REFUSED
    assert proof(post(posted), config) is proof(load(name), config)
    assert proof(post({**posted, "verify_sign": sha2}), config) is Proof.REFUSED
    assert proof(post({**posted, "verify_sign": f"{int(md5, 16) ^ 1:032x}"}), config) is Proof.REFUSED
    assert proof(post({**posted, "verify_sign_sha2": f"{int(sha2, 16) ^ 1:064x}"}), config) is Proof.REFUSED
    assert proof(post({**posted, "verify_sign_sha2": ""}), config) is Proof.REFUSED


@pytest.mark.parametrize("md5", ["991ef296988c21cd1a4fab4a2578b18c", "27865453d39d4a225462646e7d205f0b"])
def test_a_trailing_ampersand_is_good_by_either_rule(md5: str) -> None:
    """The libraries cut it off before hashing and the documents do not; which one the provider does is not known."""
    fields = {**V1, "value_d": "sess-77&"}

    assert proof(post({**fields, "verify_sign": md5, "verify_key": ",".join(fields)}), STORE) is Proof.PROVED


@pytest.mark.case("B59")
@pytest.mark.parametrize(
    ("changes", "without", "expected"),
    [
        ({}, "verify_sign", Proof.REFUSED),
        ({}, "verify_key", Proof.REFUSED),
        ({"verify_sign": ""}, "", Proof.REFUSED),
        ({"verify_key": ""}, "", Proof.REFUSED),
        ({"verify_sign": "4511625dfc6268bf71ebde81ab80051"}, "", Proof.REFUSED),
        ({"verify_sign": "4511625dfc6268bf71ebde81ab8005110"}, "", Proof.REFUSED),
        ({"verify_sign": "\u00e9" * 32}, "", Proof.REFUSED),
        ({"verify_sign": "4511625DFC6268BF71EBDE81AB800511"}, "", Proof.PROVED),
    ],
)
def test_the_hash_field_itself(changes: dict[str, str], without: str, expected: Proof) -> None:
    """Missing, blank or misshapen is refused; hexadecimal digits may be upper case."""
    posted = {**F0, "verify_sign": "4511625dfc6268bf71ebde81ab800511", "verify_key": ",".join(F0), **changes}
    request = post({name: value for name, value in posted.items() if name != without})

    assert proof(request, SHOP) is expected
    assert isinstance(PROVIDER.assertions(request), list)


@pytest.mark.case("B59", "B39")
def test_a_hash_sent_twice_is_malformed() -> None:
    """Not even when both are right."""
    request = load("f0_valid")
    twice = replace(request, body=request.body + b"&verify_sign=4511625dfc6268bf71ebde81ab800511")

    assert PROVIDER.assertions(twice) == Malformed("unreadable", "the field verify_sign is repeated")
    assert proof(twice, SHOP) is Proof.REFUSED


@pytest.mark.case("B55")
@pytest.mark.parametrize("posted", [..., "null", " ", "0"])
def test_blank_absent_and_null_are_different(posted: Any) -> None:
    """A hash made for a blank field is good for a blank field only."""
    signed_blank = {**F0, "verify_sign": sign(F0, SHOP), "verify_key": ",".join(F0)}
    changed = {name: value for name, value in {**signed_blank, "value_a": posted}.items() if value is not ...}

    assert proof(post(signed_blank), SHOP) is Proof.PROVED
    assert proof(post(changed), SHOP) is Proof.REFUSED


@pytest.mark.case("B57")
def test_a_password_of_odd_characters_is_taken_as_it_is() -> None:
    """No character of a secret is cut, trimmed or escaped."""
    config = SslcommerzConfig(store_id="demo01", store_passwd='Pa#ss$1 =x"', mode="sandbox")
    request = post({**F0, "verify_sign": "", "verify_key": ",".join(F0)})
    md5_of_passwd = hashlib.md5(b'Pa#ss$1 =x"', usedforsecurity=False).hexdigest()
    text = "&".join(f"{name}={value}" for name, value in sorted({**F0, "store_passwd": md5_of_passwd}.items()))
    verify_sign = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    good = replace(request, body=request.body.replace(b"verify_sign=", b"verify_sign=" + verify_sign.encode()))

    assert proof(good, config) is Proof.PROVED
    assert proof(good, SslcommerzConfig(store_id="demo01", store_passwd="Pa", mode="sandbox")) is Proof.REFUSED


REQUIRED = [
    "tran_id",
    "status",
    "amount",
    "currency",
    "currency_type",
    "currency_amount",
    "store_id",
    "tran_date",
    "bank_tran_id",
    "val_id",
]


@pytest.mark.parametrize("name", [*REQUIRED, "risk_level", "store_amount"])
def test_a_field_that_is_read_must_be_signed(name: str) -> None:
    """A hash that leaves one of them out matches and proves nothing."""
    assert proof(signed(F0, SHOP, [key for key in F0 if key != name]), SHOP) is Proof.UNPROVED


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_must_be_there(name: str) -> None:
    """A form without one of them may be real, yet it cannot be proved here; a negative needs no val_id."""
    rest = {key: value for key, value in F0.items() if key != name}

    assert proof(signed(rest, SHOP), SHOP) is Proof.UNPROVED
    assert proof(signed(V2, STORE), STORE) is Proof.PROVED


@pytest.mark.case("B03")
def test_an_unsigned_unknown_field_is_kept_and_alerted_on() -> None:
    """Names were added over the years: a new one stops nothing, and nothing reads it."""
    request = signed({**F0, "attempt": "2"}, SHOP, F0)

    assert proof(request, SHOP) is Proof.PROVED
    assert asserted(PROVIDER, request).fields["attempt"] == "2"
    assert asserted(PROVIDER, request).alerts == ("unsigned_field attempt",)
    assert asserted(PROVIDER, signed(F0, SHOP)).alerts == ()


@pytest.mark.parametrize("name", sorted(V1))
def test_every_folding_proves_nothing(name: str) -> None:
    """A genuine payload reshaped by moving a field into the value before it still matches; each such reshaping is seen."""
    ordered = sorted([*V1, "store_passwd"])
    host = ordered[ordered.index(name) - 1] if ordered.index(name) else None
    if host is None or host == "store_passwd":  # the first has nothing before it, and the password's digest is not posted
        return
    rest = {key: value for key, value in V1.items() if key != name}
    folded = {**rest, host: f"{V1[host]}&{name}={V1[name]}"}
    request = post({**folded, name: V1[name] + "9", "verify_sign": sign(V1, STORE), "verify_key": ",".join(rest)})

    assert sign(folded, STORE, rest) == sign(V1, STORE)
    assert proof(request, STORE) is Proof.UNPROVED


def test_known_forgeries() -> None:
    """Status folded onto the error text, order folded onto the date, and a field name that swallows the amount."""
    swallowing = load("f3_swallowing_name")

    assert proof(load("f1_folded_status"), STORE) is Proof.UNPROVED
    assert proof(load("f2_folded_order"), STORE) is Proof.UNPROVED
    assert proof(swallowing, STORE) is Proof.REFUSED
    assert PROVIDER.assertions(swallowing) == Malformed("unreadable", "a field name is not made of a-z, 0-9 and _")


@pytest.mark.case("B53")
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (",".join(F0), Proof.PROVED),
        (",".join(reversed(F0)), Proof.PROVED),
        (", ".join(F0), Proof.UNPROVED),
        (",".join(F0) + ",", Proof.UNPROVED),
        (",".join(F0) + ",amount", Proof.UNPROVED),
        (",".join(F0) + ",never_posted", Proof.UNPROVED),
        (",".join(F0) + ",store_passwd", Proof.UNPROVED),
        (",".join(F0) + ",verify_key", Proof.REFUSED),  # the hash below does not cover it
        (",".join(F0) + ",verify_sign", Proof.REFUSED),
        (",".join(F0).upper(), Proof.REFUSED),
        ("amount", Proof.REFUSED),
        ("," * 5000, Proof.REFUSED),
        ("amount," * 5000, Proof.REFUSED),
    ],
)
def test_an_odd_list_of_names_proves_nothing(key: str, expected: Proof) -> None:
    """Blanks, a name twice, or one that was not posted: it may match, but the provider decides."""
    assert proof(signed(F0, SHOP, F0, key), SHOP) is expected


def test_a_posted_password_field_is_not_the_password() -> None:
    """The digest in the signed text is always ours; a field of that name changes nothing and proves nothing."""
    request = post({**F0, "store_passwd": "x", "verify_sign": sign(F0, SHOP), "verify_key": ",".join([*F0, "store_passwd"])})

    assert proof(request, SHOP) is Proof.UNPROVED


def test_a_list_of_names_that_covers_itself_proves_nothing() -> None:
    """It can be signed, and is no list that the provider sends."""
    fields = {**F0, "verify_key": ",".join([*F0, "verify_key"])}

    assert proof(post({**fields, "verify_sign": sign(fields, SHOP)}), SHOP) is Proof.UNPROVED


@pytest.mark.case("B53")
def test_a_signed_field_that_is_missing_is_a_clean_mismatch() -> None:
    """A field that the hash covers and the body lacks refuses the notification, without an exception."""
    for name in F0:
        posted = {**F0, "verify_sign": sign(F0, SHOP), "verify_key": ",".join(F0)}
        del posted[name]

        assert proof(post(posted), SHOP) is Proof.REFUSED, name


@settings(deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_a_signed_value_is_refused(data: st.DataObject) -> None:
    """No byte of a value can be another one."""
    name = data.draw(st.sampled_from([name for name, value in V1.items() if value]))
    value = V1[name].encode()
    at = data.draw(st.integers(0, len(value) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != value[at]))
    changed = value[:at] + bytes([byte]) + value[at + 1 :]
    body = load("v1_valid").body.replace(
        f"{name}={quote_plus(V1[name])}&".encode(), f"{name}=".encode() + quote_plus(changed).encode() + b"&", 1
    )

    assert body != load("v1_valid").body
    assert proof(replace(load("v1_valid"), body=body), STORE) is Proof.REFUSED


@settings(deadline=None)
@given(order=st.permutations(sorted(V1)), key=st.permutations(sorted(V1)))
def test_the_order_of_fields_and_names_is_nothing(order: list[str], key: list[str]) -> None:
    """Sorting decides: any order of the form and of the list is the same notification."""
    request = signed({name: V1[name] for name in order}, STORE, V1, ",".join(key))

    assert proof(request, STORE) is Proof.PROVED
    assert asserted(PROVIDER, request).operation_id == V1["val_id"]
