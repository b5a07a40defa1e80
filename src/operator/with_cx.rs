//! Operators made from functions that use the operator's [`Cx`]: its stream, its memory, its metadata.
//!
//! An operator is a task that may move between threads, so the future of each run must be [`Send`]; and a run borrows the
//! [`Cx`]. On stable Rust, a bound says both of a function whose future borrows its arguments alone, as that of an `async`
//! closure without captured variables does, and not of one that borrows from the closure too. So a function that keeps
//! something between its runs, or uses something made before, gets it as an argument: [`with_state`].

use std::{fmt, marker::PhantomData};

use super::{Cx, MapPorts, Operator, SinkPorts, SourcePorts};
use crate::{error::Result, hub::Message};

/// An async function of some arguments and of the operator's [`Cx`], whose result is `T`: an `async` closure or an
/// `async fn`, or one [`with a state`](with_state).
#[diagnostic::on_unimplemented(
    message = "this is not an async function of a message and the operator's `Cx`",
    label = "expected `async |message: .., cx: &mut Cx| ..`; of a source, `async |cx: &mut Cx| ..`",
    note = "write the types of the arguments; what the function keeps, or uses from outside, is an argument as well: \
            `with_state(state, async |state: &mut .., message: .., cx: &mut Cx| ..)`"
)]
pub trait CxFunction<'a, Arguments, T>: Send + 'static {
    /// The future of one call.
    type Run: Future<Output = Result<T>> + Send + 'a;

    #[doc(hidden)]
    fn call(&'a mut self, arguments: Arguments, cx: &'a mut Cx) -> Self::Run;
}

impl<'a, A, T, F, R> CxFunction<'a, (A,), T> for F
where
    F: FnMut(A, &'a mut Cx) -> R + Send + 'static,
    R: Future<Output = Result<T>> + Send + 'a,
{
    type Run = R;

    fn call(&'a mut self, (message,): (A,), cx: &'a mut Cx) -> R {
        self(message, cx)
    }
}

impl<'a, T, F, R> CxFunction<'a, (), T> for F
where
    F: FnMut(&'a mut Cx) -> R + Send + 'static,
    R: Future<Output = Result<T>> + Send + 'a,
{
    type Run = R;

    fn call(&'a mut self, (): (), cx: &'a mut Cx) -> R {
        self(cx)
    }
}

/// The function that [`with_state`] creates.
#[derive(Clone)]
pub struct WithState<S, F> {
    state: S,
    function: F,
}

/// A function for [`map_with`], [`sink_with`] or [`source_with`] that gets `&mut state` as its first argument: what it
/// keeps from one run to the next, or what was made before the flow runs, such as a buffer of weights. It is the remedy for
/// "async closure does not implement `FnMut` because it captures state from its environment". For several variables,
/// the state is a tuple or a struct.
///
/// In a [`concurrent`](fn@super::concurrent) operator each worker has a clone of the state.
///
/// ```
/// use wakeline::{operator::{map_with, with_state}, prelude::*};
///
/// /// Numbers the lines.
/// fn number() -> impl Operator {
///     map_with(with_state(0_u64, async |lines: &mut u64, line: String, _cx: &mut Cx| {
///         *lines += 1;
///         Ok(format!("{lines}: {line}"))
///     }))
/// }
/// # Flow::new("numbered").add("number", number());
/// ```
pub fn with_state<S, F>(state: S, function: F) -> WithState<S, F> {
    WithState { state, function }
}

impl<'a, S, A, T, F, R> CxFunction<'a, (A,), T> for WithState<S, F>
where
    S: Send + 'static,
    F: FnMut(&'a mut S, A, &'a mut Cx) -> R + Send + 'static,
    R: Future<Output = Result<T>> + Send + 'a,
{
    type Run = R;

    fn call(&'a mut self, (message,): (A,), cx: &'a mut Cx) -> R {
        (self.function)(&mut self.state, message, cx)
    }
}

impl<'a, S, T, F, R> CxFunction<'a, (), T> for WithState<S, F>
where
    S: Send + 'static,
    F: FnMut(&'a mut S, &'a mut Cx) -> R + Send + 'static,
    R: Future<Output = Result<T>> + Send + 'a,
{
    type Run = R;

    fn call(&'a mut self, (): (), cx: &'a mut Cx) -> R {
        (self.function)(&mut self.state, cx)
    }
}

/// The operator that [`source_with`] creates.
pub struct SourceWith<F, M>(F, PhantomData<fn() -> M>);

/// The operator that [`map_with`] creates.
pub struct MapWith<F, A, B>(F, PhantomData<fn(A) -> B>);

/// The operator that [`sink_with`] creates.
pub struct SinkWith<F, M>(F, PhantomData<fn(M)>);

/// Like [`source`](super::source), for a function that uses the operator's [`Cx`], and **captures no variables**: what it
/// keeps, or uses from outside, is [a state](with_state). It sends what the function returns, until that is `None`. Its port
/// is `output`.
///
/// ```
/// use wakeline::{Stream, prelude::*};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let mut flow = Flow::new("zeros");
/// // Makes memory on its own device, on its own stream.
/// let make = with_state(1..4, async |left: &mut std::ops::Range<usize>, cx: &mut Cx| {
///     let Some(len) = left.next() else { return Ok(None) };
///     let mut buffer = cx.alloc::<f32>(len)?;
///     cx.stream()?.fill(&mut buffer, 0.0)?;
///     Ok(Some(Host(buffer)))
/// });
/// let zeros = flow.add("zeros", source_with(make)).on(&device);
/// let print = flow.add("print", sink(async |buffer: Host<Buffer<f32>>| {
///     let stream = Stream::new(buffer.0.device())?;
///     println!("{:?}", buffer.0.to_vec(&stream).await?);
///     Ok(())
/// }));
/// flow.connect(zeros.output, print.input);
/// flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn source_with<M, F>(function: F) -> SourceWith<F, M>
where
    M: Message,
    F: for<'a> CxFunction<'a, (), Option<M>>, // No captures: `with_state` passes them.
{
    SourceWith(function, PhantomData)
}

/// Like [`map`](super::map), for a function that uses the operator's [`Cx`], and **captures no variables**: what it keeps, or
/// uses from outside, is [a state](with_state). The smallest operator on a GPU. Its ports are `input` and `output`.
///
/// ```
/// use wakeline::prelude::*;
///
/// // Without a CUDA body, for the emulated device.
/// #[kernel]
/// fn uppercase(text: &mut [u8]) {
///     text.make_ascii_uppercase();
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let mut flow = Flow::new("shout");
/// let upper = flow.add("upper", map_with(async |mut text: Envelope<u8>, cx: &mut Cx| {
///     uppercase::launch(cx.stream()?, &mut text)?;
///     Ok(text)
/// })).on(&device);
/// let print = flow.add("print", sink(async |text: Envelope<u8>| {
///     println!("{}", String::from_utf8_lossy(text.read().await?));
///     Ok(())
/// }));
/// let lines = flow.ingress_with("lines", upper.input, HubOptions::bounded(1).envelope_bytes(64));
/// flow.connect(upper.output, print.input);
/// let running = flow.spawn()?;
/// let mut line = lines.blank().await?;
/// line.fill_from(b"hello").await?;
/// lines.send(line).await?;
/// drop(lines);
/// running.await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn map_with<A, B, F>(function: F) -> MapWith<F, A, B>
where
    A: Message,
    B: Message,
    F: for<'a> CxFunction<'a, (A,), B>, // No captures: `with_state` passes them.
{
    MapWith(function, PhantomData)
}

/// Like [`sink`](super::sink), for a function that uses the operator's [`Cx`], and **captures no variables**: what it keeps, or
/// uses from outside, is [a state](with_state). Its port is `input`.
///
/// ```
/// use wakeline::{operator::sink_with, prelude::*};
///
/// /// Ends after a line that says so.
/// fn until_stop() -> impl Operator {
///     sink_with(async |line: String, cx: &mut Cx| {
///         if line == "stop" {
///             cx.finish();
///         }
///         Ok(())
///     })
/// }
/// # Flow::new("stop").add("until stop", until_stop());
/// ```
pub fn sink_with<M, F>(function: F) -> SinkWith<F, M>
where
    M: Message,
    F: for<'a> CxFunction<'a, (M,), ()>, // No captures: `with_state` passes them.
{
    SinkWith(function, PhantomData)
}

impl<F, M> Operator for SourceWith<F, M>
where
    M: Message,
    F: for<'a> CxFunction<'a, (), Option<M>>,
{
    type Ports = SourcePorts<M>;

    async fn compute(&mut self, ports: &mut SourcePorts<M>, cx: &mut Cx) -> Result<()> {
        match self.0.call((), cx).await? {
            Some(message) => Ok(ports.output.send(message).await?),
            None => {
                cx.finish();
                Ok(())
            }
        }
    }
}

impl<F, A, B> Operator for MapWith<F, A, B>
where
    A: Message,
    B: Message,
    F: for<'a> CxFunction<'a, (A,), B>,
{
    type Ports = MapPorts<A, B>;

    async fn compute(&mut self, ports: &mut MapPorts<A, B>, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        ports.output.send(self.0.call((message,), cx).await?).await?;
        Ok(())
    }
}

impl<F, M> Operator for SinkWith<F, M>
where
    M: Message,
    F: for<'a> CxFunction<'a, (M,), ()>,
{
    type Ports = SinkPorts<M>;

    async fn compute(&mut self, ports: &mut SinkPorts<M>, cx: &mut Cx) -> Result<()> {
        self.0.call((ports.input.take()?,), cx).await
    }
}

impl<F: Clone, M> Clone for SourceWith<F, M> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<F: Clone, A, B> Clone for MapWith<F, A, B> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<F: Clone, M> Clone for SinkWith<F, M> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<S, F> fmt::Debug for WithState<S, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WithState")
    }
}

impl<F, M> fmt::Debug for SourceWith<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SourceWith")
    }
}

impl<F, A, B> fmt::Debug for MapWith<F, A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MapWith")
    }
}

impl<F, M> fmt::Debug for SinkWith<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SinkWith")
    }
}
