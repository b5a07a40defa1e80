//! Scenario E1: callers of a service and senders into a flow may be untrusted. They get the kind of a failure and a general
//! message. Names, causes, addresses and paths of the flow are in the log and in the flow's own error.

use std::{
    error::Error as StdError,
    fmt::{self, Write},
    future::ready,
    sync::{Mutex, OnceLock, mpsc},
};

use common::*;
use futures::future::join_all;
use tracing::field::{Field, Visit};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
};
use wakeline::{
    Egress, Ingress, Running, Service,
    device::{Emulated, Faults},
    prelude::*,
};

gpu_tests_run_where_required!();

const SECRET: &str = "the password is hunter2";

/// Texts that must not leak: names of operators, streams, kernels, ports, hubs and flows, addresses and paths.
const INTERNAL: [&str; 12] = [
    SECRET,
    "inner-flow",
    "inner-operator",
    "inner-service",
    "inner-ingress",
    "inner-read",
    "increment",
    "emulated",
    "cuda",
    "0x",
    "/srv/keys",
    ".rs:",
];

/// The warnings and errors logged in this process, one event a line.
static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct LogLayer;

impl<S: tracing::Subscriber> Layer<S> for LogLayer {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        struct Line(String);

        impl Visit for Line {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                let _ = write!(self.0, "{field}={value:?} ");
            }
        }

        if *event.metadata().level() <= tracing::Level::WARN {
            let mut line = Line(String::new());
            event.record(&mut line);
            lock(&LOG).push(line.0);
        }
    }
}

/// Installs and clears the process's only log. The tests run one at a time.
async fn logging() -> tokio::sync::MutexGuard<'static, ()> {
    static ONE: OnceLock<()> = OnceLock::new();
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    ONE.get_or_init(|| tracing::subscriber::set_global_default(Registry::default().with(LogLayer)).unwrap());
    let turn = TURN.lock().await;
    lock(&LOG).clear();
    turn
}

/// The number of lines of the log that contain this text.
fn in_log(what: &str) -> usize {
    lock(&LOG).iter().filter(|line| line.contains(what)).count()
}

/// Checks that no output of an error or of its sources leaks internals.
fn assert_clean(error: &(dyn StdError + 'static)) {
    let mut next = Some(error);
    while let Some(error) = next {
        for text in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
            let leaked = INTERNAL.iter().find(|internal| text.contains(**internal));
            assert_eq!(leaked, None, "leaked to a caller: {text}");
        }
        next = error.source();
    }
}

#[derive(Debug)]
struct Cause(std::io::Error);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot open /srv/keys at {:p}: {}", self, self.0)
    }
}

impl StdError for Cause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Fails,
    Panics,
    Drops,
    /// One response for several requests.
    Mixes,
}

#[derive(Ports)]
struct BatchPorts {
    #[input(capacity = 2, at_least = 2)]
    input: Input<u32>,
    #[output]
    output: Output<u32>,
}

struct Inner(How);

impl Operator for Inner {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, _cx: &mut Cx) -> Result<()> {
        let numbers: Vec<_> = ports.input.take_batch()?.collect();
        match self.0 {
            How::Fails => Err(Error::other(Cause(std::io::Error::other(SECRET)))),
            How::Panics => panic!("{SECRET}, in /srv/keys"),
            How::Drops => Ok(()),
            How::Mixes => Ok(ports.output.send(numbers[0]).await?),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_callers_get_the_kind_and_the_log_has_the_details() {
    let _turn = logging().await;
    for how in [How::Fails, How::Panics, How::Drops, How::Mixes] {
        lock(&LOG).clear();
        let mut flow = Flow::new("inner-flow");
        let inner = flow.add("inner-operator", Inner(how));
        let service = flow.service_with("inner-service", inner.input, inner.output, HubOptions::bounded(2));
        let running = flow.spawn().unwrap();
        let (kind, in_error, times) = match how {
            How::Fails => (ErrorKind::Operator, true, 1),
            How::Panics => (ErrorKind::Panicked, true, 1),
            // A warning for each request.
            How::Drops => (ErrorKind::Unanswered, false, 2),
            How::Mixes => (ErrorKind::Unanswered, false, 1),
        };
        for answer in within(join_all([service.ask(1), service.ask(2)])).await {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), kind, "{how:?}: {error}");
            assert_clean(&error);
        }
        if in_error {
            let late = within(service.ask(3)).await.unwrap_err();
            assert_eq!(late.kind(), kind, "{how:?}: {late}");
            assert_clean(&late);
            assert_eq!(in_log(SECRET), 1, "{how:?}: {:?}", lock(&LOG));
            let error = within(running).await.unwrap_err().to_string();
            assert!(error.contains(SECRET) && error.contains("inner-operator"), "{error}");
        } else {
            let expected = if how == How::Mixes { "inner-service" } else { "inner-operator" };
            assert_eq!(in_log(expected), times, "{how:?}: {:?}", lock(&LOG));
            drop(service);
            within(running).await.unwrap();
        }
    }
}

/// A flow with a service over a device, and an ingress.
fn on_device(device: &Device) -> (Running, Service<Envelope<u32>, u32>, Ingress<Envelope<u32>>) {
    let mut flow = Flow::new("inner-flow");
    let inner = flow.add("inner-operator", Increment).on(device);
    let read = flow.add(
        "inner-read",
        map(async |envelope: Envelope<u32>| {
            let first = envelope.read().await?[0];
            Ok(first)
        }),
    );
    let other = flow.add("other", sink(|_: Envelope<u32>| ready(Ok(()))));
    flow.connect(inner.output, read.input);
    // One envelope on each side.
    let requests = HubOptions::bounded(1).envelopes(1).envelope_bytes(64);
    let service = flow.service_with("inner-service", inner.input, read.output, requests);
    let ingress = flow.ingress_with("inner-ingress", other.input, HubOptions::bounded(1).envelope_bytes(64));
    (flow.spawn().unwrap(), service, ingress)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_callers_get_no_names_from_a_lost_device() {
    let _turn = logging().await;
    let faults = [Faults::new().trap_kernel("increment", 1), Faults::new().fail_copy(1), Faults::new().fail_alloc(1)];
    for faults in faults {
        lock(&LOG).clear();
        let device = emulated_with(Emulated::new().workers(2).faults(faults));
        let (running, service, ingress) = on_device(&device);
        let ask = async || {
            let mut request = service.blank().await?;
            request.space().await?[0] = 1;
            request.set_len(1)?;
            service.ask(request).await
        };
        let error = within(ask()).await.unwrap_err();
        assert!(error.is_device_lost() || error.is_out_of_memory(), "{error}");
        assert_clean(&error);
        let own = within(running).await.unwrap_err();
        assert_eq!(own.kind(), error.kind());
        assert!(own.to_string().contains("inner-"), "{own}");
        assert_eq!(in_log("the flow has failed"), 1, "{:?}", lock(&LOG));
        assert!(in_log("inner-") > 0, "{:?}", lock(&LOG));
        for error in [within(ask()).await.unwrap_err(), within(ingress.blank()).await.unwrap_err()] {
            assert_eq!(error.kind(), own.kind(), "{error}");
            assert_clean(&error);
        }
    }
}

/// Its CUDA source does not compile, and the compiler's log has the source's location.
#[kernel(unsafe(cuda = "kernels/trap_at.cu"))]
fn trap_at(x: &mut [u32]) {
    x[0] += 1;
}

struct DoesNotCompile;

impl Operator for DoesNotCompile {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        trap_at::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

#[tokio::test]
#[ignore = "needs a GPU"]
async fn e1_callers_get_no_compiler_log() {
    let _turn = logging().await;
    let device = cuda_without_kernels();
    let mut flow = Flow::new("inner-flow");
    let inner = flow.add("inner-operator", DoesNotCompile).on(&device);
    let hub = HubOptions::bounded(1).envelope_bytes(64);
    let service = flow.service_with("inner-service", inner.input, inner.output, hub);
    let running = flow.spawn().unwrap();
    let call = async {
        let mut request = service.blank().await?;
        request.set_len(1)?;
        service.ask(request).await.map(drop)
    };
    let error = within(call).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Kernel, "{error}");
    assert_clean(&error);
    let own = within(running).await.unwrap_err().to_string();
    assert!(own.contains("trap_at"), "{own}");
    assert!(in_log("trap_at") > 0);
}

#[tokio::test]
async fn e2_senders_into_a_flow_get_no_names() {
    let _turn = logging().await;
    // Stopped, aborted, dropped, failed.
    for how in 0..4 {
        let mut flow = Flow::new("inner-flow");
        let inner = flow.add("inner-operator", sink(|_: u32| ready(Err(Error::other(SECRET)))));
        let ingress = flow.ingress("inner-ingress", inner.input);
        let running = flow.spawn().unwrap();
        let kind = match how {
            0 => {
                running.stop();
                within(running).await.unwrap();
                ErrorKind::Closed
            }
            1 => {
                running.abort();
                within(running).await.unwrap_err();
                ErrorKind::Cancelled
            }
            2 => {
                drop(running);
                until("the flow is cancelled", || ingress.is_closed()).await;
                ErrorKind::Cancelled
            }
            _ => {
                within(ingress.send(1)).await.unwrap();
                let error = within(running).await.unwrap_err().to_string();
                assert!(error.contains(SECRET), "{error}");
                ErrorKind::Operator
            }
        };
        let unsent = within(ingress.send(2)).await.unwrap_err();
        assert_eq!(unsent.error().kind(), kind, "{unsent}");
        assert_clean(&unsent);
        assert_clean(&Error::from(unsent));
    }
    // A hub without envelope sizes: the error has the cause, but not the names.
    let mut flow = Flow::new("inner-flow");
    let inner = flow.add("inner-operator", sink(|_: Envelope<u32>| ready(Ok(()))));
    let ingress = flow.ingress("inner-ingress", inner.input);
    let running = flow.spawn().unwrap();
    let error = within(ingress.blank()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert_clean(&error);
    assert!(in_log("inner-operator") > 0, "{:?}", lock(&LOG));
    drop(ingress);
    within(running).await.unwrap();
}

/// `Reply::fail` sends an operator's own error unchanged, and the flow continues.
#[tokio::test]
async fn e1_an_operator_sends_its_own_error_to_its_callers() {
    struct Refuses;

    impl Operator for Refuses {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let n = ports.input.take()?;
            if n < 10 {
                return Ok(ports.output.send(n).await?);
            }
            for reply in cx.take_replies() {
                reply.fail(Error::new(ErrorKind::Usage, "numbers below 10, please").because(std::fmt::Error));
            }
            Ok(())
        }
    }

    let mut flow = Flow::new("inner-flow");
    let refuses = flow.add("inner-operator", Refuses);
    let service = flow.service("inner-service", refuses.input, refuses.output);
    let running = flow.spawn().unwrap();
    let error = within(service.ask(10)).await.unwrap_err();
    assert!(error.to_string().starts_with("invalid use: numbers below 10, please"), "{error}");
    assert!(error.downcast_ref::<std::fmt::Error>().is_some());
    assert_eq!(within(service.ask(9)).await.unwrap(), 9);
    drop(service);
    within(running).await.unwrap();
}

/// Increments an envelope on a device, the first one only once the channel's sender is dropped.
struct Fills(Option<mpsc::Receiver<()>>);

#[derive(Ports)]
struct FillsPorts {
    #[input]
    input: Input<u32>,
    #[output(envelopes = 2, envelope_bytes = 64)]
    output: Output<Envelope<u32>>,
}

impl Operator for Fills {
    type Ports = FillsPorts;

    async fn compute(&mut self, ports: &mut FillsPorts, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let mut envelope = ports.output.blank().await?;
        envelope.set_len(4)?;
        if let Some(held) = self.0.take() {
            cx.stream()?.host_function(move || _ = held.recv())?;
        }
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// The errors of all methods of an envelope.
async fn errors_of(envelope: &mut Envelope<u32>) -> Vec<Error> {
    let access = format!("{envelope:?} {:?} {:?}", envelope.available(), envelope.idle());
    assert!(!access.contains("inner-"), "leaked to a caller: {access}");
    let outcomes = [
        within(envelope.available()).await,
        within(envelope.idle()).await,
        within(envelope.read()).await.map(drop),
        within(envelope.write()).await.map(drop),
        within(envelope.space()).await.map(drop),
        envelope.as_slice().map(drop),
        envelope.as_mut_slice().map(drop),
        envelope.as_mut_space().map(drop),
        envelope.state().map(drop),
    ];
    outcomes.into_iter().filter_map(Result::err).collect()
}

/// A flow with a service whose response is an envelope. The response arrives before the device is lost.
struct LostAfterResponse {
    running: Running,
    service: Service<u32, Envelope<u32>>,
    envelope: Envelope<u32>,
    hold: mpsc::Sender<()>,
}

impl LostAfterResponse {
    async fn new() -> Self {
        let device = emulated_with(Emulated::new().workers(2).faults(Faults::new().trap_kernel("increment", 1)));
        let (hold, held) = mpsc::channel();
        let mut flow = Flow::new("inner-flow");
        let inner = flow.add("inner-operator", Fills(Some(held))).on(&device);
        let service = flow.service("inner-service", inner.input, inner.output);
        let running = flow.spawn().unwrap();
        let envelope = within(service.ask(1)).await.unwrap();
        Self { running, service, envelope, hold }
    }
}

#[tokio::test]
async fn e1_an_envelope_in_a_response_leaks_no_names() {
    let _turn = logging().await;
    let LostAfterResponse { running, service, mut envelope, hold } = LostAfterResponse::new().await;
    // Device work is in progress: the host has no access yet.
    for error in [envelope.as_slice().map(drop).unwrap_err(), envelope.as_mut_slice().map(drop).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("`read()`"), "{error}");
        assert_clean(&error);
    }
    drop(hold);
    let errors = errors_of(&mut envelope).await;
    assert_eq!(errors.len(), 9, "{errors:?}");
    for error in &errors {
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        assert_clean(error);
    }
    assert_eq!(in_log("an envelope outside the flow failed"), 1, "once: {:?}", lock(&LOG));
    assert_eq!(in_log("operator=\"inner-service\""), 1, "{:?}", lock(&LOG));
    drop((service, envelope));
    let own = within(running).await.unwrap_err();
    assert!(own.to_string().contains("inner-"), "{own}");
}

/// A flow of the caller's program, which may see its names.
fn own_flow() -> (Running, Ingress<Envelope<u32>>, Egress<Envelope<u32>>) {
    let mut flow = Flow::new("own");
    let pass = flow.add("pass", pass_on::<Envelope<u32>>());
    let to = flow.ingress_with("to", pass.input, HubOptions::bounded(1).envelope_bytes(64));
    let from = flow.egress("from", pass.output);
    (flow.spawn().unwrap(), to, from)
}

/// Before the fault, after it, and after the end of the service's flow.
#[tokio::test]
async fn e1_an_envelope_leaks_no_names_after_another_flow_or_a_swap() {
    let _turn = logging().await;
    for (early, swapped) in [(true, true), (true, false), (false, true), (false, false)] {
        let LostAfterResponse { running, service, mut envelope, hold } = LostAfterResponse::new().await;
        let (own, to, mut from) = own_flow();
        let mut other = within(to.blank()).await.unwrap();
        let mut hold = Some(hold);
        if !early {
            hold = None;
            errors_of(&mut envelope).await;
        }
        within(to.send(envelope)).await.unwrap();
        envelope = within(from.recv()).await.unwrap();
        if swapped {
            // `other` comes from an egress: no service gave it to a caller.
            within(to.send(other)).await.unwrap();
            other = within(from.recv()).await.unwrap();
            other.swap(&mut envelope).unwrap();
            drop(envelope);
            envelope = other;
        }
        drop((hold, service));
        within(running).await.unwrap_err();
        let errors = errors_of(&mut envelope).await;
        assert_eq!(errors.len(), 9, "{errors:?}");
        errors.iter().for_each(|error| assert_clean(error));
        drop((to, from, envelope));
        within(own).await.unwrap();
    }
}

/// The flow has used the blank envelope before.
#[tokio::test]
async fn e1_a_blank_envelope_leaks_no_names() {
    let _turn = logging().await;
    // The only worker is blocked: the copy fails after the blank envelope has returned.
    let device = emulated_with(Emulated::new().workers(1).faults(Faults::new().fail_copy(1)));
    let [held] = streams(&device);
    let hold = hold(&held);
    let (running, service, _ingress) = on_device(&device);
    let mut first = within(service.blank()).await.unwrap();
    first.set_len(1).unwrap();
    let call = tokio::spawn({
        let service = service.clone();
        async move { service.ask(first).await }
    });
    let mut blank = within(service.blank()).await.unwrap();
    drop(hold);
    assert_clean(&within(call).await.unwrap().unwrap_err());
    // The lost device has copied from it: an error only until that device has shut down.
    let errors = errors_of(&mut blank).await;
    assert!(errors.iter().all(Error::is_device_lost), "{errors:?}");
    errors.iter().for_each(|error| assert_clean(error));
    drop((blank, service));
    within(running).await.unwrap_err();
}

/// An envelope that is sent into its own flow again belongs to the flow: its errors have the names.
#[tokio::test]
async fn e1_an_envelope_that_returns_to_its_flow_shows_the_names() {
    let _turn = logging().await;
    let device = emulated_with(Emulated::new().workers(2).faults(Faults::new().trap_kernel("increment", 1)));
    let (hold, held) = mpsc::channel();
    let mut flow = Flow::new("inner-flow");
    let inner = flow.add("inner-operator", Fills(Some(held))).on(&device);
    let service = flow.service("inner-service", inner.input, inner.output);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let mut sender = Some(sender);
    let end = flow.add(
        "inner-end",
        sink(move |envelope: Envelope<u32>| {
            let text = format!("{:?}", envelope.available());
            let _ = sender.take().map(|sender| sender.send(text));
            ready(Ok(()))
        }),
    );
    let back = flow.ingress("inner-ingress", end.input);
    let running = flow.spawn().unwrap();
    let envelope = within(service.ask(1)).await.unwrap();
    within(back.send(envelope)).await.unwrap();
    let text = within(receiver).await.unwrap();
    assert!(text.contains("inner-"), "{text}");
    drop((hold, back, service));
    within(running).await.unwrap_err();
}

fn envelope(bytes: usize) -> Envelope<u8> {
    Buffer::wrap(vec![1; bytes]).unwrap().0.into()
}

/// A request whose envelopes are too large, too many, or on another or a lost device is refused at once. The error reaches
/// only its own caller.
#[tokio::test]
async fn e1_a_request_that_cannot_be_copied_fails_no_other_caller() {
    let _turn = logging().await;
    for on_device in [false, true] {
        let (own, other, faulty) = (emulated(), emulated(), emulated());
        let mut flow = Flow::new("inner-flow");
        let inner = flow.add("inner-operator", map(async |all: Vec<Envelope<u8>>| Ok(all.len())));
        let inner = if on_device { inner.on(&own) } else { inner };
        let hub = HubOptions::bounded(2).envelope_bytes(16).envelopes(3);
        let service = flow.service_with("inner-service", inner.input, inner.output, hub);
        let running = flow.spawn().unwrap();
        let elsewhere = |device: &Device| {
            let [stream] = streams(device);
            vec![Envelope::from(Buffer::from_slice(&stream, &[1_u8; 4]).unwrap())]
        };
        let ask = async |all: Vec<Envelope<u8>>| {
            let count = all.len();
            let answer = within(service.ask(all)).await;
            if let Ok(answer) = &answer {
                assert_eq!(*answer, count);
            }
            answer
        };
        ask(vec![envelope(16), envelope(1)]).await.unwrap();
        let wrong = match on_device {
            true => vec![vec![envelope(17)], vec![envelope(1), envelope(2), envelope(3), envelope(4)]],
            false => vec![elsewhere(&other)],
        };
        for wrong in wrong {
            let error = ask(wrong).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("refused"), "{error}");
            assert_clean(&error);
            ask(vec![envelope(16)]).await.unwrap();
        }
        if on_device {
            ask(elsewhere(&other)).await.unwrap();
            let lost = elsewhere(&faulty);
            let [stream] = streams(&faulty);
            traps_here::launch(&stream, 1).unwrap();
            assert!(within(stream.completed()).await.unwrap_err().is_device_lost());
            assert_clean(&ask(lost).await.unwrap_err());
            ask(vec![envelope(16)]).await.unwrap();
        }
        drop(service);
        within(running).await.unwrap();
    }
}

#[kernel]
fn traps_here(_number: u32) {
    panic!("a trap");
}
