//! wakeline: an ingress, three operators with a kernel each, as a user would write them, and a sink on the host.

use std::sync::{Arc, Mutex, PoisonError};

use futures::executor::block_on;
use tokio::runtime::Runtime;
use wakeline::{
    CompletionMode, Ingress,
    kernel::Grid,
    operator::{MapPorts, map_with, sink_with, with_state},
    prelude::*,
};

use crate::{
    ELEMENTS, KERNELS, NANOSECONDS, THREADS, clock,
    feed::{Outcome, Plan, Seen, Sender, feed},
    work::work,
};

type Message = Envelope<u64>;

fn stage() -> impl Operator<Ports = MapPorts<Message, Message>> {
    map_with(async |mut data: Message, cx: &mut Cx| {
        let grid = Grid::blocks([1, 1, 1]).threads([THREADS, 1, 1]);
        work::launch_with(grid, cx.stream()?, &mut data, NANOSECONDS)?;
        Ok(data)
    })
}

fn flow(device: &Device, mode: CompletionMode, seen: &Arc<Mutex<Seen>>) -> (Flow, Ingress<Message>) {
    let mut flow = Flow::new("paced");
    flow.set_completion_mode(mode);
    let sink =
        sink_with(with_state(seen.clone(), async |seen: &mut Arc<Mutex<Seen>>, message: Message, _cx: &mut Cx| {
            let data = message.read().await?;
            seen.lock().unwrap_or_else(PoisonError::into_inner).arrived(data[0], data[1]);
            Ok(())
        }));
    let sink = flow.add("sink", sink);
    let hub = HubOptions::bounded(2).envelopes(4);
    let mut to = sink.input;
    for at in (0..KERNELS).rev() {
        let stage = flow.add(format!("stage {at}"), stage()).on(device);
        flow.connect_with(stage.output, to, hub);
        to = stage.input;
    }
    let ingress = flow.ingress_with("feed", to, hub.envelope_bytes(ELEMENTS * size_of::<u64>()));
    (flow, ingress)
}

async fn send(ingress: &Ingress<Message>, number: u64) -> Result<()> {
    let mut message = ingress.blank::<u64>().await?;
    message.set_len(ELEMENTS)?;
    let data = message.write().await?;
    (data[0], data[1]) = (number, clock::now());
    Ok(ingress.send(message).await?)
}

pub(crate) fn pass(runtime: &Runtime, device: &Device, mode: CompletionMode, plan: &Plan, outcome: &mut Outcome) {
    let all: Vec<_> = (0..plan.flows).map(|_| Arc::new(Mutex::new(Seen::new()))).collect();
    let _inside = runtime.enter();
    let (mut senders, mut running) = (Vec::<Sender>::new(), Vec::new());
    for seen in &all {
        let (flow, ingress) = flow(device, mode, seen);
        running.push(flow.spawn().expect("a valid flow"));
        // There is one when the flow runs: starting it is not measured.
        drop(block_on(ingress.blank::<u64>()).expect("a flow that runs"));
        senders.push(Box::new(move |number| block_on(send(&ingress, number)).expect("a flow that runs")));
    }
    let fed = feed(plan, || (), senders);
    for running in running {
        runtime.block_on(running).expect("a flow that ends");
    }
    let seen = all.into_iter().map(|seen| {
        let seen = Arc::into_inner(seen).expect("the flow has ended");
        seen.into_inner().unwrap_or_else(PoisonError::into_inner)
    });
    outcome.add(plan, fed, seen);
}
