// Numbers and times as text, and elements without HTML: names are set as text only.

/** Seconds of a serialised `Duration`. */
export const seconds = (time) => (time ? time.secs + time.nanos / 1e9 : 0);

const three = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

/** A short time: `1.24 ms`. */
export function time(value) {
  if (!(value > 0)) return value === 0 ? '0' : '–';
  if (value < 1e-6) return `${(value * 1e9).toFixed(0)} ns`;
  if (value < 1e-3) return `${three(value * 1e6)} µs`;
  if (value < 1) return `${three(value * 1e3)} ms`;
  if (value < 120) return `${three(value)} s`;
  return clock(value);
}

/** A long time: `4:05`. */
export function clock(value) {
  const [hours, minutes, rest] = [Math.floor(value / 3600), Math.floor(value / 60) % 60, Math.floor(value) % 60];
  const two = (number) => String(number).padStart(2, '0');
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function count(value) {
  if (value < 10_000) return String(value);
  if (value < 1e6) return `${three(value / 1e3)} k`;
  if (value < 1e9) return `${three(value / 1e6)} M`;
  return `${three(value / 1e9)} G`;
}

const STREAMED = {
  no_graph: 'no graph',
  too_many_rows: 'more rows than the largest bucket',
  uneven_rows: 'uneven rows',
  empty: 'empty messages',
  too_many_lengths: 'more lengths than graphs',
};

/** The rounds of a section that were not replayed, and the most frequent reason: `, 12 streamed (no graph)`. */
export function streamed({ streamed: rounds, streamed_because: reasons }) {
  const [most] = [...reasons].sort((one, other) => other[1] - one[1]);
  return rounds ? `, ${count(rounds)} streamed${most ? ` (${STREAMED[most[0]] ?? most[0]})` : ''}` : '';
}

export function rate(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0/s';
  if (value < 10) return `${value.toFixed(1)}/s`;
  return `${count(Math.round(value))}/s`;
}

export function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

export const percent = (share) => `${(100 * share).toFixed(0)} %`;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An element of HTML. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An element of SVG. */
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** A sentence whose `names` in backticks are buttons. */
export function withNames(sentence, onName) {
  return sentence.split('`').map((part, at) => {
    if (at % 2 === 0) return part;
    return h('button', { type: 'button', class: 'name', onclick: () => onName(part) }, part);
  });
}

/** What an operator does, with the class of its colour. */
export const activities = {
  runs: ['running', 'runs'],
  message: ['waits for input', 'input'],
  room: ['waits for room', 'room'],
  envelope: ['waits for an envelope', 'envelope'],
  device: ['waits for a device', 'device'],
  memory: ['waits for memory', 'memory'],
  worker: ['waits for a worker', 'worker'],
  condition: ['waits for a condition', 'condition'],
  time: ['waits for its time', 'condition'],
  future: ['awaits a future', 'condition'],
  outside: ['waits for callers', 'input'],
  paused: ['paused', 'idle'],
  ended: ['ended', 'idle'],
};

export const phrase = (activity) => activities[activity]?.[0] ?? activity;
export const colour = (activity) => activities[activity]?.[1] ?? 'idle';

/** A bar of shares, `[class, share, text]` each. It is updated in place. */
export class Bar {
  constructor(label) {
    this.node = h('div', { class: 'bar-of-shares', role: 'img', 'aria-label': label });
  }

  set(parts) {
    const shown = parts.filter(([, share]) => share > 0.001);
    while (this.node.children.length > shown.length) this.node.lastChild.remove();
    while (this.node.children.length < shown.length) this.node.append(h('span'));
    shown.forEach(([kind, share], at) => {
      const part = this.node.children[at];
      setAttribute(part, 'class', `fill-${kind}`);
      part.style.width = `${100 * share}%`;
    });
    const text = shown.map(([, share, name]) => `${name} ${percent(share)}`).join(', ');
    setAttribute(this.node, 'title', text);
    setAttribute(this.node, 'aria-label', text);
  }
}

/** The shares of an operator, those of one colour next to each other. */
export function shareParts(operator) {
  const order = Object.keys(activities);
  const shares = Object.entries(operator.shares ?? {}).sort(([one], [other]) => order.indexOf(one) - order.indexOf(other));
  return shares.map(([activity, share]) => [colour(activity), share, phrase(activity)]);
}
