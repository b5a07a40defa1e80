//! Log writers that use their hub, panic, block or are slow.

use super::*;

/// A writer that passes each text to a closure.
struct Lines<F>(F);

impl<F: FnMut(&str) + Send> Write for Lines<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_log_writer_may_use_its_hub() {
    alone("hostile_flows::logs::a_log_writer_may_use_its_hub", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(4).build().unwrap();
        let (mut produce, mut other) = (hub.produce(&host()).unwrap(), Some(hub.produce(&host()).unwrap()));
        let (inspected, text) = (hub.clone(), Arc::new(Mutex::new(String::new())));
        let written = text.clone();
        hub.log_to(Lines(move |line: &str| {
            // The chunk is in the hub before its line is written.
            assert!(!inspected.is_empty());
            written.lock().unwrap().push_str(line);
            if let Some(mut other) = other.take() {
                put(&mut other, 2).now_or_never().unwrap();
            }
        }));
        put(&mut produce, 1).await;
        assert_eq!(hub.len(), 2);
        let text = text.lock().unwrap().clone();
        assert_eq!(text, "h: chunk 1: produced on the host, 4 B\nh: chunk 2: produced on the host, 4 B\n");
        // Breaks a cycle: the hub keeps the writer, which owns a clone of the hub.
        hub.log_to(io::sink());
    });
}

#[test]
fn a_log_writer_that_panics_does_not_harm_its_hub() {
    alone("hostile_flows::logs::a_log_writer_that_panics_does_not_harm_its_hub", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap();
        hub.log_to(Lines(|line: &str| assert!(!line.contains("modified"), "a log writer panics")));
        put(&mut hub.produce(&host()).unwrap(), 1).await;
        let mut modify = hub.modify(&host()).unwrap();
        for _ in 0..3 {
            modify.next().await.unwrap().unwrap().commit().unwrap();
        }
        // A writer whose destructor panics.
        hub.log_to(Lines({
            let bomb = Bomb;
            move |_: &str| _ = &bomb
        }));
        hub.log_to(io::sink());
        assert_eq!(hub.len(), 1);
    });
}

#[test]
fn a_log_writer_that_blocks_blocks_only_its_own_thread() {
    alone("hostile_flows::logs::a_log_writer_that_blocks_blocks_only_its_own_thread", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
        let (go, held) = mpsc::channel::<()>();
        let (began, wait) = mpsc::channel();
        let lines = Arc::new(AtomicUsize::new(0));
        let written = lines.clone();
        hub.log_to(Lines(move |line: &str| {
            let _ = began.send(());
            let _ = held.recv();
            written.fetch_add(line.matches('\n').count(), Ordering::SeqCst);
        }));
        let mut first = hub.produce(&host()).unwrap();
        let writes = std::thread::spawn(move || put(&mut first, 1).now_or_never().unwrap());
        wait.recv().unwrap();
        // Other threads go on meanwhile.
        let mut consume = hub.consume(&host()).unwrap();
        consume.next().await.unwrap().unwrap().commit().unwrap();
        drop(go);
        writes.join().unwrap();
        assert_eq!(lines.load(Ordering::SeqCst), 3, "the lines of other threads are written too");
    });
}

fn empty() -> ChunkHub<u32> {
    ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap()
}

/// Each line that is written causes another one, as a thread does that never stops logging.
#[test]
fn a_hub_that_logs_a_line_for_each_line_blocks_no_thread_for_ever() {
    alone("hostile_flows::logs::a_hub_that_logs_a_line_for_each_line_blocks_no_thread_for_ever", async {
        let (hub, lines) = (empty(), Arc::new(AtomicUsize::new(0)));
        let slot = Arc::new(Mutex::new(Some(hub.clone())));
        hub.log_to(Lines({
            let (slot, lines) = (slot.clone(), lines.clone());
            move |text: &str| {
                if text.ends_with('\n') {
                    lines.fetch_add(1, Ordering::SeqCst);
                    slot.lock().unwrap().iter().for_each(ChunkHub::flow_freely);
                }
            }
        }));
        hub.flow_freely();
        let written = lines.load(Ordering::SeqCst);
        assert!((1..=1025).contains(&written), "{written} lines");
        // The last line is written when the hub is dropped.
        *slot.lock().unwrap() = None;
        drop(hub);
        assert_eq!(lines.load(Ordering::SeqCst), written + 1);
    });
}

#[test]
fn lines_that_are_dropped_for_a_slow_writer_are_counted() {
    const CAPACITY: usize = 1024;
    alone("hostile_flows::logs::lines_that_are_dropped_for_a_slow_writer_are_counted", async {
        let (hub, text) = (empty(), Arc::new(Mutex::new(String::new())));
        let ((go, held), (began, wait)) = (mpsc::channel::<()>(), mpsc::channel());
        hub.log_to(Lines({
            let text = text.clone();
            move |part: &str| {
                let _ = began.send(());
                let _ = held.recv();
                text.lock().unwrap().push_str(part);
            }
        }));
        let writes = std::thread::spawn({
            let hub = hub.clone();
            move || hub.flow_freely()
        });
        wait.recv().unwrap();
        (0..CAPACITY + 500).for_each(|_| hub.flow_freely());
        drop(go);
        writes.join().unwrap();
        hub.flow_freely();
        let text = text.lock().unwrap();
        let lines: Vec<_> = text.lines().collect();
        let dropped = "h: 500 lines were dropped here, since the writer is too slow";
        assert_eq!((lines.len(), lines[1 + CAPACITY]), (1 + CAPACITY + 2, dropped));
        assert!(lines[2 + CAPACITY].contains("data flows"), "{}", lines[2 + CAPACITY]);
    });
}

#[derive(Debug)]
struct PanicsInDisplay;

impl std::fmt::Display for PanicsInDisplay {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("cannot be displayed")
    }
}

impl std::error::Error for PanicsInDisplay {}

#[test]
fn a_step_log_survives_panics_of_its_writer_and_of_an_error_text() {
    alone("hostile_flows::logs::a_step_log_survives_panics_of_its_writer_and_of_an_error_text", async {
        let flow = |fails: bool| {
            let (mut flow, mut numbers) = (Flow::new("f"), 1..=3);
            let next = move || {
                let next = numbers.next();
                ready(if fails && next.is_none() { Err(Error::other(PanicsInDisplay)) } else { Ok(next) })
            };
            let source = flow.add("source", source(next));
            let sink = flow.add("sink", sink(|_: u32| ready(Ok(()))));
            flow.connect(source.output, sink.input);
            flow
        };
        let mut all = None;
        for panics_at in [usize::MAX, 0, 1, 4] {
            let (mut lines, count) = (0, Arc::new(AtomicUsize::new(0)));
            let written = count.clone();
            let writer = Lines(move |text: &str| {
                lines += text.matches('\n').count();
                written.store(lines, Ordering::SeqCst);
                assert!(lines <= panics_at, "a step log's writer panics");
            });
            let mut steps = flow(false).steps().unwrap().log_to(writer);
            let mut made = 0;
            while steps.next().await.is_some() {
                made += 1;
            }
            steps.run_on().await.unwrap();
            assert_eq!(made, *all.get_or_insert(made), "no step is lost");
            assert!(
                count.load(Ordering::SeqCst) <= panics_at.saturating_add(1),
                "the writer is called after its panic"
            );
        }
        let text = Arc::new(Mutex::new(String::new()));
        let written = text.clone();
        let writer = Lines(move |line: &str| written.lock().unwrap().push_str(line));
        let mut steps = flow(true).steps().unwrap().log_to(writer);
        while steps.next().await.is_some() {}
        assert!(steps.run_on().await.is_err());
        let text = text.lock().unwrap().clone();
        assert!(text.trim_end().ends_with("(a text that panicked)"), "{text}");
    });
}

/// A snapshot at a flow's end has the text of its error, whose `Display` is user code.
#[test]
fn an_observed_flow_fails_with_an_error_whose_text_panics() {
    alone("hostile_flows::logs::an_observed_flow_fails_with_an_error_whose_text_panics", async {
        let watch = wakeline::observe::Observe::new();
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(|| ready(Err::<Option<u32>, _>(Error::other(PanicsInDisplay)))));
        let sink = flow.add("sink", sink(|_: u32| ready(Ok(()))));
        flow.connect(source.output, sink.input);
        flow.observe(&watch);
        assert!(flow.run().await.is_err_and(|error| error.downcast_ref::<PanicsInDisplay>().is_some()));
        let last = watch.snapshots().remove(0);
        assert_eq!(last.failure.unwrap().message, "operator failed: the text of the error panicked");
    });
}
