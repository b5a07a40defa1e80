//! Scenario E1 over HTTP: the example `service`, as a separate process where its exit matters, and in this process where its
//! device is held up or fails.
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
    Running, Stream,
    device::{Emulated, Faults},
    prelude::*,
};

type Http = Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>;

/// A client with its own connection.
struct HttpClient {
    http: Http,
    server: String,
}

impl HttpClient {
    fn to(server: &str) -> Self {
        let http = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build_http();
        Self { http, server: server.into() }
    }

    /// `None` if the connection fails.
    async fn shout(&self, text: String) -> Option<(StatusCode, String)> {
        let request = axum::http::Request::post(format!("{}/shout", self.server)).body(Full::from(text)).unwrap();
        let response = self.http.request(request).await.ok()?;
        let status = response.status();
        let body = response.into_body().collect().await.expect("a response that has begun completes").to_bytes();
        Some((status, String::from_utf8(body.to_vec()).unwrap()))
    }

    async fn health(&self) -> (StatusCode, Value) {
        let response = self.http.get(format!("{}/health", self.server).parse().unwrap()).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }
}

impl HttpClient {
    async fn metrics(&self) -> String {
        let response = self.http.get(format!("{}/metrics", self.server).parse().unwrap()).await.unwrap();
        let kind = response.headers()["content-type"].to_str().unwrap().to_string();
        assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }
}

struct Server {
    process: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        // Each connection is a file descriptor in both processes.
        rlimit::increase_nofile_limit(8192).unwrap();
        let mut command = common::example::command("service");
        command.args(["--listen", "127.0.0.1:0", "--device", "emulated"]).args(options).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the example starts");
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.split([' ', ',']).find(|word| word.starts_with("http://"));
        let address = address.unwrap_or_else(|| panic!("no address in: {line}")).into();
        Self { process, out, address }
    }

    fn terminate(&self) {
        let kill = Command::new("kill").arg("-TERM").arg(self.process.id().to_string()).status().unwrap();
        assert!(kill.success());
    }

    /// Waits for the exit. Returns whether it succeeded, and the rest of the output.
    async fn exit(mut self) -> (bool, String) {
        let exit = tokio::task::spawn_blocking(move || {
            let mut output = String::new();
            self.out.read_to_string(&mut output).unwrap();
            (self.process.wait().unwrap().success(), output)
        });
        common::within(exit).await.unwrap()
    }
}

/// The text of a request, different for each.
fn text(client: usize, n: usize) -> String {
    format!("client {client}, request {n}: {}", "a bit more of it. ".repeat(n % 7))
}

/// The numbers of messages that an operator took and sent, from the report.
fn reported(report: &str, operator: &str) -> (usize, usize) {
    let line = report.lines().find(|line| line.starts_with(operator)).unwrap_or_else(|| panic!("{report}"));
    let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (numbers[1], numbers[2])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_thousand_clients_get_their_own_responses() {
    const EACH: usize = common::quick_or_long(2, 10);
    let server = Server::start(&[]);
    let start = Instant::now();
    let spawn_client = |number: usize| {
        let client = HttpClient::to(&server.address);
        tokio::spawn(async move {
            for n in 0..EACH {
                let text = text(number, n);
                let (status, shouted) = client.shout(text.clone()).await.expect("a response");
                assert_eq!(status, StatusCode::OK, "{shouted}");
                assert_eq!(shouted, text.to_uppercase());
            }
        })
    };
    for task in common::within(join_all((0..1000).map(spawn_client))).await {
        task.unwrap();
    }
    eprintln!("{EACH} requests of each of 1,000 clients in {:?}", start.elapsed());
    let client = HttpClient::to(&server.address);
    let (status, health) = client.health().await;
    assert_eq!((status, &health["failure"]), (StatusCode::OK, &Value::Null));
    let metrics = client.metrics().await;
    let runs = format!("wakeline_operator_runs_total{{flow=\"shout\",operator=\"upper\"}} {}", 1000 * EACH);
    assert!(metrics.contains(&runs) && metrics.ends_with("# EOF\n"), "`{runs}` is missing in\n{metrics}");
    assert_eq!(client.shout(String::new()).await.unwrap(), (StatusCode::OK, String::new()));
    assert_eq!(client.shout("x".repeat(70_000)).await.unwrap().0, StatusCode::PAYLOAD_TOO_LARGE);
    drop(client);
    server.terminate();
    let (succeeded, output) = server.exit().await;
    assert!(succeeded, "{output}");
    assert_eq!(reported(&output, "shout"), (1000 * EACH + 1, 1000 * EACH + 1));
}

/// Every accepted request gets its complete response, later connections fail, and the process exits with success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_sigterm_answers_accepted_requests_and_exits() {
    const CLIENTS: usize = 50;
    let server = Server::start(&["--places", "4"]);
    let answered = Arc::new(AtomicUsize::new(0));
    let spawn_client = |number: usize| {
        let (client, answered) = (HttpClient::to(&server.address), answered.clone());
        tokio::spawn(async move {
            for n in 0.. {
                let text = text(number, n);
                let Some((status, shouted)) = client.shout(text.clone()).await else { return };
                assert_eq!((status, shouted), (StatusCode::OK, text.to_uppercase()));
                answered.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS).map(spawn_client).collect();
    common::until("the clients have got many responses", || answered.load(Ordering::Relaxed) > 10 * CLIENTS).await;
    server.terminate();
    let (succeeded, output) = server.exit().await;
    assert!(succeeded, "{output}");
    for task in common::within(join_all(clients)).await {
        task.unwrap();
    }
    let answered = answered.load(Ordering::Relaxed);
    assert_eq!(reported(&output, "shout"), (answered, answered), "a response for each request");
}

/// Checks that a body names no operator, kernel, device or port.
fn assert_no_names(body: &str) {
    for name in ["load", "upper", "shout", "emulated", "cuda", "texts", "0x"] {
        assert!(!body.contains(name), "{name}: {body}");
    }
}

/// Serves the example's routes in this process, on this device.
async fn serve(device: &Device, options: &[&str]) -> (String, Running) {
    let args = service::Args::parse_from([&["service"], options].concat());
    let (router, running) = service::start(device, &args).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (address, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_an_overloaded_service_responds_503_or_waits() {
    for (overload, shed) in [("shed", true), ("wait", false)] {
        // The only worker is blocked: no device work completes until `held` is dropped.
        let device = common::emulated_with(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        let (address, running) = serve(&device, &["--places", "2", "--overload", overload]).await;
        assert_eq!(HttpClient::to(&address).shout("one".into()).await.unwrap().1, "ONE");
        let held = common::hold(&stream);
        let counts: [Arc<AtomicUsize>; 2] = Default::default();
        let spawn_client = |number: usize| {
            let (client, [answered, refused]) = (HttpClient::to(&address), counts.clone());
            tokio::spawn(async move {
                let text = text(number, 0);
                let (status, shouted) = client.shout(text.clone()).await.unwrap();
                match status {
                    StatusCode::OK => {
                        assert_eq!(shouted, text.to_uppercase());
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                    StatusCode::SERVICE_UNAVAILABLE => _ = refused.fetch_add(1, Ordering::Relaxed),
                    _ => panic!("{status}: {shouted}"),
                }
            })
        };
        let clients: Vec<_> = (0..60).map(spawn_client).collect();
        let [answered, refused] = &counts;
        let client = HttpClient::to(&address);
        if shed {
            common::until("many requests are refused", || refused.load(Ordering::Relaxed) > 30).await;
        } else {
            let full =
                || running.status().iter().any(|operator| operator.waits_for.iter().any(|it| it.contains("room")));
            common::until("the flow is full", full).await;
            assert_eq!(refused.load(Ordering::Relaxed), 0);
        }
        assert_eq!(answered.load(Ordering::Relaxed), 0, "no device work is done yet");
        assert_eq!(client.health().await.0, StatusCode::OK, "an overloaded service is healthy");
        drop(held);
        for task in common::within(join_all(clients)).await {
            task.unwrap();
        }
        let (answered, refused) = (answered.load(Ordering::Relaxed), refused.load(Ordering::Relaxed));
        assert_eq!(answered + refused, 60);
        assert!(answered >= 2 && (refused > 0) == shed, "{answered} answered, {refused} refused");
        assert_eq!(client.shout("two".into()).await.unwrap(), (StatusCode::OK, "TWO".into()));

        running.stop();
        common::within(running).await.unwrap();
        let (status, body) = client.shout("three".into()).await.unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(body.contains("was stopped"), "{body}");
        assert_no_names(&body);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_health_reports_the_loss_of_the_device() {
    let faults = Faults::new().trap_kernel("uppercase", 3);
    let device = common::emulated_with(Emulated::new().workers(2).faults(faults));
    let (address, running) = serve(&device, &[]).await;
    let client = HttpClient::to(&address);
    for text in ["one", "two"] {
        assert_eq!(client.shout(text.into()).await.unwrap(), (StatusCode::OK, text.to_uppercase()));
    }
    let (status, health) = client.health().await;
    assert_eq!(status, StatusCode::OK, "{health}");
    assert_no_names(&health.to_string());
    assert_eq!(health["operators"].as_array().unwrap().len(), 4);
    assert_eq!(health["operators"][0]["runs"], 2);

    for text in ["three", "four"] {
        let (status, body) = common::within(client.shout(text.into())).await.unwrap();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{body}");
        assert!(body.contains("device lost"), "{body}");
        assert_no_names(&body);
    }
    let (status, health) = client.health().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{health}");
    assert_eq!(health["failure"], "device lost");
    assert_no_names(&health.to_string());
    assert!(common::within(running).await.unwrap_err().is_device_lost());
    let (status, health) = client.health().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    let ended = |operator: &Value| operator["status"] == "never runs again";
    assert!(health["operators"].as_array().unwrap().iter().all(ended), "{health}");
}
