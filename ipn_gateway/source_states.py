"""A source's health: unknown answers in a row lead to probing, refutations in a row to an alarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ipn_gateway import logs

if TYPE_CHECKING:
    from ipn_gateway.db import Database

PROBING_FROM: Final = 5  # unknown answers in a row
PROBE_SECONDS: Final = 1.0
REFUTED_ALARM: Final = 5  # refutations in a row
STREAK_MAX: Final = 1000


async def unknown_answer(db: Database, source_id: str, cause: str) -> None:
    """Count it; from the fifth in a row on the source is probed by one delivery at a time, at most once a second."""
    async with db.transaction("source_states.unknown_answer") as tx:
        streak = await tx.value(
            """INSERT INTO source_states (source_id, unknown_streak) VALUES (%(source)s, 1)
               ON CONFLICT ON CONSTRAINT source_states_pkey DO UPDATE
                  SET unknown_streak = least(source_states.unknown_streak + 1, %(max)s),
                      probe_at = ipn_now() + %(probe)s * interval '1 second'
               RETURNING unknown_streak""",
            {"source": source_id, "probe": PROBE_SECONDS, "max": STREAK_MAX},
        )
    if streak == PROBING_FROM:
        logs.get("sources").error("source.no_verdicts", source=source_id, cause=cause, in_a_row=streak)


async def clear_answer(db: Database, source_id: str, unknown_streak: int, *, confirmed: bool) -> None:
    """The source answers: after a run of unknown answers everything that waits for its next question is due."""
    async with db.transaction("source_states.clear_answer") as tx:
        await tx.execute(
            """UPDATE source_states SET unknown_streak = 0, refuted_streak = CASE WHEN %(confirmed)s THEN 0 ELSE refuted_streak END
                WHERE source_id = %(source)s""",
            {"source": source_id, "confirmed": confirmed},
        )
        if unknown_streak >= PROBING_FROM:
            await tx.execute(
                """UPDATE inbox SET due_at = ipn_now()
                    WHERE source_id = %(source)s AND state = 'received' AND asked > 0 AND due_at > ipn_now()
                      AND lease_expires_at IS NULL""",
                {"source": source_id},
            )


async def refuted_answer(db: Database, source_id: str) -> None:
    """A run of refutations smells of wrong credentials or the wrong mode: an alarm for the source."""
    async with db.transaction("source_states.refuted_answer") as tx:
        streak = await tx.value(
            """INSERT INTO source_states (source_id, refuted_streak) VALUES (%(source)s, 1)
               ON CONFLICT ON CONSTRAINT source_states_pkey DO UPDATE
                  SET refuted_streak = least(source_states.refuted_streak + 1, %(max)s)
               RETURNING refuted_streak""",
            {"source": source_id, "max": STREAK_MAX},
        )
    if streak >= REFUTED_ALARM:
        logs.count("sources.refuted_alarm")
        logs.get("sources").error("source.refutations", source=source_id, in_a_row=streak)
