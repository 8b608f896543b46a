// The protocol as SPEC.md tells it, for Node: reading everything, writing what talk.mjs needs.
// Commands and their fields are taken from the tables of SPEC.md itself.
import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import { decode, encode } from "@msgpack/msgpack";

export class Refused extends Error {
  constructor(code, reason) {
    super(`${code}: ${reason}`);
    this.code = code;
  }
}
const need = (condition, reason, code = "bad_batch") => {
  if (!condition) throw new Refused(code, reason);
};
export const hex = (bytes) => Buffer.from(bytes).toString("hex");
export const bytes = (text) => Uint8Array.from(Buffer.from(text, "hex"));
const view = (b) => new DataView(b.buffer, b.byteOffset, b.byteLength);
const small = (n) => (n >= -(2n ** 53n) + 1n && n <= 2n ** 53n - 1n ? Number(n) : n);

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? (n >>> 1) ^ 0x82f63b78 : n >>> 1;
  return n >>> 0;
});
export function crc32c(b) {
  let crc = 0xffffffff;
  for (const byte of b) crc = TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

function unpack(data, code) {
  const mapKeyConverter = (key) => {
    need(typeof key === "string", "a key that is no string", code);
    return key;
  };
  try {
    return simple(decode(data, { useBigInt64: true, mapKeyConverter }), code, 0);
  } catch (error) {
    throw error instanceof Refused ? error : new Refused(code, error.message);
  }
}
// 64-bit integers as numbers where they fit, extension types refused.
function simple(value, code, depth) {
  need(depth <= 34, "nesting", code);
  if (typeof value === "bigint") return small(value);
  if (Array.isArray(value)) return value.map((item) => simple(item, code, depth + 1));
  if (value === null || typeof value !== "object" || value instanceof Uint8Array) return value;
  need(Object.getPrototypeOf(value) === Object.prototype, "an extension type", code);
  const entries = Object.entries(value);
  return Object.fromEntries(entries.map(([k, v]) => [k, simple(v, code, depth + 1)]));
}

// --- messages (SPEC.md, sections 3 and 4) ---

const integer = (v) => typeof v === "bigint" || Number.isInteger(v);
const isMap = (v) => v !== null && typeof v === "object" && !Array.isArray(v) && !(v instanceof Uint8Array);
const FITS = {
  int: integer,
  str: (v) => typeof v === "string",
  bin: (v) => v instanceof Uint8Array,
  bool: (v) => typeof v === "boolean",
  map: isMap,
  array: Array.isArray,
  "[int]": (v) => Array.isArray(v) && v.every(integer),
  "[int, int]": (v) => Array.isArray(v) && v.length === 2 && v.every(integer),
  "[int, int, bin]": (v) =>
    Array.isArray(v) && v.length === 3 && v.slice(0, 2).every(integer) && FITS.bin(v[2]),
  "[str, str, int, [int]]": (v) =>
    Array.isArray(v) && v.length === 4 && v.slice(0, 2).every(FITS.str) && integer(v[2]) && FITS["[int]"](v[3]),
};
function fits(kind, v) {
  if (kind.endsWith(" or nil")) return v === null || fits(kind.slice(0, -7), v);
  if (!kind.startsWith("[[")) return FITS[kind](v);
  const inner = kind.slice(2, -2).split(", "); // runs of things: [[int, int]]
  const one = (item) =>
    Array.isArray(item) && item.length === inner.length && item.every((x, i) => FITS[inner[i]](x));
  return Array.isArray(v) && v.every(one);
}
const DEFAULTS = { nil: null, true: true, false: false, '""': "", 'b""': new Uint8Array() };
function byDefault(text) {
  if (text in DEFAULTS) return DEFAULTS[text];
  return /^(-?\d+|\{\}|\[\])$/.test(text) ? JSON.parse(text) : text;
}
const SPEC = readFileSync(new URL("../../../protocol/SPEC.md", import.meta.url), "utf8");
export const COMMANDS = new Map();
export const NUMBERS = {};
for (const block of SPEC.split(/^#### /m).slice(1)) {
  const [, number, name] = block.match(/^(\d+) (\w+)/);
  const rows = block.split(/^#/m)[0].matchAll(/^\| (\w+) \| ([^|]+) \| *([^|]*?) *\| [^|]+ \|$/gm);
  const fields = [...rows].map((r) => ({ name: r[1], kind: r[2], text: r[3].replaceAll("`", "") }));
  COMMANDS.set(Number(number), { name, fields: fields.filter((f) => f.name !== "Field") });
  NUMBERS[name] = Number(number);
}

// What section 11 sets for single fields.
const between = (low, high) => (v) =>
  need(v >= low && v <= high, `${v} is not between ${low} and ${high}`, "malformed");
const atMost = (n) => (v) => need([...v].length <= n, `more than ${n}`, "too_large");
const LISTS = ["ranges", "requests", "numbers", "about"];
const CLIENT_TIMES = ["deliver_at_ms", "timeout_ms", "lease_ms", "hold_ms", "again_ms"];
const BY_CLIENT = /^(SEND|REQUEST|OFFER|ACK_WORK|ACK_MAIL|ACK_RECORDS|JOIN_GROUP)$/;
function checkBounds(name, fields) {
  for (const [field, value] of Object.entries(fields)) {
    if (field === "key" && /^(SEND|REQUEST|REPLY|ACK_WORK|ATOMIC|CANCEL_REQUEST)$/.test(name)) atMost(128)(value);
    if (field === "transaction" || (field === "after" && name === "LIST_TRANSACTIONS")) atMost(128)(value);
    if (name === "STAGE" && field === "place") between(0, 2 ** 53)(value);
    if (name === "BEGIN_TRANSACTION" && field === "timeout_ms") between(0, 2 ** 53)(value);
    if (name === "COMMIT_TRANSACTION" && field === "count") between(0, 2 ** 53)(value);
    if (field === "reason" && name === "ACK_WORK") atMost(1024)(value);
    if (LISTS.includes(field)) atMost(65536)(value);
    if (field === "state" && name === "ACK_WORK") between(1, 5)(value);
    if (field === "priority") between(-128, 127)(value);
    if (CLIENT_TIMES.includes(field) && BY_CLIENT.test(name)) {
      const least = field === "again_ms" && name !== "ACK_WORK" ? -1 : 0;
      between(least, 2 ** 53)(value);
    }
    if (name === "JOIN_GROUP" && field === "visibility") between(-1, 1)(value);
    if (name === "MOVE_CURSOR" && field === "next") between(0, 2n ** 64n)(value);
    if (name === "MOVE_CURSOR" && field === "from") between(-1, 2n ** 64n)(value);
  }
  if (fields.ranges === undefined) return;
  let behind = 0n, numbers = 0n;
  for (const [from, to] of fields.ranges.map((range) => range.map(BigInt))) {
    need(behind <= from && from < to, "ranges", "malformed");
    behind = to;
    numbers += to - from;
  }
  need(numbers >= 1n && numbers <= 1048576n, "ranges", "malformed");
}
const PARTS = new Set([
  "PUBLISH", "SEND", "REQUEST", "REPLY", "ACK_MAIL", "ACK_WORK", "ACK_RECORDS", "MOVE_CURSOR", "TRIM", "PURGE_SUBJECTS",
  "BEGIN_TRANSACTION", "STAGE", "COMMIT_TRANSACTION", "ROLL_BACK_TRANSACTION",
]);
function checkStep(commands, place) {
  const { count } = commands[place].fields;
  const parts = commands.slice(place + 1, place + 1 + count);
  need(count >= 1 && parts.length === count, "parts that are missing", "malformed");
  for (const { name, fields } of parts) {
    need(PARTS.has(name) && fields.tracker === 0, `${name} as a part`, "malformed");
    need(name !== "ACK_WORK" || fields.state >= 3, "a state as a part", "malformed");
  }
}
const OWN_ONE = new Set(["PUBLISH", "UPDATE_KEY", "SEND", "REQUEST", "REPLY", "STAGE"]);
const OWN_FRAMES = new Set(["DELIVER", "MAIL", "WORK"]);

export function readMessage(frames) {
  const array = unpack(frames[0], "malformed");
  need(Array.isArray(array) && array.length > 0, "no array of commands", "malformed");
  need(array.length <= 4096, "too many commands", "too_large");
  let position = 1;
  const commands = array.map((item) => {
    need(Array.isArray(item) && COMMANDS.has(item[0]), "no such command", "malformed");
    const { name, fields } = COMMANDS.get(item[0]);
    const values = {};
    fields.forEach((field, place) => {
      const given = place + 1 < item.length;
      need(given || field.text !== "", `${name} lacks ${field.name}`, "malformed");
      values[field.name] = given ? item[place + 1] : byDefault(field.text);
      need(!given || fits(field.kind, values[field.name]), `${name}.${field.name}`, "malformed");
    });
    checkBounds(name, values);
    const owned = OWN_ONE.has(name) ? 1 : OWN_FRAMES.has(name) ? values.frames : 0;
    need(owned >= 0 && owned <= frames.length - position, "content frames", "malformed");
    const places = Array.from({ length: owned }, (_, k) => position + k);
    position += owned;
    return { number: item[0], name, fields: values, frames: places };
  });
  need(position === frames.length, "frames are left", "malformed");
  commands.forEach(({ name }, place) => name === "ATOMIC" && checkStep(commands, place));
  return commands;
}

// commands: [name, field, ...] with the fields in order.
export const writeMessage = (commands, frames = []) => [
  encode(commands.map(([name, ...fields]) => [NUMBERS[name], ...fields])),
  ...frames,
];

// --- batches (SPEC.md, section 5) ---

export function readStamp(data) {
  need(data.length >= 96, "cut short");
  const v = view(data);
  const u32 = (at) => v.getUint32(at, true);
  const u64 = (at) => small(v.getBigUint64(at, true));
  const length = v.getUint16(6, true);
  need(u32(0) === 0x31424c4d && v.getUint16(4, true) === 1, "no stamp");
  need(length >= 96 && length <= 1024 && length % 8 === 0 && length <= data.length, "its length");
  need(crc32c(data.subarray(12, length)) === u32(8), "checksum", "corrupt");
  const stamp = {
    flags: u32(12), lsn: u64(16), bundle_lsn: u64(24), synced_lsn: u64(32), epoch: u64(40),
    base_offset: u64(48), append_time_ms: small(v.getBigInt64(56, true)), stream: u32(64),
    origin: u32(68), size: u32(72), count: u32(76), control_kind: v.getUint16(80, true),
    content_crc: u32(84), stamp_bytes: length,
  };
  need(stamp.flags < 8 && stamp.size >= length && stamp.size % 8 === 0, "flags, size");
  return stamp;
}

const cut = (offsets, end) => {
  need(offsets[0] === 0 && offsets.at(-1) === end, "offsets do not span");
  need(offsets.every((o, i) => i === 0 || o >= offsets[i - 1]), "offsets fall");
  return (i) => [offsets[i], offsets[i + 1]];
};
const ints = (data, count, at = 0) => {
  need(at + 4 * count <= data.length, "no room for offsets");
  return Array.from({ length: count }, (_, i) => view(data).getInt32(at + 4 * i, true));
};

export function readContent(data, derived = false) {
  need(data.length >= 128, "cut short");
  const v = view(data);
  const u32 = (at) => v.getUint32(at, true);
  const i64 = (at) => small(v.getBigInt64(at, true));
  const u64 = (at) => small(v.getBigUint64(at, true));
  const start = v.getUint16(6, true);
  need(u32(0) === 0x31434c4d && v.getUint16(4, true) === 1, "no content");
  need(start >= 128 && start <= 1024 && start % 8 === 0, "its head's length");
  need(u32(12) === data.length, "another size");
  need(crc32c(data.subarray(12)) === u32(8), "checksum", "corrupt");
  const n = u32(16), codec = data[20], kind = data[21], flags = v.getUint16(22, true);
  need(n <= 65536 && u32(104) <= 16 << 20, "too much", "too_large");
  need(n > 0 && codec < 5 && kind < 3, "count, codec, kind");
  need(flags < 1024, "unknown flags", "unsupported");
  need(Boolean(flags & 32) === derived, "offset deltas");
  need(derived || !(flags & 512), "append times");
  need(!(flags & 64), "transaction control", "unsupported");
  need(v.getBigUint64(48, true) === 0n, "a transaction id", "unsupported");
  need([0, 4, 8, 16].includes(flags & 28), "forms of properties");
  need(kind === 1 || u32(108) === 0, "parts without lists");
  let position = start;
  const take = (size) => {
    need(position + size <= data.length, "a section beyond the end");
    const piece = data.subarray(position, position + size);
    position += Math.ceil(size / 8) * 8;
    return piece;
  };
  const column = (flag, width, get) => {
    if (!(flags & flag)) return null;
    const at = position;
    take(n * width);
    return Array.from({ length: n }, (_, i) => get(at + width * i));
  };
  const i32 = (at) => v.getInt32(at, true);
  const subjects = take(u32(80)), fieldmaps = take(u32(88));
  need(u32(92) > 0 === fieldmaps.length > 0, "field maps");
  const subjectCodes = column(128, 4, i32) ?? Array(n).fill(0);
  const fieldCodes = column(256, 4, i32) ?? Array(n).fill(fieldmaps.length ? 0 : -1);
  const times = column(1, 8, (at) => v.getBigInt64(at, true)), expiries = column(2, 8, i64);
  const properties = flags & 28 ? take(u32(96)) : new Uint8Array();
  const deltas = column(32, 4, u32), appended = column(512, 8, (at) => v.getBigInt64(at, true));
  const stored = take(u32(100));
  need(position === data.length, "the sections do not fill the content");

  const table = (section) => {
    const value = unpack(section, "bad_batch");
    need(Array.isArray(value), "no array");
    return value;
  };
  const keys = table(subjects).map((e) => (typeof e === "string" ? [e] : e));
  const maps = fieldmaps.length ? table(fieldmaps) : [];
  need(keys.length === u32(84) && maps.length === u32(92), "counts");
  for (const entry of keys) {
    need(Array.isArray(entry) && entry.length > 0, "an entry");
    need(entry.every((key) => typeof key === "string"), "a key");
    const longest = Math.max(...entry.map((key) => Buffer.byteLength(key)));
    need(entry.length <= 16 && longest <= 255, "keys", "too_large");
  }
  need(maps.every((m) => isMap(m) && Object.values(m).every((x) => typeof x === "string")), "maps");
  need(subjectCodes.every((code) => code >= 0 && code < keys.length), "a subject code");
  need(fieldCodes.every((code) => code >= -1 && code < maps.length), "a field code");
  const none = -(2n ** 63n);
  const sorted = (times ?? []).filter((t) => t !== none).sort((a, b) => (a < b ? -1 : 1));
  need(v.getBigInt64(64, true) === (sorted[0] ?? 0n), "least client time");
  need(v.getBigInt64(72, true) === (sorted.at(-1) ?? 0n), "greatest client time");
  const expiring = (expiries ?? []).filter((t) => t !== 0);
  need(i64(56) === (expiring.length ? Math.min(...expiring) : 0), "earliest expiry");
  need((deltas ?? []).every((d, i) => i === 0 || d > deltas[i - 1]), "deltas");
  const head = { count: n, codec, body_kind: kind, flags, producer_id: u64(24), first_sequence: u64(40) };
  if (kind === 2 || codec > 1) return { head, records: null };
  const parts = readBodies(codec ? gunzipSync(stored, { maxOutputLength: u32(104) }) : stored, u32(104), n, kind, u32(108));
  const props = readProperties(flags, properties, n);
  const records = Array.from({ length: n }, (_, row) => ({
    keys: keys[subjectCodes[row]],
    fields: maps[fieldCodes[row]] ?? {},
    client_time_ms: times && times[row] !== none ? small(times[row]) : null,
    expires_at_ms: (expiries && expiries[row]) || null,
    properties: props(row),
    parts: parts(row).map(hex),
    delta: deltas ? deltas[row] : row,
    appended: appended ? small(appended[row]) : null,
  }));
  return { head, records };
}

function readBodies(body, size, n, kind, m) {
  need(body.length === size, "the body's size");
  const offsets = ints(body, n + 1);
  if (kind === 0) {
    const blob = body.subarray(4 * (n + 1));
    const slice = cut(offsets, blob.length);
    return (row) => [blob.subarray(...slice(row))];
  }
  const bounds = ints(body, m + 1, 4 * (n + 1));
  const blob = body.subarray(4 * (n + m + 2));
  const slice = cut(offsets, m), part = cut(bounds, blob.length);
  return (row) => {
    const [first, end] = slice(row);
    return Array.from({ length: end - first }, (_, j) => blob.subarray(...part(first + j)));
  };
}

function readProperties(flags, data, n) {
  if (flags & 4) return () => unpack(data, "bad_batch");
  if (flags & 8) {
    const codes = ints(data, n), maps = unpack(data.subarray(4 * n), "bad_batch");
    return (row) => maps[codes[row]] ?? {};
  }
  if (flags & 16) {
    const blob = data.subarray(4 * (n + 1)), slice = cut(ints(data, n + 1), blob.length);
    return (row) => {
      const piece = blob.subarray(...slice(row));
      return piece.length ? unpack(piece, "bad_batch") : {};
    };
  }
  return () => ({});
}

export function readBitmap(data, count) {
  need(data.length === Math.ceil(count / 8), "its length", "malformed");
  const rows = [];
  for (let bit = 0; bit < 8 * data.length; bit++) if ((data[bit >> 3] >> (bit & 7)) & 1) rows.push(bit);
  need(rows.every((row) => row < count), "a row beyond the last", "malformed");
  return rows;
}

export function messageId(time, offset) {
  const id = Buffer.alloc(16);
  id.writeBigInt64BE(BigInt(time), 0);
  id.writeBigUInt64BE(BigInt(offset), 8);
  return hex(id);
}

export function readDelivery(frames, rows) {
  const batches = [];
  let stamp = null;
  for (let frame of frames) {
    while (frame.length) {
      if (stamp === null) {
        stamp = readStamp(frame);
        frame = frame.subarray(stamp.stamp_bytes);
        continue;
      }
      const size = stamp.size - stamp.stamp_bytes;
      need(size <= frame.length, "a content crosses its frame");
      const { head, records } = readContent(frame.subarray(0, size), Boolean(stamp.flags & 2));
      need(view(frame).getUint32(8, true) === stamp.content_crc, "another content", "corrupt");
      need(head.count === stamp.count, "another count");
      batches.push({ stamp, records });
      frame = frame.subarray(size);
      stamp = null;
    }
  }
  need(stamp === null, "a stamp without content");
  need(rows === null || batches.length === 1, "rows for several", "malformed");
  return batches.flatMap(({ stamp, records }) => {
    const chosen = rows === null ? records.map((_, row) => row) : readBitmap(rows, records.length);
    return chosen.map((row) => {
      const { delta, appended, ...record } = records[row];
      const offset = stamp.base_offset + delta, append_time_ms = appended ?? stamp.append_time_ms;
      return { ...record, offset, append_time_ms, id: messageId(append_time_ms, offset) };
    });
  });
}

// A content of blobs, one subject a record: [[subject, Uint8Array], ...].
export function writeContent(rows) {
  const table = [...new Set(rows.map(([subject]) => subject))];
  const subjects = Buffer.from(encode(table));
  const codes = Buffer.alloc(4 * rows.length), offsets = Buffer.alloc(4 * (rows.length + 1));
  let end = 0;
  rows.forEach(([subject, body], row) => {
    codes.writeInt32LE(table.indexOf(subject), 4 * row);
    offsets.writeInt32LE((end += body.length), 4 * (row + 1));
  });
  const body = Buffer.concat([offsets, ...rows.map((row) => row[1])]);
  const padded = [subjects, codes, body].flatMap((b) => [b, Buffer.alloc(-b.length & 7)]);
  const content = Buffer.concat([Buffer.alloc(128), ...padded]);
  content.write("MLC1", 0, "latin1");
  content.writeUInt16LE(1, 4);
  content.writeUInt16LE(128, 6);
  const head = { 12: content.length, 16: rows.length, 80: subjects.length, 84: table.length, 100: body.length, 104: body.length };
  for (const [at, value] of Object.entries(head)) content.writeUInt32LE(value, Number(at));
  content.writeUInt16LE(128, 22);
  content.writeUInt32LE(crc32c(content.subarray(12)), 8);
  return content;
}
