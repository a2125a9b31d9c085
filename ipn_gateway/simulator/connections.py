"""Misbehaviour below HTTP: cutting a connection, and answering late or never."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from email import message_from_bytes
from email.policy import HTTP
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from fastapi import FastAPI
from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

_SERVER_SEND = "simulator.server_send"
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_LOOK_SECONDS: Final = 0.05
_GONE_SECONDS: Final = 5.0


class CuttableApp(FastAPI):
    """An application whose routes can reach the socket under a request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the server's own `send`, which middleware hides: it leads to the transport."""
        scope[_SERVER_SEND] = send
        await super().__call__(scope, receive, send)


async def reset(request: Request) -> Response:
    """Cut the connection with a TCP reset and no answer. Raises ConnectionResetError where there is no socket."""
    transport = getattr(getattr(request.scope.get(_SERVER_SEND), "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionResetError("the simulator cut this connection")
    _without_linger(transport)
    transport.abort()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GONE_SECONDS):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    return Response(status_code=500)  # the server drops it: the client is gone


async def hang(request: Request, release: asyncio.Event, seconds: float) -> bool:
    """Wait until released, until the client is gone or for `seconds`; whether the client is still there."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not release.is_set():
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                await release.wait()
        if await request.is_disconnected():
            return False
    return True


async def form_of(request: Request) -> dict[str, str]:
    """A posted form, urlencoded or multipart; of a name that comes twice the last value counts."""
    body = await request.body()
    content_type = request.headers.get("content-type", "")
    if content_type.startswith("multipart/form-data"):
        return _multipart(content_type, body)
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def _multipart(content_type: str, body: bytes) -> dict[str, str]:
    message = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body, policy=HTTP)
    fields = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        fields[str(name)] = payload.decode(errors="replace") if isinstance(payload, bytes) else ""
    return fields


def _without_linger(transport: Any) -> None:
    """Make closing send RST. The option belongs to the open file, so a duplicate descriptor reaches it on any loop."""
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as twin,
    ):
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
