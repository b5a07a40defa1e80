//! The conditions of ports: every option, groups over ports of any type, generics, names of one's own.
#![deny(missing_docs, missing_debug_implementations, unreachable_pub, clippy::all)]
#![allow(dead_code)]

use std::time::Duration;

use wakeline::{prelude::*, stream::Event};

#[derive(Message)]
struct Frame {
    #[event]
    decoded: Event,
}

#[derive(Ports)]
struct OnePorts {
    #[input(at_least = Self::FEW, at_most = 8, capacity = 8)]
    some: Input<u32>,
    #[input(batch = 8, within = "1s 500ms", since = Sent, capacity = 8)]
    batch: Input<Vec<u8>>,
    #[input(within = PATIENCE * 2, at_least = 1 << 2, since = Arrived)]
    patient: Inputs<Frame>,
    #[input(optional, done, event = "decoded")]
    optional: Input<Frame>,
    #[output(room = 2, capacity = 4)]
    room: Output<u32>,
    #[output(optional)]
    whatever: Output<u32>,
}

const PATIENCE: Duration = Duration::from_millis(5);

impl OnePorts {
    const FEW: usize = 4;
}

#[derive(Ports)]
#[ports(handles = Connections, sum(left, r#type) = Self::THREE, or_after = PATIENCE)]
#[ports(each(left = 2, many = N,))]
#[ports(sum(alone) = 2,)]
struct SeveralPorts<T: Message, const N: usize> {
    #[input(capacity = 4)]
    left: Input<T>,
    #[input(done)]
    r#type: Input<Option<Envelope<u8>>>,
    #[input]
    many: Inputs<Vec<T>>,
    #[input]
    alone: Input<u32>,
    #[input]
    other: Input<u32>,
}

impl<T: Message, const N: usize> SeveralPorts<T, N> {
    const THREE: usize = 3;
}

fn ports<P: Ports>() {}

pub(super) fn main() {
    ports::<OnePorts>();
    ports::<SeveralPorts<String, 3>>();

    // Names that a user chooses do not conflict with generated ones.
    let handles = 1;
    let plan = 2;
    #[derive(Ports)]
    #[ports(sum(plan, handles) = 2)]
    struct Inside {
        #[input]
        plan: Input<u32>,
        #[input]
        handles: Input<u32>,
    }
    ports::<Inside>();
    let _ = handles + plan;
}
