//! Chains of any length, on a small stack.

use tower_service::Service as _;

use super::*;

/// Runs a test's body in a separate process: a stack overflow aborts the process.
pub(super) fn on_a_small_stack(test: &str, body: impl FnOnce() + Send + 'static) {
    common::alone::in_a_process(test, || small_stack(256 << 10, body));
}

fn small_stack(bytes: usize, body: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(bytes).spawn(body).unwrap().join().unwrap();
}

/// Every hub is full, and every message waits for an envelope of the next hub: an envelope that returns at the end lets
/// all of them move.
#[test]
fn envelopes_return_along_any_number_of_hubs() {
    const HUBS: u32 = 100;
    async fn run(simulation: &Simulation) {
        let device = Device::simulated(simulation, Emulated::new());
        let mut flow = Flow::new("long");
        let hub = HubOptions::bounded(1).envelopes(1).envelope_bytes(16);
        let mut last = flow.add("from", SendEach::new((0..4 * HUBS).map(|n| vec![n]))).output;
        for at in 0..HUBS {
            let next = flow.add(format!("pass {at}"), pass_on::<Envelope<u32>>());
            let next = if at % 2 == 0 { next.on(&device) } else { next };
            flow.connect_with(last, next.input, hub);
            last = next.output;
        }
        let mut out = flow.egress("out", last);
        let running = flow.spawn().unwrap();
        let first = out.recv().await.unwrap();
        let sent = || running.status().iter().find(|operator| &*operator.name == "from").unwrap().runs;
        // The clock is paused: it advances when no task can run.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = sent();
        assert!(before > u64::from(HUBS) && before < u64::from(4 * HUBS), "{before} messages");
        small_stack(64 << 10, move || drop(first));
        for n in 1..4 {
            let envelope = out.recv().await.unwrap();
            assert_eq!(envelope.read().await.unwrap(), [n]);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Four envelopes have returned, and each has let one more message in at the other end.
        assert_eq!(sent(), before + 4);
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    }
    common::alone::in_a_process("extremes::chains::envelopes_return_along_any_number_of_hubs", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let simulation = Simulation::new(1);
        runtime.block_on(simulation.run(run(&simulation)));
    });
}

/// A retry that keeps the last failure, as the cause or within another error.
#[test]
fn chains_of_causes_may_be_of_any_length() {
    const FAILURES: usize = 20_000;
    on_a_small_stack("extremes::chains::chains_of_causes_may_be_of_any_length", || {
        fn retry(last: Error) -> Error {
            Error::new(ErrorKind::Operator, "a retry failed").because(last)
        }
        let wrapped = |last: Error| retry(std::io::Error::other(last).into());
        let again = |last: Error| retry(last.clone());
        let cases: [fn(Error) -> Error; 3] = [retry, wrapped, again];
        for next in cases {
            let first = Error::from(std::io::Error::other("the first failure"));
            let error = (0..FAILURES).fold(first, |last, _| next(last));
            assert_eq!(error.to_string(), "a retry failed");
            let text = format!("{error:#}");
            assert_eq!(text, "a retry failed: ".repeat(64) + "further causes are not displayed");
            let text = format!("{error:?}");
            assert!(text.starts_with("a retry failed\n\nCaused by:\n    0: a retry failed\n    1: a retry"), "{text}");
            assert!(text.ends_with("\n   62: a retry failed\n   63: further causes are not displayed"), "{text}");
            let sources = std::iter::successors(std::error::Error::source(&error), |error| error.source());
            let last = sources.last().unwrap();
            assert_eq!(last.to_string(), "the first failure");
            drop(error);
        }
        let few = (0..60).fold(Error::from("the first failure"), |last, _| retry(last));
        assert_eq!(format!("{few:#}"), "a retry failed: ".repeat(60) + "the first failure");
    });
}

/// An error that is passed through another library's error type again and again, without a message of its own.
#[test]
fn an_error_may_be_wrapped_any_number_of_times() {
    on_a_small_stack("extremes::chains::an_error_may_be_wrapped_any_number_of_times", || {
        let first = Error::from(std::io::Error::other("the first failure"));
        let error = (0..20_000).fold(first, |last, _| std::io::Error::other(last).into());
        for text in [error.to_string(), format!("{error:#}"), format!("{error:?}")] {
            assert!(text.contains("further causes are not displayed") && text.len() < 64 * 64 * 2, "{text}");
        }
        assert!(std::iter::successors(std::error::Error::source(&error), |error| error.source()).count() < 20_000);
    });
}

/// An operator of a cycle that keeps the metadata of the previous message.
#[test]
fn metadata_may_be_nested_to_any_depth() {
    on_a_small_stack("extremes::chains::metadata_may_be_nested_to_any_depth", || {
        let drops = Arc::new(());
        let mut metadata = Metadata::default();
        for _ in 0..20_000 {
            let before = std::mem::take(&mut metadata);
            metadata.insert("before", before);
            metadata.insert("drops", drops.clone());
        }
        drop(metadata);
        assert_eq!(Arc::strong_count(&drops), 1);
    });
}

struct Once;

impl Operator for Once {
    type Ports = ();

    async fn compute(&mut self, _: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

/// Any number of conditions combined in a loop, and conditions that are nested too deeply.
#[test]
fn conditions_within_conditions_are_refused_beyond_a_depth() {
    use condition::{Gate, When, all_of, any_of};
    let outcome = |when: When| {
        let mut flow = host_only();
        let _ = flow.add("once", Once).when(when);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(flow.run())
    };
    on_a_small_stack("extremes::chains::conditions_within_conditions_are_refused_beyond_a_depth", move || {
        let open = Gate::open;
        let nested = |levels: usize| {
            (0..levels).fold(any_of(open(), open()), |when, level| match level % 4 {
                0 => all_of(when, open()),
                1 => any_of(open(), when),
                2 => all_of(open(), when),
                _ => any_of(when, open()),
            })
        };
        drop(nested(50_000));
        outcome(nested(63)).unwrap();
        // One level too many; two; and so many that inner conditions were refused too.
        for levels in [64, 65, 200, 50_000] {
            let error = outcome(nested(levels)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
            assert!(error.to_string().contains("more than 64 levels deep"), "{error}");
        }
        // One level, in either notation.
        let both: [fn(When, When) -> When; 2] = [any_of, all_of];
        let pairs: [fn() -> When; 2] = [|| any_of(Gate::open(), Gate::open()), || all_of(Gate::open(), Gate::open())];
        for (both, pair) in both.into_iter().zip(pairs) {
            let one = || all_of(open(), open());
            outcome((0..2000).fold(one(), |when, _| both(when, one()))).unwrap();
            outcome((0..2000).fold(one(), |when, _| both(one(), when))).unwrap();
            // This would take minutes if each step moved all earlier conditions.
            drop((0..30_000).fold(pair(), |when, _| both(when, pair())));
            drop((0..30_000).fold(pair(), |when, _| both(pair(), when)));
        }
    });
}

/// Connected from last to first: nothing upstream of a hub is known when it is planned.
#[test]
fn a_flow_of_any_length_is_checked_and_runs() {
    const OPERATORS: usize = 5_000;
    on_a_small_stack("extremes::chains::a_flow_of_any_length_is_checked_and_runs", || {
        let mut flow = host_only();
        let device = Device::emulated(Emulated::new());
        let from = flow.add("from", SendEach::new([vec![1_u32]]));
        let pass = |at| flow.add(format!("pass {at}"), pass_on::<Envelope<u32>>()).on(&device);
        let passes: Vec<_> = (0..OPERATORS).map(pass).collect();
        let last = flow.add("last", sink(async |_: Envelope<u32>| Ok(())));
        // The last hub copies to the host, so it needs the size that the first hub sets.
        flow.connect(passes[OPERATORS - 1].output, last.input);
        for at in (1..OPERATORS).rev() {
            flow.connect(passes[at - 1].output, passes[at].input);
        }
        flow.connect_with(from.output, passes[0].input, HubOptions::bounded(2).envelope_bytes(16));
        flow.check().unwrap();
        flow.replay("all", passes.iter().collect::<Vec<_>>());
        flow.check().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let report = runtime.block_on(flow.run()).unwrap();
        assert_eq!(report.operator("last").unwrap().runs, 1);
    });
}

/// Time quadratic in the number of readers would exceed the process's time limit.
#[test]
fn an_output_of_any_number_of_readers_is_checked() {
    const READERS: usize = 20_000;
    on_a_small_stack("extremes::chains::an_output_of_any_number_of_readers_is_checked", || {
        let mut flow = host_only();
        let from = flow.add("from", SendEach::new([vec![1_u32]]));
        let reader = |at| flow.add(format!("reader {at}"), sink(async |_: Envelope<u32>| Ok(()))).input;
        let readers: Vec<_> = (0..READERS).map(reader).collect();
        flow.connect_with(from.output, readers, HubOptions::bounded(2).envelope_bytes(16));
        // One reader is sent the envelopes themselves.
        assert_eq!(flow.check().unwrap().copies.len(), READERS - 1);
    });
}

#[derive(Clone)]
struct Within(#[allow(dead_code, reason = "dropped")] Option<ChunkHub<u8, Within>>);

/// A structure holds a hub, one of whose chunks holds such a structure.
#[test]
fn hubs_may_be_nested_in_structures_to_any_depth() {
    on_a_small_stack("extremes::chains::hubs_may_be_nested_in_structures_to_any_depth", || {
        let mut inner = None;
        for _ in 0..5_000 {
            let hub = ChunkHub::<u8, Within>::builder("hub").elements(1).host_envelopes(1).build().unwrap();
            let mut produce = hub.produce(&Device::host()).unwrap();
            let mut chunk = produce.next().now_or_never().unwrap().unwrap().unwrap();
            chunk.set_structure(Within(inner.take()));
            chunk.fill_from(&[1]).now_or_never().unwrap().unwrap();
            chunk.commit().unwrap();
            drop(produce);
            inner = Some(hub);
        }
        // The chunk owns the inner structure from here on.
        let hub = inner.take().unwrap();
        let chunk = hub.consume(&Device::host()).unwrap().next().now_or_never().unwrap().unwrap().unwrap();
        drop(hub);
        chunk.commit().unwrap();
    });
}

/// A message that holds the egress of an earlier flow, which holds such a message.
struct Holds(#[allow(dead_code, reason = "dropped")] Option<wakeline::Egress<Holds>>);

impl Message for Holds {}

#[test]
fn egresses_may_be_nested_in_messages_to_any_depth() {
    on_a_small_stack("extremes::chains::egresses_may_be_nested_in_messages_to_any_depth", || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let mut before = None;
            for _ in 0..2_000 {
                let mut flow = Flow::new("f");
                let mut message = Some(Holds(before.take()));
                let start = flow.add("start", source(move || std::future::ready(Ok(message.take()))));
                let egress = flow.egress("out", start.output);
                flow.run().await.unwrap();
                before = Some(egress);
            }
            drop(before);
        });
    });
}

/// A user's value that is given to the library, and owns the value given before it.
type Kept = Option<Box<dyn Any + Send + Sync>>;

/// A place in the library that owns a user's value, and is owned by the next one.
type Container = (&'static str, fn(Kept) -> Kept);

fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::emulated(Emulated::new().workers(1))).clone()
}

fn kept(value: impl Any + Send + Sync) -> Kept {
    Some(Box::new(value))
}

/// A flow that is not run.
fn flow(add: impl FnOnce(&mut Flow)) -> Kept {
    let mut flow = Flow::new("f");
    add(&mut flow);
    kept(Mutex::new(flow))
}

struct Owner(Vec<u8>, #[allow(dead_code, reason = "dropped")] Kept);

impl AsMut<[u8]> for Owner {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

const KEEPERS: [Container; 17] = [
    ("the owner of a buffer", |inner| kept(Buffer::wrap(Owner(vec![0; 8], inner)).unwrap().0)),
    ("memory that was returned", |inner| {
        let (buffer, wrapped) = Buffer::wrap(Owner(vec![0; 8], inner)).unwrap();
        drop(buffer);
        kept(wrapped)
    }),
    ("a wait for memory that was returned", |inner| {
        let (buffer, wrapped) = Buffer::wrap(Owner(vec![0; 8], inner)).unwrap();
        let mut wait = Box::pin(wrapped.into_inner());
        assert!(wait.as_mut().now_or_never().is_none());
        drop(buffer);
        kept(Mutex::new(wait))
    }),
    ("a function of a graph", |inner| {
        let mut builder = Graph::builder(&device()).unwrap();
        builder.host(&[], move || _ = &inner).unwrap();
        kept(builder.build().unwrap())
    }),
    ("an instantiated graph", |inner| {
        let mut builder = Graph::builder(&device()).unwrap();
        builder.host(&[], move || _ = &inner).unwrap();
        kept(builder.build().unwrap().instantiate().unwrap())
    }),
    ("a task of a simulation", |inner| {
        let simulation = Simulation::new(0);
        drop(simulation.spawn("keeps", async move {
            let _inner = inner;
            std::future::pending::<()>().await
        }));
        kept(simulation)
    }),
    ("the output of a task", |inner| {
        let simulation = Simulation::new(0);
        let task = simulation.spawn("ends", async move { inner });
        runtime().block_on(simulation.run(std::future::ready(())));
        kept(task)
    }),
    ("a function of a simulated stream", |inner| {
        let simulation = Simulation::new(0);
        let device = Device::simulated(&simulation, Emulated::new());
        Stream::new(&device).unwrap().host_function(move || drop(inner)).unwrap();
        kept(simulation)
    }),
    ("the cause of an error", |inner| {
        #[derive(Debug)]
        struct Cause(#[allow(dead_code, reason = "dropped")] Kept);
        impl std::fmt::Display for Cause {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a cause")
            }
        }
        impl std::error::Error for Cause {}
        kept(Error::other(Cause(inner)))
    }),
    ("metadata", |inner| {
        let mut metadata = Metadata::default();
        metadata.insert("inner", inner);
        kept(metadata)
    }),
    ("an operator", |inner| {
        flow(|flow| {
            _ = flow.add("sink", sink(move |_: u32| std::future::ready(Ok(_ = &inner))));
        })
    }),
    ("a source", |inner| {
        flow(|flow| {
            let mut inner = inner.map(Host);
            _ = flow.add("source", source(move || std::future::ready(Ok(inner.take().map(|_| 1_u32)))));
        })
    }),
    ("a predicate", |inner| {
        flow(|flow| {
            let inner = Mutex::new(inner);
            let condition = predicate(move || inner.lock().is_ok());
            _ = flow.add("sink", sink(async |_: u32| Ok(()))).when(condition);
        })
    }),
    ("a function of until", |inner| {
        flow(|flow| {
            let mut inner = Some(inner);
            _ = flow.add("sink", sink(async |_: u32| Ok(()))).when(condition::until(move || {
                let inner = inner.take();
                async move { drop(inner) }
            }));
        })
    }),
    ("a message in a queue", |inner| {
        let runtime = runtime();
        let mut flow = Flow::new("f");
        let end = flow.add("end", sink(async |_: Host<Kept>| std::future::pending().await));
        let ingress = flow.ingress("in", end.input);
        let (running,) = runtime.block_on(async {
            let running = flow.spawn().unwrap();
            ingress.send(Host(None)).await.unwrap();
            ingress.send(Host(inner)).await.unwrap();
            (running,)
        });
        kept(Mutex::new((runtime, running)))
    }),
    ("a response", |inner| {
        let mut flow = Flow::new("f");
        let echo = flow.add("echo", map(async |request: Host<Kept>| Ok(request)));
        let mut service = flow.service("echoes", echo.input, echo.output);
        let (response,) = runtime().block_on(async {
            let running = flow.spawn().unwrap();
            std::future::poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
            let response = service.call(Host(inner));
            // The later request is answered, so this one is too.
            service.ask(Host(None)).await.unwrap();
            running.stop();
            running.await.unwrap();
            (response,)
        });
        kept(response)
    }),
    ("a report", |inner| {
        let mut inner = Some(inner);
        let failed = runtime().block_on(async {
            let mut flow = Flow::new("f");
            _ = flow.add(
                "fails",
                source::<u32, _, _>(move || std::future::ready(Err(Error::other(Owns(inner.take().flatten()))))),
            );
            flow.run().await.unwrap_err()
        });
        kept(failed)
    }),
];

/// A user's error.
#[derive(Debug)]
struct Owns(#[allow(dead_code, reason = "dropped")] Kept);

impl std::fmt::Display for Owns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("owns")
    }
}

impl std::error::Error for Owns {}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Wherever the library owns a user's value, that value may own another one, to any depth.
#[test]
fn user_values_may_be_nested_to_any_depth() {
    on_a_small_stack("extremes::chains::user_values_may_be_nested_to_any_depth", || {
        for (place, keep) in KEEPERS {
            println!("{place}");
            drop((0..1_000).fold(None, |inner, _| keep(inner)));
        }
    });
}

/// The number of messages that one run gathers, each with a different metadata name.
const NAMES: u32 = 30_000;

struct Names(u32);

#[derive(Ports)]
struct NamedPorts {
    #[output]
    output: Output<u32>,
}

impl Operator for Names {
    type Ports = NamedPorts;

    async fn compute(&mut self, ports: &mut NamedPorts, cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        if self.0 == NAMES {
            cx.finish();
        }
        cx.insert_metadata(format!("name {}", self.0), self.0);
        ports.output.send(self.0).await?;
        Ok(())
    }
}

struct GathersNames;

#[derive(Ports)]
struct GatherPorts {
    #[input]
    input: Input<u32>,
}

impl Operator for GathersNames {
    type Ports = GatherPorts;

    async fn compute(&mut self, ports: &mut GatherPorts, cx: &mut Cx) -> Result<()> {
        while ports.input.recv().await?.is_some() {}
        assert_eq!(cx.metadata().len(), NAMES as usize);
        Ok(())
    }
}

/// A message that is taken adds its names to those of the run. If each one copied all names, this would take minutes.
#[test]
fn metadata_of_many_messages_is_gathered_in_linear_time() {
    alone::within_bound(|| {
        let mut flow = host_only();
        let names = flow.add("names", Names(0));
        let gathers = flow.add("gathers", GathersNames);
        flow.connect(names.output, gathers.input);
        runtime().block_on(flow.run()).unwrap();
    });
}
