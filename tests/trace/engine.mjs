// Perfetto's trace processor, as Perfetto's user interface has it: WebAssembly, and a worker that is called in protobuf.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { setImmediate } from "node:timers/promises";
import vm from "node:vm";

const APPEND = 1, FINALIZE = 2, QUERY = 3; // TraceProcessorRpc.TraceProcessorMethod

// Loads a trace (bytes) into the engine in `folder`, which holds `engine_bundle.js`. Returns a function that answers SQL with rows.
export async function load(folder, trace) {
  const replies = [];
  const port = {
    postMessage(bytes) {
      for (const [, rpc] of fields(bytes)) {
        const reply = Object.fromEntries(fields(rpc));
        if (reply[5]) throw new Error(text(reply[5])); // fatal_error
        replies.push(reply);
      }
    },
  };
  const file = (url) => readFileSync(join(folder, url));
  const worker = {
    console: { log() {}, warn() {}, error: console.error }, location: { href: "" }, WorkerGlobalScope: class {}, Uint8Array,
    importScripts: () => {}, performance, setTimeout, TextDecoder, TextEncoder, URL,
    XMLHttpRequest: class {
      open(_, url) { this.url = url; }
      send() { this.response = file(this.url); }
    },
  };
  worker.self = worker;
  vm.runInNewContext(file("engine_bundle.js").toString(), worker);
  worker.onmessage({ data: port });
  await setImmediate();

  let sequence = 0;
  const call = (method, ...args) => {
    replies.length = 0;
    const rpc = Buffer.concat([varintField(1, sequence++), varintField(2, method), ...args]);
    port.onmessage({ data: new Uint8Array(bytesField(1, rpc)) });
    return replies;
  };
  for (let at = 0; at < trace.length; at += 1 << 24) {
    const [reply] = call(APPEND, bytesField(101, trace.subarray(at, at + (1 << 24))));
    const error = fields(reply[201]).find(([field]) => field === 2);
    if (error) throw new Error(text(error[1]));
  }
  call(FINALIZE);
  return (sql) => rows(sql, call(QUERY, bytesField(103, bytesField(1, Buffer.from(sql)))).map((reply) => reply[203]));
}

// QueryResult: names of columns, an error, and batches of cells: the type of each, and the values by type.
function rows(sql, results) {
  const columns = [], values = [];
  for (const [field, value] of results.flatMap(fields)) {
    if (field === 1) columns.push(text(value));
    if (field === 2 && value.length > 0) throw new Error(`${sql}: ${text(value)}`);
    if (field !== 3) continue;
    const batch = Object.fromEntries(fields(value));
    const strings = text(batch[5] ?? new Uint8Array()).split("\0"), numbers = varints(batch[2]);
    const doubles = new DataView(Uint8Array.from(batch[3] ?? []).buffer);
    let double = 0;
    for (const type of varints(batch[1])) {
      if (type === 1n) values.push(null);
      if (type === 2n) values.push(Number(BigInt.asIntN(64, numbers.shift())));
      if (type === 3n) values.push(doubles.getFloat64(8 * double++, true));
      if (type === 4n) values.push(strings.shift());
    }
  }
  const row = (from) => Object.fromEntries(columns.map((name, at) => [name, values[from + at]]));
  return Array.from({ length: values.length / Math.max(columns.length, 1) }, (_, at) => row(at * columns.length));
}

const text = (bytes) => new TextDecoder().decode(bytes);

// The fields of a message: [number, value], a varint as BigInt and all else as bytes.
function fields(bytes) {
  const found = [];
  for (let at = 0; at < bytes.length; ) {
    let key, value;
    [key, at] = varint(bytes, at);
    const wire = Number(key & 7n);
    if (wire === 0) [value, at] = varint(bytes, at);
    else {
      let length = BigInt(wire === 1 ? 8 : 4);
      if (wire === 2) [length, at] = varint(bytes, at);
      value = bytes.subarray(at, (at += Number(length)));
    }
    found.push([Number(key >> 3n), value]);
  }
  return found;
}

function varint(bytes, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    value |= BigInt(bytes[at] & 0x7f) << shift;
    if (bytes[at++] < 0x80) return [value, at];
  }
}

function varints(bytes = new Uint8Array()) {
  const found = [];
  for (let at = 0, value; at < bytes.length; found.push(value)) [value, at] = varint(bytes, at);
  return found;
}

function encoded(value) {
  const bytes = [];
  for (; value >= 0x80; value = Math.floor(value / 0x80)) bytes.push((value % 0x80) | 0x80);
  return Buffer.from([...bytes, value]);
}

const varintField = (field, value) => Buffer.concat([encoded(field * 8), encoded(value)]);
const bytesField = (field, bytes) => Buffer.concat([encoded(field * 8 + 2), encoded(bytes.length), bytes]);
