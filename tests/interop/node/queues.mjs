// Mail, requests, a group and an atomic step with a running broker: node queues.mjs ENDPOINT.
// Sends mail and reads it, asks a service and serves it, takes a step twice under one key, and
// prints what came as one line of JSON.
import { open, tell } from "./link.mjs";
import * as m from "./malamute.mjs";

const [endpoint] = process.argv.slice(2);
const link = await open(endpoint, "node");
const key = (text) => new Uint8Array(Buffer.from(text));
const content = (...bodies) => m.writeContent(bodies.map((body) => ["node.test", Buffer.from(body)]));
let tracker = 0;

// What one CONFIRM answers; tracked(t) makes the commands, with its tracker.
async function confirmed(tracked, ...frames) {
  tracker += 1;
  await link.say(tracked(tracker), frames);
  const confirm = await link.answer("CONFIRM");
  if (confirm.tracker !== tracker) throw new Error(`a confirm of ${confirm.tracker}`);
  return confirm;
}
// Rows of MAIL or WORK until there are so many, each with what its command says of it.
async function rows(name, subscription, count) {
  const found = [];
  while (found.length < count) {
    const { command, frames } = await link.next(name);
    const { rows: chosen, ...said } = command.fields;
    if (said.subscription !== subscription) throw new Error(`${name} of ${said.subscription}`);
    for (const record of m.readDelivery(frames, chosen)) found.push({ ...record, said });
  }
  return found;
}
const ranges = (found) => found.map(({ offset }) => [offset, offset + 1]);

// --- mail: accepted once under its key, read, acknowledged ---
const batch = content("one", "two", "three");
const sent = await confirmed((t) => [["SEND", "desk", t, 3, key("mail 1")]], batch);
const again = await confirmed((t) => [["SEND", "desk", t, 3, key("mail 1")]], batch);
await link.say([["OPEN_INBOX", 1, "desk", 100, 1 << 20]]);
const inbox = await link.answer("SUBSCRIBED");
const mail = await rows("MAIL", 1, 3);
const acknowledged = await confirmed((t) => [["ACK_MAIL", 1, ranges(mail), t, 3]]);
await link.say([["ACK_MAIL", 1, ranges(mail), (tracker += 1)]]);
const late = await link.answer("REFUSED");

// --- a service: asked and served over the same link ---
await link.say([
  ["OPEN_INBOX", 2, "", 100, 1 << 20],
  ["OFFER", 3, "reverse", ["topic", "node.*"], 100, 1 << 20],
]);
await link.answer("SUBSCRIBED");
await link.answer("SUBSCRIBED");
const asked = await confirmed(
  (t) => [["REQUEST", "reverse", t, "", 60_000, 3, key("request 1")]],
  content("abc", "def"),
);
const work = await rows("WORK", 3, 2);
const receipt = await confirmed((t) => [["ACK_WORK", 3, ranges(work), 1, t]]);
const backwards = work.map(({ parts }) => Buffer.from(m.bytes(parts[0])).reverse());
const replied = await confirmed(
  (t) => [["REPLY", 3, work.map(({ offset }) => offset), t, true, 3]],
  content(...backwards),
);
const replies = await rows("MAIL", 2, 2);
await confirmed((t) => [["ACK_MAIL", 2, ranges(replies), t]]);

// --- a step: two streams, mail and a cursor, taken once under its key ---
await confirmed((t) => [["PUBLISH", "node.in", t, 3]], content("x", "y", "z"));
const step = (t) => [
  ["ATOMIC", t, 4, 3, key("step 1")],
  ["PUBLISH", "node.out", 0],
  ["PUBLISH", "node.audit", 0],
  ["SEND", "desk", 0],
  ["MOVE_CURSOR", "node.in", "reader", 2, 0],
];
const pieces = [content("X", "Y"), content("took x and y"), content("stepped")];
const taken = await confirmed(step, ...pieces);
const repeated = await confirmed(step, ...pieces);
tracker += 1;
await link.say(
  [["ATOMIC", tracker, 2, 3], ["PUBLISH", "node.out", 0], ["MOVE_CURSOR", "node.in", "reader", 1, 0]],
  [content("never")],
);
const conflict = await link.answer("REFUSED");

// --- a group of one ---
await link.say([["JOIN_GROUP", 4, "node.in", "readers", ["all"], "shared", [0], 100, 1 << 20]]);
await link.answer("SUBSCRIBED");
const { command: delivered, frames } = await link.next("DELIVER");
const members = m.readDelivery(frames, delivered.fields.rows);
await confirmed((t) => [["ACK_RECORDS", 4, ranges(members), t, 3]]);
await link.say([["GROUP_INFO", 1, "node.in", "readers"]]);
const group = (await link.answer("RESULT")).value;

await link.close();
tell({
  welcome: link.welcome, sent, again, inbox, mail, acknowledged, late, asked, work, receipt,
  replied, replies, taken, repeated, conflict, members, group,
});
