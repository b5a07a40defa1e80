// What a flow was like in the last minute: events have only what is now.

import { seconds } from './format.js';

const KEEP = 60;
/** Seconds over which a rate or a time of a run is taken. */
const RATE = 2;
const RUNS = 10;

export class History {
  constructor() {
    this.points = [];
  }

  add(snapshot) {
    const at = seconds(snapshot.elapsed);
    const operators = new Map(snapshot.operators.map(({ name, runs, busy, device_time: device }) => [name, { runs, busy: seconds(busy), device }]));
    const memory = new Map(snapshot.devices.map(({ name, in_use, waiting }) => [name, in_use + waiting]));
    const writers = new Set(snapshot.hubs.filter((hub) => hub.from !== hub.to).map((hub) => hub.from));
    const sinks = new Map();
    for (const { to, passed } of snapshot.hubs.filter((hub) => !writers.has(hub.to))) sinks.set(to, (sinks.get(to) ?? 0) + passed);
    this.points.push({ at, operators, memory, sinks });
    while (at - this.points[0].at > KEEP) this.points.shift();
  }

  /** The last point, and one some time before. */
  between(time) {
    const last = this.points.at(-1);
    const first = this.points.find((point) => last.at - point.at <= time);
    return first === last ? [this.points.at(-2) ?? last, last] : [first, last];
  }

  /** Messages in a second that the last operators took: of the one that takes most. */
  throughput(snapshot) {
    if (!this.points.length) return whole(snapshot);
    const [first, last] = this.between(RATE);
    let most = { output: null, sink: '' };
    for (const [sink, passed] of last.sinks) {
      const output = last.at > first.at ? (passed - (first.sinks.get(sink) ?? 0)) / (last.at - first.at) : null;
      if (most.output === null || output > most.output) most = { output, sink: `into ${sink}` };
    }
    return most;
  }

  /** The time of a run on the host and on the device: of the last seconds, or else of all runs. */
  perRun({ name, runs, busy, device_time: device }) {
    const now = { runs, busy: seconds(busy), device };
    const before = this.points.length > 1 ? this.between(RUNS)[0].operators.get(name) : null;
    const mean = (sum, count, sumBefore, countBefore) => {
      if (!count) return null;
      return before && count > countBefore ? (sum - sumBefore) / (count - countBefore) : sum / count;
    };
    const host = mean(now.busy, runs, before?.busy, before?.runs);
    const onDevice = device ? mean(seconds(device.total), device.runs, seconds(before?.device?.total), before?.device?.runs ?? 0) : null;
    return { host, device: onDevice };
  }

  /** Seconds before now, and the bytes then. */
  memory(device) {
    const last = this.points.at(-1);
    const points = this.points.filter((point) => point.memory.has(device));
    return { times: points.map((point) => point.at - last.at), values: points.map((point) => point.memory.get(device)) };
  }
}

/** The throughput of a whole run. */
function whole(snapshot) {
  const writers = new Set(snapshot.hubs.filter((hub) => hub.from !== hub.to).map((hub) => hub.from));
  const last = snapshot.hubs.filter((hub) => !writers.has(hub.to));
  const most = last.reduce((one, next) => (next.passed > (one?.passed ?? 0) ? next : one), null);
  return most ? { output: most.passed / Math.max(1e-3, seconds(snapshot.elapsed)), sink: `into ${most.to}, on average` } : { output: null, sink: '' };
}
