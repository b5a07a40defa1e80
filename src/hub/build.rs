//! Builds a hub of a [plan](HubPlan): its queue, its pools, its copy stream, and its two ends.

use std::sync::Arc;

use super::{
    CloneFn, Message, Since,
    core::HubCore,
    ends::{Receiver, Sender},
    latest::{EndTogether, KeptLatest},
    pool::Pool,
    queue::Queue,
    view::HubView,
    when_full::WhenFull,
};
use crate::{
    device::{Device, human},
    error::Result,
    mutants::{self, Mutant},
    stream::{CompletionMode, Stream},
    tracepoint::TracedHub,
};

/// What a hub is made from, once the flow is known completely.
#[derive(Clone, Debug)]
pub(crate) struct HubPlan {
    pub(crate) name: Arc<str>,
    pub(crate) capacity: usize,
    pub(crate) when_full: WhenFull,
    /// The hubs of one reader that end together, if one of them keeps the latest message and this is one of them.
    pub(crate) ends_with: Option<Arc<EndTogether>>,
    pub(crate) envelopes: usize,
    /// For blank envelopes on the writer's side.
    pub(crate) writer_bytes: Option<usize>,
    /// For copies on the reader's side: set if the reader is at another location, or if the writer forks for it.
    pub(crate) reader_bytes: Option<usize>,
    /// This hub gets a fork, while another hub of the same output gets the message itself.
    pub(crate) forks: bool,
    /// The reader takes envelopes wherever they are.
    pub(crate) reads_anywhere: bool,
    pub(crate) writer: Device,
    pub(crate) reader: Device,
    /// Host memory is page-locked for this device.
    pub(crate) near: Device,
    /// The completion mode of the copy stream.
    pub(crate) mode: CompletionMode,
    /// The priority of the copy stream: that of the more urgent of the two operators.
    pub(crate) priority: i32,
    /// From which point the waiting times of messages are recorded for the reader.
    pub(crate) wait_time_origin: Option<Since>,
    /// The hub moves messages only when it is stepped.
    pub(crate) stepped: bool,
    /// The hub is made in a capture, and its writer works on this stream of the capture.
    pub(crate) captured: Option<Stream>,
    /// Set if its messages are traced.
    pub(crate) traced: Option<TracedHub>,
}

/// The two ends of a hub, and a flow's view of it.
pub(crate) type HubEnds<M> = (Sender<M>, Receiver<M>, Arc<dyn HubView>);

/// Makes a hub: allocates its envelopes and creates its copy stream. `clone_latest`: set for a hub that keeps the latest message.
pub(crate) fn build<M: Message>(plan: HubPlan, clone_latest: Option<CloneFn<M>>) -> Result<HubEnds<M>> {
    let name = &plan.name;
    let copier = if plan.reader.is_host() { &plan.writer } else { &plan.reader };
    let make_copy_stream = || match (plan.reader_bytes, plan.captured.as_ref().and_then(Stream::capture)) {
        // Copies from host to host need no stream.
        (None, _) => Ok(None),
        _ if copier.is_host() => Ok(None),
        (_, Some(capture)) => capture.stream(&format!("copies of {name}"), Default::default()).map(Some),
        (_, None) => {
            let stream = Stream::with_priority(copier, format!("copies of {name}"), plan.priority)?;
            stream.set_completion_mode(plan.mode);
            Ok(Some(stream))
        }
    };
    let joins = HubCore::<M>::JOINS && !plan.forks && plan.when_full.blocks_writer() && plan.reader_bytes.is_some();
    let captured = if plan.captured.is_some() { make_copy_stream()? } else { None };
    let pool = |bytes: Option<usize>, at: &Device, captured: &Option<Stream>| -> Result<Option<Arc<Pool>>> {
        let Some(bytes) = bytes else { return Ok(None) };
        if let Some(stream) = captured {
            return Ok(Some(Pool::captured(name, bytes, stream)));
        }
        let make = if joins { Pool::joined } else { Pool::new };
        let made = make(name, plan.envelopes, bytes, at, &plan.near);
        made.map(Some).map_err(|error| {
            let place = if at.is_host() { "the host" } else { at.name() };
            let size = human::bytes(bytes as u64);
            error.at(format!("hub `{name}` needs {} of {size} on {place}", human::count(plan.envelopes, "envelope")))
        })
    };
    // Device memory first: there is less of it, so a failure is found sooner.
    let (blank_pool, arrival_pool) = if plan.writer.is_host() {
        let arrival_pool = pool(plan.reader_bytes, &plan.reader, &captured)?;
        (pool(plan.writer_bytes, &plan.writer, &plan.captured)?, arrival_pool)
    } else {
        let blank_pool = pool(plan.writer_bytes, &plan.writer, &plan.captured)?;
        (blank_pool, pool(plan.reader_bytes, &plan.reader, &captured)?)
    };
    let copy_stream = if plan.captured.is_some() { captured } else { make_copy_stream()? };
    // A capture is not a run.
    let traced = plan.traced.filter(|_| plan.captured.is_none()).map(Box::new);
    let queues = plan.ends_with.clone().filter(|_| clone_latest.is_none());
    let core = Arc::new(HubCore {
        is_noted: plan.wait_time_origin.is_some() || traced.is_some(),
        is_plain: clone_latest.is_none() && traced.is_none(),
        wait_time_origin: plan.wait_time_origin,
        traced,
        latest: clone_latest.map(|clone| KeptLatest::new(clone, plan.ends_with)),
        forks: plan.forks,
        reads_anywhere: plan.reads_anywhere,
        blank_pool,
        arrival_pool,
        copy_stream,
        stepped: plan.stepped.into(),
        ..HubCore::new(name.clone(), Queue::new(plan.capacity, plan.when_full), plan.reader)
    });
    if let Some(all) = queues {
        let queue: Arc<dyn HubView> = core.clone();
        all.add(Arc::downgrade(&queue));
    }
    if let Some(pool) = &core.blank_pool {
        let core = Arc::downgrade(&core);
        pool.listen(Box::new(move || {
            if let Some(core) = core.upgrade() {
                core.queue.wake_writer();
            }
        }));
    }
    if let Some(pool) = &core.arrival_pool {
        let core = Arc::downgrade(&core);
        pool.listen(Box::new(move || {
            if let Some(core) = core.upgrade().filter(|_| !mutants::is(Mutant::LostWake)) {
                // An error is stored for both ends.
                let _ = core.pump();
                if core.forks {
                    core.queue.wake_writer();
                }
            }
        }));
    }
    Ok((Sender::new(core.clone()), Receiver::new(core.clone()), core))
}

/// A hub without a limit, at one location, for messages that were taken from the hub `name`.
pub(crate) fn private<M: Message>(name: &str) -> (Sender<M>, Receiver<M>) {
    let queue = Queue::new(usize::MAX, WhenFull::Block);
    let core = Arc::new(HubCore::new(name.into(), queue, Device::host()));
    (Sender::new(core.clone()), Receiver::new(core))
}
