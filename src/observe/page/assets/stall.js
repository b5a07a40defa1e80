// A flow that has failed as it stalled has no operator that waits any more: its error says which waited for what.

const KINDS = [
  [/^room\b/, 'room'],
  [/^(a|\d+) messages?\b/, 'message'],
  [/envelope/, 'envelope'],
  [/memory/, 'memory'],
];

/** The snapshot, with the waits of the stall in it. */
export function asItStalled(snapshot) {
  if (snapshot.failure?.kind !== 'stalled') return snapshot;
  const waits = new Map();
  const full = new Set();
  for (const line of snapshot.failure.message.split('\n')) {
    const found = /^\W*`([^`]+)` waits for (.*)$/.exec(line);
    if (!found) continue;
    const [, name, what] = found;
    const kind = KINDS.find(([pattern]) => pattern.test(what))?.[1] ?? 'condition';
    waits.set(name, { activity: kind, waits_for: [what] });
    const hub = kind === 'room' && /hub `([^`]+)`/.exec(what);
    if (hub) full.add(hub[1]);
  }
  const operators = snapshot.operators.map((operator) => ({ ...operator, ...waits.get(operator.name) }));
  const hubs = snapshot.hubs.map((hub) => (full.has(hub.name) ? { ...hub, queued: hub.capacity } : hub));
  return { ...snapshot, operators, hubs };
}
