// What happened in the last two seconds: fetched when it is first seen, and when it is asked for.

import { h, percent, setText, time } from './format.js';

const ROW = 22;
const AXIS = 22;
const NEAREST = 200;

export class Timeline {
  constructor(section, place) {
    Object.assign(this, { section, place, flow: null, data: null, view: [0, 1], seen: false, drag: null });
    const button = (text, label, onclick) => h('button', { type: 'button', 'aria-label': label, onclick }, text);
    this.again = button('Look again', 'Look at the last two seconds again', () => this.fetch());
    this.save = h('a', { download: '', class: 'save' }, 'Save the trace');
    this.note = h('span', { class: 'quiet number' });
    const zoom = [button('−', 'Zoom out', () => this.zoom(2)), button('+', 'Zoom in', () => this.zoom(0.5))];
    this.tools = h('div', { class: 'tools' }, this.again, this.save, zoom, this.note);
    this.names = h('div', { class: 'names' });
    this.canvas = h('canvas', { tabindex: 0, role: 'img' });
    this.rows = h('div', { class: 'tracks' }, this.names, h('div', { class: 'canvas' }, this.canvas));
    this.detail = h('p', { class: 'quiet number detail' }, '\u00a0');
    place.append(this.tools, this.rows, this.detail);
    this.listen();
    new IntersectionObserver((entries) => {
      this.seen = entries.at(-1).isIntersecting;
      if (this.seen && this.flow !== null && !this.data) this.fetch();
    }).observe(section);
    new ResizeObserver(() => this.draw()).observe(this.rows);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
  }

  /** The flow that is shown. */
  show({ id, over }) {
    this.section.hidden = false;
    const key = `${id} ${over}`;
    if (this.key === key) return;
    Object.assign(this, { key, flow: id, over, data: null });
    this.save.href = `trace?id=${id}`;
    if (this.seen) this.fetch();
  }

  async fetch() {
    const { key, flow } = this;
    this.data = this.data ?? { tracks: [] };
    const answer = await fetch(`timeline?id=${flow}`).catch(() => null);
    if (this.key !== key) return;
    const isRecorded = answer?.status === 200;
    this.rows.hidden = !isRecorded;
    for (const tool of this.tools.children) if (tool !== this.note) tool.hidden = !isRecorded;
    if (!isRecorded) {
      setText(this.note, answer?.ok ? 'It is not recorded: observe the flow with Observe::new().record(65_536).' : 'It cannot be fetched.');
      return;
    }
    this.data = await answer.json();
    const { lost, left, seconds } = this.data;
    const sampled = this.data.tracks.some((track) => track.device) && 'device work of sampled runs';
    const more = [sampled, lost && `${lost} events were lost`, left && `${left} more tracks`].filter(Boolean).join(', ');
    setText(this.note, more);
    this.view = [0, seconds * 1e6];
    this.names.replaceChildren(...this.data.tracks.map(({ name, device }) => h('div', { title: name, class: device ? 'on-device' : '' }, name)));
    this.canvas.setAttribute('aria-label', `${this.data.tracks.length} tracks of ${seconds.toFixed(1)} seconds. Arrow keys move, plus and minus zoom.`);
    this.draw();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener('keydown', (event) => {
      const step = (this.view[1] - this.view[0]) / 8;
      const keys = { ArrowLeft: () => this.move(-step), ArrowRight: () => this.move(step), '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2) };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
    }, { passive: false });
    canvas.addEventListener('pointerdown', (event) => {
      this.drag = event.clientX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointerup', () => (this.drag = null));
    canvas.addEventListener('pointermove', (event) => {
      if (this.drag === null) return this.describe(event);
      this.move(((this.drag - event.clientX) / canvas.clientWidth) * (this.view[1] - this.view[0]));
      this.drag = event.clientX;
    });
    canvas.addEventListener('pointerleave', () => setText(this.detail, '\u00a0'));
  }

  get length() {
    return (this.data?.seconds ?? 0) * 1e6;
  }

  move(by) {
    const [from, to] = this.view;
    const step = Math.max(-from, Math.min(by, this.length - to));
    this.view = [from + step, to + step];
    this.draw();
  }

  zoom(by, at = 0.5) {
    const [from, to] = this.view;
    const wide = Math.min(this.length, Math.max(NEAREST, (to - from) * by));
    const left = Math.max(0, Math.min(this.length - wide, from + (to - from - wide) * at));
    this.view = [left, left + wide];
    this.draw();
  }

  draw() {
    const { canvas, data, view: [from, to] } = this;
    const wide = canvas.parentElement.clientWidth;
    if (!data?.tracks.length || !wide) return;
    const high = data.tracks.length * ROW + AXIS;
    const dense = devicePixelRatio;
    Object.assign(canvas, { width: wide * dense, height: high * dense });
    canvas.style.height = `${high}px`;
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const pen = canvas.getContext('2d');
    pen.scale(dense, dense);
    const x = (micros) => ((micros - from) / (to - from)) * wide;
    const stretches = (all, top, tall, colour, alpha) => {
      pen.fillStyle = colour;
      for (let at = 0; at < all.length; at += 3) {
        const [began, ended, work] = [all[at], all[at + 1], all[at + 2]];
        if (ended < from || began > to) continue;
        const left = Math.max(0, x(began));
        pen.globalAlpha = alpha * (0.35 + 0.65 * Math.min(1, work / Math.max(1e-3, ended - began)));
        pen.fillRect(left, top, Math.max(0.75, Math.min(wide, x(ended)) - left), tall);
      }
      pen.globalAlpha = 1;
    };
    ticks(from, to, this.length, wide / 110).forEach((micros) => {
      pen.fillStyle = ink('--rule');
      pen.fillRect(Math.round(x(micros)), 0, 1, high - AXIS);
      pen.fillStyle = ink('--quiet');
      pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      const text = micros >= this.length - 1 ? (this.over ? 'end' : 'now') : `−${time((this.length - micros) / 1e6)}`;
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.max(0, Math.min(wide - 2 * half, x(micros) - half)), high - 6);
    });
    data.tracks.forEach(({ device, runs, polls }, row) => {
      const top = row * ROW;
      pen.fillStyle = ink('--rule');
      pen.fillRect(0, top + ROW - 1, wide, 1);
      if (device) return stretches(runs, top + 4, ROW - 9, ink('--part-device'), 1);
      stretches(runs, top + 4, ROW - 9, ink('--part-host'), 0.4);
      stretches(polls, top + 7, ROW - 15, ink('--part-host'), 1);
    });
  }

  /** What is under the pointer. */
  describe(event) {
    const { data, view: [from, to], canvas } = this;
    const track = data?.tracks[Math.floor(event.offsetY / ROW)];
    if (!track) return setText(this.detail, '\u00a0');
    const micros = from + (event.offsetX / canvas.clientWidth) * (to - from);
    const near = ((to - from) / canvas.clientWidth) * 2;
    let text = track.name;
    for (let at = 0; at < track.runs.length; at += 3) {
      const [began, ended, work] = [track.runs[at], track.runs[at + 1], track.runs[at + 2]];
      if (began - near > micros || ended + near < micros) continue;
      const what = track.device ? 'the device worked' : 'in runs';
      text += `: ${what} for ${time((ended - began) / 1e6)}${work < 0.995 * (ended - began) ? `, ${percent(work / (ended - began))} of it` : ''}`;
      break;
    }
    setText(this.detail, text);
  }
}

/** Round times before the end. */
function ticks(from, to, length, most) {
  const rough = (to - from) / Math.max(1, Math.min(8, most));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const all = [];
  for (let before = Math.ceil((length - to) / step) * step; before <= length - from; before += step) all.push(length - before);
  return all;
}
