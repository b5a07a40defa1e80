// A picture of a trace in Perfetto's own user interface, for README:
//
//     npm install --prefix target/perfetto playwright-core
//     node tests/trace/picture.mjs UI TRACE PICTURE [FROM_MS LENGTH_MS [SQL]]
//
// UI: the folder `web_dist` of the package that has the engine (`.ci/full trace`). The picture shows LENGTH_MS from FROM_MS on. SQL
// selects the number of a slice, whose arrows are drawn. Needs Chromium.

import { readFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { extname, join } from "node:path";

const { chromium } = createRequire(join(process.cwd(), "target/perfetto/"))("playwright-core");
const [ui, trace, picture, from = 0, length = 0, selected] = process.argv.slice(2);

const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm" };
const server = http.createServer((request, response) => {
  const path = new URL(request.url, "http://localhost").pathname;
  try {
    const file = path === "/trace" ? trace : join(ui, path === "/" ? "index.html" : path);
    response.setHeader("content-type", types[extname(file)] ?? "application/octet-stream");
    response.end(readFileSync(file));
  } catch {
    response.writeHead(404).end();
  }
});
// The user interface's policy allows this port.
await new Promise((listens) => server.listen(10000, "127.0.0.1", listens));

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 2000 }, deviceScaleFactor: 1 });
await page.goto("http://127.0.0.1:10000/#!/?hideSidebar=true&url=http://127.0.0.1:10000/trace");
await page.waitForFunction(() => globalThis.app?.trace?.workspace?.children.length > 0, null, { timeout: 120_000 });
await page.waitForTimeout(3000);
await page.evaluate(async ({ from, length, selected }) => {
  const { trace } = globalThis.app;
  if (length > 0) {
    const ns = (ms) => BigInt(Math.round(ms * 1e6));
    const { traceInfo, timeline } = trace;
    timeline.setViewportTime(traceInfo.start + ns(from), traceInfo.start + ns(from + length));
  }
  if (selected) {
    const { id } = (await trace.engine.query(selected)).firstRow({ id: 0 });
    trace.selection.selectSqlEvent("slice", id);
  }
}, { from: Number(from), length: Number(length), selected });
await page.waitForTimeout(3000);
const tracks = await page.locator(".pf-track").evaluateAll((all) => all.map((track) => track.getBoundingClientRect().bottom));
await page.screenshot({ path: picture, clip: { x: 0, y: 113, width: 1280, height: Math.max(...tracks) - 113 } });
await browser.close();
server.close();
