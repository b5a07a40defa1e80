//! Messages that identify themselves, and checks that report every wrong one.
//!
//! ```text
//!   origin | number | rounds left | path | words | fill value derived from these, to the end
//! ```
//!
//! So a message that is lost, duplicated, reordered, mixed up, partly copied, or not yet complete is detected by the
//! next check: in a kernel, on the host, or at the end against the plan. Kernels run on the thread of their simulation,
//! and errors are recorded per thread.

use std::{cell::RefCell, collections::BTreeMap, fmt};

use wakeline::{memory::Wrapped, prelude::*};

use super::plan;

pub(crate) type Message = Envelope<u32>;

/// The expected message is unknown.
pub(crate) const ANY: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) origin: u32,
    pub(crate) number: u32,
    pub(crate) laps: u32,
    pub(crate) path: u32,
}

/// The same in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) origin: u32,
    pub(crate) number: u32,
}

pub(crate) const NO_TAG: Tag = Tag { origin: ANY, number: ANY };

/// The message and its length are unknown: its header says both, and padding follows it.
pub(crate) const PADDED: Tag = Tag { origin: ANY, number: ANY - 1 };

fn length(data: &[u32], number: u32) -> usize {
    let words = data.get(4).map_or(data.len(), |words| *words as usize);
    if number == PADDED.number { words.min(data.len()) } else { data.len() }
}

#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) wrong: Vec<String>,
    /// The same, found by kernels: after a fault of another device they still run, on unwritten data.
    pub(crate) wrong_on_devices: Vec<String>,
    /// The operations of a run without a flow, call by call.
    pub(crate) done: Vec<String>,
    /// The messages at each sink, in order.
    pub(crate) seen: BTreeMap<usize, Vec<Head>>,
    /// The number of messages that each source has sent.
    pub(crate) sent: BTreeMap<usize, u32>,
    /// How many numbers each source has accepted from outside.
    pub(crate) accepted: BTreeMap<usize, u32>,
    /// User memory that must be returned.
    pub(crate) wrapped: Vec<Wrapped<Vec<u32>>>,
    /// The last hint sent to each operator.
    pub(crate) hints: BTreeMap<usize, u64>,
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

pub(crate) fn world<R>(look: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(look)
}

pub(crate) fn wrong(what: String) {
    world(|world| world.wrong.push(what));
}

fn filled(head: Head, words: usize, at: usize) -> u32 {
    let Head { origin, number, laps, path } = head;
    let mut hash = 0x811c_9dc5_u32;
    for word in [origin, number, laps, path, words as u32, at as u32] {
        hash = (hash ^ word).wrapping_mul(0x0100_0193);
        hash ^= hash >> 15;
    }
    hash
}

pub(crate) fn write(data: &mut [u32], head: Head) {
    let words = data.len();
    data[..5].copy_from_slice(&[head.origin, head.number, head.laps, head.path, words as u32]);
    for (at, word) in data.iter_mut().enumerate().skip(5) {
        *word = filled(head, words, at);
    }
}

pub(crate) fn read(data: &[u32], who: impl fmt::Display, tag: Tag) -> Option<Head> {
    checked(data, tag).map_err(|what| wrong(format!("{who} finds {what}"))).ok()
}

fn read_in(kernel: &str, node: u32, data: &[u32], tag: Tag) -> Option<Head> {
    let found =
        |what| world(|world| world.wrong_on_devices.push(format!("`{kernel}` of operator {node} finds {what}")));
    checked(data, tag).map_err(found).ok()
}

fn checked(data: &[u32], tag: Tag) -> Result<Head, String> {
    let [origin, number, laps, path, words, rest @ ..] = data else {
        return Err(format!("a message of {} words", data.len()));
    };
    let head = Head { origin: *origin, number: *number, laps: *laps, path: *path };
    let spoilt = rest.iter().enumerate().position(|(at, word)| *word != filled(head, data.len(), at + 5));
    if *words as usize != data.len() || spoilt.is_some() {
        let from = spoilt.map_or(4, |at| at + 5);
        return Err(format!("wrong data from word {from} of {}: {data:x?}", data.len()));
    }
    if tag.origin != ANY && (tag.origin, tag.number) != (head.origin, head.number) {
        return Err(format!("{head:?} with the metadata of another: {tag:?}"));
    }
    Ok(head)
}

/// How an operator changes a message: it passes it, or it sends it through one more round of a loop.
pub(crate) const PASS: u32 = 0;
pub(crate) const ROUND: u32 = 1;
pub(crate) const COUNTED_ROUND: u32 = 2;

/// The message after this node.
pub(crate) fn step_on(head: Head, node: usize, mark: u32) -> Head {
    match mark {
        PASS => Head { path: plan::passed(head.path, node), ..head },
        COUNTED_ROUND => Head { laps: head.laps.wrapping_sub(1), ..head },
        _ => head,
    }
}

#[kernel]
pub(crate) fn create(data: &mut [u32], origin: u32, number: u32, laps: u32, path: u32) {
    write(data, Head { origin, number, laps, path });
}

#[kernel]
pub(crate) fn step(data: &mut [u32], node: u32, mark: u32, origin: u32, number: u32) {
    let words = length(data, number);
    let data = &mut data[..words];
    if let Some(head) = read_in("step", node, data, Tag { origin, number }) {
        write(data, step_on(head, node as usize, mark));
    }
}

#[kernel]
pub(crate) fn look(data: &[u32], node: u32, origin: u32, number: u32) {
    read_in("look", node, &data[..length(data, number)], Tag { origin, number });
}

#[kernel]
pub(crate) fn transfer(from: &[u32], to: &mut [u32], node: u32, mark: u32, origin: u32, number: u32) {
    let words = length(from, number);
    if let Some(head) = read_in("transfer", node, &from[..words], Tag { origin, number }) {
        write(&mut to[..words], step_on(head, node as usize, mark));
    }
}

#[kernel]
pub(crate) fn tally(data: &[u32], node: u32, origin: u32, number: u32) {
    if let Some(head) = read_in("tally", node, data, Tag { origin, number }) {
        seen(node as usize, head);
    }
}

pub(crate) fn seen(node: usize, head: Head) {
    world(|world| world.seen.entry(node).or_default().push(head));
}
