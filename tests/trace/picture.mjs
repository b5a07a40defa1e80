// A picture of a trace in Perfetto's own user interface, for README:
//
//     npm install --prefix target/perfetto playwright-core
//     node tests/trace/picture.mjs UI TRACE PICTURE [FROM_MS LENGTH_MS [OPERATOR]]
//
// UI: the folder `web_dist` of the package that has the engine (`.ci/full trace`). The picture shows LENGTH_MS from FROM_MS on. In it,
// the arrows are drawn that lead to and from a run of OPERATOR in its last third, from message to message. Needs Chromium.

import { readFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { extname, join } from "node:path";

const { chromium } = createRequire(join(process.cwd(), "target/perfetto/"))("playwright-core");
const [ui, trace, picture, from = 0, length = 0, operator] = process.argv.slice(2);

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
await page.evaluate(async ({ from, length, operator }) => {
  const { trace } = globalThis.app;
  const start = trace.traceInfo.start + BigInt(Math.round(from * 1e6));
  if (length > 0) trace.timeline.setViewportTime(start, start + BigInt(Math.round(length * 1e6)));
  if (!operator) return;
  const run = `(select id from slice where category = 'run' and name = '${operator}' and ts >= ${start + BigInt(Math.round(length * 0.67e6))} order by ts limit 1)`;
  // The flows that the user interface draws for a selection are those of the selected slice alone.
  const flows = trace.flows, queryFlows = flows.queryFlowEvents.bind(flows);
  const { id } = (await trace.engine.query(`select id from slice where id = ${run}`)).firstRow({ id: 0 });
  flows.queryFlowEvents = (sql) => queryFlows(sql.replace(`directly_connected_flow(${id})`,
    `(select * from preceding_flow(${id}) union select * from following_flow(${id}))`));
  trace.selection.selectSqlEvent("slice", id);
}, { from: Number(from), length: Number(length), operator });
await page.waitForTimeout(3000);
const tracks = await page.locator(".pf-track").evaluateAll((all) => all.map((track) => track.getBoundingClientRect().bottom));
await page.screenshot({ path: picture, clip: { x: 0, y: 113, width: 1280, height: Math.max(...tracks) - 113 } });
await browser.close();
server.close();
