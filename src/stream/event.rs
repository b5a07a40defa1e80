//! [`Event`]: a named point in a stream's work; [`Timer`]: the device's time between two points.
//!
//! A record is a [`Ticket`] that is marked at once, so that a wait for it covers no later work. A timed record also has
//! a device event of its own. A record is never moved while a waiter holds it: earlier waiters keep the old record.

use std::{
    fmt,
    future::{IntoFuture, ready},
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};

use super::{Completed, Stream, Ticket};
use crate::{
    device::{Device, backend::RawEvent},
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, lock},
};

/// A point in a stream's work: recorded on one stream, waited for by others and by the host.
///
/// Work on buffers and envelopes is ordered without events. Use an event for work that wakeline does not track, and for
/// timing.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, stream::Event};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let (main, side) = (Stream::new(&device)?, Stream::new(&device)?);
/// let mut buffer = Buffer::<u8>::new(&device, 1 << 10)?;
/// let (begin, end) = (Event::timed(), Event::timed());
/// begin.record(&main)?;
/// main.fill(&mut buffer, 0)?;
/// end.record(&main)?;
/// end.wait(&side)?;                       // later work on `side` is ordered after the fill
/// (&end).await?;                          // this task waits for it, too
/// println!("{:?}", end.since(&begin).await?);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Event {
    timed: bool,
    record: Mutex<Option<Record>>,
}

#[derive(Clone)]
struct Record {
    ticket: Ticket,
    clock: Option<Arc<TimedEvent>>,
}

struct TimedEvent {
    device: Device,
    raw: RawEvent,
}

impl Event {
    /// An event without a record: a wait for it returns at once.
    pub fn new() -> Self {
        Self { timed: false, record: Mutex::at(Level::EventRecord, None) }
    }

    /// An event whose records have a time on the device.
    pub fn timed() -> Self {
        Self { timed: true, ..Self::new() }
    }

    /// Records the stream's current end, in place of the previous record. Earlier waits keep waiting for the previous
    /// record.
    ///
    /// In a capture the record is a point in the capture's work, and ends with the capture. Only [`since`](Self::since)
    /// refers to the graph's launches; to wait for a point within them, use a [`GraphEvent`](crate::graph::GraphEvent).
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if !self.timed && self.move_to_end(stream)? {
            return Ok(());
        }
        stream.device().check()?;
        let mut record = if self.timed {
            let device = stream.device();
            let raw = stream.streams().observe(device.backend().event_create(true))?;
            let clock = Arc::new(TimedEvent { device: device.clone(), raw });
            if let Some(capture) = stream.capture() {
                // A node records the event at each launch. It is kept before the node exists, as another thread may end
                // the capture.
                capture.keep(clock.clone());
            }
            let ticket = stream.enqueue_point(|backend, stream| backend.event_record(raw, stream));
            let ticket =
                ticket.inspect_err(|_| stream.capture().into_iter().for_each(|capture| capture.release(&clock)))?;
            Record { ticket, clock: Some(clock) }
        } else {
            Record { ticket: stream.ticket(), clock: None }
        };
        record.ticket.commit()?;
        let mut last = lock(&self.record);
        // Another thread may have made a later record since: within one stream a record does not go backwards. The
        // replaced record is dropped after the lock is released.
        let is_later = |known: &mut Record| {
            known.ticket.stream().is(record.ticket.stream()) && known.ticket.number() > record.ticket.number()
        };
        let _gone = if last.as_mut().is_some_and(is_later) { Some(record) } else { last.replace(record) };
        drop(last);
        Ok(())
    }

    /// Moves the record without another mark. False if a new mark is needed.
    fn move_to_end(&self, stream: &Stream) -> Result<bool> {
        // Recording may wake a simulation.
        let later = Deferred::new();
        let moved = lock(&self.record).as_mut().map_or(Ok(false), |record| record.ticket.move_to_end(stream));
        drop(later);
        // Not under the lock: the loss of a device wakes waiters, which may query this event.
        stream.streams().observe(moved)
    }

    /// Work enqueued into `stream` from now on waits, on the device, for the current record.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices have different backends; [`DeviceLost`](ErrorKind::DeviceLost)
    /// after a fault.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        self.last().map_or(Ok(()), |record| stream.wait(&record.ticket))
    }

    /// True if the recorded work is done, or if nothing is recorded. Queries the device.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault, unless the work is known to have been done before.
    pub fn query(&self) -> Result<bool> {
        let Some(mut record) = self.last() else { return Ok(true) };
        let done = record.ticket.query()?;
        if done {
            record.ticket.check_taint()?;
        }
        Ok(done)
    }

    /// Resolves when the work of the current record is done; at once if nothing is recorded. `(&event).await` does the
    /// same.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn completed(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        match self.last() {
            Some(record) => record.ticket.completed().left_future(),
            None => ready(Ok(())).right_future(),
        }
    }

    /// The device's time from the current record of `earlier` to the current one of this event, once both are done;
    /// zero if they passed in the opposite order. It includes what the device takes to pass one event (1.3 us on an H200,
    /// `guide/facts.md`). For an event that was recorded in a capture, the time of its record in the graph's launches so far.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if one is not [timed](Self::timed), not recorded, or on another device;
    /// [`Driver`](ErrorKind::Driver) if one was recorded in a capture and no launch has recorded it;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn since(&self, earlier: &Event) -> impl Future<Output = Result<Duration>> + Send + use<> {
        let (from, to) = (earlier.time(), self.time());
        let records = || [&from, &to].into_iter().flatten().map(|(ticket, _)| ticket);
        let open: Vec<_> = records().flat_map(Ticket::launches).chain(records().cloned()).collect();
        async move {
            let ((_, from), (ended, to)) = (from?, to?);
            if from.device != to.device {
                let text = format!(
                    "the time between an event on {} and an event on {} is not defined: record both on one device",
                    from.device, to.device
                );
                return Err(Error::new(ErrorKind::Usage, text));
            }
            for ticket in open {
                ticket.completed().await?;
            }
            ended.stream().streams().observe(to.device.backend().event_elapsed(from.raw, to.raw))
        }
    }

    pub(crate) fn ticket(&self) -> Option<Ticket> {
        self.last().map(|record| record.ticket)
    }

    fn last(&self) -> Option<Record> {
        lock(&self.record).clone()
    }

    fn time(&self) -> Result<(Ticket, Arc<TimedEvent>)> {
        let wrong = |what: &str| Err(Error::new(ErrorKind::Usage, what));
        match self.last() {
            _ if !self.timed => wrong("an event without timing has no time: create it with `Event::timed`"),
            Some(Record { ticket, clock: Some(clock) }) => Ok((ticket, clock)),
            _ => wrong("an event that was never recorded has no time: call `record` first"),
        }
    }
}

impl IntoFuture for &Event {
    type Output = Result<()>;
    type IntoFuture = BoxFuture<'static, Result<()>>;

    fn into_future(self) -> Self::IntoFuture {
        self.completed().boxed()
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        self.device.backend().event_destroy(self.raw);
    }
}

impl Default for Event {
    fn default() -> Self {
        Self::new()
    }
}

/// Creates an event with the same record. From then on, the two are recorded independently.
impl Clone for Event {
    fn clone(&self) -> Self {
        Self { timed: self.timed, record: Mutex::at(Level::EventRecord, self.last()) }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ticket = self.last().map(|record| record.ticket);
        f.debug_struct("Event").field("timed", &self.timed).field("record", &ticket).finish()
    }
}

/// Measures the device's time between two points of a stream. It includes what the device takes to pass an event (1.3 us
/// on an H200, `guide/facts.md`).
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, stream::Timer};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let mut buffer = Buffer::<u8>::new(&device, 1 << 20)?;
/// let timer = Timer::start(&stream)?;
/// stream.fill(&mut buffer, 0)?;
/// let took = timer.stop()?.await?;
/// println!("{took:?}");
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Timer {
    stream: Stream,
    from: RawEvent,
    to: RawEvent,
}

impl Timer {
    /// Starts measuring, from the stream's current end.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a captured stream: time the launches of the graph instead.
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn start(stream: &Stream) -> Result<Self> {
        // The graph's nodes would record events that are destroyed with the timer.
        stream.0.check_not_captured()?;
        let backend = stream.device().backend();
        let streams = stream.streams();
        let from = streams.observe(backend.event_create(true))?;
        let to = streams.observe(backend.event_create(true)).inspect_err(|_| backend.event_destroy(from))?;
        let timer = Self { stream: stream.clone(), from, to };
        stream.enqueue_point(|backend, raw| backend.event_record(from, raw))?;
        Ok(timer)
    }

    /// Ends the measurement at the stream's current end. The future resolves once the device has reached that point.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stop(self) -> Result<impl Future<Output = Result<Duration>> + Send> {
        let end: Ticket = self.stream.enqueue_point(|backend, raw| backend.event_record(self.to, raw))?;
        let done: Completed = end.completed();
        Ok(async move {
            done.await?;
            self.stream.streams().observe(self.stream.device().backend().event_elapsed(self.from, self.to))
        })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let backend = self.stream.device().backend();
        backend.event_destroy(self.from);
        backend.event_destroy(self.to);
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").field("stream", &self.stream).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, task::Wake};

    use super::*;
    use crate::{
        Buffer,
        device::{Emulated, Faults},
        stream::{completion::WaiterSlot, mark::Mark, order::MAX_UNMARKED},
    };

    /// Notes whether the event can be queried when it is woken.
    struct Asks(Arc<Event>, Mutex<Vec<bool>>);

    impl Wake for Asks {
        fn wake(self: Arc<Self>) {
            lock(&self.1).push(self.0.record.try_lock().is_some());
        }
    }

    #[test]
    fn a_waiter_woken_by_a_record_on_a_lost_device_may_query_the_event() {
        let device = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let stream = Stream::new(&device).unwrap();
        let from = Buffer::<u32>::new(&device, 4).unwrap();
        let mut to = Buffer::<u32>::new(&device, 4).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        let event = Arc::new(Event::new());
        event.record(&stream).unwrap();
        stream.copy(&from, &mut to).unwrap();
        let asks = Arc::new(Asks(event.clone(), Mutex::default()));
        let (mut slot, last) = (WaiterSlot::default(), stream.ticket().number());
        stream.0.completion.poll(&mut slot, last, &asks.clone().into());
        drop(go);
        stream.0.backend.stream_synchronize(stream.raw()).unwrap_err();
        assert!(event.record(&stream).unwrap_err().is_device_lost());
        assert_eq!(*lock(&asks.1), [true]);
        stream.0.completion.leave(&mut slot).wake();
    }

    #[test]
    fn repeated_records_need_few_marks_and_leave_some_behind() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        let event = Event::new();
        let many = 20 * MAX_UNMARKED;
        for _ in 0..many {
            stream.host_function(|| ()).unwrap();
            event.record(&stream).unwrap();
        }
        let last = stream.ticket().number();
        assert_eq!(event.ticket().unwrap().number(), last);
        let marks: Vec<_> = lock(&stream.0.order).marks.iter().map(|mark: &Arc<Mark>| mark.ticket).collect();
        assert!(marks.len() as u64 <= many / MAX_UNMARKED + 2, "{marks:?}");
        assert!(marks.windows(2).all(|two| two[1] - two[0] <= MAX_UNMARKED + 1), "{marks:?}");
        // An earlier holder keeps the old record.
        let old = event.ticket();
        stream.host_function(|| ()).unwrap();
        event.record(&stream).unwrap();
        assert_eq!(old.unwrap().marked().unwrap().ticket, last);
        assert_eq!(event.ticket().unwrap().marked().unwrap().ticket, last + 1);
        drop(go);
        stream.synchronize_blocking().unwrap();
        assert!(event.query().unwrap());
    }
}
