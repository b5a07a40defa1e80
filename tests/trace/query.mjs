// Checks traces with Perfetto's own engine:
//
//     node tests/trace/query.mjs ENGINE TRACE [EXPECTED]
//
// ENGINE: the folder of `engine_bundle.js`. EXPECTED, a JSON file, says what the flow did: how many runs each operator had
// (`runs`), how many messages went where (`arrows`), how many runs had timed device work (`device`), and the most messages
// that were in some hubs (`fills`).

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { load } from "./engine.mjs";

const [engine, path, expectation] = process.argv.slice(2);
const query = await load(engine, readFileSync(path));
const none = (problem, sql) => assert.deepEqual(query(`${sql} limit 5`), [], `${path}: ${problem}`);
const table = (sql) => Object.fromEntries(query(sql).map(({ name, value }) => [name, value]));

none("errors of the import", "select name, value from stats where value > 0 and severity in ('error', 'data_loss')");

none("a slice has no end", "select * from slice where dur < 0");
none("a slice ends after the one around it", `
  select part.* from slice part join slice whole on part.parent_id = whole.id
  where part.ts < whole.ts or part.ts + part.dur > whole.ts + whole.dur`);
none("slices overlap", `
  select * from (select *, lead(ts) over (partition by track_id, depth order by ts, id) as next from slice)
  where ts + dur > next`);
none("slices of one row overlap", `
  select * from (select *, lead(ts) over (partition by track_id order by ts, id) as next from slice where depth = 0)
  where ts + dur > next`);

// Slices and instants with their notes. An operator with overlapping runs has its messages on tracks `OPERATOR on thread N`.
query(`create perfetto table noted as
  select slice.id, slice.name, category, ts, track.parent_id as flow, substr(track.name, 1, instr(track.name || ' on thread ', ' on thread ') - 1) as operator,
    max(iif(key = 'debug.hub', string_value, null)) as hub, max(iif(key = 'debug.message', int_value, null)) as message,
    max(iif(key = 'debug.run', int_value, null)) as run
  from slice join track on slice.track_id = track.id join args using (arg_set_id) group by slice.id`);
query("create perfetto table message as select * from noted where category = 'message'");
query(`create perfetto table arrow as
  select tail.operator || ' -> ' || head.operator as name, tail.name as tail_kind, head.name as head_kind,
    tail.flow as flow, tail.hub as hub, tail.message as message, tail.ts as sent, head.ts as taken,
    tail.flow = head.flow and tail.hub = head.hub and tail.message = head.message as same
  from flow as arrow join message tail on slice_out = tail.id join message head on slice_in = head.id`);
none("an arrow does not connect two messages", `
  select * from flow where slice_out not in (select id from message) or slice_in not in (select id from message)`);
none("an arrow connects two messages", "select * from arrow where not same or tail_kind <> 'sent' or head_kind <> 'taken'");
none("an arrow leads backwards", "select * from arrow where sent > taken");
none("a message has two arrows", "select * from arrow group by flow, hub, message having count() > 1");
none("a message that was sent and taken has no arrow", `
  select * from message group by flow, hub, message
  having max(name = 'sent') and max(name = 'taken') and not max(id in (select slice_out from flow))`);
none("a counter is negative", "select * from counter where value < 0");

none("device work begins before its run", `
  select work.* from noted work join noted run using (flow, name, run)
  where work.category = 'device' and run.category = 'run' and work.ts < run.ts`);

const counts = (category) => table(`select name, count() as value from noted where category = '${category}' group by 1`);
const runs = counts("run"), device = counts("device");
const arrows = table("select name, count() as value from arrow group by 1");
const fills = table(`select substr(name, length('queue of ') + 1) as name, max(value) as value
  from counter join counter_track track on track_id = track.id where name glob 'queue of *' group by 1`);
console.log(path, { ...query("select count() as slices from slice")[0], runs, arrows, fills, device });
if (expectation) {
  const expected = JSON.parse(readFileSync(expectation));
  const found = { runs, arrows, fills, device };
  for (const what of ["fills", "device"]) { // Of those that are expected, no more.
    found[what] = Object.fromEntries(Object.keys(expected[what]).map((name) => [name, found[what][name]]));
  }
  assert.deepEqual(found, expected);
}
