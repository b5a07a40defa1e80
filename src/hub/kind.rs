//! [`Hub`]: what a hub is to be like.

use super::{Message, queue::Full};
use crate::error::{Error, ErrorKind, Result};

/// What a hub is to be like: how many messages it queues and what it does with one more, how many envelopes it has and how
/// large they are.
///
/// [`Flow::connect`](crate::Flow::connect) makes a queue of one with two envelopes a location, or a queue of as many as an
/// operator waits for at once, with one envelope more; with [`Flow::connect_with`](crate::Flow::connect_with) it is said
/// here.
///
/// ```
/// use wakeline::Hub;
/// let hub = Hub::bounded(2).envelopes(3).envelope_bytes(4 << 20);
/// ```
///
/// | a full one | |
/// |---|---|
/// | [`bounded`](Self::bounded) | holds the writer up |
/// | [`drop_newest`](Self::drop_newest) | drops the message that is sent |
/// | [`drop_oldest`](Self::drop_oldest) | drops the one that has waited longest |
/// | [`latest`](Self::latest) | has one message, the newest, which is read again until there is a newer one |
///
/// What was dropped is [counted](crate::flow::HubReport). One that drops messages has envelopes enough to do so, if the
/// number is not said: one for each message that it queues, one for the writer and one for the reader. A reader that keeps
/// more of them, or a writer that is passed its envelopes by a smaller hub, is waited for all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hub {
    /// Both were said, or neither.
    pub(crate) capacity: Option<usize>,
    pub(crate) full: Full,
    pub(crate) envelopes: Option<usize>,
    pub(crate) envelope_bytes: Option<usize>,
}

/// A hub that keeps the latest message: see [`Hub::latest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latest(());

/// Messages that a hub queues if nobody says otherwise.
pub(crate) const DEFAULT_CAPACITY: usize = 1;

impl Hub {
    fn queue(capacity: usize, full: Full) -> Self {
        Self { capacity: Some(capacity), full, ..Self::default() }
    }

    /// A queue of `capacity` messages; a full one holds the writer up. 0 is an error before running.
    #[must_use]
    pub fn bounded(capacity: usize) -> Self {
        Self::queue(capacity, Full::Hold)
    }

    /// A queue of `capacity` messages that never holds the writer up: into a full one no further message goes, and what is
    /// sent is dropped.
    #[must_use]
    pub fn drop_newest(capacity: usize) -> Self {
        Self::queue(capacity, Full::DropNewest)
    }

    /// A queue of `capacity` messages that never holds the writer up: a full one drops its oldest for the one that is sent.
    /// With 1, the reader gets the newest, once.
    ///
    /// What an operator's run was promised is not dropped any more.
    #[must_use]
    pub fn drop_oldest(capacity: usize) -> Self {
        Self::queue(capacity, Full::DropOldest)
    }

    /// Keeps the newest message, and never holds the writer up: the reader's [`take`](crate::Input::take) gives a clone of
    /// it, in each run the newest there is, though it be the same as before. For what changes now and then, and is needed
    /// always: settings, a position, a reference.
    ///
    /// **Something else must say when the operator runs**: another input, a period. Once there was a message an input that
    /// is connected by it is always ready, and an operator that waits for nothing else runs again and again, with the
    /// same value, and never rests. Who wants each message once has [`recv`](crate::Input::recv) and
    /// [`try_take`](crate::Input::try_take), which give no more than that, or [`drop_oldest(1)`](Self::drop_oldest).
    ///
    /// Its messages are `Clone`. Envelopes are not: they are their reader's alone, which would have nothing left to give to
    /// the next run. [`drop_oldest(1)`](Self::drop_oldest) gives the newest of them, once.
    ///
    /// When the writer has ended, the value stays as long as the operator has another input that has not. An operator whose
    /// other inputs are all of this kind or optional ends when all writers have ended and it has read the last of each.
    ///
    /// What came with a message stays with it. Its [metadata](super::MergePolicy) merge with those of the other inputs in
    /// each run. A [request](crate::Flow::service) that is kept holds its caller: one whom no run answers is told so only
    /// when a newer message takes its place, or the flow ends.
    ///
    /// ```
    /// use wakeline::{Flow, Hub, operator::source, prelude::*};
    ///
    /// #[derive(Ports)]
    /// struct ScalePorts {
    ///     #[input]
    ///     numbers: Input<f32>,
    ///     #[input]
    ///     factor: Input<f32>,
    /// }
    ///
    /// struct Scale;
    ///
    /// impl Operator for Scale {
    ///     type Ports = ScalePorts;
    ///
    ///     async fn compute(&mut self, ports: &mut ScalePorts, _cx: &mut Cx) -> Result<()> {
    ///         let factor = ports.factor.take()?;            // the newest, again if it has not changed
    ///         println!("{}", factor * ports.numbers.take()?);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("scale");
    /// let (mut once, mut numbers) = (Some(2.5), [1.0, 2.0, 3.0].into_iter());
    /// let factor = flow.add("factor", source(move || std::future::ready(Ok(once.take()))));
    /// let numbers = flow.add("numbers", source(move || std::future::ready(Ok(numbers.next()))));
    /// let scale = flow.add("scale", Scale);
    /// flow.connect_with(factor.output, scale.factor, Hub::latest());
    /// flow.connect(numbers.output, scale.numbers);
    /// assert_eq!(flow.run().await?.operator("scale").unwrap().runs, 3);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn latest() -> Latest {
        Latest(())
    }

    /// So many envelopes on each side. 0 is an error before running.
    #[must_use]
    pub fn envelopes(mut self, count: usize) -> Self {
        self.envelopes = Some(count);
        self
    }

    /// Each envelope holds so many bytes. The writer gets blank ones of this size from
    /// [`Output::blank`](crate::Output::blank).
    ///
    /// Leave it out where the writer only passes envelopes on: then the size is that of the largest it can be given.
    #[must_use]
    pub fn envelope_bytes(mut self, bytes: usize) -> Self {
        self.envelope_bytes = Some(bytes);
        self
    }

    /// What was said here, then what `defaults` says.
    pub(crate) fn or(self, defaults: Hub) -> Self {
        let (capacity, full) = match self.capacity {
            Some(_) => (self.capacity, self.full),
            None => (defaults.capacity, defaults.full),
        };
        Self {
            capacity,
            full,
            envelopes: self.envelopes.or(defaults.envelopes),
            envelope_bytes: self.envelope_bytes.or(defaults.envelope_bytes),
        }
    }

    /// Envelopes a location if nobody says otherwise, where operators wait for `needs` messages at once: one more, so that
    /// one is written meanwhile.
    pub(crate) fn default_envelopes(self, needs: usize) -> usize {
        match self.full {
            Full::Hold => needs.saturating_add(1),
            // Those that it queues, one for the reader and one for the writer.
            _ => self.capacity.unwrap_or(DEFAULT_CAPACITY).saturating_add(2),
        }
    }
}

/// Makes another one of a message that stays where it is.
pub(crate) type AgainFn<M> = fn(&M) -> M;

/// A kind of hub for messages of this type: a [`Hub`], and for those that are `Clone` also one that keeps the
/// [latest](Hub::latest).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no kind of hub for messages of `{M}`",
    note = "write a `Hub`, as `Hub::bounded(4)`, or `Hub::latest()`, of messages that are `Clone`"
)]
pub trait HubOf<M: Message> {
    #[doc(hidden)]
    fn kind(self) -> HubKind<M>;
}

/// A hub, and what it does with messages that it keeps.
#[doc(hidden)]
#[derive(Debug)]
pub struct HubKind<M> {
    pub(crate) hub: Hub,
    pub(crate) again: Option<AgainFn<M>>,
}

impl<M> HubKind<M> {
    /// What was said here, then what `defaults` says.
    pub(crate) fn or(self, defaults: Self) -> Self {
        let hub = self.hub.or(defaults.hub);
        let keeps = matches!(hub.full, Full::Replace);
        Self { hub, again: self.again.or(defaults.again).filter(|_| keeps) }
    }
}

impl<M> Clone for HubKind<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for HubKind<M> {}

impl<M: Message> HubOf<M> for Hub {
    fn kind(self) -> HubKind<M> {
        HubKind { hub: self, again: None }
    }
}

impl<M: Message + Clone> HubOf<M> for Latest {
    fn kind(self) -> HubKind<M> {
        HubKind { hub: Hub::queue(1, Full::Replace), again: Some(M::clone) }
    }
}

/// A capacity or a number of envelopes that can work.
pub(crate) fn at_least_one(what: &str, number: usize) -> Result<usize> {
    if number == 0 {
        return Err(Error::new(ErrorKind::Setup, format!("{what} is 0: nothing could ever pass; at least 1")));
    }
    Ok(number)
}
