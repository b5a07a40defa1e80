//! The derive and attribute macros of wakeline: [`Ports`](macro@Ports), [`Message`](macro@Message) and [`kernel`](macro@kernel).
//!
//! Use them through `wakeline` (`use wakeline::prelude::*`), never from here: what they generate names `::wakeline`.
//! Each of them lives in a file of its own, takes a declaration apart, collects every mistake it finds (`errors.rs`), and
//! only then generates anything. A mistake points at the field, argument or option that it is about and says what to
//! write instead; what only the compiler can know (is this type an input?) is asked of it with that type's own span.
//!
//! What is generated uses absolute paths and hygienic names, so that nothing a user imports or calls an argument can
//! get in its way.

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod errors;
mod fork;
mod kernel;
mod message;
mod ports;

use proc_macro::TokenStream;

/// Declares the ports of an operator: the envelopes and values that it takes and sends.
///
/// It goes on a struct whose fields are all ports, each marked `#[input]` or `#[output]`, or as one that is linked to a hub
/// of chunks. A struct without fields
/// declares an operator without ports. The struct becomes `Operator::Ports`, which `compute` is given; beside it stands
/// a struct of handles, which `Flow::add` returns and `Flow::connect` takes. It has the same fields, visibility and
/// documentation, and is named after the struct: `UpperPorts` has `UpperHandles`, `Upper` has `UpperHandles` too.
///
#[cfg_attr(not(doctest), doc = include_str!("examples/ports.md"))]
///
/// # On a field
///
/// - `#[input]`: messages come in; the field is an `Input<..>`.
/// - `#[output]`: messages go out; the field is an `Output<..>`.
/// - `#[produce]`, `#[consume]`, `#[peek]`, `#[modify]`: linked to a hub of chunks; the field is a `Produce<..>`,
///   `Consume<..>`, `Peek<..>` or `Modify<..>`.
///
/// The values of their options are expressions of type `usize`, if nothing else is said, which may name the struct's own
/// constants and const parameters. A time is a string (`"5ms"`, `"1s 500ms"`) or an expression of type `Duration`.
///
/// | option | on | what it says |
/// |---|---|---|
/// | `capacity = 4` | both | messages that its queue holds, at least 1, where the connection does not say |
/// | `envelope_bytes = 1 << 20` | `#[output]` | bytes of each envelope that the hub allocates for it |
/// | `envelopes = 3` | `#[output]` | how many envelopes the hub allocates at each location |
/// | `at_least = 4` | `#[input]` | its operator runs when so many messages are there |
/// | `at_most = 8` | `#[input]` | its operator runs while no more than so many are there |
/// | `batch = 8`, `within = "5ms"` | `#[input]` | so many, or fewer once the oldest has waited so long |
/// | `since = Sent` | `#[input]` | `within` counts from when a message was sent; `Arrived`, as it does without: from when it arrived |
/// | `room = 3` | `#[output]` | its operator runs when there is room for so many messages |
/// | `by_hand` | `#[produce]`, `#[consume]`, `#[modify]` | its chunk is committed by `commit`, and not as the run ends |
/// | `optional` | all | its operator runs whether there is a message, or room, or not |
/// | `done` | `#[input]` | a message counts once the work that wrote it is done |
/// | `event = "decoded"` | `#[input]` | a message counts once its event of that name has passed; a literal, and a name that the message has |
///
/// # On the struct
///
/// - `#[ports(handles = Name)]`: another name for the struct of handles.
/// - `#[ports(sum(left, right) = 3)]`: the operator runs when these inputs have so many messages together.
/// - `#[ports(each(left = 2, right = 1))]`: it runs when each of these has so many.
/// - `or_after = "10ms"` in the same brackets: or so long after its last run began.
///
/// Any number of attributes, each with one such condition at most. An input in one of them has no condition of its own.
///
/// Type and const parameters, bounds and where clauses are kept. Lifetimes are refused: ports belong to a task, which
/// may outlive what they borrow.
#[proc_macro_derive(Ports, attributes(input, output, produce, consume, peek, modify, ports))]
pub fn derive_ports(item: TokenStream) -> TokenStream {
    errors::or_report(ports::expand(item.into())).into()
}

/// Makes a struct or an enum of your own something that ports can carry.
///
/// Plain data needs nothing else. A field that holds envelopes (an `Envelope<..>`, or another message that has some) is
/// marked `#[envelope]`: then wakeline finds them there, brings them to the device of whoever reads them next and counts
/// their bytes.
///
#[cfg_attr(not(doctest), doc = include_str!("examples/message.md"))]
///
/// # On a field
///
/// - `#[envelope]`: the field's type is itself a `Message`, and its envelopes are this message's.
/// - `#[event]`, `#[event("decoded")]`: the field is an `Event` (or a `Ticket`, or an `Option` of one), of that
///   name or of the field's, which an input can wait for with `#[input(event = "decoded")]`.
///
/// A generic type is a message where it is `Send + 'static` and its marked fields are messages.
///
/// The report counts what lies on the stack, its marked fields as messages of their own, and the data of fields that are
/// strings, byte strings, an `Arc`, a `Box`, a `Vec` or a `VecDeque`: see `Message::size_in_bytes`.
///
/// The type is also `Fork`, so that it can go to several readers, where its marked fields are and all others are `Clone`.
#[proc_macro_derive(Message, attributes(envelope, event))]
pub fn derive_message(item: TokenStream) -> TokenStream {
    errors::or_report(message::expand(item.into())).into()
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
/// # Where the device code comes from
///
/// | attribute | device code |
/// |---|---|
/// | `#[kernel(unsafe(cuda = "saxpy.cu"))]` | CUDA C++, compiled when it is first needed |
/// | `#[kernel(unsafe(ptx = "saxpy.ptx"))]` | PTX |
/// | `#[kernel(unsafe(cubin = "saxpy.cubin"))]` | machine code for one architecture |
/// | `#[kernel]` | none: the kernel runs on the emulated device alone |
///
/// The file becomes part of the program. Its path is relative to the Rust file, as in [`include_str!`]; it may be built from
/// `concat!` and `env!`, to find what a build script made: `ptx = concat!(env!("OUT_DIR"), "/saxpy.ptx")`.
///
/// `unsafe` is said here, once, so that launching is safe. With it you vouch that the device code keeps to the
/// signature: it has the same name and parameters, stays within its slices, only reads a `&[T]`, leaves valid values in a
/// `&mut [T]`, and its threads do not race with each other. For CUDA C++ a declaration made from the signature stands before your code, so
/// that different parameters do not compile. `#![forbid(unsafe_code)]` refuses it, as any other `unsafe`.
///
/// # The signature
///
/// A free function that returns nothing; not generic, `async`, `const`, `unsafe` or `extern`. Its arguments are
///
/// - `&[T]`: memory that is read; the device code gets `const T *` and its length, an `unsigned long long`;
/// - `&mut [T]`: memory that is read and written; `T *` and its length;
/// - `T`: a value.
///
/// `T` is a `KernelType`: a number, or plain data of your own.
///
/// # What it makes
///
/// The function stays as it is: call it on the host, for example in a test. A type of the same name carries
///
/// - `saxpy::launch(stream, ..)`: enqueues it, with a grid made from the number of elements;
/// - `saxpy::launch_with(grid, stream, ..)`: the same with your own grid;
/// - `saxpy::kernel()`: the kernel itself, to load it ahead of time.
///
/// The two launches take a device's memory (`&Buffer<T>`, `&mut Envelope<T>`, ..) where the function takes slices.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    kernel::expand(attribute.into(), item.clone())
        .unwrap_or_else(|error| {
            let mut tokens = error.into_compile_error();
            tokens.extend(kernel::kept(item));
            tokens
        })
        .into()
}
