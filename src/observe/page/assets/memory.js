// The memory of each device against its maximum, now and in the last minute.

import { Bar, bytes, h, setText } from './format.js';

export class Memory {
  constructor(place) {
    Object.assign(this, { place, devices: new Map() });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.forget());
    new ResizeObserver(() => this.resize()).observe(place);
  }

  /** The next picture draws anew. */
  forget() {
    for (const { node, plot } of this.devices.values()) {
      plot.destroy();
      node.remove();
    }
    this.devices.clear();
  }

  show({ devices }, history) {
    if ([...this.devices.keys()].some((name) => !devices.some((device) => device.name === name))) this.forget();
    for (const device of devices) {
      let known = this.devices.get(device.name);
      if (!known) this.devices.set(device.name, (known = this.make(device)));
      const { in_use, waiting, cached, peak, capacity } = device;
      const all = Math.max(1, capacity ?? peak, in_use + waiting + cached);
      known.bar.set([['part-host', in_use / all, 'in use'], ['part-queued', waiting / all, 'freed, a stream still uses it'], ['idle', cached / all, 'cached']]);
      const most = capacity ? `of ${bytes(capacity)}` : '';
      setText(known.text, `${bytes(in_use)} in use ${most} · ${bytes(waiting)} waiting for streams · ${bytes(cached)} cached · ${bytes(peak)} at peak`);
      const { times, values } = history.memory(device.name);
      known.plot.setData([times, values, times.map(() => peak)]);
    }
  }

  make({ name }) {
    const [bar, text, chart] = [new Bar(`Memory of ${name}`), h('p', { class: 'quiet number' }), h('div', { class: 'chart' })];
    const node = h('div', { class: 'device' }, h('h3', {}, name), bar.node, text, chart);
    this.place.append(node);
    return { node, bar, text, chart, plot: plot(chart) };
  }

  resize() {
    for (const { plot, chart } of this.devices.values()) plot.setSize({ width: chart.clientWidth || 300, height: 120 });
  }
}

function plot(place) {
  const style = getComputedStyle(document.documentElement);
  const ink = (name) => style.getPropertyValue(name).trim();
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: ink('--quiet'), font, grid: { stroke: ink('--rule'), width: 1 }, ticks: { show: false } };
  return new uPlot(
    {
      width: place.clientWidth || 300,
      height: 120,
      padding: [8, 24, 0, 0],
      cursor: { show: false },
      legend: { show: false },
      scales: { x: { time: false, range: [-60, 0] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
      axes: [
        { ...axis, size: 22, values: (_, values) => values.map((value) => (value ? `${-value} s ago` : 'now')) },
        { ...axis, size: 72, values: (_, values) => values.map((value) => bytes(value)) },
      ],
      series: [
        {},
        { stroke: ink('--part-host'), fill: `${ink('--part-host')}33`, width: 1.5, points: { show: false } },
        { stroke: ink('--quiet'), dash: [4, 4], width: 1, points: { show: false } },
      ],
    },
    [[], [], []],
    place,
  );
}
