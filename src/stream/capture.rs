//! A capture: streams whose work is recorded into a graph, and the work that the graph must wait for.
//!
//! A captured stream has tickets, a clock and marks like any other stream, but its backend is a [`Recorder`] instead of
//! the device. Order between the streams of one capture becomes edges. Work that was enqueued on other streams before
//! is not waited for during the capture: it is noted, and the graph's launches wait for it. Captured work does not run,
//! so a wait for it by the host or by a stream outside of the capture is an error.
//!
//! ```text
//!   captured waits for captured     an edge
//!   captured waits for another      noted: each launch is ordered after that work
//!   another waits for captured      an error until the capture ends; then a no-op, as its tickets count as passed
//! ```
//!
//! A capture is entered by one thread, within one call, and cannot be held across an await.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use smallvec::SmallVec;

use super::{DriverStream, Stream, Ticket, stream::StreamInner};
use crate::{
    device::{Device, graph_ir::NodeSet, recorder::Recorder},
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, lock, on_user_code},
};

/// See the [module](self).
pub(crate) struct Capture {
    device: Device,
    recorder: Arc<Recorder>,
    streams: Mutex<Vec<Stream>>,
    /// The latest ticket of each stream outside of the capture, each with whether a launch may read what the work
    /// wrote. `None` once no more are collected.
    outside: Mutex<Option<Vec<(Ticket, bool)>>>,
    over: AtomicBool,
    kept: Mutex<Used>,
    launches: OnceLock<LaunchesFn>,
    /// State that the layers above attach.
    extension: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// Returns the tickets of launches that are not known to be done.
type LaunchesFn = Box<dyn Fn() -> SmallVec<[Ticket; 3]> + Send + Sync>;

/// Resources that a graph keeps alive.
pub(crate) type KeptAlive = Vec<Arc<dyn Any + Send + Sync>>;

/// The resources, other than memory, of the nodes of a capture.
#[derive(Default)]
struct Used {
    resources: KeptAlive,
    /// True once no more nodes are added.
    complete: bool,
}

thread_local! {
    /// The captures that this thread is in, the innermost last. `ManuallyDrop`: without a destructor it stays usable
    /// while the thread's other locals, whose destructors may use streams, are destroyed. [`CaptureScope`] empties it.
    static ENTERED: ManuallyDrop<RefCell<Vec<Arc<Capture>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    /// Set while an [`UncapturedWorkDetector`] exists on this thread: true if the thread has enqueued into a stream
    /// that belongs to no capture.
    static UNCAPTURED_WORK: Cell<Option<bool>> = const { Cell::new(None) };
    /// How many times this thread has suspended its captures for user code that runs within them.
    static SUSPENSIONS: Cell<usize> = const { Cell::new(0) };
}

/// The captures of a thread that are suspended while user code of another task runs there. Dropping this resumes them.
struct Suspended {
    entered: Vec<Arc<Capture>>,
    uncaptured_work: Option<bool>,
}

/// Called when a waker, a destructor or a tracing subscriber runs within a capture: its work and its allocations are
/// not captured.
fn suspend_captures() -> Box<dyn Any> {
    let entered = ENTERED.try_with(|entered| std::mem::take(&mut *entered.borrow_mut())).unwrap_or_default();
    SUSPENSIONS.set(SUSPENSIONS.get() + 1);
    on_user_code(None);
    Box::new(Suspended { entered, uncaptured_work: UNCAPTURED_WORK.take() })
}

impl Drop for Suspended {
    fn drop(&mut self) {
        let entered = std::mem::take(&mut self.entered);
        // The user code has left every capture that it entered.
        let left = ENTERED.try_with(|now| now.replace(entered));
        UNCAPTURED_WORK.set(self.uncaptured_work);
        SUSPENSIONS.set(SUSPENSIONS.get() - 1);
        on_user_code(Some(suspend_captures));
        drop(left);
    }
}

/// Called when this thread may have left its last capture. Unregisters the hook if it has.
fn unregister_hook_if_idle() {
    if UNCAPTURED_WORK.get().is_none() && ENTERED.try_with(|entered| entered.borrow().is_empty()).unwrap_or(true) {
        on_user_code(None);
    }
}

/// The number of detectors. It is usually 0, and enqueueing then makes no thread-local access.
static DETECTORS: AtomicUsize = AtomicUsize::new(0);

/// Detects work that this thread enqueues into streams that belong to no capture.
#[must_use]
pub(crate) struct UncapturedWorkDetector(());

impl UncapturedWorkDetector {
    pub(crate) fn new() -> Self {
        DETECTORS.fetch_add(1, Ordering::Relaxed);
        UNCAPTURED_WORK.set(Some(false));
        on_user_code(Some(suspend_captures));
        Self(())
    }

    /// True if the thread has enqueued work into such a stream.
    pub(crate) fn found_work(self) -> bool {
        UNCAPTURED_WORK.get() == Some(true)
    }
}

impl Drop for UncapturedWorkDetector {
    fn drop(&mut self) {
        UNCAPTURED_WORK.set(None);
        unregister_hook_if_idle();
        DETECTORS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[inline]
pub(super) fn note_work(stream: &Stream) {
    // If this thread has a detector, it has incremented the counter itself, so `Relaxed` suffices.
    if DETECTORS.load(Ordering::Relaxed) > 0 && stream.capture().is_none() {
        UNCAPTURED_WORK.set(UNCAPTURED_WORK.get().map(|_| true));
    }
}

/// A guard: this thread is in a capture until it is dropped.
#[must_use]
pub(crate) struct CaptureScope(());

impl Drop for CaptureScope {
    fn drop(&mut self) {
        let capture = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            let capture = entered.pop();
            if entered.is_empty() {
                // The allocation is freed, too: there is no destructor to free it when the thread ends.
                *entered = Vec::new();
            }
            capture
        });
        unregister_hook_if_idle();
        drop(capture);
    }
}

impl Capture {
    pub(crate) fn new(device: &Device, recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            recorder,
            streams: Mutex::at(Level::CaptureStreams, Vec::new()),
            outside: Mutex::new(Some(Vec::new())),
            over: AtomicBool::new(false),
            kept: Mutex::default(),
            launches: OnceLock::new(),
            extension: OnceLock::new(),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// State that a layer above attaches, created at the first call.
    pub(crate) fn extension<T: Any + Send + Sync>(&self, make: impl FnOnce() -> Arc<T>) -> Option<Arc<T>> {
        self.extension.get_or_init(|| make()).clone().downcast().ok()
    }

    /// The innermost capture that this thread is in.
    pub(crate) fn current() -> Option<Arc<Self>> {
        ENTERED.try_with(|entered| entered.borrow().last().cloned()).ok().flatten()
    }

    /// All captures that this thread is in, the innermost last; empty on a thread that is ending.
    pub(crate) fn entered() -> SmallVec<[Arc<Self>; 1]> {
        ENTERED.try_with(|entered| entered.borrow().iter().cloned().collect()).unwrap_or_default()
    }

    /// True if the device may be queried on this thread. During a capture, the driver may be capturing a library's
    /// calls, and then rejects queries from the same thread, including queries by user code that runs within the
    /// capture without being part of it.
    pub(crate) fn may_query_device() -> bool {
        SUSPENSIONS.get() == 0 && ENTERED.try_with(|entered| entered.borrow().is_empty()).unwrap_or(true)
    }

    /// Enters the capture on this thread until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> CaptureScope {
        ENTERED.with(|entered| entered.borrow_mut().push(self.clone()));
        on_user_code(Some(suspend_captures));
        CaptureScope(())
    }

    /// Creates a stream of this capture, whose first work is ordered after these nodes.
    pub(crate) fn stream(self: &Arc<Self>, name: &str, after: NodeSet) -> Result<Stream> {
        let _later = Deferred::new();
        let mut streams = lock(&self.streams);
        let driver_stream = DriverStream::captured(&self.recorder, self.recorder.stream(name, after));
        let stream = Stream::captured(self, name.into(), driver_stream)?;
        streams.push(stream.clone());
        Ok(stream)
    }

    pub(crate) fn streams(&self) -> Vec<Stream> {
        lock(&self.streams).clone()
    }

    /// Ends the capture: nothing more is recorded, and its tickets count as passed.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.recorder.set_open(false);
        // From here on every enqueue is rejected, so no more resources need to be kept.
        lock(&self.kept).complete = true;
        // This wakes waiters, so the lock is released first.
        let streams = std::mem::take(&mut *lock(&self.streams));
        for stream in streams {
            stream.0.completion.advance(u64::MAX);
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Keeps a resource alive for a node that is about to be added. Does nothing once the capture is over, as the node
    /// will be rejected.
    pub(crate) fn keep(&self, used: Arc<dyn Any + Send + Sync>) {
        let mut state = lock(&self.kept);
        if !state.complete {
            state.resources.push(used);
        }
    }

    /// Releases a resource that was kept for a node that was rejected.
    pub(crate) fn release<T>(&self, used: &Arc<T>) {
        let mut state = lock(&self.kept);
        let at = state.resources.iter().rposition(|kept| std::ptr::addr_eq(Arc::as_ptr(kept), Arc::as_ptr(used)));
        let released = at.map(|at| state.resources.swap_remove(at));
        drop(state);
        drop(released);
    }

    /// Moves the kept resources to the new owner of the nodes.
    pub(crate) fn take_kept(&self) -> KeptAlive {
        std::mem::take(&mut lock(&self.kept).resources)
    }

    /// Sets the function that returns the launches of the capture's graph.
    pub(crate) fn set_launches(&self, launches: impl Fn() -> SmallVec<[Ticket; 3]> + Send + Sync + 'static) {
        let _ = self.launches.set(Box::new(launches));
    }

    /// The tickets of other streams that the launches must be ordered after, since they had not passed when they were
    /// noted; each with whether a launch may read what the work wrote, and so is tainted if the work is.
    pub(crate) fn take_outside(&self) -> Vec<(Ticket, bool)> {
        lock(&self.outside).take().unwrap_or_default()
    }

    fn note_outside(&self, ticket: &Ticket, reads: bool) {
        let mut outside = lock(&self.outside);
        let Some(outside) = &mut *outside else { return };
        match outside.iter_mut().find(|known| known.1 == reads && known.0.stream().is(ticket.stream())) {
            Some((known, _)) if known.number() < ticket.number() => *known = ticket.clone(),
            Some(_) => {}
            None => outside.push((ticket.clone(), reads)),
        }
    }
}

/// True if both streams belong to the same capture, or both to none, so that the wait can be recorded or enqueued. A
/// wait of a captured stream for another stream is noted instead. A wait of another stream for a captured stream is an
/// error.
#[cold]
pub(super) fn share_capture(stream: &Stream, ticket: &Ticket, reads: bool) -> Result<bool> {
    let (mine, other) = (stream.capture(), ticket.stream().capture());
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
    match (mine, other) {
        (Some(mine), Some(other)) if Arc::ptr_eq(mine, other) => Ok(true),
        (_, Some(_)) => wrong(format!(
            "stream `{}` cannot wait for stream `{}`, whose work is captured and does not run now: use a stream of \
             the same capture, or wait after the graph's launch",
            stream.name(),
            ticket.stream().name()
        )),
        (Some(mine), None) => {
            mine.note_outside(ticket, reads);
            Ok(false)
        }
        (None, None) => Ok(true),
    }
}

impl Ticket {
    /// The launches so far, which must be done for the captured work at this ticket to be done. Empty for a stream that
    /// belongs to no capture.
    pub(super) fn launches(&self) -> SmallVec<[Ticket; 3]> {
        let launches = self.stream().capture().and_then(|capture| capture.launches.get());
        launches.map(|launches| launches()).unwrap_or_default()
    }
}

impl StreamInner {
    /// Fails if this stream is captured, since its work does not run.
    #[inline]
    pub(super) fn check_not_captured(&self) -> Result<()> {
        match &self.capture {
            None => Ok(()),
            Some(capture) => Err(self.is_captured(capture.is_over())),
        }
    }

    #[cold]
    fn is_captured(&self, over: bool) -> Error {
        let name = &self.name;
        let text = if over {
            format!(
                "the capture of stream `{name}` is over, and none of its work runs on it: wait for the ticket that \
                 `Exec::launch` returns, or for the stream that the graph is launched on"
            )
        } else {
            format!(
                "the work of stream `{name}` is captured, and none of it has run: the host cannot wait for this work \
                 or read its results; do so before the capture or after the graph's launch"
            )
        };
        Error::new(ErrorKind::Usage, text)
    }
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture")
            .field("device", &self.device.name())
            .field("over", &self.is_over())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::Emulated,
        graph::{Graph, GraphEvent},
        stream::Event,
    };

    fn kept(stream: &Stream) -> usize {
        lock(&stream.capture().unwrap().kept).resources.len()
    }

    /// Each call adds a node to the graph, or is rejected.
    fn use_events(stream: &Stream, event: &GraphEvent) -> [Result<()>; 3] {
        [Event::timed().record(stream), event.record(stream), event.wait(stream)]
    }

    #[test]
    fn a_capture_keeps_nothing_for_a_node_that_is_refused() {
        let device = Device::emulated(Emulated::new());
        let event = GraphEvent::new(&device).unwrap();
        // A capture that is over, and an open capture with a closed stream.
        let mut streams = Vec::new();
        let (_graph, ()) = Graph::capture(&device, |capture| {
            use_events(capture.stream(), &event).into_iter().collect::<Result<()>>()?;
            assert_eq!(kept(capture.stream()), 3);
            streams.push(capture.stream().clone());
            Ok(())
        })
        .unwrap();
        let mut builder = Graph::builder(&device).unwrap();
        builder
            .add(&[], |stream| {
                streams.push(stream.clone());
                event.record(stream)
            })
            .unwrap();
        for (stream, used) in streams.iter().zip([0, 1]) {
            for _ in 0..10 {
                assert!(use_events(stream, &event).iter().all(Result::is_err));
            }
            assert_eq!(kept(stream), used);
        }
    }

    #[test]
    fn waits_on_a_stream_of_a_capture_that_is_over_keep_no_other_stream() {
        let device = Device::emulated(Emulated::new());
        let (_graph, captured) = Graph::capture(&device, |capture| Ok(capture.stream().clone())).unwrap();
        let other = Stream::new(&device).unwrap();
        let (go, held) = std::sync::mpsc::channel::<()>();
        other.host_function(move || _ = held.recv()).unwrap();
        let others = Arc::strong_count(&other.0);
        captured.wait_for(&other).unwrap();
        assert_eq!(Arc::strong_count(&other.0), others);
        drop(go);
        other.synchronize_blocking().unwrap();
    }
}
