// Looks at a live page: `node browser.mjs busy|failed|stalled|many URL [FOLDER]`. Pictures are saved in the folder.

import assert from 'node:assert/strict';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

import { Chromium } from './chromium.mjs';

const [scene, url, folder] = process.argv.slice(2);
const address = url.slice(0, url.indexOf('#'));

const text = (selector) => `document.querySelector(${JSON.stringify(selector)})?.innerText.trim()`;
const count = (selector) => `document.querySelectorAll(${JSON.stringify(selector)}).length`;

async function pictures(tab) {
  if (!folder) return;
  mkdirSync(folder, { recursive: true });
  for (const [name, width, height, scheme] of [['light', 1280, 900, 'light'], ['dark', 1280, 900, 'dark'], ['phone', 390, 844, 'light']]) {
    await tab.size(width, height);
    await tab.scheme(scheme);
    await new Promise((resolve) => setTimeout(resolve, 1200));
    // The whole page in one view: what sticks to the top of it does so once.
    await tab.size(width, await tab.value('document.documentElement.scrollHeight'));
    await new Promise((resolve) => setTimeout(resolve, 1200));
    writeFileSync(join(folder, `${scene}-${name}.png`), await tab.picture());
  }
  await tab.size(1280, 900);
  await tab.scheme('light');
}

/** The smallest contrast of a text with the paper behind it. */
const CONTRAST = `(() => {
  const style = getComputedStyle(document.documentElement);
  const pen = document.createElement('canvas').getContext('2d');
  const light = (name) => {
    pen.fillStyle = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(pen.fillStyle.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  return Math.min(...['--ink', '--quiet', '--accent', '--worker', '--device'].flatMap((ink) => ['--paper', '--card'].map((paper) => contrast(light(ink), light(paper)))));
})()`;

async function busy(tab) {
  await tab.until(`${text('#sentence')} === 'slow is the bottleneck'`);
  assert.match(await tab.value(text('#why')), /computed \d+ % of the time/);
  assert.equal(await tab.value('location.hash'), '', 'the key is not left in the URL');

  // The graph: all operators and hubs, the section, who waits for whom.
  assert.equal(await tab.value(count('.node')), 6);
  assert.equal(await tab.value(count('.edge-label')), 5);
  assert.equal(await tab.value(count('rect.section')), 1);
  assert.match(await tab.value(`document.querySelector('.section-name').textContent`), /^section both · \d/);
  await tab.until(`document.querySelector('.node.bottleneck .title')?.textContent === 'slow'`);
  await tab.until(`${count('.edge .wait:not(.none)')} > 1`);
  await tab.until(`document.querySelector('.node.bottleneck.is-runs') !== null`);

  // A name is text.
  assert.equal(await tab.value(count('main img')), 0);
  assert.ok((await tab.value(text('#operators'))).includes('<img src=x onerror=alert(1)>'));

  // Numbers move.
  const runs = `Number(document.querySelector('#operators tbody td.number').innerText)`;
  const before = await tab.value(runs);
  await tab.until(`${runs} > ${before}`);
  await tab.until(`/\\d\\/s/.test(${text('#figures dd.number')})`);

  // Paths with the four parts; memory against its maximum, with a curve.
  await tab.until(`${count('#paths tbody tr')} === 2`);
  assert.match(await tab.value(text('#paths .parts')), /queued [\d.]+ ms · host/);
  assert.match(await tab.value(text('#memory')), /in use of 64/);
  assert.equal(await tab.value(count('#memory canvas')), 1);

  // The timeline comes when it is seen.
  await tab.value(`document.getElementById('timeline-section').scrollIntoView()`);
  await tab.until(`${count('.names div')} >= 7`);
  const drawn = `(() => { const c = document.querySelector('#timeline canvas'); return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size > 8; })()`;
  await tab.until(drawn);
  const trace = await tab.value(`fetch(document.querySelector('.save').href).then(async (a) => [a.status, a.headers.get('content-disposition'), (await a.arrayBuffer()).byteLength])`);
  assert.equal(trace[0], 200);
  assert.equal(trace[1], 'attachment; filename="busy.pftrace"');
  assert.ok(trace[2] > 1000);
  await tab.value('scrollTo(0, 0)');

  // By keyboard.
  await tab.value(`document.querySelector('.node').focus()`);
  await tab.press('Enter');
  await tab.until(`!document.getElementById('details').hidden`);
  assert.match(await tab.value(text('#details')), /^read/);
  await tab.press('ArrowRight');
  await tab.press('Enter');
  assert.match(await tab.value(text('#details')), /^one/);
  await tab.press('Escape');
  assert.ok(await tab.value(`document.getElementById('details').hidden`));

  await pictures(tab);
  for (const scheme of ['light', 'dark']) {
    await tab.scheme(scheme);
    const contrast = await tab.value(CONTRAST);
    assert.ok(contrast >= 4.5, `the contrast of a text in ${scheme} is ${contrast.toFixed(2)}`);
  }
  await tab.size(390, 844);
  await tab.until(`document.documentElement.scrollWidth <= 390`, 5);
  await tab.size(1280, 900);

  // The cookie lasts; it is that of one browser alone.
  await tab.open(address);
  await tab.until(`${text('#link')} === 'live'`);
  assert.deepEqual(tab.complaints, []);
  const stranger = await chromium.tab();
  await stranger.open(address);
  await stranger.until(`${text('#link')}.startsWith('no key')`);
  assert.equal(await stranger.value(count('.node')), 0);

  // Controls.
  await tab.value(`document.getElementById('pause').click()`);
  await tab.until(`${text('#sentence')} === 'busy is paused'`);
  await tab.value(`document.getElementById('pause').click()`);
  await tab.until(`${text('#state')} === 'running'`);
  await tab.value(`document.getElementById('stop').click()`);
  await tab.until(`${text('#sentence')}.startsWith('busy has ended after')`);
  await tab.until(`document.getElementById('controls').hidden`);
}

async function failed(tab) {
  await tab.until(`${text('#sentence')} === 'print has failed'`);
  assert.match(await tab.value(text('#why')), /the printer is out of paper/);
  assert.equal(await tab.value(text('#state')), 'failed');
  assert.equal(await tab.value(count('.node')), 3);
  assert.equal(await tab.value(`document.querySelector('.node.failed .title').textContent`), 'print');
  await pictures(tab);

  // Another flow of the same observer.
  assert.deepEqual(await tab.value(`[...document.querySelectorAll('#flows option')].map((option) => option.text)`), ['broken (failed)', 'before (ended)']);
  await tab.value(`{ const picker = document.getElementById('flows'); picker.selectedIndex = 1; picker.dispatchEvent(new Event('change')); }`);
  await tab.until(`${text('#sentence')}.startsWith('before has ended after')`);
  assert.equal(await tab.value(count('.node')), 2);
}

async function many(tab) {
  await tab.until(`${text('#graph-note')} === '1002 operators are shown in 4 groups.'`);
  assert.equal(await tab.value(count('.node')), 4);
  assert.equal(await tab.value(count('.edge-label')), 3);
  await pictures(tab);
}

async function stalled(tab) {
  await tab.until(`${text('#sentence')} === 'join is stalled'`);
  assert.match(await tab.value(text('#why')), /join waits for a message/);
  // Who waited for whom.
  const kinds = await tab.value(`[...document.querySelectorAll('.node')].map((node) => node.getAttribute('aria-label'))`);
  assert.deepEqual(kinds, ['numbers: waits for room', 'split: waits for room', 'join: waits for input']);
  assert.equal(await tab.value(count('.edge .wait.is-room')), 2);
  assert.equal(await tab.value(count('.edge .wait.is-input')), 1);
  assert.equal(await tab.value(text('#state')), 'failed');
  await pictures(tab);
}

const chromium = await Chromium.start();
try {
  const tab = await chromium.tab();
  await tab.open(url);
  await { busy, failed, stalled, many }[scene](tab);
  assert.deepEqual(tab.complaints, [], 'the console is empty');
  console.log(`${scene}: as it should be`);
} finally {
  await chromium.close();
}
