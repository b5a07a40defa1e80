//! The live page: who gets an answer, what an event has in it, many viewers and slow ones, and its end.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use common::*;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpSocket, TcpStream},
};
use wakeline::{
    Ingress, Running,
    observe::{Observe, Page, PageOptions},
    prelude::*,
};

struct Answer {
    status: u16,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// A browser, or something that pretends to be one.
struct Client {
    address: SocketAddr,
    host: String,
    cookie: Option<String>,
}

impl Client {
    fn new(page: &Page) -> Self {
        Self { address: page.address(), host: page.address().to_string(), cookie: None }
    }

    async fn with_key(page: &Page) -> Self {
        Self::of_url(page.url()).await
    }

    /// With the cookie that the key of a page's URL buys.
    async fn of_url(url: &str) -> Self {
        let (host, key) = url.trim().strip_prefix("http://").unwrap().split_once("/#key=").unwrap();
        let mut client = Self { address: host.parse().unwrap(), host: host.to_owned(), cookie: None };
        let answer = client.post("/session", key).await;
        assert_eq!(answer.status, 204);
        let cookie = &answer.headers["set-cookie"];
        assert!(cookie.contains("; HttpOnly") && cookie.contains("; SameSite=Strict"), "{cookie}");
        client.cookie = Some(cookie.split(';').next().unwrap().to_owned());
        client
    }

    fn head(&self, method: &str, path: &str, more: &[(&str, &str)]) -> String {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        let own = [("Host", Some(self.host.as_str())), ("Cookie", self.cookie.as_deref())];
        let own = own.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let own: Vec<_> = own.filter(|(name, _)| more.iter().all(|(other, _)| other != name)).collect();
        for (name, value) in own.iter().chain(more) {
            head += &format!("{name}: {value}\r\n");
        }
        head
    }

    async fn send(&self, method: &str, path: &str, more: &[(&str, &str)], body: &str) -> Answer {
        let head = self.head(method, path, more);
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let text = format!("{head}Connection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader).await;
        let mut body = Vec::new();
        reader.read_to_end(&mut body).await.unwrap();
        Answer { status, headers, body }
    }

    async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    async fn post(&self, path: &str, body: &str) -> Answer {
        self.send("POST", path, &[("Origin", &format!("http://{}", self.host))], body).await
    }

    async fn view(&self) -> Viewer {
        self.view_through(TcpStream::connect(self.address).await.unwrap()).await
    }

    async fn view_through(&self, mut stream: TcpStream) -> Viewer {
        let head = self.head("GET", "/events", &[]);
        stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader).await;
        Viewer { status, headers, reader }
    }
}

async fn read_head(reader: &mut BufReader<TcpStream>) -> (u16, HashMap<String, String>) {
    let mut line = String::new();
    reader.read_line(&mut line).await.unwrap();
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let mut headers = HashMap::new();
    loop {
        line.clear();
        reader.read_line(&mut line).await.unwrap();
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => return (status.unwrap(), headers),
        };
    }
}

struct Viewer {
    status: u16,
    headers: HashMap<String, String>,
    reader: BufReader<TcpStream>,
}

impl Viewer {
    /// The number of the next event, and its data. `None` at the end.
    async fn event(&mut self) -> Option<(u64, String)> {
        let mut id = None;
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).await.unwrap_or(0) == 0 {
                return None;
            }
            if let Some(number) = line.strip_prefix("id: ") {
                id = Some(number.trim().parse().unwrap());
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((id?, data.trim_end().to_owned()));
            }
            // Else it is the size of a chunk, the end of one, or a comment.
        }
    }

    async fn picture(&mut self) -> Value {
        serde_json::from_str(&self.event().await.unwrap().1).unwrap()
    }
}

/// A flow that runs until it is stopped, whose messages are secret.
fn ticking(watch: &Observe) -> Running {
    let mut flow = Flow::new("ticking");
    let tick = flow.add("tick", source(async || Ok(Some("a secret".to_owned()))));
    let tock = flow.add("tock <b>", sink(async |_: String| Ok(())));
    flow.connect(tick.output, tock.input);
    flow.observe(watch);
    flow.spawn().unwrap()
}

async fn page(watch: &Observe, options: PageOptions) -> Page {
    watch.page_with("127.0.0.1:0", options).await.unwrap()
}

const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"];
const PATHS: [&str; 11] = [
    "/",
    "/page.js",
    "/session",
    "/events",
    "/flow?id=0",
    "/timeline?id=0",
    "/trace?id=0",
    "/pause?id=0",
    "/resume?id=0",
    "/stop?id=0",
    "/none",
];

#[tokio::test]
async fn a_foreign_host_or_origin_or_a_missing_key_is_refused_with_403() {
    let watch = Observe::new();
    let running = ticking(&watch);
    let page = page(&watch, PageOptions::new().controls(true)).await;
    let (stranger, friend) = (Client::new(&page), Client::with_key(&page).await);
    let own = format!("http://{}", page.address());
    for method in METHODS {
        let reads = matches!(method, "GET" | "HEAD");
        for path in PATHS {
            for client in [&stranger, &friend] {
                for host in ["evil.example", "127.0.0.1.evil.example:80", "10.1.2.3"] {
                    let headers = [("Host", host), ("Origin", &format!("http://{host}"))];
                    assert_eq!(client.send(method, path, &headers, "").await.status, 403, "{method} {path} for {host}");
                }
                for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
                    let status = client.send(method, path, &[("Origin", origin)], "").await.status;
                    assert_eq!(status, 403, "{method} {path} from {origin}");
                }
                if !reads {
                    assert_eq!(
                        client.send(method, path, &[], "").await.status,
                        403,
                        "{method} {path} without an origin"
                    );
                }
            }
            let is_file = reads && matches!(path, "/" | "/page.js");
            let status = stranger.send(method, path, &[("Origin", &own)], "").await.status;
            assert_eq!(status, if is_file { 200 } else { 403 }, "{method} {path} without a key");
            let mut wrong = Client::new(&page);
            wrong.cookie = friend.cookie.clone().map(|cookie| format!("{}0", &cookie[..cookie.len() - 1]));
            // One of 16 cookies ends with a zero.
            if wrong.cookie != friend.cookie {
                let status = wrong.send(method, path, &[("Origin", &own)], "").await.status;
                assert_eq!(status, if is_file { 200 } else { 403 }, "{method} {path} with a wrong cookie");
            }
        }
    }
    for wrong in ["", "0", &"0".repeat(32), &"x".repeat(5000)] {
        assert_eq!(stranger.post("/session", wrong).await.status, 403);
    }
    assert!(!running.handle().is_stopping() && !running.handle().is_paused());
    assert_eq!(friend.get("/session").await.status, 204);
    assert_eq!(friend.get("/none").await.status, 404);
    assert_eq!(friend.post("/events", "").await.status, 405);
    let site = [("Sec-Fetch-Site", "same-site")];
    assert_eq!(friend.send("GET", "/session", &site, "").await.status, 403, "another port of this host");
    running.stop();
    running.await.unwrap();
}

#[tokio::test]
async fn every_answer_restricts_what_a_browser_does() {
    let watch = Observe::new();
    let page = page(&watch, PageOptions::new()).await;
    let friend = Client::with_key(&page).await;
    let viewer = friend.view().await;
    let mut all = vec![viewer.headers];
    for path in PATHS.iter().filter(|path| **path != "/events") {
        all.push(friend.get(path).await.headers);
        all.push(friend.send("GET", path, &[("Host", "evil.example")], "").await.headers);
    }
    for headers in all {
        assert!(headers["content-security-policy"].starts_with("default-src 'self';"));
        assert!(headers["content-security-policy"].contains("frame-ancestors 'none'"));
        assert!(!headers["content-security-policy"].contains("unsafe"));
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(headers["referrer-policy"], "no-referrer");
        assert!(!headers.keys().any(|name| name.starts_with("access-control")));
    }
}

#[tokio::test]
async fn hosts_can_be_added() {
    let watch = Observe::new();
    let page = page(&watch, PageOptions::new().host("gpu-3.lan")).await;
    let mut client = Client::with_key(&page).await;
    client.host = format!("gpu-3.lan:{}", page.address().port());
    assert_eq!(client.get("/session").await.status, 204);
    client.host = "gpu-4.lan:80".into();
    assert_eq!(client.get("/session").await.status, 403);
    let error = watch.page_with("127.0.0.1:0", PageOptions::new().host("http://gpu")).await.unwrap_err();
    assert!(error.to_string().contains("`http://gpu` is no host name"), "{error}");
}

#[tokio::test]
async fn an_event_is_a_picture_of_all_flows_without_their_messages() {
    let watch = Observe::new();
    let running = ticking(&watch);
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let mut viewer = client.view().await;
    assert_eq!((viewer.status, viewer.headers["content-type"].as_str()), (200, "text/event-stream"));
    let (first, text) = viewer.event().await.unwrap();
    assert!(!text.contains("a secret"));
    let one: Value = serde_json::from_str(&text).unwrap();
    let (second, text) = viewer.event().await.unwrap();
    let two: Value = serde_json::from_str(&text).unwrap();
    assert!(second > first);
    assert_eq!(one["controls"], false);
    let (one, two) = (&one["flows"][0], &two["flows"][0]);
    assert_eq!((&one["name"], &one["state"], &one["over"]), (&"ticking".into(), &"running".into(), &false.into()));
    assert_eq!(one["operators"], 2);
    assert_eq!(one["snapshot"]["operators"][1]["name"], "tock <b>");
    assert_eq!(one["snapshot"]["hubs"][0]["name"], "tick.output -> tock <b>.input");
    let passed = |flow: &Value| flow["snapshot"]["hubs"][0]["passed"].as_u64().unwrap();
    assert!(passed(two) > passed(one), "the numbers move");
    for path in ["/timeline", "/trace"] {
        assert_eq!(client.get(&format!("{path}?id={}", one["id"])).await.status, 204, "it is not recorded");
    }
    assert_eq!(client.post(&format!("/stop?id={}", one["id"]), "").await.status, 403, "it only shows");
    running.stop();
    running.await.unwrap();
}

#[tokio::test]
async fn the_last_two_seconds_of_a_recorded_flow_are_tracks_and_a_trace() {
    let watch = Observe::new().record(65_536);
    let running = ticking(&watch);
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let mut viewer = client.view().await;
    let id = viewer.picture().await["flows"][0]["id"].clone();
    viewer.picture().await;
    let timeline = client.get(&format!("/timeline?id={id}")).await.json();
    let length = timeline["seconds"].as_f64().unwrap();
    assert!(length > 0.0 && length <= 2.0, "{length}");
    let tracks = timeline["tracks"].as_array().unwrap();
    assert_eq!((&tracks[0]["name"], &tracks[1]["name"]), (&"tick".into(), &"tock <b>".into()));
    for track in tracks {
        let runs: Vec<f64> = track["runs"].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect();
        assert!(!runs.is_empty() && runs.len().is_multiple_of(3) && runs.len() / 3 <= 1601, "{}", runs.len());
        let [began, ended, work] = runs[..3] else { panic!() };
        assert!(began >= 0.0 && ended <= length * 1e6 + 1.0 && work <= ended - began + 0.1, "{track}");
    }
    let trace = client.get(&format!("/trace?id={id}")).await;
    assert_eq!(trace.headers["content-disposition"], "attachment; filename=\"ticking.pftrace\"");
    assert!(trace.body.len() > 1000);
    running.stop();
    running.await.unwrap();
}

/// The first picture in which all flows are over.
async fn ended(viewer: &mut Viewer) -> Value {
    loop {
        let picture = viewer.picture().await;
        if picture["flows"].as_array().unwrap().iter().all(|flow| flow["over"] == true) {
            return picture;
        }
    }
}

#[tokio::test]
async fn flows_that_have_ended_are_shown_with_why() {
    let watch = Observe::new();
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let running = ticking(&watch);
    running.stop();
    running.await.unwrap();
    let mut flow = Flow::new("broken");
    let tick = flow.add("tick", source(async || Ok(Some(()))));
    let fail = flow.add("fail", sink(async |()| Err("no paper".into())));
    flow.connect(tick.output, fail.input);
    flow.observe(&watch);
    flow.run().await.unwrap_err();
    let picture = ended(&mut client.view().await).await;
    let [one, two] = &picture["flows"].as_array().unwrap()[..] else { panic!("{picture}") };
    assert_eq!((&one["state"], &two["state"]), (&"ended".into(), &"failed".into()));
    assert!(two["snapshot"].is_null(), "it does not change, and is not sent again and again");
    let broken = client.get(&format!("/flow?id={}", two["id"])).await.json();
    assert_eq!(broken["snapshot"]["failure"]["kind"], "operator failed");
    assert_eq!(broken["snapshot"]["failure"]["message"], "operator `fail`: no paper");
    for none in ["/flow", "/flow?id=x", "/flow?id=18446744073709551615", "/flow?id=-1"] {
        assert_eq!(client.get(none).await.status, 404, "{none}");
    }
}

#[tokio::test]
async fn viewers_control_a_flow_where_they_may() {
    let watch = Observe::new();
    let running = ticking(&watch);
    let page = page(&watch, PageOptions::new().controls(true)).await;
    let client = Client::with_key(&page).await;
    let picture = client.view().await.picture().await;
    assert_eq!(picture["controls"], true);
    let id = &picture["flows"][0]["id"];
    assert_eq!(client.post(&format!("/pause?id={id}"), "").await.status, 204);
    assert!(running.handle().is_paused());
    assert_eq!(client.post(&format!("/resume?id={id}"), "").await.status, 204);
    assert!(!running.handle().is_paused());
    assert_eq!(client.post(&format!("/stop?id={id}"), "").await.status, 204);
    running.await.unwrap();
    assert_eq!(client.post(&format!("/stop?id={id}"), "").await.status, 404, "it has ended");
}

#[tokio::test]
async fn viewers_share_events_and_are_limited() {
    let watch = Observe::new();
    let running = ticking(&watch);
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let mut viewers = Vec::new();
    for _ in 0..16 {
        viewers.push(client.view().await);
    }
    assert_eq!(client.view().await.status, 503);
    let mut seen = HashMap::new();
    for viewer in &mut viewers {
        assert_eq!(viewer.status, 200);
        for _ in 0..3 {
            let (id, data) = viewer.event().await.unwrap();
            let known = seen.entry(id).or_insert_with(|| data.clone());
            assert!(*known == data, "event {id} is the same for all");
        }
    }
    viewers.pop();
    // It is noticed when the next event is sent.
    while client.view().await.status == 503 {
        viewers[0].event().await.unwrap();
    }
    running.stop();
    running.await.unwrap();
}

/// A flow of many operators, none of which has anything to do.
fn waiting(watch: &Observe, operators: usize, name: impl Fn(usize) -> String) -> (Running, Ingress<u64>) {
    let mut flow = Flow::new("waiting");
    let first = flow.add(name(0), map(async |n: u64| Ok(n)));
    let mut last = first.output;
    for at in 1..operators {
        let next = flow.add(name(at), map(async |n: u64| Ok(n)));
        flow.connect(last, next.input);
        last = next.output;
    }
    let end = flow.add("end", sink(async |_: u64| Ok(())));
    flow.connect(last, end.input);
    let ingress = flow.ingress("numbers", first.input);
    flow.observe(watch);
    (flow.spawn().unwrap(), ingress)
}

/// Through two tunnels, two pages with one port are two ports of `localhost`, for which a browser has the same cookies.
#[tokio::test]
async fn the_cookie_has_the_port_that_the_browser_sees() {
    let watch = Observe::new();
    let page = page(&watch, PageOptions::new()).await;
    let (_, key) = page.url().split_once("#key=").unwrap();
    for port in [7070, 7071] {
        let mut client = Client::new(&page);
        client.host = format!("localhost:{port}");
        let answer = client.post("/session", key).await;
        let cookie = &answer.headers["set-cookie"];
        assert!(cookie.starts_with(&format!("wakeline-page-{port}=")), "{cookie}");
    }
}

/// It misses events, instead of having them wait for it.
#[tokio::test]
async fn a_viewer_that_stops_reading_gets_the_latest_when_it_reads_on() {
    let watch = Observe::new();
    let (running, ingress) = waiting(&watch, 100, |at| format!("{}-{at}", "operator".repeat(100)));
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut slow = client.view_through(socket.connect(page.address()).await.unwrap()).await;
    let mut fast = client.view().await;
    let (mut bytes, mut last) = (0, 0);
    // More than the buffers of the server, of both ends of the connection, and of this test can have.
    while bytes < 10 << 20 {
        let (id, data) = fast.event().await.unwrap();
        (bytes, last) = (bytes + data.len(), id);
    }
    let mut kept = 0;
    let mut before = 0;
    let (id, latest) = loop {
        let (id, data) = slow.event().await.unwrap();
        if before > 0 && id > before + 1 {
            break (id, data);
        }
        (before, kept) = (id, kept + data.len());
    };
    assert!(kept < 4 << 20, "{kept} bytes waited for it");
    assert!(id + 2 >= last, "{id} of {last}");
    assert!(serde_json::from_str::<Value>(&latest).unwrap()["flows"][0]["snapshot"].is_object());
    drop(ingress);
    running.await.unwrap();
}

#[tokio::test]
async fn many_operators_are_shown_as_groups() {
    let watch = Observe::new();
    let (running, ingress) = waiting(&watch, 1000, |at| format!("{}-{at}", ["load", "sort"][at % 2]));
    let page = page(&watch, PageOptions::new()).await;
    let client = Client::with_key(&page).await;
    let (_, text) = client.view().await.event().await.unwrap();
    assert!(text.len() < 10_000, "{}", text.len());
    let picture: Value = serde_json::from_str(&text).unwrap();
    let flow = &picture["flows"][0];
    assert_eq!(flow["operators"], 1002, "with the ingress");
    let names = |all: &Value| -> Vec<String> {
        all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&flow["snapshot"]["operators"]), ["load-# ×500", "sort-# ×500", "end", "numbers"]);
    assert_eq!(
        names(&flow["snapshot"]["hubs"]),
        ["load-# ×500 -> sort-# ×500", "sort-# ×500 -> load-# ×500", "sort-# ×500 -> end", "numbers -> load-# ×500"]
    );
    let shares = &flow["snapshot"]["operators"][1]["shares"];
    // Where the first sample is early, none of them waits yet.
    assert!(shares["message"].as_f64().unwrap_or_default() <= 1.0, "{shares}");
    drop(ingress);
    running.await.unwrap();
}

#[tokio::test]
async fn a_page_that_is_closed_or_dropped_ends_its_connections_and_frees_its_address() {
    let watch = Observe::new();
    let running = ticking(&watch);
    let address = {
        let page = page(&watch, PageOptions::new()).await;
        let mut viewer = Client::with_key(&page).await.view().await;
        viewer.event().await.unwrap();
        let address = page.address();
        page.close().await;
        while viewer.event().await.is_some() {}
        TcpStream::connect(address).await.unwrap_err();
        address
    };
    let page = watch.page(address).await.unwrap();
    let mut viewer = Client::with_key(&page).await.view().await;
    viewer.event().await.unwrap();
    drop(page);
    while viewer.event().await.is_some() {}
    running.stop();
    running.await.unwrap();
}

#[tokio::test]
async fn an_address_in_use_or_without_a_host_is_an_error_that_names_it() {
    let watch = Observe::new();
    let page = page(&watch, PageOptions::new()).await;
    let error = watch.page(page.address()).await.unwrap_err();
    assert!(error.to_string().contains(&page.address().to_string()), "{error}");
    watch.page("nonsense").await.unwrap_err();
    assert!(!format!("{page:?}").contains(page.url().split_once("#key=").unwrap().1), "the key is secret");
}

/// It is served by a thread of its own.
#[test]
fn a_page_shows_a_runtime_whose_workers_are_all_blocked() {
    let watch = Observe::new();
    let seen = Arc::new(AtomicBool::new(false));
    let (blocks, unblock) = mpsc::channel::<()>();
    let (sender, receiver) = mpsc::channel::<Page>();
    let viewer = std::thread::spawn({
        let seen = seen.clone();
        move || {
            let page = receiver.recv().unwrap();
            let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            other.block_on(async {
                let mut viewer = Client::with_key(&page).await.view().await;
                while viewer.picture().await["flows"][0]["snapshot"]["operators"][0]["activity"] != "runs" {}
                seen.store(true, Ordering::Relaxed);
            });
            drop(blocks);
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        sender.send(page(&watch, PageOptions::new()).await).unwrap();
        let mut flow = Flow::new("blocked");
        let block = source(move || {
            let _ = unblock.recv();
            std::future::ready(Ok(None::<()>))
        });
        let block = flow.add("block", block);
        let end = flow.add("end", sink(async |()| Ok(())));
        flow.connect(block.output, end.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
    });
    viewer.join().unwrap();
    assert!(seen.load(Ordering::Relaxed));
}

const CHILD: &str = "child_whose_environment_asks_for_a_page";

/// Runs a flow that is not observed until the standard input ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of its own"]
async fn child_whose_environment_asks_for_a_page() {
    if std::env::var_os("WAKELINE_PAGE").is_none() {
        return;
    }
    let mut flow = Flow::new("ticking");
    let tick = flow.add("tick", source(async || Ok(Some(()))));
    let tock = flow.add("tock", sink(async |()| Ok(())));
    flow.connect(tick.output, tock.input);
    let running = flow.spawn().unwrap();
    tokio::io::stdin().read_to_end(&mut Vec::new()).await.unwrap();
    running.stop();
    running.await.unwrap();
}

#[tokio::test]
async fn the_environment_asks_for_a_page_of_every_flow() {
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", CHILD, "--ignored"]).env("WAKELINE_PAGE", "127.0.0.1:0");
    let pipe = std::process::Stdio::piped;
    let mut child = child.stdin(pipe()).stdout(std::process::Stdio::null()).stderr(pipe()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let url = loop {
        let line = lines.next_line().await.unwrap().expect("it prints the URL");
        if let Some((_, url)) = line.split_once("see the flows run at ") {
            break url.to_owned();
        }
    };
    let mut viewer = Client::of_url(&url).await.view().await;
    let picture = loop {
        let picture = viewer.picture().await;
        if picture["flows"][0].is_object() {
            break picture;
        }
    };
    assert_eq!((&picture["flows"][0]["name"], &picture["controls"]), (&"ticking".into(), &false.into()));
    drop(child.stdin.take());
    assert!(child.wait().await.unwrap().success());
}
