//! [`TestRequest`]: a message for whose answer the test waits; and its [`Caller`], which travels with the message.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    error::Error,
    hub::{
        Reply,
        reply::{Caller, next_number},
    },
};

/// A request that was sent to the operator under test. Created by [`TestInput::request`](super::TestInput::request); its
/// answer is received with [`TestOutput::answer`](super::TestOutput::answer). To drop it is to give up, as a caller of a
/// [`Service`](crate::Service) does: see [`Reply::is_abandoned`](crate::operator::Reply::is_abandoned).
#[must_use = "a request that is dropped is abandoned: receive its answer with `.output(..).answer(&request)`"]
pub struct TestRequest {
    number: u64,
    received: AtomicBool,
    /// Only the first end counts. Lock-free: it is read while locks are held.
    end: Arc<OnceLock<RequestEnd>>,
}

#[derive(Debug)]
pub(super) enum RequestEnd {
    Failed(Error),
    /// The last message or [`Reply`] that led back to the request was dropped, unless an output has kept its answer.
    Unanswered,
    /// The test has the answer, or has given up.
    Over,
}

impl RequestEnd {
    /// False if the failure of the current run would be the answer.
    pub(super) fn is_final(&self) -> bool {
        !matches!(self, Self::Unanswered)
    }
}

/// Shared by all messages that lead back to the request.
struct TestCaller {
    number: u64,
    end: Arc<OnceLock<RequestEnd>>,
}

impl TestRequest {
    pub(super) fn new() -> (Self, Reply) {
        let (number, end) = (next_number(), Arc::new(OnceLock::new()));
        let caller = TestCaller { number, end: end.clone() };
        (Self { number, received: AtomicBool::new(false), end }, Reply::to(Arc::new(caller), None))
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// `None` while some message or [`Reply`] leads back to the request.
    pub(super) fn end(&self) -> Option<&RequestEnd> {
        self.end.get()
    }

    /// The test has the answer.
    pub(super) fn receive(&self) {
        self.received.store(true, Ordering::Relaxed);
        let _ = self.end.set(RequestEnd::Over);
    }

    pub(super) fn is_received(&self) -> bool {
        self.received.load(Ordering::Relaxed)
    }
}

impl Drop for TestRequest {
    fn drop(&mut self) {
        let _ = self.end.set(RequestEnd::Over);
    }
}

impl fmt::Debug for TestRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestRequest").field("end", &self.end()).finish_non_exhaustive()
    }
}

impl Caller for TestCaller {
    fn number(&self) -> u64 {
        self.number
    }

    fn is_waiting(&self) -> bool {
        self.end.get().is_none()
    }

    fn fail(&self, error: Error) {
        let _ = self.end.set(RequestEnd::Failed(error));
    }

    fn taken_over(&self) {}

    fn seen_by(&self, _operator: &Arc<str>) {}
}

impl Drop for TestCaller {
    fn drop(&mut self) {
        let _ = self.end.set(RequestEnd::Unanswered);
    }
}
