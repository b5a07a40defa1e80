//! A capture: streams whose work is recorded into a graph, and what that has to wait for.
//!
//! A captured stream is one like any other, with tickets, clock and marks, over a [`Recorder`] in place of the device.
//! Order between the streams of one capture becomes edges. What was enqueued elsewhere before is not waited for now: it is
//! noted, and the graph's launches wait for it. What is captured has not run, so the host cannot wait for it, and neither
//! can a stream outside: both is an error at once.
//!
//! ```text
//!   captured waits for captured     an edge
//!   captured waits for another      noted: each launch comes after it
//!   another waits for captured      an error, as long as it is captured; afterwards nothing, for its tickets have passed
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

use super::{Held, Stream, Streams, Ticket};
use crate::{
    device::{Device, draft::Few, recorder::Recorder},
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, lock, on_user_code},
};

/// See the [module](self).
pub(crate) struct Capture {
    device: Device,
    recorder: Arc<Recorder>,
    /// Its streams, made with the first.
    streams: OnceLock<std::sync::Weak<Streams>>,
    made: Mutex<Vec<Stream>>,
    /// Each stream's latest. `None` once its launches come after nothing more.
    outside: Mutex<Option<Vec<(Ticket, bool)>>>,
    over: AtomicBool,
    /// What its nodes use beside memory.
    kept: Mutex<Used>,
    /// Those of its graph.
    launches: OnceLock<Launches>,
    /// What the layers above keep with it.
    extension: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// Asks for launches that are not known to be done.
type Launches = Box<dyn Fn() -> SmallVec<[Ticket; 3]> + Send + Sync>;

/// To be kept as long as a graph.
pub(crate) type Kept = Vec<Arc<dyn Any + Send + Sync>>;

/// What the nodes of a capture use beside memory.
#[derive(Default)]
struct Used {
    kept: Kept,
    /// No node is added any more.
    complete: bool,
}

thread_local! {
    /// Those that this thread is in, the innermost last. `ManuallyDrop`: without a destructor it stays usable while the
    /// thread's other locals are destroyed, and theirs use streams. [`Entered`] empties it.
    static ENTERED: ManuallyDrop<RefCell<Vec<Arc<Capture>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    /// Whether this thread has put work into a stream that is none of a capture's, while it is watched.
    static BESIDE: Cell<Option<bool>> = const { Cell::new(None) };
    /// How often this thread has set its captures aside for user code that runs in the middle of them.
    static SET_ASIDE: Cell<usize> = const { Cell::new(0) };
}

/// What a thread was in before user code of another task began to run there. Dropped, the thread is in it again.
struct Aside {
    entered: Vec<Arc<Capture>>,
    beside: Option<bool>,
}

/// A waker, a destructor or a subscriber is called in the middle of a capture: what it enqueues and allocates is no part of that.
fn set_aside() -> Box<dyn Any> {
    let entered = ENTERED.try_with(|entered| std::mem::take(&mut *entered.borrow_mut())).unwrap_or_default();
    SET_ASIDE.set(SET_ASIDE.get() + 1);
    on_user_code(None);
    Box::new(Aside { entered, beside: BESIDE.take() })
}

impl Drop for Aside {
    fn drop(&mut self) {
        let entered = std::mem::take(&mut self.entered);
        // The user code has left all that it entered.
        let left = ENTERED.try_with(|now| now.replace(entered));
        BESIDE.set(self.beside);
        SET_ASIDE.set(SET_ASIDE.get() - 1);
        on_user_code(Some(set_aside));
        drop(left);
    }
}

/// This thread may be in none any more.
fn left() {
    if BESIDE.get().is_none() && ENTERED.try_with(|entered| entered.borrow().is_empty()).unwrap_or(true) {
        on_user_code(None);
    }
}

/// Threads that are watched: most often none, and then nobody looks at what is his own.
static WATCHED: AtomicUsize = AtomicUsize::new(0);

/// This thread is watched, for work that it puts into streams that are none of a capture's.
#[must_use]
pub(crate) struct Watch(());

impl Watch {
    pub(crate) fn new() -> Self {
        WATCHED.fetch_add(1, Ordering::Relaxed);
        BESIDE.set(Some(false));
        on_user_code(Some(set_aside));
        Self(())
    }

    /// True if there was such.
    pub(crate) fn end(self) -> bool {
        BESIDE.get() == Some(true)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        BESIDE.set(None);
        left();
        WATCHED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Work is put into a stream.
#[inline]
pub(super) fn note_work(stream: &Stream) {
    // The thread itself has counted, if it is one.
    if WATCHED.load(Ordering::Relaxed) > 0 && stream.capture().is_none() {
        BESIDE.set(BESIDE.get().map(|_| true));
    }
}

/// This thread is in a capture until it is dropped.
#[must_use]
pub(crate) struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        let capture = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            let capture = entered.pop();
            if entered.is_empty() {
                // Its allocation goes, too: the thread does not release it when it ends.
                *entered = Vec::new();
            }
            capture
        });
        left();
        drop(capture);
    }
}

impl Capture {
    pub(crate) fn new(device: &Device, recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            recorder,
            streams: OnceLock::new(),
            made: Mutex::at(Level::CaptureStreams, Vec::new()),
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

    /// What a layer above keeps with it: made at the first call.
    pub(crate) fn extension<T: Any + Send + Sync>(&self, make: impl FnOnce() -> Arc<T>) -> Option<Arc<T>> {
        self.extension.get_or_init(|| make()).clone().downcast().ok()
    }

    /// The capture that this thread is in.
    pub(crate) fn current() -> Option<Arc<Self>> {
        ENTERED.try_with(|entered| entered.borrow().last().cloned()).ok().flatten()
    }

    /// All captures that this thread is in, the innermost last. None on a thread that ends.
    pub(crate) fn entered() -> SmallVec<[Arc<Self>; 1]> {
        ENTERED.try_with(|entered| entered.borrow().iter().cloned().collect()).unwrap_or_default()
    }

    /// Whether the device may be asked on this thread. A library's calls may be captured in a capture, and the driver takes a
    /// question of the same thread amiss: also one of user code that runs in the middle of it and is no part of it.
    pub(crate) fn may_ask_device() -> bool {
        SET_ASIDE.get() == 0 && ENTERED.try_with(|entered| entered.borrow().is_empty()).unwrap_or(true)
    }

    /// Until the guard is dropped this thread is in it.
    pub(crate) fn enter(self: &Arc<Self>) -> Entered {
        ENTERED.with(|entered| entered.borrow_mut().push(self.clone()));
        on_user_code(Some(set_aside));
        Entered(())
    }

    /// A stream of it, whose first work comes after these nodes.
    pub(crate) fn stream(self: &Arc<Self>, name: &str, after: Few) -> Result<Stream> {
        let _later = Deferred::new();
        let mut made = lock(&self.made);
        let known = self.streams.get().and_then(std::sync::Weak::upgrade);
        let streams = known.unwrap_or_else(|| Streams::captured(&self.device, self));
        let _ = self.streams.set(Arc::downgrade(&streams));
        let held = Held::captured(&self.recorder, self.recorder.stream(name, after));
        let stream = Stream::among(streams, &self.device, name.into(), held)?;
        made.push(stream.clone());
        Ok(stream)
    }

    /// Its streams so far.
    pub(crate) fn streams(&self) -> Vec<Stream> {
        lock(&self.made).clone()
    }

    /// Nothing more is recorded. Its tickets count as passed, and nobody waits for them.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.recorder.set_open(false);
        // From here on every enqueue is refused: what is kept now is used by no node.
        lock(&self.kept).complete = true;
        // Whoever waits is woken: not under the lock.
        let made = std::mem::take(&mut *lock(&self.made));
        for stream in made {
            stream.0.completion.advance(u64::MAX);
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// A node that is about to be added uses this. Not kept once the capture is over: the node is refused then.
    pub(crate) fn keep(&self, used: Arc<dyn Any + Send + Sync>) {
        let mut state = lock(&self.kept);
        if !state.complete {
            state.kept.push(used);
        }
    }

    /// The node was refused.
    pub(crate) fn release<T>(&self, used: &Arc<T>) {
        let mut state = lock(&self.kept);
        let at = state.kept.iter().rposition(|kept| std::ptr::addr_eq(Arc::as_ptr(kept), Arc::as_ptr(used)));
        let released = at.map(|at| state.kept.swap_remove(at));
        drop(state);
        drop(released);
    }

    /// For the owner of the nodes from now on.
    pub(crate) fn take_kept(&self) -> Kept {
        std::mem::take(&mut lock(&self.kept).kept)
    }

    /// Who knows of its graph's launches.
    pub(crate) fn set_launches(&self, launches: impl Fn() -> SmallVec<[Ticket; 3]> + Send + Sync + 'static) {
        let _ = self.launches.set(Box::new(launches));
    }

    /// What its launches have to come after: work of other streams that had not passed when it was met. And whether they may
    /// read what that has written, so that they are spoilt if it is.
    pub(crate) fn take_outside(&self) -> Vec<(Ticket, bool)> {
        lock(&self.outside).take().unwrap_or_default()
    }

    fn comes_after(&self, ticket: &Ticket, reads: bool) {
        let mut outside = lock(&self.outside);
        let Some(outside) = &mut *outside else { return };
        match outside.iter_mut().find(|known| known.1 == reads && known.0.stream().is(ticket.stream())) {
            Some((known, _)) if known.number() < ticket.number() => *known = ticket.clone(),
            Some(_) => {}
            None => outside.push((ticket.clone(), reads)),
        }
    }
}

/// Whether both are streams of one capture, so that the wait is an edge. A wait of a captured stream for another is noted;
/// one of another stream for a captured one is an error.
#[cold]
pub(super) fn is_one_of_both(stream: &Stream, ticket: &Ticket, reads: bool) -> Result<bool> {
    let (mine, other) = (stream.0.streams.capture(), ticket.stream().0.streams.capture());
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
    match (mine, other) {
        (Some(mine), Some(other)) if Arc::ptr_eq(mine, other) => Ok(true),
        (_, Some(_)) => wrong(format!(
            "stream `{}` would wait for stream `{}`, whose work is captured and does not run: it takes no part in that capture",
            stream.name(),
            ticket.stream().name()
        )),
        (Some(mine), None) => {
            mine.comes_after(ticket, reads);
            Ok(false)
        }
        (None, None) => Ok(true),
    }
}

impl Ticket {
    /// What has to be done for what a node does here to be done: the launches until now. None if it is no capture's.
    pub(super) fn launches(&self) -> SmallVec<[Ticket; 3]> {
        let launches = self.stream().capture().and_then(|capture| capture.launches.get());
        launches.map(|launches| launches()).unwrap_or_default()
    }
}

impl Stream {
    /// What it is captured for, if it is.
    #[inline]
    pub(crate) fn capture(&self) -> Option<&Arc<Capture>> {
        self.0.streams.capture()
    }

    /// An error if its work does not run.
    #[inline]
    pub(super) fn not_captured(&self) -> Result<()> {
        match self.capture() {
            None => Ok(()),
            Some(capture) => Err(self.is_captured(capture.is_over())),
        }
    }

    #[cold]
    fn is_captured(&self, over: bool) -> Error {
        let name = self.name();
        let text = if over {
            format!(
                "the capture of stream `{name}` is over, and none of its work runs there: wait for what `launch` of the \
                 graph returns, or for the stream that the graph is launched into"
            )
        } else {
            format!(
                "the work of stream `{name}` is captured, and none of it has run: the host can neither wait for it nor \
                 look at what it makes; do that before the capture, or after the graph's launch"
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
        lock(&stream.capture().unwrap().kept).kept.len()
    }

    /// Each is a node of the graph, or refused.
    fn use_events(stream: &Stream, event: &GraphEvent) -> [Result<()>; 3] {
        [Event::timed().record(stream), event.record(stream), event.wait(stream)]
    }

    #[test]
    fn a_capture_keeps_nothing_for_a_node_that_is_refused() {
        let device = Device::emulated(Emulated::new());
        let event = GraphEvent::new(&device).unwrap();
        // Over; and open, with a stream that is closed.
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
