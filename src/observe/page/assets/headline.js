// The first lines: what limits the flow, or how it has ended, and three figures.

import { bytes, clock, h, percent, rate, seconds, setText, time, withNames } from './format.js';

const REASONS = {
  host: 'computes on the host',
  device: 'waits for a device',
  memory: 'waits for memory',
  time: 'waits for its time',
  condition: 'waits for a condition',
  future: 'awaits something outside',
  blocked_worker: 'blocks a worker',
  workers: 'too few workers',
  envelopes: 'too few envelopes',
  capacity: 'queue too small',
  outside: 'waits for callers',
};

const $ = (id) => document.getElementById(id);
let shown = '';
let announced = '';

/** What to say: a kicker, a sentence, why, and the tone. */
export function words(flow, snapshot) {
  const { bottleneck, failure } = snapshot;
  if (failure) {
    const stalled = failure.kind === 'stalled';
    const text = capital(failure.message.replace(/^stalled: /, ''));
    const sentence = stalled ? `\`${snapshot.flow}\` is stalled` : failed(snapshot.flow, text);
    return { tone: stalled ? 'stalled' : 'failed', kicker: stalled ? 'stalled' : failure.kind, sentence, why: text };
  }
  if (snapshot.state === 'ended') {
    const sentence = `\`${snapshot.flow}\` has ended after ${clock(seconds(snapshot.elapsed))}`;
    return { tone: 'ended', kicker: 'ended', sentence, why: bottleneck ? `At the end, ${bottleneck.sentence}` : '' };
  }
  if (snapshot.state === 'paused') {
    return { tone: 'ended', kicker: 'paused', sentence: `\`${snapshot.flow}\` is paused`, why: '' };
  }
  const stall = snapshot.warnings?.find((warning) => warning.kind === 'stalled');
  if (stall) {
    const sentence = `\`${snapshot.flow}\` is stalled`;
    return { tone: 'stalled', kicker: 'stalled', sentence, why: stall.sentence };
  }
  if (bottleneck) {
    const [sentence, why] = halves(bottleneck.sentence);
    return { tone: 'limited', kicker: REASONS[bottleneck.reason] ?? bottleneck.reason, sentence, why };
  }
  if (seconds(snapshot.window) < 1) {
    return { tone: 'calm', kicker: 'observing', sentence: 'Looking at the flow', why: 'What limits it is known in a moment.' };
  }
  return { tone: 'calm', kicker: 'no bottleneck', sentence: 'Nothing in the flow limits it', why: idle(snapshot) };
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** An operator's failure names it first: "operator `upper`: no room". */
function failed(flow, text) {
  const operator = /^Operator `([^`]+)`/.exec(text);
  return operator ? `\`${operator[1]}\` has failed` : `\`${flow}\` has failed`;
}

function idle(snapshot) {
  const busiest = snapshot.operators.reduce((most, next) => ((next.shares?.runs ?? 0) > (most?.shares?.runs ?? 0) ? next : most), null);
  return busiest ? `\`${busiest.name}\` is the busiest: it runs ${percent(busiest.shares.runs)} of the time.` : '';
}

/** The sentence up to its first colon outside of a name, and the rest. */
function halves(sentence) {
  let inName = false;
  for (let at = 0; at < sentence.length; at += 1) {
    if (sentence[at] === '`') inName = !inName;
    if (sentence[at] === ':' && !inName) {
      const rest = sentence.slice(at + 1).trim();
      return [sentence.slice(0, at), capital(rest) + (/[.!?]$/.test(rest) ? '' : '.')];
    }
  }
  return [sentence, ''];
}

export function showHeadline(flow, snapshot, history, onName) {
  const { tone, kicker, sentence, why } = words(flow, snapshot);
  const now = [flow.id, tone, kicker, sentence, why].join('\n');
  if (now !== shown) {
    shown = now;
    document.body.dataset.tone = tone;
    setText($('kicker'), kicker);
    $('sentence').replaceChildren(...withNames(sentence, onName));
    $('why').replaceChildren(...withNames(why, onName));
  }
  // Figures in the sentence change all the time: only its subject is announced.
  const subject = `${kicker}: ${sentence.replaceAll('`', '')}`;
  if (subject !== announced) {
    announced = subject;
    setText($('announced'), subject);
  }
  showFigures(snapshot, history);
  showWarnings(snapshot.warnings ?? [], onName);
}

const figures = new Map();

function figure(label, value, more) {
  let known = figures.get(label);
  if (!known) {
    known = { value: h('dd', { class: 'number' }), more: h('dd', { class: 'quiet' }) };
    $('figures').append(h('div', {}, h('dt', {}, label), known.value, known.more));
    figures.set(label, known);
  }
  setText(known.value, value);
  setText(known.more, more);
}

function showFigures(snapshot, history) {
  const { output, sink } = history.throughput(snapshot);
  figure('Throughput', rate(output), sink);
  const slowest = snapshot.paths.reduce((most, next) => (seconds(next.p99) > seconds(most?.p99) ? next : most), null);
  figure('Latency, p99', slowest ? time(seconds(slowest.p99)) : '–', slowest ? `half below ${time(seconds(slowest.p50))}` : 'no message was followed');
  if (snapshot.devices.length) {
    const most = snapshot.devices.reduce((one, next) => (filled(next) > filled(one) ? next : one));
    const { name, in_use, waiting, capacity } = most;
    figure('Device memory', bytes(in_use + waiting), capacity ? `of ${bytes(capacity)}, ${name}` : name);
  }
}

const filled = (device) => (device.in_use + device.waiting) / (device.capacity ?? device.peak ?? 1);

const MOST_WARNINGS = 4;

/** What is wrong at the moment, and since when. */
function showWarnings(warnings, onName) {
  const texts = warnings.slice(0, MOST_WARNINGS).map(({ sentence, since }) => `${sentence} (for ${time(Math.floor(seconds(since)))})`);
  if (warnings.length > MOST_WARNINGS) texts.push(`${warnings.length - MOST_WARNINGS} more warnings`);
  const list = $('warnings');
  const now = texts.join('\n');
  if (list.dataset.shown === now) return;
  list.dataset.shown = now;
  list.hidden = !texts.length;
  list.replaceChildren(...texts.map((text) => h('li', {}, ...withNames(text, onName))));
}
