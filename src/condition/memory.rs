//! [`MemoryAvailable`], `.when(memory(&allocator, bytes))`: an operator runs once `bytes` bytes can be allocated.
//!
//! ```text
//!   WAITING ── enough is available ──> READY ── a run begins ──> RESERVED ── the run ends ──> WAITING
//!      ^                                 │                          │  Cx::alloc draws from it
//!      └── another operator was first ───┘                          └─ the rest is released
//! ```
//!
//! Polling reserves nothing, so several operators can be ready for the same memory; the first whose run begins gets it,
//! and the others wait again. Memory that a stream might still be using counts as available only if the host need not
//! wait for it: [blocks](Allocator::blocks) are available, since the operator's stream waits for their last use on the
//! device. Otherwise the operator waits for the device or for a holder of the memory outside of the flow, which both
//! count as events. If only operators of the flow hold the memory, allocated with [`Cx::alloc`](crate::Cx::alloc), the
//! operator waits for them: if they all wait, the flow has stalled.

use std::{borrow::Cow, sync::Arc, task::Context};

use super::{Condition, Status};
use crate::{
    memory::{Allocator, MemoryWait, Reservation, ReserveBlocker},
    sync::{Waited, note_wait},
};

/// The condition that [`memory`] creates.
#[derive(Debug)]
pub struct MemoryAvailable {
    reservation: Arc<Reservation>,
    wait: MemoryWait,
}

/// Ready once `allocator` has `bytes` bytes available. They are reserved for the run, which allocates from them with
/// [`Cx::alloc`](crate::Cx::alloc); the rest is released when the run has ended. For blocks, `bytes` is rounded up to
/// whole blocks.
///
/// Asking for more than the allocator can ever have is an error before the flow runs. So are several conditions of one
/// operator on the same allocator, also within [`any_of`](super::any_of) and [`all_of`](super::all_of): write one
/// condition for the total that a run needs.
///
/// ```
/// use wakeline::{prelude::*, condition::memory, memory::Allocator};
/// # #[derive(Ports)]
/// # struct DecodePorts {
/// #     #[output]
/// #     frames: Output<Envelope<u8>>,
/// # }
/// # struct Decode;
///
/// impl Operator for Decode {
///     type Ports = DecodePorts;
///
///     async fn compute(&mut self, ports: &mut DecodePorts, cx: &mut Cx) -> Result<()> {
///         let mut frame = cx.alloc::<u8>(1 << 20)?;           // the condition has reserved it
///         cx.stream()?.fill(&mut frame, 0)?;
/// #       cx.finish();
///         ports.frames.send(frame.into()).await?;
///         Ok(())
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// # let device = Device::emulated(Emulated::new());
/// let frames = Allocator::blocks(&device, 1 << 20, 2)?;
/// let mut flow = Flow::new("decode");
/// let decode = flow.add("decode", Decode).on(&device).when(memory(&frames, 1 << 20));
/// # let show = flow.add("show", wakeline::operator::sink(async |_: Envelope<u8>| Ok(()))).on(&device);
/// # flow.connect(decode.frames, show.input);
/// # flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn memory(allocator: &Allocator, bytes: u64) -> MemoryAvailable {
    MemoryAvailable { reservation: Arc::new(Reservation::new(allocator, bytes)), wait: MemoryWait::default() }
}

impl Condition for MemoryAvailable {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        let allocator = self.reservation.allocator();
        // Registered first, so that memory released at the same time is either seen here or wakes the operator.
        self.wait.watch(allocator, cx);
        let blocker = loop {
            match self.reservation.blocker() {
                // The oldest use on a stream is over: check again.
                ReserveBlocker::Streams if self.wait.poll_oldest(allocator, cx) => {}
                blocker => break blocker,
            }
        };
        match blocker {
            ReserveBlocker::Nothing => {
                // If another operator claims the memory first, this claim fails.
                self.wait.unwatch(allocator);
                Status::Ready
            }
            ReserveBlocker::OwnFlow => {
                note_wait(Waited::Memory);
                Status::Wait
            }
            ReserveBlocker::Streams | ReserveBlocker::Others => {
                note_wait(Waited::Memory);
                Status::WaitEvent
            }
        }
    }

    fn claim(&mut self) -> bool {
        self.reservation.claim()
    }

    fn give_back(&mut self) {
        self.reservation.release();
    }

    fn ended(&mut self) {
        self.reservation.release();
    }

    fn stop_waiting(&mut self) {
        self.wait.unwatch(self.reservation.allocator());
    }

    fn problem(&self) -> Option<String> {
        self.reservation.problem()
    }

    fn describe(&self) -> Cow<'static, str> {
        self.reservation.describe().into()
    }

    fn reservation(&self) -> Option<&Arc<Reservation>> {
        Some(&self.reservation)
    }
}

impl Drop for MemoryAvailable {
    fn drop(&mut self) {
        self.stop_waiting();
        self.reservation.release();
    }
}
