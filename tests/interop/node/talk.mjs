// Talks to a running broker: node talk.mjs ENDPOINT STREAM. Publishes with synced confirms,
// subscribes from the start by a topic pattern, and prints what came as one line of JSON.
import { randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import * as m from "./malamute.mjs";

const [endpoint, stream] = process.argv.slice(2);
const socket = new Dealer({ linger: 1000, receiveTimeout: 60_000 });
socket.connect(endpoint);
const waiting = [];
async function next(...names) {
  for (;;) {
    const found = waiting.findIndex((item) => names.includes(item.command.name));
    if (found >= 0) return waiting.splice(found, 1)[0];
    const frames = (await socket.receive()).map((frame) => new Uint8Array(frame));
    for (const command of m.readMessage(frames)) {
      const { fields } = command;
      if (command.name === "PING") await socket.send(m.writeMessage([["PONG", fields.token]]));
      else if (command.name === "REFUSED" || command.name === "BYE") {
        throw new Error(`${command.name} ${JSON.stringify(fields)}`);
      } else waiting.push({ command, frames: command.frames.map((place) => frames[place]) });
    }
  }
}

await socket.send(m.writeMessage([["HELLO", [1, 1], new Uint8Array(randomBytes(16)), "", "node interop"]]));
const welcome = (await next("WELCOME")).command.fields;
const batches = [0, 1, 2].map((batch) =>
  Array.from({ length: 10 }, (_, n) => [
    n % 2 ? "node.odd" : "node.even.deep",
    Buffer.from(`${batch}/${n}`),
  ]),
);
const commands = batches.map((_, n) => ["PUBLISH", stream, n + 1, 3]);
await socket.send(m.writeMessage(commands, batches.map(m.writeContent)));
const confirms = [];
for (const _ of batches) confirms.push((await next("CONFIRM")).command.fields);

await socket.send(
  m.writeMessage([["SUBSCRIBE", 1, stream, ["topic", "node.*"], [0], 1000, 1 << 20, 1]]),
);
const subscribed = (await next("SUBSCRIBED")).command.fields;
const records = [];
let covered = subscribed.next;
while (covered < 30) {
  const { command, frames } = await next("DELIVER", "COVER");
  if (command.fields.from !== covered) throw new Error(`a cover from ${command.fields.from}, not ${covered}`);
  covered = command.fields.next;
  if (command.name === "DELIVER") records.push(...m.readDelivery(frames, command.fields.rows));
}
await socket.send(m.writeMessage([["UNSUBSCRIBE", 1]]));
const ended = (await next("ENDED")).command.fields;
await socket.send(m.writeMessage([["BYE"]]));
socket.close();
const show = (_, v) => (v instanceof Uint8Array ? m.hex(v) : typeof v === "bigint" ? String(v) : v);
console.log(JSON.stringify({ welcome, confirms, subscribed, records, covered, ended }, show));
