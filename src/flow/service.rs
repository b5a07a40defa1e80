//! [`Service`]: a flow as an async function from request to response.
//!
//! One operator is at both ends of the flow. Requests enter the flow as through an [ingress](super::ingress), directly
//! from the caller. Responses return to the operator, each with a reference to its request.
//!
//! ```text
//!   call ──> requests ──> [ the flow's operators ] ──> responses ──> the operator ──> the caller
//!               └ with each request: its caller. Operators pass it on with the messages that they derive; see `Reply`
//! ```
//!
//! A caller receives exactly one of: a response; the error with which an operator
//! [answered](crate::operator::Reply::fail); the failure of the flow; or an error if the last message that could have
//! led to a response was dropped, or if the flow ended while an operator kept the request. If an operator drops that
//! message in a run, the run decides between the last two: see [`run_context`](crate::operator::run_context).
//!
//! Callers may be untrusted: of a failure inside the flow they receive only the kind and a general message. The
//! operator and the cause are in the log, and a failure of the whole flow is also in its own error.

mod pending;

use std::{
    fmt,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::future::{Either, select};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tracing::Span;
use wakeline_macros::Ports;

use self::pending::{PendingRequest, PendingRequests, PendingResponse, RequestState};
use super::{
    Flow, Ingress,
    ingress::span,
    ingress_gate::{Acquisition, CloseGateOnDrop, IngressGate, SendPermit, Stage},
};
use crate::{
    condition::{PortState, Readiness},
    error::{CallerErrors, Error, ErrorKind, Result},
    hub::{
        BlanksFor, Carries, Envelope, HubOptions, Message, Reply, external::SentBy, open_work::OpenWork, parcel::Load,
        response_transfer::ResponseTransfer,
    },
    memory::Plain,
    operator::{
        Cx, Input, InputHandle, Operator, Output, OutputHandle, shared_port::SharedPort, status_cell::IngressWait,
    },
    sync::{DiscardOnDrop, Mutex, ProxyWaker, discard, proxied},
};

impl Flow {
    /// Makes the flow a service: an input takes the requests, and an output sends the responses. Adds an operator
    /// called `name`, which represents the callers. See [`Service`].
    ///
    /// ```
    /// use wakeline::{Flow, operator::map};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("shouting");
    /// let upper = flow.add("upper", map(async |text: String| Ok(text.to_uppercase())));
    /// let shout = flow.service("shout", upper.input, upper.output);
    /// let running = flow.spawn()?;
    /// assert_eq!(shout.ask("hello".into()).await?, "HELLO");
    /// drop(shout);
    /// running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn service<Req: Message, Res: Message>(
        &mut self,
        name: impl Into<String>,
        to: InputHandle<Req>,
        from: OutputHandle<Res>,
    ) -> Service<Req, Res> {
        self.service_with(name, to, from, HubOptions::default())
    }

    /// Like [`service`](Self::service), with this kind of hub for the requests. Its capacity limits the queued
    /// requests.
    pub fn service_with<Req: Message, Res: Message>(
        &mut self,
        name: impl Into<String>,
        to: InputHandle<Req>,
        from: OutputHandle<Res>,
        requests: HubOptions,
    ) -> Service<Req, Res> {
        let (stage, handle) = watch::channel(Stage::Before);
        let pending = Arc::new(PendingRequests { name: name.into().into(), open: Mutex::default() });
        let added = self.add(&*pending.name, ServiceOperator { stage, pending: pending.clone() });
        self.connect_with(added.requests, to, requests);
        self.connect(from, added.responses);
        Service { requests: Ingress::new(self.id, handle), pending, limit: None, acquisition: Acquisition::No }
    }
}

/// Sends requests through a flow and returns the matching responses, with [`ask`](Self::ask) or as a
/// [`tower_service::Service`][tower]. Created by [`Flow::service`].
///
/// A caller receives only the [kind](Error::kind) of a failure: names, causes, addresses and paths inside the flow are
/// in the log (of `tracing`, as warnings) and in the error of [`Running`](crate::Running). An operator can answer with
/// an error of its own, which its callers receive unchanged: [`Reply::fail`](crate::operator::Reply::fail).
///
/// The same holds for the errors of the methods of an [`Envelope`] in a response, or of a [blank](Self::blank) one,
/// also while the envelope passes through other flows, until it is sent into this flow again. It does not hold for the
/// errors of a [stream](crate::Stream) or a [device](crate::device::Device) on which the caller's program enqueues
/// work, nor for those of an [event](crate::stream::Event) or a buffer in a response: they are written for the program
/// that owns the flow.
///
/// ```
/// use wakeline::{operator::MapPorts, prelude::*};
///
/// struct Root;
///
/// impl Operator for Root {
///     type Ports = MapPorts<f64, f64>;
///
///     async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
///         let number = ports.input.take()?;
///         if number >= 0.0 {
///             ports.output.send(number.sqrt()).await?;
///             return Ok(());
///         }
///         for reply in cx.take_replies() {
///             reply.fail(Error::new(ErrorKind::Usage, "a negative number has no root"));
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// Each message carries the requests that it answers: those whose messages the operator took in that run or, in its own
/// loop, last. An operator that takes several requests in one run, or before it answers the first, must state which of
/// its messages answers which, with [`Cx::take_replies`](crate::Cx::take_replies). A message that an
/// operator sends to itself also carries the callers that wait on the runs that produced it. It is not a response: send
/// it with [`send_for(Reply::default(), ..)`](crate::Output::send_for). Otherwise a request whose response is dropped
/// fails only after the next request.
///
/// **Back-pressure** is readiness: `poll_ready` is ready when the flow has room for the request, which it reserves for
/// this clone: `call` neither waits nor fails for want of room. There is room for as many requests as the capacity of
/// their hub ([`service_with`](Flow::service_with)). To fail instead of waiting, put `tower`'s load shedding in front.
///
/// # Device work on a request
/// Callers do not trust each other. A request therefore enters the flow only when all device work that was enqueued on
/// its [envelopes](Envelope), both writes and reads, is done, as well as the work before its events: work that does not
/// complete delays only its own caller. If the work has failed, for example because its device was lost, the request is
/// refused, and the flow continues. [`ask`](Self::ask) waits for the work before it asks for room.
/// [`call`][tower] does not wait: if the work is done, the request is sent at once; otherwise
/// the room that `poll_ready` reserved is released, and the response's future, once polled, waits for the work and then
/// for room.
///
/// A request is refused with [`Usage`](ErrorKind::Usage) if an envelope of it cannot be copied to where it is read; if
/// its memory is used by a graph or a capture, since a launch could use it at any time; or if its memory was [wrapped
/// to be read only](crate::Buffer::wrap_read_only) and is read in place, on the host. A [blank](Self::blank) envelope
/// can always be read. If the device of an envelope is lost while the request is queued in the service's hub, this is
/// also an error only for its caller.
///
/// # Envelopes in a response
/// An [`Envelope`] that a response [shows](Message::envelopes) becomes the caller's own memory: its hub allocates other
/// memory in its place. A caller that keeps or forgets its responses therefore takes nothing but that memory from the
/// other callers. If none can be allocated, the request fails with [`OutOfMemory`](ErrorKind::OutOfMemory), and the
/// envelope stays with its hub. The number of responses that a caller keeps is not limited: limit it where they are
/// kept. An envelope within an [`Arc`] or a [`Host`](crate::Host) stays with its hub, and the flow does not know that a
/// caller keeps it. When the hub has no other, the flow fails as [stalled](ErrorKind::Stalled): do not send such envelopes to
/// callers.
///
/// # Operators that call their own flow
/// An operator may call a service of its own flow. The flow stalls if room for the request, or the response, depends on
/// the end of the calling run, because the same operator takes the requests, or one that waits for it does. See
/// [`OnStall`](super::OnStall) for which stalls are detected.
///
/// # Callers that give up
/// A caller gives up by dropping the response's future, which releases its slot [within the limit](Self::limit). Its
/// request is dropped as soon as an operator asks [whether a caller still waits](crate::operator::Reply::is_abandoned),
/// and is otherwise processed to the end.
///
/// As with an [`Ingress`], the flow does not end while there is a handle, and a request between two runs [waits for the
/// next](Ingress#between-two-runs). [`stop`](crate::flow::Handle::stop) refuses further requests; those in the flow are
/// answered. The caller's [`Span`][span] travels with the request.
///
/// [tower]: https://docs.rs/tower-service/0.3/tower_service/trait.Service.html
/// [span]: https://docs.rs/tracing/0.1/tracing/struct.Span.html
pub struct Service<Req: Message, Res: Message> {
    requests: Ingress<Req>,
    pending: Arc<PendingRequests<Res>>,
    limit: Option<Arc<Semaphore>>,
    acquisition: Acquisition<Admission<Req>>,
}

struct Admission<Req: Message> {
    permit: SendPermit<Req>,
    slot: Option<OwnedSemaphorePermit>,
}

impl<Req: Message, Res: Message> Service<Req, Res> {
    /// Sends a request and returns the response. Waits for the [device work on the
    /// request](Self#device-work-on-a-request), for the flow to run, for room, and for the response.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage), or the kind of its work's failure, for a request that is
    /// [refused](Self#device-work-on-a-request).
    ///
    /// The error that an operator answered with; the kind of the error that the flow failed with;
    /// [`Unanswered`](ErrorKind::Unanswered) if an operator dropped the request in a run that did not fail, or sent one
    /// response for several requests; [`Closed`](ErrorKind::Closed) if the flow was stopped before it had room;
    /// [`Stalled`](ErrorKind::Stalled) in the `start` of an operator of the same flow, which runs only once all
    /// operators have started.
    ///
    /// # Cancel safety
    /// Dropping the future drops a request that was not sent, and abandons one that was. A future that is kept but not
    /// polled keeps its place in the queue of callers, and later a reserved slot: drop it to release that to the next
    /// caller.
    pub async fn ask(&self, request: Req) -> Result<Res> {
        let mut request = DiscardOnDrop::new(request);
        let admission = self.admission_for(&mut request).await?;
        self.send(admission, request, span()).await
    }

    /// Limits the number of requests in flight, for all clones that are made from now on. A request counts from its
    /// admission until it is answered, whether or not the caller takes the response, or its caller gives up.
    /// [Blank](Self::blank) envelopes are not counted.
    #[must_use]
    pub fn limit(mut self, requests: usize) -> Self {
        self.limit = Some(Arc::new(Semaphore::new(requests.min(Semaphore::MAX_PERMITS))));
        if requests == 0 {
            // No request would ever be admitted: fail instead of waiting.
            self.limit.iter().for_each(|limit| limit.close());
        }
        self
    }

    /// True if no request can be sent any more.
    pub fn is_closed(&self) -> bool {
        self.requests.is_closed()
    }

    fn try_admission(&self) -> Result<Option<Admission<Req>>> {
        let slot = match self.limit.clone().map(Semaphore::try_acquire_owned).transpose() {
            Ok(slot) => slot,
            Err(tokio::sync::TryAcquireError::NoPermits) => return Ok(None),
            Err(tokio::sync::TryAcquireError::Closed) => return Err(PendingRequests::<Res>::limited_to_none()),
        };
        Ok(self.requests.try_permit()?.map(|permit| Admission { permit, slot }))
    }

    fn wait_for_admission(&self) -> Result<impl Future<Output = Result<Admission<Req>>> + Send + Sync + use<Req, Res>> {
        let (gate, limit) = (self.requests.wait_for_gate()?, self.limit.clone());
        Ok(async move {
            let gate = gate.await?;
            let slot = match limit {
                Some(limit) => {
                    let (slot, closed) = (pin!(proxied(limit.acquire_owned())), pin!(gate.closed()));
                    match select(slot, closed).await {
                        Either::Left((slot, _)) => Some(slot.map_err(|_| PendingRequests::<Res>::limited_to_none())?),
                        Either::Right((ended, _)) => return Err(ended),
                    }
                }
                None => None,
            };
            Ok(Admission { permit: gate.permit().await?, slot })
        })
    }

    /// Reserves a slot for a request, after all device work on it is done.
    async fn admission_for(&self, request: &mut DiscardOnDrop<Req>) -> Result<Admission<Req>> {
        if let Some(request) = request.get_mut() {
            while let Some(work) = OpenWork::on(request)? {
                // Boxed, since it is rare and large.
                Box::pin(self.done(request, work)).await?;
            }
        }
        match self.try_admission()? {
            Some(admission) => Ok(admission),
            None => self.wait_for_admission()?.await,
        }
    }

    /// Waits for the work, unless the request would be refused anyway or the service is closed.
    async fn done(&self, request: &mut Req, work: OpenWork) -> Result<()> {
        let mut work = pin!(work.done());
        if self.is_closed() {
            // Returns the reason.
            self.requests.try_permit()?;
        }
        let gate = match self.requests.gate() {
            Some(gate) => gate,
            // Before a run: also ends when the run begins, or when there will be none.
            None => match select(work.as_mut(), pin!(self.requests.wait_for_gate()?)).await {
                Either::Left((done, _)) => return done,
                Either::Right((gate, _)) => gate?,
            },
        };
        gate.accepts(request, SentBy::Caller)?;
        match select(work, pin!(gate.closed())).await {
            Either::Left((done, _)) => done,
            Either::Right((ended, _)) => Err(ended),
        }
    }

    fn send(&self, admission: Admission<Req>, request: DiscardOnDrop<Req>, span: Option<Span>) -> ResponseFuture<Res> {
        let Admission { permit, slot } = admission;
        let (answer, response) = oneshot::channel();
        let state = Arc::new(RequestState::new(slot));
        let mut pending =
            PendingResponse { response, state: state.clone(), service: self.pending.name.clone(), flow: None };
        let sent = permit.send(request, SentBy::Caller, |flow| {
            pending.flow = Some(flow.clone());
            let caller = PendingRequest::new(&self.pending, answer, state, flow.clone());
            Load::of_reply(Reply::to(caller, span))
        });
        match sent {
            Ok(()) => ResponseFuture::new(State::Waits(pending)),
            Err(error) => ResponseFuture::failed(error.into()),
        }
    }
}

impl<Req: Message, Res: Message> Service<Req, Res> {
    /// Waits for a blank envelope for a request, where requests hold one. See [`Ingress::blank`].
    ///
    /// Blank envelopes belong to the hub of the requests, which all callers share, and count towards no
    /// [limit](Self::limit): a caller that keeps them starves the others. Give untrusted callers a function that takes
    /// their data and fills the envelope, not a handle of the service.
    ///
    /// # Errors
    /// Those of [`Ingress::blank`].
    ///
    /// # Cancel safety
    /// The same as for [`Ingress::blank`].
    pub async fn blank<T: Plain>(&self) -> Result<Envelope<T>>
    where
        Req: Carries<T>,
    {
        self.requests.blank().await
    }

    /// Waits for all the blank envelopes of a request, and takes them at the same time. See [`Ingress::blanks`].
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, Message, operator::map, prelude::*};
    ///
    /// #[derive(Message)]
    /// struct Product {
    ///     #[envelope]
    ///     left: Envelope<f32>,
    ///     #[envelope]
    ///     right: Envelope<f32>,
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("products");
    /// let scalar = flow.add("scalar", map(async |Product { left, right }| {
    ///     let (left, right) = (left.read().await?, right.read().await?);
    ///     Ok(left.iter().zip(right).map(|(left, right)| left * right).sum::<f32>())
    /// }));
    /// let hub = HubOptions::default().envelope_bytes(64);
    /// let products = flow.service_with("products", scalar.input, scalar.output, hub);
    /// let running = flow.spawn()?;
    /// let (mut left, mut right) = products.blanks().await?;
    /// left.fill_from(&[1.0, 2.0]).await?;
    /// right.fill_from(&[3.0, 4.0]).await?;
    /// assert_eq!(products.ask(Product { left, right }).await?, 11.0);
    /// drop(products);
    /// running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// Those of [`Ingress::blanks`].
    ///
    /// # Cancel safety
    /// The same as for [`Ingress::blanks`].
    pub async fn blanks<B: BlanksFor<Req>>(&self) -> Result<B> {
        self.requests.blanks().await
    }
}

impl<Req: Message, Res: Message> tower_service::Service<Req> for Service<Req, Res> {
    type Response = Res;
    type Error = Error;
    type Future = ResponseFuture<Res>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut acquisition = std::mem::replace(&mut self.acquisition, Acquisition::No);
        let polled = acquisition.poll(
            cx,
            |admission| admission.permit.is_void(),
            || match self.try_admission()? {
                Some(admission) => Ok(Acquisition::Has(admission)),
                None => Ok(Acquisition::Waiting(Box::pin(self.wait_for_admission()?))),
            },
        );
        self.acquisition = acquisition;
        polled
    }

    fn call(&mut self, request: Req) -> ResponseFuture<Res> {
        let mut request = DiscardOnDrop::new(request);
        let Some(admission) = self.acquisition.take() else {
            let error =
                Error::new(ErrorKind::Usage, "`call` was called before `poll_ready` returned ready: poll it first");
            return ResponseFuture::failed(error);
        };
        match request.get_mut().map_or(Ok(None), OpenWork::on) {
            Ok(None) => self.send(admission, request, span()),
            Ok(Some(_)) => {
                // The slot is available to other callers meanwhile.
                drop(admission);
                let (service, mut span) = (self.clone(), DiscardOnDrop::new(span()));
                ResponseFuture::new(State::Asks(Mutex::new(Box::pin(async move {
                    let admission = service.admission_for(&mut request).await?;
                    let response = service.send(admission, request, span.take().flatten());
                    drop(service);
                    response.await
                }))))
            }
            Err(error) => ResponseFuture::failed(error),
        }
    }
}

/// The clone does not share a slot that this handle has reserved.
impl<Req: Message, Res: Message> Clone for Service<Req, Res> {
    fn clone(&self) -> Self {
        let Self { requests, pending, limit, .. } = self;
        Self {
            requests: requests.clone(),
            pending: pending.clone(),
            limit: limit.clone(),
            acquisition: Acquisition::No,
        }
    }
}

impl<Req: Message, Res: Message> fmt::Debug for Service<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("name", &self.pending.name)
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}

/// The future of a response. Dropping it abandons the request, and drops one that was not sent: see [device work on a
/// request](Service#device-work-on-a-request).
#[must_use = "it is a future of the response"]
pub struct ResponseFuture<Res: 'static> {
    /// A response or a request may contain the future of another response, nested to any depth.
    state: DiscardOnDrop<State<Res>>,
    proxy: ProxyWaker,
}

enum State<Res: 'static> {
    Waits(PendingResponse<Res>),
    /// Waits for the device work on the request, and then for a slot. The lock is never taken; it makes the type
    /// `Sync`.
    Asks(Mutex<Pin<Box<dyn Future<Output = Result<Res>> + Send>>>),
    /// The request was never sent.
    Failed(Option<Error>),
}

impl<Res: 'static> ResponseFuture<Res> {
    fn new(state: State<Res>) -> Self {
        Self { state: DiscardOnDrop::new(state), proxy: ProxyWaker::new() }
    }

    fn failed(error: Error) -> Self {
        Self::new(State::Failed(Some(error)))
    }
}

impl<Res: 'static> Future for ResponseFuture<Res> {
    type Output = Result<Res>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Res>> {
        let again = || Error::new(ErrorKind::Usage, "`ResponseFuture` polled after completion");
        let this = &mut *self;
        let Some(state) = this.state.get_mut() else { return Poll::Ready(Err(again())) };
        let answer = match state {
            State::Waits(pending) => {
                let polled = match pending.within(cx.waker()) {
                    Some((operator, service)) => operator.poll_ingress_wait(IngressWait::Answer(service), cx, |task| {
                        Pin::new(&mut pending.response).poll(task)
                    }),
                    None => Pin::new(&mut pending.response).poll(&mut this.proxy.stand_in(cx)),
                };
                ready!(polled).unwrap_or_else(|_| Err(again()))
            }
            State::Asks(asks) => ready!(asks.get_mut().as_mut().poll(cx)),
            State::Failed(error) => return Poll::Ready(Err(error.take().unwrap_or_else(again))),
        };
        *state = State::Failed(None);
        Poll::Ready(answer)
    }
}

impl<Res: 'static> fmt::Debug for ResponseFuture<Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseFuture")
    }
}

/// The operator of the service: admits requests while there are handles, and delivers responses.
struct ServiceOperator<Req: Message, Res: Message> {
    stage: watch::Sender<Stage<Req>>,
    pending: Arc<PendingRequests<Res>>,
}

#[derive(Ports)]
struct ServicePorts<Req: Message, Res: Message> {
    #[output]
    requests: SharedPort<Output<Req>>,
    #[input]
    responses: SharedPort<Input<Res>>,
}

impl<Req: Message, Res: Message> Operator for ServiceOperator<Req, Res> {
    type Ports = ServicePorts<Req, Res>;

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        // Before any operator runs: the search for stalled operators relies on it.
        cx.operator_task().status_cell().set_passes_responses_on(false);
        Ok(())
    }

    async fn run(&mut self, ports: &mut ServicePorts<Req, Res>, cx: &mut Cx) -> Result<()> {
        let gate = IngressGate::new(&ports.requests, cx);
        // Used only by this task: the code of a response runs with no lock held.
        let responses = &ports.responses;
        let _closing = CloseGateOnDrop(&gate);
        self.stage.send_replace(Stage::Open(gate.clone()));
        let mut no_handles = pin!(self.stage.closed());
        let (pending, context) = (self.pending.clone(), cx.context().clone());
        let errors = CallerErrors::new(cx.flow().name(), &pending.name);
        let transfer = ResponseTransfer::new(context.operator_task().activity().clone(), errors);
        let (mut open, task) = (true, context.operator_task().clone());
        let status = task.status_cell();
        cx.attend(|task, ending| {
            if open && (ending || no_handles.as_mut().poll(task).is_ready() || !gate.on_wake()) {
                open = false;
                gate.close();
            }
            loop {
                // The budget is used up: continued after other tasks.
                let Poll::Ready(budget) = tokio::task::coop::poll_proceed(task) else {
                    return Ok(Readiness::WAIT_EVENT);
                };
                let there = responses.apart(|responses| responses.poll_count(1, task).more);
                match there.unwrap_or(Readiness::NEVER) {
                    Readiness::READY => {}
                    Readiness::NEVER => return Ok(Readiness::NEVER),
                    // The flow is not at rest while a caller may send a request.
                    _ if open => return Ok(Readiness::WAIT_EVENT),
                    _ => return Ok(Readiness::WAIT),
                }
                budget.made_progress();
                status.set_passes_responses_on(true);
                if let Some(Some(response)) = responses.apart(Input::try_take).transpose()? {
                    let mut response = DiscardOnDrop::new(response);
                    let reply = context.take_replies().pop().unwrap_or_default();
                    // If no caller waits, the envelopes return to their pool.
                    let given = response.get_mut().filter(|_| reply.is_waited_for());
                    match (given.map_or(Ok(()), |response| transfer.hand_out(response)), response.take()) {
                        (Ok(()), Some(response)) => pending.answer(&reply, response),
                        (Ok(()), None) => {}
                        (Err(error), response) => {
                            discard(response);
                            pending.fail(&reply, &error);
                        }
                    }
                    drop(reply);
                    context.release_unneeded();
                }
                status.set_passes_responses_on(false);
            }
        })
        .await
    }

    /// Never called: `run` is overridden.
    async fn compute(&mut self, _ports: &mut ServicePorts<Req, Res>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.stage.send_replace(Stage::Ended(cx.flow()));
        self.pending.close();
        Ok(())
    }
}

/// For a flow whose runtime has ended.
impl<Req: Message, Res: Message> Drop for ServiceOperator<Req, Res> {
    fn drop(&mut self) {
        self.pending.close();
    }
}
