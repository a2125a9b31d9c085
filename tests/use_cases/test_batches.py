"""Batches: what is in flight together is written together, and each item gets its own answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ipn_gateway.batches import Batches
from ipn_gateway.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Writing:
    """A write that keeps what it was given, and waits before each batch until it is let go."""

    def __init__(self, answer: Callable[[Any], Any] = lambda item: item, *, held: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()
        self._answer = answer
        if not held:
            self.let_go.set()

    async def __call__(self, items: list[Any]) -> Sequence[Any]:
        self.batches.append(items)
        self.begun.set()
        await self.let_go.wait()
        return [self._answer(item) for item in items]


def batches(write: Writing, *, most: int = 4, waiting_max: int = 100, **given: Any) -> Batches[Any, Any]:
    return Batches(write, name="test", most=most, waiting_max=waiting_max, **given)


def refusing(error: Exception) -> Callable[[Any], Any]:
    def answer(item: Any) -> Any:
        if item == "bad":
            raise error
        return item

    return answer


async def one_write_behind_another(writes: Batches[Any, Any], write: Writing, items: Sequence[Any]) -> list[Any]:
    """While the first write is under way the items come; then all go on. What each item got."""
    async with asyncio.TaskGroup() as group:
        first = group.create_task(writes.put("first"))
        await write.begun.wait()
        tasks = [group.create_task(_got(writes, item)) for item in items]
        await asyncio.sleep(0)
        write.let_go.set()
    assert first.result() == "first"
    return [task.result() for task in tasks]


async def _got(writes: Batches[Any, Any], item: Any) -> Any:
    try:
        return await writes.put(item)
    except Exception as error:  # noqa: BLE001 - what it got
        return error


async def test_a_lone_item_is_written_at_once() -> None:
    """Nothing is waited for, and the answer is its own."""
    write = Writing()

    assert await batches(write).put("one") == "one"
    assert write.batches == [["one"]]


async def test_one_after_the_other_is_written_each_time() -> None:
    """Who puts the next item in the moment in which the writer has found nothing more is not forgotten."""
    writes = batches(Writing())
    async with asyncio.timeout(10):
        got = [await writes.put(number) for number in range(50)]

    assert got == list(range(50))


async def test_what_comes_during_a_write_goes_together_next() -> None:
    """In the order in which it came, at most so many at a time, each with its own answer."""
    write = Writing(held=True)

    got = await one_write_behind_another(batches(write), write, range(6))

    assert got == list(range(6))
    assert write.batches == [["first"], [0, 1, 2, 3], [4, 5]]


async def test_what_is_kept_apart_is_never_in_one_batch() -> None:
    """The second of a key waits for the next batch, and overtakes nothing of its key."""
    write = Writing(held=True)

    await one_write_behind_another(batches(write, apart=lambda item: item[0]), write, ["a1", "a2", "b1", "a3"])

    assert write.batches == [["first"], ["a1", "b1"], ["a2"], ["a3"]]


async def test_a_bad_item_fails_alone() -> None:
    """The batch is written again one by one; the neighbours are written, and only the bad one gets the error."""
    write = Writing(refusing(ZeroDivisionError()), held=True)

    got = await one_write_behind_another(batches(write), write, ["x", "bad", "y"])

    assert (got[0], type(got[1]), got[2]) == ("x", ZeroDivisionError, "y")
    assert write.batches == [["first"], ["x", "bad", "y"], ["x"], ["bad"], ["y"]]


async def test_an_error_among_the_answers_is_raised_to_its_item() -> None:
    """Nothing is written again for it."""
    write = Writing(lambda item: KeyError(item) if item == "bad" else item, held=True)

    got = await one_write_behind_another(batches(write), write, ["x", "bad"])

    assert (got[0], type(got[1])) == ("x", KeyError)
    assert write.batches == [["first"], ["x", "bad"]]


async def test_what_the_database_could_not_take_is_told_to_all() -> None:
    """One by one would be no better: it is away."""
    write = Writing(refusing(Overloaded()), held=True)

    got = await one_write_behind_another(batches(write), write, ["x", "bad"])

    assert [type(answer) for answer in got] == [Overloaded, Overloaded]
    assert write.batches == [["first"], ["x", "bad"]]


async def test_who_has_waited_long_enough_is_told_so() -> None:
    """Their items are written all the same."""
    write = Writing(held=True)
    writes = batches(write, within_seconds=0.01)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(_got(writes, item)) for item in ("x", "y")]
        told = [await one for one in waiting]
        write.let_go.set()
    await writes.drained()

    assert [type(one) for one in told] == [Overloaded, Overloaded]
    assert write.batches == [["x", "y"]]


async def test_so_many_wait_and_no_more() -> None:
    """The next one is refused at once; those that wait are written."""
    write = Writing(held=True)

    got = await one_write_behind_another(batches(write, waiting_max=2), write, ["x", "y", "z"])

    assert (got[:2], type(got[2])) == (["x", "y"], Overloaded)


async def test_who_leaves_takes_nothing_back() -> None:
    """A caller that is cancelled: its item is written all the same, and its neighbours get their answers."""
    write = Writing(held=True)
    writes = batches(write)
    async with asyncio.TaskGroup() as group:
        group.create_task(writes.put("first"))
        await write.begun.wait()
        leaves = group.create_task(writes.put("leaves"))
        stays = group.create_task(writes.put("stays"))
        await asyncio.sleep(0)
        leaves.cancel()
        write.let_go.set()

    assert await writes.drained()
    assert stays.result() == "stays"
    assert write.batches == [["first"], ["leaves", "stays"]]


async def test_several_writers_write_at_the_same_time() -> None:
    """The second batch does not wait for the first."""
    write = Writing(held=True)
    writes = batches(write, most=1, writers=2)
    async with asyncio.TaskGroup() as group:
        for item in ("a", "b", "c"):
            group.create_task(writes.put(item))
        await write.begun.wait()
        await asyncio.sleep(0)
        at_once = list(write.batches)
        write.let_go.set()

    assert at_once == [["a"], ["b"]]
    assert write.batches == [["a"], ["b"], ["c"]]
