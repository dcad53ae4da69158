// Receives Madeira's calls with Node 18 or later, without a package.
//
//     PORT=8901 SECRETS="the-new-secret the-old-secret" node receive.mjs

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

// whsec_… is the base64 of the key; any other secret is the key itself.
const keys = process.env.SECRETS.split(" ").map((secret) =>
  secret.startsWith("whsec_") ? Buffer.from(secret.slice(6), "base64") : Buffer.from(secret),
);
// The deliveries that were taken in; in real life a table with a unique key.
const known = new Set();

// Whether Madeira made this call, by Standard Webhooks.
function genuine(headers, body) {
  const id = headers["webhook-id"] ?? "";
  const timestamp = headers["webhook-timestamp"] ?? "";
  // A test call is signed too, and brings what somebody chose who may make one.
  if (id.startsWith("msg_test_")) return false;
  if (id === "" || !/^\d{1,12}$/.test(timestamp) || Math.abs(Date.now() / 1000 - Number(timestamp)) > 300) {
    return false;
  }
  const offered = (headers["webhook-signature"] ?? "").split(" ").map((signature) => Buffer.from(signature));
  return keys.some((key) => {
    const mac = createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest("base64");
    const expected = Buffer.from(`v1,${mac}`);
    return offered.some((signature) => signature.length === expected.length && timingSafeEqual(signature, expected));
  });
}

async function take(request, response) {
  const parts = [];
  let size = 0;
  for await (const part of request) {
    size += part.length;
    if (size > 16 * 1024 * 1024) throw new Error("the body is too large");
    parts.push(part);
  }
  const body = Buffer.concat(parts);
  if (!genuine(request.headers, body)) {
    console.log("refused");
    response.writeHead(401).end();
    return;
  }
  const id = request.headers["webhook-id"];
  if (!known.has(id)) {
    const event = JSON.parse(body);
    known.add(id);
    console.log(`${event.event_type} ${event.event_id}`);
  }
  response.writeHead(204).end();
}

const server = createServer((request, response) => {
  // A caller that goes away in the middle must not end the program.
  take(request, response).catch((error) => {
    console.error(`${error}`);
    response.writeHead(500, { Connection: "close" }).end();
  });
});

server.listen(Number(process.env.PORT), "127.0.0.1", () => console.log(`listening on port ${server.address().port}`));
