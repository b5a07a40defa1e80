//! The layers of `examples/more/mlp`, with cuBLAS on a GPU: at the same padded shape, replayed and streamed execution
//! give the same bytes.

#[path = "../examples/more/mlp/linear.rs"]
mod linear;
#[path = "../examples/more/mlp/net.rs"]
#[allow(dead_code, reason = "the example uses more of it")]
mod net;

use std::sync::{Arc, Mutex};

use common::*;
use half::f16;
use net::{LAYERS, Layer, Net, WIDTH};
use wakeline::{
    operator::{sink, source},
    prelude::*,
};

gpu_tests_run_where_required!();

const BUCKETS: [usize; 2] = [2, 8];
/// The number of rows of each request.
const SIZES: [usize; 6] = [1, 2, 3, 8, 5, 1];

fn bucket(rows: usize) -> usize {
    BUCKETS.into_iter().find(|bucket| *bucket >= rows).unwrap()
}

/// The rows of a request, which differ between requests, followed by `zeros` rows of zeros.
fn request(number: usize, rows: usize, zeros: usize) -> Vec<f16> {
    let values = (0..rows * WIDTH).map(|at| f16::from_f32(((number + 7 * at) % 16) as f32 / 16.0));
    values.chain(std::iter::repeat_n(f16::ZERO, zeros * WIDTH)).collect()
}

/// The answers, as bits, and the number of replayed rounds.
async fn answers(device: &Device, net: &Arc<Net>, requests: Vec<Vec<f16>>, replay: bool) -> (Vec<Vec<u16>>, u64) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut requests = requests.into_iter();
    let mut flow = Flow::new("mlp");
    let send = flow.add(
        "send",
        source(move || {
            let request = requests.next().map(|request| {
                let mut pinned = Buffer::<f16>::pinned(&Device::host(), request.len())?;
                pinned.as_mut_slice()?.copy_from_slice(&request);
                Ok(Envelope::from(pinned))
            });
            std::future::ready(request.transpose())
        }),
    );
    let layers: Vec<_> = (0..LAYERS).map(|n| flow.add(format!("layer {n}"), Layer::new(net, n)).on(device)).collect();
    let keep = seen.clone();
    let take = flow.add(
        "take",
        sink(move |answer: Envelope<f16>| {
            let keep = keep.clone();
            async move {
                let bits = answer.read().await?.iter().map(|number| number.to_bits()).collect();
                keep.lock().unwrap().push(bits);
                Ok(())
            }
        }),
    );
    let hub = HubOptions::bounded(2).envelope_bytes(BUCKETS[1] * WIDTH * size_of::<f16>());
    flow.connect_with(send.output, layers[0].rows, hub);
    for pair in layers.windows(2) {
        flow.connect_with(pair[0].out, pair[1].rows, hub);
    }
    flow.connect_with(layers[LAYERS - 1].out, take.input, hub);
    if replay {
        let net = flow.replay("mlp", layers.iter().collect::<Vec<_>>());
        net.buckets(BUCKETS).rows(layers[0].rows, WIDTH).at_start();
    }
    let report = flow.run().await.unwrap();
    let replayed = report.section("mlp").map_or(0, |section| section.replayed);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (seen, replayed)
}

on_both!(a_replay_gives_the_streamed_bytes_at_the_padded_shape, async |device: Device| {
    let net = Arc::new(Net::random(7));
    let requests = SIZES.into_iter().enumerate();
    let unpadded = requests.clone().map(|(number, rows)| request(number, rows, 0)).collect();
    let padded = requests.map(|(number, rows)| request(number, rows, bucket(rows) - rows)).collect();
    let (replayed, rounds) = answers(&device, &net, unpadded, true).await;
    let (mut streamed, _) = answers(&device, &net, padded, false).await;
    assert_eq!(rounds, SIZES.len() as u64, "all rounds were replayed");
    streamed.iter_mut().zip(SIZES).for_each(|(answer, rows)| answer.truncate(rows * WIDTH));
    assert!(streamed.iter().flatten().any(|bits| *bits != 0));
    assert_eq!(replayed, streamed);
});
