"""`/metrics` for Prometheus: what this process counted since its start, its connections, and the gauges of the database.

The gauges are read when somebody asks, at most every five seconds and by one at a time, whoever asks meanwhile.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ipn_gateway import gauges, logs
from ipn_gateway.gauges import Gauge, Reading
from ipn_gateway.recent import Recent
from ipn_gateway.retention import Windows
from ipn_gateway.runtime import Runtime
from ipn_gateway.web.deps import open_to_all

router = APIRouter(tags=["service"], dependencies=[Depends(open_to_all)])

READ_AGAIN_SECONDS: Final = 5.0

COUNTERS: Final[Mapping[str, str]] = {
    "requests.<status>": "requests that were answered, by status",
    "requests.failed": "faults of ours, each of which is an incident in the log",
    "logs.lost": "lines of the log that could not be written",
    "requests.body_not_arrived": "requests whose body did not arrive in time",
    "heads.<why>": "requests whose head was too_large or too_slow",
    "notifications.<outcome>": "notifications that were decided, by outcome",
    "notifications.refused_beyond_rate": "refused notifications that came faster than they are kept as evidence",
    "notifications.not_read": "notifications whose body was too large or did not arrive",
    "notifications.unknown_source": "posts to a source that does not exist",
    "notifications.method_not_allowed": "requests of a listener with another method than its own",
    "notifications.replayed": "notifications that were replayed",
    "notifications.resolved.<decision>": "notifications that a person decided: apply or dismiss",
    "returns.not_looked": "browser returns that could not be told how the order stands",
    "provider.questions": "questions to providers about notifications",
    "provider.queries": "questions to providers about orders",
    "provider.sessions": "payment pages that providers were asked for",
    "provider.refunds": "refunds that providers were asked for",
    "provider.refund_questions": "questions to providers about refunds that they accepted",
    "inbox.order_locked": "notifications whose order somebody else held: tried again seconds later",
    "inbox.lease_lost": "notifications that another worker had taken over before we were done",
    "sources.refuted_alarm": "notifications refuted after many others of their source: is its configuration right?",
    "sweeps.<outcome>": "payments found by asking instead of by notification, by outcome",
    "refunds.<status>": "refunds that became processing, succeeded, failed or indeterminate; the last kind waits for a person",
    "event_deliveries.<after>": "attempts to deliver an event, by what followed: delivered, retried, dead or cancelled",
    "event_deliveries.lease_lost": "attempts whose event delivery another dispatcher had taken over before they were recorded",
    "event_deliveries.too_late": "event deliveries whose lease left no time for an attempt: nothing was sent, and they are claimed again",
    "event_deliveries.recovered": "event deliveries that a recovery of their endpoint made due",
    "endpoint_tests.<outcome>": "tests of endpoints, by the outcome of their attempt",
    "events.published": "events of tenants' own types",
    "endpoints.warned": "warnings that an endpoint has had nothing but failures for a day, or for three",
    "endpoints.disabled": "endpoints that were disabled: gone, or nothing but failures for five days",
    "idempotency.executed": "keyed calls that were worked on, from their beginning or from where another one had come to",
    "idempotency.record_retried": "tries to record what a provider answered, while the database was away",
    "idempotency.replays": "keyed calls that were answered from storage",
    "idempotency.refused": "keyed calls whose refusal was stored as their answer",
    "idempotency.mismatches": "keys that came again with another request",
    "idempotency.in_progress": "keys that came again while the first call was worked on",
    "idempotency.take_overs": "keys whose lease was over and that a repeat took over",
    "idempotency.leases_lost": "calls that another one had taken over before they were done",
    "idempotency.indeterminate": "keys whose foreign call has an unknown outcome; each waits for the provider's word or for a person",
    "idempotency.slow": "keyed calls that took longer than half their lease",
    "idempotency.cross_operation_reuse": "keys that are new for an operation and known for another one",
    "idempotency.resolved.<decision>": "indeterminate keys that a person or the provider's word decided",
    "idempotency.pruned": "completed keys that were deleted after their retention",
    "retention.partitions_dropped": "partitions that were dropped after their retention",
    "retention.postponed": "times that a partition could not be detached or dropped because somebody used it for too long",
    "retention.clock_off": "times that nothing was pruned because the clocks of host and database were more than an hour apart",
    "retention.events_deleted": "events that were deleted, with their event deliveries, after their retention",
    "retention.dead_letters_deleted": "of those event deliveries the ones that were dead, and that nobody had sent once more",
    "retention.secrets_deleted": "secrets that were deleted after they had expired",
    "transactions.<name>": "transactions that ended, by name",
    "transactions.rerun": "transactions that were run again after a deadlock, a lost connection or an unknown commit",
    "pool.exhausted": "calls that waited for a connection in vain",
    "pool.refused": "calls that did not wait for a connection, because too many did or the database was away",
    "connections.cut": "connections to a silent server that were cut",
    "batches.taken_apart": "sets that failed for one of their items and were written one by one",
    "gauges.not_read": "times that not all gauges could be read",
}
"""Every counter by its dotted name and what it counts; `<…>` stands for a word that the code puts in."""

GAUGES: Final[Mapping[str, Gauge]] = {
    **gauges.CATALOGUE,
    "database_connections_in_use": Gauge("connections in use, by the share of the process that they belong to", "share"),
    "database_connections_waiting": Gauge("callers that wait for a connection, by share", "share"),
}
"""Every gauge and what it says."""

_LABELLED: Final = (
    (re.compile(r"requests\.(?P<label>\d+|<\w+>)"), "requests", "status"),
    (re.compile(r"transactions\.(?!rerun$)(?P<label>.+)"), "transactions", "transaction"),
)


class Gauges:
    """The last readings of a runtime's database."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._recent: Recent[list[Reading]] = Recent(rt.clock, seconds=READ_AGAIN_SECONDS, entries_max=1)

    async def now(self) -> list[Reading]:
        """What the database says, at most five seconds old, and the connections of this moment."""
        read = await self._recent.get("all", lambda: gauges.read(self._rt.maintenance_db, Windows.of(self._rt.settings)))
        return [*read, *self._shares()]

    def _shares(self) -> Iterator[Reading]:
        for db in (self._rt.db, self._rt.inbox_db, self._rt.dispatcher_db, self._rt.maintenance_db):
            yield Reading("database_connections_in_use", db.name, db.taken)
            yield Reading("database_connections_waiting", db.name, db.waiting)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters and gauges in the text format of Prometheus. A database that is away is told by `database_up 0`."""
    readings = await request.app.state.gauges.now()
    registry = CollectorRegistry()
    registry.register(Page(logs.counters, readings))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4, headers={"Cache-Control": "no-store"})


class Page(Collector):
    """One scrape. A counter that has a name of its own is there from the start, with 0."""

    def __init__(self, counted: Mapping[str, int], readings: Iterable[Reading]) -> None:
        self._counted = {name: 0 for name in COUNTERS if "<" not in name} | dict(counted)
        self._readings = list(readings)

    def collect(self) -> Iterator[Metric]:
        """The metrics by name."""
        yield from self._counters()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for name, count in sorted(self._counted.items()):
            shown, label, value = named(name)
            if shown not in families:
                families[shown] = CounterMetricFamily(shown, meaning(name), labels=[label] if label else [])
            families[shown].add_metric([value] if label else [], count)
        return iter(families.values())

    def _gauges(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for reading in self._readings:
            gauge = GAUGES[reading.gauge]
            if reading.gauge not in families:
                families[reading.gauge] = GaugeMetricFamily(reading.gauge, gauge.meaning, labels=[gauge.label] if gauge.label else [])
            families[reading.gauge].add_metric([reading.label] if reading.label else [], reading.value)
        return iter(families.values())


def named(counter: str) -> tuple[str, str, str]:
    """A counter's metric, its label and the label's value; the last two are empty without a label."""
    for pattern, metric, label in _LABELLED:
        if match := pattern.fullmatch(counter):
            return f"{metric}_total", label, match["label"]
    return f"{counter.replace('.', '_')}_total", "", ""


def meaning(counter: str) -> str:
    """What a counter counts."""
    if counter in COUNTERS:
        return COUNTERS[counter]
    return next((text for name, text in COUNTERS.items() if _pattern(name).fullmatch(counter)), "not described")


def described() -> Iterator[tuple[str, str, str]]:
    """Every counter: its metric, its label and what it counts."""
    for name, text in COUNTERS.items():
        metric, label, _ = named(name)
        yield metric, label, text


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[\\w.]+", re.escape(name)))
