"""URLs that must never be called, at the door: none becomes an endpoint, and none takes the place of a good one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import hostile
from tests.web.conftest import ENDPOINT, Caller, pointers

if TYPE_CHECKING:
    import httpx

    from ipn_gateway.clock import Clock

HEADERS = {"Content-Type": "application/json"}


@pytest.mark.case("B101")
async def test_none_of_them_becomes_an_endpoint(api: Caller, clock: Clock) -> None:
    """A 422 that points at the URL, at creation and in a change; what there is stays as it is."""
    made = (await api.post("/v1/endpoints", ENDPOINT)).json()

    async def refused(method: str, path: str, url: str) -> httpx.Response:
        clock.advance(seconds=1)  # no limit of calls is the test's matter
        body = json.dumps({"url": url})  # escaped, so that even half a character gets as far as the check
        return await api(method, path, content=body, headers=HEADERS)

    urls = [*hostile.ALWAYS, *hostile.LOOPBACK]
    created = {url: pointers(await refused("POST", "/v1/endpoints", url)) for url in urls}
    changed = {url: pointers(await refused("PATCH", f"/v1/endpoints/{made['id']}", url)) for url in urls}

    assert created == changed == {url: ["#/url"] for url in urls}
    shown = {name: value for name, value in made.items() if name not in {"secret", "public_key"}}
    assert (await api.get("/v1/endpoints")).json()["items"] == [shown]
