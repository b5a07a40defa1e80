// Chromium without a window, through its DevTools protocol over a pipe: nothing to install but Chromium itself.

import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const NAMES = [process.env.CHROMIUM, 'chromium', 'chromium-browser', 'google-chrome', 'chrome'].filter(Boolean);

export class Chromium {
  static async start() {
    for (const name of NAMES) {
      const chromium = new Chromium(name);
      if (await chromium.started) return chromium;
    }
    throw new Error(`none of these starts: ${NAMES.join(', ')}`);
  }

  constructor(name) {
    this.profile = mkdtempSync(join(tmpdir(), 'wakeline-page-'));
    const flags = ['--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--remote-debugging-pipe', `--user-data-dir=${this.profile}`];
    this.process = spawn(name, [...flags, 'about:blank'], { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
    Object.assign(this, { calls: new Map(), number: 0, onEvent: new Map(), rest: '' });
    this.started = new Promise((resolve) => {
      this.process.once('error', () => resolve(false));
      this.process.once('spawn', () => resolve(true));
    });
    this.ended = new Promise((resolve) => this.process.once('exit', resolve));
    this.process.stdio[3].on('error', () => {});
    this.process.stdio[4].on('data', (data) => this.read(data));
  }

  read(data) {
    const parts = (this.rest + data).split('\0');
    this.rest = parts.pop();
    for (const part of parts) {
      const { id, result, error, method, params, sessionId } = JSON.parse(part);
      if (id === undefined) this.onEvent.get(sessionId)?.(method, params);
      else if (error) this.calls.get(id)?.reject(new Error(error.message));
      else this.calls.get(id)?.resolve(result);
      this.calls.delete(id);
    }
  }

  call(method, params = {}, sessionId = undefined) {
    const id = (this.number += 1);
    this.process.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    return new Promise((resolve, reject) => this.calls.set(id, { resolve, reject }));
  }

  /** A tab with cookies of its own. What it complains about is in `complaints`. */
  async tab({ width = 1280, height = 900, scheme = 'light' } = {}) {
    const { browserContextId } = await this.call('Target.createBrowserContext');
    const { targetId } = await this.call('Target.createTarget', { url: 'about:blank', browserContextId });
    const { sessionId } = await this.call('Target.attachToTarget', { targetId, flatten: true });
    const tab = new Tab(this, sessionId);
    for (const domain of ['Page', 'Runtime', 'Log']) await tab.call(`${domain}.enable`);
    await tab.size(width, height);
    await tab.scheme(scheme);
    return tab;
  }

  async close() {
    await this.call('Browser.close').catch(() => {});
    await this.ended;
    rmSync(this.profile, { recursive: true, force: true });
  }
}

class Tab {
  constructor(chromium, session) {
    Object.assign(this, { chromium, session, complaints: [] });
    chromium.onEvent.set(session, (method, params) => {
      if (method === 'Runtime.exceptionThrown') this.complaints.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
      if (method === 'Runtime.consoleAPICalled') this.complaints.push(params.args.map((arg) => arg.value).join(' '));
      // Also what the policy refuses, and requests that fail.
      if (method === 'Log.entryAdded') this.complaints.push(`${params.entry.text} ${params.entry.url ?? ''}`);
      if (method === 'Page.javascriptDialogOpening') this.complaints.push('a dialog was opened');
    });
  }

  call(method, params) {
    return this.chromium.call(method, params, this.session);
  }

  size(width, height) {
    const mobile = width < 500;
    return this.call('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: mobile ? 2 : 1, mobile });
  }

  scheme(value) {
    return this.call('Emulation.setEmulatedMedia', { features: [{ name: 'prefers-color-scheme', value }] });
  }

  open(url) {
    return this.call('Page.navigate', { url });
  }

  /** The value of an expression in the page. */
  async value(expression) {
    const { result, exceptionDetails } = await this.call('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description ?? exceptionDetails.text}`);
    return result.value;
  }

  /** Waits until an expression in the page is true. */
  async until(expression, seconds = 40) {
    const end = Date.now() + 1000 * seconds;
    for (;;) {
      const value = await this.value(expression);
      if (value) return value;
      if (Date.now() > end) throw new Error(`not within ${seconds} s: ${expression}; the page: ${await this.value('document.body.innerText')}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }

  async press(key, code = key) {
    const text = key === 'Enter' ? '\r' : undefined;
    const windowsVirtualKeyCode = { Enter: 13, Tab: 9, Escape: 27, ArrowRight: 39 }[key];
    for (const type of ['keyDown', 'keyUp']) await this.call('Input.dispatchKeyEvent', { type, key, code, text, windowsVirtualKeyCode });
  }

  /** A picture of the whole page, as PNG. */
  async picture() {
    const { data } = await this.call('Page.captureScreenshot', { format: 'png', captureBeyondViewport: true });
    return Buffer.from(data, 'base64');
  }
}
