//! What all streams of one device share: the lookout, and what happens at a fault.

use std::{
    fmt,
    sync::{Arc, Weak, atomic::AtomicUsize},
};

use super::{Inner, Stream, Ticket, capture::Capture, lookout::Lookout, watch::Vigil};
use crate::{
    device::{
        Device, WeakDevice,
        backend::{Backend, RawEvent, RawStream},
    },
    error::{Error, ErrorKind, Result},
    sync::{Level, Mutex, assert_may_wake, discard, later, lock, log},
};

/// The streams of one device.
pub(crate) struct Streams {
    device: WeakDevice,
    backend: Arc<dyn Backend>,
    live: Mutex<Vec<Weak<Inner>>>,
    /// The device's default stream, while anybody holds it.
    pub(super) default: Mutex<Weak<Inner>>,
    lookout: Lookout,
    /// Whether the device is asked for tasks that only hear of its loss.
    pub(super) vigil: Vigil,
    /// Tasks that ask for their work again and again.
    pub(super) pollers: AtomicUsize,
    /// Those of them that are limited in number.
    pub(super) seats: AtomicUsize,
    /// Of streams that were dropped with work in flight: an event at the end of each.
    left: Mutex<Vec<RawEvent>>,
    /// For streams that are captured: the device's own, and what they are captured for.
    captured: Option<(Arc<Streams>, Arc<Capture>)>,
}

impl Streams {
    pub(crate) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            let whom = device.downgrade();
            device.backend().when_lost(Box::new(move |error| {
                if let Some(device) = whom.upgrade() {
                    let _ = Self::of(&device).heed::<()>(Err(error));
                }
            }));
            Arc::new(Self {
                device: device.downgrade(),
                backend: device.backend().clone(),
                live: Mutex::default(),
                default: Mutex::at(Level::DefaultStream, Weak::new()),
                lookout: Lookout::new(device),
                vigil: Vigil::new(),
                pollers: AtomicUsize::new(0),
                seats: AtomicUsize::new(0),
                left: Mutex::default(),
                captured: None,
            })
        })
    }

    /// For the streams of one capture.
    pub(super) fn captured(device: &Device, capture: &Arc<Capture>) -> Arc<Self> {
        Arc::new(Self {
            device: device.downgrade(),
            backend: capture.recorder().clone(),
            live: Mutex::default(),
            default: Mutex::at(Level::DefaultStream, Weak::new()),
            lookout: Lookout::new(device),
            vigil: Vigil::new(),
            pollers: AtomicUsize::new(0),
            seats: AtomicUsize::new(0),
            left: Mutex::default(),
            captured: Some((Self::of(device), capture.clone())),
        })
    }

    /// What its streams are captured for, if they are.
    #[inline]
    pub(super) fn capture(&self) -> Option<&Arc<Capture>> {
        self.captured.as_ref().map(|(_, capture)| capture)
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn lookout(&self) -> &Lookout {
        &self.lookout
    }

    /// A task waits for what other tasks bring, and [hears](crate::device::HearsOfLoss) of a loss: from now on, as long as
    /// it waits and work is in flight, the device is asked at every beat. Called after the waiter has registered.
    pub(crate) fn attend(device: &Device) {
        if device.is_host() {
            return;
        }
        let streams = Self::of(device);
        if streams.vigil.attend() {
            streams.keep_vigil();
        }
    }

    /// Work was enqueued while tasks wait and no beat is kept for them.
    #[cold]
    pub(super) fn stir(self: &Arc<Self>) {
        if self.vigil.stir() {
            self.keep_vigil();
        }
    }

    #[cold]
    fn keep_vigil(self: &Arc<Self>) {
        let own = Arc::downgrade(self);
        self.lookout.sweep(Box::new(move || own.upgrade().is_some_and(|streams| streams.beat())));
    }

    fn beat(&self) -> bool {
        let Some(device) = self.device.upgrade() else { return false };
        let goes_on = self.vigil.beat(|| !device.is_lost() && device.has_waiters(), || self.has_work());
        discard(device);
        goes_on
    }

    /// Asks each stream with work that is not known to be done how far it is. True if some of it is not.
    fn has_work(&self) -> bool {
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        let mut has_work = false;
        for stream in &live {
            let issued = lock(&stream.0.order).issued;
            if issued > stream.0.completion.passed() {
                // A loss is told by the look itself; after an error of another kind the stream is asked again.
                let _ = Ticket::new(stream.clone(), issued).look_back();
                has_work |= issued > stream.0.completion.passed();
            }
        }
        discard(live);
        let mut left = std::mem::take(&mut *lock(&self.left));
        left.retain(|event| !self.heed(self.is_over(*event)).unwrap_or_default());
        has_work |= !left.is_empty();
        lock(&self.left).append(&mut left);
        has_work
    }

    /// The last handle of this stream is being dropped, and its work is not known to be done. Memory that is used there keeps
    /// the stream; this is for work that uses none.
    #[cold]
    pub(super) fn leave(self: &Arc<Self>, device: &Device, stream: RawStream) {
        let is_left = self.captured.is_none() && !device.is_lost() && device.check_process().is_ok();
        let may_ask = Capture::may_ask_device();
        if !is_left || (may_ask && self.backend.stream_query(stream).unwrap_or_default()) {
            return;
        }
        // Two at each call: there are no more of them than were in flight at a time.
        let oldest: Vec<_> = {
            let mut left = lock(&self.left);
            let count = if may_ask { left.len().min(2) } else { 0 };
            left.drain(..count).collect()
        };
        let mut still: Vec<_> = oldest.into_iter().filter(|event| !self.is_over(*event).unwrap_or_default()).collect();
        let recorded = self.backend.event_create(false).and_then(|event| {
            still.push(event);
            self.backend.event_record(event, stream)
        });
        let mut left = lock(&self.left);
        left.append(&mut still);
        let is_armed = self.vigil.is_armed();
        drop(left);
        if is_armed || recorded.is_err() {
            let own = self.clone();
            later("what hears of a lost device panicked", move || {
                let _ = own.heed(recorded);
                own.stir();
            });
        }
    }

    /// Whether what comes before this event of [`left`](Self::left) is done. Then it is destroyed.
    fn is_over(&self, event: RawEvent) -> Result<bool> {
        let is_over = self.backend.event_query(event)?;
        if is_over {
            self.backend.event_destroy(event);
        }
        Ok(is_over)
    }

    pub(super) fn enter(&self, stream: &Stream) {
        let mut live = lock(&self.live);
        live.retain(|stream| stream.strong_count() > 0);
        live.push(Arc::downgrade(&stream.0));
    }

    /// Passes a result on. If this device is lost, all that waits there fails first, and the error from then on names all
    /// streams whose work was not known to be done.
    ///
    /// A call that names another device too (a wait, a copy, a launch of a graph that waits) fails if that one is lost. So
    /// an error is a question only: the device itself is asked.
    pub(crate) fn heed<T>(&self, result: Result<T>) -> Result<T> {
        assert_may_wake();
        if let Some((own, _)) = &self.captured {
            return own.heed(result);
        }
        result.map_err(|error| self.failed(error))
    }

    #[cold]
    fn failed(&self, error: Error) -> Error {
        // In a fork every call of the driver fails, each with a code of its own.
        if let Some(Err(forked)) = self.device.upgrade().map(|device| device.check_process()) {
            return forked;
        }
        // Ends with the device's own answer, which costs no call where the loss is known.
        if error.is_device_lost() && self.backend.make_current().is_err_and(|own| own.is_device_lost()) {
            return self.lose(error);
        }
        error
    }

    fn lose(&self, error: Error) -> Error {
        let Some(device) = self.device.upgrade() else { return error };
        if let Some(known) = device.lost() {
            return known;
        }
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        let unfinished: Vec<String> = live
            .iter()
            .filter_map(|stream| {
                // Under its lock: a piece of work that fails at once may be known before it has its ticket.
                let (order, passed) = (lock(&stream.0.order), stream.0.completion.passed());
                (order.issued > passed).then(|| format!("`{}`{}", stream.name(), order.launches.after(passed)))
            })
            .collect();
        let whose = match unfinished.len() {
            0 => "no unfinished work".to_string(),
            _ => format!("unfinished work on: {}", unfinished.join(", ")),
        };
        let told = Error::new(
            ErrorKind::DeviceLost,
            format!("{device} takes no more work in this process; {whose}; start again in a new process"),
        )
        .because(error);
        let is_first = device.set_lost(told);
        discard(live);
        // Read again: one that was made meanwhile may have waiters already.
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        live.iter().for_each(|stream| stream.0.completion.fail());
        discard(live);
        // Those who hear of it take locks of their own: at the end, if this is called with one held.
        let lost = device.clone();
        later("what hears of a lost device panicked", move || lost.tell_lost());
        if is_first {
            let (device, unfinished) = (device.name().to_owned(), unfinished.join(", "));
            log(move || tracing::error!(%device, unfinished, "device lost"));
        }
        match device.check() {
            Err(error) => error,
            Ok(()) => unreachable!("it was set above"),
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.left.get_mut().drain(..).for_each(|event| self.backend.event_destroy(event));
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("backend", &self.backend).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::{Emulated, HearsOfLoss};

    /// A task that waits for what another one brings.
    #[derive(Default)]
    struct Waits {
        waiting: Mutex<bool>,
        lost: AtomicUsize,
    }

    impl HearsOfLoss for Waits {
        fn device_lost(&self) {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }

        fn has_waiters(&self) -> bool {
            *lock(&self.waiting)
        }
    }

    /// The beat of a device on which nothing is in flight ends though a task waits, and work starts it again: an idle flow uses no
    /// processor.
    #[test]
    fn a_device_is_asked_for_those_who_wait_only_while_work_is_in_flight() {
        let device = Device::emulated(Emulated::new());
        let (stream, streams) = (Stream::new(&device).unwrap(), Streams::of(&device));
        let waits = Arc::<Waits>::default();
        let hears: Weak<Waits> = Arc::downgrade(&waits);
        device.tell_when_lost(hears);
        *lock(&waits.waiting) = true;
        // The beats are this test's: the lookout has none of them.
        assert!(streams.vigil.attend());
        assert!(!streams.beat() && streams.vigil.is_armed(), "nothing is in flight");
        assert!(!streams.vigil.attend(), "work starts it");
        let (go, held) = std::sync::mpsc::channel::<()>();
        assert!(streams.vigil.stir());
        stream.host_function(move || _ = held.recv()).unwrap();
        assert!(streams.beat() && !streams.vigil.is_armed(), "work is in flight");
        drop(go);
        // What has passed is not asked for by a task: the beat itself finds out.
        device.backend().stream_synchronize(stream.raw()).unwrap();
        assert!(!streams.beat() && streams.vigil.is_armed());
        // An enqueue starts a beat of the lookout's, which ends again, though the work is never asked for.
        stream.host_function(|| ()).unwrap();
        assert!(stream.ticket().number() == 2);
        while !streams.vigil.is_armed() {
            std::thread::yield_now();
        }
        assert_eq!(stream.0.completion.passed(), 2, "the lookout has asked");
        *lock(&waits.waiting) = false;
        assert!(streams.vigil.stir());
        assert!(!streams.beat() && !streams.vigil.is_armed(), "no task waits");
        assert!(streams.vigil.attend());
        assert_eq!(waits.lost.load(Ordering::SeqCst), 0);
    }
}
