//! Hostile user code in messages and what travels beside them: sizes, envelopes and metadata that panic, call back and drop
//! things. Whatever they do, the flow goes on for the others.
//!
//! A body runs on a thread of its own; where it hangs, a watchdog ends the process and names it.

#![forbid(unsafe_code)]

use std::{
    fmt,
    future::{Future, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use wakeline::{
    Ingress,
    device::Emulated,
    operator::{SinkPorts, concurrent, sink, source},
    prelude::*,
};

/// Longer than any of it takes on a loaded machine.
const BOUND: Duration = Duration::from_secs(60);

/// Runs a body that must not hang.
fn within_bound(what: &'static str, body: impl Future<Output = ()> + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| runtime.block_on(body)));
        let _ = done.send(());
        outcome
    });
    if wait.recv_timeout(BOUND).is_err() {
        eprintln!("{what}: hangs");
        std::process::abort();
    }
    if let Err(panic) = thread.join().expect("it catches what its body does") {
        std::panic::resume_unwind(panic);
    }
}

/// A message whose size is computed by this.
struct Sized(u32, Option<Arc<dyn Fn() + Send + Sync>>);

impl Message for Sized {
    fn size_in_bytes(&self) -> usize {
        if let Some(act) = &self.1 {
            act();
        }
        4
    }
}

#[test]
fn a_message_that_panics_as_it_is_sent_takes_no_place() {
    within_bound("a size that panics", async {
        let mut flow = Flow::new("flow");
        let (tell, mut got) = tokio::sync::mpsc::unbounded_channel();
        let end = flow.add(
            "end",
            sink(move |message: Sized| {
                ready(tell.send(message.0).map_err(|error| Error::new(ErrorKind::Operator, error.to_string())))
            }),
        );
        let ingress = flow.ingress_with("in", end.input, Hub::bounded(2));
        let running = flow.spawn().unwrap();
        ingress.send(Sized(1, None)).await.unwrap();
        for _ in 0..4 {
            let ingress = ingress.clone();
            let sent =
                tokio::spawn(
                    async move { ingress.send(Sized(2, Some(Arc::new(|| panic!("a size that panics"))))).await },
                );
            assert!(sent.await.unwrap_err().is_panic());
        }
        for n in 3..8 {
            ingress.send(Sized(n, None)).await.unwrap();
        }
        drop(ingress);
        running.await.unwrap();
        let mut all = Vec::new();
        while let Some(n) = got.recv().await {
            all.push(n);
        }
        assert_eq!(all, [1, 3, 4, 5, 6, 7]);
    });
}

#[test]
fn a_message_may_send_another_to_its_own_ingress_as_it_is_sent() {
    within_bound("a size that sends", async {
        let mut flow = Flow::new("flow");
        let (tell, mut got) = tokio::sync::mpsc::unbounded_channel();
        let end = flow.add(
            "end",
            sink(move |message: Sized| {
                ready(tell.send(message.0).map_err(|error| Error::new(ErrorKind::Operator, error.to_string())))
            }),
        );
        let ingress: Ingress<Sized> = flow.ingress_with("in", end.input, Hub::bounded(4));
        let running = flow.spawn().unwrap();
        ingress.send(Sized(1, None)).await.unwrap();
        assert_eq!(got.recv().await, Some(1));
        let inner = ingress.clone();
        let left = AtomicUsize::new(1);
        let act = move || {
            if left.swap(0, Ordering::SeqCst) > 0 {
                assert!(inner.try_send(Sized(2, None)).is_ok());
            }
        };
        ingress.send(Sized(3, Some(Arc::new(act)))).await.unwrap();
        assert_eq!((got.recv().await, got.recv().await), (Some(2), Some(3)));
        drop(ingress);
        running.await.unwrap();
    });
}

/// Metadata that drops memory of a device's, which locks a good deal.
struct Scratch(#[allow(dead_code, reason = "dropped")] Buffer<u32>);

#[derive(Ports)]
struct TicksPorts {
    #[output]
    ticks: Output<u32>,
}

struct Ticks(u32);

impl Operator for Ticks {
    type Ports = TicksPorts;

    async fn compute(&mut self, ports: &mut TicksPorts, cx: &mut Cx) -> Result<()> {
        for _ in 0..2 {
            let scratch = Scratch(cx.alloc(64)?);
            cx.insert_metadata("scratch", scratch);
        }
        if self.0 == 1 {
            assert!(cx.remove_metadata("scratch"));
        }
        self.0 += 1;
        if self.0 == 3 {
            cx.finish();
        }
        ports.ticks.send(self.0).await
    }
}

#[test]
fn metadata_that_is_replaced_or_removed_is_dropped_with_no_lock_held() {
    within_bound("metadata that drops memory", async {
        let device = Device::emulated(Emulated::new());
        let mut flow = Flow::new("flow");
        let ticks = flow.add("ticks", Ticks(0)).on(&device);
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(ticks.ticks, end.input);
        flow.run().await.unwrap();
    });
}

#[cfg(feature = "config")]
#[test]
fn a_key_of_many_parts_is_refused() {
    let key = |parts: usize| vec!["a"; parts].join(".");
    wakeline::Config::new().set(&key(64), 1).unwrap();
    for parts in [65, 20_000] {
        let error = wakeline::Config::new().set(&key(parts), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        assert!(error.to_string().len() < 300, "{error}");
    }
}

/// A message that grows each time its size is asked for.
struct Grows(AtomicUsize);

impl Message for Grows {
    fn size_in_bytes(&self) -> usize {
        self.0.fetch_add(10, Ordering::Relaxed)
    }
}

/// Takes nothing of what it is given.
#[derive(Clone)]
struct Leaves;

impl Operator for Leaves {
    type Ports = SinkPorts<Grows>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_size_that_changes_is_counted_without_overflow() {
    within_bound("a size that grows", async {
        let mut flow = Flow::new("flow");
        let mut left = 3;
        let source = flow.add(
            "source",
            source(move || {
                left -= 1;
                ready(Ok((left > 0).then(|| Grows(AtomicUsize::new(0)))))
            }),
        );
        let leaves = flow.add("leaves", concurrent(2, Leaves));
        flow.connect(source.output, leaves.input);
        let report = flow.run().await.unwrap();
        assert_eq!(report.operator("leaves").unwrap().bytes_in, 0);
    });
}

/// Reads in each run what the run before has enqueued, and says whether it was there.
#[derive(Clone)]
struct RunsAfter(Arc<Mutex<Runs>>);

/// What the last run has enqueued, and whether each found it there.
type Runs = (Option<Buffer<u32>>, Vec<bool>);

impl Operator for RunsAfter {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let mut state = self.0.lock().unwrap();
        if let Some(before) = state.0.take() {
            let there = before.as_slice().is_ok();
            state.1.push(there);
        }
        let stream = cx.stream()?.clone();
        let mut host = Buffer::<u32>::pinned(cx.device(), 16)?;
        stream.host_function(|| (0..200).for_each(|_| thread::yield_now()))?;
        let mut there = stream.alloc::<u32>(16)?;
        stream.fill(&mut there, 1)?;
        stream.copy(&there, &mut host)?;
        cx.run_after(host.available());
        state.0 = Some(host);
        Ok(())
    }
}

#[test]
fn a_concurrent_operators_worker_runs_after_what_it_asked_for() {
    within_bound("a worker that runs after a buffer", async {
        let device = Device::emulated(Emulated::new());
        let mut flow = Flow::new("flow");
        let mut left = 6;
        let source = flow.add(
            "source",
            source(move || {
                left -= 1;
                ready(Ok((left > 0).then_some(left)))
            }),
        );
        let runs = RunsAfter(Arc::default());
        let after = flow.add("after", concurrent(1, runs.clone())).on(&device);
        flow.connect(source.output, after.input);
        flow.run().await.unwrap();
        assert_eq!(runs.0.lock().unwrap().1, [true; 4]);
    });
}

/// A cause that panics as it is shown.
#[derive(Debug)]
struct Unspeakable;

impl fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("a display that panics")
    }
}

impl std::error::Error for Unspeakable {}

/// Fails at a message with such a cause, and counts its stops.
struct Fails(bool, Arc<AtomicUsize>);

impl Operator for Fails {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        if self.0 { Err(Error::new(ErrorKind::Operator, "it failed").because(Unspeakable)) } else { Ok(()) }
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.1.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn an_error_that_panics_as_it_is_logged_skips_no_stop() {
    within_bound("an error that panics as it is logged", async {
        let _ = tracing_subscriber::fmt().with_writer(std::io::sink).try_init();
        let stops = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("flow");
        let fails = flow.add("fails", Fails(true, stops.clone()));
        let idle = flow.add("idle", Fails(false, stops.clone()));
        let (ingress, other) = (flow.ingress("in", fails.input), flow.ingress("other", idle.input));
        let running = flow.spawn().unwrap();
        ingress.send(1).await.unwrap();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Operator);
        assert_eq!(stops.load(Ordering::SeqCst), 2);
        drop(other);
    });
}
