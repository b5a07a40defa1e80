//! [`InputWait`]: the wait of an input for something other than one message of each connection.

use std::task::Context;

use tokio::time::Instant;

use super::input_queue::InputQueue;
use crate::{
    condition::{Alarm, Counted, Need, Readiness, after},
    hub::Message,
};

/// What an input waits for, and the state of this wait.
#[derive(Debug)]
pub struct InputWait {
    need: Need,
    /// A condition of the operator waits for the port's messages, and the port itself does not.
    disabled: bool,
    alarm: Option<Box<Alarm>>,
    /// The result of the last poll.
    readiness: Readiness,
    /// Until when it waits for a batch.
    deadline: Option<Instant>,
}

impl InputWait {
    /// `None` if the port waits for one message of each connection.
    pub(super) fn new(need: Need, disabled: bool) -> Option<Box<Self>> {
        (disabled || !need.is_default())
            .then(|| Box::new(Self { need, disabled, alarm: None, readiness: Readiness::READY, deadline: None }))
    }

    pub(super) fn poll<M: Message>(&mut self, queues: &mut [InputQueue<M>], cx: &mut Context<'_>) -> Readiness {
        if self.disabled || self.need.optional {
            for queue in queues {
                queue.release();
                // This notifies latest-value hubs of the operator's other inputs of the end of these hubs.
                if queue.keeps_latest() {
                    let _ = queue.has_ended();
                }
            }
            return Readiness::READY;
        }
        queues.iter_mut().for_each(InputQueue::release);
        let counted = poll_promised(queues, self.need.asks(), cx);
        self.readiness = self.need.readiness(counted, || oldest(queues), &mut self.alarm, cx);
        let within = self.need.within.filter(|_| self.readiness == Readiness::WAIT_TIME);
        self.deadline = within.and_then(|within| Some(after(oldest(queues)?, within)));
        self.readiness
    }

    /// Until when it waits for a batch.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// What it waits for, to be followed by "at `its name`"; `None` if it was ready.
    pub(super) fn describe(&self) -> Option<String> {
        (!self.readiness.is_ready()).then(|| self.need.describe())
    }

    /// The number of messages that are promised to a run: all that are available, if no number was set.
    pub(super) fn batch(&self) -> usize {
        let Need { least, within, .. } = self.need;
        if least > 1 || within.is_some() { least } else { usize::MAX }
    }

    pub(super) fn idle(&mut self) {
        self.alarm = None;
    }
}

/// Over all connections of one port. All are polled, so that each keeps the waker.
pub(super) fn poll_count<M: Message>(queues: &mut [InputQueue<M>], most: usize, cx: &mut Context<'_>) -> Counted {
    count_all(queues, |queue| queue.poll_count(most, cx))
}

/// Like [`poll_count`], for the next run.
pub(super) fn poll_promised<M: Message>(queues: &mut [InputQueue<M>], most: usize, cx: &mut Context<'_>) -> Counted {
    count_all(queues, |queue| queue.poll_promised(most, cx))
}

fn count_all<M: Message>(
    queues: &mut [InputQueue<M>],
    mut count: impl FnMut(&mut InputQueue<M>) -> Counted,
) -> Counted {
    Counted::of_all(|| queues.iter_mut().map(&mut count).fold(Counted::NONE, Counted::and))
}

/// Whether these connections of one port have messages that allow the operator's runs for as long as it takes none of
/// them. This is a query only: see [`InputQueue::poll_count`].
#[cold]
pub(super) fn allows_runs<M: Message>(
    queues: &mut [InputQueue<M>],
    wait: Option<&InputWait>,
    cx: &mut Context<'_>,
) -> bool {
    let need = wait.map_or_else(Need::default, |wait| wait.need);
    // The newest message of a latest-value hub is available whether it is taken or not.
    if need.optional || queues.iter().any(InputQueue::keeps_latest) {
        return false;
    }
    let counted = poll_count(queues, need.asks(), cx);
    need.readiness(counted, || None, &mut None, cx).is_ready()
}

pub(super) fn oldest<M: Message>(queues: &[InputQueue<M>]) -> Option<Instant> {
    queues.iter().filter_map(InputQueue::oldest).min()
}
