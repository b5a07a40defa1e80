//! Cost of a live page: the processor time of its thread, and of the observer's, without a viewer and with one, for 100
//! operators that run and for 10,000 that wait.
//!
//! `cargo bench -p wakeline-benches --features page --bench page`

#[path = "support/figure.rs"]
mod figure;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

use figure::figure;
use tokio::runtime::Runtime;
use wakeline::{
    condition::Gate,
    observe::{Observe, Page},
    operator::{map, sink, source},
    prelude::*,
};

const TIME: Duration = Duration::from_secs(10);

/// The processor time of the thread with this name, in seconds.
fn used(name: &str) -> f64 {
    let threads = fs::read_dir("/proc/self/task").expect("Linux");
    let of = |folder: fs::DirEntry| {
        let is_it = fs::read_to_string(folder.path().join("comm")).ok()?.trim() == &name[..name.len().min(15)];
        let text = fs::read_to_string(folder.path().join("schedstat")).ok().filter(|_| is_it)?;
        text.split(' ').next()?.parse::<f64>().ok().map(|nanos| nanos / 1e9)
    };
    threads.flatten().filter_map(of).sum()
}

/// Opens the page as a browser does, and reads its events.
fn view(page: &Page) -> BufReader<TcpStream> {
    let address = page.address();
    let (_, key) = page.url().split_once("#key=").expect("the URL has a key");
    let mut stream = TcpStream::connect(address).expect("it is served");
    let head = format!("Host: {address}\r\nOrigin: http://{address}\r\n");
    write!(stream, "POST /session HTTP/1.1\r\n{head}Content-Length: {}\r\n\r\n{key}", key.len()).expect("it reads");
    let mut reader = BufReader::new(stream);
    let mut cookie = String::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("it answers");
        if let Some(value) = line.strip_prefix("set-cookie: ") {
            cookie = value.split(';').next().unwrap_or_default().to_owned();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    write!(reader.get_mut(), "GET /events HTTP/1.1\r\n{head}Cookie: {cookie}\r\n\r\n").expect("it reads");
    reader
}

/// Events, and their bytes.
fn read(mut reader: BufReader<TcpStream>) -> (u64, u64) {
    reader.get_ref().set_read_timeout(Some(2 * TIME)).expect("a timeout");
    let (mut events, mut bytes, mut line) = (0, 0, String::new());
    while reader.read_line(&mut line).is_ok_and(|count| count > 0) {
        events += u64::from(line.starts_with("data: "));
        bytes += line.len() as u64;
        line.clear();
    }
    (events, bytes)
}

/// `limit`: of the page's thread with a viewer, in percent of a core.
fn measure(runtime: &Runtime, name: &str, limit: f64, make: impl FnOnce(&mut Flow) -> Option<Gate>) {
    let watch = Observe::new();
    let mut flow = Flow::new(name);
    let gate = make(&mut flow);
    flow.observe(&watch);
    let (running, page) = runtime.block_on(async {
        let page = watch.page("127.0.0.1:0").await.expect("a page");
        (flow.spawn().expect("it is valid"), page)
    });
    thread::sleep(Duration::from_secs(2));
    let threads = ["wakeline-page", "wakeline-observer"];
    let over = |label: &str| {
        let before = threads.map(used);
        thread::sleep(TIME);
        for (thread, before) in threads.iter().zip(before) {
            let percent = 100.0 * (used(thread) - before) / TIME.as_secs_f64();
            figure(&format!("{name}, {label}, {thread}"), percent, "% of a core", limit);
        }
    };
    over("no viewer");
    let reader = view(&page);
    let viewer = thread::spawn(move || read(reader));
    over("a viewer");
    runtime.block_on(page.close());
    let (events, bytes) = viewer.join().expect("it does not panic");
    let rate = events as f64 / TIME.as_secs_f64();
    figure(&format!("{name}, events"), rate, "a second", 4.0);
    println!("{} bytes an event", bytes / events.max(1));
    running.stop();
    if let Some(gate) = gate {
        gate.resume();
    }
    runtime.block_on(running).expect("it ends");
}

fn main() {
    if !figure::asked() {
        return;
    }
    let runtime = Runtime::new().expect("a runtime");
    measure(&runtime, "100 operators that run", 1.0, |flow| {
        let pace = || async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok(Some(0_u64))
        };
        let mut last = flow.add("source", source(pace)).output;
        for at in 0..98 {
            let next = flow.add(format!("stage {at}"), map(async |n: u64| Ok(n + 1)));
            flow.connect(last, next.input);
            last = next.output;
        }
        let end = flow.add("sink", sink(async |_: u64| Ok(())));
        flow.connect(last, end.input);
        None
    });
    measure(&runtime, "10,000 operators that wait", 5.0, |flow| {
        let gate = Gate::paused();
        for pair in 0..5000 {
            let numbers = flow.add(format!("source {pair}"), source(async || Ok(Some(0_u64)))).when(gate.clone());
            let end = flow.add(format!("sink {pair}"), sink(async |_: u64| Ok(())));
            flow.connect(numbers.output, end.input);
        }
        Some(gate)
    });
}
