//! Ports of every form: options, generics, visibility, attributes, inside a function.
#![deny(missing_docs, missing_debug_implementations, unreachable_pub, clippy::all)]
#![allow(clippy::non_minimal_cfg, reason = "a field that is always there")]
#![allow(dead_code)]

use wakeline::prelude::*;

#[derive(Ports)]
struct UpperPorts {
    /// Lines to convert.
    #[input(capacity = Self::ROOM)]
    lines: Input<Envelope<u8>>,
    #[output(capacity = 2, envelope_bytes = 1 << 20, envelopes = 3,)]
    pub(crate) shouted: Output<Envelope<u8>>,
    #[cfg(any())]
    #[input]
    never: NoSuchType,
    #[cfg(all())]
    #[input]
    r#type: Input<u32>,
}

impl UpperPorts {
    const ROOM: usize = 4;
}

#[derive(Ports)]
#[ports(handles = Connections)]
struct Generic<T: Message = u32, const N: usize = 2>
where
    Option<T>: Clone,
{
    #[input(capacity = N)]
    input: Input<T>,
    #[output]
    output: Output<T>,
}

#[derive(Ports)]
struct Linked<T: wakeline::memory::Plain, S: Clone + Send + Sync + 'static> {
    #[produce(by_hand)]
    blanks: Produce<T, S>,
    #[consume(optional, by_hand)]
    done: Consume<T, S>,
    #[peek]
    shown: Peek<T>,
    /// With a structure of its own type.
    #[modify(optional)]
    changed: Modify<u8, &'static str>,
}

fn links(ports: LinkedHandles<f32, u8>, flow: &mut Flow, hub: &ChunkHub<f32, u8>) {
    flow.link(ports.blanks, hub);
    hub.flow_to(&[&ports.done, &ports.shown, &ports.changed]).unwrap();
}

#[derive(Ports)]
struct Nothing;

#[derive(Ports)]
struct EmptyPorts {}

fn is_plain<T: Copy + std::fmt::Debug + Send + Sync + 'static>() {}

fn fields(upper: UpperHandles, generic: Connections<String>, flow: &mut Flow) {
    let UpperHandles { lines: _, shouted: _, r#type: _ } = upper;
    flow.connect(generic.output, generic.input);
}

pub(super) fn main() {
    #[derive(Ports)]
    struct Inside {
        #[input]
        input: Input<u32>,
    }

    is_plain::<UpperHandles>();
    is_plain::<Connections<String, 3>>(); // `Copy`, although `String` is not
    is_plain::<NothingHandles>();
    is_plain::<EmptyHandles>();
    is_plain::<InsideHandles>();
    is_plain::<<Inside as Ports>::Handles>();
}
