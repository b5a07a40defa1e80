//! [`OnStall`]: the reaction of a flow to a stall.

/// What a flow does when some of its operators have stalled: they wait only for each other, and a message is left that
/// none of them takes, or one of them has something to send and no room for it. Nothing that the other operators do can
/// change that.
///
/// A stall is detected when all operators wait for each other. On a runtime with timers (`enable_time`) it is also
/// detected if other operators continue: within 0.2 seconds after the last of the stalled operators has begun to wait,
/// or a little over a second if one of them waits for room while several of its hubs are full, or for an envelope that
/// is outside. In that case the analysis errs on the side of continuing:
///
/// - An operator that waits for a condition of the user's own, a predicate or `may_run` counts as active.
/// - An operator that waits for a message in the middle of a run counts as waiting at all of its inputs.
/// - A wait for an envelope counts as a wait for all operators in a run, and for all operators that messages of the hub
///   might have reached, except for the callers of a [`Service`](crate::Service), whose responses are their own memory.
///   The flow does not know of an envelope that an operator sent through a channel of the program's own.
/// - An operator that calls a [`Service`](crate::Service) of its own flow, or sends into its own
///   [`Ingress`](crate::Ingress), counts as waiting for the reader while there is no room, and, once a request is sent,
///   for all operators that might hold it. It counts as active while another handle has room reserved, and while it
///   waits for a slot within a service's limit, since a caller that drops its future releases one.
/// - Such a caller also counts as active if an operator has [taken the reply](crate::Cx::take_replies), if its runs are
///   [concurrent](crate::operator::concurrent), or if it awaits the response in a combinator with its own wakers, such
///   as `FuturesUnordered`.
/// - An operator that waits for a message of its own flow's [`Egress`](crate::Egress), or for a blank envelope of its
///   own `Ingress`, counts as active.
///
/// A runtime without timers is recognised by a panic in tokio, which is caught; the panic hook is still called.
/// Operators that wait for each other with nothing left to take, such as those of an idle loop, have not stalled: they
/// end.
///
/// ```
/// use wakeline::{Flow, flow::OnStall};
///
/// let mut flow = Flow::new("camera");
/// flow.set_on_stall(OnStall::Warn);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStall {
    /// The flow fails with [`Stalled`](crate::ErrorKind::Stalled), and the error says which operator waits for what.
    /// Callers of a [`Service`](crate::Service) receive an error of that kind.
    #[default]
    Fail,
    /// The other operators continue, and a warning that says which operator waits for what is logged once. The stalled
    /// operators keep their messages: callers whose requests are among them wait until the flow is aborted, or stopped,
    /// which then fails as above.
    Warn,
}
