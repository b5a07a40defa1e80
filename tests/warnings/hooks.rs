//! Who is given the warnings: the hooks and the log.

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
};

use super::*;

/// A hook may do what it likes: panic, block, end the flow, take snapshots, drop the observer. The other hooks of the
/// observer are called, and so are those of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_hooks() {
    let (ended, ends) = channel::<()>();
    let ends = Mutex::new(ends);
    let (called, calls): (Sender<String>, _) = channel();
    let handle: Arc<Mutex<Option<wakeline::flow::Handle>>> = Arc::default();
    let of_hook = handle.clone();
    let own: Arc<Mutex<Option<Observe>>> = Arc::default();
    let drops = own.clone();
    let hostile = Observe::new().every(ms(1)).warn_waiting(ms(150)).on_warning(|_| panic!("on purpose")).on_warning(
        move |warning| {
            // Waits until the test has stored it.
            let handle = loop {
                match of_hook.lock().unwrap().clone() {
                    Some(handle) => break handle,
                    None => thread::yield_now(),
                }
            };
            let seen = handle.snapshot();
            let watch = drops.lock().unwrap().take();
            let of_all: usize = watch.iter().map(|watch| watch.snapshots().len()).sum();
            drop(watch);
            handle.abort();
            let _ = called.send(format!("{} {of_all} {}", seen.warnings.len(), of(warning)[0]));
            // Blocks until the flow has ended.
            let _ = ends.lock().unwrap().recv();
        },
    );
    let (other, of_other) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("hostile");
    chain(&mut flow, source(pending), &[]);
    flow.observe(&hostile);
    flow.observe(&other);
    *own.lock().unwrap() = Some(hostile);
    let running = flow.spawn().unwrap();
    *handle.lock().unwrap() = Some(running.handle());
    assert!(running.await.unwrap_err().is_cancelled());
    assert_eq!(calls.recv().unwrap(), "1 1 read");
    assert_eq!(of(&next(&of_other)), ["read"]);
    drop(ended);
}

/// A hook that may abort its flow owns a handle of it. It is dropped when the flow has ended, or is cut off by the end of
/// its runtime.
#[test]
fn a_hook_that_owns_a_handle_of_its_flow_is_dropped_with_that() {
    for is_cut_off in [false, true] {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let handle: Arc<Mutex<Option<wakeline::flow::Handle>>> = Arc::default();
        let (of_hook, owned) = (handle.clone(), Arc::downgrade(&handle));
        let watch = Observe::new().on_warning(move |_| {
            if let Some(handle) = &*of_hook.lock().unwrap() {
                handle.abort();
            }
        });
        let (begun, begins) = oneshot::channel();
        let mut begun = Some(begun);
        let mut flow = Flow::new("owned");
        let numbers = source(move || {
            let _ = begun.take().map(|begun| begun.send(()));
            pending()
        });
        chain(&mut flow, numbers, &[]);
        flow.observe(&watch);
        let inside = runtime.enter();
        let running = flow.spawn().unwrap();
        *handle.lock().unwrap() = Some(running.handle());
        drop((inside, handle, watch));
        runtime.block_on(begins).unwrap();
        if !is_cut_off {
            runtime.block_on(end(running));
        }
        drop(runtime);
        // The thread that samples may still be at work on it.
        let since = Instant::now();
        while owned.strong_count() > 0 {
            assert!(since.elapsed() < Duration::from_secs(60), "it is not dropped, cut off: {is_cut_off}");
            thread::yield_now();
        }
    }
}

/// The lines of the log that are about this flow.
#[derive(Clone)]
struct Lines(Sender<String>, &'static str);

struct Text(String, bool, &'static str);

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.1 |= field.name() == "flow" && value == self.2;
        self.0.push_str(&format!("{}={value} ", field.name()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut text = Text(format!("{} {} ", event.metadata().level(), event.metadata().target()), false, self.1);
        event.record(&mut text);
        if text.1 {
            let _ = self.0.send(text.0);
        }
    }
}

/// In a process of its own: it receives what the whole process logs.
#[test]
fn a_warning_is_logged_once() {
    let test = thread::current();
    common::alone::in_a_process(test.name().unwrap(), || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(is_logged_once());
    });
}

async fn is_logged_once() {
    let (line, lines) = channel();
    tracing::subscriber::set_global_default(Registry::default().with(Lines(line, "logged"))).unwrap();
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("logged");
    chain(&mut flow, source(pending), &[]);
    flow.observe(&watch);
    // Only the first observer of a flow logs.
    flow.observe(&Observe::new().every(ms(1)).warn_waiting(ms(150)));
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    let line = lines.recv().unwrap();
    assert!(line.starts_with("WARN wakeline::observe "), "{line}");
    assert!(line.contains(" flow=logged kind=waiting operator=read "), "{line}");
    assert!(line.contains(&warning.sentence), "{line}");
    snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(400))).await;
    assert_eq!(lines.try_iter().count(), 0, "it is one occurrence");
    end(running).await;

    // Other lines are about the ends of flows, or about a thread that this process was not given in time.
    let warned = |what: &str| lines.iter().find(|line| line.starts_with("WARN ") && line.contains(what)).unwrap();
    // An operator that blocks a thread.
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = super::watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("logged");
    let passes = block.clone();
    let blocks = source(move || {
        passes.pass();
        pending()
    });
    chain(&mut flow, blocks, &[]);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    let line = warned(" kind=blocked operator=read ");
    assert!(line.starts_with("WARN wakeline::observe "), "{line}");
    assert!(line.contains(&warning.sentence), "{line}");
    drop(held);
    end(running).await;

    // A stall is logged where it is detected, whether the flow is observed or not.
    let mut flow = Flow::new("logged");
    super::stalls::stalls(&mut flow);
    flow.set_on_stall(OnStall::Warn);
    let running = flow.spawn().unwrap();
    let line = warned("operators have stalled");
    assert!(line.starts_with("WARN wakeline::flow"), "{line}");
    assert!(line.contains("`back` waits for a message in hub `join.out -> back.input`"), "{line}");
    end(running).await;
}
