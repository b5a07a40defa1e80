//! [`Inputs`]: one port for any number of connections.
//!
//! Each connection has its own queue, so the order of each sender is kept, and a slow sender delays only the runs
//! that wait for it. Connections are identified by their number, counted from 0 in the order of connecting.
//!
//! ```text
//!   by default ready:  every connection that has not ended has a message
//!   a connection has ended, and its remaining messages are taken:  it is ignored
//!   all have ended, except for kept latest values:  `Never`; if all hubs keep the latest: with the other inputs
//! ```

use super::input::{Input, Many};
use crate::{
    error::{Error, ErrorKind, Result},
    hub::Message,
};

/// A port that receives messages from any number of outputs: its handle is passed to
/// [`Flow::connect`](crate::Flow::connect) once for each.
///
/// **By default it waits for one message of each connection** that has not ended: a connection that stays silent delays
/// the messages of all others, and a message that an operator sends back to itself through such a port is a stall,
/// since no run can send the first one. An operator that should run on any message, from any connection, sets the
/// number over all connections together, in the attribute or with [`at_least`](crate::condition::at_least):
///
/// ```
/// # use wakeline::{Inputs, prelude::*};
/// #[derive(Ports)]
/// struct MergePorts {
///     #[input(at_least = 1)]
///     parts: Inputs<u32>,
/// }
///
/// struct Merge;
///
/// impl Operator for Merge {
///     type Ports = MergePorts;
///
///     async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
///         while let Some((connection, part)) = ports.parts.try_take_any()? {
///             println!("{part} from connection {connection}");
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// | attribute | a run needs | taken by |
/// |---|---|---|
/// | `#[input]` | a message of each connection that has not ended | [`take`](Self::take): one of each |
/// | `#[input(at_least = n)]`, `batch = n, within = ".."` | n messages of all connections together | [`take_batch`](Self::take_batch), [`try_take_any`](Self::try_take_any) |
/// | `#[input(optional)]` | none | [`try_take_any`](Self::try_take_any) |
///
/// ```
/// use wakeline::{Flow, Inputs, operator::source, prelude::*};
///
/// #[derive(Ports)]
/// struct SumPorts {
///     #[input]
///     parts: Inputs<u32>,
/// }
///
/// struct Sum;
///
/// impl Operator for Sum {
///     type Ports = SumPorts;
///
///     async fn compute(&mut self, ports: &mut SumPorts, _cx: &mut Cx) -> Result<()> {
///         let sum: u32 = ports.parts.take()?.sum();     // one message of each connection
///         assert_eq!(sum, 30);
///         Ok(())
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("sum");
/// let sum = flow.add("sum", Sum);
/// for n in [10, 20] {
///     let mut once = Some(n);
///     let part = flow.add(format!("part {n}"), source(move || std::future::ready(Ok(once.take()))));
///     flow.connect(part.output, sum.parts);
/// }
/// flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub type Inputs<M> = Input<M, Many>;

impl<M: Message> Inputs<M> {
    /// Takes one message of each connection that has not ended, in the order of connecting. They are available, because
    /// the port's condition was ready before the operator ran. Messages left in the iterator when it is dropped are
    /// dropped with it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage), with nothing taken, if a connection has no message, for example when it is called
    /// twice in a run. The error of a failed transfer; then the messages that were taken before the error are dropped.
    pub fn take(&mut self) -> Result<impl ExactSizeIterator<Item = M>> {
        for queue in &mut self.queues {
            queue.check()?;
            if !queue.has_message() && !queue.has_ended() {
                let wait = queue.describe_wait();
                return Err(Error::new(ErrorKind::Usage, format!("{wait}: `take` once a run, or use `try_take_any`")));
            }
        }
        let mut connections = 0..self.queues.len();
        self.take_all(|input| {
            for connection in connections.by_ref() {
                if !input.queues[connection].has_ended()
                    && let Some(message) = input.take_from(connection, true)?
                {
                    return Ok(Some(message));
                }
            }
            Ok(None)
        })
    }

    /// Takes the next message of one connection, if there is one.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if no connection has this number; the error of a failed transfer.
    pub fn try_take_from(&mut self, connection: usize) -> Result<Option<M>> {
        let count = self.queues.len();
        if connection >= count {
            let text = format!("there is no connection {connection}: this port has {count}, numbered from 0");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.take_from(connection, false)
    }

    /// Takes the next message of any connection that has one, together with the connection's number. Connections take
    /// turns, so that a busy one does not starve the others.
    ///
    /// # Errors
    /// The error of a failed transfer: a copy that failed, a device that was lost.
    pub fn try_take_any(&mut self) -> Result<Option<(usize, M)>> {
        self.take_any()
    }

    /// Waits for the next message of any connection, and returns it with the connection's number. Returns `None` when
    /// all senders are dropped and no message is left, and when the flow is idle, since nothing can send one then.
    ///
    /// # Errors
    /// The same as for [`Inputs::try_take_any`].
    ///
    /// # Cancel safety
    /// A message is taken only when the future resolves: dropping the future loses none.
    pub fn recv_any(&mut self) -> impl Future<Output = Result<Option<(usize, M)>>> + Send {
        self.receive()
    }

    /// The number of connections, including those that have ended.
    pub fn connections(&self) -> usize {
        self.queues.len()
    }

    /// The number of messages of one connection that can be taken now; 0 if no connection has this number.
    pub fn len_of(&self, connection: usize) -> usize {
        self.queues.get(connection).map_or(0, |queue| queue.len())
    }
}
