"""Serving an application on a socket inside a running loop."""

import contextlib
import socket
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from ipn_gateway.simulator.serving import serving


async def test_an_application_is_served_on_a_free_port_until_the_block_ends() -> None:
    """The base URL answers at once, without waiting for the server to come up."""
    async with serving(FastAPI()) as first, serving(FastAPI()) as second:
        assert first != second
        assert first.startswith("http://127.0.0.1:")

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((urlsplit(first).hostname, urlsplit(first).port), timeout=1)


async def test_an_application_that_does_not_start_is_an_error() -> None:
    """What its start raised is logged; the block is never entered."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        if app:
            raise OSError("no")
        yield

    with pytest.raises(RuntimeError, match="did not start"):
        async with serving(FastAPI(lifespan=lifespan)):
            pytest.fail("entered")


async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    """A failing test fails with its own error."""
    with pytest.raises(ZeroDivisionError):
        async with serving(FastAPI()):
            raise ZeroDivisionError


async def test_a_port_that_is_taken_is_an_error() -> None:
    """No other port is taken instead of the one that was asked for."""
    async with serving(FastAPI()) as url:
        with pytest.raises(OSError, match="in use"):
            async with serving(FastAPI(), port=urlsplit(url).port or 0):
                pytest.fail("entered")
