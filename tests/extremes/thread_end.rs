//! A thread that ends while its thread-locals own wakeline's values.

use super::*;

/// Runs a function when its thread ends, after the destructors of all thread-locals that are first used after it.
struct AtEnd(RefCell<Option<Box<dyn FnOnce()>>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(last) = self.0.take() {
            last();
        }
    }
}

thread_local! {
    static AT_END: AtEnd = const { AtEnd(RefCell::new(None)) };
}

/// Runs `work` on a thread. The closure that it returns runs in the destructor of a thread-local, after those of
/// wakeline's and of tokio's thread-locals.
fn as_a_thread_ends(work: impl FnOnce() -> Box<dyn FnOnce()> + Send + 'static) {
    std::thread::spawn(|| {
        AT_END.with(|_| ());
        let last = work();
        AT_END.with(|end| *end.0.borrow_mut() = Some(last));
    })
    .join()
    .unwrap();
}

on_both!(a_buffer_in_flight_is_dropped_with_its_threads_locals, async |device: Device| {
    let [a, b]: [Stream; 2] = streams(&device);
    let held = hold(&a);
    let (own, other) = (a.clone(), b.clone());
    let thread = move || {
        as_a_thread_ends(move || {
            let from = Buffer::<u32>::pinned(own.device(), 64).unwrap();
            let mut to = Buffer::<u32>::new(own.device(), 64).unwrap();
            own.copy(&from, &mut to).unwrap();
            // Creates wakeline's thread-locals, so that they are destroyed before the buffers.
            other.scope(|| assert_eq!(Stream::current(), Some(other.clone())));
            futures::executor::block_on(Simulation::new(1).run(ready(())));
            Box::new(move || drop((from, to)))
        });
    };
    tokio::task::spawn_blocking(thread).await.unwrap();
    drop(held);
    a.completed().await.unwrap();
    freed(&device).await;
});

on_both!(wakeline_works_in_a_threads_last_destructors, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let thread = move || {
        as_a_thread_ends(move || {
            // Creates the thread-locals first.
            everything(&stream);
            Box::new(move || everything(&stream))
        });
    };
    tokio::task::spawn_blocking(thread).await.unwrap();
});

fn everything(stream: &Stream) {
    let device = stream.device();
    let mut data = Buffer::from_slice(stream, &[1_u32; 64]).unwrap();
    stream.scope(|| {
        assert_eq!(Stream::current().as_ref(), Some(stream));
        let (graph, ()) = Graph::capture(device, |capture| {
            assert!(Graph::capture(device, |inner| inner.stream().fill(&mut data, 2)).is_ok());
            capture.stream().fill(&mut data, 3)
        })
        .unwrap();
        graph.instantiate().unwrap().launch(stream).unwrap();
    });
    assert_eq!(Stream::current(), None);
    let mut scoped = Box::pin(stream.scoped(async { Stream::current() }));
    let polled = scoped.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert_eq!(polled, std::task::Poll::Ready(Some(stream.clone())));
    drop(Stream::new(device).unwrap());
    data.state().unwrap();
    drop(data);
    #[cfg(feature = "config")]
    {
        let config = wakeline::Config::new().set("a.b", 1).unwrap();
        assert!(format!("{config:?}").contains("Config"));
    }
}

/// The stream of a scoped future is the current one while the future is polled or dropped, and at no other time.
#[tokio::test]
async fn a_scoped_future_is_dropped_in_its_scope() {
    struct Looks(mpsc::Sender<Option<Stream>>);
    impl Drop for Looks {
        fn drop(&mut self) {
            self.0.send(Stream::current()).unwrap();
        }
    }
    let device = emulated();
    let [a, b]: [Stream; 2] = streams(&device);
    let (sender, receiver) = mpsc::channel();
    let looks = Looks(sender.clone());
    let mut pending = Box::pin(a.scoped(async move {
        let _looks = looks;
        std::future::pending::<()>().await;
    }));
    assert!(futures::poll!(pending.as_mut()).is_pending());
    assert_eq!(Stream::current(), None);
    b.scope(|| {
        drop(pending);
        assert_eq!(Stream::current(), Some(b.clone()));
    });
    assert_eq!(receiver.try_recv().unwrap(), Some(a.clone()));
    let looks = Looks(sender);
    a.scoped(async move { drop(looks) }).await;
    assert_eq!(receiver.try_recv().unwrap(), Some(a.clone()));
    // A panic restores the current stream.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| a.scope(|| panic!("within a scope"))));
    assert!(outcome.is_err());
    assert_eq!(Stream::current(), None);
}

#[derive(Ports)]
struct BatchPorts {
    #[input(batch = 1, within = "1h")]
    messages: Input<Envelope<u32>>,
}

/// Measures how long messages wait, and sends the messages that it takes.
struct HandsOut(mpsc::Sender<Envelope<u32>>);

impl Operator for HandsOut {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, _cx: &mut Cx) -> Result<()> {
        ports.messages.take_batch()?.for_each(|envelope| self.0.send(envelope).unwrap());
        Ok(())
    }
}

/// Once a runtime's clock was paused, tokio looks up the clock of the thread's runtime for every time query.
fn pause_a_clock() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {});
}

#[tokio::test]
async fn messages_are_sent_and_moved_where_tokio_has_no_clock() {
    std::thread::spawn(pause_a_clock).join().unwrap();
    let (hand_out, handed_out) = mpsc::channel();
    let mut flow = Flow::new("flow");
    let reader = flow.add("reader", HandsOut(hand_out)).on(&Device::emulated(Emulated::new()));
    // One envelope on the reader's device: the next message is copied when it returns.
    let hub = HubOptions::bounded(4).envelopes(1).envelope_bytes(4);
    let ingress = flow.ingress_with("ingress", reader.messages, hub);
    let running = flow.spawn().unwrap();
    let message = || Envelope::from(Buffer::<u32>::pinned(&Device::host(), 1).unwrap());
    within(ingress.send(message())).await.unwrap();
    let next = async || {
        let mut next = None;
        until("a message is handed out", || {
            next = handed_out.try_recv().ok();
            next.is_some()
        })
        .await;
        next.unwrap()
    };
    let (first, second) = (next().await, message());
    as_a_thread_ends(move || {
        // Creates the thread-locals first.
        let _ = tokio::runtime::Handle::try_current();
        Box::new(move || {
            let error = tokio::runtime::Handle::try_current().unwrap_err();
            assert!(error.is_thread_local_destroyed());
            ingress.try_send(second).unwrap();
            drop(first);
        })
    });
    next().await;
    within(running).await.unwrap();
}

/// Where tokio's thread-locals are destroyed, a call that must wait on tokio's primitives is an error, and one that
/// need not wait succeeds.
#[test]
fn sends_into_a_flow_work_or_fail_in_a_threads_last_destructors() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for runs in [false, true] {
        let mut flow = Flow::new("f");
        let echo = flow.add("echo", map(async |number: u32| Ok(number)));
        let service = flow.service("echoes", echo.input, echo.output);
        let print = flow.add("print", sink(async |_: u32| Ok(())));
        let ingress = flow.ingress("numbers", print.input);
        let (flow, running) = match runs {
            true => {
                let _here = runtime.enter();
                (None, Some(flow.spawn().unwrap()))
            }
            false => (Some(flow), None),
        };
        if runs {
            // The flow accepts messages from here on.
            runtime.block_on(async {
                ingress.send(1).await.unwrap();
                service.ask(1).await.unwrap();
            });
        }
        as_a_thread_ends(move || {
            // Creates tokio's thread-locals first.
            assert!(tokio::runtime::Handle::try_current().is_err());
            Box::new(move || {
                let sent = ingress.send(2).now_or_never();
                let asked = service.ask(2).now_or_never();
                if runs {
                    assert!(sent.is_none_or(|sent| sent.is_ok()) && asked.is_none_or(|asked| asked.is_ok()));
                } else {
                    assert_eq!(sent.unwrap().unwrap_err().error().kind(), ErrorKind::Usage);
                    assert_eq!(asked.unwrap().unwrap_err().kind(), ErrorKind::Usage);
                }
            })
        });
        drop((flow, running));
    }
}
