// The tables of paths and operators. Rows are kept and updated in place, so that text can be selected.

import { Bar, colour, count, h, phrase, rate, seconds, setAttribute, setText, shareParts, streamed, time } from './format.js';

const PARTS = [
  ['queued', 'part-queued', 'queued'],
  ['host', 'part-host', 'host'],
  ['device', 'part-device', 'device'],
  ['copy', 'part-copy', 'copy'],
];

/** A table whose rows have keys. */
class Table {
  constructor(place, label, heads) {
    this.rows = new Map();
    this.body = h('tbody');
    const cells = heads.map(([text, kind]) => h('th', { scope: 'col', class: kind ?? false }, text));
    place.replaceChildren(h('table', { 'aria-label': label }, h('thead', {}, h('tr', {}, cells)), this.body));
  }

  show(items, keyOf, make, update) {
    const seen = new Set();
    items.forEach((item, at) => {
      const key = keyOf(item);
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = make(item)));
      update(row, item);
      if (this.body.children[at] !== row.node) this.body.insertBefore(row.node, this.body.children[at] ?? null);
    });
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.node.remove();
      this.rows.delete(key);
    }
  }
}

const number = (label) => h('td', { class: 'number', 'data-label': label });

export class Paths {
  constructor(place) {
    const heads = [['Path'], ['Followed', 'number'], ['p50', 'number'], ['p90', 'number'], ['p99', 'number'], ['p99.9', 'number'], ['Max', 'number'], ['Where the time goes', 'wide']];
    this.table = new Table(place, 'Paths', heads);
    place.append(h('ul', { class: 'legend' }, PARTS.map(([, kind, text]) => h('li', {}, h('i', { class: `fill-${kind}` }), text))));
  }

  show({ paths }) {
    const make = (path) => {
      const cells = { name: h('th', { scope: 'row', class: 'path' }), count: number('followed'), p50: number('p50'), p90: number('p90'), p99: number('p99'), p999: number('p99.9'), max: number('max') };
      const bar = new Bar('parts');
      const parts = h('div', { class: 'parts number' });
      cells.name.append(...path.operators.flatMap((name, at) => (at ? [h('span', { class: 'then' }, '›'), name] : [name])));
      if (!path.operators.length) cells.name.append('other paths');
      return { cells, bar, parts, node: h('tr', {}, Object.values(cells), h('td', { class: 'whole' }, bar.node, parts)) };
    };
    this.table.show(paths, (path) => path.operators.join('\u0000'), make, ({ cells, bar, parts }, path) => {
      setText(cells.count, count(path.count));
      for (const name of ['p50', 'p90', 'p99', 'p999', 'max']) setText(cells[name], path.count ? time(seconds(path[name])) : '–');
      const all = PARTS.map(([name, kind, text]) => [kind, seconds(path.parts[name]), text]);
      const sum = all.reduce((total, [, part]) => total + part, 0);
      bar.set(all.map(([kind, part, text]) => [kind, sum ? part / sum : 0, text]));
      setText(parts, sum ? all.filter(([, part]) => part / sum >= 0.005).map(([, part, text]) => `${text} ${time(part)}`).join(' · ') : '');
    });
  }
}

export class Operators {
  constructor(place, onName) {
    this.onName = onName;
    const heads = [['Operator'], ['On'], ['Now'], ['Of its time', 'wide'], ['Runs', 'number'], ['Rate', 'number'], ['Host', 'number'], ['Device', 'number'], ['A run: host, device', 'wide']];
    this.table = new Table(place, 'Operators', heads);
  }

  show({ snapshot, at, tag }, history) {
    const make = ({ name, isSection }) => {
      const cells = { name: h('th', { scope: 'row' }), device: h('td', { class: 'quiet' }), now: h('td'), shares: h('td', { class: 'whole' }) };
      const numbers = { runs: number('runs'), rate: number('rate'), host: number('host'), onDevice: number('device') };
      const [bar, times] = [new Bar('shares'), { host: h('span', { class: 'fill-part-host' }), device: h('span', { class: 'fill-part-device' }) }];
      const button = () => h('button', { type: 'button', class: 'name', onclick: () => this.onName(name) }, name);
      cells.name.append(isSection ? `section ${name}` : button());
      setAttribute(cells.name, 'class', 'path');
      if (!isSection) cells.shares.append(bar.node);
      const pair = h('td', { class: 'whole' }, h('div', { class: 'pair', role: 'presentation' }, times.host, times.device));
      return { cells, numbers, bar, times, node: h('tr', {}, Object.values(cells), Object.values(numbers), pair) };
    };
    const sections = snapshot.sections.filter((section) => section.device_time).map((section) => sectionRow(section, snapshot));
    const all = [...snapshot.operators, ...sections];
    const measured = new Map(all.map((item) => [item, item.isSection ? item.times : history.perRun(item)]));
    const most = Math.max(1e-9, ...[...measured.values()].flatMap(({ host, device }) => [host ?? 0, device ?? 0]));
    this.table.show(all, (item) => `${item.isSection ?? false} ${item.name}`, make, (row, operator) => {
      const { cells, numbers, bar, times, node } = row;
      setAttribute(node, 'class', operator.name === at ? tag : '');
      setText(cells.device, operator.device);
      setText(cells.now, operator.isSection ? operator.now : phrase(operator.activity));
      setAttribute(cells.now, 'class', operator.isSection ? 'quiet' : `now is-${colour(operator.activity)}`);
      bar.set(shareParts(operator));
      setText(numbers.runs, count(operator.runs));
      setText(numbers.rate, operator.isSection ? '' : rate(operator.runs_per_second));
      const { host, device } = measured.get(operator);
      setText(numbers.host, host === null ? '–' : time(host));
      setText(numbers.onDevice, device === null ? '–' : time(device));
      times.host.style.width = `${(100 * (host ?? 0)) / most}%`;
      times.device.style.width = `${(100 * (device ?? 0)) / most}%`;
      setAttribute(times.host, 'class', host === null ? 'none' : 'fill-part-host');
      setAttribute(times.device, 'class', device === null ? 'none' : 'fill-part-device');
    });
  }
}


/** A section in the table of operators: its graph has a device time of its own. */
function sectionRow(section, { operators }) {
  const { name, replayed, streamed: rounds, device_time: device } = section;
  const member = operators.find((operator) => operator.section === name);
  const times = { host: null, device: device.runs ? seconds(device.total) / device.runs : null };
  return { name, isSection: true, device: member?.device ?? '', now: `${count(replayed)} replayed${streamed(section)}`, runs: replayed + rounds, times };
}
