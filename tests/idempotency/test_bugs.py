"""Known faults of other implementations, each with the test here that would show it; and those of cancelled requests."""

from __future__ import annotations

import ast
import asyncio
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from tests.idempotency.service import Service, is_replay

HERE: Final = "tests/idempotency/test_"
TESTS: Final = Path(__file__).parents[1]

# What went wrong elsewhere, and where it would show here. A name without a file is of this one.
BUGS: Final[dict[str, tuple[str, ...]]] = {
    # Whose key it is.
    "K1 another's answer; a victim's key registered by a stranger": (
        "scope.py::test_no_key_of_a_tenant_gives_another_one_anything",
        "scope.py::test_two_tenants_may_use_one_key",
    ),
    "K2 sharing taken for intended": ("scope.py::test_no_key_of_a_tenant_gives_another_one_anything",),
    "K3 one tenant for all who are unknown": ("scope.py::test_who_is_not_known_never_reaches_the_layer",),
    "K4 the body in the storage key, so that a changed one executes": (
        "fingerprints.py::test_another_request_under_a_known_key_is_refused",
        "phases.py::test_answers_that_would_be_kept_too_short_stop_the_start",
    ),
    "K5 the second operation answered with the first one's 201": (
        "scope.py::test_one_key_serves_several_operations_of_a_flow",
        "scope.py::test_an_order_is_created_and_cancelled_under_one_key",
    ),
    "K6 a success for a resource that was never touched": ("scope.py::test_one_key_on_two_orders_is_refused",),
    # Keys that are never free again.
    "K7 a crash locks the key": (
        "processes.py::test_a_key_whose_process_was_killed_is_free_again_after_its_lease",
        "leases.py::test_a_dead_owner_keeps_its_key_until_its_lease_is_over",
    ),
    "K8 locked as long as answers are kept; every status kept": (
        "leases.py::test_a_dead_owner_keeps_its_key_until_its_lease_is_over",
        "failures.py::test_a_failure_that_says_nothing_of_the_operation_is_never_kept",
        "failures.py::test_an_accident_is_never_kept",
    ),
    "K9 stuck keys in flows of several steps": ("kill.py::test_what_is_safe_to_repeat_is_done_once_wherever_its_process_dies",),
    "K10 a mark without an end": ("leases.py::test_no_row_is_in_progress_without_an_end",),
    "K11 no end where no time was left": ("leases.py::test_no_row_is_in_progress_without_an_end",),
    "K12 mark and end written one after the other": ("kill.py::test_what_is_safe_to_repeat_is_done_once_wherever_its_process_dies",),
    "K13 pruned between the failed insert and the read": ("claims.py::test_a_row_that_is_pruned_in_between_is_claimed_again",),
    # Owners that wake up.
    "K14 a zombie renews, releases and overwrites": (
        "kill.py::test_a_frozen_owner_that_wakes_after_its_lease_writes_nothing",
        "late_owners.py::test_a_late_owner_renews_nothing",
    ),
    "K15 writes that ask for the id only": ("late_owners.py::test_a_late_owner_writes_no_phase_no_answer_and_no_release",),
    "K16 a lease shorter than the work": (
        "leases.py::test_a_lease_that_the_work_may_outlive_stops_the_start",
        "leases.py::test_a_foreign_call_ends_before_the_lease",
    ),
    "K17 a living owner taken for dead": (
        "claims.py::test_the_clock_of_a_host_ends_no_lease",
        "leases.py::test_one_of_two_takes_over",
    ),
    # The key of the foreign call.
    "K18 a new one with every try": ("phases.py::test_an_unclear_answer_changes_no_key",),
    "K19 the old one after a definite failure": (
        "phases.py::test_a_definite_no_is_kept_and_a_new_attempt_has_a_new_key",
        "phases.py::test_what_a_person_found_not_done_is_done_by_a_new_key",
    ),
    "K20 lost with the request's own transaction": (
        "claims.py::test_the_claim_is_committed_before_anything_is_done",
        "phases.py::test_a_step_that_fails_is_undone_whole_and_the_next_try_goes_on_there",
    ),
    "K21 made of a time or of the whole body, or not sent": (
        "phases.py::test_the_key_of_a_foreign_call_survives_everything",
        "phases.py::test_each_intent_has_a_key_of_its_own_that_its_provider_takes",
    ),
    # What a key and a request are.
    "K22 a doubled header joined to one value": ("keys.py::test_two_keys_are_no_key",),
    "K23 the raw bytes compared": (
        "fingerprints.py::test_the_same_request_written_in_another_way_is_answered",
        "fingerprints.py::test_what_differs_from_try_to_try_does_not_count",
    ),
    "K24 the same body taken for the same request": ("fingerprints.py::test_the_same_body_under_another_key_is_another_order",),
    "K25 delimiters that collide": (
        "fingerprints.py::test_crafted_pairs_stay_apart",
        "fingerprints.py::test_two_values_have_two_encodings",
    ),
    "K26 no comparison at all": ("fingerprints.py::test_another_request_under_a_known_key_is_refused",),
    "K27 one word for a mismatch and for work in progress": ("claims.py::test_each_reason_has_a_word_of_its_own",),
    # What is repeated.
    "K28 kept under one key and looked for under another": ("responses.py::test_a_repeat_has_status_bytes_and_type_of_the_first",),
    "K29 status or Location lost": ("responses.py::test_only_listed_headers_are_kept",),
    "K30 a streamed body kept as an empty one": ("responses.py::test_a_streamed_answer_cannot_be_keyed",),
    # Who executes.
    "K31 a memory of one process": ("processes.py::test_of_many_at_two_processes_exactly_one_executes",),
    "K32 the work ends with the connection of the client": ("placement.py::test_a_client_that_gives_up_is_answered_when_it_comes_again",),
    "K33 a cancelled query that runs on": ("test_requests_that_are_cancelled_cost_no_connection",),
    "K34 connections lost to cancelled tasks": (
        "test_requests_that_are_cancelled_cost_no_connection",
        "test_the_pool_is_one_without_its_known_faults",
    ),
    "K35 a server that falls silent": ("tests/use_cases/test_db.py::test_a_server_that_falls_silent_keeps_nobody_waiting",),
    "K36 servers tell of a disconnect in different ways": ("placement.py::test_our_own_api_goes_on_when_its_client_is_gone",),
    "K37 look first, then insert": ("claims.py::test_the_insert_is_the_first_statement", "claims.py::test_one_of_fifty_executes"),
    "K38 the loser's unique violation as a 500": (
        "cases.py::test_two_first_requests_at_once_are_no_error",
        "claims.py::test_what_the_database_says_to_a_claim_is_never_a_500",
    ),
    "K39 done, and then refused": ("phases.py::test_effect_and_answer_appear_together",),
    # What this layer has no part in, and who has.
    "K40 repeated notifications": ("tests/concurrency/test_apply.py::test_fifty_copies_at_once_have_one_effect",),
    "K41 one endpoint fills the batch": (
        "tests/use_cases/test_event_deliveries.py::test_slots_are_shared_among_endpoints_then_given_to_the_oldest",
    ),
    "K42 slow subscribers hold up all": ("tests/use_cases/test_event_deliveries.py::test_an_endpoint_that_hangs_delays_no_other",),
    "K43 a reader that passes over late commits": (
        "tests/use_cases/test_outbox.py::test_events_can_be_pulled_without_a_gap_whatever_commits_first",
    ),
    "K44 recovery bugs of queue libraries; there is none here, our own is": (
        "tests/concurrency/test_event_deliveries.py::test_a_dispatcher_that_wakes_after_its_lease_writes_nothing",
    ),
    "K45 a key that is pruned surprises": ("cases.py::test_an_order_is_not_made_twice_when_its_key_is_long_forgotten",),
    "K46 a transaction that is open during a foreign call": (
        "phases.py::test_no_transaction_is_open_while_the_provider_takes_its_time",
        "tests/use_cases/test_transport.py::test_nothing_is_sent_inside_a_transaction",
    ),
}


def _place(name: str) -> tuple[Path, str]:
    file, _, test = name.rpartition("::")
    if not file:
        return Path(__file__), test
    return TESTS.parent / (file if file.startswith("tests/") else HERE + file), test


@cache
def _tests_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_known_fault_has_its_test():
    """Each by its name, and the tests that are named exist."""
    places = [_place(name) for names in BUGS.values() for name in names]

    assert [bug.split()[0] for bug in BUGS] == [f"K{number}" for number in range(1, 47)]
    assert all(BUGS.values())
    assert [test for path, test in places if test not in _tests_of(path)] == []


@pytest.mark.case("S40", "S90")
@pytest.mark.parametrize("path", ["notes", "charges"])
async def test_requests_that_are_cancelled_cost_no_connection(service: Service, path: str) -> None:
    """Whatever they were waiting for in the database: what has begun ends, and every connection comes back."""
    async with service.another(connections_max=2) as small:
        for steps in range(20):
            calls = [small.start(small.post(path, key=f"K{steps}-{number}")) for number in range(4)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert await small.app.state.idempotency.drained(seconds=10)
        taken, waiting = small.db.taken, small.db.waiting
        service.lease_ends()  # of those that found all connections busy
        last = [await small.post(path, key=f"K{steps}-0") for steps in range(20)]

    assert (taken, waiting) == (0, 0)
    assert {answer.status_code for answer in last} == {201}
    assert any(is_replay(answer) for answer in last)
    if path == "charges":
        assert set(service.provider.effects.values()) == {1}
    assert max(row["n"] for row in await service.rows("SELECT count(*) AS n FROM acts GROUP BY key_id")) == (1 if path == "notes" else 3)


def test_the_pool_is_one_without_its_known_faults():
    """Older ones lost the connections of tasks that were cancelled."""
    found = tuple(int(part) for part in metadata.version("psycopg-pool").split(".")[:3])
    asked = [text for text in metadata.requires("ipn-gateway") or () if text.startswith("psycopg-pool")]

    assert found >= (3, 3, 1)
    assert asked == ["psycopg-pool>=3.3.1"]
