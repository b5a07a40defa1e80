//! Writers of logs: they use the hub, panic, block, or are slow.

use super::*;

/// What a writer does with the lines that it is given.
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
fn the_writer_of_a_log_uses_its_hub() {
    alone("hostile_flows::logs::the_writer_of_a_log_uses_its_hub", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(4).build().unwrap();
        let (mut produce, mut other) = (hub.produce(&host()).unwrap(), Some(hub.produce(&host()).unwrap()));
        let (asked, text) = (hub.clone(), Arc::new(Mutex::new(String::new())));
        let written = text.clone();
        hub.log_to(Lines(move |line: &str| {
            // The chunk is there by the time that its line is written.
            assert!(!asked.is_empty());
            written.lock().unwrap().push_str(line);
            if let Some(mut other) = other.take() {
                put(&mut other, 2).now_or_never().unwrap();
            }
        }));
        put(&mut produce, 1).await;
        assert_eq!(hub.len(), 2);
        let text = text.lock().unwrap().clone();
        assert_eq!(text, "h: chunk 1: produced on the host, 4 B\nh: chunk 2: produced on the host, 4 B\n");
        // A cycle: the hub keeps the writer, which has the hub.
        hub.log_to(io::sink());
    });
}

#[test]
fn the_writer_of_a_log_panics() {
    alone("hostile_flows::logs::the_writer_of_a_log_panics", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap();
        hub.log_to(Lines(|line: &str| assert!(!line.contains("modified"), "the writer of a log panics")));
        put(&mut hub.produce(&host()).unwrap(), 1).await;
        let mut modify = hub.modify(&host()).unwrap();
        for _ in 0..3 {
            modify.next().await.unwrap().unwrap().commit().unwrap();
        }
        // And one whose destructor does.
        hub.log_to(Lines({
            let bomb = Bomb;
            move |_: &str| _ = &bomb
        }));
        hub.log_to(io::sink());
        assert_eq!(hub.len(), 1);
    });
}

#[test]
fn the_writer_of_a_log_holds_up_its_own_thread_alone() {
    alone("hostile_flows::logs::the_writer_of_a_log_holds_up_its_own_thread_alone", async {
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
        // Meanwhile others go on.
        let mut consume = hub.consume(&host()).unwrap();
        consume.next().await.unwrap().unwrap().commit().unwrap();
        drop(go);
        writes.join().unwrap();
        assert_eq!(lines.load(Ordering::SeqCst), 3, "the lines of others are written, too");
    });
}

fn empty() -> ChunkHub<u32> {
    ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap()
}

/// As another thread does that goes on all the time.
#[test]
fn a_hub_that_notes_a_line_for_each_line_blocks_no_thread_for_ever() {
    alone("hostile_flows::logs::a_hub_that_notes_a_line_for_each_line_blocks_no_thread_for_ever", async {
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
        // The one that is left is written as the hub goes.
        *slot.lock().unwrap() = None;
        drop(hub);
        assert_eq!(lines.load(Ordering::SeqCst), written + 1);
    });
}

#[test]
fn lines_that_a_writer_is_too_slow_for_are_counted() {
    const MOST: usize = 1024;
    alone("hostile_flows::logs::lines_that_a_writer_is_too_slow_for_are_counted", async {
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
        (0..MOST + 500).for_each(|_| hub.flow_freely());
        drop(go);
        writes.join().unwrap();
        hub.flow_freely();
        let text = text.lock().unwrap();
        let lines: Vec<_> = text.lines().collect();
        let dropped = "h: 500 lines were dropped here, since the writer is too slow";
        assert_eq!((lines.len(), lines[1 + MOST]), (1 + MOST + 2, dropped));
        assert!(lines[2 + MOST].contains("data flows"), "{}", lines[2 + MOST]);
    });
}

/// An error whose `Display` panics.
#[derive(Debug)]
struct Unspeakable;

impl std::fmt::Display for Unspeakable {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("cannot be displayed")
    }
}

impl std::error::Error for Unspeakable {}

#[test]
fn the_writer_of_the_log_of_steps_panics_and_so_does_an_error_in_it() {
    alone("hostile_flows::logs::the_writer_of_the_log_of_steps_panics_and_so_does_an_error_in_it", async {
        let flow = |fails: bool| {
            let (mut flow, mut numbers) = (Flow::new("f"), 1..=3);
            let next = move || {
                let next = numbers.next();
                ready(if fails && next.is_none() { Err(Error::other(Unspeakable)) } else { Ok(next) })
            };
            let source = flow.add("source", source(next));
            let sink = flow.add("sink", sink(|_: u32| ready(Ok(()))));
            flow.connect(source.output, sink.input);
            flow
        };
        let mut all = None;
        for panics_at in [usize::MAX, 0, 1, 4] {
            let (mut lines, kept) = (0, Arc::new(AtomicUsize::new(0)));
            let written = kept.clone();
            let writer = Lines(move |text: &str| {
                lines += text.matches('\n').count();
                written.store(lines, Ordering::SeqCst);
                assert!(lines <= panics_at, "the writer");
            });
            let mut steps = flow(false).steps().unwrap().log_to(writer);
            let mut made = 0;
            while steps.next().await.is_some() {
                made += 1;
            }
            steps.run_on().await.unwrap();
            assert_eq!(made, *all.get_or_insert(made), "no step is lost");
            assert!(kept.load(Ordering::SeqCst) <= panics_at.saturating_add(1), "it is not written to again");
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
