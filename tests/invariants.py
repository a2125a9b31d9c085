"""What is true of the database at every moment, whatever happened: watched by triggers, and looked up between two steps.

The triggers see each change of a row that commits, also those that nobody sees between two steps. (I1) to (I8) as in the tests' design:
stored, once, fanned out once, leased once, answered the same, delivered for ever, numbered without gaps, along the diagram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection
    from uuid import UUID

    import psycopg

_WATCH: Final = """
CREATE TABLE broken (what text, which text);
CREATE TABLE of_the_merchant (order_id text, operation_id text, effect text);

CREATE FUNCTION watch_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.fence < OLD.fence THEN
        INSERT INTO broken VALUES ('a fence fell', NEW::text);
    END IF;
    IF NEW.fence <> OLD.fence AND NEW.lease_expires_at IS NOT NULL AND OLD.lease_expires_at > ipn_now() THEN
        INSERT INTO broken VALUES ('two leases on a row', NEW::text);
    END IF;
    IF NEW.fence = OLD.fence AND OLD.lease_expires_at IS NULL AND NEW.lease_expires_at IS NOT NULL THEN
        INSERT INTO broken VALUES ('a lease without a new fence', NEW::text);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION watch_for_ever() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO broken VALUES (TG_OP || ' of ' || TG_TABLE_NAME, OLD::text);
    RETURN NULL;
END $$;

CREATE FUNCTION watch_event_delivery() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.status = 'delivered' AND (NEW.status <> 'delivered' OR NEW.delivered_at IS DISTINCT FROM OLD.delivered_at) THEN
        INSERT INTO broken VALUES ('delivered was reverted', NEW::text);
    END IF;
    IF NEW.attempt_count NOT IN (OLD.attempt_count, OLD.attempt_count + 1) THEN
        INSERT INTO broken VALUES ('attempts were lost', NEW::text);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION watch_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.status <> NEW.status AND (OLD.status || ' ' || NEW.status) NOT IN (
        'pending paid', 'pending paid_on_hold', 'pending failed', 'pending cancelled', 'pending expired',
        'failed paid', 'failed paid_on_hold', 'failed cancelled', 'failed expired',
        'cancelled paid', 'cancelled paid_on_hold', 'expired paid', 'expired paid_on_hold', 'expired cancelled',
        'paid_on_hold paid', 'paid_on_hold partially_refunded', 'paid_on_hold refunded',
        'paid partially_refunded', 'paid refunded', 'partially_refunded refunded') THEN
        INSERT INTO broken VALUES ('a way that is not in the diagram', OLD.status || ' to ' || NEW::text);
    END IF;
    IF NEW.amount <> OLD.amount OR NEW.amount_paid < OLD.amount_paid OR NEW.amount_refunded < OLD.amount_refunded
       OR NEW.event_count < OLD.event_count THEN
        INSERT INTO broken VALUES ('an order forgot', NEW::text);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION watch_refund() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.status IN ('succeeded', 'failed') AND NEW.status <> OLD.status OR NEW.amount <> OLD.amount THEN
        INSERT INTO broken VALUES ('a refund that is over was changed', NEW::text);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER watch AFTER UPDATE ON inbox FOR EACH ROW EXECUTE FUNCTION watch_lease();
CREATE TRIGGER watch AFTER UPDATE ON sweeps FOR EACH ROW EXECUTE FUNCTION watch_lease();
CREATE TRIGGER watch AFTER UPDATE ON refunds FOR EACH ROW EXECUTE FUNCTION watch_lease();
CREATE TRIGGER watch AFTER UPDATE ON event_deliveries FOR EACH ROW EXECUTE FUNCTION watch_lease();
CREATE TRIGGER watch_too AFTER UPDATE ON event_deliveries FOR EACH ROW EXECUTE FUNCTION watch_event_delivery();
CREATE TRIGGER watch AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION watch_order();
CREATE TRIGGER watch_too AFTER UPDATE ON refunds FOR EACH ROW EXECUTE FUNCTION watch_refund();
"""

_FOR_EVER: Final = {
    "UPDATE OR DELETE": ("events", "processed_notifications", "delivery_attempts", "audit_log"),
    "DELETE": ("orders", "payments", "refunds", "event_deliveries", "notification_deliveries", "endpoints", "idempotency_keys"),
}


def watch(database: psycopg.Connection[Any]) -> None:
    """Install the triggers, and the table of the merchant's effect."""
    database.execute(_WATCH)
    for when, tables in _FOR_EVER.items():
        for table in tables:
            statement = f"CREATE TRIGGER for_ever AFTER {when} ON {table} FOR EACH ROW EXECUTE FUNCTION watch_for_ever()"
            database.execute(statement)


_DATA: Final = "convert_from(body, 'UTF8')::jsonb -> 'data'"

BROKEN: Final = {
    "as the triggers saw": "SELECT what || ': ' || which FROM broken",
    "each delivery is decided, or open in the inbox": """
        SELECT coalesce(d.id, i.notification_delivery_id) || ' ' || coalesce(d.outcome, 'none') || ' ' || coalesce(i.state, 'none')
          FROM notification_deliveries AS d FULL JOIN inbox AS i ON i.tenant_id = d.tenant_id AND i.notification_delivery_id = d.id
         WHERE (CASE WHEN d.outcome = 'received' THEN i.state = 'received'
                     WHEN d.outcome = 'parked' THEN i.state IN ('received', 'parked')
                     WHEN d.outcome IN ('held', 'conflict', 'dead') AND d.resolution IS NULL THEN i.state = d.outcome
                     ELSE i.state IS NULL AND d.outcome IS NOT NULL END) IS NOT TRUE""",
    "nothing is parked whose order is there": """
        SELECT notification_delivery_id::text FROM inbox JOIN orders USING (tenant_id, order_id) WHERE state = 'parked'""",
    "an order's sums are those of its payments": """
        SELECT o::text FROM orders AS o LEFT JOIN LATERAL (
            SELECT sum(amount) AS paid, sum(amount_refunded) AS refunded FROM payments AS p
             WHERE p.tenant_id = o.tenant_id AND p.order_id = o.order_id AND p.status = 'applied') AS sums ON true
         WHERE amount_paid <> coalesce(paid, 0) OR amount_refunded <> coalesce(refunded, 0) OR amount_refunded > amount_paid""",
    "a payment's sums are those of its refunds": """
        SELECT p::text FROM payments AS p LEFT JOIN LATERAL (
            SELECT sum(amount) FILTER (WHERE status = 'succeeded') AS refunded,
                   sum(amount) FILTER (WHERE status IN ('pending', 'processing', 'indeterminate')) AS reserved FROM refunds AS r
             WHERE r.tenant_id = p.tenant_id AND r.payment_id = p.id) AS sums ON true
         WHERE p.amount_refunded <> coalesce(refunded, 0) OR p.amount_reserved <> coalesce(reserved, 0)""",
    "payments and ledger are the same": """
        SELECT coalesce(p.id::text, l.operation_id) FROM payments AS p
          FULL JOIN (SELECT * FROM processed_notifications WHERE effect = 'paid') AS l USING (tenant_id, source_id, operation_id)
         WHERE (p.status, p.order_id, p.amount, p.currency) IS DISTINCT FROM (l.booked, l.order_id, l.amount, l.currency)""",
    "an order's events are numbered without gaps": """
        SELECT order_id || ' ' || event_count FROM orders AS o LEFT JOIN LATERAL (
            SELECT count(sequence) AS count, max(sequence) AS last FROM events AS e
             WHERE e.tenant_id = o.tenant_id AND e.order_id = o.order_id) AS found ON true
         WHERE event_count <> count OR event_count <> coalesce(last, 0)""",
    "an order's events tell its way from pending to where it is": f"""
        SELECT id || ' ' || told || ' after ' || before FROM (
            SELECT id, data ->> 'previous_status' AS told,
                   coalesce(lag(data ->> 'status') OVER (PARTITION BY order_id ORDER BY sequence), 'pending') AS before
              FROM (SELECT id, order_id, sequence, {_DATA} AS data FROM events WHERE type LIKE 'order.%%') AS told) AS chain
         WHERE told <> before
         UNION ALL
        SELECT order_id || ' is ' || status FROM orders AS o
         WHERE status <> coalesce((SELECT {_DATA} ->> 'status' FROM events AS e WHERE e.tenant_id = o.tenant_id
                                      AND e.order_id = o.order_id AND sequence IS NOT NULL ORDER BY sequence DESC LIMIT 1), 'pending')""",
    "ledger and events are the same": f"""
        SELECT coalesce(l.operation_id, e.id) || ' ' || coalesce(l.effect, 'not booked') || ' ' || coalesce(e.type, 'not told')
          FROM (SELECT tenant_id, order_id, operation_id, effect, CASE WHEN booked = 'unapplied' THEN 'overpaid' ELSE effect END AS word
                  FROM processed_notifications WHERE origin <> 'manual') AS l
          FULL JOIN (SELECT tenant_id, order_id, id, type, {_DATA} ->> 'operation_id' AS operation_id,
                            CASE type WHEN 'order.paid_on_hold' THEN 'paid' WHEN 'order.payment_failed' THEN 'failed'
                                      ELSE substr(type, 7) END AS word
                       FROM events WHERE type LIKE 'order.%%' AND {_DATA} ->> 'operation_id' IS NOT NULL
                        AND type NOT IN ('order.refunded', 'order.refund_failed')
                        AND {_DATA} ->> 'operation_id' NOT IN (
                            SELECT operation_id FROM processed_notifications WHERE origin = 'manual')) AS e
               USING (tenant_id, order_id, operation_id, word)
         WHERE l.effect IS NULL OR e.id IS NULL""",
    "each event has one event delivery for each subscriber": """
        SELECT e.id || ' ' || e.type || ' to ' || p.url FROM events AS e JOIN endpoints AS p USING (tenant_id)
         WHERE e.type NOT LIKE 'endpoint.%%'
           AND (SELECT count(*) FROM event_deliveries AS d
                 WHERE d.tenant_id = e.tenant_id AND d.event_id = e.id AND d.endpoint_id = p.id)
            <> (e.created_at > p.created_at AND (p.deleted_at IS NULL OR e.created_at < p.deleted_at)
                AND (p.events = '{*}' OR e.type LIKE 'order.%%'))::int""",
    "attempts are numbered without gaps, and delivered is one that was": """
        SELECT d::text FROM event_deliveries AS d LEFT JOIN LATERAL (
            SELECT count(*) AS count, max(number) AS last, count(*) FILTER (WHERE outcome = 'delivered') AS delivered
              FROM delivery_attempts AS a WHERE a.tenant_id = d.tenant_id AND a.event_delivery_id = d.id) AS made ON true
         WHERE attempt_count <> count OR attempt_count <> coalesce(last, 0)
            OR status = 'delivered' AND delivered = 0 OR delivered > 0 AND status NOT IN ('delivered', 'cancelled')""",
}

_ALL: Final = " UNION ALL ".join(
    f"SELECT '{name.replace(chr(39), chr(39) * 2)}' AS name, found.* FROM ({statement}) AS found (which)"
    for name, statement in BROKEN.items()
)

_EFFECTS: Final = """
SELECT operation_id || ' ' || effect FROM (SELECT order_id, operation_id, effect FROM processed_notifications WHERE booked = 'applied') AS l
  FULL JOIN (SELECT order_id, operation_id, effect, count(*) AS times FROM of_the_merchant GROUP BY 1, 2, 3) AS m
       USING (order_id, operation_id, effect)
 WHERE times IS DISTINCT FROM 1
    OR NOT EXISTS (SELECT FROM processed_notifications AS p WHERE p.operation_id = m.operation_id AND p.booked = 'applied')
"""


def broken(database: psycopg.Connection[Any], accepted: Collection[UUID], *, with_effect: bool) -> list[tuple[str, str]]:
    """What does not hold now; `accepted` are the deliveries whose senders were told that we have them."""
    found = [(name, which) for name, which in database.execute(_ALL, {})]
    missing = "SELECT unnest(%s::uuid[]) EXCEPT SELECT id FROM notification_deliveries"
    found += [("what was accepted is stored", str(row[0])) for row in database.execute(missing, [list(accepted)])]
    if with_effect:
        found += [("the merchant's effect came once with each change", row[0]) for row in database.execute(_EFFECTS)]
    return found


_TABLES: Final = (
    *("inbox", "notification_deliveries", "processed_notifications", "orders", "payments", "refunds", "sweeps"),
    *("events", "event_deliveries", "delivery_attempts"),
)
_PRINT: Final = " UNION ALL ".join(
    f"SELECT '{table}', coalesce(string_agg(t::text, '|' ORDER BY t::text), '') FROM {table} AS t" for table in _TABLES
)


def photograph(database: psycopg.Connection[Any]) -> dict[str, str]:
    """All rows that a worker may change, as text."""
    return dict(database.execute(_PRINT).fetchall())
