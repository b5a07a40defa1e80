//! Scenario E1, over real HTTP: the example `service`, as a process of its own where its end matters, and in this one where
//! its device has to be held up or to fail.
#![cfg(unix)]

#[allow(dead_code, reason = "its `main` is the other executable's")]
#[path = "../examples/more/service.rs"]
mod service;

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use axum::{body::Bytes, http::StatusCode};
use clap::Parser;
use futures::future::join_all;
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::Value;
use tokio::net::TcpListener;
use wakeline::{
    Running,
    device::{Emulated, Faults},
    prelude::*,
};

type Http = Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>;

/// A client with a connection of its own.
struct Visitor {
    http: Http,
    server: String,
}

impl Visitor {
    fn to(server: &str) -> Self {
        let http = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build_http();
        Self { http, server: server.into() }
    }

    /// `None` if there is no connection to be had any more.
    async fn shout(&self, text: String) -> Option<(StatusCode, String)> {
        let request = axum::http::Request::post(format!("{}/shout", self.server)).body(Full::from(text)).unwrap();
        let response = self.http.request(request).await.ok()?;
        let status = response.status();
        let body = response.into_body().collect().await.expect("what has begun goes to its end").to_bytes();
        Some((status, String::from_utf8(body.to_vec()).unwrap()))
    }

    async fn health(&self) -> (StatusCode, Value) {
        let response = self.http.get(format!("{}/health", self.server).parse().unwrap()).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }
}

/// The example's process.
struct Server {
    process: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        // A connection is a file, here and there.
        rlimit::increase_nofile_limit(8192).unwrap();
        let mut command = common::example::command("service");
        command.args(["--listen", "127.0.0.1:0", "--device", "emulated"]).args(options).stdout(Stdio::piped());
        let mut process = command.spawn().expect("it starts");
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.split([' ', ',']).find(|word| word.starts_with("http://"));
        let address = address.unwrap_or_else(|| panic!("no address: {line}")).into();
        Self { process, out, address }
    }

    fn terminate(&self) {
        let kill = Command::new("kill").arg("-TERM").arg(self.process.id().to_string()).status().unwrap();
        assert!(kill.success());
    }

    /// Whether it ended well, and what it said at the end.
    async fn ended(mut self) -> (bool, String) {
        let ended = tokio::task::spawn_blocking(move || {
            let mut said = String::new();
            self.out.read_to_string(&mut said).unwrap();
            (self.process.wait().unwrap().success(), said)
        });
        common::within(ended).await.unwrap()
    }
}

/// A text that no other request has.
fn text(client: usize, n: usize) -> String {
    format!("client {client}, request {n}: {}", "a bit more of it. ".repeat(n % 7))
}

/// Messages that an operator took, and those it sent, as the report says.
fn reported(report: &str, operator: &str) -> (usize, usize) {
    let line = report.lines().find(|line| line.starts_with(operator)).unwrap_or_else(|| panic!("{report}"));
    let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (numbers[1], numbers[2])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_many_requests_of_a_thousand_clients() {
    const EACH: usize = common::quick_or_long(2, 10);
    let server = Server::start(&[]);
    let began = Instant::now();
    let client = |client: usize| {
        let visitor = Visitor::to(&server.address);
        tokio::spawn(async move {
            for n in 0..EACH {
                let text = text(client, n);
                let (status, shouted) = visitor.shout(text.clone()).await.expect("it answers");
                assert_eq!(status, StatusCode::OK, "{shouted}");
                assert_eq!(shouted, text.to_uppercase());
            }
        })
    };
    for client in common::within(join_all((0..1000).map(client))).await {
        client.unwrap();
    }
    eprintln!("{EACH} requests of each of 1,000 clients in {:?}", began.elapsed());
    let visitor = Visitor::to(&server.address);
    let (status, health) = visitor.health().await;
    assert_eq!((status, &health["failure"]), (StatusCode::OK, &Value::Null));
    assert_eq!(visitor.shout(String::new()).await.unwrap(), (StatusCode::OK, String::new()));
    assert_eq!(visitor.shout("x".repeat(70_000)).await.unwrap().0, StatusCode::PAYLOAD_TOO_LARGE);
    drop(visitor);
    server.terminate();
    let (well, said) = server.ended().await;
    assert!(well, "{said}");
    assert_eq!(reported(&said, "shout"), (1000 * EACH + 1, 1000 * EACH + 1));
}

/// Whoever was let in gets an answer, whole and right; then no one is let in; and the process ends well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_sigterm_drains_in_order() {
    const CLIENTS: usize = 50;
    let server = Server::start(&["--places", "4"]);
    let answered = Arc::new(AtomicUsize::new(0));
    let client = |client: usize| {
        let (visitor, answered) = (Visitor::to(&server.address), answered.clone());
        tokio::spawn(async move {
            for n in 0.. {
                let text = text(client, n);
                let Some((status, shouted)) = visitor.shout(text.clone()).await else { return };
                assert_eq!((status, shouted), (StatusCode::OK, text.to_uppercase()));
                answered.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(client).collect();
    common::until("all are at it", || answered.load(Ordering::Relaxed) > 10 * CLIENTS).await;
    server.terminate();
    let (well, said) = server.ended().await;
    assert!(well, "{said}");
    for client in common::within(join_all(clients)).await {
        client.unwrap();
    }
    let answered = answered.load(Ordering::Relaxed);
    assert_eq!(reported(&said, "shout"), (answered, answered), "each was answered, and got its answer");
}

/// Clients read nothing of what is inside: no operator, kernel, device or port.
fn says_no_names(body: &str) {
    for name in ["load", "upper", "shout", "emulated", "cuda", "texts", "0x"] {
        assert!(!body.contains(name), "{name}: {body}");
    }
}

/// The example's routes in this process, on a device of ours.
async fn serve(device: &Device, options: &[&str]) -> (String, Running) {
    let args = service::Args::parse_from([&["service"], options].concat());
    let (router, running) = service::start(device, &args).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (address, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_overload_is_503_or_a_wait() {
    for (overload, shed) in [("shed", true), ("wait", false)] {
        // One worker, which is held up: no device work is done until it is let go.
        let device = common::emulated_with(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        let (address, running) = serve(&device, &["--places", "2", "--overload", overload]).await;
        assert_eq!(Visitor::to(&address).shout("one".into()).await.unwrap().1, "ONE");
        let held = common::hold(&stream);
        let answers: [Arc<AtomicUsize>; 2] = Default::default();
        let client = |client: usize| {
            let (visitor, [good, refused]) = (Visitor::to(&address), answers.clone());
            tokio::spawn(async move {
                let text = text(client, 0);
                let (status, shouted) = visitor.shout(text.clone()).await.unwrap();
                match status {
                    StatusCode::OK => {
                        assert_eq!(shouted, text.to_uppercase());
                        good.fetch_add(1, Ordering::Relaxed);
                    }
                    StatusCode::SERVICE_UNAVAILABLE => _ = refused.fetch_add(1, Ordering::Relaxed),
                    _ => panic!("{status}: {shouted}"),
                }
            })
        };
        let clients: Vec<_> = (0..60).map(client).collect();
        let [good, refused] = &answers;
        let visitor = Visitor::to(&address);
        if shed {
            common::until("most are refused", || refused.load(Ordering::Relaxed) > 30).await;
        } else {
            let full =
                || running.status().iter().any(|operator| operator.waits_for.iter().any(|it| it.contains("room")));
            common::until("the flow is full", full).await;
            assert_eq!(refused.load(Ordering::Relaxed), 0);
        }
        assert_eq!(good.load(Ordering::Relaxed), 0, "nothing is done yet");
        assert_eq!(visitor.health().await.0, StatusCode::OK, "busy is not ill");
        drop(held);
        for client in common::within(join_all(clients)).await {
            client.unwrap();
        }
        let (good, refused) = (good.load(Ordering::Relaxed), refused.load(Ordering::Relaxed));
        assert_eq!(good + refused, 60);
        assert!(good >= 2 && (refused > 0) == shed, "{good} answered, {refused} refused");
        assert_eq!(visitor.shout("two".into()).await.unwrap(), (StatusCode::OK, "TWO".into()));

        running.stop();
        common::within(running).await.unwrap();
        let (status, said) = visitor.shout("three".into()).await.unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(said.contains("was stopped"), "{said}");
        says_no_names(&said);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_health_turns_red_when_the_device_is_lost() {
    let faults = Faults::new().trap_kernel("uppercase", 3);
    let device = common::emulated_with(Emulated::new().workers(2).faults(faults));
    let (address, running) = serve(&device, &[]).await;
    let visitor = Visitor::to(&address);
    for text in ["one", "two"] {
        assert_eq!(visitor.shout(text.into()).await.unwrap(), (StatusCode::OK, text.to_uppercase()));
    }
    let (status, health) = visitor.health().await;
    assert_eq!(status, StatusCode::OK, "{health}");
    says_no_names(&health.to_string());
    assert_eq!(health["operators"].as_array().unwrap().len(), 4);
    assert_eq!(health["operators"][0]["runs"], 2);

    for text in ["three", "four"] {
        let (status, said) = common::within(visitor.shout(text.into())).await.unwrap();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{said}");
        assert!(said.contains("device lost"), "{said}");
        says_no_names(&said);
    }
    let (status, health) = visitor.health().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{health}");
    assert_eq!(health["failure"], "device lost");
    says_no_names(&health.to_string());
    assert!(common::within(running).await.unwrap_err().is_device_lost());
    let (status, health) = visitor.health().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    let ended = |operator: &Value| operator["status"] == "never runs again";
    assert!(health["operators"].as_array().unwrap().iter().all(ended), "{health}");
}
