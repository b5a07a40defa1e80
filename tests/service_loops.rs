//! Scenario E1: services whose operators keep state in a cycle. The callers, spans and values that the state carries are
//! bounded by the requests in flight, not by all requests so far.

use std::{
    collections::HashMap,
    future::{poll_fn, ready},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
};

use common::*;
use futures::{future::join_all, poll};
use tracing::{Instrument, Subscriber, info_span, span};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};
use wakeline::{Service, operator::Reply, prelude::*};

/// The message that a run takes first.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    State,
    Request,
}

#[derive(Ports)]
struct CountPorts {
    #[input]
    requests: Input<u32>,
    #[input(optional)]
    state: Input<u64>,
    #[output]
    responses: Output<u64>,
    /// There is always room: the operator has taken the state from this hub.
    #[output(optional)]
    next: Output<u64>,
}

/// Adds up the requests. The sum is a message that it sends to itself.
struct Count {
    first: First,
    started: bool,
}

impl Count {
    async fn recv_state(&mut self, ports: &mut CountPorts) -> Result<u64> {
        if std::mem::replace(&mut self.started, true) {
            return Ok(ports.state.recv().await?.unwrap_or_default());
        }
        Ok(0)
    }
}

impl Operator for Count {
    type Ports = CountPorts;

    async fn compute(&mut self, ports: &mut CountPorts, _cx: &mut Cx) -> Result<()> {
        let (state, n) = match self.first {
            First::State => (self.recv_state(ports).await?, ports.requests.take()?),
            First::Request => {
                let n = ports.requests.take()?;
                (self.recv_state(ports).await?, n)
            }
        };
        let sum = state + u64::from(n);
        ports.responses.send(sum).await?;
        ports.next.send(sum).await?;
        Ok(())
    }
}

/// The number of callers of a reply, from its `Debug` output.
fn callers(reply: &Reply) -> usize {
    let text = format!("{reply:?}");
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// Within the cycle: forwards the state, and records the maximum number of its callers.
struct RecordCallers(Arc<AtomicUsize>);

impl Operator for RecordCallers {
    type Ports = MapPorts<u64, u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let state = ports.input.take()?;
        let reply = cx.take_replies().pop().unwrap();
        self.0.fetch_max(callers(&reply), Ordering::Relaxed);
        ports.output.send_for(reply, state).await?;
        Ok(())
    }
}

fn counting(first: First, requests: HubOptions) -> (Flow, Service<u32, u64>, Arc<AtomicUsize>) {
    let most = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("loops");
    let count = flow.add("count", Count { first, started: false });
    let record = flow.add("record", RecordCallers(most.clone()));
    flow.connect(count.next, record.input);
    flow.connect(record.output, count.state);
    let service = flow.service_with("service", count.requests, count.responses, requests);
    (flow, service, most)
}

#[tokio::test]
async fn e1_state_in_a_cycle_forgets_answered_callers() {
    for first in [First::State, First::Request] {
        let (flow, service, most) = counting(first, HubOptions::default());
        let running = flow.spawn().unwrap();
        for n in 1..=4000_u64 {
            assert_eq!(within(service.ask(1)).await.unwrap(), n);
        }
        drop(service);
        within(running).await.unwrap();
        assert_eq!(most.load(Ordering::Relaxed), 1, "one request at a time: {first:?}");
    }
}

/// Some clients give up. The state keeps the callers of the requests in flight, at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_state_in_a_cycle_forgets_callers_that_gave_up() {
    const CLIENTS: u32 = 24;
    let (flow, service, most) = counting(First::State, HubOptions::bounded(4));
    let running = flow.spawn().unwrap();
    let client = |client: u32| {
        let service = service.clone();
        tokio::spawn(async move {
            let mut answered = 0;
            for n in 0..200 {
                let mut call = Box::pin(service.ask(1));
                if (client + n).is_multiple_of(3) {
                    for _ in 0..n % 5 {
                        if poll!(call.as_mut()).is_ready() {
                            break;
                        }
                        tokio::task::yield_now().await;
                    }
                    continue;
                }
                call.await.unwrap();
                answered += 1;
            }
            answered
        })
    };
    let answered: u32 = within(join_all((0..CLIENTS).map(client))).await.into_iter().map(|done| done.unwrap()).sum();
    drop(service);
    within(running).await.unwrap();
    assert!(answered >= 2 * CLIENTS * 66, "{answered}");
    let most = most.load(Ordering::Relaxed);
    assert!(most <= CLIENTS as usize, "{most} callers of {CLIENTS} clients, each with one request at a time");
}

/// Answers even requests only. Its state answers no request.
struct AnswersEven {
    started: bool,
}

impl Operator for AnswersEven {
    type Ports = CountPorts;

    async fn compute(&mut self, ports: &mut CountPorts, cx: &mut Cx) -> Result<()> {
        let n = ports.requests.take()?;
        let reply = cx.take_replies().pop().unwrap();
        if std::mem::replace(&mut self.started, true) {
            ports.state.recv().await?;
        }
        if n.is_multiple_of(2) {
            ports.responses.send_for(reply, n.into()).await?;
        }
        ports.next.send_for(Reply::default(), 0).await?;
        Ok(())
    }
}

#[tokio::test]
async fn e1_a_request_dropped_beside_a_cycle_fails_at_once() {
    let mut flow = Flow::new("loops");
    let even = flow.add("even", AnswersEven { started: false });
    flow.connect(even.next, even.state);
    let service = flow.service("service", even.requests, even.responses);
    let running = flow.spawn().unwrap();
    for n in 0..100 {
        match within(service.ask(n)).await {
            Ok(answer) => assert_eq!((answer, n % 2), (n.into(), 0)),
            Err(error) => assert_eq!((error.kind(), n % 2), (ErrorKind::Unanswered, 1), "{error}"),
        }
    }
    drop(service);
    within(running).await.unwrap();
}

#[tokio::test]
async fn e1_a_combined_message_keeps_all_waiting_callers() {
    #[derive(Ports)]
    struct PairPorts {
        #[input(capacity = 2, at_least = 2)]
        input: Input<u32>,
        #[output]
        output: Output<u32>,
    }

    struct Pair;

    impl Operator for Pair {
        type Ports = PairPorts;

        async fn compute(&mut self, ports: &mut PairPorts, _cx: &mut Cx) -> Result<()> {
            let sum = ports.input.take_batch()?.sum();
            ports.output.send(sum).await?;
            Ok(())
        }
    }

    let mut flow = Flow::new("loops");
    let pair = flow.add("pair", Pair);
    let refuse = flow.add("refuse", Refuse(Arc::default()));
    flow.connect(pair.output, refuse.input);
    let service = flow.service_with("service", pair.input, refuse.output, HubOptions::bounded(2));
    let running = flow.spawn().unwrap();
    for answer in within(join_all((0..10).map(|n| service.ask(n)))).await {
        assert_eq!(answer.unwrap_err().to_string(), "refused, 2 of you");
    }
    drop(service);
    within(running).await.unwrap();
}

/// Refuses each message, with the number of its callers in the error.
struct Refuse(Arc<AtomicUsize>);

impl Operator for Refuse {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        for reply in cx.take_replies() {
            self.0.fetch_add(1, Ordering::Relaxed);
            let callers = callers(&reply);
            reply.fail(format!("refused, {callers} of you").into());
        }
        Ok(())
    }
}

/// Counts the open spans named `call`, their maximum, and for each span the spans it follows from.
#[derive(Default)]
struct Spans {
    open: AtomicUsize,
    most: AtomicUsize,
    follows: std::sync::Mutex<HashMap<u64, usize>>,
}

struct SpanLayer(Arc<Spans>);

/// Marks a span named `call`, as its extension.
struct Call;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        if attributes.metadata().name() == "call" {
            context.span(id).unwrap().extensions_mut().insert(Call);
            let open = self.0.open.fetch_add(1, Ordering::Relaxed) + 1;
            self.0.most.fetch_max(open, Ordering::Relaxed);
        }
    }

    fn on_follows_from(&self, span: &span::Id, _follows: &span::Id, _context: Context<'_, S>) {
        *lock(&self.0.follows).entry(span.into_u64()).or_default() += 1;
    }

    fn on_close(&self, id: span::Id, context: Context<'_, S>) {
        if context.span(&id).is_some_and(|span| span.extensions().get::<Call>().is_some()) {
            self.0.open.fetch_sub(1, Ordering::Relaxed);
            // A later span may get the same ID.
            lock(&self.0.follows).remove(&id.into_u64());
        }
    }
}

/// Installs the process's only subscriber. The tests that count spans run one at a time.
async fn counting_spans() -> (tokio::sync::MutexGuard<'static, ()>, Arc<Spans>) {
    static SPANS: OnceLock<Arc<Spans>> = OnceLock::new();
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let spans = SPANS.get_or_init(|| {
        let spans = Arc::<Spans>::default();
        tracing::subscriber::set_global_default(Registry::default().with(SpanLayer(spans.clone()))).unwrap();
        spans
    });
    let turn = TURN.lock().await;
    assert_eq!(spans.open.load(Ordering::Relaxed), 0);
    spans.most.store(0, Ordering::Relaxed);
    (turn, spans.clone())
}

impl Spans {
    fn check(&self, limit: usize, what: &str) {
        let most = self.most.load(Ordering::Relaxed);
        assert!(most <= limit, "{most} spans were open at a time: {what}");
        let follows = lock(&self.follows).values().copied().max().unwrap_or_default();
        assert!(follows <= limit, "a span follows from {follows} others: {what}");
    }
}

/// Both for requests and for messages of an ingress.
#[tokio::test]
async fn e5_state_in_a_cycle_keeps_no_old_spans() {
    let (_turn, spans) = counting_spans().await;
    for first in [First::State, First::Request] {
        let (flow, service, _) = counting(first, HubOptions::default());
        let running = flow.spawn().unwrap();
        for n in 1..=500_u64 {
            let call = service.ask(1).instrument(info_span!("call"));
            assert_eq!(within(call).await.unwrap(), n);
            spans.check(4, &format!("{first:?}, request {n}"));
        }
        drop(service);
        within(running).await.unwrap();

        let mut flow = Flow::new("loops");
        let count = flow.add("count", Count { first, started: false });
        let seen = Arc::new(AtomicUsize::new(0));
        let sum = seen.clone();
        let store = move |n: u64| {
            sum.store(n as usize, Ordering::Relaxed);
            ready(Ok(()))
        };
        let last = flow.add("last", sink(store));
        flow.connect(count.next, count.state);
        flow.connect(count.responses, last.input);
        let messages = flow.ingress("messages", count.requests);
        let running = flow.spawn().unwrap();
        for n in 1..=500 {
            within(messages.send(1).instrument(info_span!("call"))).await.unwrap();
            until("the message has arrived", || seen.load(Ordering::Relaxed) == n).await;
            spans.check(4, &format!("{first:?}, message {n}"));
        }
        drop(messages);
        within(running).await.unwrap();
    }
}

struct Endless {
    takes_replies: bool,
}

impl Operator for Endless {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        while let Some(n) = ports.input.recv().await? {
            if self.takes_replies {
                let reply = cx.take_replies().pop().unwrap_or_default();
                ports.output.send_for(reply, n).await?;
            } else {
                ports.output.send(n).await?;
            }
        }
        Ok(())
    }
}

#[tokio::test]
async fn e5_an_endless_run_keeps_a_bounded_number_of_requests() {
    let (_turn, spans) = counting_spans().await;
    for takes_replies in [false, true] {
        let mut flow = Flow::new("loops");
        let endless = flow.add("endless", Endless { takes_replies });
        let service = flow.service("service", endless.input, endless.output);
        let running = flow.spawn().unwrap();
        for n in 0..5000 {
            assert_eq!(within(service.ask(n).instrument(info_span!("call"))).await.unwrap(), n);
        }
        let most = spans.most.load(Ordering::Relaxed);
        assert!(most < 2500, "one run keeps {most} of 5000 requests");
        drop(service);
        within(running).await.unwrap();
    }
}

#[tokio::test]
async fn e1_state_in_a_cycle_keeps_one_value_of_a_name() {
    struct Value(Arc<AtomicUsize>);

    impl Drop for Value {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    struct Names(Arc<AtomicUsize>);

    impl Operator for Names {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            cx.insert_metadata("request", Value(self.0.clone()));
            let n = ports.input.take()?;
            ports.output.send(n).await?;
            Ok(())
        }
    }

    let live = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("loops");
    let names = flow.add("names", Names(live.clone()));
    let count = flow.add("count", Count { first: First::State, started: false });
    flow.connect(names.output, count.requests);
    flow.connect(count.next, count.state);
    let service = flow.service("service", names.input, count.responses);
    let running = flow.spawn().unwrap();
    for n in 1..=1000_u64 {
        assert_eq!(within(service.ask(1)).await.unwrap(), n);
        let live = live.load(Ordering::Relaxed);
        assert!(live <= 4, "{live} values are alive after {n} requests");
    }
    drop(service);
    within(running).await.unwrap();
    assert_eq!(live.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn e1_a_kept_reply_is_abandoned_when_its_caller_gives_up() {
    let (kept, mut replies) = tokio::sync::mpsc::unbounded_channel::<Reply>();
    let mut flow = Flow::new("loops");
    let keeps = flow.add("keeps", Keeps(kept));
    let service = flow.service("service", keeps.input, keeps.output);
    let running = flow.spawn().unwrap();
    let mut call = Box::pin(service.ask(1));
    assert!(poll!(call.as_mut()).is_pending());
    let reply = poll_fn(|task| match replies.poll_recv(task) {
        Poll::Pending => {
            let _ = call.as_mut().poll(task);
            Poll::Pending
        }
        ready => ready,
    });
    let reply = within(reply).await.unwrap();
    assert!(!reply.is_empty() && !reply.is_abandoned());
    drop(call);
    assert!(!reply.is_empty() && reply.is_abandoned());
    drop((reply, service));
    within(running).await.unwrap();
}

struct Keeps(tokio::sync::mpsc::UnboundedSender<Reply>);

impl Operator for Keeps {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        cx.take_replies().into_iter().for_each(|reply| self.0.send(reply).unwrap());
        Ok(())
    }
}
