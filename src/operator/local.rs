//! [`LocalOperator`]: an operator that stays on one thread, and may share data there without a lock.
//!
//! A flow's operators are `Send`. [`LocalAdapter`] adapts a local operator: it keeps the operator, and each of its futures, in
//! a [`SendWrapper`], which is `Send` but panics on access from any thread other than its own. Only a
//! [`LocalFlow`](crate::flow::LocalFlow) creates them, and it moves nothing to another thread: neither the flow nor
//! what polls its tasks is `Send`.

use send_wrapper::SendWrapper;

use super::{Cx, Operator, Ports, operator_task::Method, run_loop::all_runs};
use crate::error::Result;

/// Like [`Operator`], for a [`LocalFlow`](crate::flow::LocalFlow): everything stays on one thread, so neither the
/// operator nor its futures need be `Send`, and several operators may share an `Rc<RefCell<..>>`. The methods are those
/// of [`Operator`], with the same meaning. Messages must still be `Send`; shared state is not sent. To test one alone, see
/// [`test::local_operator`](crate::test::local_operator).
///
/// ```
/// use std::{cell::RefCell, collections::HashMap, rc::Rc};
/// use wakeline::{flow::LocalFlow, operator::{LocalOperator, source}, prelude::*};
///
/// #[derive(Ports)]
/// struct TallyPorts {
///     #[input]
///     words: Input<&'static str>,
/// }
///
/// /// Counts words, in a table that it shares with other operators.
/// struct Tally(Rc<RefCell<HashMap<&'static str, u32>>>);
///
/// impl LocalOperator for Tally {
///     type Ports = TallyPorts;
///
///     async fn compute(&mut self, ports: &mut TallyPorts, _cx: &mut Cx) -> Result<()> {
///         *self.0.borrow_mut().entry(ports.words.take()?).or_default() += 1;
///         Ok(())
///     }
/// }
///
/// # tokio::runtime::LocalRuntime::new().unwrap().block_on(async {
/// let table = Rc::default();
/// let mut flow = LocalFlow::new("tally");
/// for (name, text) in [("here", "to be or not"), ("there", "to be")] {
///     let mut words = text.split(' ');
///     let read = flow.add(format!("read {name}"), source(move || std::future::ready(Ok(words.next()))));
///     let tally = flow.add_local(format!("tally {name}"), Tally(Rc::clone(&table)));
///     flow.connect(read.output, tally.words);
/// }
/// flow.run().await?;
/// assert_eq!(table.borrow()["to"], 2);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub trait LocalOperator: 'static {
    /// Like [`Operator::Ports`].
    type Ports: Ports;

    /// Like [`Operator::start`].
    ///
    /// # Errors
    /// The same as in [`Operator`].
    fn start(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> {
        let _ = cx;
        async { Ok(()) }
    }

    /// Like [`Operator::may_run`].
    fn may_run(&mut self, ports: &Self::Ports, cx: &Cx) -> bool {
        let _ = ports;
        cx.uses_default(Method::MayRun);
        true
    }

    /// Like [`Operator::compute`].
    ///
    /// # Errors
    /// The same as in [`Operator`].
    ///
    /// # Cancel safety
    /// The same as in [`Operator`].
    fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>>;

    /// Like [`Operator::after`].
    ///
    /// # Errors
    /// The same as in [`Operator`].
    ///
    /// # Cancel safety
    /// The same as in [`Operator`].
    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> {
        let _ = ports;
        cx.uses_default(Method::After);
        async { Ok(()) }
    }

    /// Like [`Operator::stop`].
    ///
    /// # Errors
    /// The same as in [`Operator`].
    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> {
        let _ = cx;
        async { Ok(()) }
    }

    /// Like [`Operator::run`].
    ///
    /// # Errors
    /// The same as in [`Operator`].
    fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> {
        all_runs!(self, ports, cx)
    }
}

/// Adapts a local operator to a flow.
pub(crate) struct LocalAdapter<L>(SendWrapper<L>);

impl<L: LocalOperator> LocalAdapter<L> {
    /// The result must be polled and dropped on this thread.
    pub(crate) fn new(operator: L) -> Self {
        Self(SendWrapper::new(operator))
    }
}

impl<L: LocalOperator> Operator for LocalAdapter<L> {
    type Ports = L::Ports;

    fn start(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        SendWrapper::new(self.0.start(cx))
    }

    fn may_run(&mut self, ports: &L::Ports, cx: &Cx) -> bool {
        self.0.may_run(ports, cx)
    }

    fn compute(&mut self, ports: &mut L::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        SendWrapper::new(self.0.compute(ports, cx))
    }

    fn after(&mut self, ports: &mut L::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        SendWrapper::new(self.0.after(ports, cx))
    }

    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        SendWrapper::new(self.0.stop(cx))
    }

    fn run(&mut self, ports: &mut L::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        SendWrapper::new(self.0.run(ports, cx))
    }
}
