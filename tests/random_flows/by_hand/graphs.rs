//! Graphs over the buffers of a [`Hand`]: built node by node, captured, captured within another capture or on another
//! thread, and abandoned half way; launched while slices of host memory are held, and dropped while launches run.
//!
//! A graph has exclusive use of its buffers until it is dropped. Their expected contents are known from the calls,
//! launches included.

use wakeline::{
    Stream,
    graph::{Exec, Graph},
    prelude::*,
};

use super::{
    super::{data::wrong, operators::patiently},
    Hand, Holds, Slot, WORDS, paint,
};

/// An exec, the buffers of its nodes, and the effect of a launch on them.
pub(super) struct Built {
    exec: Exec,
    slots: Vec<Slot>,
    nodes: Vec<Does>,
}

/// The operation of a node; buffers are given by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Copy(usize, usize),
    Fill(usize, u32),
    Paint(usize, u32),
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Builder,
    Capture,
    Nested,
    Thread,
    GivenUp,
}

impl Does {
    fn is_about(self, at: usize) -> bool {
        match self {
            Self::Copy(from, to) => from == at || to == at,
            Self::Fill(to, _) | Self::Paint(to, _) => to == at,
        }
    }

    fn apply(self, holds: &mut [Holds]) {
        match self {
            Self::Copy(from, to) => holds[to] = holds[from],
            Self::Fill(to, value) => holds[to] = Holds::Flat(value),
            Self::Paint(to, value) => holds[to] = Holds::Painted(value),
        }
    }

    fn enqueue(self, stream: &Stream, slots: &mut [Slot]) -> Result<()> {
        match self {
            Self::Copy(from, to) => {
                let [from, to] = slots.get_disjoint_mut([from, to]).unwrap();
                stream.copy(&from.buffer, &mut to.buffer)
            }
            Self::Fill(to, value) => stream.fill(&mut slots[to].buffer, value),
            Self::Paint(to, value) => paint::launch(stream, &mut slots[to].buffer, value),
        }
    }
}

impl Hand {
    pub(super) fn graph(&mut self) -> Result<()> {
        if self.shelf(|shelf| shelf.graphs.len()) > 2 {
            return Ok(());
        }
        let device = self.device();
        let fits = |slot: &Slot| *slot.buffer.device() == device;
        let mut slots: Vec<Slot> = (0..=self.dice.between(1, 3)).filter_map(|_| self.take(fits)).collect();
        let nodes = self.nodes(&slots);
        if nodes.is_empty() {
            slots.into_iter().for_each(|slot| self.put(slot));
            return Ok(());
        }
        let way = match self.dice.up_to(7) {
            0..=2 => Way::Builder,
            3 | 4 => Way::Capture,
            5 => Way::Nested,
            6 => Way::Thread,
            _ => Way::GivenUp,
        };
        let numbers: Vec<_> = slots.iter().map(|slot| slot.number).collect();
        self.note(format!("makes a graph of buffers {numbers:?}: {way:?}, {nodes:?}"));
        let made = match way {
            Way::Builder => built(&device, &mut slots, &nodes),
            Way::Capture => captured(&device, &mut slots, &nodes, Ok(())),
            Way::Nested => {
                let mut own = Buffer::<u32>::new(&device, WORDS)?;
                let outer = Graph::capture(&device, |capture| {
                    capture.stream().fill(&mut own, 1)?;
                    captured(&device, &mut slots, &nodes, Ok(()))
                });
                outer.map(|(_, inner)| inner)
            }
            Way::Thread => {
                let capture = || captured(&device, &mut slots, &nodes, Ok(()));
                std::thread::scope(|scope| scope.spawn(capture).join().unwrap())
            }
            Way::GivenUp => {
                let given_up = captured(&device, &mut slots, &nodes, Err("given up".into()));
                slots.into_iter().for_each(|slot| self.put(slot));
                return match given_up {
                    Err(error) if error.is_device_lost() || error.is_out_of_memory() => Err(error),
                    _ => Ok(()),
                };
            }
        };
        let exec = made?.instantiate()?;
        self.shelf(|shelf| shelf.graphs.push(Built { exec, slots, nodes }));
        Ok(())
    }

    /// Random operations for a graph: no copy from an empty buffer, and at most one copy to each host buffer.
    fn nodes(&mut self, slots: &[Slot]) -> Vec<Does> {
        let (mut nodes, mut holds) = (Vec::new(), slots.iter().map(|slot| slot.holds).collect::<Vec<_>>());
        if slots.is_empty() {
            return nodes;
        }
        for _ in 0..self.dice.up_to(5) {
            let (one, other) = (self.dice.up_to(slots.len() - 1), self.dice.up_to(slots.len() - 1));
            let is_used = nodes.iter().any(|node: &Does| node.is_about(other));
            // A copy to the host and back would need an operation of the host in between.
            let came =
                slots[one].buffer.is_host() && nodes.iter().any(|node| matches!(node, Does::Copy(_, to) if *to == one));
            let node = match self.dice.up_to(4) {
                0 if !slots[other].buffer.is_host() => Does::Fill(other, self.value()),
                1 if !slots[other].buffer.is_host() => Does::Paint(other, self.value()),
                _ if one != other
                    && holds[one] != Holds::Nothing
                    && !came
                    && !(is_used && slots[other].buffer.is_host()) =>
                {
                    Does::Copy(one, other)
                }
                _ => continue,
            };
            node.apply(&mut holds);
            nodes.push(node);
        }
        nodes
    }

    fn take_graph(&mut self) -> Option<Built> {
        let many = self.shelf(|shelf| shelf.graphs.len());
        let at = self.dice.up_to(many.checked_sub(1)?);
        Some(self.shelf(|shelf| shelf.graphs.swap_remove(at)))
    }

    /// Launches a graph while all existing slices of host memory are held, across the launch and after it.
    pub(super) async fn launch(&mut self) -> Result<()> {
        let Some(mut built) = self.take_graph() else { return Ok(()) };
        let stream = self.stream(Some(&built.exec.graph().device().clone()))?;
        let patience = self.dice.up_to(12) as u32;
        self.note(format!("launches a graph on `{}`", stream.name()));
        let Built { exec, slots, nodes } = &mut built;
        let mut after: Vec<_> = slots.iter().map(|slot| slot.holds).collect();
        nodes.iter().for_each(|node| node.apply(&mut after));
        let mut lent = Vec::new();
        for (slot, after) in slots.iter_mut().zip(&mut after) {
            let Slot { number, buffer, holds } = slot;
            match self.dice.up_to(2) {
                _ if !buffer.is_host() => {}
                0 => {
                    let seen = buffer.as_slice().ok();
                    lent.extend(seen.map(|seen| (*number, *holds, seen)));
                }
                1 => {
                    let value = self.dice.up_to(u32::MAX as usize) as u32;
                    if let Ok(mine) = buffer.as_mut_slice() {
                        mine.fill(value);
                        (*holds, *after) = (Holds::Flat(value), Holds::Flat(value));
                        lent.push((*number, *holds, &*mine));
                    }
                }
                _ => {}
            }
        }
        exec.launch(&stream)?;
        patiently(patience, stream.completed()).await.transpose()?;
        for (number, holds, seen) in lent {
            super::look_at("a slice held across a launch", number, holds, seen).into_iter().for_each(wrong);
        }
        slots.iter_mut().zip(after).for_each(|(slot, after)| slot.holds = after);
        self.shelf(|shelf| shelf.graphs.push(built));
        Ok(())
    }

    /// Drops a graph, possibly during its launches: its buffers return to the shelf.
    pub(super) fn take_apart(&mut self) {
        let Some(Built { slots, .. }) = self.take_graph() else { return };
        self.note("drops a graph".into());
        slots.into_iter().for_each(|slot| self.put(slot));
    }
}

fn built(device: &Device, slots: &mut [Slot], nodes: &[Does]) -> Result<Graph> {
    let mut graph = Graph::builder(device)?;
    for node in nodes {
        graph.add(&[], |stream| node.enqueue(stream, slots))?;
    }
    graph.build()
}

/// `end`: the result of the capture's closure, after everything is recorded.
fn captured(device: &Device, slots: &mut [Slot], nodes: &[Does], end: Result<()>) -> Result<Graph> {
    let captured = Graph::capture(device, |capture| {
        for node in nodes {
            if let Does::Copy(_, to) = node
                && slots[*to].buffer.is_host()
            {
                capture.output(&mut slots[*to].buffer)?;
            }
            node.enqueue(capture.stream(), slots)?;
        }
        end
    });
    captured.map(|(graph, ())| graph)
}
