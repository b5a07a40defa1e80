//! The uses of a piece of memory, and the host's wait for them.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use smallvec::SmallVec;

use super::shelves::Bound;
use crate::{
    error::{CallerErrors, Result},
    planted::{self, Planted},
    stream::{Completed, Ticket},
    sync::{Level, Mutex},
};

/// The last write and the reads since.
#[derive(Debug, Default)]
pub(super) struct Uses {
    pub(super) write: Option<Ticket>,
    /// One a stream, its latest.
    reads: SmallVec<[Ticket; 2]>,
}

impl Uses {
    /// Behind the lock that all who use the memory share.
    #[inline]
    pub(super) const fn locked(self) -> Mutex<Self> {
        Mutex::at(Level::MemoryUses, self)
    }

    pub(super) fn read_by(&mut self, ticket: Ticket) {
        if planted::is(Planted::EarlierReader) {
            self.reads.clear();
        }
        match self.reads.iter_mut().find(|read| read.stream().is(ticket.stream())) {
            Some(read) if read.number() < ticket.number() => *read = ticket,
            Some(_) => {}
            None => {
                self.reads.retain(|read| !read.has_passed());
                self.reads.push(ticket);
            }
        }
    }

    #[inline]
    pub(super) fn written_by(&mut self, ticket: Ticket) {
        self.reads.clear();
        self.write = Some(ticket);
    }

    /// Marks all of them now, for whoever comes after them on another stream.
    #[inline]
    pub(super) fn commit(&mut self) -> Result<()> {
        self.write.iter_mut().chain(&mut self.reads).try_for_each(Ticket::commit)
    }

    /// Shows each that a write must come after.
    #[inline]
    pub(super) fn each(&self, show: impl FnMut(&Ticket) -> Result<()>) -> Result<()> {
        self.write.iter().chain(&self.reads).try_for_each(show)
    }

    /// All that a write must come after.
    pub(super) fn all(&self) -> SmallVec<[Ticket; 3]> {
        self.write.iter().chain(&self.reads).cloned().collect()
    }

    pub(super) fn all_are(&self, is: impl Fn(&Ticket) -> bool) -> bool {
        self.write.iter().chain(&self.reads).all(is)
    }

    pub(super) fn any_is(&self, is: impl Fn(&Ticket) -> bool) -> bool {
        self.write.iter().chain(&self.reads).any(is)
    }

    /// What memory that is freed with these uses is bound to.
    #[inline]
    pub(super) fn bound(&self) -> Bound {
        let mut streams = self.write.iter().chain(&self.reads).map(|ticket| ticket.stream().id());
        match streams.next() {
            None => Bound::Idle,
            Some(first) if streams.all(|stream| stream == first) => Bound::To(first),
            Some(_) => Bound::ToSeveral,
        }
    }

    /// For memory that nobody will read any more.
    #[inline]
    pub(super) fn forget_passed(&mut self) {
        if self.any_is(Ticket::has_passed) {
            self.forget_some();
        }
    }

    #[inline(never)]
    fn forget_some(&mut self) {
        self.write.take_if(|write| write.has_passed());
        self.reads.retain(|read| !read.has_passed());
    }

    pub(super) fn forget_settled(&mut self) {
        self.write.take_if(|write| write.is_settled());
        self.reads.retain(|read| !read.is_settled());
    }
}

/// Resolves when the uses of a piece of memory that were asked about are over: those that the host must not touch it
/// during, or its writes alone. Where no other stream has waited for those, work that is enqueued behind them until this is first
/// polled may be waited for, too.
///
/// # Cancel safety
/// Dropping it does nothing: the work that it waited for goes on.
#[must_use = "futures do nothing unless awaited"]
pub struct HostAccess {
    open: SmallVec<[Completed; 3]>,
    /// The memory was given to a caller of a flow, who gets these errors.
    errors: Option<Arc<CallerErrors>>,
}

impl HostAccess {
    pub(super) fn new(open: SmallVec<[Ticket; 3]>) -> Self {
        let open = open.into_iter().filter(|ticket| !ticket.is_settled()).map(|ticket| ticket.completed()).collect();
        Self { open, errors: None }
    }

    /// For a caller of a flow: it names nothing that is inside.
    pub(crate) fn for_caller(self, errors: &Arc<CallerErrors>) -> Self {
        Self { errors: Some(errors.clone()), ..self }
    }

    /// Waits no longer, until it is polled again: nobody else need wait for it.
    pub(crate) fn rest(&mut self) {
        self.open.iter_mut().for_each(|open| *open = open.ticket().completed());
    }

    pub(crate) async fn wait(mut self) -> Result<()> {
        poll_fn(|cx| self.poll_open(cx)).await
    }

    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while let Some(last) = self.open.last_mut() {
            match Pin::new(last).poll(cx) {
                Poll::Ready(Ok(())) => drop(self.open.pop()),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(match &self.errors {
                        Some(errors) => errors.of_wait(&error),
                        None => error,
                    }));
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Future for HostAccess {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll_open(cx)
    }
}

impl fmt::Debug for HostAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.errors {
            Some(_) => f.debug_struct("HostAccess").field("open", &self.open.len()).finish_non_exhaustive(),
            None => f.debug_list().entries(&self.open).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        mem::ManuallyDrop,
        pin::pin,
        sync::{Arc, mpsc},
        task::{RawWaker, RawWakerVTable, Waker},
    };

    use super::*;
    use crate::{
        device::{Device, Emulated},
        hub::ChunkHub,
        stream::Stream,
        sync::assert_unlocked,
    };

    /// A waker whose clone asserts that no lock is held, and that drops and wakes likewise. Safe code cannot make one, but a
    /// user's executor can.
    fn asserting() -> Waker {
        fn raw(count: Arc<()>) -> RawWaker {
            RawWaker::new(Arc::into_raw(count).cast(), &TABLE)
        }
        static TABLE: RawWakerVTable = RawWakerVTable::new(
            |data| {
                assert_unlocked();
                // SAFETY: `data` is from `Arc::into_raw`, and the waker that this is called for keeps its count.
                let count = ManuallyDrop::new(unsafe { Arc::from_raw(data.cast::<()>()) });
                raw(Arc::clone(&count))
            },
            |data| {
                assert_unlocked();
                // SAFETY: `data` is from `Arc::into_raw`, and this takes the waker's count.
                drop(unsafe { Arc::from_raw(data.cast::<()>()) });
            },
            |_| assert_unlocked(),
            |data| {
                assert_unlocked();
                // SAFETY: as above.
                drop(unsafe { Arc::from_raw(data.cast::<()>()) });
            },
        );
        // SAFETY: the functions above keep to the contract: each waker owns one count of the `Arc`, which is `Send` and `Sync`.
        unsafe { Waker::from_raw(raw(Arc::new(()))) }
    }

    /// Asked with one waker and then with another, so that one is cloned and one is dropped.
    fn asked_twice(mut future: Pin<&mut impl Future>) {
        for _ in 0..2 {
            let waker = asserting();
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
    }

    #[test]
    fn wakers_are_cloned_woken_and_dropped_without_a_lock() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let mut first = pin!(stream.completed());
        asked_twice(first.as_mut());
        {
            let mut second = pin!(stream.completed());
            asked_twice(second.as_mut());
        }
        let hub = ChunkHub::<u32>::builder("hub").elements(1).host_envelopes(1).build().unwrap();
        let (mut link, host) = (hub.consume(&Device::host()).unwrap(), Device::host());
        asked_twice(pin!(link.next()));
        drop(hub.produce(&host).unwrap());
        drop(link);
        drop(go);
        stream.synchronize_blocking().unwrap();
    }
}
