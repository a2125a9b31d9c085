"""What the demo puts payments through is a plan that a seed decides."""

from __future__ import annotations

from collections import Counter

import pytest

from ipn_gateway.stories import ACTS, PAID, UNPAID, Story, plan


@pytest.mark.parametrize("payments", [1, 5, 9, 20, 250])
def test_as_many_orders_are_paid_as_was_asked_for(payments: int):
    """So many end paid, and for each twenty of them one of each kind that does not."""
    stories = Counter(scene.story for scene in plan(payments, seed=1))

    assert sum(stories[story] for story in PAID) == payments
    assert {stories[story] for story in UNPAID} == {-(-payments // 20)}


def test_the_seed_decides_everything():
    """The same seed gives the same show, another seed another one."""
    assert plan(20, seed=4) == plan(20, seed=4)
    assert plan(20, seed=4) != plan(20, seed=5)


def test_the_worst_troubles_come_first():
    """Five payments already meet duplicates, forgeries, loss, disorder and an order that is not known yet."""
    stories = {scene.story for scene in plan(5, seed=1)}

    assert stories >= {Story.TWICE, Story.FORGED, Story.LOST, Story.OVERTAKEN, Story.EARLY}


def test_every_story_can_be_acted():
    """None is only told; and order ids are such as the provider takes."""
    assert set(ACTS) == set(Story)
    assert all(len(scene.order_id) <= 30 and scene.amount >= 10 for scene in plan(250, seed=2))
