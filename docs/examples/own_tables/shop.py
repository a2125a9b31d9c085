"""A shop's part of applying a payment: `IPN_EFFECT=shop:book`.

It is called inside the transaction that writes the ledger, after the gateway has changed the order: what it writes commits or rolls back
with that. Nothing else reaches out from here, no request and no mail, because those could not be rolled back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from ipn_gateway.effects import EffectNotification


async def book(connection: AsyncConnection[Any], notification: EffectNotification) -> None:
    """Book a payment as a deposit of the customer that the order's metadata names; what is on hold is not spendable yet."""
    if notification.effect != "paid":
        return  # failed, cancelled, expired: nothing to book
    email, on_hold = notification.metadata["email"], notification.status == "paid_on_hold"
    await connection.execute("INSERT INTO shop.customers (email) VALUES (%s) ON CONFLICT DO NOTHING", (email,))
    await connection.execute(
        "INSERT INTO shop.deposits (order_id, email, amount, currency, on_hold) VALUES (%s, %s, %s, %s, %s)",
        (notification.order_id, email, notification.amount, notification.currency, on_hold),
    )
    if not on_hold:
        await connection.execute("UPDATE shop.customers SET balance = balance + %s WHERE email = %s", (notification.amount, email))
