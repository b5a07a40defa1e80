//! Joining: a stream waits for several others at once.

use super::{Event, Stream, Ticket};
use crate::error::Result;

impl Stream {
    /// Work enqueued here from now on waits, on the device, for each of these: for all that a [`Stream`] was given until
    /// now, for a [`Ticket`] and no later work. This stream itself and `None` may be among them and are skipped. The
    /// default stream joins only where it is among them (see [`Stream::default_of`]).
    ///
    /// Work on buffers and envelopes is ordered without this.
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
    /// [`Usage`](crate::ErrorKind::Usage) if a device is of another make; [`DeviceLost`](crate::ErrorKind::DeviceLost)
    /// after a fault. Those before it have been joined then.
    pub fn join<P: Point>(&self, points: impl IntoIterator<Item = P>) -> Result<()> {
        points.into_iter().filter_map(|point| point.ticket()).try_for_each(|ticket| self.wait(&ticket))
    }
}

/// A point in a stream's work: a [`Ticket`], the record of an [`Event`], the present end of a [`Stream`], any of them
/// behind a reference, or none.
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
