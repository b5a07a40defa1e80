//! Chains of wakes of any length, on a small stack: a waker that drops its wait, or polls its task, within `wake`.

use std::{
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Wake, Waker},
};

use tokio::task::unconstrained;
use wakeline::{
    condition::Gate,
    stream::{Completed, CompletionMode},
};

use super::{chains::on_a_small_stack, *};

type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task of a minimal executor, which is its own waker.
struct Task {
    wait: Mutex<Option<Wait>>,
    goes_on: bool,
    /// Counts the tasks that are done or have dropped their wait.
    done: Arc<AtomicUsize>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let Some(mut wait) = self.wait.lock().unwrap().take() else { return };
        let waker = Waker::from(self.clone());
        if self.goes_on && wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            *self.wait.lock().unwrap() = Some(wait);
        } else {
            drop(wait);
            self.done.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Creates `count` waiting tasks.
fn tasks(count: usize, goes_on: bool, wait: impl Fn(usize) -> Wait) -> (Vec<Arc<Task>>, Arc<AtomicUsize>) {
    let done = Arc::new(AtomicUsize::new(0));
    let task = |at| {
        let task = Arc::new(Task { wait: Mutex::default(), goes_on, done: done.clone() });
        let waker = Waker::from(task.clone());
        // All within one poll of the test's task.
        let mut wait: Wait = Box::pin(unconstrained(wait(at)));
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *task.wait.lock().unwrap() = Some(wait);
        task
    };
    ((0..count).map(task).collect(), done)
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn callers_of_a_limited_service_cancel_when_woken() {
    on_a_small_stack("extremes::wakes::callers_of_a_limited_service_cancel_when_woken", || {
        block_on(async {
            let gate = Gate::open();
            let mut flow = Flow::new("f");
            let echo = flow.add("echo", map(async |n: u32| Ok(n))).when(gate.clone());
            let service = flow.service("echoes", echo.input, echo.output).limit(1);
            let _running = flow.spawn().unwrap();
            assert_eq!(service.ask(7).await.unwrap(), 7);
            gate.pause();
            let ask = || {
                let service = service.clone();
                Box::pin(async move { _ = service.ask(1).await })
            };
            let mut first = ask();
            assert!(first.as_mut().now_or_never().is_none());
            let (tasks, done) = tasks(2_000, false, |_| ask());
            drop(first);
            assert_eq!(done.load(Ordering::SeqCst), tasks.len(), "each has cancelled, and so woken the next");
            gate.resume();
            assert_eq!(service.ask(7).await.unwrap(), 7);
        });
    });
}

#[test]
fn ingress_senders_cancel_when_woken() {
    on_a_small_stack("extremes::wakes::ingress_senders_cancel_when_woken", || {
        block_on(async {
            let gate = Gate::paused();
            let mut flow = Flow::new("f");
            let end = flow.add("end", sink(async |_: u32| Ok(()))).when(gate.clone());
            let ingress = flow.ingress("in", end.input);
            let running = flow.spawn().unwrap();
            while ingress.send(1).now_or_never().is_some_and(|sent| sent.is_ok()) {}
            ingress.send(1).await.unwrap();
            let (tasks, done) = tasks(2_000, false, |_| {
                let ingress = ingress.clone();
                Box::pin(async move { _ = ingress.send(1).await })
            });
            gate.resume();
            until("each has cancelled", || done.load(Ordering::SeqCst) == tasks.len()).await;
            ingress.send(1).await.unwrap();
            running.stop();
            running.await.unwrap();
        });
    });
}

/// Each ticket's task polls its own mark, which has been reached too, and so wakes the next.
#[test]
fn tasks_that_wait_for_a_stream_continue_when_woken() {
    on_a_small_stack("extremes::wakes::tasks_that_wait_for_a_stream_continue_when_woken", || {
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        stream.set_completion_mode(CompletionMode::Quiet);
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let (tasks, done) = tasks(10_000, true, |_| {
            stream.host_function(|| ()).unwrap();
            Box::pin(stream.completed().map(|done| done.unwrap()))
        });
        drop(go);
        block_on(async {
            until("all are done", || done.load(Ordering::SeqCst) == tasks.len()).await;
            stream.completed().await.unwrap();
        });
    });
}

/// In `LowLatency` each poll of a task requests the next one: a task that is polled within `wake` polls the next in
/// line.
#[test]
fn tasks_that_poll_a_stream_wake_each_other() {
    struct Next(Arc<Mutex<Vec<Completed>>>);
    impl Wake for Next {
        fn wake(self: Arc<Self>) {
            let next = self.0.lock().unwrap().pop();
            let Some(mut next) = next else { return };
            let waker = Waker::from(self);
            assert!(next.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        }
    }
    on_a_small_stack("extremes::wakes::tasks_that_poll_a_stream_wake_each_other", || {
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        stream.set_completion_mode(CompletionMode::LowLatency);
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let waits = Arc::new(Mutex::new((0..2_000).map(|_| stream.completed()).collect::<Vec<_>>()));
        Waker::from(Arc::new(Next(waits.clone()))).wake();
        assert!(waits.lock().unwrap().is_empty(), "each poll leads to the next");
        drop(go);
        block_on(stream.completed()).unwrap();
    });
}
