// Sends one event with Node 18 or later, without a package.
//
//     URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret node send.mjs order-1

import { createHmac } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const { URL: base, SOURCE, SECRET } = process.env;

// Posts an event. What does not tell a decision is tried again: the event has an id.
async function send(event) {
  const body = JSON.stringify(event);
  let waitMs = 200;
  for (let attempt = 0; attempt < 6; attempt++) {
    // Each try is signed anew: a timestamp is good for five minutes.
    const now = Math.floor(Date.now() / 1000).toString();
    const signature = createHmac("sha256", SECRET).update(`${now}\n${body}`).digest("hex");
    let askedMs = 0;
    try {
      const answer = await fetch(`${base}/v1/events`, {
        method: "POST",
        headers: {
          "Content-Type": "application/json",
          "X-Madeira-Source": SOURCE,
          "X-Madeira-Timestamp": now,
          "X-Madeira-Signature": signature,
        },
        body,
        signal: AbortSignal.timeout(10_000),
      });
      const text = await answer.text();
      if (answer.status < 500 && answer.status !== 408 && answer.status !== 429) {
        return [answer.status, text];
      }
      askedMs = 1000 * Number(answer.headers.get("Retry-After") ?? 0);
    } catch (error) {
      console.error(`no answer: ${error.cause ?? error}`);
    }
    await sleep(Math.max(waitMs, askedMs));
    waitMs *= 2;
  }
  throw new Error("not confirmed; send it again later, with the same event_id");
}

const [status, answer] = await send({ event_id: process.argv[2], event_type: "order.created", payload: { total: 42 } });
console.log(status, answer);
process.exitCode = status === 200 || status === 202 ? 0 : 1;
