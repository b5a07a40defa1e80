//! The derive and attribute macros of wakeline: [`Ports`](macro@Ports), [`Message`](macro@Message),
//! [`kernel`](macro@kernel) and [`KernelStruct`](macro@KernelStruct).
//!
//! Use them through `wakeline` (`use wakeline::prelude::*`), not from this crate: the generated code names
//! `::wakeline`. Each macro is in a file of its own. It parses a declaration, collects every error (`errors.rs`),
//! and only then generates code. An error points at the field, argument or option in question and says what to write
//! instead. Questions that only the compiler can answer (is this type an input?) are asked with that type's own span.
//!
//! Generated code uses absolute paths and hygienic names, so that names that a user imports or gives to arguments
//! cannot conflict with it.

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod errors;
mod fork;
mod kernel;
mod kernel_struct;
mod message;
mod ports;

use proc_macro::TokenStream;

/// Declares the ports of an operator: the envelopes and values that it receives and sends.
///
/// Use it on a struct whose fields are all ports, each marked `#[input]`, `#[output]`, or as a link to a hub of chunks.
/// A struct without fields declares an operator without ports. The struct becomes `Operator::Ports`, which is passed to
/// `compute`. The macro adds a struct of handles, which `Flow::add` returns and `Flow::connect` takes. It has the same
/// fields, visibility and documentation, and is named after the struct: `UpperPorts` has `UpperHandles`, `Upper` has
/// `UpperHandles` too.
///
#[cfg_attr(not(doctest), doc = include_str!("examples/ports.md"))]
///
/// # On a field
///
/// - `#[input]`: receives messages; the field is an `Input<..>`.
/// - `#[output]`: sends messages; the field is an `Output<..>`.
/// - `#[produce]`, `#[consume]`, `#[peek]`, `#[modify]`: linked to a hub of chunks; the field is a `Produce<..>`,
///   `Consume<..>`, `Peek<..>` or `Modify<..>`.
///
/// The types are recognised by these names: a type alias of a port needs another name.
///
/// The values of their options are expressions of type `usize`, unless stated otherwise, which may name the struct's
/// own constants and const parameters. A duration is a string (`"5ms"`, `"1s 500ms"`) or an expression of type
/// `Duration`.
///
/// | option | on | meaning |
/// |---|---|---|
/// | `capacity = 4` | both | messages that its queue holds, at least 1, unless the connection sets it |
/// | `envelope_bytes = 1 << 20` | `#[output]` | bytes of each envelope that the hub allocates for it |
/// | `envelopes = 3` | `#[output]` | how many envelopes the hub allocates at each location |
/// | `at_least = 4` | `#[input]` | the operator runs when there are at least this many messages |
/// | `at_most = 8` | `#[input]` | the operator runs while there are at most this many messages |
/// | `batch = 8`, `within = "5ms"` | `#[input]` | the operator runs with this many messages, or with fewer once the oldest has waited this long |
/// | `since = Sent` | `#[input]` | `within` counts from when a message was sent; `Arrived`, the default: from when it arrived |
/// | `room = 3` | `#[output]` | the operator runs when there is room for this many messages |
/// | `by_hand` | `#[produce]`, `#[consume]`, `#[modify]` | the operator commits the chunk with `commit`; otherwise it is committed at the end of the run |
/// | `optional` | all | the operator runs whether or not there is a message, or room |
/// | `done` | `#[input]` | a message counts once the work that wrote it is done |
/// | `event = "decoded"` | `#[input]` | a message counts once its event of that name has passed; a literal that names an event of the message |
///
/// # On the struct
///
/// - `#[ports(handles = Name)]`: sets the name of the struct of handles.
/// - `#[ports(sum(left, right) = 3)]`: the operator runs when these inputs have this many messages in total.
/// - `#[ports(each(left = 2, right = 1))]`: it runs when each of these inputs has this many.
/// - `or_after = "10ms"` in the same brackets: it also runs this long after its last run began.
///
/// There may be any number of attributes, each with at most one such condition. An input in one of them has no
/// condition of its own.
///
/// Type and const parameters, bounds and where clauses are kept. Lifetimes are rejected: ports belong to a task, which
/// may outlive borrowed data.
#[proc_macro_derive(Ports, attributes(input, output, produce, consume, peek, modify, ports))]
pub fn derive_ports(item: TokenStream) -> TokenStream {
    errors::or_report(item.into(), ports::expand, ports::stub).into()
}

/// Makes a struct or an enum a message, which ports can carry.
///
/// Plain data needs nothing else. Mark a field that holds envelopes (an `Envelope<..>`, or another message that
/// contains some) `#[envelope]`: then wakeline finds them there, copies them to the device of the next reader and
/// counts their bytes.
///
#[cfg_attr(not(doctest), doc = include_str!("examples/message.md"))]
///
/// # On a field
///
/// - `#[envelope]`: the field's type is itself a `Message`, and its envelopes are this message's.
/// - `#[event]`, `#[event("decoded")]`: the field is an `Event` (or a `Ticket`, or an `Option` of one). The event has
///   that name, or the field's; an input can wait for it with `#[input(event = "decoded")]`.
///
/// A generic type is a message where it is `Send + 'static` and its marked fields are messages.
///
/// The size in the report is that of the value itself, its marked fields as messages of their own, and the data of
/// fields that are strings, byte strings, an `Arc`, a `Box`, a `Vec` or a `VecDeque`: see `Message::size_in_bytes`.
///
/// The type is also `Fork`, so that it can go to several readers, if its marked fields are `Fork` and all others are
/// `Clone`.
#[proc_macro_derive(Message, attributes(envelope, event))]
pub fn derive_message(item: TokenStream) -> TokenStream {
    errors::or_report(item.into(), message::expand, message::stub).into()
}

/// Makes a struct a type of kernels' arguments and elements, and defines it in CUDA C++.
///
/// ```ignore
/// use wakeline::prelude::*;
///
/// #[derive(Clone, Copy, KernelStruct)]
/// #[repr(C)]
/// struct Particle {
///     position: [f32; 3],
///     mass: f32,
/// }
///
/// #[kernel(unsafe(cuda = "fall.cu"), over = [particles.len()])]
/// fn fall(seconds: f32, particles: &mut [Particle]) {
///     particles.iter_mut().for_each(|particle| particle.position[2] -= seconds * particle.mass);
/// }
/// ```
///
/// ```cpp
/// // `struct Particle { float position[3]; float mass; };` is defined already.
/// extern "C" __global__ void fall(float seconds, Particle *particles, unsigned long long particles_len) {
///     unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
///     if (i < particles_len) particles[i].position[2] -= seconds * particles[i].mass;
/// }
/// ```
///
/// The struct is the element type of a slice, or an argument by value of at most 64 bytes. It is `#[repr(C)]` or
/// `#[repr(C, align(16))]`, `Copy`, not generic, and has no padding. Its fields are numbers, other such structs, and
/// arrays of them. The definition, with the same name and fields, comes before each file of a kernel that takes it; the
/// C++ compiler checks that its size, its alignment and the size of each field, and so their offsets, are those in Rust.
///
/// It also implements bytemuck's `Pod` and `Zeroable`: do not derive these as well.
#[proc_macro_derive(KernelStruct)]
pub fn derive_kernel_struct(item: TokenStream) -> TokenStream {
    errors::or_report(item.into(), kernel_struct::expand, kernel_struct::stub).into()
}

/// Declares a kernel: one signature, with device code for a GPU and a Rust body for the emulated device.
///
/// ```ignore
/// use wakeline::prelude::*;
///
/// /// Adds `a` times `x` to `y`.
/// #[kernel(unsafe(cuda = "saxpy.cu"))]
/// fn saxpy(a: f32, x: &[f32], y: &mut [f32]) {
///     for (y, x) in y.iter_mut().zip(x) {
///         *y += a * x;
///     }
/// }
///
/// saxpy::launch(cx.stream()?, 2.0, &x, &mut y)?;     // enqueued, not awaited
/// ```
///
/// ```cpp
/// extern "C" __global__ void saxpy(float a, const float *x, unsigned long long x_len,
///                                  float *y, unsigned long long y_len) {
///     unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
///     if (i < x_len && i < y_len) y[i] += a * x[i];
/// }
/// ```
///
/// # The source of the device code
///
/// | attribute | device code |
/// |---|---|
/// | `#[kernel(unsafe(cuda = "saxpy.cu"))]` | CUDA C++, compiled on first use |
/// | `#[kernel(unsafe(ptx = "saxpy.ptx"))]` | PTX |
/// | `#[kernel(unsafe(cubin = "saxpy.cubin"))]` | machine code for one architecture |
/// | `#[kernel]` | none: the kernel runs only on the emulated device |
///
/// The file is included in the program. Its path is relative to the Rust file, as in `include_str!`; it may be built
/// with `concat!` and `env!`, to find a build script's output: `ptx = concat!(env!("OUT_DIR"), "/saxpy.ptx")`.
///
/// `unsafe` is written here, once, so that launching is safe. With it you assert that the device code matches the
/// signature: it has the same name and parameters, stays within its slices, only reads a `&[T]`, leaves valid values in
/// a `&mut [T]`, and its threads do not race with each other. For CUDA C++ a declaration generated from the signature
/// precedes your code, so that different parameters do not compile. `#![forbid(unsafe_code)]` rejects it, like any
/// other `unsafe`.
///
/// # The signature
///
/// A free function that returns nothing; not generic, `async`, `const`, `unsafe` or `extern`. Its arguments are:
///
/// - `&[T]`: memory that is read; the device code gets `const T *` and its length, an `unsigned long long`;
/// - `&mut [T]`: memory that is read and written; `T *` and its length;
/// - `T`: a value.
///
/// `T` is a `KernelType`: a number, or a struct with [`#[derive(KernelStruct)]`](macro@KernelStruct). There is no `bool`: use
/// `u8`.
///
/// # What a launch covers
///
/// On a GPU a kernel's function runs once for each thread of the grid, so a grid that is too small leaves part of the
/// result unwritten; the Rust body runs once and writes all of it. `over` says what a launch must cover, so that such a
/// grid is an error on every device:
///
/// ```ignore
/// #[kernel(unsafe(cuda = "tint.cu"), over = [width, height])]
/// fn tint(width: u32, height: u32, by: f32, pixels: &mut [f32]) { .. }
///
/// tint::launch(&stream, 1920, 1080, 0.5, &mut pixels)?;   // 60 x 135 blocks of 32 x 8 threads
/// let grid = Grid::default().threads([64, 4, 1]);
/// tint::launch_with(grid, &stream, 1920, 1080, 0.5, &mut pixels)?;
/// let grid = Grid::blocks([1, 1, 1]);                     // fails: 256 of 1920 covered
/// tint::launch_with(grid, &stream, 1920, 1080, 0.5, &mut pixels)?;
/// ```
///
/// It lists 1 to 3 extents, x first: expressions over the kernel's parameters, where a slice has only its length:
/// `over = [x.len()]`, `over = [width / 4, 2 * rows]`. The results and the operands of `+`, `-`, `*`, `/`, `%` are
/// integers of any types; their arithmetic is exact, and an overflow or a division by 0 is an error of the launch.
///
/// - The default grid has one thread for each element of `over`, in blocks of 256, 32 x 8 or 8 x 8 x 4 threads;
///   `Grid::default().threads(..)` sets others.
/// - A `Grid::blocks(..)` of which `blocks * threads` is less than the extent in a dimension is a `Usage` error.
/// - If an extent is 0, nothing is launched.
///
/// A kernel that strides over its data is right with any grid and needs no `over`. Without it the default grid has one
/// thread for each element of the longest slice that the kernel writes (that it reads, if it writes none), in one
/// dimension, and any other grid is accepted.
///
/// # Generated items
///
/// The function is unchanged: call it on the host, for example in a test. A type of the same name has:
///
/// - `saxpy::launch(stream, ..)`: enqueues it, with the default grid;
/// - `saxpy::launch_with(grid, stream, ..)`: the same with the given grid;
/// - `saxpy::kernel()`: the kernel itself, for loading it ahead of time.
///
/// The two launches take device memory (`&Buffer<T>`, `&mut Envelope<T>`, ..) where the function takes slices.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand_or_report(attribute.into(), item.into()).into()
}
