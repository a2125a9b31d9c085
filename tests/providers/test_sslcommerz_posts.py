"""SSLCOMMERZ: how posts and configurations are read."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ipn_gateway.providers import forms, sslcommerz_hash
from ipn_gateway.providers.base import Effect, InboundRequest, Malformed, Proof
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig
from tests.providers.contract import asserted
from tests.providers.sslcommerz import F0, FORM, SHOP, STORE, load, proof, signed

# --- the form


@pytest.mark.case("B73")
@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/x-www-form-urlencoded",
        "Application/X-WWW-Form-URLencoded; Charset=UTF-8",
        "application/x-www-form-urlencoded ; charset=never-heard-of",
        "text/plain",
        "text/plain;charset=utf-8",
        "application/octet-stream",
    ],
)
def test_media_types_that_are_read(content_type: str | None) -> None:
    """The form is read from the bytes whatever general type, or none, it is sent under."""
    request = replace(load("f0_valid"), headers=() if content_type is None else (("content-type", content_type),))

    assert asserted(PROVIDER, request).order_id == "ORD-1001"
    assert proof(request, SHOP) is Proof.PROVED


@pytest.mark.parametrize(
    "headers",
    [
        (("content-type", "application/json"),),
        (("content-type", "multipart/form-data; boundary=x"),),
        (("content-type", "application/x-www-form-urlencoded, text/plain"),),
        (*FORM, ("content-encoding", "gzip")),
        (*FORM, ("content-encoding", "identity")),
    ],
)
def test_media_types_that_are_not_read(headers: tuple[tuple[str, str], ...]) -> None:
    """Another type, and any Content-Encoding, is told apart from an unreadable body."""
    read = PROVIDER.assertions(replace(load("f0_valid"), headers=headers))

    assert isinstance(read, Malformed)
    assert read.reason == "media_type"


@pytest.mark.case("B33")
def test_blanks_and_bare_names_are_kept() -> None:
    """A blank field is an empty text, a name without `=` too, and empty pieces between separators are nothing."""
    request = load("f0_valid")
    fields = asserted(PROVIDER, replace(request, body=b"&" + request.body + b"&&value_b&value%5Fc&")).fields

    assert (fields["error"], fields["value_a"], fields["value_b"], fields["value_c"]) == ("", "", "", "")
    assert list(fields)[:3] == ["amount", "bank_tran_id", "card_type"]


@pytest.mark.case("B35")
@pytest.mark.parametrize("is_signed", [True, False])
def test_only_the_ampersand_separates(*, is_signed: bool) -> None:
    """A semicolon is a character like any other."""
    fields = {**F0, "value_c": "a;status=FAILED;b=1"}
    request = signed(fields, SHOP, fields if is_signed else F0)
    unescaped = replace(request, body=request.body.replace(b"a%3Bstatus%3DFAILED%3Bb%3D1", b"a;status=FAILED;b=1"))

    for form in (request, unescaped):
        assert asserted(PROVIDER, form).status == "VALID"
        assert asserted(PROVIDER, form).fields["value_c"] == "a;status=FAILED;b=1"
        assert proof(form, SHOP) is Proof.PROVED


@given(written=st.lists(st.sampled_from([b"%", b"2", b"C", b"c", b"5", b"+", b",", b"a", b"\xff"]), max_size=12).map(b"".join))
def test_escapes_are_read_once(written: bytes) -> None:
    """Whatever stands around them: what an escape yields is never read as a part of another one."""
    form = forms.parse(b"name=" + written)

    assert form == {"name": unquote_to_bytes(written.replace(b"+", b" "))}


@pytest.mark.case("B37")
def test_nul_is_kept_and_signed() -> None:
    """A NUL in a value is part of what was signed; in an order's id or a status it is no id and no status."""
    assert proof(signed({**F0, "value_d": "abc\0def"}, SHOP), SHOP) is Proof.PROVED
    assert asserted(PROVIDER, signed({**F0, "value_d": "abc\0def"}, SHOP)).fields["value_d"] == "abc\0def"
    for name in ("tran_id", "status"):
        assert isinstance(PROVIDER.assertions(signed({**F0, name: F0[name] + "\0"}, SHOP)), Malformed)


@pytest.mark.case("B31")
def test_another_charset_is_shown_and_never_rehashed() -> None:
    """GBK is honoured for display, the hash is made of the bytes; without the declaration the bytes are still to be seen."""
    declared = load("v1_gbk")
    undeclared = replace(declared, headers=FORM)

    assert asserted(PROVIDER, declared).fields["cus_name"] == "\u4e2d\u6587"
    assert asserted(PROVIDER, undeclared).fields["cus_name"] == r"\xd6\xd0\xce\xc4"
    assert proof(declared, STORE) is proof(undeclared, STORE) is Proof.PROVED


@pytest.mark.parametrize("charset", ["utf-16", "utf-7", "unicode_escape", "idna", "rot13", "hex", "undefined", "x" * 500])
def test_a_charset_that_is_no_form_charset_is_not_used(charset: str) -> None:
    """Only charsets in which ASCII stays ASCII are known: no other one can change what a field says."""
    request = replace(load("f0_valid"), headers=(("content-type", f"application/x-www-form-urlencoded; charset={charset}"),))

    assert asserted(PROVIDER, request).order_id == "ORD-1001"


@pytest.mark.case("B39")
@pytest.mark.parametrize("values", [("ORD-1001", "ORD-9999"), ("ORD-9999", "ORD-1001")])
def test_a_doubled_order_is_malformed_whichever_is_signed(values: tuple[str, str]) -> None:
    """First, last or list: the answer is none of them."""
    for chosen in values:
        base = signed({**F0, "tran_id": chosen}, SHOP).body
        body = base.replace(f"tran_id={chosen}".encode(), f"tran_id={values[0]}&tran_id={values[1]}".encode(), 1)

        assert isinstance(PROVIDER.assertions(InboundRequest("POST", "", FORM, body)), Malformed)


def test_a_long_list_of_names_is_read_as_a_short_one_is() -> None:
    """It lists names that were not posted, which are skipped; beyond what is remembered nothing else is true."""
    lists = [",".join([*F0, *(f"absent_{number}" for number in range(count))]) for count in (1, 1000, 1)]

    assert [proof(signed(F0, SHOP, key=names), SHOP) for names in lists] == [Proof.UNPROVED] * 3
    assert [proof(signed(F0, STORE, key=names), SHOP) for names in lists] == [Proof.REFUSED] * 3


def test_of_a_list_that_is_too_long_only_what_was_posted_is_sorted() -> None:
    """Anybody may post twenty thousand names, and nobody's notification waits for them."""
    names = ",".join([*F0, *(f"n{number}" for number in range(9000))])
    listed = sslcommerz_hash._listed(dict.fromkeys(F0, b"") | {"verify_key": names.encode()})

    assert max(len(before) + len(behind) for before, behind in listed.readings) <= len(F0)


@pytest.mark.parametrize("body", [b"tran%5Fid=A&tran_id=B", b"Tran_Id=A", b"a%00b=1", b"a[]=1", b"=1", b"a b=1", b"x" * 65 + b"=1"])
def test_bad_or_hidden_names_are_malformed(body: bytes) -> None:
    """A name is plain after decoding, so that it cannot be written in two ways or hold a separator."""
    read = PROVIDER.assertions(InboundRequest("POST", "", FORM, load("f0_valid").body + b"&" + body))

    assert isinstance(read, Malformed)


def test_at_most_a_hundred_fields() -> None:
    """A hundred are read and one more is not."""
    full = {**{f"f{number}": "" for number in range(83)}, **F0}

    assert isinstance(PROVIDER.assertions(signed(full, SHOP)), list)
    assert isinstance(PROVIDER.assertions(signed({**full, "one_more": ""}, SHOP)), Malformed)


@pytest.mark.case("B27")
@pytest.mark.parametrize("name", ["amount", "currency_amount", "store_amount"])
@pytest.mark.parametrize(
    "written",
    [
        "NaN", "sNaN", "Infinity", "-0", "1e3", "1e309", "1_000", " 1000.00 ", "+1000.00", "0x3E8", "-1", "1,000.00", "1.", ".5", "1.2.3",
        "\u0967\u0966", "1000.00\n", "1000\0", "1234567890123", "1." + "0" * 13, "9" * 60_000,
    ],
)  # fmt: skip
def test_amounts_that_are_no_numbers_are_malformed(name: str, written: str) -> None:
    """What `Decimal` would take or choke on is stopped before any comparison; order and status are still told."""
    read = PROVIDER.assertions(signed({**F0, name: written}, SHOP))

    assert read == Malformed("unreadable", f"{name} is no plain decimal number", "ORD-1001", "VALID")


@pytest.mark.case("B27")
def test_a_blank_amount_is_malformed_and_a_blank_share_is_not() -> None:
    """`amount` is always sent with a number; `store_amount` is blank or absent when nothing was paid."""
    absent = {name: value for name, value in F0.items() if name != "amount"}

    assert isinstance(PROVIDER.assertions(signed({**F0, "amount": ""}, SHOP)), Malformed)
    assert asserted(PROVIDER, signed({**F0, "store_amount": ""}, SHOP)).amount == Decimal("1000.00")
    assert proof(signed(absent, SHOP), SHOP) is Proof.UNPROVED
    assert asserted(PROVIDER, signed(absent, SHOP)).amount == Decimal("1000.00")


@pytest.mark.case("B19")
def test_the_orders_own_money_is_asserted_not_the_settlement() -> None:
    """A converted payment is about currency_type and currency_amount; the settlement pair stands in only where they are not sent."""
    fields = {**F0, "amount": "6100.00", "currency_type": "USD", "currency_amount": "50.00"}
    read = asserted(PROVIDER, signed(fields, SHOP))
    without = {name: value for name, value in fields.items() if name not in {"currency_type", "currency_amount"}}
    unconverted = asserted(PROVIDER, signed(without, SHOP))

    assert (read.amount, read.currency) == (Decimal("50.00"), "USD")
    assert (unconverted.amount, unconverted.currency) == (Decimal("6100.00"), "BDT")


@pytest.mark.parametrize(
    "order_id", ["", " ", "ORD 1001", "ORD/1001", "ORD'--", "o" * 65, "\u0661", "ORD-1001\n", "ORD-1001&status=VALID", "%00"]
)
def test_an_id_that_no_order_can_have_is_malformed(order_id: str) -> None:
    """It names no order, now or later, and is not told as one."""
    read = PROVIDER.assertions(signed({**F0, "tran_id": order_id}, SHOP))

    assert isinstance(read, Malformed)
    assert (read.order_id, read.status) == (None, "VALID")


@pytest.mark.parametrize("status", ["", "VALID\0", "\u09b6", "x" * 65, " VALID"])
def test_a_status_that_is_no_word_is_malformed(status: str) -> None:
    """Printable ASCII with no blank around it, at most 64 characters; the order is still told."""
    read = PROVIDER.assertions(signed({**F0, "status": status}, SHOP))

    assert isinstance(read, Malformed)
    assert (read.order_id, read.status) == ("ORD-1001", None)


@pytest.mark.parametrize("status", ["valid", "Valid", "VALID ", "INVALID", "INVALID_TRANSACTION", "REFUNDED"])
def test_words_are_compared_exactly(status: str) -> None:
    """Another spelling is another word."""
    read = PROVIDER.assertions(signed({**F0, "status": status}, SHOP))

    assert isinstance(read, Malformed) or read[0].effect is Effect.UNKNOWN


@pytest.mark.parametrize("val_id", ["V-1001\0", "V&x=1", "\u09b6", "v" * 101, "V 1"])
def test_an_unreadable_val_id_is_asked_by_query(val_id: str) -> None:
    """The payment may be real: the id is dropped with an alert, and the order is asked for."""
    read = asserted(PROVIDER, signed({**F0, "val_id": val_id}, SHOP))

    assert (read.operation_id, read.effect) == (None, Effect.PAID)
    assert read.alerts == ("val_id_unreadable",)


@pytest.mark.parametrize("status", ["FAILED", "CANCELLED", "UNATTEMPTED", "EXPIRED", "PENDING"])
def test_only_a_payment_has_its_id_in_the_post(status: str) -> None:
    """What is no payment is named by the provider's answer, never by a post, which could invent names."""
    assert asserted(PROVIDER, signed({**F0, "status": status}, SHOP)).operation_id is None


# --- the configuration


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        (None, "https://securepay.sslcommerz.com"),
        ("https://pay.example", "https://pay.example"),
        ("https://pay.example/", "https://pay.example"),
        ("https://pay.example:8443", "https://pay.example:8443"),
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("http://127.8.8.8", "http://127.8.8.8"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        ("http://localhost:9000", "http://localhost:9000"),
    ],
)
def test_where_the_provider_is(base_url: str | None, expected: str) -> None:
    """The mode names the host unless one is configured; http is for loopback, in every mode."""
    config = SslcommerzConfig(store_id="demo01", store_passwd="x", mode="live", base_url=base_url)

    assert config.url("/path") == f"{expected}/path"
    assert config.account == "demo01"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("base_url", url)
            for url in (
                "", "pay.example", "ftp://pay.example", "http://pay.example", "http://10.0.0.1", "http://localhost.example",
                "https://pay.example/api", "https://pay.example?x=1", "https://pay.example#x", "https://user:pw@pay.example",
                "https://pay.example:0", "https://pay.example:65536", "https://pay.example\n", "https://pay.example\\@127.0.0.1",
                "HTTPS://pay.example", "https://", "http://[::ffff:127.0.0.1]", "http://0.0.0.0",
            )
        ),
        *(("store_id", text) for text in ("", "  ", "demo\n01", "demo\x7f", "\0", "x" * 101)),
        *(("store_passwd", text) for text in ("", " ", "pass\n", "pa\rss", "\x85", "\ud800", "x" * 256)),
        *(("mode", text) for text in ("", "LIVE", "test")),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_with_a_sentence(name: str, value: str) -> None:
    """What would fail at the first notification fails when it is written."""
    good = {"store_id": "demo01", "store_passwd": "Demo@Pass1", "mode": "live"}

    with pytest.raises(ValidationError) as refused:
        SslcommerzConfig(**{**good, name: value})

    assert [error["loc"] for error in refused.value.errors()] == [(name,)]


@pytest.mark.parametrize("name", ["store_id", "store_passwd", "mode"])
def test_required_values_have_no_default(name: str) -> None:
    """A source without them could not be asked about."""
    good = {"store_id": "demo01", "store_passwd": "Demo@Pass1", "mode": "live"}

    with pytest.raises(ValidationError):
        SslcommerzConfig(**{key: value for key, value in good.items() if key != name})
