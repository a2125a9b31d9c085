"""A caller that is done once, however often it has to ask: the key is made and kept before the first attempt, and used until the end.

`Caller(httpx.Client(base_url=…, headers={"Authorization": …}), sqlite3.connect("intents.db")).post("order INV-1", "/v1/orders", {…})`
"""

from __future__ import annotations

import json
import random
import threading
import uuid
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

ATTEMPTS_MAX = 20
WAIT_SECONDS_MAX = 3600  # between two attempts
PERSON_HOURS = 72  # and then a person may run it again, for as long as a weekend
HORIZON_HOURS = 96  # afterwards nothing is sent any more; the gateway keeps its answers for 168 hours from the first attempt
TIMEOUT_SECONDS = 60  # longer than the gateway takes, so that an answer is seldom lost

STILL_OPEN = frozenset({"/problems/idempotency-in-progress", "/problems/idempotency-indeterminate"})
INTENTS = """
CREATE TABLE IF NOT EXISTS intents (
    name TEXT PRIMARY KEY, key TEXT NOT NULL, body TEXT NOT NULL, made_at REAL NOT NULL DEFAULT (julianday('now')),
    status INTEGER, answer TEXT)"""
REFUSED_BEFORE = """
UPDATE intents SET key = ?2, body = ?3, made_at = julianday('now'), status = NULL
 WHERE name = ?1 AND status >= 400 AND (?4 OR body <> ?3)"""


class OutcomeUnknownError(Exception):
    """Nobody knows yet what became of it: run it again within the horizon, and after that ask the gateway before anything else."""


class Caller:
    """`intents` remembers across restarts what was asked for and what came of it. `wait` is called with seconds."""

    def __init__(self, http: httpx.Client, intents: sqlite3.Connection, wait: Callable[[float], object] | None = None) -> None:
        self._http = http
        self._intents = intents
        self._wait = wait or threading.Event().wait
        intents.execute(INTENTS)

    def post(self, name: str, path: str, body: dict[str, Any], *, again: bool = False) -> tuple[int, Any]:
        """Status and body, as soon as they are known. `name` is what is to happen once, such as `refund R-7 of INV-1`.

        A refusal is kept, and given without asking. When its cause was mended at the gateway, `again` sends the same body with a new key;
        what is done, or may have happened, it leaves as it is.

        Raises `OutcomeUnknownError`, and ValueError for another body under a name that may have happened.
        """
        key = self._key(name, json.dumps(body, sort_keys=True), again=again)
        for attempt in range(ATTEMPTS_MAX):
            age_hours, status, kept = self._known(name)
            if status is not None:
                return status, json.loads(kept)
            if age_hours > HORIZON_HOURS:
                break
            answer = self._attempt(path, key, body)
            if answer is not None and is_definite(answer):
                with self._intents:
                    found = (answer.status_code, answer.text or "null", name)
                    self._intents.execute("UPDATE intents SET status = ?, answer = ? WHERE name = ?", found)
                return answer.status_code, json.loads(answer.text or "null")
            if answer is not None and answer.status_code in {401, 403}:
                break  # mend the API key, then run it again
            self._wait(seconds_to_wait(attempt, answer))
        raise OutcomeUnknownError(name)

    def _key(self, name: str, body: str, *, again: bool) -> str:
        """The key of an intent, kept before it is sent. A changed body, or `again`, gets a new one, if it was definitely refused before."""
        made = (name, str(uuid.uuid4()), body)  # noqa: TID251 - a caller has no ids.py
        with self._intents:
            self._intents.execute("INSERT INTO intents (name, key, body) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", made)
            self._intents.execute(REFUSED_BEFORE, (*made, again))
        key, kept = self._intents.execute("SELECT key, body FROM intents WHERE name = ?", (name,)).fetchone()
        if kept != body:
            raise ValueError(f"{name}: another body was sent under this name, and it may have happened")
        return str(key)

    def _known(self, name: str) -> tuple[float, int | None, str]:
        """The age of an intent in hours, and what became of it."""
        select = "SELECT (julianday('now') - made_at) * 24, status, answer FROM intents WHERE name = ?"
        age_hours, status, answer = self._intents.execute(select, (name,)).fetchone()
        return age_hours, status, answer

    def _attempt(self, path: str, key: str, body: dict[str, Any]) -> httpx.Response | None:
        """The answer, or None where it may have been lost."""
        try:
            return self._http.post(path, json=body, headers={"Idempotency-Key": key}, timeout=TIMEOUT_SECONDS)
        except httpx.TransportError:
            return None


def is_definite(answer: httpx.Response) -> bool:
    """Whether this is what became of it. A 5xx is only if it comes from storage; 401, 403, 408 and 429 came before anything began."""
    if answer.headers.get("Idempotent-Replayed") == "true":
        return True
    if answer.status_code in {401, 403, 408, 429} or answer.is_server_error:
        return False
    return answer.status_code != httpx.codes.CONFLICT or answer.json()["type"] not in STILL_OPEN


def seconds_to_wait(attempt: int, answer: httpx.Response | None) -> float:
    """Doubled from a second on, with jitter, or as long as the gateway asks for; an hour at most."""
    asked_for = answer.headers.get("Retry-After", "") if answer is not None else ""
    backoff = 2.0**attempt * random.uniform(0.5, 1)  # noqa: S311 - jitter
    return min(WAIT_SECONDS_MAX, max(backoff, float(asked_for) if asked_for.isdecimal() else 0))
