//! Scenario E5: a caller's tracing span reaches the operators that handle its message.

use std::{
    future::ready,
    sync::{Mutex, OnceLock},
};

use common::*;
use futures::future::join_all;
use tower::ServiceExt;
use tracing::{
    Event, Instrument, Subscriber,
    field::{Field, Visit},
    info, info_span,
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};
use wakeline::prelude::*;

/// An event of the target `spans`.
#[derive(Clone, Debug, PartialEq)]
struct Recorded {
    who: String,
    n: u64,
    /// The enclosing spans named `call`, by their field `n`, innermost first.
    within: Vec<u64>,
}

#[derive(Default)]
struct Fields {
    who: String,
    n: u64,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "n" {
            self.n = value;
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "who" {
            self.who = value.into();
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
}

static EVENTS: Mutex<Vec<Recorded>> = Mutex::new(Vec::new());
/// The recorded `follows_from` relations between calls.
static FOLLOWS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

struct Recorder;

/// The `n` of a span named `call`, as its extension.
struct Number(u64);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().name() == "call" {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            context.span(id).unwrap().extensions_mut().insert(Number(fields.n));
        }
    }

    fn on_record(&self, _span: &Id, _values: &Record<'_>, _context: Context<'_, S>) {}

    fn on_follows_from(&self, span: &Id, follows: &Id, context: Context<'_, S>) {
        let number = |id| context.span(id).and_then(|span| span.extensions().get::<Number>().map(|number| number.0));
        lock(&FOLLOWS).extend(number(span).zip(number(follows)));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != "spans" {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let within = context.event_scope(event).into_iter().flatten();
        let within = within.filter_map(|span| span.extensions().get::<Number>().map(|number| number.0)).collect();
        lock(&EVENTS).push(Recorded { who: fields.who, n: fields.n, within });
    }
}

/// Installs the process's only subscriber and lets the tests run one at a time.
async fn recording() -> tokio::sync::MutexGuard<'static, ()> {
    static ONE: OnceLock<()> = OnceLock::new();
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    ONE.get_or_init(|| tracing::subscriber::set_global_default(Registry::default().with(Recorder)).unwrap());
    let turn = TURN.lock().await;
    lock(&EVENTS).clear();
    lock(&FOLLOWS).clear();
    turn
}

fn record(who: &str, n: u32) {
    info!(target: "spans", who, n = u64::from(n));
}

/// Records events in `start` and `stop`, and in a run before and after it takes its message, and after an await.
struct OnDevice(&'static str);

impl Operator for OnDevice {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        record("start", 0);
        Ok(())
    }

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        record("before", 0);
        let mut envelope = ports.input.take()?;
        let n = envelope.len() as u32;
        record(self.0, n);
        increment::launch(cx.stream()?, &mut envelope)?;
        tokio::task::yield_now().await;
        cx.stream()?.completed().await?;
        record(self.0, n);
        ports.output.send(envelope).await?;
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        record("stop", 0);
        Ok(())
    }
}

/// Messages of an ingress, through two operators on a device and one on the host.
async fn check_spans_of_all_operators() {
    let _turn = recording().await;
    let device = emulated();
    let mut flow = Flow::new("e5");
    let first = flow.add("first", OnDevice("first")).on(&device);
    let second = flow.add("second", OnDevice("second")).on(&device);
    let last = flow.add(
        "last",
        sink(async |envelope: Envelope<u32>| {
            let n = envelope.read().await?.len() as u32;
            record("last", n);
            Ok(())
        }),
    );
    flow.connect(first.output, second.input);
    flow.connect(second.output, last.input);
    let messages = flow.ingress_with("messages", first.input, HubOptions::bounded(2).envelope_bytes(256));
    let running = flow.spawn().unwrap();
    let send = |n: u32| {
        let messages = messages.clone();
        let send = async move {
            let mut message = messages.blank().await.unwrap();
            message.space().await.unwrap()[..n as usize].fill(n);
            message.set_len(n as usize).unwrap();
            messages.send(message).await.unwrap();
        };
        // Every third message has no span.
        if n.is_multiple_of(3) { tokio::spawn(send) } else { tokio::spawn(send.instrument(info_span!("call", n))) }
    };
    within(join_all((1..=20).map(send))).await.into_iter().for_each(|sent| sent.unwrap());
    drop(messages);
    within(running).await.unwrap();

    let events = lock(&EVENTS).clone();
    for n in 1..=20_u64 {
        let expected: &[u64] = if n.is_multiple_of(3) { &[] } else { &[n] };
        for (who, times) in [("first", 2), ("second", 2), ("last", 1)] {
            let own: Vec<_> = events.iter().filter(|event| event.who == who && event.n == n).collect();
            assert_eq!(own.len(), times);
            assert!(own.iter().all(|event| event.within == expected), "{own:?}");
        }
    }
    let outside = events.iter().filter(|event| ["start", "before", "stop"].contains(&&*event.who));
    assert!(outside.clone().all(|event| event.within.is_empty()), "no span before the message, nor after its run");
    assert_eq!(outside.count(), 2 + 2 * 20 + 2);
    assert!(lock(&FOLLOWS).is_empty());
}

#[tokio::test]
async fn e5_a_span_reaches_every_operator_on_one_thread() {
    check_spans_of_all_operators().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e5_a_span_reaches_every_operator_on_several_threads() {
    check_spans_of_all_operators().await;
}

#[derive(Ports)]
struct BatchPorts {
    #[input(capacity = 3)]
    input: Input<u32>,
    #[output(capacity = 3)]
    output: Output<u32>,
}

/// Takes three messages in one run, and answers each.
struct Batch;

impl Operator for Batch {
    type Ports = BatchPorts;

    fn may_run(&mut self, ports: &BatchPorts, _cx: &Cx) -> bool {
        ports.input.len() == 3
    }

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        let numbers: Vec<_> = ports.input.take_batch()?.collect();
        record("batch", 0);
        for (n, reply) in numbers.into_iter().zip(cx.take_replies()) {
            ports.output.send_for(reply, n).await?;
        }
        Ok(())
    }
}

/// The span of the first message is the parent, and follows from the others. A message that is sent for one of them
/// continues its span.
#[tokio::test]
async fn e5_a_run_over_several_messages_combines_their_spans() {
    let _turn = recording().await;
    let mut flow = Flow::new("e5");
    let batch = flow.add("batch", Batch);
    let after = flow.add(
        "after",
        map(|n: u32| {
            record("after", n);
            ready(Ok(n))
        }),
    );
    flow.connect(batch.output, after.input);
    let service = flow.service_with("service", batch.input, after.output, HubOptions::bounded(3));
    let running = flow.spawn().unwrap();
    let call = |n: u32| {
        let service = service.clone();
        async move { service.oneshot(n).await.unwrap() }.instrument(info_span!("call", n))
    };
    assert_eq!(within(join_all((1..=3).map(call))).await, [1, 2, 3]);
    drop(service);
    within(running).await.unwrap();
    let events = lock(&EVENTS).clone();
    let mut parents = Vec::new();
    for event in events {
        match &*event.who {
            "batch" => parents = event.within,
            _ => assert_eq!(event.within, [event.n]),
        }
    }
    let [parent] = parents[..] else { panic!("not one parent: {parents:?}") };
    let mut follows = lock(&FOLLOWS).clone();
    follows.sort_unstable();
    let others: Vec<_> = (1..=3).filter(|n| *n != parent).map(|n| (parent, n)).collect();
    assert_eq!(follows, others);
}

/// What the thread does after the panic is outside of the span.
#[tokio::test]
async fn e5_a_panic_leaves_the_span() {
    let _turn = recording().await;
    let mut flow = Flow::new("e5");
    let panics = flow.add("panics", sink(async |_: u32| panic!("on purpose")));
    let messages = flow.ingress("messages", panics.input);
    let running = flow.spawn().unwrap();
    within(messages.send(1).instrument(info_span!("call", n = 1))).await.unwrap();
    assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Panicked);
    record("outside", 0);
    assert_eq!(lock(&EVENTS)[..], [Recorded { who: "outside".into(), n: 0, within: vec![] }]);
}
