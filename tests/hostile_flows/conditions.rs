//! Conditions whose methods or destructors panic, whose answers vary, or that are added late.

use super::*;

struct Never(#[allow(dead_code, reason = "dropped")] Bomb);

impl Condition for Never {
    fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
        Status::Never
    }

    fn describe(&self) -> Cow<'static, str> {
        "nothing".into()
    }
}

#[test]
fn conditions_whose_destructors_panic_are_dropped_with_the_flow() {
    alone("hostile_flows::conditions::conditions_whose_destructors_panic_are_dropped_with_the_flow", async {
        let flow = || {
            let mut flow = Flow::new("f");
            let source = flow.add("source", source(async || Ok(Some(1_u32)))).when(Never(Bomb)).when(Never(Bomb));
            let end = flow.add("end", sink(async |_: u32| Ok(())));
            flow.connect(source.output, end.input);
            flow
        };
        flow().spawn().unwrap().await.unwrap();
        flow().run().await.unwrap();
        drop(flow());
    });
}

/// A condition whose `is_polled_last` varies from call to call, and which uses the handle of its own operator.
struct Inconsistent(AtomicUsize, Box<dyn Fn() + Send + Sync>);

impl Condition for Inconsistent {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn is_polled_last(&self) -> bool {
        (self.1)();
        (self.0.fetch_add(1, Ordering::SeqCst).wrapping_mul(2_654_435_761) >> 7).is_multiple_of(3)
    }
}

#[test]
fn inconsistent_conditions_may_use_their_own_operator() {
    alone("hostile_flows::conditions::inconsistent_conditions_may_use_their_own_operator", async {
        let mut flow = Flow::new("f");
        let mut from = flow.add("from", source(|| ready(Ok(None::<u32>))));
        let handles = Arc::new(Mutex::new(Vec::new()));
        for at in 0..60 {
            handles.lock().unwrap().push(from.clone());
            let handles = handles.clone();
            let use_handle = move || drop(handles.lock().unwrap()[at].clone().merge_metadata(MergePolicy::Reject));
            from = from.when(Inconsistent(AtomicUsize::new(at), Box::new(use_handle)));
        }
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        flow.run().await.unwrap();
        flow.run().await.unwrap();
        // A condition that keeps the handle of its own operator is a reference cycle.
        drop(std::mem::take(&mut *handles.lock().unwrap()));
    });
}

#[test]
fn the_function_of_until_and_its_future_may_panic_when_dropped() {
    alone("hostile_flows::conditions::the_function_of_until_and_its_future_may_panic_when_dropped", async {
        let (sender, mut waits) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bomb = Bomb;
        let from = flow.add("from", source(async || Ok(Some(1_u32)))).when(until(move || {
            let _ = (&bomb, sender.send(()));
            async {
                let _own = Bomb;
                pending::<()>().await;
            }
        }));
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        let running = flow.spawn().unwrap();
        waits.recv().await.unwrap();
        running.abort();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
    });
}

/// Waits at the first poll, panics at the second, and panics again in `rest`.
struct PanicsTwice(usize);

impl Condition for PanicsTwice {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.0 += 1;
        assert!(self.0 == 1, "polled again");
        cx.waker().wake_by_ref();
        Status::WaitEvent
    }

    fn stop_waiting(&mut self) {
        panic!("released");
    }
}

#[test]
fn a_condition_that_panics_in_its_poll_and_in_rest_fails_its_flow() {
    alone("hostile_flows::conditions::a_condition_that_panics_in_its_poll_and_in_rest_fails_its_flow", async {
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(async || Ok(Some(1_u32)))).when(PanicsTwice(0));
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(source.output, end.input);
        let error = flow.run().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Panicked);
        assert!(error.to_string().contains("polled again"), "{error}");
    });
}

/// A condition that is always ready, and creates a device when dropped.
struct CreatesADeviceWhenDropped(Arc<AtomicUsize>);

impl Condition for CreatesADeviceWhenDropped {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.0.fetch_add(1, Ordering::SeqCst);
        Status::Ready
    }

    fn describe(&self) -> Cow<'static, str> {
        "nothing".into()
    }
}

impl Drop for CreatesADeviceWhenDropped {
    fn drop(&mut self) {
        drop(Device::emulated(Emulated::new()));
    }
}

/// Runs a closure in its only run.
struct RunsClosure(Box<dyn FnMut() + Send>);

impl Operator for RunsClosure {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        (self.0)();
        cx.finish();
        Ok(())
    }
}

#[test]
fn a_condition_that_is_added_while_the_flow_runs_applies_to_the_next_run() {
    alone("hostile_flows::conditions::a_condition_that_is_added_while_the_flow_runs_applies_to_the_next_run", async {
        let polls = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("f");
        let (add, added) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let does = flow.add("does", RunsClosure(Box::new(move || added.try_iter().for_each(|add| add()))));
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(does.output, end.input);
        let condition = CreatesADeviceWhenDropped(polls.clone());
        add.send(Box::new(move || drop(does.when(condition)))).unwrap();
        flow.run().await.unwrap();
        assert_eq!(polls.load(Ordering::SeqCst), 0);
        flow.run().await.unwrap();
        assert!(polls.load(Ordering::SeqCst) > 0);
    });
}

#[derive(Ports)]
struct OptionalPorts {
    #[input(optional)]
    input: Input<u32>,
}

struct Takes(Arc<AtomicUsize>);

impl Operator for Takes {
    type Ports = OptionalPorts;

    async fn compute(&mut self, ports: &mut OptionalPorts, _: &mut Cx) -> Result<()> {
        self.0.fetch_add(ports.input.try_take()?.into_iter().len(), Ordering::SeqCst);
        Ok(())
    }
}

/// An operator that waits for messages only by a condition is not a source: a stop ends it after its messages.
#[tokio::test]
async fn an_operator_that_waits_by_a_condition_takes_all_messages_before_it_stops() {
    let taken = Arc::new(AtomicUsize::new(0));
    let gate = Gate::paused();
    let mut flow = Flow::new("f");
    let takes = flow.add("takes", Takes(taken.clone())).when(gate.clone());
    let takes = takes.clone().when(at_least(takes.input, 1));
    let (mut next, sent) = (0..8, Arc::new(AtomicUsize::new(0)));
    let sends = sent.clone();
    let numbers = flow.add(
        "numbers",
        source(move || {
            sends.fetch_add(1, Ordering::SeqCst);
            ready(Ok(next.next()))
        }),
    );
    flow.connect_with(numbers.output, takes.input, HubOptions::bounded(8));
    let running = flow.spawn().unwrap();
    while sent.load(Ordering::SeqCst) < 8 {
        tokio::task::yield_now().await;
    }
    running.stop();
    gate.resume();
    let report = running.await.unwrap();
    assert_eq!((taken.load(Ordering::SeqCst), report.untaken), (8, 0));
}

struct PanicsInCheck;

impl Condition for PanicsInCheck {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn problem(&self) -> Option<String> {
        panic!("checked")
    }
}

#[test]
fn a_condition_that_panics_in_its_check_is_a_setup_error() {
    alone("hostile_flows::conditions::a_condition_that_panics_in_its_check_is_a_setup_error", async {
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(|| ready(Ok(None::<u32>)))).when(PanicsInCheck);
        let sink = flow.add("sink", sink(|_: u32| ready(Ok(()))));
        flow.connect(source.output, sink.input);
        for error in [flow.check().unwrap_err(), flow.run().await.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Setup);
            let text = error.to_string();
            assert!(
                text.contains("operator `source` has a condition that panicked as it was checked: checked"),
                "{text}"
            );
        }
    });
}
