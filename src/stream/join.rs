//! Joining: a stream waits for several others at once.

use super::{Event, Stream, Ticket};
use crate::error::Result;

impl Stream {
    /// Work enqueued here from now on waits, on the device, for each of these points: for all that was enqueued into a
    /// [`Stream`] before this call, for a [`Ticket`] and no later work. This stream itself and `None` may be among them
    /// and are skipped. The default stream is joined only if it is listed (see [`Stream::default_of`]).
    ///
    /// Work on buffers and envelopes is ordered without this call.
    ///
    /// ```
    /// use wakeline::{Stream, device::{Device, Emulated}};
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let [main, left, right] = [Stream::new(&device)?, Stream::new(&device)?, Stream::new(&device)?];
    /// main.join([&left, &right])?;
    /// main.join([Some(left.ticket()), None])?;
    /// main.join([Stream::default_of(&device)?])?;
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if a device has a different backend;
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault. The points before the failing one have been joined
    /// by then.
    pub fn join<P: Point>(&self, points: impl IntoIterator<Item = P>) -> Result<()> {
        points.into_iter().filter_map(|point| point.ticket()).try_for_each(|ticket| self.wait(&ticket))
    }
}

/// A point in a stream's work: a [`Ticket`], the record of an [`Event`], the current end of a [`Stream`], a reference
/// to any of these, or `None`.
///
/// Sealed.
pub trait Point: Sealed {
    #[doc(hidden)]
    fn ticket(&self) -> Option<Ticket>;
}

mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed {}
}
use sealed::Sealed;

impl Sealed for Stream {}
impl Sealed for Ticket {}
impl Sealed for Event {}
impl<P: Sealed> Sealed for &P {}
impl<P: Sealed> Sealed for Option<P> {}

impl Point for Stream {
    fn ticket(&self) -> Option<Ticket> {
        Some(Stream::ticket(self))
    }
}

impl Point for Ticket {
    fn ticket(&self) -> Option<Ticket> {
        Some(self.clone())
    }
}

impl Point for Event {
    fn ticket(&self) -> Option<Ticket> {
        Event::ticket(self)
    }
}

impl<P: Point> Point for &P {
    fn ticket(&self) -> Option<Ticket> {
        (**self).ticket()
    }
}

impl<P: Point> Point for Option<P> {
    fn ticket(&self) -> Option<Ticket> {
        self.as_ref().and_then(Point::ticket)
    }
}

/// The same stream.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.is(other)
    }
}

impl Eq for Stream {}
