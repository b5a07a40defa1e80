//! The uses of a piece of memory, and the host's wait for them.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use smallvec::SmallVec;

use super::free_lists::Users;
use crate::{
    device::Device,
    error::{CallerErrors, Result},
    mutants::{self, Mutant},
    stream::{Completed, Stream, Ticket, capture::Capture},
    sync::{Deferred, Level, Mutex, discard_all},
};

/// The last write and the reads since.
///
/// The last write comes after all earlier uses, so these are dropped. But a lost device keeps no order: its write may
/// have ended before the uses on other devices that it was ordered after. So uses on other devices are kept until they
/// have passed.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    pub(super) write: Option<Ticket>,
    /// Uses before the last write, on devices other than the write's: the latest of each stream.
    elsewhere: Vec<Ticket>,
    /// The contents are no longer needed: the memory was freed, or its envelope returned to its pool. So it does not
    /// matter whether the loss of another device tainted the write, but the write is still waited for.
    contents_discarded: bool,
    /// The latest read of each stream. All reads of a lost device are represented by one ticket that never passes
    /// ([`Ticket::never`]), until the device has ended.
    reads: Reads,
}

type Reads = SmallVec<[Ticket; 2]>;

/// With more readers than this, the device is queried for reads that are done.
const MANY_READS: usize = 16;

/// The work that is left after a read was recorded, to be done without the lock.
#[derive(Default)]
#[must_use]
pub(super) struct Noted {
    /// Each may be the last handle of its stream.
    #[allow(dead_code, reason = "dropped without the lock")]
    forgotten: Reads,
    /// There are many reads, so the caller must call [`query_readers`]: a stream whose work is not queried any more would
    /// stay here, and alive, for ever. This is rare: the number of reads must have doubled since the last time.
    pub(super) are_many: bool,
}

impl Uses {
    /// Wraps the uses in the lock that all users of the memory share.
    #[inline]
    pub(super) const fn locked(self) -> Mutex<Self> {
        Mutex::at(Level::MemoryUses, self)
    }

    #[inline]
    pub(super) fn read_by(&mut self, ticket: &Ticket) -> Noted {
        if mutants::is(Mutant::EarlierReader) {
            self.reads.clear();
        }
        match self.reads.iter_mut().find(|read| read.stream().is(ticket.stream())) {
            Some(read) if read.number() < ticket.number() => read.advance_to(ticket),
            Some(_) => {}
            None => return self.read_by_another(ticket.clone()),
        }
        Noted::default()
    }

    /// Records a read by a stream that has no earlier read here.
    #[inline(never)]
    fn read_by_another(&mut self, ticket: Ticket) -> Noted {
        let mut noted = Noted::default();
        self.take_done_reads(&mut noted.forgotten);
        noted.are_many = self.reads.len() >= MANY_READS && self.reads.len() == self.reads.capacity();
        self.reads.push(ticket);
        noted
    }

    /// Moves the reads that are done to `done`, to be dropped without the lock. For a lost device that might still be
    /// reading, one ticket that never passes is left, whatever another thread knows of the device's progress.
    fn take_done_reads(&mut self, done: &mut Reads) {
        let mut at = 0;
        while let Some(read) = self.reads.get(at) {
            let device = read.stream().device();
            let is_known = |other: &Ticket| other.stream().device() == device;
            if read.is_done() || (device.is_lost() && self.reads[..at].iter().any(is_known)) {
                done.push(self.reads.swap_remove(at));
            } else {
                if device.is_lost() {
                    let never = read.never();
                    done.push(std::mem::replace(&mut self.reads[at], never));
                }
                at += 1;
            }
        }
    }

    #[inline]
    pub(super) fn written_by(&mut self, ticket: &Ticket) {
        let device = ticket.stream().device();
        if self.any_is(|before| before.stream().device() != device) {
            self.keep_elsewhere(device);
        } else {
            self.elsewhere.clear();
        }
        self.reads.clear();
        match &mut self.write {
            Some(write) if write.stream().is(ticket.stream()) => write.advance_to(ticket),
            write => *write = Some(ticket.clone()),
        }
        self.contents_discarded = false;
    }

    /// Keeps the uses on devices other than `device` that are not known to be done.
    #[cold]
    fn keep_elsewhere(&mut self, device: &Device) {
        let before =
            std::mem::take(&mut self.elsewhere).into_iter().chain(self.write.take()).chain(self.reads.drain(..));
        let mut kept: Vec<Ticket> = Vec::new();
        for ticket in before.filter(|ticket| ticket.stream().device() != device && !ticket.is_done()) {
            match kept.iter_mut().find(|known| known.stream().is(ticket.stream())) {
                Some(known) if known.number() < ticket.number() => *known = ticket,
                Some(_) => {}
                None => kept.push(ticket),
            }
        }
        self.elsewhere = kept;
    }

    #[inline]
    pub(super) fn discard_contents(&mut self) {
        self.contents_discarded = true;
    }

    pub(super) fn before_reads(&self) -> Self {
        let (write, elsewhere) = (self.write.clone(), self.elsewhere.clone());
        Self { write, elsewhere, contents_discarded: self.contents_discarded, reads: SmallVec::new() }
    }

    /// Makes a stream wait for the uses that a read must come after. `outlives` is true if the memory survives the loss
    /// of the device that wrote it.
    pub(super) fn before_read(&self, stream: &Stream, outlives: bool) -> Result<()> {
        match &self.write {
            None => {}
            Some(write) if self.contents_discarded => stream.wait_until_over(write)?,
            Some(write) => stream.wait_to_read(write, outlives)?,
        }
        self.elsewhere.iter().try_for_each(|before| stream.wait_until_over(before))
    }

    /// Like [`before_read`](Self::before_read), for a write. `whole` is true if the write overwrites all contents, so
    /// that it does not matter if they are tainted.
    #[inline]
    pub(super) fn before_write(&self, stream: &Stream, whole: bool, outlives: bool) -> Result<()> {
        // Reads come after the write: waiting for a read first makes the wait for the write a no-op.
        self.elsewhere.iter().chain(&self.reads).try_for_each(|before| stream.wait_until_over(before))?;
        match &self.write {
            None => Ok(()),
            Some(write) if whole || self.contents_discarded => stream.wait_until_over(write),
            Some(write) => stream.wait_to_read(write, outlives),
        }
    }

    /// Marks all uses now, for work on other streams that will be ordered after them.
    #[inline]
    pub(super) fn commit(&mut self) -> Result<()> {
        let all = self.write.iter_mut().chain(&mut self.elsewhere).chain(&mut self.reads);
        all.filter(|ticket| !ticket.has_ended()).try_for_each(Ticket::commit)
    }

    /// Fails if the contents are known to be tainted, so that work that [reads](Self::before_read) them would be
    /// tainted, too. Queries no device.
    pub(super) fn check_contents(&self, outlives: bool) -> Result<()> {
        let Some(write) = self.write.as_ref().filter(|_| !self.contents_discarded) else { return Ok(()) };
        // On a lost device no more work passes: a ticket that has not passed yet never will.
        let lost = write.stream().device().check();
        if !(outlives && write.is_settled()) {
            lost?;
        }
        write.check_known_taint()
    }

    /// Calls `show` for each use.
    #[inline]
    pub(super) fn each(&self, show: impl FnMut(&Ticket) -> Result<()>) -> Result<()> {
        self.iter().try_for_each(show)
    }

    #[inline]
    fn iter(&self) -> impl Iterator<Item = &Ticket> {
        self.write.iter().chain(&self.elsewhere).chain(&self.reads)
    }

    /// The uses that a read or, with `write`, a write must come after, and that are not known to have passed.
    pub(super) fn not_passed(&self, write: bool) -> SmallVec<[Ticket; 3]> {
        self.before(write).filter(|ticket| !ticket.has_passed()).cloned().collect()
    }

    /// Whether a read or, with `write`, a write that comes after these uses also comes after `ticket`.
    pub(super) fn covers(&self, ticket: &Ticket, write: bool) -> bool {
        self.before(write).any(|before| before.covers(ticket))
    }

    /// The uses that a read or, with `write`, a write must come after.
    fn before(&self, write: bool) -> impl Iterator<Item = &Ticket> {
        let reads = if write { &*self.reads } else { &[] };
        self.write.iter().chain(&self.elsewhere).chain(reads)
    }

    pub(super) fn all(&self) -> SmallVec<[Ticket; 3]> {
        self.iter().cloned().collect()
    }

    /// Calls `show` for each use that is not over and that a read or, with `write`, a write must come after. The second
    /// argument is true if a taint of the use matters.
    pub(super) fn each_open(&self, write: bool, mut show: impl FnMut(&Ticket, bool)) {
        if let Some(last) = &self.write {
            let is_done = if self.contents_discarded { last.is_over() } else { last.is_settled() };
            if !is_done {
                show(last, !self.contents_discarded);
            }
        }
        let reads = if write { &*self.reads } else { &[] };
        self.elsewhere.iter().chain(reads).filter(|ticket| !ticket.is_over()).for_each(|ticket| show(ticket, false));
    }

    /// Like [`each_open`](Self::each_open), collected.
    pub(super) fn open(&self, write: bool) -> SmallVec<[(Ticket, bool); 3]> {
        let mut open = SmallVec::new();
        self.each_open(write, |ticket, taint_matters| open.push((ticket.clone(), taint_matters)));
        open
    }

    pub(super) fn all_are(&self, is: impl Fn(&Ticket) -> bool) -> bool {
        self.iter().all(is)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    pub(super) fn any_is(&self, is: impl Fn(&Ticket) -> bool) -> bool {
        self.iter().any(is)
    }

    /// The streams that might still be using the memory.
    #[inline]
    pub(super) fn users(&self) -> Users {
        let mut streams = self.iter().map(|ticket| ticket.stream().id());
        match streams.next() {
            None => Users::None,
            Some(first) if streams.all(|stream| stream == first) => Users::One(first),
            Some(_) => Users::Several,
        }
    }

    /// The last use on one of the streams that might still be using the memory: the stream's id and the ticket's
    /// number. A read is later than the write before it.
    #[inline]
    pub(super) fn last(&self) -> Option<(u64, u64)> {
        let last = self.reads.last().or(self.write.as_ref()).or(self.elsewhere.last())?;
        let write = self.write.as_ref().filter(|write| write.stream().is(last.stream()));
        Some((last.stream().id(), write.map_or(0, Ticket::number).max(last.number())))
    }

    /// Forgets the uses that are known to have passed, for memory whose contents are no longer needed.
    #[inline]
    pub(super) fn forget_passed(&mut self) {
        if self.any_is(Ticket::has_passed) {
            self.forget_some();
        }
    }

    #[inline(never)]
    fn forget_some(&mut self) {
        self.write.take_if(|write| write.has_passed());
        self.elsewhere.retain(|before| !before.has_passed());
        self.reads.retain(|read| !read.has_passed());
    }

    /// Like [`forget_passed`](Self::forget_passed); also drops the uses that have ended with their device.
    pub(super) fn forget_done(&mut self) {
        self.write.take_if(|write| write.is_done());
        self.elsewhere.retain(|before| !before.is_done());
        self.reads.retain(|read| !read.is_done());
    }

    pub(super) fn forget_settled(&mut self) {
        self.write.take_if(|write| if self.contents_discarded { write.is_over() } else { write.is_settled() });
        self.elsewhere.retain(|before| !before.is_over());
        self.reads.retain(|read| !read.is_over());
    }
}

/// Queries the devices for reads that are done, and drops these. `with` locks the uses; the devices are queried without
/// the lock.
#[cold]
pub(super) fn query_readers(with: impl Fn(&mut dyn FnMut(&mut Uses))) {
    if Capture::current().is_some() {
        // Within a capture, the device must not be queried.
        return;
    }
    let _later = Deferred::new();
    let mut reads = Reads::new();
    with(&mut |uses| reads.clone_from(&uses.reads));
    reads.iter_mut().for_each(|read| _ = read.query());
    let mut done = Reads::new();
    with(&mut |uses| {
        uses.take_done_reads(&mut done);
        // Leaves room for twice the number of remaining reads.
        let room = uses.reads.len();
        let mut open = std::mem::take(&mut uses.reads);
        open.shrink_to_fit();
        open.reserve(room);
        uses.reads = open;
    });
    // Either may be the last handle of its stream.
    discard_all(reads.into_iter().chain(done));
}

/// Resolves when the uses of a piece of memory that conflict with an access by the host are over: its writes for a
/// read, all of its uses for a write. If no other stream has waited for these uses, the future may also wait for work
/// that is enqueued behind them before the first poll.
///
/// # Cancel safety
/// Dropping the future has no effect on the work that it waits for.
#[must_use = "futures do nothing unless awaited"]
pub struct HostAccess {
    /// The uses that are not over, each with whether its taint matters. If it does not, a tainted use is no error.
    open: SmallVec<[(Completed, bool); 3]>,
    /// Set if the memory was given to a caller of a flow: the errors that the caller gets.
    errors: Option<Arc<CallerErrors>>,
}

impl HostAccess {
    pub(super) fn new(open: SmallVec<[Ticket; 3]>) -> Self {
        Self::of(open.into_iter().filter(|ticket| !ticket.is_settled()).map(|ticket| (ticket, true)))
    }

    pub(super) fn of(open: impl Iterator<Item = (Ticket, bool)>) -> Self {
        Self { open: open.map(|(ticket, taint_matters)| (ticket.completed(), taint_matters)).collect(), errors: None }
    }

    /// Returns a future for a caller of a flow, whose errors name nothing within the flow.
    pub(crate) fn for_caller(self, errors: &Arc<CallerErrors>) -> Self {
        Self { errors: Some(errors.clone()), ..self }
    }

    /// Stops waiting until the next poll, so that no resource is held until then.
    pub(crate) fn suspend(&mut self) {
        self.open.iter_mut().for_each(|(open, _)| *open = open.ticket().completed());
    }

    pub(crate) async fn wait(mut self) -> Result<()> {
        poll_fn(|cx| self.poll_open(cx)).await
    }

    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while let Some((last, taint_matters)) = self.open.last_mut() {
            match Pin::new(&mut *last).poll(cx) {
                Poll::Ready(Ok(())) => drop(self.open.pop()),
                Poll::Ready(Err(_)) if !*taint_matters && last.ticket().is_over() => drop(self.open.pop()),
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
            None => f.debug_list().entries(self.open.iter().map(|(open, _)| open)).finish(),
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
        Buffer,
        device::{Device, Emulated},
        hub::ChunkHub,
        memory::DeviceSlice,
        stream::Stream,
        sync::assert_unlocked,
    };

    /// A waker that asserts on clone, drop and wake that no lock is held. Safe code cannot create one, but a user's
    /// executor can.
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
        // SAFETY: the functions above keep to the contract: each waker owns one count of the `Arc`, which is `Send` and
        // `Sync`.
        unsafe { Waker::from_raw(raw(Arc::new(()))) }
    }

    /// Polls with one waker and then with another, so that one is cloned and one is dropped.
    fn asked_twice(mut future: Pin<&mut impl Future>) {
        for _ in 0..2 {
            let waker = asserting();
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
    }

    #[test]
    fn reads_of_streams_that_are_not_queried_again_are_dropped() {
        let device = Device::emulated(Emulated::new());
        let main = Stream::new(&device).unwrap();
        let weights = Buffer::from_slice(&main, &[1_u32; 4]).unwrap();
        let mut staging = Buffer::<u32>::new(&device, 4).unwrap();
        for _ in 0..1000 {
            Stream::new(&device).unwrap().copy(&weights, &mut staging).unwrap();
            main.copy(&staging, &mut Buffer::new(&device, 4).unwrap()).unwrap();
            // Only this stream's progress becomes known by this.
            main.synchronize_blocking().unwrap();
            assert!(weights.view().memory.uses().reads.len() <= 2 * MANY_READS);
        }
    }

    #[test]
    fn many_reads_in_flight_stay_and_are_queried_rarely() {
        let device = Device::emulated(Emulated::new().workers(1));
        let main = Stream::new(&device).unwrap();
        let mut data = Buffer::<u32>::pinned(&device, 4).unwrap();
        let (go, held) = mpsc::channel::<()>();
        main.host_function(move || _ = held.recv()).unwrap();
        let mut asked = 0;
        for _ in 0..200 {
            let own = Stream::new(&device).unwrap();
            own.wait_for(&main).unwrap();
            let reads = data.view().memory.uses().reads.capacity();
            own.copy(&data, &mut Buffer::new(&device, 4).unwrap()).unwrap();
            asked += usize::from(data.view().memory.uses().reads.capacity() > reads.max(MANY_READS));
        }
        assert_eq!(data.view().memory.uses().reads.len(), 200);
        assert!(asked <= 4, "{asked} times");
        // The host waits for all of them.
        let writing = data.as_mut_slice().is_ok();
        drop(go);
        assert!(!writing);
        futures::executor::block_on(data.write()).unwrap();
    }

    /// If it is not known whether a lost device still reads, as with a CUDA device, one read stays, and no write is let
    /// through.
    #[test]
    fn one_read_of_a_lost_device_stays_until_it_is_known_to_have_ended() {
        let [home, other] = [(); 2].map(|()| Device::emulated(Emulated::new()));
        let [main, side] = [&home; 2].map(|home| Stream::new(home).unwrap());
        let mut data = Buffer::from_slice(&main, &[1_u32; 4]).unwrap();
        main.synchronize_blocking().unwrap();
        let (go, held) = mpsc::channel::<()>();
        let blocker = Stream::new(&other).unwrap();
        blocker.host_function(move || _ = held.recv()).unwrap();
        let reads = [(); 5].map(|()| {
            let its = Stream::new(&other).unwrap();
            its.wait_for(&blocker).unwrap();
            its.copy(&data, &mut Buffer::new(&other, 4).unwrap()).unwrap();
            its
        });
        // The device itself does not notice the loss, and continues.
        let lost = crate::error::Error::new(crate::ErrorKind::DeviceLost, "lost");
        assert!(other.set_lost(lost) && !other.has_ended());
        side.copy(&data, &mut Buffer::new(&home, 4).unwrap()).unwrap();
        let of_lost = |data: &Buffer<u32>| {
            let uses = data.view().memory.uses().all();
            uses.into_iter().filter(|ticket| ticket.stream().device() == &other).collect::<Vec<_>>()
        };
        let left = of_lost(&data);
        assert!(left.len() == 1 && !left[0].is_done(), "{left:?}");
        assert!(main.fill(&mut data, 2).unwrap_err().is_device_lost());
        // A later query of a stream finds that all of its work has passed.
        drop(go);
        for its in &reads {
            other.backend().stream_synchronize(its.raw()).unwrap();
            assert_eq!(of_lost(&data).len(), 1);
            assert!(main.fill(&mut data, 2).unwrap_err().is_device_lost());
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
