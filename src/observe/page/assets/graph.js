// The graph of operators and hubs, laid out by dagre.

import { Bar, colour, h, phrase, rate, s, seconds, setAttribute, setText, shareParts, percent, streamed, time, count } from './format.js';

const NODE = { width: 172, height: 58 };
const LABEL = { width: 74, height: 48 };
const SMALLEST = 0.62;
/** Events over which what an operator does is smoothed: two seconds. */
const RECENT = 8;
/** Messages of a queue that are drawn one by one. */
const MOST_PIPS = 6;

export class Graph {
  constructor(place, details) {
    Object.assign(this, { place, details, layout: '', selected: null, nodes: new Map(), edges: new Map(), recent: new Map() });
    this.svg = s('svg', { class: 'flow-graph', role: 'group', 'aria-label': 'Operators and hubs' });
    place.append(this.svg);
    new ResizeObserver(() => this.picture && this.show(this.picture)).observe(place);
  }

  show(picture) {
    this.picture = picture;
    const { snapshot } = picture;
    const width = this.place.clientWidth;
    const names = snapshot.operators.map((operator) => [operator.name, operator.section]);
    const layout = JSON.stringify([names, snapshot.hubs.map((hub) => hub.name), width]);
    if (layout !== this.layout) {
      this.layout = layout;
      this.draw(snapshot, width);
    }
    for (const operator of snapshot.operators) this.updateNode(operator, picture);
    this.updateEdges(snapshot, picture.at);
    this.showDetails(snapshot);
  }

  /** What an operator did most in the last two seconds. */
  did(operator) {
    let doing = this.recent.get(operator.name);
    if (!doing) this.recent.set(operator.name, (doing = []));
    doing.push(operator.activity);
    if (doing.length > RECENT) doing.shift();
    const counts = {};
    for (const activity of doing) counts[activity] = (counts[activity] ?? 0) + 1;
    return doing.reduce((most, next) => (counts[next] >= counts[most] ? next : most));
  }

  draw(snapshot, width) {
    const across = laidOut(snapshot, 'LR');
    const down = laidOut(snapshot, 'TB');
    const scale = (graph) => Math.min(1, width / graph.graph().width);
    const isAcross = scale(across) >= SMALLEST || scale(across) >= scale(down);
    const graph = isAcross ? across : down;
    const by = Math.max(SMALLEST, scale(graph));
    const { width: wide, height: high } = graph.graph();
    const { svg } = this;
    setAttribute(svg, 'viewBox', `0 0 ${wide} ${high}`);
    setAttribute(svg, 'width', wide * by);
    setAttribute(svg, 'height', high * by);
    const arrows = ['edge', 'input', 'room', 'envelope'].map((kind) =>
      s('marker', { id: `arrow-${kind}`, class: `arrow-${kind}`, viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: 'userSpaceOnUse', orient: 'auto-start-reverse' }, s('path', { d: 'M0 0.5 8 4 0 7.5z' })),
    );
    svg.replaceChildren(s('defs', {}, arrows));
    const [boxes, lines, labels, nodes] = ['boxes', 'lines', 'labels', 'nodes'].map((name) => s('g', { class: name }));
    svg.append(boxes, lines, nodes, labels);
    this.nodes.clear();
    this.edges.clear();
    this.recent.clear();
    for (const section of snapshot.sections) {
      const box = graph.node(`section ${section.name}`);
      if (!box || !graph.children(`section ${section.name}`).length) continue;
      const [x, y] = [box.x - box.width / 2, box.y - box.height / 2];
      const text = s('text', { class: 'section-name', x: x + 4, y: y - 7 });
      boxes.append(s('rect', { class: 'section', x, y, width: box.width, height: box.height, rx: 14 }));
      labels.append(text);
      this.nodes.set(`section ${section.name}`, { text });
    }
    for (const operator of snapshot.operators) this.drawNode(nodes, graph.node(`operator ${operator.name}`), operator);
    for (const edge of graph.edges()) {
      const { points, x, y } = graph.edge(edge);
      this.drawEdge(lines, labels, edge.name, points, { x, y }, isAcross);
    }
  }

  drawNode(into, at, { name }) {
    const [left, top] = [-NODE.width / 2, -NODE.height / 2];
    const node = {
      did: s('text', { class: 'did', x: left + 16, y: top + 39 }),
      rate: s('text', { class: 'rate', x: -left - 10, y: top + 39, 'text-anchor': 'end' }),
      shares: s('g', { class: 'shares' }),
      title: s('title', {}),
      tag: s('text', { 'text-anchor': 'middle', y: 4 }),
    };
    node.group = s('g', { class: 'node', transform: `translate(${at.x} ${at.y})`, tabindex: 0, role: 'button' },
      node.title,
      s('rect', { class: 'halo', x: left - 5, y: top - 5, width: NODE.width + 10, height: NODE.height + 10, rx: 12 }),
      s('rect', { class: 'card', x: left, y: top, width: NODE.width, height: NODE.height, rx: 8 }),
      s('rect', { class: 'strip', x: left + 6, y: top + 9, width: 4, height: NODE.height - 26, rx: 2 }),
      s('text', { class: 'title', x: left + 16, y: top + 22 }, short(name, 19)),
      node.did, node.rate, node.shares,
      s('g', { class: 'tag', transform: `translate(0 ${top - 5})` }, s('rect', { x: -40, y: -9, width: 80, height: 18, rx: 9 }), node.tag),
    );
    node.group.addEventListener('click', () => this.select(`operator ${name}`));
    node.group.addEventListener('keydown', (event) => this.key(event, name));
    into.append(node.group);
    this.nodes.set(name, node);
  }

  updateNode(operator, { at, tag }) {
    const node = this.nodes.get(operator.name);
    if (!node) return;
    const activity = this.did(operator);
    const isAt = at === operator.name;
    const selected = this.selected === `operator ${operator.name}` ? ' selected' : '';
    setAttribute(node.group, 'class', `node${selected} is-${colour(activity)}${isAt ? ` ${tag}` : ''}`);
    setText(node.tag, tag);
    setText(node.did, doing(operator, activity));
    setText(node.rate, operator.runs_per_second === null ? '' : rate(operator.runs_per_second));
    const label = `${operator.name}: ${phrase(activity)}${isAt ? `, ${tag}` : ''}`;
    setAttribute(node.group, 'aria-label', label);
    setText(node.title, operator.name);
    const parts = shareParts(operator);
    while (node.shares.children.length > parts.length) node.shares.lastChild.remove();
    while (node.shares.children.length < parts.length) node.shares.append(s('rect', { y: NODE.height / 2 - 11, height: 4 }));
    const wide = NODE.width - 24;
    let x = -NODE.width / 2 + 12;
    parts.forEach(([kind, share], part) => {
      const bar = node.shares.children[part];
      setAttribute(bar, 'class', `ink-${kind}`);
      setAttribute(bar, 'x', x.toFixed(1));
      setAttribute(bar, 'width', (share * wide).toFixed(1));
      x += share * wide;
    });
  }

  /** The rate and the queue stand on both sides of a horizontal line, and on one side of a vertical one. */
  drawEdge(lines, labels, name, points, { x, y }, isAcross) {
    const text = isAcross ? { 'text-anchor': 'middle', x, y: y - 9 } : { 'text-anchor': 'start', x: x + 12, y };
    const edge = {
      line: s('path', { class: 'line', d: smooth(points), 'marker-end': 'url(#arrow-edge)' }),
      wait: s('path', { class: 'wait' }),
      forward: smooth(shifted(points, 6)),
      back: smooth(shifted(points, 6).reverse()),
      rate: s('text', { class: 'rate', ...text }),
      pips: s('g', { class: 'pips', transform: isAcross ? `translate(${x} ${y + 17})` : `translate(${x + 36} ${y + 10})` }),
      title: s('title', {}),
    };
    const plate = isAcross ? { x: x - 32, y: y - 22, width: 64, height: 48 } : { x: x + 6, y: y - 15, width: 62, height: 34 };
    edge.group = s('g', { class: 'edge' }, edge.line, edge.wait);
    edge.label = s('g', { class: 'edge-label', tabindex: 0, role: 'button' }, edge.title,
      s('rect', { class: 'plate', ...plate, rx: 6 }), edge.rate, edge.pips);
    edge.label.addEventListener('click', () => this.select(`hub ${name}`));
    edge.label.addEventListener('keydown', (event) => event.key === 'Enter' && this.select(`hub ${name}`));
    lines.append(edge.group);
    labels.append(edge.label);
    this.edges.set(name, edge);
  }

  updateEdges(snapshot, at) {
    const operators = new Map(snapshot.operators.map((operator) => [operator.name, operator]));
    for (const hub of snapshot.hubs) {
      const edge = this.edges.get(hub.name);
      if (!edge) continue;
      const now = hub.queued / Math.max(1, hub.capacity);
      const full = hub.full ?? (now >= 1 ? 1 : 0);
      const inside = operators.get(hub.from)?.section;
      // A graph that is replayed does not use the queues inside of it.
      const isUnused = inside && inside === operators.get(hub.to)?.section && !hub.queued && !hub.messages_per_second;
      const level = isUnused ? 'unused' : full > 0.6 ? 'full' : full > 0.2 || now >= 0.5 ? 'half' : 'low';
      setAttribute(edge.group, 'class', `edge ${level}${at === hub.name ? ' bottleneck' : ''}`);
      setAttribute(edge.label, 'class', `edge-label ${level}${at === hub.name ? ' bottleneck' : ''}`);
      setAttribute(edge.line, 'stroke-width', (1.5 + 2.5 * Math.max(full, now)).toFixed(1));
      setText(edge.rate, hub.messages_per_second === null ? count(hub.passed) : rate(hub.messages_per_second));
      const said = `${hub.name}: ${hub.queued} of ${hub.capacity} queued${hub.full === null ? '' : `, full ${percent(hub.full)}`}`;
      setText(edge.title, said);
      setAttribute(edge.label, 'aria-label', said);
      pips(edge.pips, hub);
      this.updateWait(edge, hub, operators);
    }
    for (const section of snapshot.sections) {
      const box = this.nodes.get(`section ${section.name}`);
      if (box) setText(box.text, `section ${section.name} · ${count(section.replayed)} replayed${streamed(section)}`);
    }
  }

  /** An arrow beside the edge, from the one that waits to the one that it waits for. */
  updateWait(edge, hub, operators) {
    const writer = this.waitsAt(operators.get(hub.from), hub, ['room', 'envelope']);
    const reader = this.waitsAt(operators.get(hub.to), hub, ['message', 'outside']);
    const kind = writer ?? reader;
    if (!kind) return setAttribute(edge.wait, 'class', 'wait none');
    setAttribute(edge.wait, 'class', `wait is-${colour(kind)}`);
    setAttribute(edge.wait, 'd', writer ? edge.forward : edge.back);
    setAttribute(edge.wait, 'marker-end', `url(#arrow-${colour(kind)})`);
  }

  waitsAt(operator, hub, kinds) {
    if (!operator || operator.activity === 'ended') return null;
    const most = this.most(operator.name);
    if (!kinds.includes(most)) return null;
    const named = operator.activity === most && operator.waits_for.some((text) => text.includes('`'));
    if (named) return operator.waits_for.some((text) => text.includes(`\`${hub.name}\``)) ? most : null;
    const would = most === 'message' ? hub.queued === 0 : most === 'room' ? hub.queued >= hub.capacity : true;
    return would ? most : null;
  }

  most(name) {
    const doing = this.recent.get(name) ?? [];
    const counts = {};
    for (const activity of doing) counts[activity] = (counts[activity] ?? 0) + 1;
    return doing.reduce((most, next) => (counts[next] >= (counts[most] ?? 0) ? next : most), undefined);
  }

  key(event, name) {
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      return this.select(`operator ${name}`);
    }
    const { hubs } = this.picture.snapshot;
    const next = { ArrowRight: ['from', 'to'], ArrowDown: ['from', 'to'], ArrowLeft: ['to', 'from'], ArrowUp: ['to', 'from'] }[event.key];
    const hub = next && hubs.find((hub) => hub[next[0]] === name);
    if (hub) {
      event.preventDefault();
      this.nodes.get(hub[next[1]])?.group.focus();
    }
  }

  /** Shows an operator or hub, by its name, in the details. */
  find(name) {
    const { snapshot } = this.picture ?? {};
    if (!snapshot) return;
    const kind = snapshot.operators.some((operator) => operator.name === name) ? 'operator' : 'hub';
    this.select(`${kind} ${name}`, true);
    this.place.scrollIntoView({ block: 'nearest' });
    (this.nodes.get(name)?.group ?? this.edges.get(name)?.label)?.focus();
  }

  select(key, keep) {
    this.selected = this.selected === key && !keep ? null : key;
    for (const operator of this.picture.snapshot.operators) this.updateNode(operator, this.picture);
    this.showDetails(this.picture.snapshot);
  }

  showDetails(snapshot) {
    const [kind, ...rest] = (this.selected ?? '').split(' ');
    const name = rest.join(' ');
    const found = (kind === 'operator' ? snapshot.operators : snapshot.hubs).find((item) => item.name === name);
    this.details.hidden = !found;
    if (!found) return;
    const rows = kind === 'operator' ? operatorRows(found) : hubRows(found);
    const close = h('button', { type: 'button', class: 'close', 'aria-label': 'Close the details', onclick: () => this.select(this.selected) }, '×');
    const before = this.details.contains(document.activeElement);
    this.details.replaceChildren(h('h3', {}, name), close, h('dl', {}, rows.flatMap(([term, text]) => [h('dt', {}, term), h('dd', {}, text)])));
    if (before) close.focus();
  }
}

function laidOut(snapshot, rankdir) {
  const graph = new dagre.graphlib.Graph({ compound: true, multigraph: true });
  const label = rankdir === 'LR' ? LABEL : { width: 2 * (LABEL.width - 6), height: 40 };
  graph.setGraph({ rankdir, nodesep: 22, ranksep: rankdir === 'LR' ? 22 : 16, edgesep: 14, marginx: 12, marginy: 24 });
  graph.setDefaultEdgeLabel(() => ({}));
  const sections = new Set(snapshot.operators.map((operator) => operator.section).filter(Boolean));
  for (const section of sections) graph.setNode(`section ${section}`, {});
  for (const { name, section } of snapshot.operators) {
    graph.setNode(`operator ${name}`, { ...NODE });
    if (section) graph.setParent(`operator ${name}`, `section ${section}`);
  }
  for (const { name, from, to } of snapshot.hubs) {
    graph.setEdge(`operator ${from}`, `operator ${to}`, { ...label, labelpos: 'c' }, name);
  }
  dagre.layout(graph);
  return graph;
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The line below the name. */
function doing(operator, activity) {
  if (activity === 'device' && operator.device !== 'host') return `waits for ${short(operator.device, 9)}`;
  return { condition: 'waits: condition', envelope: 'waits: envelope', worker: 'waits: worker' }[activity] ?? phrase(activity);
}

function pips(group, { queued, capacity }) {
  const key = `${queued}/${capacity}`;
  if (group.dataset.key === key) return;
  group.dataset.key = key;
  group.replaceChildren();
  if (capacity > MOST_PIPS) {
    const wide = 46;
    group.append(s('rect', { class: 'empty', x: -wide / 2, y: -3, width: wide, height: 6, rx: 3 }));
    group.append(s('rect', { class: 'filled', x: -wide / 2, y: -3, width: Math.min(1, queued / capacity) * wide, height: 6, rx: 3 }));
    return;
  }
  for (let at = 0; at < capacity; at += 1) {
    group.append(s('rect', { class: at < queued ? 'filled' : 'empty', x: (at - capacity / 2) * 8 + 1, y: -3, width: 6, height: 6, rx: 1.5 }));
  }
}

/** A path through points, with rounded corners. */
function smooth(points) {
  const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  if (points.length < 3) return `M${points.map(at).join('L')}`;
  let path = `M${at(points[0])}`;
  for (let next = 1; next < points.length - 2; next += 1) {
    const middle = { x: (points[next].x + points[next + 1].x) / 2, y: (points[next].y + points[next + 1].y) / 2 };
    path += `Q${at(points[next])} ${at(middle)}`;
  }
  return `${path}Q${at(points.at(-2))} ${at(points.at(-1))}`;
}

/** The points, moved to one side. */
function shifted(points, by) {
  return points.map((point, at) => {
    const [one, other] = [points[Math.max(0, at - 1)], points[Math.min(points.length - 1, at + 1)]];
    const long = Math.hypot(other.x - one.x, other.y - one.y) || 1;
    return { x: point.x - ((other.y - one.y) / long) * by, y: point.y + ((other.x - one.x) / long) * by };
  });
}

function operatorRows(operator) {
  const bar = new Bar('shares');
  bar.set(shareParts(operator));
  const shares = shareParts(operator).sort((one, other) => other[1] - one[1]);
  const per = (total, runs) => (runs ? `${time(total / runs)} a run` : '–');
  const device = operator.device_time;
  return [
    ['on', operator.section ? `${operator.device}, section ${operator.section}` : operator.device],
    ['now', `${phrase(operator.activity)} for ${time(seconds(operator.since))}`],
    ...operator.waits_for.map((text) => ['waits for', text]),
    ['of its time', [bar.node, shares.map(([, share, text]) => `${text} ${percent(share)}`).join(', ') || '–']],
    ['runs', `${count(operator.runs)}, ${rate(operator.runs_per_second)}`],
    ['on the host', `${per(seconds(operator.busy), operator.runs)}, with its waits`],
    ...(device ? [['on the device', `${per(seconds(device.total), device.runs)}, longest ${time(seconds(device.longest))}, ${count(device.runs)} runs measured`]] : []),
  ];
}

function hubRows(hub) {
  const envelopes = (known) => `${known.free} of ${known.count} free`;
  return [
    ['queue', `${hub.queued} of ${hub.capacity} messages${hub.full === null ? '' : `, full ${percent(hub.full)} of the time`}`],
    ['passed', `${count(hub.passed)}, ${rate(hub.messages_per_second)}`],
    ['dropped', count(hub.dropped)],
    ...(hub.blanks ? [['writer’s envelopes', envelopes(hub.blanks)]] : []),
    ...(hub.arrivals ? [['reader’s envelopes', envelopes(hub.arrivals)]] : []),
  ];
}
