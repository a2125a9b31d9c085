"""What anybody on the internet can make of one genuine notification, without knowing the store's password. Pure.

Values are joined unescaped and the sender names what is covered, so some of these keep a matching hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ipn_gateway.simulator.sslcommerz import HASH_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Pairs = list[tuple[str, str]]
"""Names and values in the order on the wire; a name may come twice."""


def wrong_hash(fields: Mapping[str, str]) -> Pairs:
    """Both hashes are made up."""
    return list({**fields, "verify_sign": "0" * 32, "verify_sign_sha2": "0" * 64}.items())


def no_hash(fields: Mapping[str, str]) -> Pairs:
    """No hash at all."""
    return [(name, value) for name, value in fields.items() if name not in HASH_FIELDS]


def altered_amount(fields: Mapping[str, str]) -> Pairs:
    """Another amount under the old hash."""
    return list({**fields, "amount": "10.00", "currency_amount": "10.00"}.items())


def claimed_paid(fields: Mapping[str, str]) -> Pairs:
    """An invented `val_id` and VALID for an order of the attacker's choice, under the old hash."""
    return list({**fields, "status": "VALID", "val_id": "2601010000000forged0forged0"}.items())


def unknown_order(fields: Mapping[str, str]) -> Pairs:
    """An order that does not exist, under the old hash."""
    return list({**fields, "tran_id": "NO-SUCH-ORDER"}.items())


def other_store(fields: Mapping[str, str]) -> Pairs:
    """A store that is not the source's, under the old hash."""
    return list({**fields, "store_id": "otherstore"}.items())


def folded_status(fields: Mapping[str, str]) -> Pairs:
    """Turns a negative into VALID while the hash still matches: the true status hides at the end of `error`."""
    folded = {**fields, "error": f"{fields['error']}&status={fields['status']}", "status": "VALID"}
    return list(_uncovered(folded, "status").items())


def folded_order(fields: Mapping[str, str]) -> Pairs:
    """Names another order while the hash still matches: the true one hides at the end of `tran_date`."""
    folded = {**fields, "tran_date": f"{fields['tran_date']}&tran_id={fields['tran_id']}", "tran_id": "NO-SUCH-ORDER"}
    return list(_uncovered(folded, "tran_id").items())


def swallowed_amount(fields: Mapping[str, str]) -> Pairs:
    """Posts any amount while the hash still matches: a field's name, with `=` and `&` in it, swallows the true one."""
    name = f"amount={fields['amount']}&bank_tran_id"
    rest = {one: value for one, value in fields.items() if one not in {"amount", "bank_tran_id"}}
    key = ",".join(name if one == "bank_tran_id" else one for one in fields["verify_key"].split(",") if one != "amount")
    forged = {**rest, name: fields["bank_tran_id"], "amount": "10.00", "bank_tran_id": fields["bank_tran_id"]}
    return list({**forged, "verify_key": key}.items())


def odd_key(fields: Mapping[str, str]) -> Pairs:
    """A replay whose hash matches under a `verify_key` that names a field twice."""
    return list({**fields, "verify_key": f"{fields['verify_key']},tran_id"}.items())


def doubled_field(fields: Mapping[str, str]) -> Pairs:
    """A field twice: what is signed and what is read may differ."""
    return [*fields.items(), ("amount", "10.00")]


FORGERIES: Final[dict[str, Callable[[Mapping[str, str]], Pairs]]] = {
    forge.__name__: forge
    for forge in (
        wrong_hash,
        no_hash,
        altered_amount,
        claimed_paid,
        unknown_order,
        other_store,
        folded_status,
        folded_order,
        swallowed_amount,
        odd_key,
        doubled_field,
    )
}
"""All kinds by name."""

_NEGATIVE_ONLY: Final = frozenset({"folded_status"})


def kinds_for(fields: Mapping[str, str]) -> list[str]:
    """The kinds that can be made from this notification: a status hides only where `error` is its neighbour."""
    paid = "risk_level" in fields
    return [kind for kind in FORGERIES if not (paid and kind in _NEGATIVE_ONLY)]


def _uncovered(fields: Mapping[str, str], name: str) -> dict[str, str]:
    names = [one for one in fields["verify_key"].split(",") if one != name]
    return {**fields, "verify_key": ",".join(names)}
