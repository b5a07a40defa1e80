//! Operators made from plain functions, for small tasks.

use std::fmt;

use wakeline_macros::Ports;

use super::{Cx, Input, Operator, Output};
use crate::{error::Result, hub::Message};

/// The ports of [`source`].
#[derive(Debug, Ports)]
pub struct SourcePorts<M: Message> {
    /// The values that the function returned.
    #[output]
    pub output: Output<M>,
}

/// The ports of [`map`].
#[derive(Debug, Ports)]
pub struct MapPorts<A: Message, B: Message> {
    /// The arguments of the function.
    #[input]
    pub input: Input<A>,
    /// The values that the function returned.
    #[output]
    pub output: Output<B>,
}

/// The ports of [`sink`].
#[derive(Debug, Ports)]
pub struct SinkPorts<M: Message> {
    /// The arguments of the function.
    #[input]
    pub input: Input<M>,
}

/// The operator that [`source`] creates.
pub struct Source<F, M>(F, std::marker::PhantomData<fn() -> M>);

/// The operator that [`map`] creates.
pub struct Map<F, A, B>(F, std::marker::PhantomData<fn(A) -> B>);

/// The operator that [`sink`] creates.
pub struct Sink<F, M>(F, std::marker::PhantomData<fn(M)>);

/// An operator that sends what an async function returns, until it returns `None`. Its port is `output`. For what the
/// function may capture, see [`sink`].
///
/// ```
/// use wakeline::{Flow, operator::{sink, source}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("count");
/// let mut numbers = 0..3_u32;
/// let count = flow.add("count", source(move || std::future::ready(Ok(numbers.next()))));
/// let print = flow.add("print", sink(async |n: u32| { println!("{n}"); Ok(()) }));
/// flow.connect(count.output, print.input);
/// flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn source<M, F, R>(function: F) -> Source<F, M>
where
    M: Message,
    F: FnMut() -> R + Send + 'static,
    R: Future<Output = Result<Option<M>>> + Send,
{
    Source(function, std::marker::PhantomData)
}

/// An operator that applies an async function to each message and sends the result. Its ports are `input` and `output`.
/// For what the function may capture, see [`sink`]; for one that launches a kernel, [`map_with`](super::map_with).
pub fn map<A, B, F, R>(function: F) -> Map<F, A, B>
where
    A: Message,
    B: Message,
    F: FnMut(A) -> R + Send + 'static,
    R: Future<Output = Result<B>> + Send,
{
    Map(function, std::marker::PhantomData)
}

/// An operator that passes each message to an async function. Its port is `input`.
///
/// A function that keeps state between messages must change it before its async block, since the block may outlive the
/// call: an `async move |..|` that changes its captures does not compile. The same is true for [`source`] and [`map`].
/// If you need the [`Cx`], for its stream or for metadata, see [`sink_with`](super::sink_with).
///
/// ```
/// # use wakeline::operator::sink;
/// let mut total = 0;
/// let sum = sink(move |n: u32| {
///     total += n;
///     let now = total;
///     async move {
///         println!("{now}");
///         Ok(())
///     }
/// });
/// ```
pub fn sink<M, F, R>(function: F) -> Sink<F, M>
where
    M: Message,
    F: FnMut(M) -> R + Send + 'static,
    R: Future<Output = Result<()>> + Send,
{
    Sink(function, std::marker::PhantomData)
}

impl<M, F, R> Operator for Source<F, M>
where
    M: Message,
    F: FnMut() -> R + Send + 'static,
    R: Future<Output = Result<Option<M>>> + Send,
{
    type Ports = SourcePorts<M>;

    async fn compute(&mut self, ports: &mut SourcePorts<M>, cx: &mut Cx) -> Result<()> {
        match (self.0)().await? {
            Some(message) => Ok(ports.output.send(message).await?),
            None => {
                cx.finish();
                Ok(())
            }
        }
    }
}

impl<A, B, F, R> Operator for Map<F, A, B>
where
    A: Message,
    B: Message,
    F: FnMut(A) -> R + Send + 'static,
    R: Future<Output = Result<B>> + Send,
{
    type Ports = MapPorts<A, B>;

    async fn compute(&mut self, ports: &mut MapPorts<A, B>, _cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        ports.output.send((self.0)(message).await?).await?;
        Ok(())
    }
}

impl<M, F, R> Operator for Sink<F, M>
where
    M: Message,
    F: FnMut(M) -> R + Send + 'static,
    R: Future<Output = Result<()>> + Send,
{
    type Ports = SinkPorts<M>;

    async fn compute(&mut self, ports: &mut SinkPorts<M>, _cx: &mut Cx) -> Result<()> {
        (self.0)(ports.input.take()?).await
    }
}

impl<F: Clone, M> Clone for Source<F, M> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<F: Clone, A, B> Clone for Map<F, A, B> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<F: Clone, M> Clone for Sink<F, M> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1)
    }
}

impl<F, M> fmt::Debug for Source<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl<F, A, B> fmt::Debug for Map<F, A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Map")
    }
}

impl<F, M> fmt::Debug for Sink<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sink")
    }
}
