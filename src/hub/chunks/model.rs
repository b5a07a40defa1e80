//! Tests the state machine against a model, with any links, places, numbers of envelopes and orders of events.
//!
//! Every link is a task that runs only when it was woken. Copies and returns of envelopes take any amount of
//! time. For each chunk the model knows its data and which links have changed it. When no task is awake any more, all
//! work must be done: a lost wake-up, or chunks that block each other, would leave chunks behind.
//!
//! Links may be added late, when chunks already exist or the producers are dropped; links may be removed; and the flow
//! of data may be redirected. In these cases the model allocates more envelopes where the hub would. If all links exist
//! from the start, there is no memory for that and none is needed: every chunk gets through, even if links stop waiting
//! and poll again later.
//!
//! The device of a place may be lost at any time: its links end, and exactly the chunks without an intact copy
//! elsewhere are lost.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
};

use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::{
    roles::{LinkName, Role},
    state::{Actions, Blanks, ChunkHubState, Grant, LinkId, LocationId, Move, PollRequest, VISITS},
};
use crate::hub::queue::Answer;

#[derive(Debug)]
struct Token {
    place: LocationId,
    /// It belongs to the hub, and was not sent by a producer.
    own: bool,
    data: Cell<u64>,
    /// The places that its data were copied from, as bits: the device of each was involved in the content.
    via: Cell<u64>,
    /// One of these was lost before its copy was complete, and the host knows.
    failed: Cell<bool>,
}

impl Token {
    fn blank(place: LocationId) -> Held {
        Rc::new(Self { place, own: true, data: Cell::default(), via: Cell::default(), failed: Cell::default() })
    }

    fn of_user(place: LocationId) -> Held {
        Rc::new(Self { place, own: false, data: Cell::default(), via: Cell::default(), failed: Cell::default() })
    }
}

thread_local! {
    /// The state is in use, under the hub's lock.
    static LOCKED: Cell<bool> = const { Cell::new(false) };
}

impl Drop for Token {
    fn drop(&mut self) {
        assert!(!LOCKED.get() || std::thread::panicking(), "an envelope is dropped under the hub's lock");
    }
}

/// Runs `does` with the state locked, as far as envelopes can tell.
fn locked<R>(does: impl FnOnce() -> R) -> R {
    LOCKED.set(true);
    let done = does();
    LOCKED.set(false);
    done
}

type Held = Rc<Token>;

/// The free envelopes, and the number of all.
struct Pools(Vec<Vec<Held>>, Vec<usize>);

impl Blanks<Held> for Pools {
    fn take(&mut self, place: LocationId) -> Option<Held> {
        self.0[place].pop()
    }

    fn count(&self, place: LocationId) -> usize {
        self.0[place].len()
    }

    fn total(&self, place: LocationId) -> usize {
        self.1[place]
    }

    fn places(&self) -> usize {
        self.0.len()
    }

    fn is_own(&self, _place: LocationId, envelope: &Held) -> bool {
        envelope.own
    }

    fn has_failed(&self, envelope: &Held) -> bool {
        envelope.failed.get()
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Task {
    id: LinkId,
    role: Role,
    place: LocationId,
    woken: Arc<Flag>,
    has: Option<Grant<Held, ()>>,
    /// The data when it was given.
    data: u64,
    left: usize,
    gone: bool,
    /// It stopped waiting, and polls again later.
    paused: bool,
}

#[derive(Default)]
struct Known {
    data: u64,
    modified: Vec<LinkId>,
    peeked: HashSet<LinkId>,
    consumed: bool,
}

struct World {
    state: ChunkHubState<Held, ()>,
    pools: Pools,
    tasks: Vec<Task>,
    moves: Vec<Move<Held>>,
    /// Envelopes that are being returned.
    homing: Vec<Held>,
    chunks: HashMap<u64, Known>,
    consumed: Vec<u64>,
    made: u64,
    rng: StdRng,
    consumes: bool,
    /// How often the flow of data is still to be switched.
    switches: usize,
    switched: bool,
    /// Reading links that are still to be added.
    late: Vec<(Role, LocationId)>,
    chunks_each: usize,
    /// Envelopes that were allocated in addition to the initial ones.
    spares: usize,
    /// The place whose device is still to be lost, and the one whose device is lost.
    loses: Option<LocationId>,
    lost: Option<LocationId>,
    /// Chunks that had no copy elsewhere when it was lost.
    may_be_lost: HashSet<u64>,
    commits: bool,
    pauses: bool,
    sends: bool,
    /// The number of links that are still to be added or removed.
    changes: usize,
    /// There is memory for one more envelope.
    has_memory: bool,
    /// A producer's chunk was refused: there were too few envelopes for that many.
    refused: Option<usize>,
}

#[derive(Clone, Debug, Default)]
struct Setup {
    envelopes: Vec<usize>,
    capacity: usize,
    links: Vec<(Role, LocationId)>,
    chunks: usize,
    switches: usize,
    /// Reading links are added when chunks are there.
    late: bool,
    loses: Option<LocationId>,
    commits: bool,
    /// Links stop waiting, and poll again later.
    pauses: bool,
    /// Producers send envelopes of their own, too.
    sends: bool,
    /// The number of links that are added or removed.
    changes: usize,
    seed: u64,
}

impl Setup {
    /// Whether one more envelope could help: a link is added late, or is given no chunk any more.
    fn may_need_more(&self) -> bool {
        self.late || self.switches > 0 || self.loses.is_some() || self.changes > 0
    }
}

impl World {
    fn new(setup: &Setup) -> Self {
        let blanks = |(place, count): (usize, &usize)| (0..*count).map(|_| Token::blank(place)).collect();
        let is_late = |(role, _): &(Role, LocationId)| setup.late && *role != Role::Produce;
        let (late, links): (Vec<_>, Vec<_>) = setup.links.iter().partition(|link| is_late(link));
        let mut world = Self {
            tasks: Vec::new(),
            state: ChunkHubState::new(setup.capacity),
            pools: Pools(setup.envelopes.iter().enumerate().map(blanks).collect(), setup.envelopes.clone()),
            moves: Vec::new(),
            homing: Vec::new(),
            chunks: HashMap::new(),
            consumed: Vec::new(),
            made: 0,
            rng: StdRng::seed_from_u64(setup.seed),
            consumes: setup.links.iter().any(|(role, _)| *role == Role::Consume),
            switches: setup.switches,
            switched: setup.may_need_more(),
            late,
            chunks_each: setup.chunks,
            spares: 0,
            loses: setup.loses,
            lost: None,
            may_be_lost: HashSet::new(),
            commits: setup.commits,
            pauses: setup.pauses,
            sends: setup.sends,
            changes: setup.changes,
            has_memory: setup.may_need_more() || setup.sends,
            refused: None,
        };
        links.into_iter().for_each(|link| world.link(link));
        world
    }

    fn link(&mut self, (role, place): (Role, LocationId)) {
        let id = self.act(|state, _, out| {
            if role == Role::Produce {
                state.wake_all(out);
            }
            state.link(role, place, None).0
        });
        self.tasks.push(Task {
            id,
            role,
            place,
            woken: Arc::new(Flag(AtomicBool::new(true))),
            has: None,
            data: 0,
            left: self.chunks_each,
            gone: false,
            paused: false,
        });
    }

    /// Adds one of the late links. Returns false if all are there.
    fn link_late(&mut self) -> bool {
        if self.late.is_empty() {
            return false;
        }
        let at = self.rng.random_range(0..self.late.len());
        let link = self.late.swap_remove(at);
        self.link(link);
        true
    }

    fn act<R>(&mut self, act: impl FnOnce(&mut ChunkHubState<Held, ()>, &mut Pools, &mut Actions<Held>) -> R) -> R {
        let mut out = Actions::default();
        let Self { state, pools, .. } = self;
        let done = locked(|| {
            state.lose_failed(pools);
            let done = act(state, pools, &mut out);
            state.settle(pools, &mut out);
            done
        });
        self.carry_out(out);
        done
    }

    fn carry_out(&mut self, out: Actions<Held>) {
        self.homing.extend(out.freed);
        self.moves.extend(out.moves);
        out.wakes.into_iter().for_each(|waker| waker.wake_by_ref());
    }

    /// Makes one step, of any party. Returns false if none is possible.
    fn step(&mut self) -> bool {
        if self.switches > 0 && self.rng.random_ratio(1, 50) {
            self.switch();
            return true;
        }
        if self.rng.random_ratio(1, 50) && self.link_late() {
            return true;
        }
        if self.rng.random_ratio(1, 20)
            && let Some(place) = self.loses.take()
        {
            self.lose(place);
            return true;
        }
        if self.changes > 0 && self.rng.random_ratio(1, 12) {
            self.changes -= 1;
            self.change();
            return true;
        }
        if self.pauses && self.rng.random_ratio(1, 8) {
            self.pause();
        }
        if self.rng.random_ratio(1, 8) {
            let paused: Vec<_> = (0..self.tasks.len()).filter(|at| self.tasks[*at].paused).collect();
            paused.choose(&mut self.rng).into_iter().for_each(|at| self.resume(*at));
        }
        let mut can: Vec<usize> = (0..self.tasks.len())
            .filter(|at| {
                let task = &self.tasks[*at];
                !task.gone && !task.paused && (task.has.is_some() || task.woken.0.load(Ordering::Relaxed))
            })
            .collect();
        let tasks = self.tasks.len();
        can.extend((0..self.moves.len()).map(|at| tasks + at));
        let moves = self.moves.len();
        can.extend((0..self.homing.len()).map(|at| tasks + moves + at));
        let Some(at) = can.choose(&mut self.rng).copied() else {
            if self.link_late() || self.resume_all() {
                return true;
            }
            let left = self.switches > 0;
            if left {
                self.switch();
            }
            return left;
        };
        if at < tasks {
            self.run(at);
        } else if at < tasks + moves {
            let Move { number, from, to, source, blank } = self.moves.swap_remove(at - tasks);
            assert_eq!((source.place, blank.place), (from, to));
            assert_eq!(Rc::strong_count(&blank), 1, "a blank has no other owner");
            blank.data.set(source.data.get());
            blank.via.set(source.via.get() | 1 << from);
            blank.failed.set(source.failed.get());
            let fails = self.lost.is_some_and(|lost| lost == from || lost == to);
            let (arrival, blank) = if fails { (None, Some(blank)) } else { (Some(blank), None) };
            self.homing.extend(blank);
            self.act(|state, _, out| state.arrived(number, to, source, arrival, out));
        } else {
            let home = self.homing.swap_remove(at - tasks - moves);
            // A clone of an envelope that others have does not count.
            if let Some(token) = Rc::into_inner(home).filter(|token| token.own) {
                let place = token.place;
                self.act(|_, pools, _| pools.0[place].push(Token::blank(place)));
            }
        }
        true
    }

    /// Makes a link that has nothing stop waiting, even if it was woken.
    fn pause(&mut self) {
        let idle = |task: &Task| !task.gone && !task.paused && task.has.is_none();
        let idle: Vec<_> = (0..self.tasks.len()).filter(|at| idle(&self.tasks[*at])).collect();
        if let Some(at) = idle.choose(&mut self.rng).copied() {
            let id = self.tasks[at].id;
            self.tasks[at].paused = true;
            self.act(|state, _, _| state.rest(id));
        }
    }

    fn resume(&mut self, at: usize) {
        self.tasks[at].paused = false;
        self.tasks[at].woken.0.store(true, Ordering::Relaxed);
    }

    /// Nothing else can make progress. While one consumer waits, the others need not poll again, if there is memory.
    fn resume_all(&mut self) -> bool {
        let asks = |task: &Task| task.role == Role::Consume && !task.gone && !task.paused;
        let spared = self.has_memory && self.tasks.iter().any(asks);
        let rests = |task: &Task| task.paused && !(spared && task.role == Role::Consume);
        let paused: Vec<_> = (0..self.tasks.len()).filter(|at| rests(&self.tasks[*at])).collect();
        paused.iter().for_each(|at| self.resume(*at));
        !paused.is_empty()
    }

    /// Adds a link, or removes one that has nothing and is not the last that reads or consumes.
    fn change(&mut self) {
        if self.rng.random() {
            let role = *[Role::Peek, Role::Modify, Role::Consume].choose(&mut self.rng).unwrap();
            let place = self.rng.random_range(0..self.pools.1.len());
            return self.link((role, place));
        }
        let there = |roles: &[Role]| self.tasks.iter().filter(|task| !task.gone && roles.contains(&task.role)).count();
        let (readers, consumers) = (there(&[Role::Peek, Role::Modify, Role::Consume]), there(&[Role::Consume]));
        let may_proceed = |task: &Task| {
            let last = readers < 2 || (task.role == Role::Consume && consumers < 2);
            !task.gone && task.has.is_none() && task.role != Role::Produce && !last
        };
        let can: Vec<_> = (0..self.tasks.len()).filter(|at| may_proceed(&self.tasks[*at])).collect();
        if let Some(at) = can.choose(&mut self.rng).copied() {
            let id = self.tasks[at].id;
            (self.tasks[at].gone, self.tasks[at].paused) = (true, false);
            self.act(|state, _, _| state.retire(id));
            self.act(|state, _, _| state.unlink(id));
        }
    }

    /// Loses the device of that place, with some of the copies from there incomplete. Its links notice, and end once
    /// they have dropped what they have.
    fn lose(&mut self, place: LocationId) {
        self.lost = Some(place);
        let alone = |task: &&Task| !matches!(task.role, Role::Peek | Role::Produce);
        let given: Vec<_> = self.tasks.iter().filter(alone).filter_map(|task| task.has.as_ref()).collect();
        let given: Vec<_> = given.into_iter().map(|has| (has.number, has.envelope.clone().unwrap())).collect();
        let lie = self.chunks.keys().flat_map(|number| self.copies(*number));
        for token in lie.chain(given.iter().map(|(_, token)| token.clone())).collect::<Vec<_>>() {
            token.failed.set(token.via.get() & 1 << place != 0 && self.rng.random());
        }
        let is_sound = |token: &Held| token.place != place && !token.failed.get();
        let held: HashSet<u64> = given.iter().filter(|(_, token)| is_sound(token)).map(|(number, _)| *number).collect();
        let open = self.chunks.iter().filter(|(number, known)| !known.consumed && !held.contains(number));
        let elsewhere = |number: u64| self.copies(number).iter().any(is_sound);
        self.may_be_lost = open.map(|(number, _)| *number).filter(|number| !elsewhere(*number)).collect();
        // As the device reports it: nothing is settled.
        let mut out = Actions::default();
        self.state.lose(place, &mut out);
        assert!(out.moves.is_empty() && out.freed.is_empty());
        self.carry_out(out);
    }

    /// Switches the flow of data to other links, and the last time to all of them.
    fn switch(&mut self) {
        self.switches -= 1;
        let some = self.tasks.iter().map(|task| LinkName::Standalone(task.id.0)).filter(|_| self.rng.random());
        let flow = (self.switches > 0).then(|| some.collect());
        self.act(|state, _, _| state.set_flow(flow));
    }

    fn run(&mut self, at: usize) {
        let id = self.tasks[at].id;
        if let Some(grant) = self.tasks[at].has.take() {
            return self.end(at, grant);
        }
        self.tasks[at].woken.0.store(false, Ordering::Relaxed);
        if self.tasks[at].left == 0 || self.lost == Some(self.tasks[at].place) {
            self.tasks[at].gone = true;
            return self.act(|state, _, _| {
                state.rest(id);
                state.unlink(id);
            });
        }
        let waker = Arc::new(Waker::from(self.tasks[at].woken.clone()));
        let mut out = Actions::default();
        let blank = self.tasks[at].role != Role::Produce || !self.sends || self.rng.random();
        let asks = PollRequest { blank, stays: self.rng.random() };
        let asked = self.state.poll(id, asks, &waker, Some(&waker), &mut self.pools, &mut out).unwrap();
        self.carry_out(out);
        match asked {
            Answer::Never => self.tasks[at].left = 0,
            Answer::Wait => {
                if self.tasks[at].role == Role::Produce
                    && blank
                    && let Some(too_few) = self.state.too_few(0, &self.pools)
                {
                    // The link gets an error, which another link may resolve.
                    self.refused = Some(too_few.chunks);
                    self.tasks[at].paused = true;
                    return self.act(|state, _, _| state.rest(id));
                }
                if blank && self.state.claim_spare(id) {
                    if !self.has_memory {
                        // The link gets an error, and polls again.
                        self.tasks[at].paused = true;
                        return self.act(|state, _, _| {
                            state.spare_came();
                            state.rest(id);
                        });
                    }
                    let place = self.tasks[at].place;
                    self.spares += 1;
                    self.pools.1[place] += 1;
                    self.pools.0[place].push(Token::blank(place));
                    self.act(|state, _, _| state.spare_came());
                }
                return;
            }
            Answer::Yes => {}
        }
        // The task was offered something. It might also be waiting for something else, and then polls again.
        self.tasks[at].woken.0.store(true, Ordering::Relaxed);
        if asked == Answer::Yes && (self.commits || self.rng.random_ratio(3, 4)) {
            let Some(grant) = self.act(|state, pools, _| state.take(id, blank, pools)) else {
                assert!(self.lost.is_some(), "it was there");
                return;
            };
            if grant.lost.is_some() {
                return self.given_loss(at, &grant);
            }
            self.given(at, &grant);
            self.tasks[at].has = Some(grant);
        }
    }

    /// The link takes the loss of a chunk in place of the chunk.
    fn given_loss(&mut self, at: usize, grant: &Grant<Held, ()>) {
        assert!(self.may_be_lost.contains(&grant.number), "it had a copy elsewhere");
        let known = self.chunks.get_mut(&grant.number).unwrap();
        assert!(!known.consumed, "a consumed chunk is not given to any link");
        if self.tasks[at].role == Role::Consume {
            known.consumed = true;
            self.consumed.push(grant.number);
        }
        self.used(at);
    }

    fn given(&mut self, at: usize, grant: &Grant<Held, ()>) {
        let (id, role, place) = (self.tasks[at].id, self.tasks[at].role, self.tasks[at].place);
        let Some(envelope) = &grant.envelope else { return assert!(self.sends && role == Role::Produce) };
        assert_eq!(envelope.place, place);
        assert!(!envelope.failed.get(), "no link is given a copy that is known to be lost");
        if role != Role::Peek {
            assert_eq!(Rc::strong_count(envelope), 1, "{role:?} has exclusive access");
        }
        self.tasks[at].data = envelope.data.get();
        if role == Role::Produce {
            return;
        }
        let known = &self.chunks[&grant.number];
        assert!(!known.consumed, "a consumed chunk is not given to any link");
        assert_eq!(envelope.data.get(), known.data, "all copies are equal, to what was committed last");
        let others = self.tasks.iter().filter(|task| task.id != id);
        for other in others.filter(|task| task.has.as_ref().is_some_and(|has| has.number == grant.number)) {
            let shared =
                other.role == Role::Peek && (role == Role::Peek || (role == Role::Consume && other.place != place));
            assert!(shared || other.role == Role::Produce, "{role:?} beside {:?}", other.role);
        }
        if self.consumes && !self.switched {
            let before = |role: Role| self.tasks.iter().filter(move |task| task.role == role);
            match role {
                Role::Modify => {
                    assert!(!known.modified.contains(&id), "modified once");
                    let earlier = before(Role::Modify).take_while(|task| task.id != id);
                    assert!(
                        earlier.into_iter().all(|task| known.modified.contains(&task.id)),
                        "in the order of linking"
                    );
                }
                Role::Peek => assert!(!known.peeked.contains(&id), "seen once"),
                _ => {
                    assert!(before(Role::Peek).all(|task| known.peeked.contains(&task.id)), "seen by all before");
                    let earlier =
                        self.chunks.iter().filter(|(number, known)| **number < grant.number && !known.consumed);
                    let theirs = |number: u64| {
                        let has = |task: &&Task| task.has.as_ref().is_some_and(|has| has.number == number);
                        before(Role::Consume).any(|task| has(&task))
                    };
                    assert!(earlier.into_iter().all(|(number, _)| theirs(*number)), "the oldest first");
                }
            }
            if role != Role::Modify {
                assert!(before(Role::Modify).all(|task| known.modified.contains(&task.id)), "changed by all before");
            }
        }
        if role == Role::Peek {
            self.chunks.get_mut(&grant.number).unwrap().peeked.insert(id);
        }
    }

    fn end(&mut self, at: usize, grant: Grant<Held, ()>) {
        let (id, place) = (self.tasks[at].id, self.tasks[at].place);
        let Grant { number, envelope, .. } = grant;
        let envelope = envelope.unwrap_or_else(|| Token::of_user(place));
        // Nothing is committed where the device is lost.
        let commits = (self.commits || self.rng.random_ratio(4, 5)) && self.lost != Some(place);
        self.made += 1;
        let data = self.made;
        match self.tasks[at].role {
            Role::Produce if commits => {
                let returns = !envelope.own && self.rng.random();
                envelope.data.set(data);
                self.act(|state, _, _| state.produced(number, place, envelope, (), returns));
                assert!(self.chunks.insert(number, Known { data, ..Known::default() }).is_none());
                self.tasks[at].left -= 1;
            }
            Role::Produce => {
                self.homing.push(envelope);
                self.act(|state, _, _| state.unproduced(number));
            }
            Role::Modify if commits => {
                envelope.data.set(data);
                // Some overwrite all of it, so that the former content makes no difference.
                envelope.failed.set(envelope.failed.get() && self.rng.random());
                if envelope.failed.get() {
                    self.may_be_lost.insert(number);
                }
                let known = self.chunks.get_mut(&number).unwrap();
                known.data = data;
                known.modified.push(id);
                self.act(|state, _, out| state.modified(id, number, envelope, (), out));
                self.used(at);
            }
            Role::Modify => {
                let written = self.rng.random();
                if written {
                    envelope.data.set(data);
                    // The only copy stays as it was written.
                    let other = self.tasks[at].data;
                    let kept = self.copies(number).iter().any(|held| !held.failed.get() && held.data.get() == other);
                    let kept = kept || self.lost == Some(place);
                    self.chunks.get_mut(&number).unwrap().data = if kept { other } else { data };
                }
                self.act(|state, _, out| state.given_back(id, number, envelope, written, out));
            }
            Role::Consume if commits => {
                self.chunks.get_mut(&number).unwrap().consumed = true;
                self.consumed.push(number);
                self.act(|state, _, out| state.consumed(number, out));
                self.homing.push(envelope);
                self.used(at);
            }
            Role::Consume => self.act(|state, _, out| state.given_back(id, number, envelope, false, out)),
            Role::Peek => {
                assert_eq!(envelope.data.get(), self.tasks[at].data, "a chunk does not change during a peek");
                let unseen = !commits;
                if unseen {
                    self.chunks.get_mut(&number).unwrap().peeked.remove(&id);
                }
                self.act(|state, _, out| state.peeked(id, number, place, envelope, unseen, out));
                if !unseen {
                    self.used(at);
                }
            }
        }
    }

    /// In a hub whose chunks stay, links would never end by themselves.
    fn used(&mut self, at: usize) {
        if !self.consumes {
            self.tasks[at].left -= 1;
        }
    }

    fn copies(&self, number: u64) -> Vec<Held> {
        self.state.copies_of(number)
    }
}

/// A copy is lost after another copy was started from it, and the chunk has returned to its place by the time the
/// second copy arrives.
#[test]
fn the_source_of_a_copy_that_was_replaced_is_not_dropped_under_the_lock() {
    let links = vec![(Role::Produce, 0), (Role::Peek, 1), (Role::Peek, 2), (Role::Peek, 0)];
    let mut world = World::new(&Setup { envelopes: vec![2, 1, 1], capacity: 1, links, ..Setup::default() });
    let ids: Vec<_> = world.tasks.iter().map(|task| task.id).collect();
    let waker = Arc::new(Waker::noop().clone());
    let ask = |world: &mut World, id| {
        let asks = PollRequest { blank: true, stays: false };
        world.act(|state, pools, out| state.poll(id, asks, &waker, Some(&waker), pools, out));
    };
    let arrives = |world: &mut World, copy: Move<Held>| {
        let Move { number, to, source, blank, .. } = copy;
        world.act(|state, _, out| state.arrived(number, to, source, Some(blank), out));
    };
    let Grant { number, envelope, .. } = world.act(|state, pools, _| state.take(ids[0], true, pools)).unwrap();
    world.act(|state, _, _| state.produced(number, 0, envelope.unwrap(), (), false));
    ask(&mut world, ids[1]);
    let first = world.moves.pop().unwrap();
    arrives(&mut world, first);
    ask(&mut world, ids[2]);
    let late = world.moves.pop().unwrap();
    assert_eq!((late.from, late.to), (0, 2));
    world.act(|state, _, _| state.lose_copy(number, 0));
    world.homing.clear();
    ask(&mut world, ids[3]);
    let back = world.moves.pop().unwrap();
    assert_eq!((back.from, back.to), (1, 0));
    arrives(&mut world, back);
    let freed = Rc::downgrade(&late.source);
    arrives(&mut world, late);
    assert!(world.homing.iter().any(|home| Rc::as_ptr(home) == freed.as_ptr()), "it is freed later");
}

fn setups(consumes: bool) -> impl Strategy<Value = Setup> {
    let role = prop_oneof![Just(Role::Produce), Just(Role::Peek), Just(Role::Modify), Just(Role::Consume)];
    let places = 1..4_usize;
    places
        .prop_flat_map(move |places| {
            let links = prop::collection::vec((role.clone(), 0..places), 0..5);
            (
                prop::collection::vec(1..4_usize, places),
                1..5_usize,
                links,
                0..places,
                0..places,
                1..8_usize,
                (any::<bool>(), any::<bool>(), any::<bool>(), any::<u64>()),
            )
        })
        .prop_map(move |(envelopes, capacity, mut links, first, last, chunks, (commits, pauses, sends, seed))| {
            links.retain(|(role, _)| consumes || !matches!(role, Role::Consume | Role::Produce));
            links.insert(0, (Role::Produce, first));
            links.push((if consumes { Role::Consume } else { Role::Modify }, last));
            // Chunks that stay need an envelope each, and one more to move them between places.
            let most = envelopes.iter().sum::<usize>() - usize::from(envelopes.len() > 1);
            let chunks = if consumes { chunks } else { chunks.min(capacity).min(most) };
            let setup = Setup { envelopes, capacity, links, chunks, commits, pauses, sends, seed, ..Setup::default() };
            // Links that cycle through chunks that stay end by themselves.
            Setup { pauses: pauses && consumes, ..setup }
        })
}

fn run(setup: &Setup) {
    let mut world = World::new(setup);
    let mut steps = 0;
    while world.step() {
        steps += 1;
        assert!(steps < 20_000, "the run does not end");
    }
    // Lost envelopes are freed by the next event.
    world.loses = None;
    world.act(|_, _, _| ());
    while world.step() {}
    let stuck: Vec<_> = world.tasks.iter().filter(|task| !task.gone).map(|task| (task.role, task.place)).collect();
    assert!(stuck.is_empty(), "{stuck:?} wait for ever: {:#?}", world.state);
    let total = setup.envelopes.iter().sum::<usize>() + world.spares;
    let left: usize = world.pools.0.iter().map(Vec::len).sum();
    let held = world.chunks.keys().flat_map(|number| world.copies(*number)).filter(|token| token.own).count();
    for (given, there) in setup.envelopes.iter().zip(&world.pools.1) {
        assert!(*there <= setup.capacity.max(*given), "{there} envelopes, of {given}, for {} chunks", setup.capacity);
    }
    // A sent envelope is freed once its chunk is elsewhere, and the chunk returns in one of the hub's envelopes.
    if !setup.may_need_more() && !setup.sends {
        assert_eq!((world.spares, world.refused), (0, None), "there are enough");
    }
    if setup.loses.is_some() {
        assert_eq!(left + held, total, "no envelope is lost");
        let consumers = || setup.links.iter().filter(|(role, _)| *role == Role::Consume);
        if world.consumes && consumers().any(|(_, place)| Some(*place) != setup.loses) {
            assert!(world.chunks.values().all(|known| known.consumed), "each chunk is consumed, or its loss is taken");
        }
    } else if world.consumes {
        let producers = setup.links.iter().filter(|(role, _)| *role == Role::Produce).count();
        assert_eq!(world.consumed.len(), producers * setup.chunks, "each chunk is consumed once");
        assert_eq!(world.consumed.iter().collect::<HashSet<_>>().len(), world.consumed.len());
        assert_eq!(left, total, "all envelopes are free");
    } else {
        assert_eq!(left + held, total, "no envelope is lost");
        assert_eq!(world.chunks.len(), setup.chunks, "no chunk is lost");
    }
}

#[test]
fn consumers_at_several_places_do_not_take_chunks_from_each_other() {
    let links = [(Role::Produce, 0), (Role::Produce, 1), (Role::Produce, 1)];
    let links = links.into_iter().chain([0, 2, 0].map(|place| (Role::Consume, place))).collect();
    let setup = Setup { envelopes: vec![1, 2, 1], capacity: 4, links, chunks: 3, ..Setup::default() };
    (0..500).for_each(|seed| run(&Setup { seed, ..setup.clone() }));
}

/// Two chunks that stay have a place each and change places for the links that modify them, which needs a third
/// place.
#[test]
fn chunks_that_stay_change_places_without_the_envelopes_of_a_lost_device() {
    let links = vec![(Role::Produce, 1), (Role::Peek, 0), (Role::Modify, 2), (Role::Modify, 0)];
    let (envelopes, loses) = (vec![1, 2, 1], Some(1));
    let setup = Setup { envelopes, capacity: 2, links, chunks: 2, loses, ..Setup::default() };
    (0..500).for_each(|seed| run(&Setup { seed, ..setup.clone() }));
}

/// A chunk that was sent in a user's envelope is in one of the hub's after it was modified elsewhere. When all
/// readers are dropped, that envelope is not freed, like the others, and the producer that waits for it is notified
/// that nothing will come.
#[test]
fn a_sent_chunk_keeps_an_envelope_of_the_hub_from_a_producer_once_it_was_modified() {
    let links = vec![(Role::Produce, 0), (Role::Peek, 2), (Role::Modify, 2)];
    let setup = Setup { envelopes: vec![1, 2, 2], capacity: 4, links, chunks: 4, sends: true, ..Setup::default() };
    (0..2_000).for_each(|seed| run(&Setup { seed, loses: Some(1), ..setup.clone() }));
}

/// What is reserved for a chunk is an envelope where it was to be consumed, even after another consumer has begun to
/// wait. Otherwise the next chunk takes that envelope, and each then needs the envelope that the other has.
#[test]
fn an_envelope_reserved_for_a_chunk_stays_reserved() {
    for (producer, consumers) in [(0, [1, 0]), (0, [0, 1]), (1, [0, 1]), (2, [0, 1])] {
        let links = [(Role::Produce, producer), (Role::Modify, 1), (Role::Modify, 2)];
        let links = links.into_iter().chain(consumers.map(|place| (Role::Consume, place))).collect();
        let envelopes = vec![1, 1, 1];
        let setup = Setup { envelopes, capacity: 4, links, chunks: 5, commits: true, pauses: true, ..Setup::default() };
        (0..200).for_each(|seed| run(&Setup { seed, ..setup.clone() }));
    }
}

/// Two chunks that stay in two envelopes at two places could never change places.
#[test]
fn a_chunk_that_stays_and_has_no_envelope_is_refused_in_every_order() {
    for (producer, readers) in [(0, vec![(Role::Modify, 0)]), (0, vec![(Role::Modify, 1), (Role::Peek, 0)])] {
        let links = std::iter::once((Role::Produce, producer)).chain(readers).collect();
        let setup = Setup { envelopes: vec![1, 1], capacity: 3, links, chunks: 2, ..Setup::default() };
        for seed in 0..200 {
            let mut world = World::new(&Setup { seed, ..setup.clone() });
            // Reading links cycle without end.
            let readers = world.tasks.iter_mut().filter(|task| task.role != Role::Produce);
            readers.for_each(|task| task.left = usize::MAX);
            while world.refused.is_none() && world.step() {}
            assert_eq!((world.refused, world.spares), (Some(2), 0));
        }
    }
}

/// The number of cases per property; set `PROPTEST_CASES=10000` for more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(if cfg!(debug_assertions) {
        150
    } else {
        1000
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn chunks_that_are_consumed_pass_all_once_and_none_is_lost(setup in setups(true)) {
        run(&setup);
    }

    #[test]
    fn the_flow_of_data_may_switch(setup in setups(true), switches in 1..5_usize, late in any::<bool>()) {
        run(&Setup { switches, late, ..setup });
    }

    #[test]
    fn links_that_come_and_go_leave_no_chunk_behind(setup in setups(true), changes in 1..9_usize, late in any::<bool>()) {
        run(&Setup { changes, late, ..setup });
    }

    #[test]
    fn late_links_get_the_chunks_that_are_there(setup in setups(true)) {
        run(&Setup { late: true, ..setup });
    }

    #[test]
    fn late_links_cycle_through_chunks_that_stay(setup in setups(false)) {
        run(&Setup { late: true, ..setup });
    }

    #[test]
    fn a_lost_device_loses_only_chunks_without_another_copy(setup in setups(true), place in 0..3_usize, late in any::<bool>()) {
        run(&Setup { loses: Some(place % setup.envelopes.len()), late, ..setup });
    }

    #[test]
    fn chunks_that_stay_continue_without_a_lost_device(setup in setups(false), place in 0..3_usize) {
        run(&Setup { loses: Some(place % setup.envelopes.len()), ..setup });
    }

    #[test]
    fn chunks_that_stay_are_shared_and_changed_in_turn(setup in setups(false)) {
        run(&setup);
    }
}

/// The number of links visited by the most expensive step, with `links` links of one role: as they poll, take and
/// commit.
fn looks(role: Role, links: usize) -> usize {
    let consumer = (role == Role::Peek).then_some((Role::Consume, 1));
    let links: Vec<_> = std::iter::repeat_n((role, 0), links).chain(consumer).chain([(Role::Produce, 1)]).collect();
    let commits = 2 * links.len() as u64;
    let setup = Setup { envelopes: vec![1, 2], capacity: 2, links, chunks: 3, ..Setup::default() };
    let (mut world, mut most, mut goes_on) = (World::new(&setup), 0, true);
    while goes_on && world.made < commits {
        VISITS.set(0);
        goes_on = world.step();
        most = VISITS.get().max(most);
    }
    most
}

/// A whole step runs under the hub's lock, so its cost matters.
#[test]
fn a_step_looks_at_each_link_a_few_times() {
    for role in [Role::Produce, Role::Consume, Role::Peek, Role::Modify] {
        for links in [10, 100] {
            let looks = looks(role, links);
            assert!((links..20 * (links + 2)).contains(&looks), "{looks} looks at {links} links, {role:?}");
        }
    }
}
