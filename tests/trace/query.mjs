// Checks traces with Perfetto's own engine:
//
//     node tests/trace/query.mjs ENGINE TRACE [EXPECTED]
//
// ENGINE: the folder of `engine_bundle.js`. EXPECTED, a JSON file, says what the flow did: how many runs each operator had
// (`runs`), how many messages went where (`arrows`), how many runs had timed device work and how many messages timed copies
// (`device`), the most messages that were in some hubs (`fills`), and the bounds of the most memory that was in use (`memory`).

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
  select slice.id, slice.name, category, ts, track_id, track.parent_id as flow, substr(track.name, 1, instr(track.name || ' on thread ', ' on thread ') - 1) as operator,
    max(iif(key = 'debug.hub', string_value, null)) as hub, max(iif(key = 'debug.message', int_value, null)) as message,
    max(iif(key = 'debug.run', int_value, null)) as run
  from slice join track on slice.track_id = track.id join args using (arg_set_id) group by slice.id`);
query("create perfetto table message as select * from noted where category = 'message'");
// The head of an arrow is the run that took the message, or, where that is not known, the instant when it was taken.
query(`create perfetto table arrow as
  select flow.id, tail.operator || ' -> ' || head.operator as name, tail.flow as root, tail.hub as hub, tail.message as message
  from flow join message tail on slice_out = tail.id join slice on slice_in = slice.id
    join message head on head.flow = tail.flow and head.hub = tail.hub and head.message = tail.message
      and head.track_id = slice.track_id and head.ts between slice.ts and slice.ts + slice.dur
  where tail.name = 'sent' and head.name = 'taken' and tail.ts <= head.ts and slice.category in ('run', 'message')
  group by flow.id`);
none("an arrow leads from no message to where it was taken", "select * from flow where id not in (select id from arrow)");
none("a message has two arrows", "select * from arrow group by root, hub, message having count() > 1");
none("a message that was sent and taken has no arrow", `
  select * from message group by flow, hub, message
  having max(name = 'sent') and max(name = 'taken') and not max(id in (select slice_out from flow))`);
none("a counter is negative", "select * from counter where value < 0");

none("device work begins before its run", `
  select work.* from noted work join noted run using (flow, name, run)
  where work.category = 'device' and run.category = 'run' and work.ts < run.ts`);

const counts = (category) => table(`select name, count(distinct ifnull(run, id)) as value from noted
  where category = '${category}' group by 1`);
// A run's device work is in pieces where it waits for other work.
const runs = counts("run"), device = counts("device");
const arrows = table("select name, count() as value from arrow group by 1");
const fills = table(`select substr(name, length('queue of ') + 1) as name, max(value) as value
  from counter join counter_track track on track_id = track.id where name glob 'queue of *' group by 1`);
const memory = table(`select substr(name, length('memory of ') + 1) as name, max(value) as value
  from counter join counter_track track on track_id = track.id where name glob 'memory of *' group by 1`);
console.log(path, { ...query("select count() as slices from slice")[0], runs, arrows, fills, device, memory });
if (expectation) {
  const { memory: bounds, ...expected } = JSON.parse(readFileSync(expectation));
  for (const [name, [least, most]] of Object.entries(bounds)) {
    assert.ok(memory[name] >= least && memory[name] <= most, `${name}: ${memory[name]} bytes, not ${least} to ${most}`);
  }
  const found = { runs, arrows, fills, device };
  for (const what of ["fills", "device"]) { // Of those that are expected, no more.
    found[what] = Object.fromEntries(Object.keys(expected[what]).map((name) => [name, found[what][name]]));
  }
  assert.deepEqual(found, expected);
}
