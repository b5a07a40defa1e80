//! [`OwnThread`]: a thread that belongs to one operator.
//!
//! ```text
//!   the flow's keeper                     the thread, named after the operator
//!   one phase's future ─────────────────> polls it to its end; parked while it is pending
//!         <──────────────── its output ── and waits for the next
//!   lets go of the thread ──────────────> drops what it is at, and ends
//! ```
//!
//! The thread stands inside the runtime's context, so timers, sockets and `tokio::spawn` work as anywhere. It is none of
//! the runtime's own, so all that blocks may be called there: also `blocking_recv` and `Handle::block_on`, which refuse
//! to on a worker. What it waits for is driven by the runtime's workers, or, where there are none, by the thread in the
//! runtime's `block_on`.

use std::{
    io,
    pin::pin,
    task::{Context, Waker},
    thread::{self, JoinHandle},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Either, select},
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
};

use crate::{
    error::{Error, ErrorKind, Result, said},
    sync::logged,
    thread_name::thread_name,
};

type Job = BoxFuture<'static, ()>;

/// A thread that does one thing after the other, until this is dropped.
pub(super) struct OwnThread {
    jobs: mpsc::UnboundedSender<Job>,
    thread: JoinHandle<()>,
}

impl OwnThread {
    /// A new thread, in the context of the present runtime.
    pub(super) fn start(name: &str, core: Option<usize>) -> Result<Self> {
        let refused = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::Setup, format!("operator `{name}` gets no thread of its own")).because(cause)
        };
        let runtime = Handle::try_current().map_err(|error| refused(error.into()))?;
        let (jobs, queue) = mpsc::unbounded_channel();
        let body = move || {
            let _inside = runtime.enter();
            if let Some(core) = core
                && let Err(error) = pin_to(core)
            {
                logged(|| tracing::warn!(core, %error, "an operator's thread could not be pinned"));
            }
            to_its_end(work(queue));
        };
        let builder = thread::Builder::new().name(thread_name(name));
        let thread = builder.spawn(body).map_err(|error| refused(error.into()))?;
        Ok(Self { jobs, thread })
    }

    /// Has it poll a future to its end. Only once what it was given before has ended.
    pub(super) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        // It is there as long as this is; should it not be, the job is dropped, and whoever waits for it hears of that.
        let _ = self.jobs.send(job.boxed());
    }

    /// What a future comes to on that thread. `None` if the thread is gone.
    async fn run<T: Send + 'static>(&self, job: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (tell, told) = oneshot::channel();
        self.spawn(job.map(|output| _ = tell.send(output)));
        told.await.ok()
    }

    /// Ends it. It has nothing to do any more, but what it keeps for itself (thread-locals) may take its time to go: a thread
    /// waits for that. Not one of the runtime's pool, whose places may all be taken by what waits for this flow.
    pub(super) async fn end(self) {
        let Self { jobs, thread } = self;
        drop(jobs);
        let (tell, ended) = oneshot::channel();
        let waits = move || {
            let _ = thread.join().map_err(said);
            let _ = tell.send(());
        };
        // Where there is no thread for it, nothing waits.
        let _ = thread::Builder::new().name("wakeline-join".into()).spawn(waits);
        let _ = ended.await;
    }
}

/// What an operator's future comes to where the operator lives: on its own thread, or here. `None` if that thread is
/// gone.
pub(super) async fn at_home<T: Send + 'static>(
    own: Option<&OwnThread>,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    match own {
        Some(thread) => thread.run(work).await,
        None => Some(work.await),
    }
}

/// Polls a future to its end on the present thread. Not with `thread::park`, which whatever blocks in the operator uses
/// too: that would swallow a wake that comes meanwhile.
fn to_its_end(future: impl Future<Output = ()>) {
    let (parker, unparker) = parking::pair();
    let waker = Waker::from(unparker);
    let mut future = pin!(future);
    while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        parker.park();
    }
}

async fn work(mut jobs: mpsc::UnboundedReceiver<Job>) {
    while let Some(job) = jobs.recv().await {
        let next = pin!(jobs.recv());
        if let Either::Right(_) = select(job, next).await {
            // The keeper is gone, and the runtime with it: nobody waits for what this would come to.
            return;
        }
    }
}

/// Whether a thread can be pinned to a core: tried out, on a thread that ends with that. The present one's own cores say
/// nothing about it, since that may be pinned itself.
pub(super) fn try_core(core: usize) -> io::Result<()> {
    thread::scope(|scope| {
        let trying = thread::Builder::new().spawn_scoped(scope, || pin_to(core))?;
        trying.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

/// Pins the present thread.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn pin_to(core: usize) -> io::Result<()> {
    use rustix::thread::{CpuSet, sched_setaffinity};

    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn pin_to(_core: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
