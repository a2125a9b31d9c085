// Whether an event of the gateway is genuine, with nothing but Node's own crypto (18 or newer). To be copied.
//
//   const message = verify(request.headers, body, ["whsec_…", "whpk_…"]); // throws Rejected
//
// `body` is a Buffer with the request's bytes as they came. Keep message.id in the transaction that acts on the event:
// INSERT INTO received_events (event_id) VALUES ($1) ON CONFLICT DO NOTHING; no row inserted: it was acted on before.

import { createHmac, createPublicKey, timingSafeEqual, verify as verifies } from "node:crypto";

const TOLERANCE_SECONDS = 300;
const SIGNATURES_MAX = 32;
const BEFORE_PUBLIC_KEY = Buffer.from("302a300506032b6570032100", "hex"); // makes 32 bytes an ed25519 key after RFC 8410

export class Rejected extends Error {
  constructor(reason) {
    super(reason);
    this.reason = reason;
  }
}

export function verify(headers, body, keys, now = Date.now() / 1000) {
  const [id, timestamp, signatures] = ["webhook-id", "webhook-timestamp", "webhook-signature"].map((name) => headers[name]);
  if (!id || !timestamp || !signatures) throw new Rejected("header_missing");
  if (!/^[\x20-\x2d\x2f-\x7e]+$/.test(id)) throw new Rejected("id_unreadable"); // a dot separates it from the time
  if (!/^[0-9]{1,12}$/.test(timestamp)) throw new Rejected("timestamp_unreadable");
  if (now - Number(timestamp) > TOLERANCE_SECONDS) throw new Rejected("timestamp_too_old");
  if (Number(timestamp) - now > TOLERANCE_SECONDS) throw new Rejected("timestamp_too_new");
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  const checks = keys.map((key) => check(key, signed));
  const tried = signatures.split(/\s+/).map((item) => item.split(",")).filter(([version]) => ["v1", "v1a"].includes(version));
  const genuine = tried.slice(0, SIGNATURES_MAX).some(([version, encoded]) => {
    const signature = Buffer.from(encoded ?? "", "base64");
    return checks.some((one) => one.version === version && one.fits(signature));
  });
  if (!genuine) throw new Rejected("signature_wrong");
  return { id, sentAt: Number(timestamp), event: JSON.parse(body.toString("utf8")) };
}

function check(key, signed) {
  const [, form, encoded] = /^(whsec_|whpk_)([A-Za-z0-9+/]+=*)$/.exec(key) ?? [];
  const bytes = Buffer.from(encoded ?? "", "base64");
  if (form === "whsec_" && bytes.length >= 24 && bytes.length <= 64) {
    const expected = createHmac("sha256", bytes).update(signed).digest();
    return { version: "v1", fits: (given) => given.length === expected.length && timingSafeEqual(given, expected) };
  }
  if (form === "whpk_" && bytes.length === 32) {
    const publicKey = createPublicKey({ key: Buffer.concat([BEFORE_PUBLIC_KEY, bytes]), format: "der", type: "spki" });
    return { version: "v1a", fits: (given) => given.length === 64 && verifies(null, signed, publicKey, given) };
  }
  throw new Error("a key is whsec_ or whpk_ and base64");
}
