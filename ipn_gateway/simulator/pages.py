"""The pages of the simulator, written by hand; every value is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from starlette.responses import HTMLResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ipn_gateway.simulator.sessions import Session
    from ipn_gateway.simulator.sslcommerz import Attempt

ACTIONS: Final = {
    "pay": "Pay",
    "risky": "Pay, rated risky",
    "fail": "Card is declined",
    "cancel": "Cancel",
    "unattempted": "Leave without choosing",
    "expire": "Let the time run out",
}

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}
h1{font-size:1.4rem}button{font:inherit;padding:.5rem 1rem;margin:.25rem .25rem .25rem 0;cursor:pointer}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ccc}
.note{color:#555}
@media (prefers-color-scheme:dark){body{color:#eee;background:#161616}.note{color:#aaa}a{color:#9cf}}
"""


def page(title: str, body: str, *, status: int = 200) -> HTMLResponse:
    """A whole page; `body` is HTML."""
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>",
        status_code=status,
        headers={"Cache-Control": "no-store"},
    )


def payment_page(session: Session) -> HTMLResponse:
    """Where the customer pays: one button for each way that it can end."""
    buttons = "".join(f'<button name="action" value="{escape(action)}">{escape(label)}</button>' for action, label in ACTIONS.items())
    tried = f"<p>Attempts so far: {session.attempts}.</p>" if session.attempts else ""
    return page(
        f"Pay {session.amount:.2f} {session.currency}",
        f"<p>{escape(session.product)} at <b>{escape(session.store_id)}</b>, order <b>{escape(session.tran_id)}</b>.</p>"
        f'{tried}<form method="post">{buttons}</form>'
        '<p class="note">This is a simulator: no money moves. Every button makes an attempt and sends its notification;'
        " paying twice makes two payments.</p>",
    )


def return_page(url: str, fields: Mapping[str, str]) -> HTMLResponse:
    """Sends the customer's browser back to the merchant: a POST across sites that needs no click."""
    inputs = "".join(f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">' for name, value in fields.items())
    return page(
        "Back to the shop",
        f'<form method="post" action="{escape(url)}">{inputs}<button>Continue</button></form><script>document.forms[0].submit()</script>',
    )


def finished_page(attempt: Attempt) -> HTMLResponse:
    """Shown where the merchant gave no address to return to, and to who leaves."""
    return page(
        f"The attempt ended as {attempt.status}",
        f"<p>Order <b>{escape(attempt.tran_id)}</b>. {escape(attempt.error)}</p>"
        '<p class="note">The browser is not sent back to the shop.</p>',
    )


def closed_page(session: Session | None) -> HTMLResponse:
    """For a session that does not exist or took too long."""
    if session is None:
        return page("There is no such session", "<p>Open one with a session init.</p>", status=404)
    return page("This session has ended", f"<p>The time for order <b>{escape(session.tran_id)}</b> ran out.</p>", status=410)


def index_page(sessions: Iterable[Session], attempts: Iterable[Attempt]) -> HTMLResponse:
    """What has happened here, newest first."""
    opened = "".join(
        f'<tr><td><a href="/pay/{escape(one.key)}">{escape(one.tran_id)}</a></td><td>{one.amount:.2f} {escape(one.currency)}'
        f"</td><td>{one.attempts}</td></tr>"
        for one in sessions
    )
    tried = "".join(
        f"<tr><td>{escape(one.tran_id)}</td><td>{escape(one.status)}</td><td>{one.currency_amount:.2f}"
        f" {escape(one.currency_type)}</td><td>{escape(one.val_id)}</td></tr>"
        for one in attempts
    )
    return page(
        "SSLCOMMERZ simulator",
        '<p class="note">No money moves here. <a href="/simulator/state">State as JSON</a> · '
        '<a href="/openapi.json">Control API</a></p>'
        f"<h2>Sessions</h2><table><tr><th>Order</th><th>Amount</th><th>Attempts</th></tr>{opened}</table>"
        f"<h2>Attempts</h2><table><tr><th>Order</th><th>Status</th><th>Amount</th><th>val_id</th></tr>{tried}</table>",
    )
