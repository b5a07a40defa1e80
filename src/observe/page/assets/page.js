// The page: takes pictures of the flows from the connection and shows the chosen one.

import { Connection } from './connection.js';
import { activities, clock, colour, h, seconds, setAttribute, setText, time } from './format.js';
import { Graph } from './graph.js';
import { showHeadline } from './headline.js';
import { History } from './history.js';
import { Memory } from './memory.js';
import { asItStalled } from './stall.js';
import { Operators, Paths } from './tables.js';
import { Timeline } from './timeline.js';

const $ = (id) => document.getElementById(id);

const graph = new Graph($('graph'), $('details'));
const onName = (name) => graph.find(name);
const paths = new Paths($('paths'));
const operators = new Operators($('operators'), onName);
const memory = new Memory($('memory'));
const timeline = new Timeline($('timeline-section'), $('timeline'));
const histories = new Map();
/** Flows that have ended, as they were fetched. */
const ended = new Map();

let flows = [];
/** The id that was chosen; otherwise the latest flow is shown. */
let chosen = null;
let controls = false;

function current() {
  const known = flows.find((flow) => flow.id === chosen);
  return known ?? flows.findLast((flow) => !flow.over) ?? flows.at(-1);
}

async function take(picture) {
  ({ flows, controls } = picture);
  for (const flow of flows) {
    if (!histories.has(flow.id)) histories.set(flow.id, new History());
    if (flow.snapshot) histories.get(flow.id).add(flow.snapshot);
  }
  for (const known of [histories, ended]) {
    for (const id of known.keys()) if (!flows.some((flow) => flow.id === id)) known.delete(id);
  }
  await showCurrent();
}

async function showCurrent() {
  const flow = current();
  showBar(flow);
  if (!flow) return;
  let shown = flow.snapshot ? flow : ended.get(flow.id);
  if (!shown) {
    const answer = await fetch(`flow?id=${flow.id}`).catch(() => null);
    if (!answer?.ok) return;
    shown = await answer.json();
    ended.set(flow.id, shown);
    if (current()?.id !== flow.id) return;
  }
  show(shown);
}

/** Without the shares of a few samples. */
function known(snapshot) {
  if (seconds(snapshot.window) >= 0.2) return snapshot;
  return { ...snapshot, operators: snapshot.operators.map((operator) => ({ ...operator, shares: null })) };
}

/** Where to look: the operator that has failed, or the bottleneck. */
function lookAt({ at, snapshot: { failure } }) {
  if (!failure) return { at, tag: 'bottleneck' };
  const operator = /^operator `([^`]+)`/.exec(failure.message);
  return { at: operator?.[1] ?? null, tag: 'failed' };
}

function show(received) {
  const flow = { ...received, snapshot: asItStalled(known(received.snapshot)), ...lookAt(received) };
  const { snapshot } = flow;
  const history = histories.get(flow.id) ?? new History();
  // An element that is hidden has no width.
  $('graph-section').hidden = !snapshot.operators.length;
  $('paths-section').hidden = !snapshot.paths.length;
  $('operators-section').hidden = !snapshot.operators.length;
  $('memory-section').hidden = !snapshot.devices.length;
  showHeadline(flow, snapshot, history, onName);
  const grouped = flow.operators > snapshot.operators.length;
  $('graph-note').hidden = !grouped;
  setText($('graph-note'), `${flow.operators} operators are shown in ${snapshot.operators.length} groups.`);
  graph.show(flow);
  paths.show(snapshot);
  operators.show(flow, history);
  memory.show(snapshot, history);
  timeline.show(flow);
  showLegend(snapshot);
}

const NAMES = { runs: 'runs', input: 'waits for input', room: 'waits for room', envelope: 'waits for an envelope', device: 'waits for a device', memory: 'waits for memory', worker: 'waits for a worker', condition: 'waits for a condition, a time or a future', idle: 'paused or ended' };

function showLegend({ operators: all }) {
  const seen = new Set(['runs', 'input', 'room', 'device', 'condition']);
  for (const operator of all) {
    seen.add(colour(operator.activity));
    for (const activity of Object.keys(operator.shares ?? {})) seen.add(colour(activity));
  }
  const kinds = [...new Set(Object.values(activities).map(([, kind]) => kind))].filter((kind) => seen.has(kind));
  if ($('legend').dataset.kinds === kinds.join()) return;
  $('legend').dataset.kinds = kinds.join();
  $('legend').replaceChildren(...kinds.map((kind) => h('li', {}, h('i', { class: `fill-${kind}` }), NAMES[kind])), h('li', {}, h('i', { class: 'dashes' }), 'waits for the one it points to'));
}

function showBar(flow) {
  const picker = $('flows');
  picker.hidden = flows.length < 2;
  $('name').hidden = flows.length >= 2;
  setText($('name'), flow?.name ?? 'no flow yet');
  const options = flows.map(({ id, name, over, state }) => [String(id), over ? `${name} (${state})` : name]);
  const now = JSON.stringify(options);
  if (picker.dataset.now !== now) {
    picker.dataset.now = now;
    picker.replaceChildren(...options.map(([value, text]) => h('option', { value }, text)).reverse());
  }
  if (flow) picker.value = String(flow.id);
  const state = flow?.state ?? '';
  setText($('state'), state);
  setAttribute($('state'), 'class', `state ${state}`);
  setText($('elapsed'), flow ? (flow.over && flow.elapsed < 60 ? time(flow.elapsed) : clock(flow.elapsed)) : '');
  document.title = flow ? `${flow.name}: ${state} – wakeline` : 'wakeline';
  $('controls').hidden = !controls || !flow || flow.over;
  setText($('pause'), state === 'paused' ? 'Resume' : 'Pause');
  $('stop').disabled = state === 'stopping' || state === 'failed';
}

$('flows').addEventListener('change', (event) => {
  chosen = Number(event.target.value);
  showCurrent();
});
const control = (action) => fetch(`${action}?id=${current().id}`, { method: 'POST' });
$('pause').addEventListener('click', () => control(current().state === 'paused' ? 'resume' : 'pause'));
$('stop').addEventListener('click', () => control('stop'));
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && graph.selected) graph.select(graph.selected);
});

new Connection(take, (state, text) => {
  setText($('link'), text);
  setAttribute($('link'), 'class', `link quiet ${state}`);
  document.body.dataset.link = state;
}).start();

