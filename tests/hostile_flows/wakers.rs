//! Wakers that panic, or call back when dropped.

use super::*;

struct Hostile;

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        panic!("a hostile waker");
    }
}

fn hostile() -> Waker {
    Waker::from(Arc::new(Hostile))
}

#[test]
fn a_waker_that_panics_at_an_egress_fails_no_flow() {
    alone("hostile_flows::wakers::a_waker_that_panics_at_an_egress_fails_no_flow", async {
        let (go, numbers) = tokio::sync::mpsc::unbounded_channel::<u32>();
        let numbers = Arc::new(tokio::sync::Mutex::new(numbers));
        let next = move || {
            let numbers = numbers.clone();
            async move { Ok(numbers.lock().await.recv().await) }
        };
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(next));
        let mut out = flow.egress("out", source.output);
        let running = flow.spawn().unwrap();
        assert!(Box::pin(out.recv()).as_mut().poll(&mut Context::from_waker(&hostile())).is_pending());
        (0..4).for_each(|number| go.send(number).unwrap());
        drop(go);
        assert_eq!(out.collect::<Vec<_>>().await, [0, 1, 2, 3]);
        running.await.unwrap();
    });
}

struct Keeps(Arc<Mutex<Vec<Reply>>>, tokio::sync::mpsc::UnboundedSender<()>);

impl Operator for Keeps {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(cx.take_replies());
        let _ = self.1.send(());
        Ok(())
    }
}

#[test]
fn callers_whose_wakers_panic_strand_no_other_caller() {
    alone("hostile_flows::wakers::callers_whose_wakers_panic_strand_no_other_caller", async {
        let (kept, (sender, mut receiver)) = (Arc::default(), tokio::sync::mpsc::unbounded_channel());
        let mut flow = Flow::new("f");
        let keeps = flow.add("keeps", Keeps(Arc::clone(&kept), sender));
        let ask = flow.service_with("ask", keeps.input, keeps.output, HubOptions::bounded(8));
        let running = flow.spawn().unwrap();
        let mut hostile_calls: Vec<_> = (0..3).map(|_| Box::pin(ask.ask(1))).collect();
        let noop = futures::task::noop_waker();
        let mut others: Vec<_> = Vec::new();
        for call in &mut hostile_calls {
            // A call first waits for the flow to run, so it is polled until its request has arrived.
            while receiver.try_recv().is_err() {
                assert!(call.as_mut().poll(&mut Context::from_waker(&hostile())).is_pending());
                tokio::task::yield_now().await;
            }
            let mut other = Box::pin(ask.ask(2));
            while receiver.try_recv().is_err() {
                assert!(other.as_mut().poll(&mut Context::from_waker(&noop)).is_pending());
                tokio::task::yield_now().await;
            }
            others.push(other);
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        for other in others {
            assert!(other.await.unwrap_err().is_cancelled());
        }
    });
}

#[test]
fn peeks_whose_wakers_panic_strand_no_other_peek() {
    alone("hostile_flows::wakers::peeks_whose_wakers_panic_strand_no_other_peek", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        let mut links: Vec<_> = (0..7).map(|_| hub.peek(&host()).unwrap()).collect();
        let mut waits: Vec<_> = links.iter_mut().map(|link| Box::pin(link.next())).collect();
        let woken = Arc::new(Counts(AtomicUsize::new(0)));
        for (at, wait) in waits.iter_mut().enumerate() {
            let waker = if at < 3 { hostile() } else { Waker::from(woken.clone()) };
            assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        put(&mut produce, 1).await;
        assert_eq!(woken.0.load(Ordering::SeqCst), 4);
    });
}

struct SendsWhenDropped(wakeline::Ingress<u32>, Arc<AtomicBool>);

impl Wake for SendsWhenDropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for SendsWhenDropped {
    fn drop(&mut self) {
        // The send of the last waker fails, since the flow has ended by then.
        self.1.fetch_or(self.0.try_send(3).is_ok(), Ordering::SeqCst);
    }
}

type Slot = Arc<Mutex<Option<wakeline::Ingress<u32>>>>;

struct OwnWakers(Slot, Arc<AtomicBool>);

impl Operator for OwnWakers {
    type Ports = SinkPorts<u32>;

    async fn run(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut ingress = self.0.lock().unwrap().take().unwrap();
        // The operator of the ingress may begin later than this one.
        std::future::poll_fn(|task| futures::SinkExt::poll_ready_unpin(&mut ingress, task)).await.unwrap();
        let mut receive = Box::pin(ports.input.recv());
        for _ in 0..8 {
            let waker = Waker::from(Arc::new(SendsWhenDropped(ingress.clone(), self.1.clone())));
            if receive.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                break;
            }
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_replaced_waker_may_send_into_the_hub_that_drops_it() {
    alone("hostile_flows::wakers::a_replaced_waker_may_send_into_the_hub_that_drops_it", async {
        let (slot, sent) = (Slot::default(), Arc::default());
        let mut flow = Flow::new("f");
        let own = flow.add("own", OwnWakers(slot.clone(), Arc::clone(&sent)));
        *slot.lock().unwrap() = Some(flow.ingress_with("in", own.input, HubOptions::bounded(64)));
        flow.run().await.unwrap();
        assert!(sent.load(Ordering::SeqCst));
    });
}

struct WakesAndPanics(Option<Waker>);

impl Wake for WakesAndPanics {
    fn wake(self: Arc<Self>) {
        self.0.iter().for_each(Waker::wake_by_ref);
        panic!("a waker");
    }
}

/// If tokio's worker called the waker, its panic would abort the process.
#[test]
fn a_waker_that_panics_is_not_given_to_tokio_when_the_budget_is_spent() {
    alone("hostile_flows::wakers::a_waker_that_panics_is_not_given_to_tokio_when_the_budget_is_spent", async {
        let polls = tokio::spawn(async {
            let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(2).build().unwrap();
            put(&mut hub.produce(&host()).unwrap(), 1).await;
            let mut peek = hub.peek(&host()).unwrap();
            let waker = Waker::from(Arc::new(WakesAndPanics(None)));
            // A peeked chunk stays in the hub, so only the budget makes a poll pending.
            (0..1_000).any(|_| std::pin::pin!(peek.next()).poll(&mut Context::from_waker(&waker)).is_pending())
        });
        assert!(polls.await.unwrap(), "the budget was not spent");
        tokio::task::yield_now().await;
    });
}

/// Waits for its runs with its own combinator, whose wakers panic.
struct PanickingWakers(u32);

impl Operator for PanickingWakers {
    type Ports = ();

    async fn run(&mut self, ports: &mut (), cx: &mut Cx) -> Result<()> {
        while self.0 > 0 {
            let mut ready = std::pin::pin!(cx.ready(ports));
            let begins = std::future::poll_fn(|task| {
                let waker = Waker::from(Arc::new(WakesAndPanics(Some(task.waker().clone()))));
                ready.as_mut().poll(&mut Context::from_waker(&waker))
            });
            if !begins.await {
                break;
            }
            self.0 -= 1;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_waker_that_panics_is_not_given_to_tokios_timers() {
    alone("hostile_flows::wakers::a_waker_that_panics_is_not_given_to_tokios_timers", async {
        let mut flow = Flow::new("f");
        let _ = flow.add("ticks", PanickingWakers(20)).when(every(std::time::Duration::from_millis(1)));
        let _ = flow.add("spends", PanickingWakers(1_000));
        flow.run().await.unwrap();
    });
}
