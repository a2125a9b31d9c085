"""Whether the header survives the way to the gateway: `API_KEY=ipn_… python ingress.py https://pay.example.com SOURCE`.

Posts the same act with the same key twice. It counts what it would replay and changes nothing, so that it may run against what is live.
"""

from __future__ import annotations

import os
import sys
import uuid

import httpx

PATH = "/v1/notification-deliveries/replay"


def main(base_url: str, source: str) -> str:
    """A sentence for a second answer that is not the stored one; empty if all is well."""
    act = {"source": source, "outcome": "held", "reason": "ingress check", "dry_run": True}
    headers = {"Authorization": f"Bearer {os.environ['API_KEY']}", "Idempotency-Key": str(uuid.uuid4())}  # noqa: TID251 - a caller's
    with httpx.Client(base_url=base_url, headers=headers) as client:
        first, second = client.post(PATH, json=act), client.post(PATH, json=act)
    if first.status_code != httpx.codes.OK:
        return f"The first call was refused: {first.status_code} {first.text}"
    if "Idempotent-Replayed" in first.headers:
        return "The first call was answered from a cache on the way."
    if second.headers.get("Idempotent-Replayed") != "true":
        return "The second call was executed again: Idempotency-Key or Idempotent-Replayed is lost on the way."
    return "" if first.content == second.content else "The second answer differs from the first."


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
