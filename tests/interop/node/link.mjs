// A link to a running broker: what the programs beside this file talk over.
import { randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import * as m from "./malamute.mjs";

export async function open(endpoint, identity = "") {
  const socket = new Dealer({ linger: 1000, receiveTimeout: 10_000 });
  socket.connect(endpoint);
  const waiting = [];

  // Send commands ([name, field, ...]) with the content frames that they own.
  const say = (commands, frames = []) => socket.send(m.writeMessage(commands, frames));

  // The next command of one of these names, with its content frames; others wait.
  async function next(...names) {
    for (;;) {
      const found = waiting.findIndex((item) => names.includes(item.command.name));
      if (found >= 0) return waiting.splice(found, 1)[0];
      const frames = (await socket.receive()).map((frame) => new Uint8Array(frame));
      for (const command of m.readMessage(frames)) {
        const { name, fields } = command;
        if (name === "PING") await say([["PONG", fields.token]]);
        else if ((name === "REFUSED" && !names.includes(name)) || name === "BYE") {
          throw new Error(`${name} ${JSON.stringify(fields)}`);
        } else waiting.push({ command, frames: command.frames.map((place) => frames[place]) });
      }
    }
  }
  const answer = async (...names) => (await next(...names)).command.fields;

  async function close() {
    await say([["BYE"]]);
    socket.close();
  }

  await say([["HELLO", [1, 1], new Uint8Array(randomBytes(16)), identity, "node interop"]]);
  return { welcome: await answer("WELCOME"), say, next, answer, close };
}

// What a program found, as one line of JSON: bytes as hexadecimal digits.
export function tell(found) {
  const show = (_, v) => (v instanceof Uint8Array ? m.hex(v) : typeof v === "bigint" ? String(v) : v);
  console.log(JSON.stringify(found, show));
}
