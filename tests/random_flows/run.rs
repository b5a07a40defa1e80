//! Runs one seed, checks what is left, and reports failures.

use std::{
    cell::RefCell,
    fmt::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    rc::Rc,
    task::Poll,
    time::Duration,
};

use wakeline::{device::Simulation, flow::Handle, prelude::*};

use super::{
    by_hand::{self, ByHand},
    chunks::Chunks,
    data::{World, world},
    flow,
    hostile::{Hostile, ON_PURPOSE},
    loops::Loops,
    plan::{Limits, Plan},
    services::Services,
};

/// More steps than any plan needs.
const STEPS: usize = 400_000;
/// Longer than any plan takes, on tokio's paused clock.
const TIME: Duration = Duration::from_secs(100);

pub(crate) enum Verdict {
    Holds,
    Fails(Box<Failure>),
}

pub(crate) struct Failure {
    pub(crate) seed: u64,
    limits: Limits,
    plan: String,
    what: Vec<String>,
    log: Vec<String>,
}

/// Collects what wakeline logs as an error on this thread: an error in a `Drop` can only be logged.
#[derive(Default)]
struct Errors;

thread_local! {
    static ERRORS: RefCell<Vec<String>> = RefCell::default();
}

impl tracing::Subscriber for Errors {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn fmt::Debug) {
                let _ = write!(self.0, "{field}: {value:?}; ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        ERRORS.with_borrow_mut(|errors| errors.push(text.0));
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

enum Scenario {
    Flow(Plan),
    ByHand(ByHand),
    Chunks(Chunks),
    Services(Services),
    Hostile(Hostile),
    Loops(Loops),
}

impl Scenario {
    /// Five seeds of ten are not a flow from a [`Plan`].
    fn new(seed: u64, limits: Limits) -> Self {
        match seed % 10 {
            2 => Self::Hostile(Hostile::new(seed, limits)),
            4 => Self::ByHand(ByHand::new(seed, limits)),
            5 => Self::Loops(Loops::new(seed, limits)),
            7 => Self::Services(Services::new(seed, limits)),
            9 => Self::Chunks(Chunks::new(seed, limits)),
            _ => Self::Flow(Plan::new(seed, limits)),
        }
    }

    /// Returns the findings. First everything ends, work outside a flow included.
    async fn run(&self, simulation: &Simulation) -> Vec<String> {
        match self {
            Self::Flow(plan) => {
                let ran = run_flow(plan, simulation).await;
                settle_and_judge(ran, simulation, |ran| &ran.devices, |ran| flow::judge(plan, ran)).await
            }
            Self::Chunks(plan) => {
                let ran = in_bounds(simulation, plan.run(simulation)).await.map_err(|why| vec![why]);
                settle_and_judge(ran, simulation, |ran| &ran.devices, |ran| plan.judge(ran)).await
            }
            Self::Services(plan) => {
                let ran = in_bounds(simulation, plan.run(simulation)).await.map_err(|why| vec![why]);
                settle_and_judge(ran, simulation, |ran| &ran.devices, |ran| plan.judge(ran)).await
            }
            Self::Loops(plan) => {
                let ran = in_bounds(simulation, plan.run(simulation)).await.map_err(|why| vec![why]);
                settle_and_judge(ran, simulation, |ran| &ran.devices, |ran| plan.judge(ran)).await
            }
            Self::Hostile(plan) => {
                let ran = in_bounds(simulation, plan.run(simulation)).await.map_err(|why| vec![why]);
                settle_and_judge(ran, simulation, |ran| &ran.0, |(devices, failed)| by_hand::judge(devices, failed))
                    .await
            }
            Self::ByHand(plan) => {
                let ran = in_bounds(simulation, plan.run(simulation)).await.map_err(|why| vec![why]);
                settle_and_judge(ran, simulation, |ran| &ran.0, |(devices, failed)| by_hand::judge(devices, failed))
                    .await
            }
        }
    }
}

async fn settle_and_judge<R>(
    ran: Result<R, Vec<String>>,
    simulation: &Simulation,
    devices: impl FnOnce(&R) -> &[Device],
    judge: impl FnOnce(&R) -> Vec<String>,
) -> Vec<String> {
    let ran = match ran {
        Ok(ran) => ran,
        Err(found) => return found,
    };
    let devices = devices(&ran);
    let mut found = Vec::new();
    // Memory for a user is kept until it is claimed.
    for wrapped in world(|world| std::mem::take(&mut world.wrapped)) {
        match in_bounds(simulation, wrapped.into_inner()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) if error.is_device_lost() && devices.iter().any(|device| device.lost().is_some()) => {}
            Ok(Err(error)) => found.push(format!("user memory was not returned: {error:#}")),
            Err(why) => found.push(format!("user memory was not returned: {why}")),
        }
    }
    let settles = async {
        while !is_settled(devices, simulation) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let settled = in_bounds(simulation, settles).await;
    found.append(&mut judge(&ran));
    if settled.is_err() {
        let tasks = simulation.unfinished();
        let memory: Vec<_> = devices
            .iter()
            .map(|device| (device.memory_stats().to_string(), device.pinned_memory_stats().to_string()))
            .collect();
        let streams: Vec<_> = devices.iter().map(streams_in_use).collect();
        found.push(format!("left behind: tasks {tasks:?}, memory {memory:?}, streams {streams:?}"));
    }
    found
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flow(plan) => plan.fmt(f),
            Self::Chunks(plan) => write!(f, "  {plan:?}"),
            Self::Services(plan) => write!(f, "  {plan:?}"),
            Self::Loops(plan) => plan.fmt(f),
            Self::Hostile(plan) => {
                write!(f, "  {plan:?}")?;
                world(|world| world.done.iter().try_for_each(|done| write!(f, "\n    {done}")))
            }
            Self::ByHand(plan) => {
                write!(f, "  {plan:?}")?;
                world(|world| world.done.iter().try_for_each(|done| write!(f, "\n    {done}")))
            }
        }
    }
}

fn run(scenario: &Scenario, seed: u64) -> (Vec<String>, Vec<String>) {
    world(|world| *world = World::default());
    ERRORS.with_borrow_mut(Vec::clear);
    let _errors = tracing::subscriber::set_default(Errors);
    let simulation = Simulation::new(seed);
    let found = catch_unwind(AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime of one thread").block_on(scenario.run(&simulation))
    }));
    let mut found = found.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        vec![format!("panicked: {}", text.unwrap_or_default())]
    });
    let log = simulation.log();
    drop(simulation);
    ERRORS.with_borrow_mut(|errors| {
        // Faults log an error; `judge` reports a lost device without a fault. A deliberate panic is logged where it
        // ends.
        found.extend(
            errors
                .drain(..)
                .filter(|error| !error.contains("device lost") && !error.contains(ON_PURPOSE))
                .map(|error| format!("logged: {error:#}")),
        );
    });
    (found, log)
}

async fn run_flow(plan: &Plan, simulation: &Simulation) -> Result<flow::Ran, Vec<String>> {
    let handle: Rc<RefCell<Option<Handle>>> = Rc::default();
    let watch = handle.clone();
    let flow = flow::run(plan, simulation, move |handle| *watch.borrow_mut() = Some(handle));
    in_bounds(simulation, flow).await.map_err(|why| {
        let status = handle.borrow().as_ref().map(Handle::status).unwrap_or_default();
        [why].into_iter().chain(status.iter().map(|operator| format!("  {operator:?}"))).collect()
    })
}

fn is_at_rest(device: &Device) -> bool {
    device.memory_stats().is_at_rest() && device.pinned_memory_stats().is_at_rest()
}

fn streams_in_use(device: &Device) -> usize {
    StreamPool::default_of(device).map_or(0, |pool| pool.in_use())
}

fn is_settled(devices: &[Device], simulation: &Simulation) -> bool {
    simulation.unfinished().is_empty() && devices.iter().all(|device| is_at_rest(device) && streams_in_use(device) == 0)
}

/// Runs a future that must end before long.
async fn in_bounds<T>(simulation: &Simulation, what: impl Future<Output = T>) -> Result<T, String> {
    let mut run = pin!(tokio::time::timeout(TIME, simulation.run(what)));
    std::future::poll_fn(|task| match run.as_mut().poll(task) {
        Poll::Ready(Ok(output)) => Poll::Ready(Ok(output)),
        Poll::Ready(Err(_)) => {
            let unfinished = simulation.unfinished().join(", ");
            Poll::Ready(Err(format!("hung: it did not end within {TIME:?}; unfinished: {unfinished}")))
        }
        Poll::Pending if simulation.steps() > STEPS => Poll::Ready(Err("exceeded the limit of steps".into())),
        Poll::Pending => Poll::Pending,
    })
    .await
}

pub(crate) fn seed(seed: u64, limits: Limits) -> Verdict {
    let scenario = Scenario::new(seed, limits);
    let (what, log) = run(&scenario, seed);
    if what.is_empty() {
        return Verdict::Holds;
    }
    Verdict::Fails(Box::new(Failure { seed, limits, plan: scenario.to_string(), what, log }))
}

/// The findings in a flow with loops that is stopped at a random moment, and its plan.
pub(crate) fn stopped(seed: u64) -> (Vec<String>, String) {
    let scenario = Scenario::Loops(Loops::stopped(seed));
    (run(&scenario, seed).0, scenario.to_string())
}

pub(crate) fn log(seed: u64) -> Vec<String> {
    let (found, mut log) = run(&Scenario::new(seed, Limits::default()), seed);
    log.extend(found);
    log
}

pub(crate) fn show(seed: u64) {
    let scenario = Scenario::new(seed, Limits::default());
    let (_, log) = run(&scenario, seed);
    println!("seed {seed}:\n{scenario}");
    log.iter().for_each(|line| println!("    {line}"));
}

impl Failure {
    pub(crate) fn first(&self) -> String {
        self.what.first().map(|what| what.replace('\n', " ").chars().take(160).collect()).unwrap_or_default()
    }

    /// The failure, and the smallest flow that fails, for people.
    pub(crate) fn explained(&self) -> String {
        let mut text = format!("{self}");
        let smaller = (1..=self.limits.operators)
            .flat_map(|operators| (1..=self.limits.messages).map(move |messages| Limits { operators, messages }));
        for limits in smaller.filter(|limits| *limits != self.limits) {
            if let Verdict::Fails(failure) = seed(self.seed, limits) {
                let _ = write!(text, "\n\nthe smallest of this seed that fails, with {limits:?}:\n{failure}");
                break;
            }
        }
        text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} failed:", self.seed)?;
        self.what.iter().try_for_each(|what| writeln!(f, "  - {what}"))?;
        writeln!(f, "{}", self.plan)?;
        writeln!(f, "  the last of {} steps:", self.log.len())?;
        let last = self.log.len().saturating_sub(25);
        self.log[last..].iter().try_for_each(|line| writeln!(f, "    {line}"))?;
        write!(
            f,
            "again: WAKELINE_SEEDS={} cargo test -p wakeline-tests --test random_flows random_flows -- --nocapture",
            self.seed
        )
    }
}
