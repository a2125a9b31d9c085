"""The Idempotency-Key layer: claim the key, drive the phases, answer from what is stored. It is called by the operation, never middleware.

The widely-used Idempotency-Key convention. A request goes one of four ways: it owns the key and executes; it is answered from the stored
response; it is told to wait (409) or that the outcome is unknown (409); or it is refused, because the key stands for another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg

from ipn_gateway import fingerprints, idempotency_keys, ids, logs
from ipn_gateway.errors import (
    MEDIA_TYPE,
    CommitUnknown,
    ConfigurationError,
    GatewayError,
    IdempotencyIndeterminate,
    IdempotencyInProgress,
    IdempotencyKeyMissing,
    IdempotencyKeyReused,
    IdempotencyUnavailable,
    LeaseLost,
    Overloaded,
    PoolExhausted,
)
from ipn_gateway.idempotency_keys import NewRow
from ipn_gateway.operations import Advance, Doubt, Downstream, Finished, Operation, Phase, Retry, Step, Work, is_stored
from ipn_gateway.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ipn_gateway.db import Database, Transaction
    from ipn_gateway.fingerprints import Kind
    from ipn_gateway.idempotency_keys import Row

RUNNING_MAX: Final = 1000
"""Keyed operations at once in this process; more are answered 503."""

CALLING_MAX: Final = 256
CALLING_PER_TENANT: Final = 64
"""Of those, the ones that call somebody else: a provider that hangs keeps neither the other tenants nor what is received waiting."""

WAIT_SECONDS: Final = 2  # what a 409 asks for at most, while somebody works on it
INDETERMINATE_WAIT_SECONDS: Final = 3600
RECORD_WAIT_SECONDS: Final = 0.5  # between tries to record what a call told that must not be repeated
_NOT_RECORDED: Final = (
    "The other side was asked, and its answer could not be recorded: it is not known whether it happened. Send the same request with the "
    "same key again to learn the outcome; never the same intent with another key."
)
LEASE_PER_CALL: Final = 1.25  # a lease is so many times what a call may take at most; its own limit is shorter still


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """One request as the layer sees it: who sent it, its key, and everything that a fingerprint may be made of."""

    tenant_id: str
    key: str | None = field(repr=False)
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets; `replayed` when it comes from storage."""

    status: int
    body: bytes = field(repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    replayed: bool = False


class Idempotency:
    """The layer over one database. Raises `ConfigurationError` for operations that cannot be kept with these limits."""

    def __init__(self, db: Database, operations: Iterable[Operation], *, lease_seconds: float, retention_hours: float) -> None:
        self._db = db
        self._slots = Slots(RUNNING_MAX)
        self._calling: Counter[str] = Counter()  # by tenant
        self.lease_seconds = lease_seconds
        self.retention_hours = retention_hours
        self.operations: dict[str, Operation] = {}
        for operation in operations:
            self._register(operation)

    def _register(self, operation: Operation) -> None:
        operation.retention_hours(self.retention_hours)
        if operation.name in self.operations:
            raise ConfigurationError(f"The operation {operation.name} is declared twice.")
        if operation.horizon_seconds is not None and operation.horizon_seconds <= self.lease_seconds:
            raise ConfigurationError(f"The other side of {operation.name} forgets our key before a lease is over.")
        self.operations[operation.name] = operation

    async def run(self, operation: Operation, request: KeyedRequest, phases: Mapping[str, Phase]) -> Answer:
        """Execute the operation once for its key, in a task of its own: a client that goes away stops nothing.

        Raises what the client is to be told: `IdempotencyKeyReused`, `IdempotencyInProgress`, `IdempotencyIndeterminate`,
        `IdempotencyUnavailable`, and what a phase raised if that is not stored.
        """
        if set(phases) != set(operation.phases):
            msg = f"{operation.name} has the phases {operation.phases}, not {tuple(phases)}"
            raise RuntimeError(msg)
        if self._slots.free <= 0:
            raise Overloaded
        outcome = await asyncio.shield(self._slots.start(self._outcome(operation, request, phases), name=operation.name))
        if isinstance(outcome, Answer):
            return outcome
        raise outcome

    async def drained(self, *, seconds: float) -> bool:
        """Wait for what still runs; whether all of it ended in time."""
        return await self._slots.drained(seconds=seconds)

    async def _outcome(self, operation: Operation, request: KeyedRequest, phases: Mapping[str, Phase]) -> Answer | Exception:
        try:
            if request.key is None:
                return await self._without_key(operation, request, phases)
            claimed = await self._claimed(operation, request, request.key)
            if isinstance(claimed, Answer):
                return claimed
            drive = _Drive(self, operation, phases)
            return await (self._calling_out(drive, claimed) if operation.intents else drive.run(claimed))
        except Exception as error:  # noqa: BLE001 - raised again in the task of the request
            return error

    async def _calling_out(self, drive: _Drive, row: Row) -> Answer:
        """Run what may call somebody else, while there is room; a repeat that only asks for its answer takes none."""
        if self._calling.total() >= CALLING_MAX or self._calling[row.tenant_id] >= CALLING_PER_TENANT:
            await drive.give_back(row)
            raise Overloaded("Too many calls to your provider are open; send it again after the time that Retry-After gives.")
        self._calling[row.tenant_id] += 1
        try:
            return await drive.run(row)
        finally:
            self._calling[row.tenant_id] -= 1
            self._calling += Counter()  # without those at zero

    async def _without_key(self, operation: Operation, request: KeyedRequest, phases: Mapping[str, Phase]) -> Answer:
        """An operation that needs no key has one phase, and then nothing is stored."""
        if operation.key_required:
            raise IdempotencyKeyMissing
        phase, work = phases[operation.phases[0]], Work(request.tenant_id, operation.name, "")
        outcome = await phase.call(work) if phase.call else None

        async def commit() -> Answer:
            async with self._db.transaction(phase.transaction) as tx:
                step = await phase.commit(tx, work, outcome)
            if isinstance(step, Retry):
                raise step.error
            assert isinstance(step, Finished)  # noqa: S101 - there is one phase
            return _first(step)

        return await self._db.rerun(commit)

    async def _claimed(self, operation: Operation, request: KeyedRequest, key: str) -> Row | Answer:
        """The row that is ours to work on, or the answer of the one who had it before."""
        new = NewRow(
            tenant_id=request.tenant_id,
            operation=operation.name,
            key=key,
            id=ids.new(self._db.clock.now()),
            fingerprint=_fingerprint(operation, request, operation.fields),
            version=operation.version,
            lease_seconds=self.lease_seconds,
            retention_hours=self.retention_hours,
        )
        try:
            row = await self._db.rerun(idempotency_keys.claim, self._db, new)
            if row.id == new.id:
                return row
            return await self._found(operation, request, row)
        except (psycopg.Error, Overloaded) as error:
            logs.get("idempotency").error("idempotency.unavailable", operation=operation.name, error_class=type(error).__name__)
            raise IdempotencyUnavailable from error

    async def _found(self, operation: Operation, request: KeyedRequest, row: Row) -> Row | Answer:
        """The fingerprint comes first: another request learns nothing and takes nothing."""
        fields = operation.projection(row.fingerprint_version)
        if fields is None:
            raise IdempotencyUnavailable("The key was first used with a newer version of the service; send it again later.")
        if _fingerprint(operation, request, fields) != row.fingerprint:
            logs.count("idempotency.mismatches")
            raise IdempotencyKeyReused(key=row.digest)
        if row.state == "completed":
            return _replayed(row)
        if row.state == "indeterminate":
            raise _indeterminate(row)
        if row.recovery_point not in operation.phases:
            raise IdempotencyUnavailable("The key is worked on by a newer version of the service; send it again later.")
        if row.lease_seconds is None or row.lease_seconds > 0:
            raise _in_progress(row)
        if may_have_called(operation, row):
            await self._db.rerun(self.doubt, row, operation)
            return await self.standing(row)
        taken = await idempotency_keys.take_over(self._db, row, self.lease_seconds)
        if taken is None:
            return await self.standing(row)
        logs.count("idempotency.take_overs")
        logs.get("idempotency").warning(
            "idempotency.taken_over", id=row.public_id, key=row.digest, operation=row.operation, point=row.recovery_point, fence=taken.fence
        )
        return taken

    async def standing(self, row: Row) -> Answer:
        """What a client is told that does not own the row, by what it is now."""
        async with self._db.autocommit("idempotency.read") as tx:
            now = await idempotency_keys.read(tx, row.tenant_id, row.operation, row.key)
        if now is None or now.id != row.id:
            raise IdempotencyUnavailable
        if now.state == "completed":
            return _replayed(now)
        raise _indeterminate(now) if now.state == "indeterminate" else _in_progress(now)

    async def doubt(self, row: Row, operation: Operation) -> bool:
        """Mark an abandoned row as indeterminate; whether it was this call that did."""
        async with self._db.transaction("idempotency.doubt") as tx:
            marked = await idempotency_keys.doubt(tx, row, operation)
        if marked:
            idempotency_keys.report_doubt(row)
        return marked


class _Drive:
    """One request that owns its key, from its recovery point to its answer."""

    def __init__(self, layer: Idempotency, operation: Operation, phases: Mapping[str, Phase]) -> None:
        self._layer = layer
        self._db = layer._db  # noqa: SLF001 - of one module
        self._lease_seconds = layer.lease_seconds
        self._operation = operation
        self._phases = phases

    async def run(self, row: Row) -> Answer:
        logs.count("idempotency.executed")
        while True:
            began = self._db.clock.monotonic_seconds()
            try:
                step = await self._phase(row)
            except GatewayError as refused:
                return await self._refused(row, refused)
            except TimeoutError as error:
                if self._may_have_called(row):
                    return await self._overtaken(row)
                await self.give_back(row)
                raise Overloaded from error
            except Exception:
                await self.give_back(row)
                raise
            finally:
                self._measure(row, self._db.clock.monotonic_seconds() - began)
            if isinstance(step, Retry):
                raise step.error
            if isinstance(step, Doubt):
                idempotency_keys.report_doubt(row)
                raise _indeterminate(row)
            if isinstance(step, Answer):
                return step
            row = step

    def _measure(self, row: Row, seconds: float) -> None:
        if seconds > self._lease_seconds / 2:
            logs.count("idempotency.slow")
            logs.get("idempotency").warning(
                "idempotency.slow", operation=row.operation, point=row.recovery_point, seconds=round(seconds, 1)
            )

    async def _phase(self, row: Row) -> Row | Answer | Retry | Doubt:
        """One phase: the foreign call, under a limit that the lease outlives, then the commit, run again where its outcome is unknown.

        What was learned in a call that must not be repeated is lost if it is not recorded: that commit is tried for as long as the lease.
        """
        phase, outcome = self._phases[row.recovery_point], None
        ends_at = self._db.clock.monotonic_seconds() + self._lease_seconds
        if phase.call:
            async with asyncio.timeout(self._lease_seconds / LEASE_PER_CALL):
                outcome = await phase.call(row.work)
        done: Row | Answer | Retry | Doubt | None = None

        async def commit() -> Row | Answer | Retry | Doubt:
            nonlocal done
            async with self._db.transaction(phase.transaction) as tx:
                if done is not None and await _is_past(tx, row):
                    return done  # the COMMIT that seemed lost was none
                done = await self._written(tx, row, await phase.commit(tx, row.work, outcome))
            return done

        while True:
            try:
                return await self._db.rerun(commit)
            except Overloaded as error:
                if not (phase.call and self._may_have_called(row)) or (error.__cause__ is None and not isinstance(error, PoolExhausted)):
                    raise
                if self._db.clock.monotonic_seconds() + RECORD_WAIT_SECONDS > ends_at:
                    raise IdempotencyUnavailable(_NOT_RECORDED) from error
                logs.count("idempotency.record_retried")
            await asyncio.sleep(RECORD_WAIT_SECONDS)

    def _may_have_called(self, row: Row) -> bool:
        return self._operation.downstream is Downstream.NONE and row.recovery_point in self._operation.intents

    async def _written(self, tx: Transaction, row: Row, step: Step) -> Row | Answer | Retry | Doubt:
        if isinstance(step, Advance):
            return await idempotency_keys.advance(tx, row, step.point, step.progress, self._lease_seconds)
        if isinstance(step, Retry):
            await idempotency_keys.free(tx, row, step.point)
            return step
        if isinstance(step, Doubt):
            await idempotency_keys.give_up(tx, row, self._operation)
            return step
        if not is_stored(step.status):
            msg = f"{self._operation.name} must not finish with {step.status}, which is never stored: return Retry, or raise an error"
            raise RuntimeError(msg)
        await idempotency_keys.finish(tx, row, self._operation, step)
        return _first(step)

    async def _refused(self, row: Row, refused: GatewayError) -> Answer:
        """A deliberate error is the answer, stored. Any other leaves the key free, or to its lease where something may have happened."""
        if isinstance(refused, LeaseLost):
            return await self._overtaken(row)
        if is_stored(refused.status) and not isinstance(refused, ConfigurationError):
            try:
                return await self._db.rerun(self._store, row, refused)
            except LeaseLost:
                return await self._overtaken(row)
        if not isinstance(refused.__cause__, (psycopg.Error, CommitUnknown)):
            await self.give_back(row)
        raise refused

    async def _store(self, row: Row, refused: GatewayError) -> Answer:
        body = json.dumps(refused.document(), ensure_ascii=False, separators=(",", ":")).encode()
        finished = Finished(refused.status, body, media_type=MEDIA_TYPE)
        async with self._db.transaction("idempotency.refuse") as tx:
            if not await _is_past(tx, row):
                await idempotency_keys.finish(tx, row, self._operation, finished)
        logs.count("idempotency.refused")
        return _first(finished)

    async def _overtaken(self, row: Row) -> Answer:
        """Our lease was over and somebody else has the row: what is true now is what they made of it."""
        logs.count("idempotency.leases_lost")
        logs.get("idempotency").warning("idempotency.lease_lost", id=row.public_id, operation=row.operation, point=row.recovery_point)
        return await self._layer.standing(row)

    async def give_back(self, row: Row) -> None:
        """The key is free at once for the same request, unless a foreign call may have happened: then the lease has to end first."""
        if self._may_have_called(row):
            return
        with contextlib.suppress(psycopg.Error, GatewayError):
            async with self._db.transaction("idempotency.give_back") as tx:
                await idempotency_keys.free(tx, row, row.recovery_point)


async def _is_past(tx: Transaction, row: Row) -> bool:
    """Whether our own earlier COMMIT has happened after all. Raises `LeaseLost` where somebody else owns the row."""
    now = await idempotency_keys.lock(tx, row.tenant_id, row.id)
    if now is not None and now.fence != row.fence:
        raise LeaseLost
    return now is None or now.state != "in_progress" or now.recovery_point != row.recovery_point


def may_have_called(operation: Operation, row: Row) -> bool:
    """Whether the abandoned row's next call may have happened and must not happen again."""
    forgotten = operation.horizon_seconds is not None and row.age_seconds > operation.horizon_seconds
    return row.recovery_point in operation.intents and (operation.downstream is Downstream.NONE or forgotten)


def _fingerprint(operation: Operation, request: KeyedRequest, fields: Mapping[str, Kind]) -> bytes:
    return fingerprints.fingerprint(operation.name, fields, request.body, path=request.path, query=request.query)


def _first(finished: Finished) -> Answer:
    media_type = (("Content-Type", finished.media_type),) if finished.body else ()
    return Answer(finished.status, finished.body, (*media_type, *finished.headers))


def _replayed(row: Row) -> Answer:
    logs.count("idempotency.replays")
    assert row.response_status is not None  # noqa: S101 - checked by the table
    headers = tuple((name, value) for name, value in row.response_headers or ())
    return Answer(row.response_status, row.response_body or b"", headers, replayed=True)


def _in_progress(row: Row) -> IdempotencyInProgress:
    logs.count("idempotency.in_progress")
    return IdempotencyInProgress(retry_after_seconds=max(1, min(WAIT_SECONDS, int(row.lease_seconds or 0))))


def _indeterminate(row: Row) -> IdempotencyIndeterminate:
    return IdempotencyIndeterminate(members={"reconciliation_id": row.public_id}, retry_after_seconds=INDETERMINATE_WAIT_SECONDS)
