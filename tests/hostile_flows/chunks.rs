//! Chunk hubs and the structures of their chunks.

use super::*;

/// A chunk's structure whose destructor panics.
#[derive(Clone)]
struct Shape(#[allow(dead_code, reason = "dropped")] Arc<Bomb>);

#[test]
fn structures_whose_destructors_panic_are_dropped_with_their_hub() {
    alone("hostile_flows::chunks::structures_whose_destructors_panic_are_dropped_with_their_hub", async {
        let hub = ChunkHub::<u32, Shape>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        for number in 0..2 {
            let mut blank = produce.next().await.unwrap().unwrap();
            blank.set_structure(Shape(Arc::new(Bomb)));
            blank.fill_from(&[number]).await.unwrap();
            blank.commit().unwrap();
        }
        drop((produce, hub));
    });
}

/// A hub with one chunk, whose structure panics when dropped.
async fn with_a_bomb() -> ChunkHub<u32, Shape> {
    let hub = ChunkHub::<u32, Shape>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let mut blank = produce.next().await.unwrap().unwrap();
    // The second structure replaces the first.
    blank.set_structure(Shape(Arc::new(Bomb)));
    blank.set_structure(Shape(Arc::new(Bomb)));
    blank.fill_from(&[1]).await.unwrap();
    blank.commit().unwrap();
    hub
}

#[test]
fn structures_whose_destructors_panic_are_dropped_by_links() {
    alone("hostile_flows::chunks::structures_whose_destructors_panic_are_dropped_by_links", async {
        let hub = with_a_bomb().await;
        hub.consume(&host()).unwrap().next().await.unwrap().unwrap().commit().unwrap();
        let hub = with_a_bomb().await;
        let mut modify = hub.modify(&host()).unwrap();
        let mut chunk = modify.next().await.unwrap().unwrap();
        // The hub drops the structure that this replaces.
        chunk.set_structure(Shape(Arc::new(Bomb)));
        chunk.commit().unwrap();
        drop((modify, hub));
        // A task that panics while it holds the last chunk of a dropped hub.
        let hub = with_a_bomb().await;
        let chunk = hub.peek(&host()).unwrap().next().await.unwrap().unwrap();
        drop(hub);
        let task = tokio::spawn(async move {
            let _held = chunk;
            panic!("a task panics");
        });
        assert!(task.await.unwrap_err().is_panic());
    });
}

/// A cause that runs a closure when dropped.
struct ActsWhenDropped(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for ActsWhenDropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ActsWhenDropped")
    }
}

impl std::fmt::Display for ActsWhenDropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a cause")
    }
}

impl std::error::Error for ActsWhenDropped {}

impl Drop for ActsWhenDropped {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The wake is not deferred: the destructor may wait for the task that is woken.
#[test]
fn an_envelope_returned_in_a_deep_destructor_wakes_at_once() {
    alone("hostile_flows::chunks::an_envelope_returned_in_a_deep_destructor_wakes_at_once", async {
        for depth in [1, 7, 8, 9, 100] {
            let hub = ChunkHub::<u32>::builder("h").elements(1).queue(2).host_envelopes(1).build().unwrap();
            let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
            put(&mut produce, 1).await;
            let envelope = consume.next().await.unwrap().unwrap().into_envelope().unwrap();
            let (wakes, woken) = (Arc::new(Counts(AtomicUsize::new(0))), Arc::new(AtomicUsize::new(0)));
            let waker = Waker::from(wakes.clone());
            let mut blank = Box::pin(produce.next());
            assert!(blank.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            let (envelope, observed) = (Mutex::new(Some(envelope)), woken.clone());
            let last = ActsWhenDropped(Box::new(move || {
                drop(envelope.lock().unwrap().take());
                observed.store(wakes.0.load(Ordering::SeqCst), Ordering::SeqCst);
            }));
            let again = |error: Error, _| Error::new(ErrorKind::Operator, "again").because(error);
            drop((0..depth).fold(Error::other(last), again));
            assert!(woken.load(Ordering::SeqCst) > 0, "{depth} deep");
        }
    });
}

/// While a reader holds a chunk, the next chunk is copied ahead for it. That copy does not take the envelope that a producer waits for.
#[test]
fn a_producer_gets_the_envelope_of_a_chunk_that_is_copied_ahead() {
    alone("hostile_flows::chunks::a_producer_gets_the_envelope_of_a_chunk_that_is_copied_ahead", async {
        let device = Device::emulated(Emulated::new());
        let builder = ChunkHub::<u32>::builder("h").elements(1).queue(3);
        let hub = builder.envelopes(&device, 2).host_envelopes(2).build().unwrap();
        let mut peek = hub.peek(&host()).unwrap();
        let mut produce = hub.produce(&device).unwrap();
        for _ in 0..2 {
            let mut blank = produce.next().await.unwrap().unwrap();
            blank.set_len(1).unwrap();
            blank.commit().unwrap();
        }
        // Meanwhile the second chunk is copied ahead, to the last envelope on the host.
        let held = peek.next().await.unwrap().unwrap();
        assert_eq!(held.number(), 1);
        let mut on_host = hub.produce(&host()).unwrap();
        let blank = on_host.next().await.unwrap().unwrap();
        drop((held, blank));
        assert_eq!(peek.next().await.unwrap().unwrap().number(), 2);
    });
}
