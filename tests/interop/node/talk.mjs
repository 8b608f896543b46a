// Talks to a running broker: node talk.mjs ENDPOINT STREAM. Publishes with synced confirms,
// subscribes from the start by a topic pattern, and prints what came as one line of JSON.
import { open, tell } from "./link.mjs";
import * as m from "./malamute.mjs";

const [endpoint, stream] = process.argv.slice(2);
const link = await open(endpoint);
const { welcome } = link;
const batches = [0, 1, 2].map((batch) =>
  Array.from({ length: 10 }, (_, n) => [
    n % 2 ? "node.odd" : "node.even.deep",
    Buffer.from(`${batch}/${n}`),
  ]),
);
await link.say(
  batches.map((_, n) => ["PUBLISH", stream, n + 1, 3]),
  batches.map(m.writeContent),
);
const confirms = [];
for (const _ of batches) confirms.push(await link.answer("CONFIRM"));

await link.say([["SUBSCRIBE", 1, stream, ["topic", "node.*"], [0], 1000, 1 << 20, 1]]);
const subscribed = await link.answer("SUBSCRIBED");
const records = [];
let covered = subscribed.next;
while (covered < 30) {
  const { command, frames } = await link.next("DELIVER", "COVER");
  if (command.fields.from !== covered) throw new Error(`a cover from ${command.fields.from}, not ${covered}`);
  covered = command.fields.next;
  if (command.name === "DELIVER") records.push(...m.readDelivery(frames, command.fields.rows));
}
await link.say([["UNSUBSCRIBE", 1]]);
const ended = await link.answer("ENDED");
await link.close();
tell({ welcome, confirms, subscribed, records, covered, ended });
