//! What all streams of one device share: the lookout, and what happens at a fault.

use std::{
    fmt,
    sync::{Arc, Weak, atomic::AtomicUsize},
};

use super::{Inner, Stream, capture::Capture, lookout::Lookout};
use crate::{
    device::{Device, WeakDevice, backend::Backend},
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
    /// Tasks that ask for their work again and again.
    pub(super) pollers: AtomicUsize,
    /// Those of them that are limited in number.
    pub(super) seats: AtomicUsize,
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
                pollers: AtomicUsize::new(0),
                seats: AtomicUsize::new(0),
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
            pollers: AtomicUsize::new(0),
            seats: AtomicUsize::new(0),
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
            // Under its lock: a piece of work that fails at once may be known before it has its ticket.
            .filter(|stream| lock(&stream.0.order).issued > stream.0.completion.passed())
            .map(|stream| format!("`{}`", stream.name()))
            .collect();
        let whose = match unfinished.len() {
            0 => "no work was unfinished".to_string(),
            _ => format!("unfinished was the work of {}", unfinished.join(", ")),
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

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("backend", &self.backend).finish_non_exhaustive()
    }
}
