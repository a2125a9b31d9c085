// node serve.mjs KEY…: a subscriber with the snippet of the documentation. Its first line is its port; then one line of JSON per request.

import { createServer } from "node:http";
import { Rejected, verify } from "./receive-events.mjs";

const keys = process.argv.slice(2);
const seen = new Set();

const server = createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  const outcome = { status: 204 };
  try {
    const { id, event } = verify(request.headers, Buffer.concat(parts), keys);
    Object.assign(outcome, { id, event, repeated: seen.has(id) });
    seen.add(id);
  } catch (error) {
    Object.assign(outcome, { status: error instanceof Rejected ? 401 : 500, reason: error.reason ?? error.message });
  }
  console.log(JSON.stringify(outcome));
  response.writeHead(outcome.status).end();
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
