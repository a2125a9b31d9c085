"""`/healthz`: this process lives. `/readyz`: it can do its work; if not, the answer says why."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg
from fastapi import APIRouter, Depends, Response

from ipn_gateway import migrations, retention
from ipn_gateway.errors import GatewayError
from ipn_gateway.runtime import Runtime
from ipn_gateway.web.deps import RuntimeDep, open_to_all

router = APIRouter(tags=["service"], dependencies=[Depends(open_to_all)])

CHECK_SECONDS_MAX: Final = 3.0
CLOCK_OFF_SECONDS_MAX: Final = 60.0  # ids carry host time

Finding = dict[str, Any]


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """200 as long as this process lives."""
    return {"status": "alive"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(rt: RuntimeDep, response: Response) -> dict[str, Any]:
    """200 when the process can do its work, else 503; each check with what it found."""
    checks = dict(zip(CHECKS, await asyncio.gather(*(_contained(check, rt) for check in CHECKS.values())), strict=True))
    ready = all(found["ok"] for found in checks.values())
    response.status_code = 200 if ready else 503
    response.headers["Cache-Control"] = "no-store"
    return {"status": "ready" if ready else "unready", "checks": checks}


async def _contained(check: Callable[[Runtime], Awaitable[Finding]], rt: Runtime) -> Finding:
    try:
        async with asyncio.timeout(CHECK_SECONDS_MAX):
            return await check(rt)
    except (psycopg.Error, GatewayError, TimeoutError) as error:
        return {"ok": False, "reason": f"The database does not answer ({type(error).__name__})."}


async def _database(rt: Runtime) -> Finding:
    async with rt.db.autocommit("health.database") as tx:
        standby = await tx.value("SELECT pg_is_in_recovery()")
    return {"ok": not standby} | ({"reason": "The server is a read-only standby."} if standby else {})


async def _migrations(rt: Runtime) -> Finding:
    """A database that is newer than this program is no hindrance: an upgrade rolls over one process after the other."""
    applied, known = await migrations.applied(rt.db), migrations.revisions()
    head = known[-1]
    behind = not applied or any(revision in known and revision != head for revision in applied)
    return {"ok": not behind, "head": head} | ({"reason": "Migrations are pending: run `ipn-gateway migrate`."} if behind else {})


async def _partitions(rt: Runtime) -> Finding:
    days = await retention.days_ahead(rt.db)
    finding: Finding = {"ok": days >= retention.DAYS_AHEAD_MIN, "days_ahead": round(days, 1)}
    return finding if finding["ok"] else finding | {"reason": "Partitions end too soon: is the maintenance role running?"}


async def _clock(rt: Runtime) -> Finding:
    async with rt.db.autocommit("health.clock") as tx:
        theirs = await tx.value("SELECT ipn_now()")
    off = (rt.clock.now() - theirs).total_seconds()
    finding: Finding = {"ok": abs(off) <= CLOCK_OFF_SECONDS_MAX, "seconds_off": round(off, 3)}
    return finding if finding["ok"] else finding | {"reason": "This host's clock is not the database's: ids would lie."}


CHECKS: Final = {"database": _database, "migrations": _migrations, "partitions": _partitions, "clock": _clock}
