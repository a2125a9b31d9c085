"""The whole flow as a state machine: any order of arrivals, acts, faults and deaths keeps the invariants, and ends as the bank knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import hypothesis
import psycopg
import pytest
import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from ipn_gateway import endpoints, orders, redeliveries, replays, resolutions
from ipn_gateway.clock import Clock
from ipn_gateway.errors import GatewayError, IdempotencyKeyReused, OrderExists
from ipn_gateway.simulator.forgeries import FORGERIES
from ipn_gateway.simulator.sslcommerz import encode
from tests import expectations, invariants
from tests.machine import TURNED_AWAY, Died, Life, Stage, staged, subscribe, task_of_a_life
from tests.world import PASSWORD, TENANT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from uuid import UUID

    from tests.conftest import Server

ORDERS: Final = {"ORD-1": ("1000.00", "BDT"), "ORD-2": ("10.05", "BDT"), "ORD-3": ("250.00", "USD"), "ORD-4": ("99999.99", "BDT")}
STATUSES: Final = ("VALID", "VALID", "VALID", "RISK", "FAILED", "CANCELLED", "UNATTEMPTED", "EXPIRED", "PENDING", "HALTED")
SUMS: Final = {"exact": Decimal(1), "half": Decimal("0.5"), "double": Decimal(2)}
ASKED: Final = {
    "validator": ("status500", "html", "empty", "apiconnect", "hang", "reset", "record_then_reset", "invalid_transaction", "failed"),
    "query": ("status500", "html", "empty", "apiconnect", "hang", "reset", "processing", "pending", "element_dict", "reversed"),
    "refund": ("status500", "html", "hang", "reset", "record_then_reset", "record_then_status500", "failed"),
    "refund_query": ("status500", "empty", "hang", "reset", "failed"),
}
FAULTS: Final = [(path, kind) for path, kinds in ASKED.items() for kind in kinds]
FORGED: Final = ("other_val_id", "made_up_val_id", "other_amount", "other_currency", "stolen_password", *FORGERIES)
MODES: Final = ("up", "up", "500", "503", "slow", "cut", "410")
WAITS: Final = (1, 10, 60, 400, 4_000, 90_000)
LATE: Final = ("inbox", "dispatcher", "sweep", "refund")
KEY_HOURS: Final = 160  # a stored answer is kept for longer

some = st.integers(0, 10_000)
order_ids = st.sampled_from(("ORD-1", "ORD-1", *ORDERS))  # what happens to one order again and again matters most


class Flow(RuleBasedStateMachine):
    """A gateway that is played with. The numbers that rules draw are places in lists of what is there at that moment."""

    runner: asyncio.Runner
    base: str
    server: Server
    points: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.broke = True
        self.clock = Clock()
        self.sent: list[dict[str, str]] = []
        self.accepted: set[UUID] = set()
        self.answers: dict[str, tuple[tuple[str, str, str], bytes, timedelta]] = {}
        self.stack = contextlib.ExitStack()

    @initialize(with_effect=st.booleans())
    def begin(self, with_effect: bool) -> None:
        """An empty database, a provider, two subscribers."""
        self.with_effect = with_effect
        url = self.stack.enter_context(self.server.database(self.base))
        staging = staged(url, self.clock, with_effect=with_effect)
        self.stage: Stage = self.runner.run(staging.__aenter__())
        self.stack.callback(lambda: self.runner.run(staging.__aexit__(None, None, None)))
        self.database = self.stack.enter_context(psycopg.connect(url, autocommit=True))
        self.broke = False

    # What goes through the gateway

    def play(self, act: Callable[[Life], Awaitable[Any]], *fine: type[GatewayError]) -> Any:
        """What came of it; None when the gateway died, or turned it away as it may."""
        self.broke = True
        try:
            came = self.runner.run(self.stage.act(act))
        except Died:
            came = None
        except GatewayError as error:
            if not isinstance(error, TURNED_AWAY + fine):
                raise
            came = None
        self.broke = False
        return came

    def notify(self, fields: Any, times: int = 1) -> bool:
        """The provider posts it; whether it was acknowledged each time."""

        async def post(life: Life) -> list[Any]:
            body = fields if isinstance(fields, bytes) else encode(fields)
            return await asyncio.gather(*(life.world.notify(body) for _ in range(times)), return_exceptions=True)

        receipts = self.play(post) or [None]
        for receipt in receipts:
            if isinstance(receipt, Exception) and not isinstance(receipt, TURNED_AWAY):
                raise receipt
        stored = [one.delivery_id for one in receipts if getattr(one, "delivery_id", None)]
        self.accepted.update(stored)
        return len(stored) == len(receipts)

    def place(self, number: int, statement: str) -> Any:
        """One of the ids that are there; None when there is none."""
        found = self.database.execute(statement).fetchall()
        return found[number % len(found)][0] if found else None

    # Rules: what merchant and provider do

    @rule(order_id=order_ids, expires=st.sampled_from((None, None, None, 1800)))
    def register(self, order_id: str, expires: int | None) -> None:
        amount, currency = ORDERS[order_id]

        async def create(life: Life) -> None:
            expiry = life.world.rt.clock.now() + timedelta(seconds=expires) if expires else None
            await life.world.order(order_id, amount, currency, expires_at=expiry)

        self.play(create, OrderExists)

    @rule(order_id=order_ids, status=st.sampled_from(STATUSES), sum_=st.sampled_from(("exact",) * 5 + tuple(SUMS)), told=st.booleans())
    def pay(self, order_id: str, status: str, sum_: str, told: bool) -> None:
        amount, currency = ORDERS[order_id]
        amount = str((Decimal(amount) * SUMS[sum_]).quantize(Decimal("0.01")))
        world, word = self.stage.life.world, "VALID" if status == "RISK" else status
        self.sent.append(world.pay(order_id, amount, currency, status=word, risk=status == "RISK"))
        if told:
            self.notify(self.sent[-1])

    @rule(
        order_id=order_ids,
        statuses=st.lists(st.sampled_from(("VALID", "VALID", "RISK", "FAILED")), min_size=1, max_size=3),
        is_early=st.booleans(),
    )
    def buy(self, order_id: str, statuses: list[str], is_early: bool) -> None:
        """The usual way, so that much is paid, and some of it twice, or before its order is known here."""
        if not is_early:
            self.register(order_id, None)
        for status in statuses:
            self.pay(order_id, status, "exact", told=True)
        self.drain()
        self.register(order_id, None)

    @precondition(lambda self: self.sent)
    @rule(number=some, times=st.integers(1, 3))
    def notify_again(self, number: int, times: int) -> None:
        self.notify(self.sent[number % len(self.sent)], times)

    @precondition(lambda self: self.sent)
    @rule(number=some, other=some, kind=st.sampled_from(FORGED))
    def forge(self, number: int, other: int, kind: str) -> None:
        fields, others = self.sent[number % len(self.sent)], self.sent[other % len(self.sent)]
        self.notify(_forged(self.stage.life.world, kind, fields, others))

    @rule(fault=st.sampled_from(FAULTS), times=st.integers(1, 4))
    def provider_fails(self, fault: tuple[str, str], times: int) -> None:
        self.stage.life.world.fault(*fault, times=times, seconds=3)

    @rule(number=st.integers(0, 1), mode=st.sampled_from(MODES))
    def subscriber_is(self, number: int, mode: str) -> None:
        self.stage.subscribers[number].mode = mode

    @rule(seconds=st.sampled_from(WAITS))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)
        self.play(Life.maintain)

    # Rules: what the gateway does

    @rule()
    def drain(self) -> None:
        self.play(Life.drain)

    @rule()
    def dispatch(self) -> None:
        self.play(Life.dispatch)

    @rule()
    def sweep(self) -> None:
        self.play(Life.sweep)

    @rule()
    def poll(self) -> None:
        self.play(Life.poll)

    @rule()
    def all_at_once(self) -> None:
        self.play(Life.all_at_once)

    @rule(number=some, passes=st.integers(0, 2))
    def dies_at(self, number: int, passes: int) -> None:
        """The next time that the point is passed."""
        point = self.points[number % len(self.points)]
        self.stage.life.points.kill_at(point, passes)
        hypothesis.event(f"dies at {point}")

    @rule()
    def dies_now(self) -> None:
        self.runner.run(self.stage.restart())

    # Rules: what people do

    @rule(number=some)
    def redeliver(self, number: int) -> None:
        if which := self.place(number, "SELECT id FROM event_deliveries ORDER BY id"):
            self.play(lambda life: redeliveries.redeliver(life.world.rt.db, TENANT, which, actor="test"), GatewayError)

    @rule(number=some)
    def replay(self, number: int) -> None:
        if which := self.place(number, "SELECT id FROM notification_deliveries ORDER BY id"):
            self.play(lambda life: replays.replay(life.world.rt.db, life.world.rt.sources, TENANT, which, actor="test"), GatewayError)

    @rule(order_id=order_ids, act=st.sampled_from((orders.release, orders.release, orders.cancel)))
    def decide(self, order_id: str, act: Any) -> None:
        self.play(lambda life: act(life.world.rt.db, TENANT, order_id, actor="test", reason="so"), GatewayError)

    @rule(number=some, decision=st.sampled_from(("apply", "dismiss")))
    def resolve(self, number: int, decision: resolutions.Decision) -> None:
        waiting = "SELECT notification_delivery_id FROM inbox WHERE state IN ('held', 'conflict', 'dead') ORDER BY 1"
        if which := self.place(number, waiting):
            act = resolutions.Act(TENANT, which, decision, "test", "so")
            self.play(lambda life: resolutions.resolve(life.world.rt.db, act, self.stage.effect), GatewayError)

    @rule(order_id=order_ids, key=st.integers(0, 3), share=st.sampled_from(("1", "0.5", "0.25", "3")))
    def refund(self, order_id: str, key: int, share: str) -> None:
        amount = str((Decimal(ORDERS[order_id][0]) * Decimal(share)).quantize(Decimal("0.01")))
        self.asked(f"key-{key}", (f"R-{key}", amount, order_id))

    def asked(self, key: str, body: tuple[str, str, str]) -> None:
        """A keyed request: one that was answered is answered the same, and its key is good for nothing else."""
        known = self.answers.get(key)
        fresh = known is not None and self.clock.offset - known[2] < timedelta(hours=KEY_HOURS)
        reference, amount, order_id = body
        try:
            answer = self.play(lambda life: life.desk.refund(key, reference, amount, order_id=order_id))
        except GatewayError as error:
            answer = error
        if answer is None:
            return
        self.broke = True
        if fresh and known is not None and known[0] != body:
            assert isinstance(answer, IdempotencyKeyReused), (answer, key, body, known)
        elif fresh and known is not None:
            assert getattr(answer, "body", None) == known[1], (answer, key, known)
        elif not isinstance(answer, GatewayError):
            self.answers[key] = (body, answer.body, self.clock.offset)
        self.broke = False

    @rule(number=st.integers(0, 1))
    def subscribe(self, number: int) -> None:
        self.play(lambda _: _resubscribe(self.stage, number), GatewayError)

    @rule(kind=st.sampled_from(LATE), last_first=st.booleans())
    def is_late(self, kind: str, last_first: bool) -> None:
        """A worker is so slow that another one has its work meanwhile: what it writes then counts for nothing."""
        self.stage.life.points.forget()
        self.stage.life.world.simulator.api.faults.clear()
        for subscriber in self.stage.subscribers:
            subscriber.mode = "up"
        self.play(Life.all_at_once)
        work, point, lease = self._slow_work(kind)
        for _ in range(2):
            self.stage.life.points.hold_at(point)
            self.play(work, GatewayError)
            self.clock.advance(seconds=lease)
        self.stage.life.points.forget()
        self.broke = True
        waiting = self.stage.life.points.waiting
        if len(waiting) == 2 and last_first:
            self.runner.run(self.stage.let_go(1))
        while len(waiting) == 2 or (last_first and waiting):
            before = invariants.photograph(self.database)
            self.runner.run(self.stage.let_go())
            after = invariants.photograph(self.database)
            # Who finds a payment books it, late or not: the ledger takes it once, from whoever comes first.
            booked = kind == "sweep" and after["processed_notifications"] != before["processed_notifications"]
            assert kind == "refund" or booked or after == before
        while waiting:
            self.runner.run(self.stage.let_go())
        self.broke = False

    def _slow_work(self, kind: str) -> tuple[Callable[[Life], Awaitable[Any]], str, float]:
        name, amount = "ORD-1", ORDERS["ORD-1"][0]
        if kind == "inbox":
            self.register(name, None)
            self.pay(name, "VALID", "exact", told=True)
            return Life.drain, "transport.ask:after", 46
        if kind == "dispatcher":
            self.buy(name, ["VALID"], is_early=False)
            of_live_ones = "SELECT d.id FROM event_deliveries AS d JOIN endpoints AS p ON p.id = endpoint_id WHERE deleted_at IS NULL"
            if delivered := self.place(0, of_live_ones):
                self.play(lambda life: redeliveries.redeliver(life.world.rt.db, TENANT, delivered, actor="test"), GatewayError)
            return Life.dispatch, "transport.send:after", 46
        if kind == "sweep":
            self.clock.advance(seconds=301)
            return Life.sweep, "transport.ask:after", 46
        return lambda life: life.desk.refund("key-0", "R-0", amount, order_id=name), "transport.ask:after", 91

    # What holds after each step, and at the end

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "database") and not self.broke:
            self.broke = True
            assert invariants.broken(self.database, self.accepted, with_effect=self.with_effect) == []
            self.broke = False

    def teardown(self) -> None:
        with self.stack:
            if not self.broke:
                self.finish()
                assert invariants.broken(self.database, self.accepted, with_effect=self.with_effect) == []
                assert expectations.disappointed(self.database, self.stage.provider.simulator, self.stage.subscribers) == []

    def finish(self) -> None:
        """All is well again, the provider repeats what it has to say until it is acknowledged, and time passes until nothing is due."""
        self.stage.life.points.forget()
        self.stage.provider.simulator.api.faults.clear()
        for subscriber in self.stage.subscribers:
            subscriber.mode = "up"
        for fields in self.sent:
            assert self.notify(fields)
        for _ in range(600):  # of half an hour and more: what is asked about for three days takes up to twice as long here
            self.play(_enable_all)
            self.play(Life.all_at_once)
            self.play(Life.maintain)
            if (due := expectations.next_due(self.database)) is None:
                return
            self.clock.offset = max(self.clock.offset, due - Clock().now()) + timedelta(minutes=30)
        raise AssertionError(f"it comes to no end: {expectations.open_work(self.database)}")


def _forged(world: Any, kind: str, fields: dict[str, str], others: dict[str, str]) -> Any:
    """What somebody posts who has seen notifications; where the password was stolen too, it is signed as it should be."""
    match kind:
        case "other_val_id":
            return world.signed(fields, val_id=others.get("val_id") or "2603011200001A2B3C4D5E6F7G8", status="VALID")
        case "made_up_val_id":
            return world.signed(fields, val_id="2603011200001A2B3C4D5E6F7G8", status="VALID")
        case "other_amount":
            return world.signed(fields, currency_amount="1.00", amount="1.00")
        case "other_currency":
            return world.signed(fields, currency_type="EUR")
        case "stolen_password":
            return world.signed(fields, tran_id=others["tran_id"])
        case _:
            if kind == "folded_status" and "risk_level" in fields:
                kind = "wrong_hash"
            return encode(FORGERIES[kind](world.signed(fields, PASSWORD)))


async def _enable_all(life: Life) -> None:
    for row in await life.world.rows("SELECT id FROM endpoints WHERE status = 'disabled' AND deleted_at IS NULL"):
        await endpoints.enable(life.world.rt.db, TENANT, row["id"], actor="test")


async def _resubscribe(stage: Stage, index: int) -> None:
    """The endpoint goes, and another one at the same address comes."""
    if old := stage.subscribers[index].id:
        await endpoints.delete(stage.life.world.rt.db, TENANT, old, actor="test")
        stage.subscribers[index].id = None
    await subscribe(stage, index, *(("*",), ("order.*",))[index])


# The plays


@pytest.fixture
def flow(server: Server, template: str) -> Iterator[type[Flow]]:
    """The machine, on clones of a database that is watched."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with server.database(template) as watched, asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(task_of_a_life)
        with psycopg.connect(watched, autocommit=True) as database:
            invariants.watch(database)
        base = watched.rpartition("/")[2].partition("?")[0]
        bound = {"runner": runner, "base": base, "server": server, "points": []}
        made: type[Flow] = type("Flow", (Flow,), bound)
        made.points = _rehearsed(made)
        yield made
    structlog.reset_defaults()


def _rehearsed(flow: type[Flow]) -> list[str]:
    """The crash points of the flow: whatever is passed when each thing is done once."""
    machine = flow()
    machine.begin(with_effect=True)
    machine.pay("ORD-1", "VALID", "exact", told=True)
    machine.drain()
    machine.register("ORD-1", None)
    machine.pay("ORD-2", "VALID", "half", told=True)
    machine.register("ORD-2", 1800)
    machine.provider_fails(("validator", "status500"), 1)
    machine.all_at_once()
    machine.pay("ORD-3", "RISK", "exact", told=True)
    machine.register("ORD-3", None)
    machine.all_at_once()
    machine.decide("ORD-3", orders.release)
    machine.decide("ORD-2", orders.cancel)
    machine.resolve(0, "apply")
    machine.replay(1)
    machine.asked("key-0", ("R-0", "400.00", "ORD-1"))
    machine.redeliver(0)
    machine.pay("ORD-2", "FAILED", "exact", told=True)
    machine.subscriber_is(0, "500")
    machine.time_passes(400)
    machine.all_at_once()
    machine.subscribe(1)
    machine.holds()
    passed = dict(machine.stage.life.points.passed)
    machine.teardown()
    return sorted(point for point in passed if not point.startswith(("test.", "db.", "tenants.", "sources.create")))


def _settings() -> hypothesis.settings:
    """25 plays of 30 steps; `--hypothesis-profile=thorough` asks for its own."""
    quiet = hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck))  # a step takes as long as a database does
    if hypothesis.settings.get_current_profile_name() == "thorough":
        return quiet
    return hypothesis.settings(quiet, max_examples=25, stateful_step_count=30)


@pytest.mark.timeout(3600)  # the thorough profile takes a quarter of an hour, and so may shrinking what was found
@pytest.mark.case("S112", "S113")
def test_whatever_happens_nothing_is_lost_or_doubled(flow: type[Flow]) -> None:
    """Any play of arrivals, forgeries, faults, acts and deaths keeps the invariants after each step, and ends as the bank knows it."""
    run_state_machine_as_test(flow, settings=_settings())
