//! [`OnStall`]: what a stall means for a flow.

/// What becomes of a flow when operators of it have stalled: they wait for each other alone, and a message is left that none of
/// them takes, or one of them has something to send and no room for it. Nothing that the others do can change that.
///
/// It is found when all operators wait for each other; and, on a runtime with timers (`enable_time`), where some do and others go
/// on, within two tenths of a second after the last of them has begun to wait, or a little over a second where one waits for room
/// while several of its hubs are full, or for an envelope that is outside. There the analysis errs on the side of going on: operators
/// that wait for a condition of the user's own, a predicate or `may_run` count as going on; one that waits for a message in the middle of
/// a run counts as waiting at all of its inputs; and a wait for an envelope counts as one for all operators in a run, and for all
/// that messages of the hub may have come to. An envelope that an operator gave away by a channel of the program's own is unknown to the
/// flow. An operator that asks a [`Service`](crate::Service) of its own flow, or sends into its own
/// [`Ingress`](crate::Ingress), counts as waiting for the reader while there is no room, and once a request is sent for all
/// operators that may hold it; not while another handle keeps room, or for a place within a service's limit, which a caller that goes
/// away makes free. It counts as going on if an operator has [taken the reply](crate::Cx::take_replies), if its runs
/// are [concurrent](crate::operator::concurrent), and if it awaits the response in a combinator with wakers of its own, such as
/// `FuturesUnordered`; and so does one that waits for a message of its own flow's [`Egress`](crate::Egress), or for a blank envelope of
/// its own `Ingress`. On a runtime without timers, which tokio reports by a panic that is caught, the panic hook hears of that.
/// Operators that wait for each other with nothing left to take, as those of a loop that has gone quiet, are at their end.
///
/// ```
/// use wakeline::{Flow, flow::OnStall};
///
/// let mut flow = Flow::new("camera");
/// flow.on_stall(OnStall::Warn);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStall {
    /// It fails with [`Stalled`](crate::ErrorKind::Stalled), which says who waits for what. Callers of a
    /// [`Service`](crate::Service) are answered with an error of that kind.
    #[default]
    Fail,
    /// The others go on, and a warning in the log says who waits for what, once. What has stalled keeps its messages: callers whose
    /// requests are among them wait until the flow is aborted, or stopped, which then fails as above.
    Warn,
}
