//! [`HubOptions`]: the configuration of a hub.

use super::{Message, when_full::WhenFull};
use crate::error::{Error, ErrorKind, Result};

/// The configuration of a hub: how many messages it queues, what it does when it is full, how many envelopes it has
/// and how large they are.
///
/// By default [`Flow::connect`](crate::Flow::connect) makes a queue of one message with two envelopes per location.
/// For an operator that waits for several messages at once the queue holds that many, with one envelope more. A
/// message type with several envelopes multiplies these numbers of envelopes by the number in a message.
/// [`Flow::connect_with`](crate::Flow::connect_with) takes `HubOptions` in place of these defaults.
///
/// ```
/// use wakeline::HubOptions;
/// let hub = HubOptions::bounded(2).envelopes(3).envelope_bytes(4 << 20);
/// ```
///
/// | kind | when it is full |
/// |---|---|
/// | [`bounded`](Self::bounded) | makes the writer wait |
/// | [`drop_newest`](Self::drop_newest) | drops the message that is sent |
/// | [`drop_oldest`](Self::drop_oldest) | drops the message that has waited longest |
/// | [`latest`](Self::latest) | replaces its one message, the newest, which is read again until there is a newer one |
///
/// Dropped messages are [counted](crate::flow::HubReport). A hub that drops messages has by default enough envelopes
/// to do so: one for each message that it queues, one for the writer and one for the reader. It still waits for a
/// reader that keeps more of them, and for a writer that gets its envelopes from a smaller hub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubOptions {
    /// Set together with `when_full`, or `None` if neither was set.
    pub(crate) capacity: Option<usize>,
    pub(crate) when_full: WhenFull,
    pub(crate) envelopes: Option<usize>,
    pub(crate) envelope_bytes: Option<usize>,
    /// The reader takes envelopes wherever they are: the hub copies nothing.
    pub(crate) reads_anywhere: bool,
}

/// The configuration of a hub that keeps the latest message: see [`HubOptions::latest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latest(());

/// The default number of messages that a hub queues.
pub(crate) const DEFAULT_CAPACITY: usize = 1;

impl HubOptions {
    fn queue(capacity: usize, when_full: WhenFull) -> Self {
        Self { capacity: Some(capacity), when_full, ..Self::default() }
    }

    /// A queue of `capacity` messages that makes the writer wait while it is full. A capacity of 0 is an error before the
    /// flow runs.
    #[must_use]
    pub fn bounded(capacity: usize) -> Self {
        Self::queue(capacity, WhenFull::Block)
    }

    /// A queue of `capacity` messages that never makes the writer wait: while it is full, messages that are sent are
    /// dropped.
    #[must_use]
    pub fn drop_newest(capacity: usize) -> Self {
        Self::queue(capacity, WhenFull::DropNewest)
    }

    /// A queue of `capacity` messages that never makes the writer wait: when it is full, its oldest message is dropped in
    /// favour of the one that is sent. With a capacity of 1 the reader gets the newest message, once.
    ///
    /// Messages that are already reserved for an operator's run are not dropped.
    #[must_use]
    pub fn drop_oldest(capacity: usize) -> Self {
        Self::queue(capacity, WhenFull::DropOldest)
    }

    /// Keeps the newest message and never makes the writer wait. The reader's [`take`](crate::Input::take) returns a
    /// clone of it, in each run of the newest there is, even if it has not changed since the last run. Use it for
    /// values that change rarely and are always needed: settings, a position, a reference.
    ///
    /// **Something else must decide when the operator runs**: another input or a period. Once there was a message, an
    /// input of such a hub is always ready; an operator that waits for nothing else runs again and again with the
    /// same value and is never idle. To get each message only once, use [`recv`](crate::Input::recv) or
    /// [`try_take`](crate::Input::try_take), or [`drop_oldest(1)`](Self::drop_oldest).
    ///
    /// Its messages are `Clone`. Envelopes are not: an envelope belongs exclusively to its reader, and none would be
    /// left for the next run. For these, [`drop_oldest(1)`](Self::drop_oldest) gives the newest, once.
    ///
    /// After the writer has ended, the value stays readable as long as the operator has another input that has not
    /// ended. An operator whose other inputs are all of this kind or optional ends when all writers have ended and it
    /// has read the last message of each.
    ///
    /// Metadata and requests stay with a kept message. Its [metadata](super::MergePolicy) is merged with that of the
    /// other inputs in each run. A kept [request](crate::Flow::service) keeps its caller waiting: if no run answers
    /// it, the caller gets an error only when a newer message replaces the request or the flow ends.
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, operator::source, prelude::*};
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
    /// flow.connect_with(factor.output, scale.factor, HubOptions::latest());
    /// flow.connect(numbers.output, scale.numbers);
    /// assert_eq!(flow.run().await?.operator("scale").unwrap().runs, 3);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn latest() -> Latest {
        Latest(())
    }

    /// Sets the number of envelopes on each side. Fewer than a message certainly has is an error before the flow runs.
    ///
    /// With eight or more envelopes of at most 256 KiB each, messages that wait for envelopes to be copied to, and those
    /// that [`Output::send_all`](crate::Output::send_all) sends together, are copied up to eight envelopes at a time, but
    /// no more than 512 KiB and a quarter of the envelopes. Such envelopes are allocated in pieces of up to 2 MiB, each of
    /// which is freed as a whole.
    #[must_use]
    pub fn envelopes(mut self, count: usize) -> Self {
        self.envelopes = Some(count);
        self
    }

    /// Sets the size of each envelope in bytes. The writer gets blank envelopes of this size from
    /// [`Output::blank`](crate::Output::blank).
    ///
    /// Not needed where the writer only passes envelopes on: the default is the size of the largest envelope that the
    /// writer can get.
    #[must_use]
    pub fn envelope_bytes(mut self, bytes: usize) -> Self {
        self.envelope_bytes = Some(bytes);
        self
    }

    /// This configuration, with `defaults` for what is not set.
    pub(crate) fn or(self, defaults: HubOptions) -> Self {
        let (capacity, when_full) = match self.capacity {
            Some(_) => (self.capacity, self.when_full),
            None => (defaults.capacity, defaults.when_full),
        };
        Self {
            capacity,
            when_full,
            envelopes: self.envelopes.or(defaults.envelopes),
            envelope_bytes: self.envelope_bytes.or(defaults.envelope_bytes),
            reads_anywhere: self.reads_anywhere || defaults.reads_anywhere,
        }
    }

    /// The default number of envelopes per location, for messages of `each` envelopes, where operators wait for `needs`
    /// messages at once: those of `needs + 1` messages, so that one is written while the others are read.
    pub(crate) fn default_envelopes(self, needs: usize, each: usize) -> usize {
        let messages = match self.when_full {
            WhenFull::Block => needs.saturating_add(1),
            // One for each message that it queues, one for the reader and one for the writer.
            _ => self.capacity.unwrap_or(DEFAULT_CAPACITY).saturating_add(2),
        };
        messages.saturating_mul(each)
    }
}

/// Makes a copy of a message that stays in the hub.
pub(crate) type CloneFn<M> = fn(&M) -> M;

/// The configuration of a hub for messages of this type: [`HubOptions`], or for messages that are `Clone` also
/// [`Latest`]. Sealed: implemented for these two only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not configure a hub for messages of type `{M}`",
    note = "use `HubOptions`, such as `HubOptions::bounded(4)`, or `HubOptions::latest()` for messages that are `Clone`"
)]
pub trait HubOptionsFor<M: Message> {
    #[doc(hidden)]
    fn typed(self) -> TypedHubOptions<M>;
}

/// The configuration of a hub, and how the hub copies a message that it keeps.
#[derive(Debug)]
pub struct TypedHubOptions<M> {
    pub(crate) options: HubOptions,
    pub(crate) clone_latest: Option<CloneFn<M>>,
}

impl<M> TypedHubOptions<M> {
    /// This configuration, with `defaults` for what is not set.
    pub(crate) fn or(self, defaults: Self) -> Self {
        let options = self.options.or(defaults.options);
        let keeps = options.when_full.keeps_latest();
        Self { options, clone_latest: self.clone_latest.or(defaults.clone_latest).filter(|_| keeps) }
    }
}

impl<M> Clone for TypedHubOptions<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for TypedHubOptions<M> {}

impl<M: Message> HubOptionsFor<M> for TypedHubOptions<M> {
    fn typed(self) -> Self {
        self
    }
}

impl<M: Message> HubOptionsFor<M> for HubOptions {
    fn typed(self) -> TypedHubOptions<M> {
        TypedHubOptions { options: self, clone_latest: None }
    }
}

impl<M: Message + Clone> HubOptionsFor<M> for Latest {
    fn typed(self) -> TypedHubOptions<M> {
        TypedHubOptions { options: HubOptions::queue(1, WhenFull::KeepLatest), clone_latest: Some(M::clone) }
    }
}

/// Checks a capacity or a number of envelopes.
pub(crate) fn at_least_one(what: &str, number: usize) -> Result<usize> {
    if number == 0 {
        return Err(Error::new(ErrorKind::Setup, format!("{what} is 0: set it to at least 1")));
    }
    Ok(number)
}
