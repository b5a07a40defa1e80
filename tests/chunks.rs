//! Scenarios H: hubs whose chunks several links share, used by hand without a flow.

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use common::*;
use futures::FutureExt;
use wakeline::{
    Stream,
    device::Emulated,
    hub::{Consumer, Modifier, Peeker, Producer},
    prelude::*,
};

fn host() -> Device {
    Device::host()
}

/// A hub with `envelopes` envelopes at each place, the host and the device.
fn hub(device: &Device, elements: usize, queue: usize, envelopes: usize) -> ChunkHub<u32> {
    let hub = ChunkHub::builder("h").elements(elements).queue(queue);
    hub.host_envelopes(envelopes).envelopes(device, envelopes).build().unwrap()
}

async fn put(produce: &mut Producer<u32>, data: &[u32]) {
    produce.with(async |blank| blank.fill_from(data).await).await.unwrap().unwrap();
}

async fn look(peek: &mut Peeker<u32>) -> Vec<u32> {
    peek.next().await.unwrap().unwrap().read().await.unwrap().to_vec()
}

async fn add_one(modify: &mut Modifier<u32>, stream: &Stream) {
    modify.with(async |chunk| increment::launch(stream, chunk)).await.unwrap().unwrap();
}

async fn all(consume: &mut Consumer<u32>) -> Vec<Vec<u32>> {
    let mut seen = Vec::new();
    while let Some(chunk) = consume.next().await.unwrap() {
        seen.push(chunk.read().await.unwrap().to_vec());
        chunk.commit().unwrap();
    }
    seen
}

on_both!(h1_produced_modified_and_peeked_at, async |device: Device| {
    let hub = hub(&device, 3, 1, 1);
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut peek = hub.peek(&host()).unwrap();
    put(&mut produce, &[1, 2, 3]).await;
    add_one(&mut modify, &stream).await;
    assert_eq!(look(&mut peek).await, [2, 3, 4]);
    assert_eq!(look(&mut peek).await, [2, 3, 4], "the chunk stays");
    assert_eq!(device.memory_peak(), 12, "one envelope on the device");
    drop((hub, produce, modify, peek, stream));
    freed(&device).await;
});

on_both!(h2_a_filter_commits_what_it_lets_pass, async |device: Device| {
    let (numbers, odd) = (hub(&device, 1, 2, 2), hub(&device, 1, 2, 2));
    let mut produce = numbers.produce(&host()).unwrap();
    let (mut from, mut to) = (numbers.consume(&host()).unwrap(), odd.produce(&host()).unwrap());
    let mut consume = odd.consume(&host()).unwrap();
    let produced = async move {
        for number in 1..=5 {
            put(&mut produce, &[number]).await;
        }
    };
    let filtered = async move {
        while let Some(number) = from.next().await.unwrap() {
            let mut blank = to.next().await.unwrap().unwrap();
            blank.fill_from(number.read().await.unwrap()).await.unwrap();
            if number.as_slice().unwrap()[0] % 2 == 1 {
                blank.commit().unwrap();
            }
            number.commit().unwrap();
        }
        drop(to);
    };
    let (_, _, seen) = tokio::join!(produced, filtered, all(&mut consume));
    assert_eq!(seen, [[1], [3], [5]]);
});

on_both!(h3_four_envelopes_are_all_busy_at_once, async |device: Device| {
    let hub = hub(&device, 1, 4, 2);
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&device).unwrap());
    put(&mut produce, &[1]).await;
    let first = consume.next().await.unwrap().unwrap();
    // One is consumed, one waits on the device, one waits on the host, and one is being filled.
    put(&mut produce, &[2]).await;
    put(&mut produce, &[3]).await;
    let fourth = produce.next().now_or_never().expect("the fourth envelope is free").unwrap();
    assert_eq!(hub.len(), 3);
    assert!(produce.next().now_or_never().is_none(), "no envelope is left");
    drop(fourth);
    first.commit().unwrap();
    let second = consume.next().now_or_never().expect("it was copied ahead of time").unwrap().unwrap();
    assert_eq!(second.number(), 2);
});

on_both!(h3_one_envelope_works_without_overlap, async |device: Device| {
    let hub = hub(&device, 1, 4, 1);
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    let produced = async move {
        for number in 0..50 {
            put(&mut produce, &[number]).await;
        }
    };
    let modified =
        async move { while modify.with(async |chunk| increment::launch(&stream, chunk)).await.unwrap().is_some() {} };
    let (_, _, seen) = tokio::join!(tokio::spawn(produced), tokio::spawn(modified), all(&mut consume));
    assert_eq!(seen.concat(), (1..=50).collect::<Vec<_>>());
    assert_eq!(device.memory_peak(), 4);
});

on_both!(h4_the_flow_of_data_switches, async |device: Device| {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(5).host_envelopes(5).envelopes(&device, 2);
    let hub = hub.build().unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    hub.flow_to(&[&modify]).unwrap();
    for number in 1..=5 {
        put(&mut produce, &[number]).await;
    }
    drop(produce);
    for _ in 1..=5 {
        assert!(consume.next().now_or_never().is_none(), "the data flows to the other");
        let mut squared = modify.next().await.unwrap().unwrap();
        let mut square = Buffer::<u32>::new(&device, 1).unwrap();
        square::launch(&stream, &squared, &mut square, 1).unwrap();
        stream.copy(&square, &mut squared).unwrap();
        squared.commit().unwrap();
    }
    hub.flow_to(&[&consume]).unwrap();
    assert_eq!(all(&mut consume).await.concat(), [1, 4, 9, 16, 25]);
    hub.flow_freely();
    assert!(modify.next().await.unwrap().is_none(), "no chunk is left, and none will come");
});

on_both!(h5_a_guard_that_is_not_committed_changes_nothing, async |device: Device| {
    let hub = hub(&device, 1, 2, 2);
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut blank = produce.next().await.unwrap().unwrap();
    blank.fill_from(&[9]).await.unwrap();
    drop(blank);
    assert!(hub.is_empty());
    put(&mut produce, &[1]).await;
    put(&mut produce, &[2]).await;
    assert!(produce.next().now_or_never().is_none(), "the queue is full");

    let mut chunk = modify.next().await.unwrap().unwrap();
    increment::launch(&stream, &mut chunk).unwrap();
    drop(chunk);
    let again = modify.next().await.unwrap().unwrap();
    assert_eq!(again.number(), 2, "the first blank was returned");
    let mut seen = Buffer::<u32>::pinned(&device, 1).unwrap();
    stream.copy(&again, &mut seen).unwrap();
    assert_eq!(seen.read().await.unwrap(), [1], "the chunk is unchanged");
    drop((again, modify));

    let mut consume = hub.consume(&host()).unwrap();
    let chunk = consume.next().await.unwrap().unwrap();
    assert_eq!((chunk.number(), chunk.read().await.unwrap()), (2, &[1][..]));
    drop(chunk);
    drop(produce);
    assert_eq!(all(&mut consume).await.concat(), [1, 2], "the chunk is back in its position");
});

on_both!(h5_a_committed_modification_frees_the_other_copies, async |device: Device| {
    let hub = hub(&device, 1, 2, 1);
    // Two chunks that stay need three envelopes.
    hub.add_envelopes(&device, 1).unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    put(&mut produce, &[1]).await;
    let chunk = modify.next().await.unwrap().unwrap();
    assert!(produce.next().now_or_never().is_none(), "the copy on the host is kept until the commit");
    drop(chunk);
    add_one(&mut modify, &stream).await;
    let mut blank = produce.next().await.unwrap().unwrap();
    blank.fill_from(&[7]).await.unwrap();
});

#[tokio::test]
async fn h5_peeks_on_several_devices_at_once() {
    let (one, two) = (emulated(), emulated());
    let hub = ChunkHub::<u32>::builder("shared").elements(2).host_envelopes(1).envelopes(&one, 1).envelopes(&two, 1);
    let hub = hub.build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let mut peeks = [hub.peek(&one).unwrap(), hub.peek(&two).unwrap(), hub.peek(&one).unwrap()];
    let mut consume = hub.consume(&host()).unwrap();
    put(&mut produce, &[3, 4]).await;
    assert!(consume.next().now_or_never().is_none(), "links that peek come first");
    let mut chunks = Vec::new();
    for peek in &mut peeks {
        chunks.push(peek.next().await.unwrap().unwrap());
    }
    let chunk = consume.next().await.unwrap().unwrap();
    chunk.commit().unwrap();
    assert!(hub.is_empty());
    for chunk in &chunks {
        let stream = Stream::new(chunk.device()).unwrap();
        let mut total = Buffer::<u32>::new(chunk.device(), 1).unwrap();
        sum::launch(&stream, chunk, &mut total).unwrap();
        assert_eq!(total.to_vec(&stream).await.unwrap(), [7], "the copy exists while a peek guard does");
    }
    put(&mut produce, &[5, 6]).await;
    assert!(peeks[1].next().now_or_never().is_none(), "a guard still holds the envelope");
    chunks.clear();
    assert_eq!(peeks[1].next().await.unwrap().unwrap().number(), 2);
    drop((hub, produce, peeks, consume));
    freed(&one).await;
    freed(&two).await;
}

on_both!(h6_a_buffer_of_the_users_becomes_a_chunk_without_a_copy, async |device: Device| {
    let hub = ChunkHub::<u32, &str>::builder("mine").elements(3).envelopes(&device, 1).build().unwrap();
    let (mut produce, mut peek) = (hub.produce(&host()).unwrap(), hub.peek(&device).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    let mut mine = Buffer::<u32>::pinned(&device, 3).unwrap();
    mine.as_mut_slice().unwrap().copy_from_slice(&[1, 2, 3]);
    let address = mine.as_slice().unwrap().as_ptr();
    produce.send(mine, "rows").await.unwrap();
    assert_eq!(peek.next().await.unwrap().unwrap().structure(), Some(&"rows"));
    let mine = consume.next().await.unwrap().unwrap().into_envelope().unwrap();
    assert_eq!(mine.read().await.unwrap(), [1, 2, 3]);
    assert_eq!(mine.as_slice().unwrap().as_ptr(), address, "the same memory");

    let small = Buffer::<u32>::pinned(&device, 2).unwrap();
    let unsent = produce.send(small, "rows").await.unwrap_err();
    assert_eq!(unsent.error().kind(), ErrorKind::Usage);
    assert!(unsent.to_string().contains("room for 3 elements, but this one for 2"), "{unsent}");
    assert_eq!(unsent.into_envelope().capacity(), 2, "the buffer is returned");
    let there = Buffer::<u32>::new(&device, 3).unwrap();
    let unsent = produce.send(there, "rows").await.unwrap_err();
    assert!(unsent.to_string().contains("cannot be sent by a link on"), "{unsent}");
});

on_both!(h6_a_users_vector_passes_and_comes_back, async |device: Device| {
    let hub =
        ChunkHub::<u32>::builder("mine").elements(3).queue(2).host_envelopes(1).envelopes(&device, 1).build().unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    let (mine, back) = Buffer::wrap(vec![1_u32, 2, 3]).unwrap();
    let (only_read, bytes) = Buffer::wrap_read_only(Arc::<[u32]>::from([4, 5, 6])).unwrap();
    produce.send(mine, ()).await.unwrap();
    produce.send(only_read, ()).await.unwrap();
    drop(produce);
    add_one(&mut modify, &stream).await;
    add_one(&mut modify, &stream).await;
    assert_eq!(all(&mut consume).await, [[2, 3, 4], [5, 6, 7]]);
    assert_eq!(within(back.into_inner()).await.unwrap(), [1, 2, 3], "only a copy was changed");
    assert_eq!(*within(bytes.into_inner()).await.unwrap(), [4, 5, 6]);
});

on_both!(h6_a_devices_changes_to_a_users_memory_are_copied_back, async |device: Device| {
    for on_host in [0, 1] {
        let hub = ChunkHub::<u32>::builder("mine").elements(3).queue(2).envelopes(&device, 1);
        let hub = hub.host_envelopes(on_host).build().unwrap();
        let stream = Stream::new(&device).unwrap();
        let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
        let mut consume = hub.consume(&host()).unwrap();
        let (mine, back) = Buffer::wrap(vec![1_u32, 2, 3]).unwrap();
        let mut pinned = Buffer::<u32>::pinned(&device, 3).unwrap();
        pinned.as_mut_slice().unwrap().copy_from_slice(&[4, 5, 6]);
        let address = pinned.as_slice().unwrap().as_ptr();
        let (only_read, _bytes) = Buffer::wrap_read_only(Arc::<[u32]>::from([4, 5, 6])).unwrap();
        let unsent = produce.send_in_place(only_read, ()).await.unwrap_err();
        assert_eq!(unsent.error().kind(), ErrorKind::Usage);
        produce.send_in_place(mine, ()).await.unwrap();
        produce.send_in_place(pinned, ()).await.unwrap();
        drop(produce);
        // A modification that was not committed is not in the user's memory.
        let mut chunk = within(modify.next()).await.unwrap().unwrap();
        increment::launch(&stream, &mut chunk).unwrap();
        drop(chunk);
        add_one(&mut modify, &stream).await;
        within(consume.next()).await.unwrap().unwrap().commit().unwrap();
        assert_eq!(within(back.into_inner()).await.unwrap(), [2, 3, 4]);
        add_one(&mut modify, &stream).await;
        let pinned = within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap();
        assert_eq!(pinned.read().await.unwrap(), [5, 6, 7]);
        assert_eq!(pinned.as_slice().unwrap().as_ptr(), address, "the same memory");
    }
});

on_both!(h7_envelopes_are_added_while_running, async |device: Device| {
    let hub = ChunkHub::<u32>::builder("more").elements(1).unbounded().host_envelopes(1).envelopes(&device, 1);
    let hub = hub.build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&device).unwrap());
    let held = async {
        put(&mut produce, &[1]).await;
        put(&mut produce, &[2]).await;
    };
    held.await;
    // Both envelopes hold a chunk. The queue itself is unbounded.
    let mut third = Box::pin(produce.next());
    assert!(third.as_mut().now_or_never().is_none());
    let first = consume.next().await.unwrap().unwrap();
    let mut second = Box::pin(consume.next());
    assert!(second.as_mut().now_or_never().is_none());
    hub.add_envelopes(&device, 1).unwrap();
    assert_eq!(second.await.unwrap().unwrap().number(), 2);
    assert!(third.await.unwrap().is_some());
    assert_eq!((hub.envelopes(&device), hub.envelopes(&host())), (2, 1));
    drop(first);
});

#[test]
fn h7_a_capacity_of_0_is_an_error() {
    let error = ChunkHub::<u32>::builder("none").elements(1).queue(0).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("hub `none`: its queue has 0 slots"), "{error}");
    let error = ChunkHub::<u32>::builder("none").build().unwrap_err();
    assert!(error.to_string().contains("room for no element"), "{error}");
    let error = ChunkHub::<u32>::builder("much").elements(usize::MAX).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    let expected =
        format!("hub `much`: out of memory: {} elements of 4 bytes are more than an address space holds", usize::MAX);
    assert!(error.to_string().contains(&expected), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h7_two_producers_never_overshoot() {
    let hub = ChunkHub::<u32>::builder("two").elements(1).queue(3).host_envelopes(8).build().unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    let tasks: Vec<_> = (0..2).map(|_| hub.produce(&host()).unwrap()).collect();
    let tasks = tasks.into_iter().map(|mut produce| {
        let hub = hub.clone();
        tokio::spawn(async move {
            for number in 0..100 {
                let mut blank = produce.next().await.unwrap().unwrap();
                tokio::task::yield_now().await;
                blank.fill_from(&[number]).await.unwrap();
                blank.commit().unwrap();
                assert!(hub.len() <= 3);
            }
        })
    });
    let tasks = futures::future::join_all(tasks);
    let (ended, seen) = tokio::join!(tasks, within(all(&mut consume)));
    ended.into_iter().for_each(|ended| ended.unwrap());
    assert_eq!(seen.len(), 200);
}

on_both!(h8_contents_are_swapped, async |device: Device| {
    let one =
        ChunkHub::<u32, char>::builder("one").elements(2).host_envelopes(1).envelopes(&device, 1).build().unwrap();
    let two =
        ChunkHub::<u32, char>::builder("two").elements(2).host_envelopes(1).envelopes(&device, 1).build().unwrap();
    for (hub, data, structure) in [(&one, vec![1, 2], 'a'), (&two, vec![3], 'b')] {
        let mut produce = hub.produce(&host()).unwrap();
        let mut blank = produce.next().await.unwrap().unwrap();
        blank.fill_from(&data).await.unwrap();
        assert!(blank.structure().is_none());
        blank.set_structure(structure);
        blank.commit().unwrap();
    }
    let (mut first, mut second) = (one.modify(&device).unwrap(), two.modify(&device).unwrap());
    let (mut here, mut there) = (first.next().await.unwrap().unwrap(), second.next().await.unwrap().unwrap());
    here.swap(&mut there).unwrap();
    here.commit().unwrap();
    there.commit().unwrap();
    for (hub, data, structure) in [(&one, vec![3], 'b'), (&two, vec![1, 2], 'a')] {
        let chunk = hub.peek(&host()).unwrap().next().await.unwrap().unwrap();
        assert_eq!((chunk.read().await.unwrap(), chunk.structure()), (&data[..], Some(&structure)));
    }
    let mut mine = Envelope::from(Buffer::<u32>::pinned(&device, 2).unwrap());
    let mut theirs = one.consume(&host()).unwrap().next().await.unwrap().unwrap().into_envelope().unwrap();
    let error = mine.swap(&mut theirs).unwrap_err();
    assert!(error.to_string().contains("wraps a user's buffer"), "{error}");
    let mut there = Envelope::from(Buffer::<u32>::new(&device, 2).unwrap());
    assert!(theirs.swap(&mut there).unwrap_err().to_string().contains("one is on the host, the other on"));
    let mut large = Envelope::from(Buffer::<u32>::pinned(&device, 3).unwrap());
    assert!(theirs.swap(&mut large).unwrap_err().to_string().contains("room for 2 elements, the other for 3"));
});

on_both!(h9_only_the_valid_part_is_copied, async |device: Device| {
    let hub = hub(&device, 1000, 1, 1);
    let log = Log::default();
    hub.log_to(log.clone());
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&device).unwrap());
    put(&mut produce, &[1, 2, 3]).await;
    let chunk = consume.next().await.unwrap().unwrap();
    assert_eq!((chunk.len(), chunk.capacity()), (3, 1000));
    chunk.commit().unwrap();
    let (there, name) = (device.name(), |text: &str| text.replace("DEVICE", device.name()));
    let expected = [
        "h: chunk 1: produced on the host, 12 B",
        "h: chunk 1: 12 B from the host to DEVICE",
        "h: chunk 1: given to a link that consumes it on DEVICE",
        "h: chunk 1: consumed on DEVICE",
    ];
    assert_eq!(log.lines(), expected.map(name), "{there}");
});

#[tokio::test]
async fn h10_a_place_without_envelopes_is_an_error() {
    let device = emulated();
    let hub = ChunkHub::<u32>::builder("here").elements(1).host_envelopes(1).build().unwrap();
    let (mut produce, mut peek) = (hub.produce(&host()).unwrap(), hub.peek(&device).unwrap());
    put(&mut produce, &[1]).await;
    let error = peek.next().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = format!("hub `here` has no envelopes on {}, where a link peeks its chunks", device.name());
    assert!(error.to_string().contains(&text), "{error}");
    hub.add_envelopes(&device, 1).unwrap();
    assert!(peek.next().await.unwrap().is_some());
    let error = hub.produce(&emulated()).unwrap().next().await.unwrap_err();
    assert!(error.to_string().contains("where a link produces its chunks"), "{error}");
}

on_both!(h13_much_more_than_there_is_room_for_passes, async |device: Device| {
    let hub = hub(&device, 1024, 4, 2);
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    let produced = tokio::spawn(async move {
        for number in 0..200 {
            put(&mut produce, &[number; 1024]).await;
        }
    });
    let modified = tokio::spawn(async move {
        while modify.with(async |chunk| increment::launch(&stream, chunk)).await.unwrap().is_some() {}
    });
    for (chunk, number) in all(&mut consume).await.into_iter().zip(1..) {
        assert_eq!(chunk, [number; 1024]);
    }
    produced.await.unwrap();
    modified.await.unwrap();
    assert_eq!(device.memory_peak(), 2 * 4096, "only the envelopes");
    drop((hub, consume));
    freed(&device).await;
});

on_both!(h15_an_envelope_returns_to_its_hub_after_its_last_reader_elsewhere, async |device: Device| {
    let (first, second) = (hub(&device, 1, 4, 1), hub(&device, 1, 4, 1));
    let (mut produce, mut consume) = (first.produce(&host()).unwrap(), first.consume(&host()).unwrap());
    let (mut pass_on, mut last) = (second.produce(&host()).unwrap(), second.consume(&host()).unwrap());
    put(&mut produce, &[1]).await;
    pass_on.send(consume.next().await.unwrap().unwrap().into_envelope().unwrap(), ()).await.unwrap();
    assert!(produce.next().now_or_never().is_none(), "the envelope is in the other hub");
    let chunk = last.next().await.unwrap().unwrap();
    assert_eq!(chunk.read().await.unwrap(), [1]);
    chunk.commit().unwrap();
    put(&mut produce, &[2]).await;
    let envelope = consume.next().await.unwrap().unwrap().into_envelope().unwrap();
    // The envelope outlives the hub that it came from.
    drop((first, produce, consume));
    pass_on.send(envelope, ()).await.unwrap();
    assert_eq!(last.next().await.unwrap().unwrap().read().await.unwrap(), [2]);
    drop((second, pass_on, last));
    freed(&device).await;
});

on_both!(h16_a_chunk_shows_what_it_is, async |device: Device| {
    let hub = ChunkHub::<u8, [usize; 2]>::builder("images").elements(64).host_envelopes(1).envelopes(&device, 1);
    let hub = hub.build().unwrap();
    let (mut produce, mut peek) = (hub.produce(&host()).unwrap(), hub.peek(&device).unwrap());
    let mut blank = produce.next().await.unwrap().unwrap();
    assert_eq!((blank.len(), blank.capacity(), blank.location(), blank.is_host()), (0, 64, "the host", true));
    blank.fill_from(&[1; 12]).await.unwrap();
    let error = {
        let mut other = hub.clone().produce(&host()).unwrap();
        assert!(other.next().now_or_never().is_none());
        blank.set_structure([3, 4]);
        blank.set_len(65).unwrap_err()
    };
    assert!(error.to_string().contains("has room for 64 elements, not for 65"), "{error}");
    blank.commit().unwrap();
    let chunk = peek.next().await.unwrap().unwrap();
    assert_eq!((chunk.len(), chunk.capacity(), chunk.structure()), (12, 64, Some(&[3, 4])));
    assert_eq!((chunk.location(), chunk.device(), chunk.number()), (device.name(), &device, 1));
});

#[tokio::test]
async fn a_blank_without_a_structure_is_not_committed() {
    let hub = ChunkHub::<u8, String>::builder("named").elements(1).host_envelopes(1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let error = produce.next().await.unwrap().unwrap().commit().unwrap_err();
    assert!(error.to_string().contains("call `set_structure` before the commit"), "{error}");
    assert!(hub.is_empty());
}

#[tokio::test]
async fn links_end_when_nothing_is_left_for_them() {
    let hub = ChunkHub::<u32>::builder("ends").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let (mut peek, mut consume) = (hub.peek(&host()).unwrap(), hub.consume(&host()).unwrap());
    assert!(consume.next().now_or_never().is_none(), "there was no producer yet");
    let mut produce = hub.produce(&host()).unwrap();
    put(&mut produce, &[1]).await;
    drop(produce);
    assert_eq!(look(&mut peek).await, [1]);
    assert!(peek.next().await.unwrap().is_none());
    assert_eq!(all(&mut consume).await, [[1]]);
    // A new producer revives the links.
    let mut produce = hub.produce(&host()).unwrap();
    put(&mut produce, &[2]).await;
    assert_eq!(look(&mut peek).await, [2]);
    drop(consume);
    assert!(produce.next().await.unwrap().is_none(), "no consumer is left");
    let unsent = produce.send(Buffer::pinned(&host(), 1).unwrap(), ()).await.unwrap_err();
    assert!(unsent.error().is_closed());
}

/// Waiting links are served first come, first served.
#[tokio::test]
async fn modifications_take_turns() {
    let hub = ChunkHub::<u32>::builder("turns").elements(4).host_envelopes(1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    put(&mut produce, &[0; 4]).await;
    let order = shared();
    let tasks = (0..3).map(|me| {
        let (mut modify, order) = (hub.modify(&host()).unwrap(), order.clone());
        async move {
            for _ in 0..4 {
                let mut chunk = modify.next().await.unwrap().unwrap();
                tokio::task::yield_now().await;
                chunk.write().await.unwrap()[me] += 1;
                chunk.commit().unwrap();
                lock(&order).push(me);
            }
        }
    });
    within(futures::future::join_all(tasks)).await;
    assert_eq!(*lock(&order), [0, 1, 2].repeat(4));
    assert_eq!(look(&mut hub.peek(&host()).unwrap()).await, [4, 4, 4, 0]);
}

/// Chunks go from device to device in the order in which the links were created, and back to the host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modifications_on_several_devices_are_in_the_order_of_linking() {
    let (one, two) = (emulated(), emulated());
    let hub = ChunkHub::<u32>::builder("chain").elements(1).queue(4).host_envelopes(2).envelopes(&one, 1);
    let hub = hub.envelopes(&two, 1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let (mut add, mut double) = (hub.modify(&two).unwrap(), hub.modify(&one).unwrap());
    let mut consume = hub.consume(&host()).unwrap();
    let produced = tokio::spawn(async move {
        for number in 0..30 {
            put(&mut produce, &[number]).await;
        }
    });
    let added = tokio::spawn(async move {
        let stream = Stream::new(&two).unwrap();
        while add.with(async |chunk| increment::launch(&stream, chunk)).await.unwrap().is_some() {}
    });
    let squared = tokio::spawn(async move {
        let stream = Stream::new(&one).unwrap();
        let mut square = Buffer::<u32>::new(&one, 1).unwrap();
        while let Some(mut chunk) = double.next().await.unwrap() {
            square::launch(&stream, &chunk, &mut square, 1).unwrap();
            stream.copy(&square, &mut chunk).unwrap();
            chunk.commit().unwrap();
        }
    });
    let seen = within(all(&mut consume)).await.concat();
    assert_eq!(seen, (1..=30).map(|number| number * number).collect::<Vec<_>>());
    for task in [produced, added, squared] {
        task.await.unwrap();
    }
}

/// Several devices share the work: a consumer that waits gets the next chunk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_on_several_devices_take_turns() {
    let devices = [emulated(), emulated()];
    let hub = ChunkHub::<u32>::builder("shared").elements(1).queue(4).host_envelopes(2);
    let hub = hub.envelopes(&devices[0], 1).envelopes(&devices[1], 1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let consumers: Vec<_> = devices.iter().map(|device| hub.consume(device).unwrap()).collect();
    let tasks = consumers.into_iter().map(|mut consume| {
        tokio::spawn(async move {
            let (stream, mut sums) = (Stream::new(consume.device()).unwrap(), Vec::new());
            while let Some(chunk) = consume.next().await.unwrap() {
                let mut here = Buffer::<u32>::pinned(stream.device(), 1).unwrap();
                stream.copy(&chunk, &mut here).unwrap();
                sums.push(here.read().await.unwrap()[0]);
                chunk.commit().unwrap();
            }
            sums
        })
    });
    let tasks: Vec<_> = tasks.collect();
    for number in 0..60 {
        put(&mut produce, &[number]).await;
    }
    drop(produce);
    let mut seen = Vec::new();
    for task in tasks {
        let theirs = within(task).await.unwrap();
        assert!(!theirs.is_empty() && theirs.is_sorted(), "{theirs:?}");
        seen.extend(theirs);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..60).collect::<Vec<_>>());
}

// The link cycles through all eight chunks that stay, although the device has room for two.
on_both!(chunks_that_stay_are_larger_than_the_device, async |device: Device| {
    let hub = ChunkHub::<u32>::builder("round").elements(1).queue(8).host_envelopes(8).envelopes(&device, 2);
    let hub = hub.build().unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
    for number in 0..8 {
        put(&mut produce, &[10 * number]).await;
    }
    for _ in 0..3 * 8 {
        add_one(&mut modify, &stream).await;
    }
    let mut peek = hub.peek(&host()).unwrap();
    for number in 0..8 {
        assert_eq!(look(&mut peek).await, [10 * number + 3]);
    }
    assert_eq!(device.memory_peak(), 8);
});

#[tokio::test]
async fn dropping_a_wait_takes_nothing() {
    let hub = ChunkHub::<u32>::builder("waits").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let (mut produce, mut one, mut two) =
        (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap(), hub.consume(&host()).unwrap());
    let mut first = Box::pin(one.next());
    assert!(first.as_mut().now_or_never().is_none());
    put(&mut produce, &[1]).await;
    // The future is dropped after it was woken and before it is polled.
    drop(first);
    assert_eq!(within(two.next()).await.unwrap().unwrap().number(), 1);
}

#[tokio::test]
async fn a_fault_reaches_all_links() {
    let device = emulated_with(Emulated::new().faults(wakeline::device::Faults::new().fail_copy(1)));
    let hub = hub(&device, 1, 2, 1);
    let (mut produce, mut peek) = (hub.produce(&host()).unwrap(), hub.peek(&device).unwrap());
    put(&mut produce, &[1]).await;
    // The copy fails while it is enqueued or later.
    let lost = match within(peek.next()).await {
        Ok(chunk) => within(chunk.unwrap().available()).await.unwrap_err(),
        Err(error) => error,
    };
    assert!(lost.is_device_lost(), "{lost}");
    for error in [within(peek.next()).await.unwrap_err(), hub.modify(&device).unwrap().next().await.unwrap_err()] {
        assert!(error.is_device_lost(), "{error}");
    }
}

/// A fault that is found under the locks of a commit reaches the hub's other links once these locks are released.
#[tokio::test]
async fn a_fault_is_found_as_a_chunk_is_committed() {
    let device =
        emulated_with(Emulated::new().workers(1).faults(wakeline::device::Faults::new().trap_kernel("increment", 1)));
    let hub = hub(&device, 1, 2, 2);
    let (mut produce, mut peek) = (hub.produce(&device).unwrap(), hub.peek(&device).unwrap());
    let stream = Stream::new(&device).unwrap();
    let mut blank = within(produce.next()).await.unwrap().unwrap();
    blank.set_len(1).unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut blank).unwrap();
    // The fault drops the remaining device work, including this function. The host has not noticed the fault yet.
    let (dropped, is_dropped) = std::sync::mpsc::channel::<()>();
    stream.host_function(move || drop(dropped)).unwrap();
    drop(held);
    tokio::task::spawn_blocking(move || is_dropped.recv()).await.unwrap().unwrap_err();
    assert!(device.lost().is_none());
    let committed = blank.commit();
    assert!(committed.is_err_and(|error| error.is_device_lost()));
    assert!(within(peek.next()).await.unwrap_err().is_device_lost());
}

/// Measures the gain from overlap on a GPU: 4 MiB chunks go to the device and back through one hub.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "it measures"]
async fn h3_overlap_measured() {
    const CHUNK: usize = 4 << 20;
    const CHUNKS: usize = 1024;
    let Ok(device) = Device::cuda(0) else { return };
    for envelopes in [1, 2, 3, 4] {
        let hub = ChunkHub::<u32>::builder("h").elements(CHUNK / 4).queue(2 * envelopes);
        // On the host, one envelope for each direction.
        let hub = hub.host_envelopes(2 * envelopes).envelopes(&device, envelopes).build().unwrap();
        let stream = Stream::new(&device).unwrap();
        let (mut produce, mut modify) = (hub.produce(&host()).unwrap(), hub.modify(&device).unwrap());
        let mut consume = hub.consume(&host()).unwrap();
        let start = std::time::Instant::now();
        let produced = tokio::spawn(async move {
            for _ in 0..CHUNKS {
                let mut blank = produce.next().await.unwrap().unwrap();
                blank.space().await.unwrap()[0] = 7;
                blank.set_len(CHUNK / 4).unwrap();
                blank.commit().unwrap();
            }
        });
        let modified = tokio::spawn(async move {
            while modify.with(async |chunk| increment::launch(&stream, chunk)).await.unwrap().is_some() {}
        });
        while let Some(chunk) = consume.next().await.unwrap() {
            assert_eq!(chunk.read().await.unwrap()[0], 8);
            chunk.commit().unwrap();
        }
        produced.await.unwrap();
        modified.await.unwrap();
        let seconds = start.elapsed().as_secs_f64();
        println!("figure chunks.4MiB.envelopes{envelopes} = {:.2} GB/s", (CHUNKS * CHUNK) as f64 / seconds / 1e9);
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(lock(&self.0).clone()).unwrap().lines().map(str::to_string).collect()
    }
}

impl Write for Log {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).extend(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Without consumers, the chunk that holds the host's only envelope stays there, so the next chunk cannot reach the
/// link that modifies. That link ends.
#[tokio::test]
async fn h5_without_consumers_the_other_links_end() {
    let gpu = common::emulated();
    let stream = Stream::new(&gpu).unwrap();
    let host = Device::host();
    let builder = ChunkHub::<u32>::builder("in the way").elements(1).queue(2).envelopes(&gpu, 1).host_envelopes(1);
    let hub = builder.build().unwrap();
    let (mut produce, mut modify) = (hub.produce(&gpu).unwrap(), hub.modify(&host).unwrap());
    let consume = hub.consume(&host).unwrap();
    for round in 0..2 {
        let made = produce.with(async |blank| {
            blank.set_len(1)?;
            stream.fill(blank, round)
        });
        common::within(made).await.unwrap();
        if round == 0 {
            common::within(modify.next()).await.unwrap().unwrap().commit().unwrap();
        }
    }
    drop((produce, consume));
    assert!(common::within(modify.next()).await.unwrap().is_none());
}
