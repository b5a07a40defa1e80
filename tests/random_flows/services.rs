//! A service whose operator keeps state in a cycle: clients that send requests, some of which are dropped, and an
//! operator that answers at once, late, with a refusal or not at all.
//!
//! ```text
//!   clients ──> [ front ] ──> core ──> [ split ══> join ] ──> clients
//!                              ^ │ state
//!                              │ v
//!                             look
//! ```
//!
//! Each request has exactly one answer, known from the plan; and replies that circulate belong only to requests in
//! flight.

use wakeline::{
    Inputs, Message as _, Service, Stream,
    device::Simulation,
    operator::{MapPorts, Reply},
    prelude::*,
};

use super::{
    by_hand,
    data::{Message, world, wrong},
    operators::{patiently, turns},
    plan::{Dice, Ending, Fault, Limits},
};

#[derive(Clone, Debug)]
pub(crate) struct Services {
    seed: u64,
    fault: Option<Fault>,
    clients: Vec<u32>,
    /// The maximum number of turns that a client sometimes waits.
    patience: usize,
    places: usize,
    limit: Option<usize>,
    front: bool,
    on_device: bool,
    state_first: bool,
    /// Sends the state before the response.
    state_sent_first: bool,
    /// It assigns each message to the requests that it answers; otherwise everything it sends belongs to everything it
    /// took.
    says_which: bool,
    split: bool,
    ending: Ending,
}

pub(crate) struct Ran {
    pub(crate) devices: Vec<Device>,
    outcome: Option<Result<wakeline::Report>>,
    answers: Vec<(Request, Answer)>,
}

/// The client, and the index of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    client: u32,
    number: u32,
}

/// A caller's result; `None` if it dropped the request.
type Answer = Option<Result<u64>>;

/// A message with a destructor that also drops other things.
#[derive(wakeline::Message)]
struct Parcel {
    request: Request,
    luggage: Option<Luggage>,
}

struct Luggage {
    buffer: Option<Buffer<u32>>,
    stream: Stream,
}

/// Enqueues work, and drops the memory that the work uses.
impl Drop for Luggage {
    fn drop(&mut self) {
        if let Some(mut buffer) = self.buffer.take() {
            // A lost device is reported elsewhere.
            let _ = self.stream.fill(&mut buffer, 7_u32);
            drop(self.stream.completed());
        }
    }
}

/// The fate of a request if the operator assigns messages to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answered,
    /// Answered twice, with different values: the first one counts.
    Twice,
    Late,
    Refused,
    RefusedLate,
    Dropped,
}

impl Request {
    fn answer(self) -> u64 {
        (u64::from(self.client) << 32 | u64::from(self.number)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn fate(self) -> Fate {
        match self.answer() >> 61 {
            0 => Fate::Refused,
            1 => Fate::RefusedLate,
            2 => Fate::Dropped,
            3 => Fate::Late,
            4 => Fate::Twice,
            _ => Fate::Answered,
        }
    }
}

impl Services {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        let clients = (0..dice.between(1, limits.operators)).map(|_| 1 + dice.up_to(limits.messages as usize) as u32);
        let clients = clients.collect();
        let fault = dice.one_in(5).then(|| match dice.up_to(2) {
            0 => Fault::Trap("count", 1 + dice.up_to(12) as u64),
            1 => Fault::Copy(1 + dice.up_to(12) as u64),
            _ => Fault::Alloc(1 + dice.up_to(12) as u64),
        });
        let after = dice.up_to(120) as u32;
        Self {
            seed,
            fault,
            clients,
            patience: dice.up_to(30),
            places: 1 + dice.up_to(3),
            limit: dice.one_in(3).then(|| 1 + dice.up_to(3)),
            front: dice.one_in(2),
            on_device: dice.one_in(2),
            state_first: dice.one_in(2),
            state_sent_first: dice.one_in(2),
            says_which: dice.one_in(2),
            split: dice.one_in(2),
            ending: match dice.up_to(11) {
                0 => Ending::Stop(after),
                1 => Ending::Abort(after),
                2 => Ending::Drop(after),
                _ => Ending::ByItself,
            },
        }
    }

    pub(crate) async fn run(&self, simulation: &Simulation) -> Ran {
        let device = by_hand::open(simulation, self.fault);
        let devices = vec![device.clone()];
        let mut ran = Ran { devices, outcome: None, answers: Vec::new() };
        let (flow, service) = self.build(&device, simulation);
        let service = match self.limit {
            Some(limit) => service.limit(limit),
            None => service,
        };
        let clients: Vec<_> = self
            .clients
            .iter()
            .enumerate()
            .map(|(client, count)| {
                let dice = Dice::new(self.seed.wrapping_mul(41) + client as u64);
                let client = Client { service: service.clone(), client: client as u32, dice, device: device.clone() };
                simulation.spawn(format!("client {}", client.client), client.asks(*count, self.patience))
            })
            .collect();
        drop(service);
        let running = match flow.spawn() {
            Ok(running) => running,
            Err(error) => {
                ran.outcome = Some(Err(error));
                return ran;
            }
        };
        ran.outcome = match self.ending {
            Ending::ByItself => Some(running.await),
            Ending::Stop(after) => {
                turns(after).await;
                running.stop();
                Some(running.await)
            }
            Ending::Abort(after) => {
                turns(after).await;
                running.abort();
                Some(running.await)
            }
            Ending::Drop(after) => {
                turns(after).await;
                drop(running);
                None
            }
        };
        for client in clients {
            match client.await {
                Ok(answers) => ran.answers.extend(answers),
                Err(unfinished) => wrong(format!("a client did not end: {unfinished}")),
            }
        }
        ran
    }

    fn build(&self, device: &Device, simulation: &Simulation) -> (Flow, Service<Parcel, u64>) {
        let mut flow = Flow::new(format!("seed {}", self.seed));
        let (late, mut refused) = tokio::sync::mpsc::unbounded_channel::<(Request, Reply)>();
        let core = Core {
            plan: self.clone(),
            runs: 0,
            near: device.clone(),
            late,
            dice: Dice::new(self.seed.wrapping_mul(43)),
        };
        let mut dice = Dice::new(self.seed.wrapping_mul(47));
        drop(simulation.spawn("refuses late", async move {
            while let Some((request, reply)) = refused.recv().await {
                turns(dice.up_to(30) as u32).await;
                reply.fail(refusal(request));
            }
        }));
        let mut core = flow.add("core", core);
        let look = flow.add("look", Look { callers: self.clients.len(), says_which: self.says_which });
        if self.on_device {
            core = core.on(device);
        }
        flow.connect_with(core.next, look.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect_with(look.output, core.state, HubOptions::bounded(1).envelope_bytes(16));
        let mut from = core.responses;
        if self.split {
            let (split, join) = (flow.add("split", Split), flow.add("join", Join));
            flow.connect(from, split.input);
            flow.connect(split.one, join.parts);
            flow.connect(split.other, join.parts);
            from = join.output;
        }
        let mut to = core.requests;
        if self.front {
            let front = flow.add("front", wakeline::operator::map(async |parcel: Parcel| Ok(parcel)));
            flow.connect(front.output, to);
            to = front.input;
        }
        let service = flow.service_with("service", to, from, HubOptions::bounded(self.places));
        (flow, service)
    }

    pub(crate) fn judge(&self, ran: &Ran) -> Vec<String> {
        let lost = ran.devices.iter().any(|device| device.lost().is_some());
        let explained = |kind: ErrorKind| match kind {
            ErrorKind::DeviceLost => lost,
            ErrorKind::OutOfMemory => lost || matches!(self.fault, Some(Fault::Alloc(_))),
            ErrorKind::Cancelled => matches!(self.ending, Ending::Abort(_) | Ending::Drop(_)),
            _ => false,
        };
        let mut failed = Vec::new();
        if let Some(Err(error)) = &ran.outcome
            && !explained(error.kind())
        {
            failed.push(format!("the flow failed: {error:#}"));
        }
        for (request, answer) in &ran.answers {
            let fate = if self.says_which { request.fate() } else { Fate::Answered };
            let right = match answer {
                None => true,
                Some(Ok(answer)) => {
                    *answer == request.answer() && matches!(fate, Fate::Answered | Fate::Twice | Fate::Late)
                }
                Some(Err(error)) => match error.kind() {
                    // A stopped flow does not wait for a reply that is held outside it.
                    ErrorKind::Unanswered => {
                        fate == Fate::Dropped || (fate == Fate::RefusedLate && matches!(self.ending, Ending::Stop(_)))
                    }
                    ErrorKind::Usage => {
                        matches!(fate, Fate::Refused | Fate::RefusedLate)
                            && error.to_string() == refusal(*request).to_string()
                    }
                    // In a stopped flow the request may have been in time or not.
                    ErrorKind::Closed => matches!(self.ending, Ending::Stop(_)),
                    kind => explained(kind),
                },
            };
            if !right {
                failed.push(format!("{request:?}, {fate:?}, got {answer:?} instead of {}", request.answer()));
            }
            if let Some(Err(error)) = answer
                && ["operator", "simulated", "core"].iter().any(|inside| error.to_string().contains(inside))
            {
                failed.push(format!("{request:?} got internal names: {error}"));
            }
        }
        by_hand::judge(&ran.devices, &failed)
    }
}

fn refusal(request: Request) -> Error {
    Error::new(ErrorKind::Usage, format!("{request:?} is refused"))
}

struct Client {
    service: Service<Parcel, u64>,
    client: u32,
    dice: Dice,
    device: Device,
}

impl Client {
    async fn asks(mut self, count: u32, patience: usize) -> Vec<(Request, Answer)> {
        let mut answers = Vec::new();
        for number in 0..count {
            turns(self.dice.up_to(9) as u32).await;
            let request = Request { client: self.client, number };
            let luggage = if self.dice.one_in(3) { self.luggage() } else { None };
            let asked = self.service.ask(Parcel { request, luggage });
            let answer = match self.dice.up_to(3) {
                0 => patiently(self.dice.up_to(patience) as u32, asked).await,
                _ => Some(asked.await),
            };
            answers.push((request, answer));
        }
        answers
    }

    /// `None` if a fault is planned or has happened.
    fn luggage(&self) -> Option<Luggage> {
        let stream = Stream::new(&self.device).ok()?;
        Some(Luggage { buffer: Buffer::new(&self.device, 8).ok(), stream })
    }
}

#[derive(Ports)]
struct CorePorts {
    #[input]
    requests: Input<Parcel>,
    #[input(optional)]
    state: Input<Message>,
    #[output]
    responses: Output<u64>,
    /// There is room: the previous state has been taken.
    #[output(optional)]
    next: Output<Message>,
}

/// Counts its runs, in a message that it sends to itself.
struct Core {
    plan: Services,
    runs: u32,
    near: Device,
    /// Replies to refuse later.
    late: tokio::sync::mpsc::UnboundedSender<(Request, Reply)>,
    dice: Dice,
}

/// Checks how often the state has been counted, and counts it once more.
#[kernel]
fn count(state: &mut [u32], runs: u32) {
    if let Some(what) = counted(state, runs) {
        world(|world| world.wrong_on_devices.push(what));
    }
}

fn counted(state: &mut [u32], runs: u32) -> Option<String> {
    let what = (state.iter().any(|word| *word != runs)).then(|| format!("the state is not of run {runs}: {state:?}"));
    state.fill(runs + 1);
    what
}

impl Core {
    async fn state(&mut self, ports: &mut CorePorts, cx: &mut Cx) -> Result<Option<Message>> {
        if self.runs > 0 {
            let state = ports.state.recv().await?;
            if state.is_none() && cx.flow().failure().is_none() {
                wrong("the state was lost".into());
            }
            return Ok(state);
        }
        let mut state = match self.plan.on_device {
            true => Buffer::new(cx.device(), 4)?,
            false => Buffer::pinned(&self.near, 4)?,
        };
        if self.plan.on_device {
            cx.stream()?.fill(&mut state, 0_u32)?;
        } else {
            state.write().await?.fill(0);
        }
        Ok(Some(state.into()))
    }

    async fn counted(&mut self, state: &mut Message, cx: &mut Cx) -> Result<()> {
        if self.plan.on_device {
            count::launch(cx.stream()?, state, self.runs)?;
        } else {
            counted(state.write().await?, self.runs).into_iter().for_each(wrong);
        }
        self.runs += 1;
        Ok(())
    }

    /// Sends the state on, which answers no request.
    async fn goes_on(&mut self, state: Message, ports: &mut CorePorts) -> Result<()> {
        match self.plan.says_which {
            true => Ok(ports.next.send_for(Reply::default(), state).await?),
            false => Ok(ports.next.send(state).await?),
        }
    }

    async fn respond(&mut self, request: Request, reply: Option<Reply>, ports: &mut CorePorts) -> Result<()> {
        let Some(reply) = reply else { return Ok(ports.responses.send(request.answer()).await?) };
        match request.fate() {
            Fate::Refused => reply.fail(refusal(request)),
            // Replies left when the flow ends are refused, too, by the task that holds them.
            Fate::RefusedLate => _ = self.late.send((request, reply)),
            Fate::Dropped => drop(reply),
            fate => {
                if fate == Fate::Late {
                    turns(self.dice.up_to(20) as u32).await;
                }
                let again = (fate == Fate::Twice).then(|| reply.clone());
                ports.responses.send_for(reply, request.answer()).await?;
                if let Some(reply) = again {
                    turns(self.dice.up_to(20) as u32).await;
                    ports.responses.send_for(reply, !request.answer()).await?;
                }
            }
        }
        Ok(())
    }
}

impl Operator for Core {
    type Ports = CorePorts;

    async fn compute(&mut self, ports: &mut CorePorts, cx: &mut Cx) -> Result<()> {
        let mut parcel = if self.plan.state_first { None } else { Some(ports.requests.take()?) };
        let is_state_taken = self.runs > 0;
        let Some(mut state) = self.state(ports, cx).await? else { return Ok(()) };
        if parcel.is_none() {
            parcel = Some(ports.requests.take()?);
        }
        let Some(Parcel { request, .. }) = parcel else { return Ok(()) };
        let reply = self.plan.says_which.then(|| {
            let mut replies = cx.take_replies();
            let at = usize::from(self.plan.state_first && is_state_taken);
            if replies.len() != 1 + usize::from(is_state_taken) || replies[at].is_empty() {
                wrong(format!("the request is missing from the replies: {replies:?}"));
            }
            std::mem::take(&mut replies[at])
        });
        self.counted(&mut state, cx).await?;
        if self.plan.state_sent_first {
            self.goes_on(state, ports).await?;
            self.respond(request, reply, ports).await
        } else {
            self.respond(request, reply, ports).await?;
            self.goes_on(state, ports).await
        }
    }
}

/// In the cycle: there are never more callers than clients, each of which has one request at a time.
struct Look {
    callers: usize,
    says_which: bool,
}

impl Operator for Look {
    type Ports = MapPorts<Message, Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let state = ports.input.take()?;
        if state.size_in_bytes() == 0 {
            wrong("the state is empty".into());
        }
        let reply = cx.take_replies().pop().unwrap_or_default();
        let text = format!("{reply:?}");
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        let callers: usize = digits.parse().unwrap_or(usize::MAX);
        if callers > self.callers {
            wrong(format!("the state carries replies of {callers} requests from {} clients", self.callers));
        }
        if self.says_which && !reply.is_empty() {
            wrong("the state carries a reply, but was sent for no request".into());
        }
        ports.output.send_for(reply, state).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct SplitPorts {
    #[input]
    input: Input<u64>,
    #[output]
    one: Output<u64>,
    #[output]
    other: Output<u64>,
}

/// Splits a response into two parts, which take two ways.
struct Split;

impl Operator for Split {
    type Ports = SplitPorts;

    async fn compute(&mut self, ports: &mut SplitPorts, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        ports.one.send(n & 0xffff_ffff).await?;
        ports.other.send(n & !0xffff_ffff).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct JoinPorts {
    #[input]
    parts: Inputs<u64>,
    #[output]
    output: Output<u64>,
}

struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        let whole = ports.parts.take()?.fold(0, |whole, part| whole | part);
        ports.output.send(whole).await?;
        Ok(())
    }
}
