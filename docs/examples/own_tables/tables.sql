-- The shop's own schema, in the same database as the gateway's tables, which are in `public`.
CREATE SCHEMA IF NOT EXISTS shop;

CREATE TABLE IF NOT EXISTS shop.customers (
    email   text PRIMARY KEY,
    balance numeric NOT NULL DEFAULT 0
);

CREATE TABLE IF NOT EXISTS shop.deposits (
    order_id  text PRIMARY KEY,
    email     text NOT NULL REFERENCES shop.customers,
    amount    numeric NOT NULL CHECK (amount > 0),
    currency  text NOT NULL,
    on_hold   boolean NOT NULL,
    booked_at timestamptz NOT NULL DEFAULT now()
);
