// Runs the golden vectors: prints {"checked": n, "accepted": [...], "skipped": [...]}, exits 1
// with the first difference. A pattern needs RE2 and a matcher: those are the broker's.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import * as m from "./malamute.mjs";

const folder = new URL("../../../protocol/vectors/", import.meta.url);
const load = (name) => JSON.parse(readFileSync(new URL(name, folder), "utf8"));
const NAME = /^[A-Za-z0-9_][A-Za-z0-9_.:@+=-]{0,254}$/;

// A value as the vectors' JSON says it.
function told(value) {
  if (typeof value === "bigint") return { int: String(value) };
  if (typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value)) {
    return { int: String(BigInt(value)) };
  }
  if (value instanceof Uint8Array) return { hex: m.hex(value) };
  if (Array.isArray(value)) return value.map(told);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, told(v)]));
}
const frames = (vector) => vector.frames.map(m.bytes);
const without = ({ delta, appended, ...record }) => record;
const number = (v) => BigInt(v.int ?? v);

const READ = {
  messages: (v) => [{ commands: m.readMessage(frames(v)) }, { commands: v.commands }],
  stamps: (v) => [{ stamp: m.readStamp(m.bytes(v.hex)) }, { stamp: v.stamp }],
  contents: (v) => {
    const { head, records } = m.readContent(m.bytes(v.hex));
    const expected = { head: { ...head, ...v.head } };
    if (records && v.records) expected.records = v.records;
    return [{ head, ...(expected.records && { records: records.map(without) }) }, expected];
  },
  deliveries: (v) => [
    { records: m.readDelivery(frames(v), v.rows === null ? null : m.bytes(v.rows)) },
    { records: v.records },
  ],
  bitmaps: (v) => [{ rows: m.readBitmap(m.bytes(v.hex), v.count) }, { rows: v.rows }],
  names: (v) => {
    if (!NAME.test(v.text)) throw new m.Refused("bad_name", v.text);
    return [{}, {}];
  },
  message_ids: (v) => [
    { id: m.messageId(number(v.append_time_ms), number(v.offset)) },
    { id: v.hex },
  ],
};

let checked = 0;
const accepted = [], skipped = [];
for (const [kind, file] of Object.entries(load("index.json").files)) {
  for (const vector of load(file).vectors) {
    const name = `${kind}: ${vector.name}`;
    if (!READ[kind]) {
      skipped.push(name);
      continue;
    }
    let refused = null, read = null;
    try {
      read = READ[kind](vector);
    } catch (error) {
      if (!(error instanceof m.Refused)) throw new Error(name, { cause: error });
      refused = error;
    }
    if (vector.error && refused === null && vector.lenient) accepted.push(name);
    else if (vector.error) assert.equal(refused?.code, vector.error, name);
    else if (refused) throw new Error(name, { cause: refused });
    else assert.deepStrictEqual(told(read[0]), told(read[1]), name);
    checked += 1;
  }
}
console.log(JSON.stringify({ checked, accepted, skipped: skipped.length }));
