"""Heads of requests, where the fast parser needs help.

It has no bounds: 64 KiB and 10 seconds, then the connection ends. Without them anybody could fill the memory, or the connections, before a
route is even looked for. And it reads no body behind an offer to upgrade, which some clients make in each request (HTTP/2 in cleartext) and
a server may ignore (RFC 9110, 7.8): so it is not shown to it.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ipn_gateway import logs

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_SECONDS_MAX: Final = 10.0

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


_END_OF_HEAD: Final = b"\r\n\r\n"
_BEFORE: Final = len(_END_OF_HEAD) - 1
_OFFER: Final = re.compile(rb"(?<=\r\n)u(?=pgrade[ \t]*:)", re.IGNORECASE)
_OFFER_BEGINS: Final = re.compile(rb"\r(\n(\r|u(p(g(r(a(d(e[ \t]{0,9})?)?)?)?)?)?)?)?\Z", re.IGNORECASE)
_DISGUISED: Final = b"!pgrade"


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol over httptools; a head that is too long or too slow is refused with 431 or 408 (RFC 6585, RFC 9110)."""

    _in_head = True
    _begun = False
    _beside_body = 0  # bytes since the last of a body: of the head of a chunk, or what follows the last one
    _refused = False
    _head_bytes = 0
    _before = b""
    _held = b""
    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*given, **named)
        self._unanswered: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the class above
        """A connection that sends nothing is not waited for either."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more, and no answer that is under way has anywhere to go."""
        self._head_is_over()
        super().connection_lost(exc)
        self._drop_answers()

    def data_received(self, data: bytes) -> None:
        """Counts while the head goes on; what is parsed at once is looked at when the head is complete."""
        if self._refused:
            return
        if self._in_head:
            if not self._begun:  # empty lines before a request are ignored (RFC 9112, 2.2), and end no wait
                data, self._before = data.lstrip(b"\r\n"), b""
                if not data:
                    return
            self._head_bytes += len(data)
            data, self._held = _disguised(self._before, self._held + data)
        else:
            self._beside_body += len(data)
        self._before = (self._before + data[-_BEFORE:])[-_BEFORE:]
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(_TOO_LARGE, "too_large")
        elif self._beside_body > HEAD_BYTES_MAX:
            self._refuse(_TOO_LARGE, "too_large")
            self._drop_answers()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._begun, self._head_bytes = True, True, 0
        self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """As it was sent. What comes behind a body in chunks is nothing that we know (RFC 9110, 6.5.1)."""
        if self._in_head:
            super().on_header(b"upgrade" if name.lower() == _DISGUISED else name, value)

    def on_headers_complete(self) -> None:
        """Only a head within its bounds becomes a request."""
        self._head_is_over()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX:
            self._refuse(_TOO_LARGE, "too_large")
        else:
            super().on_headers_complete()
            self._unanswered.append(self.cycle)

    def on_response_complete(self) -> None:
        """Answers go in the order of the requests."""
        self._unanswered.popleft()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Of a refused request nothing is read."""
        self._beside_body = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte begins another head."""
        if not self._refused:
            super().on_message_complete()
        self._in_head, self._begun, self._head_bytes, self._beside_body = True, False, 0, 0

    def send_400_response(self, msg: str) -> None:
        """Says so and ends the connection."""
        super().send_400_response(msg)
        self._drop_answers()

    def _drop_answers(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer came through: its request's body was not read, so nothing behind it may be taken for another request."""
        self._refused = True
        self.cycle.keep_alive = False

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEAD_SECONDS_MAX, self._refuse, _TOO_SLOW, "too_slow")

    def _head_is_over(self) -> None:
        self._in_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, answer: bytes, why: str) -> None:
        self._refused = True
        self._head_is_over()
        logs.count(f"heads.{why}")
        self.transport.write(answer)
        self.transport.close()


def _disguised(before: bytes, data: bytes) -> tuple[bytes, bytes]:
    """The piece with the offer under another name, and what may be the beginning of one, or of the head's end, for the next piece.

    `before` is what was parsed before it, the last `_BEFORE` bytes of it. What follows the head is left as it is: it may be a body. So the
    offer of a request that is sent before the answer to the one before it may come through, and then its connection ends.
    """
    ended = (before + data).find(_END_OF_HEAD)
    over = len(data) if ended < 0 else ended + len(_END_OF_HEAD) - len(before)
    head, rest, held = data[:over], data[over:], b""
    if ended < 0 and (begun := _OFFER_BEGINS.search(head)):
        head, held = head[: begun.start()], begun.group()
    if b"upgrade" in head.lower():
        head = _OFFER.sub(b"!", before + head)[len(before) :]
    return head + rest, held
