//! Conditions: destructors that panic, answers that differ, and conditions that are added late.

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
fn conditions_whose_destructors_panic_end_with_the_flow() {
    alone("hostile_flows::conditions::conditions_whose_destructors_panic_end_with_the_flow", async {
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

/// A condition that answers each time otherwise whether it is asked last, and uses what it was given to.
struct OfTwoMinds(AtomicUsize, Box<dyn Fn() + Send + Sync>);

impl Condition for OfTwoMinds {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn asked_last(&self) -> bool {
        (self.1)();
        (self.0.fetch_add(1, Ordering::SeqCst).wrapping_mul(2_654_435_761) >> 7).is_multiple_of(3)
    }
}

#[test]
fn conditions_that_are_of_two_minds_use_what_they_were_given_to() {
    alone("hostile_flows::conditions::conditions_that_are_of_two_minds_use_what_they_were_given_to", async {
        let mut flow = Flow::new("f");
        let mut from = flow.add("from", source(|| ready(Ok(None::<u32>))));
        let given_to = Arc::new(Mutex::new(Vec::new()));
        for at in 0..60 {
            given_to.lock().unwrap().push(from.clone());
            let given_to = given_to.clone();
            let uses = move || drop(given_to.lock().unwrap()[at].clone().merge_metadata(MergePolicy::Reject));
            from = from.when(OfTwoMinds(AtomicUsize::new(at), Box::new(uses)));
        }
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        flow.run().await.unwrap();
        flow.run().await.unwrap();
        // A condition that keeps its own operator's handle is a cycle.
        drop(std::mem::take(&mut *given_to.lock().unwrap()));
    });
}

#[test]
fn a_function_of_until_and_its_future_panic_as_they_are_dropped() {
    alone("hostile_flows::conditions::a_function_of_until_and_its_future_panic_as_they_are_dropped", async {
        let (tell, mut waits) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bomb = Bomb;
        let from = flow.add("from", source(async || Ok(Some(1_u32)))).when(until(move || {
            let _ = (&bomb, tell.send(()));
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

/// Waits once, panics then, and again as it is given up.
struct PanicsTwice(usize);

impl Condition for PanicsTwice {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.0 += 1;
        assert!(self.0 == 1, "asked again");
        cx.waker().wake_by_ref();
        Status::WaitEvent
    }

    fn rest(&mut self) {
        panic!("given up");
    }
}

#[test]
fn a_condition_that_panics_as_it_is_asked_and_as_it_is_given_up_fails_its_flow() {
    alone(
        "hostile_flows::conditions::a_condition_that_panics_as_it_is_asked_and_as_it_is_given_up_fails_its_flow",
        async {
            let mut flow = Flow::new("f");
            let source = flow.add("source", source(async || Ok(Some(1_u32)))).when(PanicsTwice(0));
            let end = flow.add("end", sink(async |_: u32| Ok(())));
            flow.connect(source.output, end.input);
            let error = flow.run().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Panicked);
            assert!(error.to_string().contains("asked again"), "{error}");
        },
    );
}

/// A condition that is always there, and makes a device as it is dropped.
struct MakesADevice(Arc<AtomicUsize>);

impl Condition for MakesADevice {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.0.fetch_add(1, Ordering::SeqCst);
        Status::Ready
    }

    fn describe(&self) -> Cow<'static, str> {
        "nothing".into()
    }
}

impl Drop for MakesADevice {
    fn drop(&mut self) {
        drop(Device::emulated(Emulated::new()));
    }
}

/// Does this in its run, and ends.
struct Does(Box<dyn FnMut() + Send>);

impl Operator for Does {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        (self.0)();
        cx.finish();
        Ok(())
    }
}

#[test]
fn a_condition_that_is_added_while_the_flow_runs_is_there_in_the_next_run() {
    alone("hostile_flows::conditions::a_condition_that_is_added_while_the_flow_runs_is_there_in_the_next_run", async {
        let asked = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("f");
        let (add, added) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let does = flow.add("does", Does(Box::new(move || added.try_iter().for_each(|add| add()))));
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(does.output, end.input);
        let condition = MakesADevice(asked.clone());
        add.send(Box::new(move || drop(does.when(condition)))).unwrap();
        flow.run().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        flow.run().await.unwrap();
        assert!(asked.load(Ordering::SeqCst) > 0);
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

/// What waits for messages only by a condition is no source: a stop ends it behind those.
#[tokio::test]
async fn an_operator_that_waits_by_a_condition_has_all_messages_before_it_stops() {
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
    flow.connect_with(numbers.output, takes.input, Hub::bounded(8));
    let running = flow.spawn().unwrap();
    while sent.load(Ordering::SeqCst) < 8 {
        tokio::task::yield_now().await;
    }
    running.stop();
    gate.resume();
    let report = running.await.unwrap();
    assert_eq!((taken.load(Ordering::SeqCst), report.untaken), (8, 0));
}

/// A condition that panics as it is checked.
struct PanicsAsChecked;

impl Condition for PanicsAsChecked {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn problem(&self) -> Option<String> {
        panic!("checked")
    }
}

#[test]
fn a_condition_that_panics_as_it_is_checked_is_an_error_of_the_set_up() {
    alone("hostile_flows::conditions::a_condition_that_panics_as_it_is_checked_is_an_error_of_the_set_up", async {
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(|| ready(Ok(None::<u32>)))).when(PanicsAsChecked);
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
