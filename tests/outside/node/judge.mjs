// node judge.mjs WHO < messages.json: what a receiver in Node says to each message, and messages of its own, as JSON.
// WHO is `ours`, the snippet of the documentation, or `library`, the standardwebhooks package, which knows v1 only.

import { generateKeyPairSync, sign } from "node:crypto";
import { readFileSync } from "node:fs";
import { Webhook } from "standardwebhooks";
import { verify } from "./receive-events.mjs";

const judges = {
  ours: ({ headers, body, keys, now }) => verify(headers, Buffer.from(body), keys, now ?? undefined),
  library: ({ headers, body, keys }) => new Webhook(keys[0]).verify(body, headers),
};

function judged(message) {
  try {
    judges[process.argv[2]](message);
    return null;
  } catch (error) {
    return error.reason ?? error.message;
  }
}

function made({ id, timestamp, body, secret }) {
  const pair = generateKeyPairSync("ed25519");
  const signature = sign(null, Buffer.from(`${id}.${timestamp}.${body}`), pair.privateKey).toString("base64");
  const publicKey = pair.publicKey.export({ format: "der", type: "spki" }).subarray(-32).toString("base64");
  const v1 = new Webhook(secret).sign(id, new Date(timestamp * 1000), body);
  return { signature: `v1a,${signature} ${v1}`, publicKey: `whpk_${publicKey}` };
}

const { messages, wanted } = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify({ reasons: messages.map(judged), made: wanted.map(made) }));
