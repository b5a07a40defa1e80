//! Flows of a program that a profiler has started, with a library of the test's own in the profiler's place.
//!
//! The library is loaded once a process, so the program of each test runs in a process of its own.

#![cfg(all(feature = "cuda", target_os = "linux", target_pointer_width = "64"))]

mod injection;

use std::{
    collections::{HashMap, HashSet},
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use common::{MapPorts, cuda, emulated};
use wakeline::{device::Simulation, flow::LocalFlow, observe::Observe, operator::concurrent, prelude::*};

/// The variable that says that this process is a test's program.
const PROGRAM: &str = "NVTX_TEST_PROGRAM";

/// What a program of a test leaves: the calls of the profiler's library, and its errors.
struct Seen {
    calls: Vec<Call>,
    text: String,
}

/// One call of the profiler's library.
#[derive(Clone, Debug)]
struct Call {
    thread: u64,
    name: String,
    arguments: Vec<String>,
}

/// The library: the one that this variable names, or else compiled once.
fn library() -> &'static OsStr {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        // In a test's program, that is the one in use.
        if let Some(path) = env::var_os("NVTX_TEST_LIBRARY") {
            return path.into();
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (path, made) =
            (folder.join("libinjection.so"), folder.join(format!("libinjection-{}.so", std::process::id())));
        // The one beside this toolchain's Cargo.
        let beside = Path::new(&env::var_os("CARGO").unwrap_or_default()).with_file_name("rustc");
        let rustc = if beside.is_file() { beside } else { "rustc".into() };
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/nvtx/injection.rs");
        let mut command = Command::new(&rustc);
        command.args(["--edition=2024", "--crate-type=cdylib", "-Awarnings", "-Cpanic=abort", source, "-o"]).arg(&made);
        let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", rustc.display()));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Another run of this test might use the file.
        fs::rename(made, &path).unwrap();
        path
    });
    library.as_os_str()
}

/// Runs the program of the named test in a process with this library of a profiler. `None` in that process.
fn with_profiler(
    test: &str,
    library: impl AsRef<OsStr>,
    variables: &[(&str, &str)],
    program: impl Future<Output = ()>,
) -> Option<Seen> {
    if env::var(PROGRAM).is_ok_and(|name| name == test) {
        tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(3).enable_all().build().unwrap().block_on(program);
        return None;
    }
    let log = env::temp_dir().join(format!("wakeline-nvtx-{test}-{}", std::process::id()));
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--include-ignored"]).env(PROGRAM, test).env("NVTX_TEST_LOG", &log);
    command.env("NVTX_TEST_LIBRARY", &library).env("NVTX_INJECTION64_PATH", &library).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{}:\n{text}", output.status);
    let calls = fs::read_to_string(&log).unwrap_or_default();
    let _ = fs::remove_file(&log);
    let calls = calls.lines().map(|line| {
        let mut parts = line.split('\t').map(str::to_owned);
        Call { thread: parts.next().unwrap().parse().unwrap(), name: parts.next().unwrap(), arguments: parts.collect() }
    });
    Some(Seen { calls: calls.collect(), text })
}

impl Seen {
    fn of(&self, name: &str) -> Vec<Vec<&str>> {
        let calls = self.calls.iter().filter(|call| call.name == name);
        calls.map(|call| call.arguments.iter().map(String::as_str).collect()).collect()
    }

    /// The runs, by operator and number, in the order of their ends. All have ended.
    fn runs(&self) -> Vec<(&str, u64)> {
        let (mut open, mut done) = (HashMap::new(), Vec::new());
        for call in &self.calls {
            match (&*call.name, &call.arguments[..]) {
                ("start", [range, category, operator, payload]) => {
                    assert_eq!(category, "1", "{call:?}");
                    let run = (operator.as_str(), payload.parse().unwrap());
                    assert!(open.insert(range, run).is_none(), "{call:?}");
                }
                ("end", [range]) => {
                    done.push(open.remove(range).unwrap_or_else(|| panic!("{call:?}")));
                }
                ("start" | "end", _) => panic!("{call:?}"),
                _ => {}
            }
        }
        assert!(open.is_empty(), "these runs do not end: {open:?}");
        done
    }

    fn numbers(&self, operator: &str) -> Vec<u64> {
        self.runs().iter().filter(|run| run.0 == operator).map(|run| run.1).collect()
    }

    /// The operators of the polls, which nest on each thread and have all ended.
    fn polls(&self) -> Vec<String> {
        let (mut open, mut done) = (HashMap::<u64, Vec<&str>>::new(), Vec::new());
        for call in &self.calls {
            let pushed = open.entry(call.thread).or_default();
            match (&*call.name, &call.arguments[..]) {
                ("push", [category, operator, _]) => {
                    assert_eq!(category, "2", "{call:?}");
                    pushed.push(operator);
                }
                ("pop", [level]) => {
                    done.push(pushed.pop().unwrap_or_else(|| panic!("{call:?}")).to_owned());
                    assert_eq!(level.parse(), Ok(pushed.len()), "{call:?}");
                }
                ("push" | "pop", _) => panic!("{call:?}"),
                _ => {}
            }
        }
        assert!(open.values().all(Vec::is_empty), "these polls do not end: {open:?}");
        done
    }

    /// The payloads of the marks with this category and name.
    fn marks(&self, category: &str, name: &str) -> Vec<u64> {
        let marks = self.of("mark").into_iter().filter(|mark| mark[..2] == [category, name]);
        marks.map(|mark| mark[2].parse().unwrap()).collect()
    }

    fn assert_valid(&self) {
        let wrong = self.calls.iter().find(|call| call.arguments.iter().any(|text| text.starts_with("error")));
        assert!(wrong.is_none(), "{wrong:?}");
    }
}

/// Twenty numbers, through an operator that is polled twice a run, perhaps on different threads.
fn counting() -> Flow {
    let mut flow = Flow::new("counting");
    let mut numbers = 0..20_u32;
    let read = flow.add("read", source(move || std::future::ready(Ok(numbers.next()))));
    let double = map(async |number: u32| {
        tokio::task::yield_now().await;
        Ok(2 * number)
    });
    let double = flow.add("double", double);
    let write = flow.add("write é", sink(async |_: u32| Ok(())));
    flow.connect(read.output, double.input);
    flow.connect(double.output, write.input);
    flow
}

#[test]
fn runs_polls_and_messages_are_shown() {
    let seen = with_profiler("runs_polls_and_messages_are_shown", library(), &[], async {
        let mut flow = counting();
        let report = flow.run().await.unwrap();
        assert_eq!(report.operator("double").unwrap().runs, 20);
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.of("domain"), [["wakeline"]]);
    let categories = seen.of("category").iter().map(|category| category[1]).collect::<Vec<_>>();
    assert_eq!(categories, ["run", "poll", "sent", "taken", "problem"]);
    let names = seen.of("register").concat();
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "each once: {names:?}");

    for operator in ["double", "write é"] {
        assert_eq!(seen.numbers(operator), (0..20).collect::<Vec<_>>(), "{operator}");
    }
    assert!(seen.numbers("read").len() >= 20);
    let polls = seen.polls();
    assert!(polls.iter().filter(|operator| **operator == "double").count() >= 40, "two in each run");
    let (sent, taken) = ("3", "4");
    for hub in ["read.output -> double.input", "double.output -> write é.input"] {
        assert_eq!(seen.marks(sent, hub), (1..=20).collect::<Vec<_>>(), "{hub}");
        assert_eq!(seen.marks(taken, hub), (1..=20).collect::<Vec<_>>(), "{hub}");
    }
}

#[test]
fn a_second_flow_registers_no_name_again() {
    let seen = with_profiler("a_second_flow_registers_no_name_again", library(), &[], async {
        counting().run().await.unwrap();
        counting().run().await.unwrap();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.of("domain").len(), 1);
    let names = seen.of("register").concat();
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
    assert_eq!(seen.numbers("double").len(), 40);
}

#[test]
fn an_observer_sees_the_same_flow() {
    let seen = with_profiler("an_observer_sees_the_same_flow", library(), &[], async {
        let watch = Observe::new().paths(1);
        let mut flow = counting();
        flow.observe(&watch);
        flow.run().await.unwrap();
        let last = watch.snapshots().pop().unwrap();
        assert_eq!(last.operator("double").unwrap().runs, 20);
        assert_eq!(last.paths.iter().map(|path| path.count).sum::<u64>(), 20);
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.numbers("double").len(), 20);
    seen.polls();
}

#[test]
fn runs_that_overlap_have_their_own_ranges() {
    #[derive(Clone)]
    struct Yields;

    impl Operator for Yields {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
            let number = ports.input.take()?;
            for _ in 0..number % 5 {
                tokio::task::yield_now().await;
            }
            Ok(ports.output.send(number).await?)
        }
    }

    let seen = with_profiler("runs_that_overlap_have_their_own_ranges", library(), &[], async {
        let mut flow = Flow::new("overlapping");
        let mut numbers = 0..40_u32;
        let read = flow.add("read", source(move || std::future::ready(Ok(numbers.next()))));
        let work = flow.add("work", concurrent(3, Yields));
        let write = flow.add("write", sink(async |_: u32| Ok(())));
        flow.connect(read.output, work.input);
        flow.connect(work.output, write.input);
        flow.run().await.unwrap();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    let mut numbers = seen.numbers("work");
    numbers.sort_unstable();
    assert_eq!(numbers, (0..40).collect::<Vec<_>>(), "one of each run");
    seen.polls();
}

#[test]
fn a_run_that_is_aborted_ends_its_range() {
    let seen = with_profiler("a_run_that_is_aborted_ends_its_range", library(), &[], async {
        let (began, begins) = tokio::sync::oneshot::channel();
        let mut began = Some(began);
        let mut flow = Flow::new("aborted");
        let read = flow.add("read", source(async || Ok(Some(()))));
        let hangs = move |()| {
            began.take().into_iter().for_each(|began| began.send(()).unwrap());
            std::future::pending()
        };
        let hangs = flow.add("hangs", sink(hangs));
        flow.connect(read.output, hangs.input);
        let running = flow.spawn().unwrap();
        begins.await.unwrap();
        running.abort();
        // It keeps the flow's state.
        let handle = running.handle();
        running.await.unwrap_err();
        std::mem::forget(handle);
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.numbers("hangs"), [0]);
    seen.polls();
}

#[test]
fn a_panic_in_a_run_ends_its_ranges_and_is_marked() {
    let seen = with_profiler("a_panic_in_a_run_ends_its_ranges_and_is_marked", library(), &[], async {
        let mut flow = Flow::new("panics");
        let read = flow.add("read", source(async || Ok(Some(()))));
        let write = flow.add("write", sink(async |()| panic!("as planned")));
        flow.connect(read.output, write.input);
        flow.run().await.unwrap_err();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.numbers("write"), [0]);
    seen.polls();
    assert_eq!(seen.marks("5", "write").len(), 1);
}

#[test]
fn a_local_flow_and_a_device_are_shown_too() {
    let seen = with_profiler("a_local_flow_and_a_device_are_shown_too", library(), &[], async {
        let device = emulated();
        let mut flow = LocalFlow::new("local");
        let mut left = 5;
        let read = source(move || {
            left -= 1;
            std::future::ready(Ok((left >= 0).then_some(left)))
        });
        let read = flow.add("read", read);
        let work = sink_with(async |_: i32, cx: &mut Cx| cx.stream()?.completed().await);
        let work = flow.add("work", work).on(&device);
        flow.connect(read.output, work.input);
        tokio::task::LocalSet::new().run_until(flow.run()).await.unwrap();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.numbers("work"), [0, 1, 2, 3, 4]);
    seen.polls();
    assert!(seen.of("stream").is_empty(), "no stream of an emulated device is one of CUDA's");
}

#[test]
#[ignore = "needs a GPU"]
fn streams_of_a_gpu_have_the_names_of_their_operators() {
    let seen = with_profiler("streams_of_a_gpu_have_the_names_of_their_operators", library(), &[], async {
        let device = cuda();
        let mut flow = Flow::new("named");
        let mut numbers = 0..3_u32;
        let read = flow.add("read", source(move || std::future::ready(Ok(numbers.next()))));
        let work = sink_with(async |_: u32, cx: &mut Cx| cx.stream()?.completed().await);
        let work = flow.add("work", work).on(&device);
        flow.connect(read.output, work.input);
        flow.run().await.unwrap();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    let names = seen.of("stream");
    assert!(names.iter().any(|name| name[0] != "0" && name[1] == "work"), "{names:?}");
}

#[test]
fn a_flow_that_is_stepped_or_simulated_is_shown_too() {
    let seen = with_profiler("a_flow_that_is_stepped_or_simulated_is_shown_too", library(), &[], async {
        let mut steps = counting().steps().unwrap();
        while steps.next().await.is_some() {}
        let report = steps.run_on().await.unwrap();
        assert_eq!(report.operator("double").unwrap().runs, 20);
        let simulated = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().start_paused(true).build().unwrap();
            let outcome = runtime.block_on(Simulation::new(1).run(async { counting().run().await }));
            assert_eq!(outcome.unwrap().operator("double").unwrap().runs, 20);
        };
        std::thread::spawn(simulated).join().unwrap();
    });
    let Some(seen) = seen else { return };
    seen.assert_valid();
    assert_eq!(seen.numbers("double"), (0..20).chain(0..20).collect::<Vec<_>>());
    seen.polls();
}

/// A library that does not work is reported once, and the flows run.
#[test]
fn a_library_that_does_not_work_is_reported() {
    let program = || async {
        counting().run().await.unwrap();
        counting().run().await.unwrap();
    };
    let test = "a_library_that_does_not_work_is_reported";
    for (library, variables, reason) in [
        (OsStr::new("/no/such/library.so"), &[][..], "/no/such/library.so: the library was not loaded: "),
        (OsStr::new("libc.so.6"), &[][..], "it has no function `InitializeInjectionNvtx2`"),
        (library(), &[("NVTX_TEST_REFUSES", "1")][..], "`InitializeInjectionNvtx2` returned 0"),
    ] {
        let Some(seen) = with_profiler(test, library, variables, program()) else { return };
        let warnings = seen.text.lines().filter(|line| line.contains("NVTX_INJECTION64_PATH=")).collect::<Vec<_>>();
        assert_eq!(warnings.len(), 1, "{}", seen.text);
        assert!(warnings[0].contains("WARN") && warnings[0].contains(reason), "{}", warnings[0]);
        assert!(seen.calls.is_empty());
    }
}
