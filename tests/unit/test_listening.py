"""What `listen` prints about a webhook."""

from __future__ import annotations

from ipn_gateway import listening

EVENT = {"id": "evt_1", "type": "order.paid", "timestamp": "2026-03-01T12:00:00.000Z", "data": {"order_id": "ORD-1"}}


def test_a_webhook_is_a_line_and_its_data_below() -> None:
    """When, what, which, whether it is genuine, and what it was answered."""
    line = listening.line({"event": EVENT, "webhook_id": "evt_1", "verified": True, "status": 200})
    refused = listening.line({"event": None, "webhook_id": None, "verified": False, "rejected": "header_missing", "status": 401})

    assert line == '2026-03-01T12:00:00.000Z  order.paid  evt_1  verified  200\n  {"order_id": "ORD-1"}'
    assert refused == "-  -  -  REJECTED (header_missing)  401"


def test_nobody_steers_the_terminal() -> None:
    """Control characters of a stranger are marked, in every part."""
    said = {"event": EVENT | {"type": "\x1b[2J", "data": {"x": "\x9b2J\x7f"}}, "webhook_id": "a\nb", "verified": None, "status": 200}

    head, data = listening.line(said).split("\n")

    assert head.isprintable()
    assert data.isprintable()
