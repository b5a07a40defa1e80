//! [`Service`]: a flow as a function, request in, response out.
//!
//! One operator stands at both of its ends. Requests go into the flow as by an [ingress](super::ingress), straight from
//! whoever calls; responses come back to the operator, and each carries along whom it answers.
//!
//! ```text
//!   call ──> requests ──> [ the flow's operators ] ──> responses ──> the operator ──> whoever called
//!               └ beside the request: who asked. Operators pass it on with what they make of it; see `Reply`
//! ```
//!
//! A caller gets exactly one of: a response; the error that an operator [answered](crate::operator::Reply::fail) with; that
//! the flow has failed; that the last message which would have answered was dropped; and, if an operator kept it and never
//! did answer, that the flow has ended.
//!
//! A caller may be a stranger. So of a failure inside the flow it gets the kind and a general message. Which operator it was,
//! and what went wrong there, is in the log, and a failure of the flow is in the flow's own error, too.

use std::{
    any::Any,
    fmt,
    pin::{Pin, pin},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use futures::future::{Either, select};
use slab::Slab;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tracing::Span;
use wakeline_macros::Ports;

use super::{
    Flow, Handle, Ingress,
    door::{Asked, Closing, Door, Place, Stage, failed},
    ingress::span,
};
use crate::{
    condition::{PortState, Readiness},
    error::{CallerErrors, Error, ErrorKind, Result},
    hub::{
        Envelope, Hub, Message, Reply,
        abroad::Handover,
        baggage::Load,
        reply::{Caller, next_number},
        sender::SentBy,
        settle::OpenWork,
    },
    memory::Plain,
    mutants::{self, Mutant},
    operator::{Cx, Input, InputHandle, Operator, Output, OutputHandle, lent::Lent, node::Node, shown::Ask},
    sync::{Discarded, Mutex, ProxyWaker, WakerCell, contained, discard, lock, logged, proxied},
};

impl Flow {
    /// The flow as a service: requests come to this input, and what that output sends are the responses. It adds an
    /// operator of that name, which stands for whoever calls. See [`Service`].
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
        self.service_with(name, to, from, Hub::default())
    }

    /// As [`service`](Self::service), with a hub of another size for the requests: its capacity is how many may wait to be
    /// taken.
    pub fn service_with<Req: Message, Res: Message>(
        &mut self,
        name: impl Into<String>,
        to: InputHandle<Req>,
        from: OutputHandle<Res>,
        requests: Hub,
    ) -> Service<Req, Res> {
        let (stage, handle) = watch::channel(Stage::Before);
        let book = Arc::new(Book { name: name.into(), open: Mutex::default() });
        let added = self.add(&*book.name, Desk { stage, book: book.clone() });
        self.connect_with(added.requests, to, requests);
        self.connect(from, added.responses);
        Service { requests: Ingress::new(self.id, handle), book, limit: None, asked: Asked::No }
    }
}

/// Sends requests through a flow and matches the responses: a [`tower_service::Service`], and [`ask`](Self::ask). From
/// [`Flow::service`].
///
/// An error says to a caller what [kind](Error::kind) of failure it was, and no more: names, causes, addresses and paths
/// inside of the flow are in the log ([`tracing`], as warnings) and in the error that [`Running`](crate::Running) resolves to.
/// An operator that has something to say to its callers answers with an error of its own, which they get as it is:
/// [`Reply::fail`](crate::operator::Reply::fail).
///
/// The same holds for an [`Envelope`] in a response, and for a [blank](Self::blank) one: the errors of the envelope's own
/// methods have the kind and a general message, and the log has the rest. It holds while the envelope passes through other
/// flows, and ends when it is sent into this one. It does not hold for the errors of a [stream](crate::Stream) or a
/// [device](crate::device::Device) that the caller's program enqueues work on, nor for those of an
/// [event](crate::stream::Event) or a buffer in a response: these are written for the program that owns the flow.
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
///             return ports.output.send(number.sqrt()).await;
///         }
///         for reply in cx.take_replies() {
///             reply.fail(Error::new(ErrorKind::Usage, "no number below 0 has a root"));
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// Whom a message answers travels along with it: what an operator sends answers whoever asked for what it took in that
/// run, or last, in a loop of its own. One that takes the requests of several in a run, or before it answers the first, says
/// which of its messages answers which, with [`Cx::take_replies`](crate::Cx::take_replies). State that an operator keeps in a message, which it sends to itself, goes
/// on with the callers of the runs that made it while they wait; what is state and no answer is sent
/// [for](crate::Output::send_for) `Reply::default()`: then a request whose response is dropped fails at once, and not only
/// after the next.
///
/// **Back-pressure** is readiness: `poll_ready` is ready when the flow has room for the request, and keeps that for this
/// clone, so that `call` neither waits nor fails for room. How many have room is the requests' hub's capacity
/// ([`service_with`](Flow::service_with)). Who would rather not wait puts `tower`'s load shedding in front.
///
/// # Device work on a request
/// The callers of a service do not trust each other, so a request enters the flow once all device work is done that was
/// enqueued on its [envelopes](Envelope), writes and reads, and that its events come after: a request whose work does not
/// end holds up its own caller alone. Where that work has failed, with its device say, the request is refused, and the flow
/// goes on. [`ask`](Self::ask) waits for it before it asks for room. [`call`](tower_service::Service::call) does not wait: if
/// the work is done already the request is sent at once; if not, the room that `poll_ready` has kept is given back, and the
/// response's future waits for the work and then for room, once it is polled.
///
/// A request is refused with [`Usage`](ErrorKind::Usage) if nothing copies from where an envelope of it lies to where it is
/// read; if a graph, or a capture, uses the memory, since a launch could use it at any time; and if the memory was
/// [wrapped to be read only](crate::Buffer::wrap_read_only) and is read in place, on the host. A [blank](Self::blank)
/// envelope lies where it can be read. If the device of an envelope is lost while the request waits in the service's hub,
/// that is its caller's error, too.
///
/// # Envelopes in a response
/// An [`Envelope`] that a response [shows](Message::envelopes) is the caller's own memory: as it leaves, its hub allocates other
/// memory in its place. So a caller that keeps or forgets its responses takes nothing from the other callers but that memory.
/// If there is none, the request fails with [`OutOfMemory`](ErrorKind::OutOfMemory), and the envelope stays its hub's. Nothing
/// limits how many responses a caller keeps: do that where they are kept. An envelope within an [`Arc`] or a
/// [`Host`](crate::Host) stays its hub's, and the flow waits for it without knowing: send no such to callers that are not
/// trusted.
///
/// # Operators that ask their own flow
/// An operator may ask a service of its own flow. Where room for the request, or its answer, depends on the end of the run that asks,
/// since that operator takes the requests, or one that waits for it does, that is a stall: see [`OnStall`](super::OnStall) for what is
/// found.
///
/// # Callers that go away
/// A caller that goes away drops the response's future, and makes its place [within the limit](Self::limit) free; its
/// request is let go as soon as an operator asks [whether anybody still waits](crate::operator::Reply::is_abandoned), and
/// otherwise goes to its end.
///
/// As with an [`Ingress`], the flow does not end while there is a handle, and a request between two runs
/// [waits for the next](Ingress#between-two-runs); [`stop`](crate::Running::stop) lets no more
/// requests in, and those that are in are answered. The caller's [`Span`](tracing::Span) travels along.
pub struct Service<Req: Message, Res: Message> {
    requests: Ingress<Req>,
    book: Arc<Book<Res>>,
    limit: Option<Arc<Semaphore>>,
    asked: Asked<Admission<Req>>,
}

/// What a request needs to be sent.
struct Admission<Req: Message> {
    place: Place<Req>,
    slot: Option<OwnedSemaphorePermit>,
}

impl<Req: Message, Res: Message> Service<Req, Res> {
    /// The response to a request. It waits for the [device work on the request](Self#device-work-on-a-request), for the flow
    /// to run, for room, and for the answer.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage), or the kind of its work's failure, for a request that is
    /// [refused](Self#device-work-on-a-request).
    ///
    /// What an operator answered with; the kind of what the flow failed with; [`Unanswered`](ErrorKind::Unanswered) if an operator dropped
    /// the request; [`Closed`](ErrorKind::Closed) if the flow was stopped before it had room; [`Stalled`](ErrorKind::Stalled) in the
    /// `start` of an operator of the same flow, which runs once all operators have started.
    ///
    /// # Cancel safety
    /// Dropping the future drops a request that was not sent, and gives up the place that it waits for, or the answer. A future that is kept and not polled keeps
    /// its turn, and a place once there is one: drop it to release that to the next caller.
    pub async fn ask(&self, request: Req) -> Result<Res> {
        let mut request = Discarded::new(request);
        let admission = self.admission_for(&mut request).await?;
        self.send(admission, request, span()).await
    }

    /// At most so many requests in flight, from all of its clones that are made from now on: from their admission until
    /// they are answered or their callers go away. An answered request counts no longer, whether or not its caller has looked
    /// at the answer, or keeps it. [Blank](Self::blank) envelopes are not counted.
    #[must_use]
    pub fn limit(mut self, requests: usize) -> Self {
        self.limit = Some(Arc::new(Semaphore::new(requests.min(Semaphore::MAX_PERMITS))));
        if requests == 0 {
            // Nobody would ever be let in: that is said, and not waited for.
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
            Err(tokio::sync::TryAcquireError::Closed) => return Err(Book::<Res>::limited_to_none()),
        };
        Ok(self.requests.try_place()?.map(|place| Admission { place, slot }))
    }

    fn some_admission(&self) -> Result<impl Future<Output = Result<Admission<Req>>> + Send + Sync + use<Req, Res>> {
        let (door, limit) = (self.requests.some_door()?, self.limit.clone());
        Ok(async move {
            let door = door.await?;
            let slot = match limit {
                Some(limit) => {
                    let (slot, closed) = (pin!(proxied(limit.acquire_owned())), pin!(door.closed()));
                    match select(slot, closed).await {
                        Either::Left((slot, _)) => Some(slot.map_err(|_| Book::<Res>::limited_to_none())?),
                        Either::Right((ended, _)) => return Err(ended),
                    }
                }
                None => None,
            };
            Ok(Admission { place: door.place().await?, slot })
        })
    }

    /// A place for a request on which all device work is done.
    async fn admission_for(&self, request: &mut Discarded<Req>) -> Result<Admission<Req>> {
        if let Some(request) = request.get_mut() {
            while let Some(work) = OpenWork::on(request)? {
                // Boxed, as it is seldom and large.
                Box::pin(self.done(request, work)).await?;
            }
        }
        match self.try_admission()? {
            Some(admission) => Ok(admission),
            None => self.some_admission()?.await,
        }
    }

    /// Waits for the work, unless the request is refused anyway, or can be sent no more.
    async fn done(&self, request: &mut Req, work: OpenWork) -> Result<()> {
        let mut work = pin!(work.done());
        if self.is_closed() {
            // Says why.
            self.requests.try_place()?;
        }
        let door = match self.requests.door() {
            Some(door) => door,
            // Before a run: it hears of its beginning, or that none comes.
            None => match select(work.as_mut(), pin!(self.requests.some_door()?)).await {
                Either::Left((done, _)) => return done,
                Either::Right((door, _)) => door?,
            },
        };
        door.accepts(request, SentBy::Caller)?;
        match select(work, pin!(door.closed())).await {
            Either::Left((done, _)) => done,
            Either::Right((ended, _)) => Err(ended),
        }
    }

    fn send(&self, admission: Admission<Req>, request: Discarded<Req>, span: Option<Span>) -> ResponseFuture<Res> {
        let Admission { place, slot } = admission;
        let (answer, response) = oneshot::channel();
        let standing = Arc::new(Standing { slot: Mutex::new(slot), ..Standing::default() });
        let mut pending = Pending { response, standing: standing.clone(), book: self.book.clone(), flow: None };
        let sent = place.send(request, SentBy::Caller, |flow| {
            pending.flow = Some(flow.clone());
            let caller = Request::new(&self.book, answer, standing, flow.clone());
            Load::of_reply(Reply::to(caller, span))
        });
        match sent {
            Ok(()) => ResponseFuture::new(State::Waits(pending)),
            Err(error) => ResponseFuture::failed(error.into()),
        }
    }
}

impl<T: Plain, Res: Message> Service<Envelope<T>, Res> {
    /// A blank envelope for a request. See [`Ingress::blank`].
    ///
    /// Blank envelopes are those of the requests' hub, which all callers share, and no [limit](Self::limit) counts them: a
    /// caller that keeps them keeps them from all others. Where callers do not trust each other, give them no handle of the
    /// service but a function that asks with their data, and fills the blank envelope itself.
    ///
    /// # Errors
    /// As [`Ingress::blank`].
    ///
    /// # Cancel safety
    /// As [`Ingress::blank`].
    pub async fn blank(&self) -> Result<Envelope<T>> {
        self.requests.blank().await
    }
}

impl<Req: Message, Res: Message> tower_service::Service<Req> for Service<Req, Res> {
    type Response = Res;
    type Error = Error;
    type Future = ResponseFuture<Res>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut asked = std::mem::replace(&mut self.asked, Asked::No);
        let polled = asked.poll(
            cx,
            |admission| admission.place.is_void(),
            || match self.try_admission()? {
                Some(admission) => Ok(Asked::Has(admission)),
                None => Ok(Asked::Waiting(Box::pin(self.some_admission()?))),
            },
        );
        self.asked = asked;
        polled
    }

    fn call(&mut self, request: Req) -> ResponseFuture<Res> {
        let mut request = Discarded::new(request);
        let Some(admission) = self.asked.take() else {
            let error = Error::new(ErrorKind::Usage, "`call` comes after a `poll_ready` that was ready");
            return ResponseFuture::failed(error);
        };
        match request.get_mut().map_or(Ok(None), OpenWork::on) {
            Ok(None) => self.send(admission, request, span()),
            Ok(Some(_)) => {
                // Others have its place meanwhile.
                drop(admission);
                let (service, span) = (self.clone(), Discarded::new(span()));
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

/// One more handle. A place that this one keeps since it was ready is not the other's.
impl<Req: Message, Res: Message> Clone for Service<Req, Res> {
    fn clone(&self) -> Self {
        let Self { requests, book, limit, .. } = self;
        Self { requests: requests.clone(), book: book.clone(), limit: limit.clone(), asked: Asked::No }
    }
}

impl<Req: Message, Res: Message> fmt::Debug for Service<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("name", &self.book.name)
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}

/// The response to come. Dropping it abandons the request, and drops one that was not sent: see
/// [device work on a request](Service#device-work-on-a-request).
#[must_use = "it is a future of the response"]
pub struct ResponseFuture<Res: 'static> {
    /// A response, or a request, may hold the future of another response, and so on.
    state: Discarded<State<Res>>,
    proxy: ProxyWaker,
}

enum State<Res: 'static> {
    Waits(Pending<Res>),
    /// The device work on the request was not done: it waits for that first, and then for a place. Behind a lock that is
    /// never taken: so the whole is `Sync`.
    Asks(Mutex<Pin<Box<dyn Future<Output = Result<Res>> + Send>>>),
    /// It was never sent.
    Failed(Option<Error>),
}

/// A caller's end of its request.
struct Pending<Res: 'static> {
    response: oneshot::Receiver<Result<Res>>,
    standing: Arc<Standing>,
    book: Arc<Book<Res>>,
    /// The one that the request was sent into.
    flow: Option<Handle>,
}

impl<Res> Pending<Res> {
    /// The operator of the same flow that waits for the answer with this waker, and the operator that stands for the service.
    /// `None` where the answer may come from outside of the flow, too.
    fn within(&self, waker: &Waker) -> Option<(Arc<Node>, usize)> {
        let control = &self.flow.as_ref()?.0;
        let node = control.asker(waker)?;
        let desk = control.names.iter().position(|name| **name == *self.book.name)?;
        self.standing.asker.register(&Waker::from(node.clone()));
        (!self.standing.taken_over.load(Ordering::Acquire)).then(|| (node.clone(), desk))
    }
}

/// The caller goes away, or has its answer.
impl<Res: 'static> Drop for Pending<Res> {
    fn drop(&mut self) {
        self.standing.end();
    }
}

/// How a request stands: both ends of it, the caller's and the flow's, end it.
#[derive(Default)]
struct Standing {
    /// It has its answer, or its caller has gone away.
    done: AtomicBool,
    /// Within the limit, until then.
    slot: Mutex<Option<OwnedSemaphorePermit>>,
    /// Code of the user's has the reply.
    taken_over: AtomicBool,
    /// The caller, if that is an operator of the flow: notified as `taken_over` is set.
    asker: WakerCell,
}

impl Standing {
    fn end(&self) {
        self.done.store(true, Ordering::Release);
        let slot = lock(&self.slot).take();
        // The next caller is woken here, without the lock.
        drop(slot);
    }
}

impl<Res: 'static> ResponseFuture<Res> {
    fn new(state: State<Res>) -> Self {
        Self { state: Discarded::new(state), proxy: ProxyWaker::new() }
    }

    fn failed(error: Error) -> Self {
        Self::new(State::Failed(Some(error)))
    }
}

impl<Res: 'static> Future for ResponseFuture<Res> {
    type Output = Result<Res>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Res>> {
        let again = || Error::new(ErrorKind::Usage, "this response was awaited before");
        let this = &mut *self;
        let Some(state) = this.state.get_mut() else { return Poll::Ready(Err(again())) };
        let answer = match state {
            State::Waits(pending) => {
                let polled = match pending.within(cx.waker()) {
                    Some((operator, desk)) => {
                        operator.poll_asked(Ask::Answer(desk), cx, |task| Pin::new(&mut pending.response).poll(task))
                    }
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

/// The requests of one service that are in flight.
struct Book<Res: 'static> {
    name: String,
    open: Mutex<Slab<Weak<Request<Res>>>>,
}

/// A request in flight: whoever waits for its response. Shared by all messages that go back to it.
struct Request<Res: 'static> {
    book: Arc<Book<Res>>,
    /// Where it stands there.
    slot: usize,
    number: u64,
    /// `None` once there is one.
    answer: Mutex<Option<oneshot::Sender<Result<Res>>>>,
    /// Its caller's, too.
    standing: Arc<Standing>,
    /// The last operator that took one of those messages.
    seen_by: Mutex<Option<Arc<str>>>,
    flow: Handle,
}

impl<Res: 'static> Book<Res> {
    /// The only reason to close a limit.
    fn limited_to_none() -> Error {
        Error::new(ErrorKind::Usage, "the service is limited to 0 requests: at least 1")
    }

    /// The flow has ended: whoever has no answer by now gets none.
    fn close(&self) {
        for request in self.requests() {
            // A subscriber is told, which may panic: the others are answered as well.
            contained("a request could not be closed", || request.leave("kept it, and the flow has ended"));
        }
    }

    fn requests(&self) -> Vec<Arc<Request<Res>>> {
        lock(&self.open).iter().filter_map(|(_, request)| request.upgrade()).collect()
    }
}

impl<Res: 'static> Request<Res> {
    fn new(
        book: &Arc<Book<Res>>,
        answer: oneshot::Sender<Result<Res>>,
        standing: Arc<Standing>,
        flow: Handle,
    ) -> Arc<Self> {
        let mut open = lock(&book.open);
        let entry = open.vacant_entry();
        let request = Arc::new(Self {
            book: book.clone(),
            slot: entry.key(),
            number: next_number(),
            answer: Mutex::new(Some(answer)),
            standing,
            seen_by: Mutex::default(),
            flow,
        });
        entry.insert(Arc::downgrade(&request));
        request
    }

    /// The first answer counts.
    fn answer(&self, answer: Result<Res>) {
        let waiting = lock(&self.answer).take();
        // Before the answer: a caller that has it and asks again finds the place free.
        self.standing.end();
        // The caller may have gone away. The destructor of a response is the user's.
        if let Some(Err(back)) = waiting.map(|waiting| waiting.send(answer)) {
            discard(back);
        }
    }

    fn is_waiting(&self) -> bool {
        !self.standing.done.load(Ordering::Acquire)
    }

    fn is_answered(&self) -> bool {
        lock(&self.answer).is_none()
    }

    /// There will be no answer, if there was none yet: since the flow has failed, or for what `last` did who had it last.
    fn leave(&self, last: &str) {
        if !self.is_waiting() {
            return;
        }
        let error = failed(&self.flow).unwrap_or_else(|| {
            let (service, operator) = (&*self.book.name, lock(&self.seen_by).take());
            // The caller is answered, whatever the subscriber does.
            logged(|| match operator.as_deref() {
                Some(operator) => {
                    tracing::warn!(service, operator, "a request is not answered: the last operator to have it {last}")
                }
                None => tracing::warn!(service, "a request is not answered: no operator has taken it"),
            });
            Error::new(ErrorKind::Unanswered, "the request was dropped without an answer")
        });
        self.answer(Err(error));
    }
}

impl<Res: Send + 'static> Caller for Request<Res> {
    fn number(&self) -> u64 {
        self.number
    }

    fn is_waiting(&self) -> bool {
        Self::is_waiting(self)
    }

    fn fail(&self, error: Error) {
        self.answer(Err(error));
    }

    fn taken_over(&self) {
        self.standing.taken_over.store(true, Ordering::Release);
        self.standing.asker.wake();
    }

    fn seen_by(&self, operator: &Arc<str>) {
        *lock(&self.seen_by) = Some(operator.clone());
    }
}

/// The last of its messages is gone.
impl<Res: 'static> Drop for Request<Res> {
    fn drop(&mut self) {
        lock(&self.book.open).try_remove(self.slot);
        self.leave("sent nothing for it, or a hub behind it has dropped that");
    }
}

/// The operator: sends requests while somebody may make some, and gives out responses.
struct Desk<Req: Message, Res: 'static> {
    stage: watch::Sender<Stage<Req>>,
    book: Arc<Book<Res>>,
}

#[derive(Ports)]
struct DeskPorts<Req: Message, Res: Message> {
    #[output]
    requests: Lent<Output<Req>>,
    #[input]
    responses: Lent<Input<Res>>,
}

impl<Res: Message> Book<Res> {
    /// The requests of this service among those that a message answers.
    fn own(self: &Arc<Self>, reply: &Reply) -> Vec<Arc<Request<Res>>> {
        let requests = reply.callers().iter().filter_map(|caller| {
            let caller: Arc<dyn Any + Send + Sync> = caller.clone();
            caller.downcast::<Request<Res>>().ok()
        });
        requests.filter(|request| Arc::ptr_eq(&request.book, self)).collect()
    }

    /// A response has come, for these, and cannot be given to them.
    fn fail(self: &Arc<Self>, reply: &Reply, error: &Error) {
        self.own(reply).iter().for_each(|request| request.answer(Err(error.again())));
    }

    /// A response has come, for these.
    fn answer(self: &Arc<Self>, reply: &Reply, response: Res) {
        let own = self.own(reply);
        let waiting: Vec<_> = own.iter().filter(|request| request.is_waiting()).collect();
        let service = &*self.name;
        match &waiting[..] {
            [] if mutants::is(Mutant::AnsweredTwice) => {
                if let Some(other) = self.requests().into_iter().find(|request| request.is_waiting()) {
                    other.answer(Ok(response));
                }
            }
            [] if reply.is_empty() || own.iter().any(|request| request.is_answered()) => {
                logged(|| {
                    tracing::warn!(service, "a response came that answers no request: it is dropped");
                });
                discard(response);
            }
            // The caller has gone away.
            [] => discard(response),
            [request] => request.answer(Ok(response)),
            several => {
                logged(|| {
                    tracing::warn!(
                        service,
                        requests = several.len(),
                        "one response came for several requests, which fail: an operator that takes several messages in a \
                         run says which of its own answers which, with `cx.take_replies()` and `send_for`"
                    );
                });
                let error =
                    Error::new(ErrorKind::Usage, "the response cannot be distinguished from those to other requests");
                several.iter().for_each(|request| request.answer(Err(error.again())));
                discard(response);
            }
        }
    }
}

impl<Req: Message, Res: Message> Operator for Desk<Req, Res> {
    type Ports = DeskPorts<Req, Res>;

    async fn run(&mut self, ports: &mut DeskPorts<Req, Res>, cx: &mut Cx) -> Result<()> {
        let door = Door::new(&ports.requests, cx);
        // Used by this task only: the code of a response runs with no lock held.
        let responses = &ports.responses;
        let _closing = Closing(&door);
        self.stage.send_replace(Stage::Open(door.clone()));
        let mut no_handles = pin!(self.stage.closed());
        let (book, carry) = (self.book.clone(), cx.carry().clone());
        let errors = CallerErrors::new(cx.flow().name(), &book.name);
        let handover = Handover::new(carry.node().rest().clone(), errors);
        let mut open = true;
        cx.attend(|task, ending| {
            if open && (ending || no_handles.as_mut().poll(task).is_ready() || !door.tend()) {
                open = false;
                door.close();
            }
            loop {
                // Asked again in a moment, after others.
                let Poll::Ready(budget) = tokio::task::coop::poll_proceed(task) else {
                    return Ok(Readiness::WAIT_EVENT);
                };
                let there = responses.apart(|responses| responses.poll_count(1, task).more);
                match there.unwrap_or(Readiness::NEVER) {
                    Readiness::READY => {}
                    Readiness::NEVER => return Ok(Readiness::NEVER),
                    // While somebody may call, the flow is not at rest.
                    _ if open => return Ok(Readiness::WAIT_EVENT),
                    _ => return Ok(Readiness::WAIT),
                }
                budget.made_progress();
                if let Some(Some(response)) = responses.apart(Input::try_take).transpose()? {
                    let mut response = Discarded::new(response);
                    let reply = carry.take_replies().pop().unwrap_or_default();
                    // Its envelopes go home where no caller gets it.
                    let given = response.get_mut().filter(|_| reply.is_waited_for());
                    match (given.map_or(Ok(()), |response| handover.give(response)), response.take()) {
                        (Ok(()), Some(response)) => book.answer(&reply, response),
                        (Ok(()), None) => {}
                        (Err(error), response) => {
                            discard(response);
                            book.fail(&reply, &error);
                        }
                    }
                    carry.let_go();
                }
            }
        })
        .await
    }

    /// It has no runs.
    async fn compute(&mut self, _ports: &mut DeskPorts<Req, Res>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.stage.send_replace(Stage::Ended(cx.flow()));
        self.book.close();
        Ok(())
    }
}

/// Also of a flow whose runtime has ended.
impl<Req: Message, Res: 'static> Drop for Desk<Req, Res> {
    fn drop(&mut self) {
        self.book.close();
    }
}
