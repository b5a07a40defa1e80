//! Edge cases of hubs of chunks: links that are dropped, chunks that are given back, devices that are lost.

use std::time::Duration;

use common::{
    chunks::{Drain, Fill, FillPorts, See},
    *,
};
use futures::FutureExt;
use tokio::sync::{Mutex, Notify};
use wakeline::{
    Stream,
    device::Faults,
    hub::{Destination, Producer},
    operator::{Consume, Modify},
    prelude::*,
};

fn host() -> Device {
    Device::host()
}

async fn put(produce: &mut Producer<u32>, data: &[u32]) {
    produce.with(async |blank| blank.fill_from(data).await).await.unwrap().unwrap();
}

fn of_host(queue: usize, envelopes: usize) -> ChunkHub<u32> {
    ChunkHub::builder("numbers").elements(1).queue(queue).host_envelopes(envelopes).build().unwrap()
}

#[derive(Ports)]
struct TotalPorts {
    #[consume]
    numbers: Consume<u32>,
    #[modify]
    total: Modify<u32>,
}

struct Add;

impl Operator for Add {
    type Ports = TotalPorts;

    async fn compute(&mut self, ports: &mut TotalPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.numbers.get()?.read().await?[0];
        ports.total.get_mut()?.write().await?[0] += number;
        Ok(())
    }
}

/// Two operators add what they consume to one chunk that both modify, so that a claim sometimes fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_cannot_claim_all_gives_back_its_claims() {
    const COUNT: u32 = 3000;
    let total = of_host(1, 1);
    let mut first = total.produce(&host()).unwrap();
    first.with(async |blank| blank.fill_from(&[0]).await).await.unwrap();
    let hubs = [of_host(4, 4), of_host(4, 4)];
    let mut flow = Flow::new("totals");
    for (at, hub) in hubs.iter().enumerate() {
        let fill = flow.add(format!("fill {at}"), Fill::each(std::iter::repeat_n(1, COUNT as usize)));
        let add = flow.add(format!("add {at}"), Add);
        flow.link(fill.numbers, hub);
        flow.link(add.numbers, hub);
        flow.link(add.total, &total);
    }
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.hubs[0].passed, u64::from(COUNT), "{report}");
    drop(first);
    let chunk = total.peek(&host()).unwrap().next().await.unwrap().unwrap();
    assert_eq!(chunk.as_slice().unwrap()[0], 2 * COUNT);
}

/// The producer waits for a slot in the queue in one case and for an envelope in the other.
#[tokio::test]
async fn when_all_readers_have_ended_so_do_producers() {
    for queue in [1, 4] {
        let hub = of_host(queue, 1);
        let mut flow = Flow::new("ends");
        let fill = flow.add("fill", Fill::each(0..3));
        let see = flow.add("see", See(1, shared()));
        flow.link(fill.numbers, &hub);
        flow.link(see.numbers, &hub);
        assert_eq!(within(flow.run()).await.unwrap().operator("fill").unwrap().runs, 1);
    }
}

#[tokio::test]
async fn h8_a_chunk_that_was_swapped_with_a_blank_is_not_lost() {
    let hub = ChunkHub::<u32, char>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&host()).unwrap());
    let mut blank = produce.next().await.unwrap().unwrap();
    blank.set_structure('a');
    blank.fill_from(&[1]).await.unwrap();
    blank.commit().unwrap();
    let mut chunk = modify.next().await.unwrap().unwrap();
    let mut blank = produce.next().await.unwrap().unwrap();
    blank.fill_from(&[2]).await.unwrap();
    chunk.swap(&mut blank).unwrap();
    assert!(chunk.structure().is_none());
    let error = chunk.commit().unwrap_err();
    assert!(error.to_string().contains("call `set_structure` before the commit"), "{error}");
    drop(blank);
    let again = within(modify.next()).await.unwrap().unwrap();
    assert_eq!((again.number(), again.structure()), (1, Some(&'a')));
}

#[tokio::test]
async fn h10_a_link_that_fails_takes_no_other_links_wake() {
    let (near, far) = (emulated(), emulated());
    let hub = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(2).envelopes(&near, 1).build().unwrap();
    let (mut on_host, mut on_near) = (hub.produce(&host()).unwrap(), hub.produce(&near).unwrap());
    let mut modify = hub.modify(&host()).unwrap();
    let (mut consume, mut lost) = (hub.consume(&near).unwrap(), hub.consume(&far).unwrap());
    on_host.with(async |blank| blank.fill_from(&[1]).await).await.unwrap();
    let chunk = modify.next().await.unwrap().unwrap();
    let waits = tokio::spawn(async move { on_near.next().await.unwrap().unwrap().number() });
    tokio::task::yield_now().await;
    assert!(!waits.is_finished(), "the older chunk needs the envelope");
    assert_eq!(lost.next().await.unwrap_err().kind(), ErrorKind::Setup);
    drop(lost);
    chunk.commit().unwrap();
    consume.next().await.unwrap().unwrap().commit().unwrap();
    within(waits).await.unwrap();
}

#[tokio::test]
async fn f4_a_dropped_link_with_a_chunk_is_not_waited_for() {
    let device = emulated();
    let hub =
        ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(4).envelopes(&device, 2).build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&device).unwrap());
    let peek = hub.peek(&host()).unwrap();
    for number in [1, 2] {
        produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap();
    }
    let seen = { peek }.next().await.unwrap().unwrap();
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    let second = within(consume.next()).await.unwrap().unwrap();
    assert_eq!(second.number(), 2);
    drop(seen);
}

/// Queries its hub when it is dropped.
#[derive(Clone)]
struct Probe(Option<ChunkHub<u32, Probe>>);

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(hub) = &self.0 {
            let _ = hub.len();
        }
    }
}

#[test]
fn a_structure_may_use_its_hub_while_it_is_dropped() {
    let (finished, is_finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        futures::executor::block_on(async {
            let hub = ChunkHub::<u32, Probe>::builder("h").elements(1).host_envelopes(1).build().unwrap();
            let mut produce = hub.produce(&host()).unwrap();
            let mut modify = hub.modify(&host()).unwrap();
            let mut consume = hub.consume(&host()).unwrap();
            let mut blank = produce.next().await.unwrap().unwrap();
            blank.set_structure(Probe(Some(hub.clone())));
            blank.commit().unwrap();
            let mut chunk = modify.next().await.unwrap().unwrap();
            chunk.set_structure(Probe(Some(hub.clone())));
            chunk.commit().unwrap();
            consume.next().await.unwrap().unwrap().commit().unwrap();
        });
        finished.send(()).unwrap();
    });
    is_finished.recv_timeout(Duration::from_secs(5)).expect("a destructor deadlocked");
}

/// The link waits for its first chunk.
#[tokio::test]
async fn f1_a_waiting_link_on_a_lost_device_fails() {
    let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)));
    let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).envelopes(&device, 1).build().unwrap();
    let _produces = hub.produce(&host()).unwrap();
    let mut peek = hub.peek(&device).unwrap();
    let waits = tokio::spawn(async move { peek.next().await.map(drop) });
    tokio::task::yield_now().await;
    assert!(!waits.is_finished());
    let stream = Stream::new(&device).unwrap();
    let mut data = Buffer::<u32>::new(&device, 1).unwrap();
    stream.fill(&mut data, 0).unwrap();
    increment::launch(&stream, &mut data).unwrap();
    assert!(stream.completed().await.unwrap_err().is_device_lost());
    assert!(within(waits).await.unwrap().unwrap_err().is_device_lost());
}

/// A device that is lost in the first launch of `increment`.
fn doomed() -> Device {
    emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)))
}

async fn lose(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut data = stream.alloc::<u32>(1).unwrap();
    increment::launch(&stream, &mut data).unwrap();
    assert!(stream.completed().await.unwrap_err().is_device_lost());
}

/// An idle link on a lost device does not block other links, whether the chunk was produced before the loss or after
/// it.
#[tokio::test]
async fn f1_a_lost_device_leaves_the_hub_to_the_others() {
    for before in [true, false] {
        let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
        let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).pinned_for(&healthy);
        let hub = builder.envelopes(&lost, 2).envelopes(&healthy, 2).host_envelopes(2).build().unwrap();
        let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
        let mut sees = hub.peek(&lost).unwrap();
        if before {
            put(&mut produce, &[1]).await;
        }
        lose(&lost).await;
        if !before {
            put(&mut produce, &[1]).await;
        }
        for number in 2..5 {
            let chunk = within(consume.next()).await.unwrap().unwrap();
            assert_eq!(chunk.read().await.unwrap(), [number - 1]);
            chunk.commit().unwrap();
            put(&mut produce, &[number]).await;
        }
        assert!(within(sees.next()).await.unwrap_err().is_device_lost());
        let mut new = hub.peek(&healthy).unwrap();
        assert_eq!(within(new.next()).await.unwrap().unwrap().number(), 4);
        let mut late = hub.peek(&lost).unwrap();
        assert!(within(late.next()).await.unwrap_err().is_device_lost());
        drop(within(consume.next()).await.unwrap().unwrap());
    }
}

static BLOCKED: Mutex<()> = Mutex::const_new(());
static IS_BLOCKED: Notify = Notify::const_new();

/// Blocks while the test holds the lock.
#[kernel]
fn copy_when_unblocked(from: &[u32], to: &mut [u32]) {
    IS_BLOCKED.notify_one();
    drop(BLOCKED.blocking_lock());
    to.copy_from_slice(from);
}

/// A device is lost before it has read an envelope that is copied to it: the envelope's memory is replaced before the
/// envelope is used again, since the device might still read it.
#[tokio::test]
async fn f1_an_envelope_that_a_lost_device_was_to_read_is_used_again() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).pinned_for(&healthy);
    let hub = builder.envelopes(&lost, 1).host_envelopes(2).build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    let mut sees = hub.peek(&lost).unwrap();
    put(&mut produce, &[1]).await;
    // The envelope on the device stays in use, so the copy of the next chunk to it does not begin.
    let seen = within(sees.next()).await.unwrap().unwrap();
    let mut target = Buffer::<u32>::new(&lost, 1).unwrap();
    let blocked = BLOCKED.lock().await;
    copy_when_unblocked::launch(&Stream::new(&lost).unwrap(), &*seen, &mut target).unwrap();
    IS_BLOCKED.notified().await;
    drop(seen);
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    put(&mut produce, &[2]).await;
    lose(&lost).await;
    for number in 2..6 {
        let chunk = within(consume.next()).await.unwrap().unwrap();
        assert_eq!(chunk.read().await.unwrap(), [number]);
        chunk.commit().unwrap();
        put(&mut produce, &[number + 1]).await;
    }
    assert!(within(sees.next()).await.unwrap_err().is_device_lost());
    drop(blocked);
}

/// When the host's only envelope holds a later chunk, another one is allocated, near a healthy device.
#[tokio::test]
async fn f1_a_lost_device_does_not_prevent_a_further_host_envelope() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).envelopes(&lost, 1);
    let hub = builder.envelopes(&healthy, 1).host_envelopes(1).build().unwrap();
    lose(&lost).await;
    let (mut first, mut second) = (hub.produce(&healthy).unwrap(), hub.produce(&host()).unwrap());
    let mut chunk = within(first.next()).await.unwrap().unwrap();
    chunk.set_len(1).unwrap();
    Stream::new(&healthy).unwrap().fill(&mut chunk, 1).unwrap();
    chunk.commit().unwrap();
    put(&mut second, &[2]).await;
    let mut consume = hub.consume(&host()).unwrap();
    for number in [1, 2] {
        let chunk = within(consume.next()).await.unwrap().unwrap();
        assert_eq!(chunk.read().await.unwrap(), [number]);
        chunk.commit().unwrap();
    }
    hub.add_envelopes(&host(), 1).unwrap();
}

/// When `flow_to` names a consumer on a lost device, the chunk waits for the next consumer, and links that peek see it
/// once.
#[tokio::test]
async fn f1_a_lost_only_consumer_shows_no_chunk_twice() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).pinned_for(&healthy);
    let hub = builder.envelopes(&lost, 2).host_envelopes(2).build().unwrap();
    let (mut produce, mut peek) = (hub.produce(&host()).unwrap(), hub.peek(&host()).unwrap());
    let consume = hub.consume(&lost).unwrap();
    hub.flow_to(&[&consume, &peek]).unwrap();
    put(&mut produce, &[1]).await;
    lose(&lost).await;
    assert_eq!(within(peek.next()).await.unwrap().unwrap().number(), 1);
    drop(produce);
    assert!(within(peek.next()).await.unwrap().is_none(), "the link has seen every chunk");
}

/// When a lost device's stream was to write a chunk of another place, only that chunk is lost.
#[tokio::test]
async fn f1_a_chunk_that_a_lost_stream_was_to_fill_is_lost_alone() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let hub =
        ChunkHub::<u32>::builder("h").elements(1).queue(2).envelopes(&healthy, 2).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&healthy).unwrap();
    let [theirs, ours] = [&lost, &healthy].map(|device| Stream::new(device).unwrap());
    let from = Buffer::from_slice(&theirs, &[7_u32]).unwrap();
    let held = hold(&theirs);
    produce.with(async |blank| blank.set_len(1).and_then(|()| theirs.copy(&from, blank))).await.unwrap();
    produce.with(async |blank| blank.set_len(1).and_then(|()| ours.fill(blank, 2))).await.unwrap();
    lose(&lost).await;
    let (mut peek, mut consume) = (hub.peek(&host()).unwrap(), hub.consume(&host()).unwrap());
    for error in [within(peek.next()).await.unwrap_err(), within(consume.next()).await.unwrap_err()] {
        assert!(error.is_device_lost() && error.to_string().contains("the only copy of chunk 1 is lost"), "{error}");
    }
    assert_eq!(within(peek.next()).await.unwrap().unwrap().read().await.unwrap(), [2]);
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    assert!(hub.is_empty());
    drop((held, peek));
    produce.with(async |blank| blank.set_len(1).and_then(|()| ours.fill(blank, 3))).await.unwrap();
    assert_eq!(within(consume.next()).await.unwrap().unwrap().read().await.unwrap(), [3]);
}

/// A chunk whose only copy was on the lost device is an error for each link that reaches it. Later chunks are
/// unaffected.
#[tokio::test]
async fn f1_a_chunk_only_on_a_lost_device_is_an_error_for_its_readers() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).pinned_for(&healthy);
    let hub = builder.envelopes(&lost, 2).host_envelopes(2).build().unwrap();
    let (mut on_lost, mut produce) = (hub.produce(&lost).unwrap(), hub.produce(&host()).unwrap());
    let stream = Stream::new(&lost).unwrap();
    on_lost.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 1))).await.unwrap();
    put(&mut produce, &[2]).await;
    lose(&lost).await;
    let (mut peek, mut consume) = (hub.peek(&host()).unwrap(), hub.consume(&host()).unwrap());
    for error in [within(peek.next()).await.unwrap_err(), within(consume.next()).await.unwrap_err()] {
        assert!(error.is_device_lost() && error.to_string().contains("the only copy of chunk 1 is lost"), "{error}");
    }
    assert_eq!(within(peek.next()).await.unwrap().unwrap().read().await.unwrap(), [2]);
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    assert!(hub.is_empty());
}

/// A device is lost during a copy to the host, when a link already holds the copy. Once the loss is known, the chunk is
/// lost: each link that reaches it gets one error, and later chunks are unaffected.
#[tokio::test]
async fn f1_a_copy_that_fails_after_it_has_arrived_is_lost() {
    for modifies in [false, true] {
        let device = doomed();
        let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2);
        let hub = builder.envelopes(&device, 2).host_envelopes(2).build().unwrap();
        let (mut on_device, mut produce) = (hub.produce(&device).unwrap(), hub.produce(&host()).unwrap());
        let mut modify = modifies.then(|| hub.modify(&host()).unwrap());
        let mut consume = hub.consume(&host()).unwrap();
        let stream = Stream::new(&device).unwrap();
        let held = hold(&stream);
        on_device.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 1))).await.unwrap();
        put(&mut produce, &[2]).await;
        let noticed = match &mut modify {
            Some(modify) => {
                let mut chunk = within(modify.next()).await.unwrap().unwrap();
                lose(&device).await;
                chunk.write().await.map(|_| ()).unwrap_err()
            }
            None => {
                let chunk = within(consume.next()).await.unwrap().unwrap();
                lose(&device).await;
                chunk.read().await.map(|_| ()).unwrap_err()
            }
        };
        assert!(noticed.is_device_lost(), "{noticed}");
        drop(held);
        let is_lost = |error: Error| {
            let text = error.to_string();
            assert!(text.contains("the only copy of chunk 1 is lost") && text.contains("increment"), "{text}");
        };
        if let Some(modify) = &mut modify {
            is_lost(within(modify.next()).await.map(|_| ()).unwrap_err());
            within(modify.with(async |chunk| chunk.fill_from(&[3]).await)).await.unwrap().unwrap();
        }
        is_lost(within(consume.next()).await.map(|_| ()).unwrap_err());
        let chunk = within(consume.next()).await.unwrap().unwrap();
        assert_eq!(chunk.read().await.unwrap(), [if modifies { 3 } else { 2 }]);
        chunk.commit().unwrap();
        assert!(hub.is_empty());
    }
}

/// The same with a valid copy at a third place: the chunk is copied again from there.
#[tokio::test]
async fn f1_a_copy_that_fails_is_repeated_from_a_valid_one() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(1)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).pinned_for(&healthy);
    let hub = builder.envelopes(&lost, 1).envelopes(&healthy, 1).host_envelopes(1).build().unwrap();
    let mut produce = hub.produce(&lost).unwrap();
    let [theirs, ours] = [&lost, &healthy].map(|device| Stream::new(device).unwrap());
    produce.with(async |blank| blank.set_len(1).and_then(|()| theirs.fill(blank, 7))).await.unwrap();
    let (mut on_host, mut peek) = (hub.peek(&host()).unwrap(), hub.peek(&healthy).unwrap());
    assert_eq!(within(on_host.next()).await.unwrap().unwrap().read().await.unwrap(), [7]);
    let held = hold(&ours);
    // The data come from the device that is lost next, and have not arrived yet.
    drop(within(peek.next()).await.unwrap().unwrap());
    lose(&lost).await;
    drop(held);
    let chunk = within(peek.next()).await.unwrap().unwrap();
    let mut seen = Buffer::<u32>::pinned(&healthy, 1).unwrap();
    ours.copy(&chunk, &mut seen).unwrap();
    assert_eq!(within(seen.read()).await.unwrap(), [7]);
}

/// A device that is no place of the hub is lost while it writes a chunk on another device. The chunk's data are lost,
/// but no place is.
#[tokio::test]
async fn f1_a_chunk_that_a_lost_device_was_writing_is_an_error_for_its_readers() {
    let (lost, healthy) = (doomed(), emulated_with(Emulated::new().workers(4)));
    let hub =
        ChunkHub::<u32>::builder("h").elements(1).queue(2).envelopes(&healthy, 2).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&healthy).unwrap();
    let [theirs, ours] = [&lost, &healthy].map(|device| Stream::new(device).unwrap());
    let from = Buffer::from_slice(&theirs, &[7_u32]).unwrap();
    let held = hold(&theirs);
    ours.wait_for(&theirs).unwrap();
    produce.with(async |blank| blank.set_len(1).and_then(|()| ours.copy(&from, blank))).await.unwrap();
    let mut second = within(produce.next()).await.unwrap().unwrap();
    lose(&lost).await;
    drop(held);
    second.set_len(1).unwrap();
    ours.fill(&mut second, 2).unwrap();
    second.commit().unwrap();
    let (mut peek, mut consume) = (hub.peek(&host()).unwrap(), hub.consume(&host()).unwrap());
    for error in [within(peek.next()).await.unwrap_err(), within(consume.next()).await.unwrap_err()] {
        assert!(error.is_device_lost() && error.to_string().contains("the only copy of chunk 1 is lost"), "{error}");
    }
    assert_eq!(within(peek.next()).await.unwrap().unwrap().read().await.unwrap(), [2]);
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    assert!(hub.is_empty());
}

#[tokio::test]
async fn a_producer_ends_when_no_link_reads_and_no_envelope_returns() {
    let hub = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    drop(hub.peek(&host()).unwrap());
    put(&mut produce, &[1]).await;
    put(&mut produce, &[2]).await;
    assert!(within(produce.next()).await.unwrap().is_none());
}

/// Elements of an envelope of [`crossed`].
const LARGE: usize = 1024;

/// A hub with a chunk of 7 at one place and then a chunk of 8 at the other, without links. Each place has one envelope.
async fn crossed(device: &Device, first_on_host: bool) -> ChunkHub<u32> {
    let hub =
        ChunkHub::builder("late").elements(LARGE).queue(3).host_envelopes(1).envelopes(device, 1).build().unwrap();
    let stream = Stream::new(device).unwrap();
    for (on_host, n) in [(first_on_host, 7), (!first_on_host, 8)] {
        let place = if on_host { host() } else { device.clone() };
        let mut produce = hub.produce(&place).unwrap();
        if on_host {
            put(&mut produce, &[n]).await;
            continue;
        }
        let mut blank = within(produce.next()).await.unwrap().unwrap();
        blank.set_len(1).unwrap();
        stream.fill(&mut blank, n).unwrap();
        blank.commit().unwrap();
    }
    hub
}

/// Each of the chunks needs the envelope that the other one holds.
#[tokio::test]
async fn h14_a_link_that_is_created_after_the_chunks_receives_them() {
    let device = emulated();
    let stream = Stream::new(&device).unwrap();
    for on_host in [true, false] {
        let hub = crossed(&device, !on_host).await;
        let place = if on_host { host() } else { device.clone() };
        let (mut consume, mut seen) = (hub.consume(&place).unwrap(), vec![]);
        while let Some(chunk) = within(consume.next()).await.unwrap() {
            let mut data = Buffer::<u32>::pinned(&device, 1).unwrap();
            stream.copy(&chunk, &mut data).unwrap();
            seen.push(data.read().await.unwrap()[0]);
            chunk.commit().unwrap();
        }
        assert_eq!(seen, [7, 8]);
        assert_eq!((hub.envelopes(&place), hub.envelopes(&host()) + hub.envelopes(&device)), (2, 3));
    }
    // Chunks that stay, through which the link cycles.
    let hub = crossed(&device, false).await;
    let mut peek = hub.peek(&host()).unwrap();
    for n in [7, 8, 7, 8] {
        assert_eq!(within(peek.next()).await.unwrap().unwrap().read().await.unwrap(), [n]);
    }
    drop((peek, hub, stream));
    freed(&device).await;
}

/// The further envelope is allocated for a link that waits, even if another link was woken for it and is dropped.
#[tokio::test]
async fn h14_a_dropped_wait_leaves_the_chunk_to_the_other_links() {
    let device = emulated();
    let hub = crossed(&device, false).await;
    let mut peek = hub.peek(&device).unwrap();
    let held = within(peek.next()).await.unwrap().unwrap();
    let (mut first, mut second) = (hub.consume(&host()).unwrap(), hub.consume(&host()).unwrap());
    let (mut one, mut other) = (Box::pin(first.next()), Box::pin(second.next()));
    // No envelope is allocated while a link holds a chunk.
    assert!(futures::poll!(one.as_mut()).is_pending() && futures::poll!(other.as_mut()).is_pending());
    assert_eq!(hub.envelopes(&host()), 1);
    drop(held);
    drop(peek);
    drop(one);
    assert_eq!(within(other).await.unwrap().unwrap().read().await.unwrap(), [7]);
    assert_eq!(hub.envelopes(&host()), 2);
}

#[tokio::test]
async fn h14_a_link_fails_without_memory_for_one_more_envelope() {
    let device = emulated_with(Emulated::new().memory(4 * LARGE as u64));
    let hub = crossed(&device, true).await;
    let mut consume = hub.consume(&device).unwrap();
    for _ in 0..2 {
        let error = within(consume.next()).await.unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("hub `late` needs 1 envelope"), "{error}");
    }
    // The hub itself has not failed, and other links continue.
    drop(consume);
    let mut consume = hub.consume(&host()).unwrap();
    for n in [7, 8] {
        let chunk = within(consume.next()).await.unwrap().unwrap();
        assert_eq!(chunk.read().await.unwrap(), [n]);
        chunk.commit().unwrap();
    }
}

/// Wherever the first chunk is, two chunks could not swap places.
#[tokio::test]
async fn h10_too_few_envelopes_for_chunks_that_stay_are_an_error() {
    let device = emulated();
    for reader in [host(), device.clone()] {
        let hub = ChunkHub::<u32>::builder("stays").elements(1).queue(4).host_envelopes(1).envelopes(&device, 1);
        let hub = hub.build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        put(&mut produce, &[1]).await;
        // The modifying link is created while the producer waits.
        let mut waits = Box::pin(produce.next());
        assert!(futures::poll!(waits.as_mut()).is_pending());
        let mut modify = hub.modify(&reader).unwrap();
        let error = within(waits).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        let text = "hub `stays` has 2 envelopes, too few for 2 chunks that stay in it, since no link consumes them: it needs 3,";
        assert!(error.to_string().contains(text), "{error}");
        // The chunk may leave a blank behind.
        within(modify.next()).await.unwrap().unwrap().commit().unwrap();
        assert!(within(produce.next()).await.is_err());
        hub.add_envelopes(&host(), 1).unwrap();
        put(&mut produce, &[2]).await;
        for _ in 0..4 {
            within(modify.next()).await.unwrap().unwrap().commit().unwrap();
        }
        assert_eq!((hub.envelopes(&host()), hub.envelopes(&device)), (2, 1));
    }
}

#[tokio::test]
async fn h4_what_data_cannot_flow_to_is_refused() {
    let (hub, other) = (of_host(1, 1), of_host(1, 1));
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    // The hubs have the same name, and the links the same number.
    let (_, elsewhere) = (other.produce(&host()).unwrap(), other.consume(&host()).unwrap());
    let error = hub.flow_to(&[&consume, &elsewhere]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("`flow_to` names a link of another hub, `numbers`"), "{error}");
    let mut flow = Flow::new("f");
    let fill = flow.add("fill", Fill::each([1]));
    for producer in [&produce as &dyn Destination, &fill.numbers] {
        let error = hub.flow_to(&[producer]).unwrap_err();
        assert!(error.to_string().contains("`flow_to` names a link that produces"), "{error}");
    }
    let see = flow.add("see", See(1, shared()));
    flow.link(fill.numbers, &hub);
    flow.link(see.numbers, &other);
    hub.flow_to(&[&see.numbers]).unwrap();
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("`flow_to` of hub `numbers` names port `see.numbers`"), "{error}");
    hub.flow_freely();
    put(&mut produce, &[7]).await;
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
}

#[tokio::test]
async fn a_stall_says_that_the_data_flows_elsewhere() {
    let (hub, seen) = (of_host(1, 1), shared());
    let mut flow = Flow::new("f");
    let fill = flow.add("fill", Fill::each(0..3));
    let see = flow.add("see", See(3, seen));
    flow.link(fill.numbers, &hub);
    flow.link(see.numbers, &hub);
    hub.flow_to(&[]).unwrap();
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    for part in [
        "all of its places are taken, and `flow_to` restricts the flow",
        "a chunk of hub `numbers` on the host: `flow_to` does not name this link",
    ] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
}

/// Produces a chunk with data, two empty ones, and then leaves its blank untouched.
struct FillAndSayNothing(u32);

impl Operator for FillAndSayNothing {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        match self.0 {
            1 => ports.numbers.get_mut()?.fill_from(&[7]).await,
            2 => ports.numbers.get_mut()?.set_len(0),
            3 => ports.numbers.commit(),
            _ => {
                cx.finish();
                Ok(())
            }
        }
    }
}

#[tokio::test]
async fn an_untouched_blank_returns_to_the_hub_when_the_run_ends() {
    let hub = of_host(4, 4);
    let mut flow = Flow::new("f");
    let fill = flow.add("fill", FillAndSayNothing(0));
    flow.link(fill.numbers, &hub);
    let report = within(flow.run()).await.unwrap();
    let fill = report.operator("fill").unwrap();
    assert_eq!((fill.runs, fill.messages_out), (4, 3), "{report}");
    let mut consume = hub.consume(&host()).unwrap();
    let mut seen = Vec::new();
    while let Some(chunk) = within(consume.next()).await.unwrap() {
        seen.push(chunk.read().await.unwrap().to_vec());
        chunk.commit().unwrap();
    }
    assert_eq!(seen, [vec![7], vec![], vec![]]);
}

#[tokio::test]
async fn a_link_that_never_commits_is_warned_about() {
    let warnings = Warnings::default();
    let _hearing = tracing::subscriber::set_default(warnings.clone());
    let hub = of_host(1, 1);
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    put(&mut produce, &[1]).await;
    for _ in 0..999 {
        consume.next().await.unwrap().unwrap();
    }
    assert!(warnings.messages().is_empty());
    for _ in 0..1001 {
        consume.next().await.unwrap().unwrap();
    }
    let logged = warnings.messages();
    assert_eq!(logged.len(), 1, "{logged:?}");
    for part in ["has been given chunk 1 1000 times in a row", "hub=\"numbers\"", "link=\"consumes\""] {
        assert!(logged[0].contains(part), "{part} in: {}", logged[0]);
    }
}

#[tokio::test]
async fn the_only_copy_stays_as_written_and_another_does_not() {
    let device = emulated();
    let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).envelopes(&device, 1).build().unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&host()).unwrap());
    let mut there = hub.peek(&device).unwrap();
    put(&mut produce, &[1]).await;
    modify.next().await.unwrap().unwrap().write().await.unwrap()[0] = 2;
    let mut seen = hub.peek(&host()).unwrap();
    assert_eq!(seen.next().await.unwrap().unwrap().read().await.unwrap(), [2], "it was the only copy");
    drop(there.next().await.unwrap());
    modify.next().await.unwrap().unwrap().write().await.unwrap()[0] = 3;
    assert_eq!(seen.next().await.unwrap().unwrap().read().await.unwrap(), [2], "the device has an unchanged copy");
}

#[tokio::test]
async fn flows_that_share_a_hub_are_held_by_hand() {
    let (hub, seen) = (of_host(2, 2), shared());
    let (mut writes, mut reads) = (Flow::new("writes"), Flow::new("reads"));
    let fill = writes.add("fill", Fill::each(0..100));
    writes.link(fill.numbers, &hub);
    let drain = reads.add("drain", Drain(seen.clone()));
    reads.link(drain.numbers, &hub);
    let hold = hub.produce(&host()).unwrap();
    let reading = reads.spawn().unwrap();
    within(writes.run()).await.unwrap();
    drop(hold);
    within(reading).await.unwrap();
    assert_eq!(lock(&seen).concat(), (0..100).collect::<Vec<_>>());
}

/// A structure whose destructor panics if the flag is set.
#[derive(Clone)]
struct Panics(bool);

impl Drop for Panics {
    fn drop(&mut self) {
        if self.0 {
            panic!("the structure's destructor");
        }
    }
}

#[tokio::test]
async fn an_envelope_that_is_refused_is_returned_though_its_structure_panics() {
    let hub = ChunkHub::<u32, Panics>::builder("numbers").elements(1).host_envelopes(1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    let filled = produce.with(async |blank| {
        blank.set_structure(Panics(false));
        blank.fill_from(&[1]).await
    });
    filled.await.unwrap().unwrap();
    let out = consume.next().await.unwrap().unwrap().into_envelope().unwrap();
    drop(consume);
    let unsent = produce.send(out, Panics(true)).await.unwrap_err();
    assert_eq!(unsent.error().kind(), ErrorKind::Closed);
    assert_eq!(unsent.into_envelope().read().await.unwrap(), [1]);
    // The hub's only envelope has returned.
    let _consume = hub.consume(&host()).unwrap();
    assert!(within(produce.next()).await.unwrap().is_some());

    let (mine, wrapped) = Buffer::wrap(vec![7_u32; 2]).unwrap();
    let unsent = produce.send(mine, Panics(true)).await.unwrap_err();
    assert_eq!(unsent.error().kind(), ErrorKind::Usage, "the buffer is too large");
    drop(unsent);
    assert_eq!(within(wrapped.into_inner()).await.unwrap(), [7, 7]);
}

/// A copy from a device that completed before the device was lost serves as a source, though no link has read it.
#[tokio::test]
async fn f1_copies_that_completed_before_the_loss_are_used() {
    let (healthy, lost) = (emulated_with(Emulated::new().workers(1)), doomed());
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(2).pinned_for(&healthy);
    let hub = builder.envelopes(&healthy, 1).envelopes(&lost, 3).host_envelopes(2).build().unwrap();
    let (mut produce, mut on_host) = (hub.produce(&lost).unwrap(), hub.peek(&host()).unwrap());
    let stream = Stream::new(&lost).unwrap();
    for n in [1, 2] {
        produce.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, n))).await.unwrap();
    }
    drop(within(on_host.next()).await.unwrap().unwrap());
    // The copy of the second chunk is ordered after that of the first.
    assert_eq!(within(on_host.next()).await.unwrap().unwrap().read().await.unwrap(), [2]);
    lose(&lost).await;
    let mut peek = hub.peek(&healthy).unwrap();
    let chunk = within(peek.next()).await.unwrap().unwrap();
    let ours = Stream::new(&healthy).unwrap();
    let mut seen = Buffer::<u32>::pinned(&healthy, 1).unwrap();
    ours.copy(&chunk, &mut seen).unwrap();
    assert_eq!(within(seen.read()).await.unwrap(), [1]);
}

/// Chunks in the user's own memory do not make room for others by moving: they would move out of it and back for ever.
#[tokio::test]
async fn chunks_sent_in_place_block_no_other_chunk() {
    let device = emulated_with(Emulated::new().workers(1));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(4);
    let hub = builder.envelopes(&device, 3).host_envelopes(1).build().unwrap();
    let (mut produce, mut on_device) = (hub.produce(&host()).unwrap(), hub.produce(&device).unwrap());
    let (mut modify, mut consume) = (hub.modify(&host()).unwrap(), hub.consume(&host()).unwrap());
    // The host's only envelope is in use when the next chunk needs it.
    put(&mut produce, &[1]).await;
    modify.with(async |_| Ok(())).await.unwrap();
    let first = within(consume.next()).await.unwrap().unwrap();
    let stream = Stream::new(&device).unwrap();
    on_device.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 2))).await.unwrap();
    let mut mine = Vec::new();
    for n in [3, 4] {
        let (buffer, owner) = Buffer::wrap(vec![n]).unwrap();
        mine.push(owner);
        within(produce.send_in_place(buffer, ())).await.unwrap();
    }
    assert!(modify.next().now_or_never().is_none());
    first.commit().unwrap();
    for n in [2, 3, 4] {
        let mut chunk = within(modify.next()).await.unwrap().unwrap();
        chunk.write().await.unwrap()[0] += 10;
        chunk.commit().unwrap();
        let chunk = within(consume.next()).await.unwrap().unwrap();
        assert_eq!(chunk.read().await.unwrap(), [n + 10]);
        chunk.commit().unwrap();
    }
}

/// The same with chunks that stay, while a producer waits for a blank.
#[tokio::test]
async fn chunks_sent_in_place_that_stay_block_no_producer() {
    let device = emulated_with(Emulated::new().workers(1));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(6);
    let hub = builder.envelopes(&device, 4).host_envelopes(1).build().unwrap();
    let (mut produce, mut again) = (hub.produce(&host()).unwrap(), hub.produce(&host()).unwrap());
    let mut peek = hub.peek(&host()).unwrap();
    put(&mut produce, &[1]).await;
    let held = within(peek.next()).await.unwrap().unwrap();
    let mut mine = Vec::new();
    for n in [3, 4] {
        let (buffer, owner) = Buffer::wrap(vec![n]).unwrap();
        mine.push(owner);
        within(produce.send_in_place(buffer, ())).await.unwrap();
    }
    assert!(again.next().now_or_never().is_none());
    drop(held);
    assert!(within(again.next()).await.unwrap().is_some());
}

/// A dropped producer no longer counts, even if a future of its `next` was forgotten.
#[tokio::test]
async fn a_link_is_gone_though_one_of_its_futures_was_forgotten() {
    let hub = ChunkHub::<u32>::builder("h").elements(1).queue(1).host_envelopes(1).build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    put(&mut produce, &[1]).await;
    let mut next = Box::pin(produce.next());
    assert!(next.as_mut().now_or_never().is_none());
    std::mem::forget(next);
    drop(produce);
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    assert!(within(consume.next()).await.unwrap().is_none());
}

/// A modifying link is created late, when each of two chunks holds the envelope that the other one needs. Neither chunk
/// may move back and forth for ever.
#[tokio::test]
async fn a_link_that_is_created_late_moves_no_chunk_for_ever() {
    let (a, b) = (emulated_with(Emulated::new().workers(1)), emulated_with(Emulated::new().workers(1)));
    let builder = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(1);
    let hub = builder.envelopes(&a, 2).envelopes(&b, 2).build().unwrap();
    let (mut first, mut second) = (hub.modify(&host()).unwrap(), hub.modify(&a).unwrap());
    let mut consume = hub.consume(&a).unwrap();
    let (mut peek, mut produce) = (hub.peek(&host()).unwrap(), hub.produce(&b).unwrap());
    let stream = Stream::new(&b).unwrap();
    for _ in 0..2 {
        produce.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 1))).await.unwrap();
        first.with(async |_| Ok(())).await.unwrap();
        second.with(async |_| Ok(())).await.unwrap();
        drop(within(peek.next()).await.unwrap());
    }
    for _ in 0..2 {
        produce.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 1))).await.unwrap();
    }
    first.with(async |_| Ok(())).await.unwrap();
    let (mut waits, mut waits_too) = (Box::pin(first.next()), Box::pin(second.next()));
    let _ = (waits.as_mut().now_or_never(), waits_too.as_mut().now_or_never());
    let mut late = hub.modify(&b).unwrap();
    drop((waits, waits_too));
    // Every link passes on every chunk.
    let modify = async |link: &mut wakeline::hub::Modifier<u32>| {
        while let Some(chunk) = link.next().await.unwrap() {
            chunk.commit().unwrap();
        }
    };
    let (consumed, peeked) = (
        async {
            let mut numbers = Vec::new();
            while let Some(chunk) = consume.next().await.unwrap() {
                numbers.push(chunk.number());
                chunk.commit().unwrap();
            }
            numbers
        },
        async { while peek.next().await.unwrap().is_some() {} },
    );
    drop(produce);
    let all = futures::future::join5(modify(&mut first), modify(&mut second), modify(&mut late), peeked, consumed);
    assert_eq!(within(all).await.4, [1, 2, 3, 4]);
}
