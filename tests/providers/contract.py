"""What every provider adapter must do. A provider's test inherits `ProviderContract` and says how its notifications are made.

Copy `test_sslcommerz.py` for a new provider: fill in the members below, add samples, and every test here runs on it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipn_gateway.providers import discovered
from ipn_gateway.providers.base import (
    NEGATIVE,
    Answer,
    Assertion,
    Confirmed,
    Effect,
    InboundRequest,
    Malformed,
    NoAnswer,
    Proof,
    Provider,
    ProviderConfig,
    Unknown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
HEADINGS = [
    "Setup",
    "Settings",
    "Authentication",
    "Validation",
    "Effect mapping",
    "Acknowledgement",
    "Their retry schedule",
    "Quirks",
    "Sandbox",
]


@dataclass(frozen=True)
class Expected:
    """What a sample says and how it stands the local check."""

    config: ProviderConfig
    proof: Proof
    order_id: str
    status: str
    effect: Effect
    operation_id: str | None
    amount: Decimal | None
    currency: str | None


@dataclass(frozen=True)
class Question:
    """What an adapter asked."""

    method: str
    url: str
    params: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Scripted:
    """A provider that gives these answers in turn, the last one for ever, and remembers the questions."""

    answers: Sequence[Answer | NoAnswer]
    asked: list[Question] = field(default_factory=list)

    async def __call__(
        self,
        method: Literal["GET", "POST"],
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        form: Mapping[str, str] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | NoAnswer:
        fields = {"": form.decode("latin-1")} if isinstance(form, bytes) else form or {}
        self.asked.append(Question(method, url, {**(params or {}), **fields}, headers or {}))
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def answered(value: Any, *, status: int = 200, media_type: str = "application/json") -> Answer:
    """An answer of this JSON, or of these bytes."""
    return Answer(status, media_type, value if isinstance(value, bytes) else json.dumps(value).encode())


def sample(path: Path) -> InboundRequest:
    """A captured raw request: request line, headers, a blank line, the body and a final newline."""
    head, _, body = path.read_bytes().partition(b"\n\n")
    request_line, *lines = head.decode().splitlines()
    method, target, _ = request_line.split(" ")
    headers = tuple((name.lower(), value) for name, value in (line.split(": ", 1) for line in lines))
    return InboundRequest(method, target.partition("?")[2], headers, body.rstrip(b"\n"))


def asserted(provider: Provider, request: InboundRequest) -> Assertion:
    """The one assertion of a readable request."""
    read = provider.assertions(request)
    assert isinstance(read, list), read
    assert len(read) == 1
    return read[0]


def documented_mapping(name: str) -> dict[str, str]:
    """The table under «Effect mapping» of a provider's page: their word -> our effect."""
    page = (ROOT / "docs/providers" / f"{name}.md").read_text(encoding="utf-8")
    section = page.split("\n## Effect mapping\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `([^`]+)` \| `([a-z]+)` \|", section, re.MULTILINE))


# One property runs for every provider, each from a class of its own; and a loaded machine is no failure.
anything = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])

UNCLEAR: dict[str, Answer | NoAnswer] = {
    "timeout": NoAnswer("timeout"),
    "never sent": NoAnswer("connect_failed", sent=False),
    "server error": answered(b"", status=500),
    "too many requests": answered({}, status=429),
    "a page": answered(b"<!doctype html><title>Welcome</title>", media_type="text/html"),
    "nothing": answered(b""),
    "blanks": answered(b" \n"),
    "no object": answered([]),
    "an empty object": answered({}),
    "cut off": answered(b'{"status":"VALID"'),
    "no number": answered(b'{"amount":NaN}'),
    "no text": answered(b'{"status":"\xff"}'),
    "bottomless": answered(b"[" * 100_000),
    "deep": answered(b'{"a":' * 300 + b"1" + b"}" * 300),
    "huge number": answered(b'{"amount":' + b"9" * 10_000 + b"}"),
}


class ProviderContract:
    """Inherit it as `Test…` and fill in these members."""

    provider: ClassVar[Provider]
    config: ClassVar[ProviderConfig]
    config_before: ClassVar[ProviderConfig]  # the same account with the secret that `config` replaced
    paid: ClassVar[Mapping[str, str]]  # the fields of a genuine payment notification, without its signature
    order_field: ClassVar[str]
    status_field: ClassVar[str]
    amount_field: ClassVar[str]
    samples: ClassVar[Mapping[str, Expected]]  # by the file's name without `.http`

    def request(self, fields: Mapping[str, str], config: ProviderConfig) -> InboundRequest:
        """A genuine notification of these fields in this order, signed with the secret of `config`."""
        raise NotImplementedError

    def repeated(self, request: InboundRequest, name: str) -> InboundRequest:
        """The request with a field twice; this default is for forms."""
        return replace(request, body=request.body + f"&{name}=1".encode())

    def confirmation(self, fields: Mapping[str, str]) -> list[Answer]:
        """What the provider answers to `validate` when the payment of these fields is real."""
        raise NotImplementedError

    def test_it_is_found_by_its_name_and_has_samples_and_a_page(self) -> None:
        """A provider is one module, one test, one page; every one that is found has all of them."""
        name = self.provider.name

        assert discovered()[name] is self.provider
        for found in discovered():
            assert (ROOT / f"tests/providers/test_{found}.py").is_file()
            assert (ROOT / f"tests/providers/test_{found}_money.py").is_file()
            assert (ROOT / f"docs/providers/{found}.md").is_file()
        assert {path.stem for path in self.sample_paths()} >= set(self.samples)

    def sample_paths(self) -> list[Path]:
        return sorted((ROOT / "tests/providers/samples" / self.provider.name).glob("*.http"))

    def test_the_page_has_the_fixed_headings(self) -> None:
        """A reader finds the same thing at the same place on every provider's page."""
        page = (ROOT / "docs/providers" / f"{self.provider.name}.md").read_text(encoding="utf-8")

        assert re.findall(r"^## (.+)$", page, re.MULTILINE) == HEADINGS

    def test_the_effect_table_matches_the_page(self) -> None:
        """What the page promises is what the adapter does."""
        documented = documented_mapping(self.provider.name)

        assert documented == {word: effect.value for word, effect in self.provider.EFFECTS.items()}
        assert Effect.UNKNOWN not in self.provider.EFFECTS.values()

    def test_every_sample_says_what_is_expected(self) -> None:
        """Captured requests keep their meaning."""
        for name, expected in self.samples.items():
            request = sample(ROOT / "tests/providers/samples" / self.provider.name / f"{name}.http")
            read = asserted(self.provider, request)
            proof = self.provider.authenticate(request, [expected.config])

            assert Expected(
                expected.config, proof, read.order_id, read.status, read.effect, read.operation_id, read.amount, read.currency
            ) == (expected), name

    def test_a_genuine_notification_is_proved_and_a_strange_secret_refuses_it(self) -> None:
        """The local check tells a known secret from an unknown one."""
        request = self.request(self.paid, self.config)

        assert self.provider.authenticate(request, [self.config]) is Proof.PROVED
        assert self.provider.authenticate(request, [self.config_before]) is Proof.REFUSED
        assert self.provider.authenticate(request, []) is Proof.REFUSED

    @pytest.mark.case("S111")
    def test_a_replaced_secret_still_authenticates(self) -> None:
        """During a rotation both the current and the replaced secret are good, whichever order they come in."""
        both = [self.config, self.config_before]

        assert {self.provider.authenticate(self.request(self.paid, config), both) for config in both} == {Proof.PROVED}
        assert {self.provider.authenticate(self.request(self.paid, config), both[::-1]) for config in both} == {Proof.PROVED}

    def test_one_flipped_byte_is_refused(self) -> None:
        """A signature covers the order's id to the last byte."""
        order_id = self.paid[self.order_field]
        flipped = order_id[:-1] + chr(ord(order_id[-1]) ^ 1)
        request = self.request(self.paid, self.config)
        tampered = replace(request, body=request.body.replace(order_id.encode(), flipped.encode()))

        assert tampered.body != request.body
        assert self.provider.authenticate(tampered, [self.config]) is Proof.REFUSED

    def test_without_an_order_or_a_status_it_is_malformed(self) -> None:
        """A notification that names no order, or does not say what happened, cannot be worked on."""
        for name in (self.order_field, self.status_field):
            missing = self.request({key: value for key, value in self.paid.items() if key != name}, self.config)
            blank = self.request({**self.paid, name: ""}, self.config)

            assert isinstance(self.provider.assertions(missing), Malformed), name
            assert isinstance(self.provider.assertions(blank), Malformed), name

    @pytest.mark.case("B39")
    def test_a_repeated_field_is_malformed(self) -> None:
        """Signer and reader may pick different ones of two values, so neither is picked."""
        for name in self.paid:
            read = self.provider.assertions(self.repeated(self.request(self.paid, self.config), name))

            assert isinstance(read, Malformed), name
            assert read.reason == "unreadable"

    def test_an_unknown_status_is_told_as_unknown(self) -> None:
        """A word that nobody has seen before is kept for a person, never an error and never dropped."""
        read = asserted(self.provider, self.request({**self.paid, self.status_field: "NEVER_SEEN"}, self.config))

        assert (read.status, read.effect) == ("NEVER_SEEN", Effect.UNKNOWN)

    @pytest.mark.case("B23")
    @pytest.mark.parametrize("written", ["1000", "1000.0", "1000.00", "1000.000", "0.10", "999999999999.99", "1234567.89"])
    def test_amounts_are_exact_decimals(self, written: str) -> None:
        """Money is the number that was written, whatever its trailing zeros."""
        read = asserted(self.provider, self.request({**self.paid, self.amount_field: written}, self.config))

        assert read.amount == Decimal(written)

    def test_two_orderings_of_one_form_name_one_operation(self) -> None:
        """Identity is the provider's operation, not the bytes that told of it."""
        forwards, backwards = (self.request(dict(pairs), self.config) for pairs in (self.paid.items(), reversed(list(self.paid.items()))))
        first, second = asserted(self.provider, forwards), asserted(self.provider, backwards)

        assert forwards.body != backwards.body
        assert first.operation_id is not None
        assert (first.operation_id, first.order_id, first.amount) == (second.operation_id, second.order_id, second.amount)
        assert self.provider.authenticate(backwards, [self.config]) is Proof.PROVED

    @anything
    @given(body=st.binary(max_size=300), content_type=st.sampled_from(["", "text/plain", "application/json", "text/plain; charset=\u00e9"]))
    def test_no_body_makes_it_raise(self, body: bytes, content_type: str) -> None:
        """Whatever strangers send is a value, never an exception, and proves nothing."""
        request = InboundRequest("POST", "", (("content-type", content_type),), body)

        assert isinstance(self.provider.assertions(request), list | Malformed)
        assert self.provider.authenticate(request, [self.config]) is Proof.REFUSED

    @anything
    @given(place=st.integers(min_value=0), put=st.binary(min_size=1, max_size=4))
    def test_no_damage_to_a_genuine_body_makes_it_raise(self, place: int, put: bytes) -> None:
        """Bytes put anywhere into a genuine notification are read or refused, never an exception."""
        request = self.request(self.paid, self.config)
        at = place % len(request.body)
        damaged = replace(request, body=request.body[:at] + put + request.body[at:])

        assert isinstance(self.provider.assertions(damaged), list | Malformed)
        assert isinstance(self.provider.authenticate(damaged, [self.config]), Proof)

    @pytest.mark.case("B31", "B37")
    @pytest.mark.parametrize("value", ["x" * 60_000, "\u09b6" * 3_000, "a\0b"], ids=["long", "Bengali", "NUL"])
    def test_a_large_or_odd_value_is_kept_and_proved(self, value: str) -> None:
        """A full body, non-ASCII text and NUL are read like any other value, and signed as they came."""
        request = self.request({**self.paid, "memo": value}, self.config)

        assert asserted(self.provider, request).fields["memo"] == value
        assert self.provider.authenticate(request, [self.config]) is Proof.PROVED

    async def test_a_confirmed_payment_is_the_providers_view(self) -> None:
        """What is confirmed names the operation, the order, the account, and exact money."""
        read = asserted(self.provider, self.request(self.paid, self.config))

        verdict = await self.provider.validate(Scripted(self.confirmation(self.paid)), self.config, read)

        assert isinstance(verdict, Confirmed)
        assert (verdict.effect, verdict.order_id) == (Effect.PAID, read.order_id)
        assert (verdict.operation_id, verdict.amount, verdict.currency) == (read.operation_id, read.amount, read.currency)
        assert verdict.account == self.config.account
        assert verdict.paid_at is None or verdict.paid_at.utcoffset() is not None
        json.dumps(verdict.answer)

    @pytest.mark.case("B41", "B43", "B46")
    @pytest.mark.parametrize("answer", UNCLEAR.values(), ids=UNCLEAR.keys())
    async def test_an_unclear_answer_is_no_verdict(self, answer: Answer | NoAnswer) -> None:
        """A timeout, an error page or half an answer never fails a payment: it is asked again."""
        for effect in Effect:
            word = next((word for word, meaning in self.provider.EFFECTS.items() if meaning is effect), "NEVER_SEEN")
            read = asserted(self.provider, self.request({**self.paid, self.status_field: word}, self.config))
            verdict = await self.provider.validate(Scripted([answer]), self.config, read)

            assert isinstance(verdict, Unknown), (word, verdict)
            assert re.fullmatch(r"[A-Za-z0-9_]{1,60}", verdict.cause)
        assert [type(verdict) for verdict in await self.provider.query(Scripted([answer]), self.config, read.order_id)] == [Unknown]

    async def test_no_secret_is_shown(self, caplog: pytest.LogCaptureFixture) -> None:
        """A secret is in what is sent to the provider and nowhere else: no repr, no log line, no URL, no stored answer."""
        caplog.set_level(0)
        secrets = [getattr(self.config, name).get_secret_value() for name in self.config.SECRETS]
        request = self.request(self.paid, self.config)
        read = asserted(self.provider, request)
        echoing = [replace(answer, body=answer.body[:-1] + self.echo(secrets)) for answer in self.confirmation(self.paid)]
        ask = Scripted(echoing)
        verdicts = [await self.provider.validate(ask, self.config, read), *await self.provider.query(ask, self.config, read.order_id)]
        shown = [repr(self.config), self.config.model_dump_json(), repr(request), repr(read), caplog.text]
        shown += [text for verdict in verdicts for text in (repr(verdict), json.dumps(dict(verdict.answer)))]
        shown += [question.url for question in ask.asked]

        assert secrets
        assert [secret for secret in secrets for text in shown if secret in text] == []

    def echo(self, secrets: Sequence[str]) -> bytes:
        """The end of an answer that gives our credentials back under the names they were sent with."""
        return f", {json.dumps(dict(zip(self.config.SECRETS, secrets, strict=True)))[1:-1]}}}".encode()

    def test_a_config_without_its_secret_is_refused_without_showing_one(self) -> None:
        """Secrets have no default, and a refusal does not repeat them."""
        written = self.config.model_dump()
        shown = {name: getattr(self.config, name).get_secret_value() for name in self.config.SECRETS}
        for name in self.config.SECRETS:
            for wrong in ({}, {name: ""}, {name: "  "}, {name: shown[name] + "\n"}, {name: "\0" + shown[name]}):
                given_values = {key: value for key, value in {**written, **shown}.items() if key != name} | wrong
                with pytest.raises(ValueError, match=name) as refused:
                    self.provider.Config(**given_values)

                assert shown[name] not in str(refused.value)

    def test_its_effects_and_limits_make_sense(self) -> None:
        """At least one word is a payment, and an order's id has a length."""
        meanings = Counter(self.provider.EFFECTS.values())

        assert meanings[Effect.PAID] >= 1
        assert set(meanings) <= {Effect.PAID, Effect.REFUNDED, Effect.INFORMATIVE, *NEGATIVE}
        assert 1 <= self.provider.order_id_length_max <= 64
        assert self.provider.ack.status // 100 == 2
