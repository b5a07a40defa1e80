//! Graphs at their edges: what a sceptic did to them. Each test is named for the fault that it would show; what never was one
//! is `holds_..`.
//!
//! Each runs in a process of its own, so that one that hangs, or ends the process, ends alone.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use common::*;
use wakeline::{
    device::{Emulated, Faults},
    graph::{Graph, GraphEvent, Node},
    memory::Allocator,
    prelude::*,
};

/// Adds `x` to each element of `y`.
#[kernel(unsafe(cuda = "kernels/add_to.cu"))]
fn add_to(y: &mut [u32], x: &[u32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

async fn buffer(stream: &Stream, value: u32) -> Buffer<u32> {
    let buffer = Buffer::from_slice(stream, &[value; 64]).unwrap();
    stream.completed().await.unwrap();
    buffer
}

fn first(graph: &Graph) -> Node {
    graph.nodes()[0].node
}

/// Whether memory at this address is given to whoever asks: then nobody keeps it.
fn is_handed_out(device: &Device, address: u64) -> bool {
    // Several: others of the same size may lie before it.
    let asked: Vec<_> = (0..16).map(|_| Buffer::<u32>::new(device, 64).unwrap()).collect();
    asked.iter().any(|buffer| buffer.device_address().unwrap() == address)
}

/// Runs in a process of its own: what hangs there holds a lock that all tests share, and what ends there ends alone.
fn alone_in_a_process(name: &str, body: impl FnOnce()) {
    if std::env::var("GRAPH_EDGES").is_ok_and(|only| only == name) {
        body();
        return;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env("GRAPH_EDGES", name)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return assert!(status.success(), "{status}"),
            None if begun.elapsed() > Duration::from_secs(15) => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it hangs");
            }
            None => std::thread::yield_now(),
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn alone(name: &str, body: impl AsyncFnOnce()) {
    alone_in_a_process(name, || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(within(body()));
    });
}

/// A `&[T]` of the host's memory, and a launch that writes there: a data race in safe code.
#[test]
fn a_launch_writes_to_host_memory_while_a_slice_of_it_is_borrowed() {
    alone("a_launch_writes_to_host_memory_while_a_slice_of_it_is_borrowed", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let x = buffer(&stream, 7).await;
        let mut out = Buffer::<u32>::pinned(&device, 64).unwrap();
        out.as_mut_slice().unwrap().fill(3);
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.output(&mut out)?;
            capture.stream().copy(&x, &mut out)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        assert!(out.as_slice().is_err() && out.as_mut_slice().is_err() && out.read().await.is_err());
        exec.launch(&stream).unwrap();
        assert_eq!(out.to_vec(&stream).await.unwrap(), [7; 64]);
        // It is the host's again.
        drop((exec, graph));
        assert_eq!(out.read().await.unwrap(), [7; 64]);
        out.as_mut_slice().unwrap().fill(3);
    });
}

/// `set` of one exec within that of another of the same graph: the work goes to one, and what it uses is kept by the other.
#[test]
fn two_sets_at_once_keep_the_memory_with_the_wrong_exec() {
    alone("two_sets_at_once_keep_the_memory_with_the_wrong_exec", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (mut old, mut new) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut old, 1)).unwrap();
        let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
        let node = first(&graph);
        let address = new.device_address().unwrap();
        let mut inner = None;
        let _ = one.set(node, |outer| {
            inner = Some(two.set(node, |_| outer.fill(&mut new, 2)));
            Ok(())
        });
        if inner.unwrap().is_err() {
            return;
        }
        drop((one, new));
        assert!(!is_handed_out(&device, address), "it is memory that a node of `two` writes to");
        two.launch(&stream).unwrap();
    });
}

/// The same with threads that know nothing of each other: whoever sets takes what the other one enqueues.
#[test]
fn two_threads_that_set_execs_of_one_graph_take_each_others_work() {
    alone("two_threads_that_set_execs_of_one_graph_take_each_others_work", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut old = buffer(&stream, 0).await;
        let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut old, 1)).unwrap();
        let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
        let node = first(&graph);
        let (first_in, second_in) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait = |what: &AtomicBool| {
            let begun = Instant::now();
            while !what.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(1) {
                std::thread::yield_now();
            }
        };
        let (set_one, set_two) = std::thread::scope(|scope| {
            let one = scope.spawn(|| {
                one.set(node, |stream| {
                    first_in.store(true, Ordering::SeqCst);
                    wait(&second_in);
                    stream.fill(&mut a, 10)
                })
            });
            let two = scope.spawn(|| {
                wait(&first_in);
                two.set(node, |stream| {
                    second_in.store(true, Ordering::SeqCst);
                    stream.fill(&mut b, 20)
                })
            });
            (one.join().unwrap(), two.join().unwrap())
        });
        assert!(set_one.is_ok() && set_two.is_ok(), "{set_one:?}, {set_two:?}");
        one.launch(&stream).unwrap();
        two.launch(&stream).unwrap();
        assert_eq!((a.to_vec(&stream).await.unwrap()[0], b.to_vec(&stream).await.unwrap()[0]), (10, 20));
    });
}

/// A stream that a former `set` has left to somebody: its work becomes another exec's, and what it uses is kept by the first.
#[test]
fn a_stream_of_a_former_set_works_again_within_the_next() {
    alone("a_stream_of_a_former_set_works_again_within_the_next", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (mut old, mut new) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut old, 1)).unwrap();
        let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
        let node = first(&graph);
        let mut kept = None;
        one.set(node, |stream| {
            kept = Some(stream.clone());
            stream.fill(&mut old, 1)
        })
        .unwrap();
        let address = new.device_address().unwrap();
        if two.set(node, |_| kept.unwrap().fill(&mut new, 2)).is_err() {
            return;
        }
        drop((one, new));
        assert!(!is_handed_out(&device, address), "it is memory that a node of `two` writes to");
    });
}

/// The body of a conditional node fails: its nodes stay, and what they use is kept by nobody.
#[test]
fn a_body_that_fails_leaves_nodes_whose_memory_is_not_kept() {
    alone("a_body_that_fails_leaves_nodes_whose_memory_is_not_kept", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
        let address = data.device_address().unwrap();
        let mut graph = Graph::builder(&device).unwrap();
        let failed = graph.run_if(&[], &flag, |body| {
            body.add(&[], |stream| stream.fill(&mut data, 1))?;
            Err("no more of this".into())
        });
        assert!(failed.is_err());
        // The user goes on without it.
        let graph = graph.build().unwrap();
        let has_it = !graph.nodes().is_empty();
        let exec = graph.instantiate().unwrap();
        drop(data);
        assert!(!has_it || !is_handed_out(&device, address), "a node writes to it at each launch");
        exec.launch(&stream).unwrap();
    });
}

/// A body's builder, swapped with another: what the body's nodes use is kept by another graph.
#[test]
fn a_builder_that_is_swapped_out_of_its_closure_keeps_its_memory_elsewhere() {
    alone("a_builder_that_is_swapped_out_of_its_closure_keeps_its_memory_elsewhere", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
        let address = data.device_address().unwrap();
        let mut mine = Graph::builder(&device).unwrap();
        let mut graph = Graph::builder(&device).unwrap();
        let swapped = graph.run_if(&[], &flag, |body| {
            std::mem::swap(body, &mut mine);
            Ok(())
        });
        if swapped.is_err() {
            return;
        }
        // A node of the body.
        if mine.add(&[], |stream| stream.fill(&mut data, 1)).is_err() {
            return;
        }
        let exec = graph.build().unwrap().instantiate().unwrap();
        drop((mine, data));
        assert!(!is_handed_out(&device, address), "a node writes to it at each launch");
        exec.launch(&stream).unwrap();
    });
}

/// A stream that is kept beyond its capture is given the graph's own memory, which launches write to.
#[test]
fn a_stream_that_is_kept_is_given_the_graphs_own_memory() {
    alone("a_stream_that_is_kept_is_given_the_graphs_own_memory", async || {
        let device = emulated();
        let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
        let (graph, (kept, address)) = Graph::capture(&device, |capture| {
            let mut scratch = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut scratch, 1)?;
            Ok((capture.stream().clone(), scratch.device_address()?))
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let Ok(mut mine) = kept.alloc::<u32>(64) else { return };
        two.fill(&mut mine, 5).unwrap();
        let held = hold(&two);
        let launched = exec.launch(&one);
        drop(held);
        assert_ne!(
            mine.device_address().unwrap(),
            address,
            "launches write to it, and do not wait for anybody: {launched:?}"
        );
    });
}

/// Memory of one graph's own that another graph uses, too: the first forgets that as its capture ends, and takes it along.
#[test]
fn memory_of_a_graphs_own_goes_while_another_graph_uses_it() {
    alone("memory_of_a_graphs_own_goes_while_another_graph_uses_it", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (one, (two, address)) = Graph::capture(&device, |capture| {
            let mut shared = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut shared, 1)?;
            let (two, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 2))?;
            Ok((two, shared.device_address()?))
        })
        .unwrap();
        let exec = two.instantiate().unwrap();
        drop((one, two));
        assert!(!is_handed_out(&device, address), "a node writes to it at each launch");
        exec.launch(&stream).unwrap();
    });
}

/// The same two graphs, both alive: their launches write to one memory and do not wait for each other.
#[test]
fn launches_of_two_graphs_that_share_memory_of_ones_own_race() {
    alone("launches_of_two_graphs_that_share_memory_of_ones_own_race", async || {
        let device = emulated();
        let [a, b] = ["a", "b"].map(|name| Stream::named(&device, name).unwrap());
        let (one, two) = Graph::capture(&device, |capture| {
            let mut shared = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut shared, 1)?;
            Ok(Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 2))?.0)
        })
        .unwrap();
        let (one, two) = (one.instantiate().unwrap(), two.instantiate().unwrap());
        let held = hold(&a);
        one.launch(&a).unwrap();
        let second = two.launch(&b).map(|_| ());
        drop(held);
        second.unwrap();
    });
}

/// Memory of a builder's that was used on a stream and dropped: the launches do not come after that use.
#[test]
fn a_launch_does_not_come_after_a_use_of_memory_that_was_dropped_before_the_build() {
    alone("a_launch_does_not_come_after_a_use_of_memory_that_was_dropped_before_the_build", async || {
        let device = emulated();
        let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
        let mut seen = buffer(&one, 0).await;
        let mut builder = Graph::builder(&device).unwrap();
        let mut made = None;
        builder
            .add(&[], |stream| {
                let mut x = stream.alloc::<u32>(64)?;
                stream.fill(&mut x, 1)?;
                made = Some(x);
                Ok(())
            })
            .unwrap();
        let mut x = made.unwrap();
        one.fill(&mut x, 9).unwrap();
        one.completed().await.unwrap();
        let held = hold(&two);
        add_to::launch(&two, &mut seen, &x).unwrap();
        drop(x);
        let exec = builder.build().unwrap().instantiate().unwrap();
        let launched = exec.launch(&one).map(|_| ());
        drop(held);
        launched.unwrap();
        assert_eq!(seen.to_vec(&two).await.unwrap(), [9; 64]);
    });
}

/// Two inputs, one after the other: their memory is the same block, and their copies are made before the launch.
#[test]
fn inputs_overwrite_each_other() {
    alone("inputs_overwrite_each_other", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut sums = [buffer(&stream, 0).await, buffer(&stream, 0).await];
        let hosts = [(); 2].map(|()| Buffer::<u32>::pinned(&device, 64).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| {
            for (host, sum) in hosts.iter().zip(&mut sums) {
                capture.input(host)?;
                let stream = capture.stream();
                let mut x = stream.alloc::<u32>(64)?;
                stream.copy(host, &mut x)?;
                add_to::launch(stream, sum, &x)?;
            }
            Ok(())
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        for (input, value) in graph.inputs().iter().zip([5, 6]) {
            let mut from = Buffer::<u32>::pinned(&device, 64).unwrap();
            from.as_mut_slice().unwrap().fill(value);
            input.copy(&stream, &from).unwrap();
        }
        exec.launch(&stream).unwrap();
        let seen = [sums[0].to_vec(&stream).await.unwrap()[0], sums[1].to_vec(&stream).await.unwrap()[0]];
        assert_eq!(seen, [5, 6]);
    });
}

/// An input's memory is used by the graph for something else before it: what was copied there is gone when it is read.
#[test]
fn an_input_is_overwritten_by_what_used_the_memory_before() {
    alone("an_input_is_overwritten_by_what_used_the_memory_before", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (mut sum, mut other) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
        let host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            let stream = capture.stream();
            let mut scratch = stream.alloc::<u32>(64)?;
            stream.fill(&mut scratch, 9)?;
            add_to::launch(stream, &mut other, &scratch)?;
            drop(scratch);
            let mut x = stream.alloc::<u32>(64)?;
            stream.copy(&host, &mut x)?;
            add_to::launch(stream, &mut sum, &x)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let mut from = Buffer::<u32>::pinned(&device, 64).unwrap();
        from.as_mut_slice().unwrap().fill(5);
        graph.inputs()[0].copy(&stream, &from).unwrap();
        exec.launch(&stream).unwrap();
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [5; 64]);
    });
}

/// A user's own memory as an input's source: it is given back while the copy may still read it.
#[test]
fn memory_of_the_users_is_given_back_before_an_inputs_copy_has_read_it() {
    alone("memory_of_the_users_is_given_back_before_an_inputs_copy_has_read_it", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut sum = buffer(&stream, 0).await;
        let host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            let stream = capture.stream();
            let mut x = stream.alloc::<u32>(64)?;
            stream.copy(&host, &mut x)?;
            add_to::launch(stream, &mut sum, &x)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let (mine, wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
        let held = hold(&stream);
        if graph.inputs()[0].copy(&stream, &mine).is_err() {
            // Memory that is not page-locked goes through other memory, which an input's copy does not.
            return;
        }
        drop(mine);
        let back = futures::FutureExt::now_or_never(wrapped.into_inner());
        // It is the user's again: he may do what he likes with it.
        let _mine = back.map(|back| {
            let mut mine = back.unwrap();
            mine.fill(8);
            mine
        });
        drop(held);
        exec.launch(&stream).unwrap();
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [5; 64]);
    });
}

/// An input's copy, captured by another graph: it writes to memory that the first graph gives back.
#[test]
fn an_inputs_copy_in_another_graph_outlives_its_memory() {
    alone("an_inputs_copy_in_another_graph_outlives_its_memory", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut sum = buffer(&stream, 0).await;
        let host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, address) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            let stream = capture.stream();
            let mut x = stream.alloc::<u32>(64)?;
            stream.copy(&host, &mut x)?;
            add_to::launch(stream, &mut sum, &x)?;
            x.device_address()
        })
        .unwrap();
        let Ok((feeds, ())) = Graph::capture(&device, |capture| graph.inputs()[0].copy(capture.stream(), &host)) else {
            return;
        };
        let exec = feeds.instantiate().unwrap();
        drop((graph, feeds));
        assert!(!is_handed_out(&device, address), "a node writes to it at each launch");
        exec.launch(&stream).unwrap();
    });
}

/// A launch takes the turn and then the exec; `set` takes the exec and then, for what it enqueues, the turn.
#[test]
fn a_launch_and_a_set_wait_for_each_other() {
    alone_in_a_process("a_launch_and_a_set_wait_for_each_other", || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = Buffer::<u32>::new(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let exec = graph.instantiate().unwrap();
        let (go, went) = mpsc::channel();
        let (tell, launched) = mpsc::channel();
        std::thread::scope(|scope| {
            let (exec, stream) = (&exec, &stream);
            scope.spawn(move || {
                went.recv().unwrap();
                exec.launch(stream).unwrap();
                tell.send(()).unwrap();
            });
            let set = exec.set(first(&graph), |stream| {
                go.send(()).unwrap();
                launched.recv().unwrap();
                stream.fill(&mut data, 2)
            });
            set.unwrap();
        });
        stream.synchronize_blocking().unwrap();
    });
}

/// `set` calls the user with the exec locked: whatever he does there with the exec waits for itself.
#[test]
fn a_launch_within_a_set_hangs() {
    alone_in_a_process("a_launch_within_a_set_hangs", || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = Buffer::<u32>::new(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let exec = graph.instantiate().unwrap();
        let _ = exec.set(first(&graph), |captured| {
            let _ = exec.launch(&stream);
            captured.fill(&mut data, 2)
        });
        stream.synchronize_blocking().unwrap();
    });
}

/// A capture of a copy to wrapped memory fails, and the user's memory is overwritten with what never arrived.
#[test]
fn a_capture_that_fails_overwrites_memory_of_the_users() {
    alone("a_capture_that_fails_overwrites_memory_of_the_users", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let x = buffer(&stream, 1).await;
        let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
        let captured = Graph::capture(&device, |capture| {
            capture.output(&mut mine)?;
            capture.stream().copy(&x, &mut mine)
        });
        assert!(captured.is_err(), "nothing brings what a launch copies there over: {captured:?}");
        assert_eq!(mine.as_slice().unwrap(), [7; 64]);
    });
}

/// A node that copies to wrapped memory: the user sees neither what he had nor what a launch copied.
#[test]
fn a_node_that_copies_to_wrapped_memory_copies_to_nowhere() {
    alone("a_node_that_copies_to_wrapped_memory_copies_to_nowhere", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let x = buffer(&stream, 1).await;
        let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
        let mut graph = Graph::builder(&device).unwrap();
        if graph.add(&[], |stream| stream.copy(&x, &mut mine)).is_err() {
            return;
        }
        let exec = graph.build().unwrap().instantiate().unwrap();
        assert_eq!(mine.as_slice().unwrap(), [7; 64], "before any launch");
        exec.launch(&stream).unwrap().completed().await.unwrap();
        assert_eq!(mine.read().await.unwrap(), [1; 64], "after one");
    });
}

/// Two pieces of work in a `set`: the first is lost, and nobody says so.
#[test]
fn work_in_a_set_before_the_piece_that_fits_is_lost_in_silence() {
    alone("work_in_a_set_before_the_piece_that_fits_is_lost_in_silence", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (mut sum, one) = (buffer(&stream, 0).await, buffer(&stream, 1).await);
        let (graph, ()) = Graph::capture(&device, |capture| add_to::launch(capture.stream(), &mut sum, &one)).unwrap();
        let exec = graph.instantiate().unwrap();
        let set = exec.set(first(&graph), |stream| {
            let ten = Buffer::from_slice(stream, &[10_u32; 64])?;
            add_to::launch(stream, &mut sum, &ten)
        });
        if set.is_err() {
            return;
        }
        exec.launch(&stream).unwrap();
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [10; 64]);
    });
}

/// A `set` that fails changes the exec all the same.
#[test]
fn a_set_that_is_refused_changes_the_exec() {
    alone("a_set_that_is_refused_changes_the_exec", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let exec = graph.instantiate().unwrap();
        let set = exec.set(first(&graph), |stream| {
            stream.fill(&mut data, 2)?;
            increment::launch(stream, &mut data)
        });
        assert!(set.is_err());
        exec.launch(&stream).unwrap();
        assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "`it is as it was then`");
    });
}

/// The same where the user's closure fails.
#[test]
fn a_set_whose_closure_fails_changes_the_exec() {
    alone("a_set_whose_closure_fails_changes_the_exec", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let exec = graph.instantiate().unwrap();
        let set = exec.set(first(&graph), |stream| {
            stream.fill(&mut data, 2)?;
            Err("no".into())
        });
        assert!(set.is_err());
        exec.launch(&stream).unwrap();
        assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "`it is as it was then`");
    });
}

/// Memory that a node of one graph makes, in another graph: there it is nothing.
#[test]
fn memory_that_a_node_makes_is_used_in_another_graph() {
    alone("memory_that_a_node_makes_is_used_in_another_graph", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut builder = Graph::builder(&device).unwrap();
        let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
        let captured = Graph::capture(&device, |capture| capture.stream().fill(&mut x, 1));
        let Ok((other, ())) = captured else { return };
        let launched = other.instantiate().unwrap().launch(&stream);
        let done = match launched {
            Ok(launched) => launched.completed().await,
            Err(error) => Err(error),
        };
        assert!(done.is_ok(), "it was not refused when it was captured, and then: {done:?}");
    });
}

/// The same in a `set`, after the node that gives it back.
#[test]
fn memory_that_a_node_makes_is_set_where_it_is_gone() {
    alone("memory_that_a_node_makes_is_set_where_it_is_gone", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let mut builder = Graph::builder(&device).unwrap();
        let before = builder.add(&[], |stream| stream.fill(&mut data, 1)).unwrap();
        let (_, mut x) = builder.alloc::<u32>(&[before], 64).unwrap();
        builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
        let exec = builder.build().unwrap().instantiate().unwrap();
        if exec.set(before, |stream| stream.fill(&mut x, 2)).is_err() {
            return;
        }
        let done = match exec.launch(&stream) {
            Ok(launched) => launched.completed().await,
            Err(error) => Err(error),
        };
        assert!(done.is_ok(), "it was not refused when it was set, and then: {done:?}");
    });
}

/// A node is set to other memory again and again: all of it is kept.
#[test]
fn setting_a_node_again_and_again_keeps_all_that_it_ever_used() {
    alone("setting_a_node_again_and_again_keeps_all_that_it_ever_used", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let exec = graph.instantiate().unwrap();
        let before = device.memory_stats().in_use;
        for _ in 0..100 {
            let mut other = Buffer::<u32>::new(&device, 64).unwrap();
            exec.set(first(&graph), |stream| stream.fill(&mut other, 2)).unwrap();
            exec.launch(&stream).unwrap().completed().await.unwrap();
        }
        let kept = (device.memory_stats().in_use - before) / 256;
        assert!(kept < 10, "{kept} buffers that no launch will touch again");
    });
}

/// An exec is updated again and again: all graphs are kept.
#[test]
fn updating_an_exec_again_and_again_keeps_all_that_it_ever_was() {
    alone("updating_an_exec_again_and_again_keeps_all_that_it_ever_was", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let capture = || {
            let mut data = Buffer::<u32>::new(&device, 64).unwrap();
            Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap().0
        };
        let exec = capture().instantiate().unwrap();
        let before = device.memory_stats().in_use;
        for _ in 0..100 {
            exec.update(&capture()).unwrap();
            exec.launch(&stream).unwrap().completed().await.unwrap();
        }
        let kept = (device.memory_stats().in_use - before) / 256;
        assert!(kept < 10, "{kept} buffers that no launch will touch again");
    });
}

/// Whoever keeps a stream of a capture, or an event that was recorded there, keeps the whole graph and its callbacks.
#[test]
fn a_stream_that_is_kept_keeps_the_graphs_callbacks() {
    alone("a_stream_that_is_kept_keeps_the_graphs_callbacks", async || {
        let device = emulated();
        let owned = Arc::new(());
        let captured = owned.clone();
        let (graph, kept) = Graph::capture(&device, |capture| {
            capture.stream().host_callback(move || _ = &captured)?;
            let event = wakeline::stream::Event::new();
            event.record(capture.stream())?;
            Ok(event)
        })
        .unwrap();
        drop(graph);
        assert_eq!(Arc::strong_count(&owned), 1, "the graph is gone, and what its callback owns is not");
        drop(kept);
    });
}

/// Two execs of one graph that write nothing: `instantiate` says that they are launched beside each other.
#[test]
fn execs_of_one_graph_that_write_nothing_wait_for_each_other() {
    alone("execs_of_one_graph_that_write_nothing_wait_for_each_other", async || {
        let device = emulated();
        let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.stream().host_callback(move || _ = count.fetch_add(1, Ordering::SeqCst))
        })
        .unwrap();
        let execs = [graph.instantiate().unwrap(), graph.instantiate().unwrap()];
        let held = hold(&one);
        let first = execs[0].launch(&one).unwrap();
        let second = execs[1].launch(&two).unwrap();
        let beside = tokio::time::timeout(Duration::from_secs(2), second.completed()).await;
        drop(held);
        first.completed().await.unwrap();
        assert!(beside.is_ok(), "the second one waits for the first");
    });
}

/// A stream of a builder's, used while the body of a conditional node is made: it is not ordered with that.
#[test]
fn a_builders_stream_within_a_body_is_not_in_order_with_it() {
    alone("a_builders_stream_within_a_body_is_not_in_order_with_it", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (flag, mut data, mut other) =
            (buffer(&stream, 1).await, buffer(&stream, 0).await, buffer(&stream, 0).await);
        let mut graph = Graph::builder(&device).unwrap();
        let mut kept = None;
        graph
            .add(&[], |stream| {
                kept = Some(stream.clone());
                stream.fill(&mut other, 0)
            })
            .unwrap();
        let kept = kept.unwrap();
        let built = graph.run_if(&[], &flag, |body| {
            body.add(&[], |stream| stream.fill(&mut data, 1))?;
            kept.fill(&mut data, 2)
        });
        let conditional = match built {
            Ok(conditional) => conditional,
            // Only the checker has seen it: without it nobody does.
            Err(error) => return assert_eq!(error.kind(), ErrorKind::Usage, "{error}"),
        };
        let graph = graph.build().unwrap();
        let last = graph.nodes().last().unwrap().node;
        let ordered = graph.comes_after(last, conditional) || graph.comes_after(conditional, last);
        assert!(ordered, "both write to the same memory: {:?}", graph.nodes());
    });
}

/// An input's copy was taken out of the graph, and launches still count as readers of where it came from.
#[test]
fn the_source_of_an_input_that_was_taken_out_is_in_use_by_launches() {
    alone("the_source_of_an_input_that_was_taken_out_is_in_use_by_launches", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut sum = buffer(&stream, 0).await;
        let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            let mut x = capture.stream().alloc::<u32>(64)?;
            capture.stream().copy(&host, &mut x)?;
            add_to::launch(capture.stream(), &mut sum, &x)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        graph.inputs()[0].copy(&stream, &host).unwrap();
        stream.completed().await.unwrap();
        let held = hold(&stream);
        exec.launch(&stream).unwrap();
        // The next one, meanwhile.
        let next = host.as_mut_slice().map(|_| ());
        drop(held);
        next.unwrap();
    });
}

/// Memory that is asked for as a thread ends, after it has captured: a panic.
#[test]
fn memory_as_a_thread_ends_after_a_capture_panics() {
    struct AtEnd(std::cell::RefCell<Option<(Device, mpsc::Sender<bool>)>>);
    impl Drop for AtEnd {
        fn drop(&mut self) {
            let Some((device, told)) = self.0.take() else { return };
            let made =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Buffer::<u32>::new(&device, 64).is_ok()));
            let _ = told.send(made.unwrap_or(false));
        }
    }
    thread_local! {
        static EARLY: AtEnd = const { AtEnd(std::cell::RefCell::new(None)) };
        static LATE: AtEnd = const { AtEnd(std::cell::RefCell::new(None)) };
    }
    let device = emulated();
    let (tell, told) = mpsc::channel();
    let of_thread = device.clone();
    std::thread::spawn(move || {
        EARLY.with(|at_end| at_end.0.replace(Some((of_thread.clone(), tell.clone()))));
        Graph::capture(&of_thread, |_| Ok(())).unwrap();
        LATE.with(|at_end| at_end.0.replace(Some((of_thread, tell))));
    })
    .join()
    .unwrap();
    assert_eq!(told.into_iter().collect::<Vec<_>>(), [true, true]);
}

/// Memory of another device for a captured stream: outside a capture that is an error.
#[test]
fn memory_of_another_device_for_a_captured_stream_is_no_error() {
    let (here, there) = (emulated(), emulated());
    let allocator = Allocator::unbounded(&there);
    let made = Graph::capture(&here, |capture| Ok(allocator.alloc::<u32>(capture.stream(), 64).map(drop))).unwrap().1;
    assert!(made.is_err(), "`choose one of its own device`");
}

/// A lost device: what a callback of a graph owns is never let go.
#[test]
fn callbacks_of_an_exec_in_flight_are_not_let_go_on_a_lost_device() {
    alone("callbacks_of_an_exec_in_flight_are_not_let_go_on_a_lost_device", async || {
        let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)));
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let owned = Arc::new(());
        let captured = owned.clone();
        let (graph, ()) = Graph::capture(&device, |capture| {
            increment::launch(capture.stream(), &mut data)?;
            capture.stream().host_callback(move || _ = &captured)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        assert!(exec.launch(&stream).unwrap().completed().await.is_err());
        drop((exec, graph, data));
        until("the callback is let go", || Arc::strong_count(&owned) == 1).await;
    });
}

/// Within a capture, on a stream outside, a kernel on captured memory is an error; a launch of a graph on it runs.
#[test]
fn a_launch_outside_of_a_capture_of_the_same_memory_is_no_error() {
    alone("a_launch_outside_of_a_capture_of_the_same_memory_is_no_error", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let (graph, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
        let exec = graph.instantiate().unwrap();
        let launched = Graph::capture(&device, |capture| {
            increment::launch(capture.stream(), &mut data)?;
            assert!(increment::launch(&stream, &mut data).is_err(), "it takes no part in the capture");
            Ok(exec.launch(&stream).map(drop))
        })
        .unwrap()
        .1;
        assert!(launched.is_err(), "it runs now, and at no launch");
    });
}

/// Events of a graph go with it while a launch that records and waits for them is in flight.
#[test]
fn holds_events_that_go_before_a_launch_is_done() {
    alone("holds_events_that_go_before_a_launch_is_done", async || {
        let device = emulated();
        let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
        let (begun, go) = (GraphEvent::new(&device).unwrap(), GraphEvent::new(&device).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| {
            begun.record(capture.stream())?;
            go.wait(capture.stream())?;
            begun.record(capture.stream())
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let held = hold(&two);
        go.record(&two).unwrap();
        let launched = exec.launch(&one).unwrap();
        drop((begun, go, exec, graph));
        drop(held);
        launched.completed().await.unwrap();
    });
}

/// Execs launched by several threads, buffers used by another and all of it dropped by a third.
#[test]
fn holds_threads_that_launch_use_and_drop() {
    alone("holds_threads_that_launch_use_and_drop", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        for _ in 0..30 {
            let (mut sum, constant) = (buffer(&stream, 0).await, buffer(&stream, 1).await);
            let (graph, ()) = Graph::capture(&device, |capture| {
                let mut x = capture.stream().alloc::<u32>(64)?;
                capture.stream().copy(&constant, &mut x)?;
                add_to::launch(capture.stream(), &mut sum, &x)
            })
            .unwrap();
            let exec = Arc::new(graph.instantiate().unwrap());
            let launching: Vec<_> = (0..3)
                .map(|_| {
                    let (device, exec) = (device.clone(), exec.clone());
                    std::thread::spawn(move || {
                        let stream = Stream::new(&device).unwrap();
                        (0..20).for_each(|_| drop(exec.launch(&stream).unwrap()));
                    })
                })
                .collect();
            drop((exec, graph, constant));
            let own = Stream::new(&device).unwrap();
            let mut seen = Buffer::<u32>::new(&device, 64).unwrap();
            for _ in 0..20 {
                own.copy(&sum, &mut seen).unwrap();
            }
            launching.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(sum.to_vec(&stream).await.unwrap(), [60; 64]);
            drop((sum, seen));
        }
        freed(&device).await;
    });
}

/// Wrapped memory as an input: its copy is staged, and so is taken for a constant's; the first value is the graph's for ever.
#[test]
fn an_input_of_wrapped_memory_is_taken_for_a_constant() {
    alone("an_input_of_wrapped_memory_is_taken_for_a_constant", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut sum = buffer(&stream, 0).await;
        let (mine, _wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
        let captured = Graph::capture(&device, |capture| {
            capture.input(&mine)?;
            let mut x = capture.stream().alloc::<u32>(64)?;
            capture.stream().copy(&mine, &mut x)?;
            add_to::launch(capture.stream(), &mut sum, &x)
        });
        let Ok((graph, ())) = captured else { return };
        assert_eq!(graph.inputs().len(), 1, "neither an input nor an error: {:?}", graph.nodes());
    });
}

/// A fault that is seen by an event of a graph's is told to whoever asked, and to nobody else.
#[test]
fn a_fault_that_a_graph_event_sees_is_not_heeded() {
    alone("a_fault_that_a_graph_event_sees_is_not_heeded", async || {
        let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)));
        let stream = Stream::new(&device).unwrap();
        let mut data = buffer(&stream, 0).await;
        let event = GraphEvent::new(&device).unwrap();
        let held = hold(&stream);
        increment::launch(&stream, &mut data).unwrap();
        event.record(&stream).unwrap();
        drop(held);
        let error = loop {
            match event.query() {
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => break error,
            }
        };
        assert!(error.is_device_lost(), "{error}");
        assert!(device.lost().is_some(), "it has said so: {error}");
    });
}

/// A closure of `set` records an event and panics: the node records it from now on, and nobody keeps it.
#[test]
fn a_set_that_panics_leaves_an_event_that_is_not_kept() {
    alone("a_set_that_panics_leaves_an_event_that_is_not_kept", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (old, new) = (GraphEvent::new(&device).unwrap(), GraphEvent::new(&device).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| old.record(capture.stream())).unwrap();
        let exec = graph.instantiate().unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = exec.set(first(&graph), |stream| {
                new.record(stream)?;
                panic!("planned");
            });
        }));
        assert!(panicked.is_err());
        drop(new);
        exec.launch(&stream).unwrap().completed().await.unwrap();
    });
}

/// A callback that is replaced is dropped with the exec, its graph and a stream locked: what it owns may ask them something.
#[test]
fn what_a_replaced_callback_owns_is_dropped_under_locks() {
    alone("what_a_replaced_callback_owns_is_dropped_under_locks", async || {
        struct Asks(Graph);
        impl Drop for Asks {
            fn drop(&mut self) {
                let _ = self.0.nodes();
            }
        }
        let device = emulated();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
        let exec = graph.instantiate().unwrap();
        let asks = Asks(graph.clone());
        exec.set(first(&graph), |stream| stream.host_callback(move || _ = &asks)).unwrap();
        exec.set(first(&graph), |stream| stream.host_callback(|| ())).unwrap();
    });
}

/// An input's copy on a stream of another device: in order with the launches.
#[test]
fn holds_an_inputs_copy_on_another_device() {
    alone("holds_an_inputs_copy_on_another_device", async || {
        let (device, other) = (emulated(), emulated());
        let (stream, elsewhere) = (Stream::new(&device).unwrap(), Stream::new(&other).unwrap());
        let mut sum = buffer(&stream, 0).await;
        let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            let mut x = capture.stream().alloc::<u32>(64)?;
            capture.stream().copy(&host, &mut x)?;
            add_to::launch(capture.stream(), &mut sum, &x)
        })
        .unwrap();
        host.as_mut_slice().unwrap().fill(5);
        let exec = graph.instantiate().unwrap();
        let held = hold(&elsewhere);
        let copied = graph.inputs()[0].copy(&elsewhere, &host);
        exec.launch(&stream).unwrap();
        drop(held);
        if copied.is_ok() {
            assert_eq!(sum.to_vec(&stream).await.unwrap(), [5; 64]);
        }
    });
}

/// What two devices say to the same mistake: a graph that makes memory, twice, or as a child. Documented as `Usage`.
#[test]
fn mistakes_with_graphs_that_make_memory_are_no_usage_errors() {
    alone("mistakes_with_graphs_that_make_memory_are_no_usage_errors", async || {
        let device = emulated();
        let mut builder = Graph::builder(&device).unwrap();
        let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
        builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
        let graph = builder.build().unwrap();
        let mut outer = Graph::builder(&device).unwrap();
        let child = outer.child(&[], &graph).unwrap_err();
        let _exec = graph.instantiate().unwrap();
        let second = graph.instantiate().unwrap_err();
        assert_eq!((child.kind(), second.kind()), (ErrorKind::Usage, ErrorKind::Usage), "{child}; {second}");
    });
}

/// Whose copy was taken out stays in page-locked memory as long as the graph, though nothing uses it.
#[test]
fn the_source_of_an_input_that_was_taken_out_is_kept() {
    alone("the_source_of_an_input_that_was_taken_out_is_kept", async || {
        let device = emulated();
        let mut x = Buffer::<u32>::new(&device, 64).unwrap();
        let before = device.pinned_memory_stats().in_use;
        let host = Buffer::<u32>::pinned(&device, 64).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&host)?;
            capture.stream().copy(&host, &mut x)
        })
        .unwrap();
        drop(host);
        assert_eq!(device.pinned_memory_stats().in_use, before, "no node uses it: {:?}", graph.nodes());
    });
}

/// Memory made before and used in a capture: stream-ordered, a user's, page-locked; dropped in any order.
#[test]
fn holds_memory_of_every_kind_in_any_order() {
    alone("holds_memory_of_every_kind_in_any_order", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        for order in 0..6 {
            let mut sum = buffer(&stream, 0).await;
            let allocator = Allocator::stream_ordered(&device);
            let mut ordered = allocator.alloc::<u32>(&stream, 64).unwrap();
            stream.fill(&mut ordered, 1).unwrap();
            let under = buffer(&stream, 2).await;
            let address = under.device_address().unwrap();
            // SAFETY: the owner keeps the memory, and nobody else touches it.
            let (mine, wrapped) = unsafe { Buffer::<u32>::from_device_address(&device, address, 64, under) }.unwrap();
            let (graph, ()) = Graph::capture(&device, |capture| {
                add_to::launch(capture.stream(), &mut sum, &ordered)?;
                add_to::launch(capture.stream(), &mut sum, &mine)
            })
            .unwrap();
            let exec = graph.instantiate().unwrap();
            let held = hold(&stream);
            let launched = exec.launch(&stream).unwrap();
            let (mut graph, mut exec, mut made) = (Some(graph), Some(exec), Some((ordered, mine)));
            let mut back = Box::pin(wrapped.into_inner());
            for step in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][order] {
                match step {
                    0 => drop(graph.take()),
                    1 => drop(exec.take()),
                    _ => drop(made.take()),
                }
                assert!(futures::FutureExt::now_or_never(&mut back).is_none(), "a launch uses it");
            }
            drop(held);
            launched.completed().await.unwrap();
            drop(back.await.unwrap());
            assert_eq!(sum.to_vec(&stream).await.unwrap(), [3; 64]);
        }
        freed(&device).await;
    });
}

/// A capture within a capture, of another device and of the same, with the outer one's memory.
#[test]
fn holds_captures_within_captures() {
    alone("holds_captures_within_captures", async || {
        let (here, there) = (emulated(), emulated());
        let (one, two) = (Stream::new(&here).unwrap(), Stream::new(&there).unwrap());
        let (mut a, mut b) = (buffer(&one, 0).await, buffer(&two, 0).await);
        let (outer, inner) = Graph::capture(&here, |capture| {
            let mut scratch = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut scratch, 3)?;
            let (inner, ()) = Graph::capture(&there, |inner| {
                let mut scratch = inner.stream().alloc::<u32>(64)?;
                inner.stream().fill(&mut scratch, 4)?;
                add_to::launch(inner.stream(), &mut b, &scratch)
            })?;
            let nothing = Graph::capture(&here, |inner| {
                inner.stream().fill(&mut a, 9)?;
                Err::<(), Error>("no".into())
            });
            assert!(nothing.is_err());
            add_to::launch(capture.stream(), &mut a, &scratch)?;
            Ok(inner)
        })
        .unwrap();
        outer.instantiate().unwrap().launch(&one).unwrap();
        inner.instantiate().unwrap().launch(&two).unwrap();
        assert_eq!((a.to_vec(&one).await.unwrap()[0], b.to_vec(&two).await.unwrap()[0]), (3, 4));
    });
}

/// The handles of a capture's own events are never those of the device's: a record of a graph event is a node.
#[test]
fn holds_graph_events_are_no_events_of_the_capture() {
    alone("holds_graph_events_are_no_events_of_the_capture", async || {
        let device = emulated();
        let events: Vec<_> = (0..200).map(|_| GraphEvent::new(&device).unwrap()).collect();
        let (graph, ()) = Graph::capture(&device, |capture| {
            let _others: Vec<_> = (0..20).map(|n| capture.fork(&format!("{n}"))).collect::<Result<_>>()?;
            events.iter().try_for_each(|event| event.record(capture.stream()))
        })
        .unwrap();
        assert_eq!(graph.nodes().len(), 200);
    });
}

/// Threads that capture, launch, set, update, use and drop at random, with one thing at a time in each exec.
#[test]
fn holds_threads_at_random() {
    alone("holds_threads_at_random", async || {
        let device = emulated();
        let shared = Arc::new(buffer(&Stream::new(&device).unwrap(), 1).await);
        let threads: Vec<_> = (0..4_u64)
            .map(|seed| {
                let (device, shared) = (device.clone(), shared.clone());
                std::thread::spawn(move || {
                    let mut state = seed * 77 + 1;
                    let mut dice = move |sides: u64| {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        (state >> 33) % sides
                    };
                    let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
                    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
                    streams[0].fill(&mut data, 0).unwrap();
                    let capture = |data: &mut Buffer<u32>| {
                        Graph::capture(&device, |capture| {
                            let mut x = capture.stream().alloc::<u32>(64)?;
                            capture.stream().copy(&*shared, &mut x)?;
                            add_to::launch(capture.stream(), data, &x)
                        })
                        .unwrap()
                        .0
                    };
                    let mut execs: Vec<wakeline::graph::Exec> = Vec::new();
                    for _ in 0..300 {
                        let stream = &streams[dice(2) as usize];
                        match dice(8) {
                            0 => execs.push(capture(&mut data).instantiate().unwrap()),
                            1 if !execs.is_empty() => drop(execs.swap_remove(dice(execs.len() as u64) as usize)),
                            2 if !execs.is_empty() => execs[0].update(&capture(&mut data)).unwrap(),
                            3 => {
                                let mut other = Buffer::<u32>::new(&device, 64).unwrap();
                                stream.copy(&data, &mut other).unwrap();
                                std::mem::swap(&mut other, &mut data);
                            }
                            4 => increment::launch(stream, &mut data).unwrap(),
                            _ if !execs.is_empty() => {
                                drop(execs[dice(execs.len() as u64) as usize].launch(stream).unwrap())
                            }
                            _ => {}
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(shared);
        freed(&device).await;
    });
}

/// What a capture gave its caller is his when the graph is gone, and in order with its last launches.
#[test]
fn holds_an_output_outlives_its_graph() {
    alone("holds_an_output_outlives_its_graph", async || {
        let device = emulated();
        let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
        let (graph, mut output) = Graph::capture(&device, |capture| {
            let mut output = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut output, 5)?;
            Ok(output)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let held = hold(&one);
        exec.launch(&one).unwrap();
        drop((exec, graph));
        increment::launch(&two, &mut output).unwrap();
        drop(held);
        assert_eq!(output.to_vec(&two).await.unwrap(), [6; 64]);
        drop(output);
        freed(&device).await;
    });
}

/// A graph that makes memory: its exec is dropped in flight, and until the lookout has seen the end there can be no other.
#[test]
fn an_exec_that_was_dropped_in_flight_is_in_the_way_of_the_next() {
    alone("an_exec_that_was_dropped_in_flight_is_in_the_way_of_the_next", async || {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let mut builder = Graph::builder(&device).unwrap();
        let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
        builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
        let graph = builder.build().unwrap();
        let exec = graph.instantiate().unwrap();
        let held = hold(&stream);
        let launched = exec.launch(&stream).unwrap();
        drop((exec, held));
        launched.completed().await.unwrap();
        // Dropped, and its launches are done.
        let next = graph.instantiate().map(drop);
        assert!(next.is_ok(), "{next:?}");
    });
}
