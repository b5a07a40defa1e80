//! Operators, ports, runs, `stop`s and errors whose destructors panic, several at once.

use super::*;

/// An operator that ends at once and whose destructor panics.
struct Ends(#[allow(dead_code, reason = "dropped")] Bomb);

impl Operator for Ends {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

#[test]
fn operators_whose_destructors_panic_are_dropped_with_their_flow() {
    alone("hostile_flows::operators::operators_whose_destructors_panic_are_dropped_with_their_flow", async {
        let flow = || {
            let mut flow = Flow::new("f");
            for name in ["one", "other"] {
                let ends = flow.add(name, Ends(Bomb));
                let end = flow.add(format!("behind {name}"), sink(async |_: u32| Ok(())));
                flow.connect(ends.output, end.input);
            }
            flow
        };
        drop(flow());
        let mut kept = flow();
        kept.run().await.unwrap();
        drop(kept);
        // A spawned flow drops its operators when it ends. Their panics fail it.
        let error = flow().spawn().unwrap().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Panicked, "{error}");
    });
}

struct NeverStarts(tokio::sync::mpsc::UnboundedSender<()>);

impl Operator for NeverStarts {
    type Ports = SourcePorts<u32>;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        let _ = self.0.send(());
        pending().await
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn operators_whose_destructors_panic_are_dropped_with_their_runtime() {
    alone("hostile_flows::operators::operators_whose_destructors_panic_are_dropped_with_their_runtime", async {
        let (sender, mut starts) = tokio::sync::mpsc::unbounded_channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let mut running = None;
            runtime.block_on(async {
                let mut flow = Flow::new("f");
                let never = flow.add("never", NeverStarts(sender));
                let end = flow.add("end", sink(async |_: u32| Ok(())));
                flow.connect(never.output, end.input);
                // These still wait for their turn to start when the runtime ends.
                for name in ["one", "other"] {
                    let ends = flow.add(name, Ends(Bomb));
                    let end = flow.add(format!("behind {name}"), sink(async |_: u32| Ok(())));
                    flow.connect(ends.output, end.input);
                }
                running = Some(flow.spawn().unwrap());
                starts.recv().await.unwrap();
            });
            drop(runtime);
            running.unwrap()
        });
        let running = thread.join().unwrap();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
    });
}

/// Runs once. Its `stop` records the call, and fails or panics as configured.
struct Stops {
    name: &'static str,
    stopped: Arc<Mutex<Vec<&'static str>>>,
    error: Option<fn() -> Error>,
    panics: bool,
}

/// A future that is ready at once, and may panic when dropped.
struct Stopped(Option<Result<()>>, #[allow(dead_code, reason = "dropped")] Option<Bomb>);

impl Future for Stopped {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(self.0.take().unwrap())
    }
}

impl Operator for Stops {
    type Ports = ();

    async fn compute(&mut self, _: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }

    fn stop(&mut self, _: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        self.stopped.lock().unwrap().push(self.name);
        Stopped(Some(self.error.map_or(Ok(()), |error| Err(error()))), self.panics.then(|| Bomb))
    }
}

/// Runs a flow of three operators whose `stop` ends like this. Each `stop` must run.
async fn all_stop(error: Option<fn() -> Error>, panics: bool) {
    let stopped = Arc::default();
    let mut flow = Flow::new("f");
    for name in ["a", "b", "c"] {
        flow.add(name, Stops { name, stopped: Arc::clone(&stopped), error, panics });
    }
    let outcome = flow.run().await;
    assert_eq!(*stopped.lock().unwrap(), ["a", "b", "c"]);
    drop(outcome.unwrap_err());
    // The flow still has all its operators.
    drop(flow.run().await.unwrap_err());
    assert_eq!(stopped.lock().unwrap().len(), 6);
}

#[test]
fn every_stop_runs_although_their_futures_panic_when_dropped() {
    alone("hostile_flows::operators::every_stop_runs_although_their_futures_panic_when_dropped", all_stop(None, true));
}

/// A cause whose destructor panics.
#[derive(Debug)]
struct Cause(#[allow(dead_code, reason = "dropped")] Bomb);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a cause")
    }
}

impl std::error::Error for Cause {}

#[test]
fn every_stop_runs_although_their_errors_panic_when_dropped() {
    alone(
        "hostile_flows::operators::every_stop_runs_although_their_errors_panic_when_dropped",
        all_stop(Some(|| Error::other(Cause(Bomb))), false),
    );
}

/// A cause whose text panics.
#[derive(Debug)]
struct NoText;

impl std::fmt::Display for NoText {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("the text of an error panics");
    }
}

impl std::error::Error for NoText {}

#[test]
fn every_stop_runs_although_the_text_of_their_errors_panics() {
    alone("hostile_flows::operators::every_stop_runs_although_the_text_of_their_errors_panics", async {
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(std::io::sink).init();
        all_stop(Some(|| Error::other(NoText)), false).await;
    });
}

#[test]
fn operators_whose_destructors_panic_are_dropped_with_an_untaken_outcome() {
    alone("hostile_flows::operators::operators_whose_destructors_panic_are_dropped_with_an_untaken_outcome", async {
        let mut flow = Flow::new("f");
        let ends: Vec<_> = ["one", "other"].map(|name| flow.add(name, Ends(Bomb))).into();
        let (end, mut ended) = tokio::sync::mpsc::unbounded_channel::<()>();
        let (go, goes) = tokio::sync::watch::channel(false);
        for (at, ends) in ends.into_iter().enumerate() {
            let end = end.clone();
            let to = flow.add(format!("behind {at}"), Ended(end, goes.clone()));
            flow.connect(ends.output, to.input);
        }
        drop(end);
        let mut run = Box::pin(flow.run());
        assert!(futures::poll!(&mut run).is_pending());
        go.send(true).unwrap();
        // The last operator has stopped, so the outcome is ready or about to be.
        assert_eq!(ended.recv().await, Some(()));
        assert_eq!(ended.recv().await, Some(()));
        tokio::task::yield_now().await;
        drop(run);
    });
}

/// Its `stop` waits until it may go on, and then sends a message.
struct Ended(tokio::sync::mpsc::UnboundedSender<()>, tokio::sync::watch::Receiver<bool>);

impl Operator for Ended {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut SinkPorts<u32>, _: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }

    async fn stop(&mut self, _: &mut Cx) -> Result<()> {
        let _ = self.1.wait_for(|go| *go).await;
        let _ = self.0.send(());
        Ok(())
    }
}

#[test]
fn inspectors_of_sections_and_log_writers_may_panic_when_dropped() {
    alone("hostile_flows::operators::inspectors_of_sections_and_log_writers_may_panic_when_dropped", async {
        struct Writer(#[allow(dead_code, reason = "dropped")] Bomb);
        impl Write for Writer {
            fn write(&mut self, text: &[u8]) -> io::Result<usize> {
                Ok(text.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut flow = Flow::new("f");
        for at in 0..2 {
            let bomb = Bomb;
            let work = flow.add(format!("work {at}"), map(async |n: u32| Ok(n)));
            flow.replay(format!("section {at}"), &work).inspect(move |_| _ = &bomb);
        }
        drop(flow);
        let mut flow = Flow::new("f");
        let from = flow.add("from", source(|| ready(Ok(None::<u32>))));
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        let steps = flow.steps().unwrap().log_to(Writer(Bomb));
        let hub = "from.output -> to.input";
        let steps = steps.log_hub_to(hub, Writer(Bomb)).unwrap().log_hub_to(hub, Writer(Bomb)).unwrap();
        drop(steps);
        struct Hubs {
            _one: ChunkHub<u32>,
            _other: ChunkHub<u32>,
        }
        let hub = |name: &str| {
            let hub = ChunkHub::<u32>::builder(name).elements(1).host_envelopes(2).build().unwrap();
            hub.log_to(Writer(Bomb));
            hub
        };
        drop(Hubs { _one: hub("one"), _other: hub("other") });
    });
}

// A debug build asserts the lock order: it would panic if the replaced value were dropped with a lock held.
#[test]
fn an_operators_allocator_and_stream_pool_may_be_replaced() {
    let device = Device::emulated(Emulated::new());
    let mut flow = Flow::new("f");
    let mut end = flow.add("end", sink(async |_: u32| Ok(())));
    for _ in 0..2 {
        end = end
            .on(&Device::emulated(Emulated::new()))
            .allocator(&wakeline::memory::Allocator::blocks(&device, 64, 1).unwrap())
            .streams(&StreamPool::builder(&device).reserved(1).build().unwrap());
    }
    drop((flow, end));
}

#[derive(Ports)]
struct BombPorts {
    #[input]
    numbers: Input<u32>,
    #[allow(dead_code, reason = "dropped")]
    #[output]
    out: Output<u32>,
}

impl Drop for BombPorts {
    fn drop(&mut self) {
        panic!("the destructor of ports panics");
    }
}

/// Sends a message and runs for ever. The run and the operator own a bomb each.
struct RunsForEver(tokio::sync::mpsc::UnboundedSender<()>, Bomb);

impl Clone for RunsForEver {
    fn clone(&self) -> Self {
        Self(self.0.clone(), Bomb)
    }
}

impl Operator for RunsForEver {
    type Ports = BombPorts;

    async fn compute(&mut self, ports: &mut BombPorts, _: &mut Cx) -> Result<()> {
        let _own = Bomb;
        ports.numbers.take()?;
        let _ = self.0.send(());
        pending().await
    }
}

fn end_the_runtime_during_a_run(name: &str, several: bool) {
    in_a_process(name, || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut running = None;
        runtime.block_on(async {
            let (sender, mut runs) = tokio::sync::mpsc::unbounded_channel();
            let mut flow = Flow::new("f");
            let from = flow.add("from", source(async || Ok(Some(1_u32))));
            let to = flow.add("to", sink(async |_: u32| Ok(())));
            let (input, output) = if several {
                let work = flow.add("work", concurrent(1, RunsForEver(sender, Bomb)));
                (work.numbers, work.out)
            } else {
                let work = flow.add("work", RunsForEver(sender, Bomb));
                (work.numbers, work.out)
            };
            flow.connect(from.output, input);
            flow.connect(output, to.input);
            running = Some(flow.spawn().unwrap());
            runs.recv().await.unwrap();
        });
        drop(runtime);
        drop(running);
    });
}

#[test]
fn an_operator_its_ports_and_its_run_may_panic_when_the_runtime_ends() {
    end_the_runtime_during_a_run(
        "hostile_flows::operators::an_operator_its_ports_and_its_run_may_panic_when_the_runtime_ends",
        false,
    );
}

#[test]
fn a_worker_its_ports_and_its_run_may_panic_when_the_runtime_ends() {
    end_the_runtime_during_a_run(
        "hostile_flows::operators::a_worker_its_ports_and_its_run_may_panic_when_the_runtime_ends",
        true,
    );
}
