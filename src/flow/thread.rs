//! [`OwnThread`]: a thread that belongs to one operator.
//!
//! ```text
//!   the flow's task                       the thread, named after the operator
//!   the future of one phase ────────────> polls it to completion; parked while it is pending
//!         <──────────────── its output ── and waits for the next
//!   drops the handle ───────────────────> drops the current future, and exits
//! ```
//!
//! The thread runs inside the runtime's context, so timers, sockets and `tokio::spawn` work as usual. It is not one of
//! the runtime's workers, so blocking calls are allowed, including `blocking_recv` and `Handle::block_on`, which refuse
//! to block on a worker. The timers and sockets that it waits for are driven by the runtime's workers, or, if there are
//! none, by the thread in the runtime's `block_on`.

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
    error::{Error, ErrorKind, Result, panic_message},
    sync::logged,
    thread_name::thread_name,
};

type Job = BoxFuture<'static, ()>;

/// A thread that runs one job at a time, until this handle is dropped.
pub(super) struct OwnThread {
    jobs: mpsc::UnboundedSender<Job>,
    thread: JoinHandle<()>,
}

impl OwnThread {
    /// Starts a thread in the context of the current runtime.
    pub(super) fn start(name: &str, core: Option<usize>) -> Result<Self> {
        let refused = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::Setup, format!("operator `{name}`: its thread could not be started")).because(cause)
        };
        let runtime = Handle::try_current().map_err(|error| refused(error.into()))?;
        let (jobs, queue) = mpsc::unbounded_channel();
        let body = move || {
            let _inside = runtime.enter();
            if let Some(core) = core
                && let Err(error) = pin_to(core)
            {
                logged(
                    || tracing::warn!(core, error = %format_args!("{error:#}"), "an operator's thread could not be pinned"),
                );
            }
            block_on(work(queue));
        };
        let builder = thread::Builder::new().name(thread_name(name));
        let thread = builder.spawn(body).map_err(|error| refused(error.into()))?;
        Ok(Self { jobs, thread })
    }

    /// Polls a future to completion on the thread. Call this only after the previous job has ended.
    pub(super) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) {
        // If the thread has exited, the job is dropped, and its receiver is notified.
        let _ = self.jobs.send(job.boxed());
    }

    /// Runs a future on that thread and returns its output. `None` if the thread has exited.
    async fn run<T: Send + 'static>(&self, job: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.spawn(job.map(|output| _ = sender.send(output)));
        receiver.await.ok()
    }

    /// Ends the thread. The destructors of its thread-locals may take time, so a helper thread joins it. The runtime's
    /// blocking pool is not used, since all of its threads might be waiting for this flow.
    pub(super) async fn end(self) {
        let Self { jobs, thread } = self;
        drop(jobs);
        let (sender, ended) = oneshot::channel();
        let waits = move || {
            let _ = thread.join().map_err(panic_message);
            let _ = sender.send(());
        };
        // If the helper thread cannot be started, the thread is not joined.
        let _ = thread::Builder::new().name("wakeline-join".into()).spawn(waits);
        let _ = ended.await;
    }
}

/// Runs an operator's future where the operator belongs: on its own thread, or here. `None` if that thread has exited.
pub(super) async fn run_on_own_thread<T: Send + 'static>(
    own: Option<&OwnThread>,
    work: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    match own {
        Some(thread) => thread.run(work).await,
        None => Some(work.await),
    }
}

/// Polls a future to completion on the current thread. It does not use `thread::park`: blocking calls in the operator
/// use that too, and would swallow a wake.
fn block_on(future: impl Future<Output = ()>) {
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
            // The flow's task and the runtime have ended, so the output is not needed.
            return;
        }
    }
}

/// Checks whether a thread can be pinned to a core, on a temporary thread. The affinity of the current thread does not
/// answer this, since that thread may be pinned itself.
pub(super) fn try_core(core: usize) -> io::Result<()> {
    thread::scope(|scope| {
        let trying = thread::Builder::new().spawn_scoped(scope, || pin_to(core))?;
        trying.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

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
