//! The work of an emulated device's streams, and how it is executed.
//!
//! Work owns its arguments, which are copied when it is enqueued. As on a GPU, addresses are resolved when the work
//! runs, so an illegal address is a device fault at that time and not an error of the call. A kernel is its Rust body,
//! called once for the whole launch; a panic in the body is a trap.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    graph::Sequence,
    memory::{EmulatedMemory, FRESH, Resolved, resolve},
};
use crate::{
    device::{
        backend::{
            Address, Arg, BodyArg, Emulation, Endpoint, HostFunction, KernelDef, Launch, MAX_ALIGNMENT, Pattern,
        },
        human,
        work_item::OwnedArg,
    },
    error::{Error, ErrorKind, Result, panic_message},
    sync::contained,
};

pub(super) enum Work {
    Copy {
        to: Endpoint,
        from: Endpoint,
        bytes: u64,
        planned: bool,
    },
    Fill {
        to: Address,
        pattern: Pattern,
        bytes: u64,
    },
    Recycle {
        address: Address,
        bytes: u64,
    },
    Kernel {
        kernel: &'static KernelDef,
        args: Box<[OwnedArg]>,
        planned: bool,
    },
    /// The emulation of another library's work.
    External {
        name: &'static str,
        args: Box<[OwnedArg]>,
        body: Emulation,
        planned: bool,
    },
    Free {
        address: Address,
        memory: Arc<EmulatedMemory>,
    },
    Host(HostFunction),
    Graph(Box<Sequence>),
    /// A host function that a planned fault skips.
    SkippedHost,
    /// The time that the next work takes. A simulation lets it pass.
    Pause(Duration),
}

impl Work {
    /// True if the work would occupy an entry in a driver's queue. A driver has no call that [recycles](Self::Recycle).
    pub(super) fn occupies_queue(&self) -> bool {
        !matches!(self, Self::Host(_) | Self::Recycle { .. } | Self::SkippedHost | Self::Pause(_))
    }

    /// True if the work accesses memory that the device owns. A host function accesses only memory of its closure.
    pub(super) fn touches_memory(&self) -> bool {
        !matches!(self, Self::Host(_) | Self::SkippedHost | Self::Pause(_))
    }
}

#[derive(Debug)]
pub(super) struct Fault(pub(super) String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.describe())
    }
}

/// A description of work for messages. It contains no addresses, so it is the same in every run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Description {
    Wait,
    Record,
    Copy { direction: &'static str, bytes: u64 },
    Fill { bytes: u64 },
    Kernel(&'static str),
    External(&'static str),
    Free,
    Host,
    Pause(Duration),
    Graph { steps: usize },
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wait => f.write_str("wait"),
            Self::Record => f.write_str("record"),
            Self::Copy { direction, bytes } => {
                write!(f, "copy {direction} of {}", human::count(*bytes as usize, "byte"))
            }
            Self::Fill { bytes } => write!(f, "fill of {}", human::count(*bytes as usize, "byte")),
            Self::Kernel(name) => write!(f, "kernel `{name}`"),
            Self::External(name) => write!(f, "external work `{name}`"),
            Self::Free => f.write_str("free"),
            Self::Host => f.write_str("host function"),
            Self::Pause(time) => write!(f, "pause of {time:?}"),
            Self::Graph { steps } => write!(f, "graph of {}", human::count(*steps, "step")),
        }
    }
}

impl Work {
    pub(super) fn describe(&self) -> Description {
        match self {
            Work::Copy { to, from, bytes, .. } => {
                Description::Copy { direction: human::direction(*to, *from), bytes: *bytes }
            }
            Work::Fill { bytes, .. } | Work::Recycle { bytes, .. } => Description::Fill { bytes: *bytes },
            Work::Kernel { kernel, .. } => Description::Kernel(kernel.name),
            Work::External { name, .. } => Description::External(name),
            Work::Free { .. } => Description::Free,
            Work::Host(_) | Work::SkippedHost => Description::Host,
            Work::Pause(time) => Description::Pause(*time),
            Work::Graph(sequence) => Description::Graph { steps: sequence.len() },
        }
    }

    /// Runs the work on this thread. Work that could run for ever stops when `is_alive` returns false.
    ///
    /// # Safety
    /// All work that must come before this work is done, and the guarantees of the caller that enqueued it still hold:
    /// host memory is valid, arguments are those that the kernel declares, and nothing else accesses the memory that it
    /// writes.
    pub(super) unsafe fn run(self, is_alive: &dyn Fn() -> bool) -> Result<(), Fault> {
        match self {
            // SAFETY: guaranteed by the caller.
            Work::Copy { to, from, bytes, planned } => unsafe { copy(to, from, bytes, planned) },
            // SAFETY: guaranteed by the caller.
            Work::Fill { to, pattern, bytes } => unsafe { fill(to, pattern, bytes) },
            // SAFETY: guaranteed by the caller.
            Work::Recycle { address, bytes } => unsafe {
                fill(address, Pattern { width: 1, bits: u32::from(FRESH) }, bytes)
            },
            Work::Kernel { kernel, args, planned } => {
                launch(&args, planned, |body| {
                    // SAFETY: guaranteed by the caller; `launch` has resolved the slices, and keeps them alive.
                    unsafe { (kernel.body)(body) }
                })
            }
            Work::External { args, body, planned, .. } => launch(&args, planned, |args| body(args)),
            Work::Free { address, memory } => memory.free(address).map_err(|error| Fault(format!("{error:#}"))),
            Work::Host(function) => {
                contained("a host function panicked", function);
                Ok(())
            }
            // SAFETY: guaranteed by the caller.
            Work::Graph(sequence) => unsafe { sequence.run(is_alive) },
            Work::Pause(time) => {
                std::thread::sleep(time);
                Ok(())
            }
            Work::SkippedHost => Ok(()),
        }
    }
}

fn resolve_end(place: Endpoint, bytes: u64) -> Result<(*mut u8, Option<Resolved>), Fault> {
    match place {
        Endpoint::Host(pointer) => Ok((pointer, None)),
        Endpoint::Device(address) => {
            let found = resolve(address, bytes).map_err(Fault)?;
            Ok((found.start, Some(found)))
        }
    }
}

/// # Safety
/// The contract of [`Work::run`].
unsafe fn copy(to: Endpoint, from: Endpoint, bytes: u64, planned: bool) -> Result<(), Fault> {
    if planned {
        return Err(Fault("a planned fault".into()));
    }
    let (to, _to) = resolve_end(to, bytes)?;
    let (from, _from) = resolve_end(from, bytes)?;
    // SAFETY: device ends are inside their blocks, which `_to` and `_from` keep alive; host ends are valid and not
    // accessed otherwise, as the caller that enqueued this guaranteed. `copy` allows the two ends to overlap.
    unsafe { std::ptr::copy(from, to, bytes as usize) };
    Ok(())
}

/// # Safety
/// The contract of [`Work::run`].
unsafe fn fill(to: Address, pattern: Pattern, bytes: u64) -> Result<(), Fault> {
    let found = resolve(to, bytes).map_err(Fault)?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: inside its block, which `found` keeps alive, initialised since it was allocated, and not accessed
    // otherwise, as the caller that enqueued this guaranteed.
    let target = unsafe { std::slice::from_raw_parts_mut(found.start, bytes as usize) };
    let bits = pattern.bits.to_le_bytes();
    match pattern.width {
        1 => target.fill(bits[0]),
        width => target.chunks_exact_mut(width).for_each(|chunk| chunk.copy_from_slice(&bits[..width])),
    }
    Ok(())
}

/// Calls a body with the host bytes of its arguments. Each slice is aligned and in a live block, which is kept alive
/// for the call.
fn launch(args: &[OwnedArg], planned: bool, run: impl FnOnce(&[BodyArg])) -> Result<(), Fault> {
    if planned {
        return Err(Fault("trapped: a planned fault".into()));
    }
    let mut held: SmallVec<[Resolved; 8]> = SmallVec::new();
    let mut body: SmallVec<[BodyArg; 8]> = SmallVec::new();
    for (index, arg) in args.iter().enumerate() {
        body.push(match arg {
            OwnedArg::Scalar(scalar) => BodyArg::Scalar(*scalar),
            OwnedArg::Slice { address, len, bytes, .. } => {
                let found = resolve(*address, *bytes).map_err(|what| Fault(format!("argument {index}: {what}")))?;
                let align = alignment(*len, *bytes);
                if !found.start.addr().is_multiple_of(align) {
                    return Err(Fault(format!("argument {index}: {address:?} is not aligned to {align} bytes")));
                }
                let start = found.start;
                held.push(found);
                BodyArg::Slice(start, *len as usize)
            }
        });
    }
    catch_unwind(AssertUnwindSafe(|| run(&body))).map_err(|panic| Fault(format!("trapped: {}", panic_message(panic))))
}

/// The largest alignment that elements of this size can have: the largest power of two that divides the size, up to
/// [`MAX_ALIGNMENT`], which also limits elements ([`Plain::FITS`](crate::memory::Plain)).
fn alignment(len: u64, bytes: u64) -> usize {
    match bytes.checked_div(len) {
        None | Some(0) => 1,
        Some(size) => 1 << size.trailing_zeros().min(MAX_ALIGNMENT.ilog2()),
    }
}

/// Refuses launches that no device supports.
pub(super) fn check_launch(launch: &Launch<'_>) -> Result<()> {
    /// The shared memory limit of a block on the largest GPUs, 227 KiB (CUDA C++ Programming Guide, technical
    /// specifications, compute capability 9.0).
    const MAX_SHARED: u32 = 227 << 10;
    let Launch { grid, block, shared_bytes, args, .. } = *launch;
    if shared_bytes > MAX_SHARED {
        let message = format!("{shared_bytes} bytes of shared memory per block exceed the limit of {MAX_SHARED} bytes");
        return Err(Error::new(ErrorKind::Driver, message));
    }
    let threads = block.iter().try_fold(1_u32, |all, n| all.checked_mul(*n));
    if grid.contains(&0) || !threads.is_some_and(|n| (1..=1024).contains(&n)) {
        return Err(Error::new(
            ErrorKind::Driver,
            format!(
                "invalid launch with grid {grid:?} and block {block:?}: every dimension must be at least 1, and a \
                 block has at most 1024 threads"
            ),
        ));
    }
    // The bodies are Rust: a slice that one argument writes must not overlap another.
    let slices = || {
        args.iter().enumerate().filter_map(|(index, arg)| match arg {
            Arg::Slice { address, bytes, write, .. } => {
                Some((index, address.0, address.0.saturating_add(*bytes), *write))
            }
            Arg::Scalar(_) => None,
        })
    };
    for (index, start, end, write) in slices() {
        for (other, from, to, writes) in slices().skip_while(|slice| slice.0 <= index) {
            if (write || writes) && start < to && from < end {
                let message = format!(
                    "arguments {index} and {other} overlap, and the kernel writes one of them: pass separate memory"
                );
                return Err(Error::new(ErrorKind::Usage, message));
            }
        }
    }
    Ok(())
}

/// Refuses copies that exceed the address space.
pub(super) fn check_copy(bytes: u64) -> Result<()> {
    match usize::try_from(bytes) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::new(ErrorKind::Driver, format!("a copy of {bytes} bytes exceeds the address space"))),
    }
}

/// Refuses fills that no device supports.
pub(super) fn check_fill(to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
    let width = pattern.width as u64;
    if !matches!(width, 1 | 2 | 4) || !to.0.is_multiple_of(width) || !bytes.is_multiple_of(width) {
        let message = format!(
            "invalid fill of {bytes} bytes at {to:?} with a pattern of {width} bytes: the pattern has 1, 2 or 4 \
             bytes, which must divide both the length and the address"
        );
        return Err(Error::new(ErrorKind::Driver, message));
    }
    Ok(())
}

/// The error for another library's work that has no emulation.
pub(super) fn no_emulation() -> Error {
    let message = "this device is emulated and cannot run CUDA work: provide a replacement with `.emulated(..)`";
    Error::new(ErrorKind::Usage, message)
}
