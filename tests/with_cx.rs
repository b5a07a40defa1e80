//! Operators made from functions that use the operator's `Cx`.

use std::ops::Range;

use common::*;
use wakeline::{
    memory::Slice,
    operator::{concurrent, map_with, sink_with, source_with, with_state},
    prelude::*,
};

on_both!(a_closure_launches_a_kernel, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("closures");
    let send = flow.add("send", SendEach::new([vec![1_u32, 2], vec![3], vec![4, 5]]));
    let add = flow
        .add(
            "add",
            map_with(async |mut numbers: Envelope<u32>, cx: &mut Cx| {
                increment::launch(cx.stream()?, &mut numbers)?;
                Ok(numbers)
            }),
        )
        .on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(send.output, add.input, HubOptions::default().envelope_bytes(8));
    flow.connect(add.output, collect.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [vec![2, 3], vec![4], vec![5, 6]]);
    freed(&device).await;
});

/// Adds the total of all numbers so far, which stays on the device, to a message's first number.
async fn add_total(total: &mut Option<Buffer<u32>>, mut numbers: Envelope<u32>, cx: &mut Cx) -> Result<Envelope<u32>> {
    if total.is_none() {
        let mut zero = cx.alloc::<u32>(1)?;
        cx.stream()?.fill(&mut zero, 0)?;
        *total = Some(zero);
    }
    let total = total.as_mut().expect("just made");
    let stream = cx.stream()?.clone();
    // Across an await, with both borrowed.
    tokio::task::yield_now().await;
    increment::launch(&stream, total)?;
    let first: Slice<'_, u32> = total.slice(..1)?;
    stream.copy(&first, &mut numbers.slice_mut(..1)?)?;
    Ok(numbers)
}

on_both!(a_function_keeps_a_state, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("state");
    let numbers = flow.add(
        "numbers",
        source_with(with_state(0..3_u32, async |left: &mut Range<u32>, cx: &mut Cx| {
            let Some(next) = left.next() else { return Ok(None) };
            let mut one = Buffer::<u32>::pinned(&Device::host(), 2)?;
            one.write().await?.fill(next + 10);
            assert_eq!(cx.name(), "numbers");
            Ok(Some(Envelope::from(one)))
        })),
    );
    let total = flow.add("total", map_with(with_state(None, add_total))).on(&device);
    let noted = seen.clone();
    let note = flow.add(
        "note",
        sink_with(with_state(noted, async |seen: &mut Shared<Vec<u32>>, numbers: Envelope<u32>, cx: &mut Cx| {
            let read = numbers.read().await?.to_vec();
            let mut seen = lock(seen);
            seen.push(read);
            if seen.len() == 2 {
                cx.finish();
            }
            Ok(())
        })),
    );
    flow.connect_with(numbers.output, total.input, HubOptions::default().envelope_bytes(8));
    flow.connect(total.output, note.input);
    let report = flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [[1, 10], [2, 11]]);
    assert_eq!(report.operator("note").unwrap().runs, 2);
    drop(flow);
    freed(&device).await;
});

#[tokio::test]
async fn each_worker_has_a_clone_of_the_state() {
    let seen = shared();
    let mut flow = Flow::new("workers");
    let numbers = flow.add(
        "numbers",
        source_with(with_state(0..20_u32, async |left: &mut Range<u32>, _cx: &mut Cx| Ok(left.next()))),
    );
    let count = with_state(0_u32, async |runs: &mut u32, number: u32, _cx: &mut Cx| {
        *runs += 1;
        tokio::task::yield_now().await;
        Ok((number, *runs))
    });
    let count = flow.add("count", concurrent(4, map_with(count)));
    let keep = flow.add("keep", keep(&seen));
    flow.connect(numbers.output, count.input);
    flow.connect(count.output, keep.input);
    within(flow.run()).await.unwrap();
    let seen = lock(&seen);
    assert!(seen.iter().map(|(number, _)| *number).eq(0..20));
    assert!(seen.iter().all(|(_, runs)| (1..=20).contains(runs)));
}
