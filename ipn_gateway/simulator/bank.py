"""The provider's memory: stores, sessions and payments, and the answers about them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import TYPE_CHECKING

from ipn_gateway.simulator import sessions, sslcommerz
from ipn_gateway.simulator.payments import Answer, Payment, Wanted, attempt_of
from ipn_gateway.simulator.world import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ipn_gateway.simulator.sessions import Session
    from ipn_gateway.simulator.sslcommerz import Attempt, Json
    from ipn_gateway.simulator.world import Chance, Clock

Order = tuple[str, str]
"""A store and its `tran_id`."""


@dataclass(slots=True)
class Bank:
    """All that the provider knows. Questions give an `Answer`; only recording it changes anything."""

    stores: Mapping[str, str] = field(repr=False)
    clock: Clock
    chance: Chance
    sessions: dict[str, Session] = field(default_factory=dict)
    payments: list[Payment] = field(default_factory=list)
    _payments_of: dict[Order, list[Payment]] = field(default_factory=lambda: defaultdict(list))
    _sessions_of: dict[Order, list[Session]] = field(default_factory=lambda: defaultdict(list))
    _by_val_id: dict[str, Payment] = field(default_factory=dict)
    _by_bank_id: dict[str, Payment] = field(default_factory=dict)

    def authenticates(self, names: Mapping[str, str]) -> bool:
        """Whether `store_id` and `store_passwd` belong together."""
        known = self.stores.get(names.get("store_id", ""))
        return known is not None and compare_digest(known.encode(), names.get("store_passwd", "").encode())

    def statuses(self) -> Counter[str]:
        """How many attempts ended in which status."""
        return Counter(payment.attempt.status for payment in self.payments)

    def open(self, form: Mapping[str, str], base_url: str) -> Answer:
        """Open a session. A repeated `tran_id` is tolerated: sources disagree, and refusing it would hide more faults."""
        if not self.authenticates(form):
            return Answer(sessions.refused("Store Credential Error Or Store is De-active"))
        if reason := sessions.problem(form):
            return Answer(sessions.refused(reason))
        session = sessions.session_of(f"{self.chance.getrandbits(128):032X}", form)
        return Answer(sessions.opened(session, base_url), lambda: self._remember(session))

    def session_for(self, store_id: str, tran_id: str) -> Session | None:
        """The newest session of an order."""
        return next(reversed(self._sessions_of.get((store_id, tran_id), [])), None)

    def attempt(self, wanted: Wanted, session: Session | None = None) -> Attempt:
        """Make an attempt, in this session or else in the order's newest one, if it has any."""
        session = session or self.session_for(wanted.store_id, wanted.tran_id)
        made = attempt_of(wanted, self.clock(), self.chance)
        while made.val_id in self._by_val_id or made.bank_tran_id in self._by_bank_id:
            made = attempt_of(wanted, self.clock(), self.chance)
        if session:
            session.attempts += 1
            session.closed = session.closed or made.status == "EXPIRED"
        self._keep(Payment(made, session_key=session.key if session else ""))
        return made

    def paid(self, val_id: str) -> Payment | None:
        """The payment with this `val_id`."""
        return self._by_val_id.get(val_id)

    def by_bank_tran_id(self, store_id: str, bank_tran_id: str) -> Payment | None:
        """A store's payment with this `bank_tran_id`; refunds name their payment so."""
        payment = self._by_bank_id.get(bank_tran_id)
        return payment if payment and payment.attempt.paid and payment.attempt.store_id == store_id else None

    def attempts(self, *, tran_id: str | None = None, val_id: str | None = None) -> list[Attempt]:
        """The attempts that fit, of all stores, oldest first."""
        made = (payment.attempt for payment in self.payments)
        return [one for one in made if tran_id in {None, one.tran_id} and val_id in {None, one.val_id}]

    def validation(self, store_id: str, val_id: str) -> Answer:
        """Order Validation API: VALID the first time, VALIDATED from then on."""
        payment = self._by_val_id.get(val_id)
        if payment is None or payment.attempt.store_id != store_id:
            return Answer({"status": "INVALID_TRANSACTION", "APIConnect": "DONE"})
        status = "VALIDATED" if payment.validated_on else "VALID"
        validated_on = payment.validated_on or text_of(self.clock())
        body = sslcommerz.validator_answer(payment.attempt, status=status, validated_on=validated_on)
        return Answer(body, lambda: setattr(payment, "validated_on", validated_on))

    def by_order(self, store_id: str, tran_id: str) -> Answer:
        """Transaction query by `tran_id`: every attempt, and each session that nobody tried yet as PROCESSING."""
        attempts = [payment.element() for payment in self._payments_of.get((store_id, tran_id), [])]
        untried = [session for session in self._sessions_of.get((store_id, tran_id), []) if not session.attempts]
        elements = attempts + [_processing(session) for session in untried]
        count: object = len(elements) if attempts else str(len(elements))  # seen as a number and as text
        if not elements:
            count, elements = 0, [{"tran_id": tran_id, "status": "INVALID"}]
        return Answer({"APIConnect": "DONE", "no_of_trans_found": count, "element": elements})

    def by_session(self, store_id: str, key: str) -> Answer:
        """Transaction query by `sessionkey`: one flat object, of the paid attempt or else of the last."""
        session = self.sessions.get(key)
        if session is None or session.store_id != store_id:
            return Answer({"APIConnect": "DONE", "sessionkey": key, "status": "INVALID"})
        tried = [one for one in self._payments_of.get((store_id, session.tran_id), []) if one.session_key == key]
        best = next((one for one in tried if one.attempt.paid), tried[-1] if tried else None)
        element = best.element() if best else _processing(session)
        return Answer({"APIConnect": "DONE", "sessionkey": key, **element})

    def _remember(self, session: Session) -> None:
        self.sessions[session.key] = session
        self._sessions_of[session.store_id, session.tran_id].append(session)

    def _keep(self, payment: Payment) -> None:
        made = payment.attempt
        self.payments.append(payment)
        self._payments_of[made.store_id, made.tran_id].append(payment)
        if made.val_id:
            self._by_val_id[made.val_id] = payment
        if made.bank_tran_id:
            self._by_bank_id[made.bank_tran_id] = payment


def _processing(session: Session) -> Json:
    return {"tran_id": session.tran_id, "status": "PROCESSING", "val_id": ""}
