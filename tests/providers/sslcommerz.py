"""Posts and answers of SSLCOMMERZ for tests: golden samples, a signer written apart from the adapter's, and both APIs' habits."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ipn_gateway.providers import forms
from ipn_gateway.providers.base import Answer, InboundRequest, NoAnswer, Proof, ProviderConfig
from ipn_gateway.providers.sslcommerz import PROVIDER
from ipn_gateway.providers.sslcommerz_api import SslcommerzConfig
from tests.providers.contract import ROOT, Scripted, answered, asserted, sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORM = (("content-type", "application/x-www-form-urlencoded"),)
STORE = SslcommerzConfig(store_id="demos64b1", store_passwd="demo_pass@ssl", mode="sandbox")
SHOP = SslcommerzConfig(store_id="demo01", store_passwd="Demo@Pass1", mode="live")
SHOP_BEFORE = SslcommerzConfig(store_id="demo01", store_passwd="Demo@Pass0", mode="live")
SAMPLES = ROOT / "tests/providers/samples/sslcommerz"


def load(name: str) -> InboundRequest:
    return sample(SAMPLES / f"{name}.http")


def fields_of(name: str) -> dict[str, str]:
    """A sample's fields without those of the hash."""
    form = forms.read(load(name))
    assert isinstance(form, forms.Form)
    return {key: text for key, text in form.texts().items() if not key.startswith("verify_")}


V1, V2, V3, F0 = (fields_of(name) for name in ("v1_valid", "v2_cancelled", "v3_risk_usd", "f0_valid"))


def sign(fields: Mapping[str, str], config: SslcommerzConfig, names: Iterable[str] | None = None, algorithm: str = "md5") -> str:
    """The published algorithm, written apart from the adapter's."""
    passwd = config.store_passwd.get_secret_value()
    signed = {name: fields[name] for name in (fields if names is None else names)}
    signed["store_passwd"] = hashlib.new(algorithm, passwd.encode()).hexdigest()
    return hashlib.new(algorithm, "&".join(f"{name}={signed[name]}" for name in sorted(signed)).encode()).hexdigest()


def post(fields: Mapping[str, str], headers: tuple[tuple[str, str], ...] = FORM) -> InboundRequest:
    return InboundRequest("POST", "", headers, urlencode(fields).encode())


def signed(
    fields: Mapping[str, str], config: SslcommerzConfig, names: Iterable[str] | None = None, key: str | None = None
) -> InboundRequest:
    """A signed post; `names` are those in the hash, `key` what `verify_key` says when it is not just these."""
    listed = list(fields if names is None else names)
    return post({**fields, "verify_sign": sign(fields, config, listed), "verify_key": ",".join(listed) if key is None else key})


def proof(request: InboundRequest, *configs: ProviderConfig) -> Proof:
    return PROVIDER.authenticate(request, configs)


def validator_answer(fields: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """What the validator answers about a post: the store is not named, and some numbers are numbers."""
    kept = {name: text for name, text in fields.items() if name not in {"error", "store_id"}}
    own = {"APIConnect": "DONE", "validated_on": "2026-07-14 12:03:40", "offer_avail": 1, "isTokeizeSuccess": 0, "gw_version": ""}
    return {name: value for name, value in {**kept, **own, **changes}.items() if value is not ...}


def element(fields: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """One attempt as the transaction query lists it."""
    listed = {"val_id": "", "bank_gw": "demo", **{name: text for name, text in fields.items() if name != "store_id"}}
    return {name: value for name, value in {**listed, **changes}.items() if value is not ...}


def listing(*elements: Mapping[str, Any], **changes: Any) -> Answer:
    return answered({"APIConnect": "DONE", "no_of_trans_found": len(elements), "element": list(elements), **changes})


NOT_KNOWN = {"APIConnect": "DONE", "no_of_trans_found": 0, "element": [{"tran_id": F0["tran_id"], "status": "INVALID"}]}
FAILED = {**V2, "tran_id": F0["tran_id"], "status": "FAILED", "bank_tran_id": "BT-F1", "tran_date": "2026-03-01 12:58:00"}
CANCELLED = {**V2, "tran_id": F0["tran_id"]}


async def verdict_on(fields: Mapping[str, str], *answers: Answer | NoAnswer, config: SslcommerzConfig = SHOP) -> Any:
    return await PROVIDER.validate(Scripted(answers), config, asserted(PROVIDER, signed(fields, config)))
