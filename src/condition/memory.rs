//! Memory is there, `.when(memory(&allocator, bytes))`: an operator runs once so much can be had.
//!
//! ```text
//!   WAITING ── so much could be set apart ──> READY ── a run begins ──> RESERVED ── the run ends ──> WAITING
//!      ^                                        │                          │  Cx::alloc draws from it
//!      └── somebody else was quicker ───────────┘                          └─ what is left is given back
//! ```
//!
//! Asking sets nothing apart, so several operators may be ready for the same memory; the first whose run begins has it, and
//! the others wait on. What a stream may still use counts as there only where it can be had without the host's waiting:
//! of [blocks](Allocator::blocks), which the operator's stream waits for on the device. For all else the device is waited
//! for, as for an event; and so is whoever has the memory and may be outside of the flow. Where none but operators of the
//! flow have any, made with [`Cx::alloc`](crate::Cx::alloc), it waits for those: if they all wait, the flow has stalled.

use std::{borrow::Cow, sync::Arc, task::Context};

use super::{Condition, Status};
use crate::memory::{Allocator, Lacks, Reservation, Wait};

/// See [`memory`].
#[derive(Debug)]
pub struct MemoryThere {
    reservation: Arc<Reservation>,
    wait: Wait,
}

/// So much memory of this allocator can be had. It is set apart for the run, which draws from it with
/// [`Cx::alloc`](crate::Cx::alloc); what it leaves is given back when it has ended. Of blocks, `bytes` are as many whole
/// blocks as hold them.
///
/// More than there can ever be is an error before the flow runs; so are several conditions of one operator on one allocator,
/// in [`any_of`](super::any_of) and [`all_of`](super::all_of) too: write one for as much as a run needs in all.
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
///         let mut frame = cx.alloc::<u8>(1 << 20)?;           // it is there: the condition said so
///         cx.stream()?.fill(&mut frame, 0)?;
/// #       cx.finish();
///         ports.frames.send(frame.into()).await
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
pub fn memory(allocator: &Allocator, bytes: u64) -> MemoryThere {
    MemoryThere { reservation: Arc::new(Reservation::new(allocator, bytes)), wait: Wait::default() }
}

impl Condition for MemoryThere {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        let allocator = self.reservation.allocator();
        // Kept first: what comes free while this looks is seen, or told.
        self.wait.watch(allocator, cx);
        let lacks = loop {
            match self.reservation.lacks() {
                // The host finds out, and looks again.
                Lacks::Streams if self.wait.poll_oldest(allocator, cx) => {}
                lacks => break lacks,
            }
        };
        match lacks {
            Lacks::Nothing => {
                // If somebody else is quicker, its claim says so.
                self.wait.rest(allocator);
                Status::Ready
            }
            Lacks::OwnFlow => Status::Wait,
            Lacks::Streams | Lacks::Others => Status::WaitEvent,
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

    fn rest(&mut self) {
        self.wait.rest(self.reservation.allocator());
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

impl Drop for MemoryThere {
    fn drop(&mut self) {
        self.rest();
        self.reservation.release();
    }
}
