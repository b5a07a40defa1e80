//! A device flow inside a web server: texts are posted to `/shout`, and returned in upper case.
//!
//! `cargo run --release -p wakeline-more-examples --example service -- [--listen 127.0.0.1:3000] [--device emulated] [--overload shed|wait]`
//!
//! ```text
//!   POST /shout ──> service `shout` ──> load ──> upper ──> unload ──> service `shout` ──> response
//!                                       host     device    host
//! ```
//!
//! The service is a `tower::Service`: it accepts a request when the flow has room for it. A layer in front handles
//! overload. `GET /metrics` is for a scraper such as Prometheus. `GET /health` returns the status of the operators, and fails (503) when the device is lost or the flow has
//! failed. Clients receive only the kind of a failure, without internal names: those are in the log, on stderr. SIGTERM
//! and ctrl-c shut it down in order: no new connections, all responses, the flow, the process.

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use clap::{Parser, ValueEnum};
use serde_json::json;
use tokio::{net::TcpListener, signal, time::timeout};
use tower::{BoxError, ServiceBuilder, ServiceExt, load_shed::error::Overloaded, util::BoxCloneSyncService};
use wakeline::{Report, Running, flow::Handle, observe::Observe, operator::map, prelude::*};

/// Converts texts to upper case on a GPU, over HTTP.
#[derive(Parser)]
pub(crate) struct Args {
    /// The address to listen on; port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:3000")]
    pub(crate) listen: SocketAddr,
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// What happens to a request under overload: shed with 503 at once, or kept waiting.
    #[arg(long, value_enum, default_value_t = Overload::Wait)]
    pub(crate) overload: Overload,
    /// Requests that are queued before the flow takes them.
    #[arg(long, default_value_t = 64)]
    pub(crate) places: usize,
    /// The maximum length of a text, in bytes.
    #[arg(long, default_value_t = 65_536)]
    pub(crate) longest: usize,
    /// The time limit of a request in seconds, waiting included.
    #[arg(long, default_value_t = 30)]
    pub(crate) patience: u64,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Overload {
    Shed,
    Wait,
}

/// One declaration, two bodies: uppercase.cu for a GPU, this function for the emulated device.
#[kernel(unsafe(cuda = "../uppercase.cu"))]
fn uppercase(text: &mut [u8]) {
    text.make_ascii_uppercase();
}

#[derive(Ports)]
struct LoadPorts {
    #[input]
    texts: Input<Bytes>,
    #[output]
    loaded: Output<Envelope<u8>>,
}

/// Copies texts into envelopes, which the hub copies to the device.
struct Load;

impl Operator for Load {
    type Ports = LoadPorts;

    async fn compute(&mut self, ports: &mut LoadPorts, _cx: &mut Cx) -> Result<()> {
        let text = ports.texts.take()?;
        let mut envelope = ports.loaded.blank().await?;
        envelope.set_len(text.len())?;
        envelope.write().await?.copy_from_slice(&text);
        ports.loaded.send(envelope).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct UpperPorts {
    #[input]
    texts: Input<Envelope<u8>>,
    #[output]
    shouted: Output<Envelope<u8>>,
}

struct Upper;

impl Operator for Upper {
    type Ports = UpperPorts;

    async fn compute(&mut self, ports: &mut UpperPorts, cx: &mut Cx) -> Result<()> {
        let mut text = ports.texts.take()?;
        uppercase::launch(cx.stream()?, &mut text)?;
        ports.shouted.send(text).await?;
        Ok(())
    }
}

#[derive(Clone)]
struct App {
    shout: BoxCloneSyncService<Bytes, Bytes, BoxError>,
    patience: Duration,
    device: Device,
    flow: Handle,
    watch: Observe,
}

/// Starts the flow; returns the routes that use it, and the running flow.
pub(crate) async fn start(device: &Device, args: &Args) -> Result<(Router, Running)> {
    let mut flow = Flow::new("shout");
    let load = flow.add("load", Load);
    let upper = flow.add("upper", Upper).on(device);
    let unload = flow.add("unload", map(async |text: Envelope<u8>| Ok(Bytes::copy_from_slice(text.read().await?))));
    let envelopes = HubOptions::bounded(2).envelopes(4);
    flow.connect_with(load.loaded, upper.texts, envelopes.envelope_bytes(args.longest));
    flow.connect_with(upper.shouted, unload.input, envelopes);
    let shout = flow.service_with("shout", load.texts, unload.output, HubOptions::bounded(args.places));
    let watch = Observe::new();
    flow.observe(&watch);
    let running = flow.spawn()?;
    // Waits until kernels are compiled, so that no request is shed meanwhile; also reports a flow that does not start.
    if let Err(error) = shout.clone().ready().await {
        // This error is for clients; the flow's own has the cause.
        return Err(running.await.err().unwrap_or(error));
    }

    let shout = match args.overload {
        Overload::Shed => BoxCloneSyncService::new(ServiceBuilder::new().load_shed().service(shout)),
        Overload::Wait => BoxCloneSyncService::new(shout.map_err(BoxError::from)),
    };
    let patience = Duration::from_secs(args.patience);
    let app = App { shout, patience, device: device.clone(), flow: running.handle(), watch };
    let router = Router::new()
        .route("/shout", post(shout_it))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .layer(DefaultBodyLimit::max(args.longest))
        .with_state(app);
    Ok((router, running))
}

async fn shout_it(State(app): State<App>, text: Bytes) -> Response {
    match timeout(app.patience, app.shout.oneshot(text)).await {
        Ok(Ok(shouted)) => shouted.into_response(),
        Ok(Err(error)) => (refusal(&error), format!("{error}\n")).into_response(),
        Err(_) => (StatusCode::GATEWAY_TIMEOUT, "the request timed out\n").into_response(),
    }
}

fn refusal(error: &BoxError) -> StatusCode {
    let closed = error.downcast_ref().is_some_and(Error::is_closed);
    if closed || error.is::<Overloaded>() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::INTERNAL_SERVER_ERROR }
}

async fn health(State(app): State<App>) -> Response {
    let failure = app.flow.failure().or_else(|| app.device.lost());
    let operators = app.flow.status().into_iter().map(|operator| {
        json!({
            "status": operator.status.to_string(),
            "running": operator.running,
            "runs": operator.runs,
        })
    });
    let body = json!({
        "failure": failure.as_ref().map(|failure| failure.kind().to_string()),
        "operators": operators.collect::<Vec<_>>(),
    });
    let code = if failure.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (code, Json(body)).into_response()
}

/// The names of operators and hubs are in it: it is for the operator of the server, not for its clients.
async fn metrics(State(app): State<App>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, OPEN_METRICS)], app.watch.open_metrics()).into_response()
}

async fn asked_to_end() {
    #[cfg(unix)]
    let terminated = async {
        match signal::unix::signal(signal::unix::SignalKind::terminate()) {
            Ok(mut signals) => _ = signals.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminated = std::future::pending();
    tokio::select! {
        _ = signal::ctrl_c() => {}
        () = terminated => {}
    }
}

async fn serve(args: &Args) -> Result<Report> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let at_address = |error: std::io::Error| Error::from(error).at(args.listen.to_string());
    let listener = TcpListener::bind(args.listen).await.map_err(at_address)?;
    let (router, running) = start(&device, args).await?;
    println!("listening on http://{}, with {device}", listener.local_addr()?);
    // Connected clients get their responses before the flow stops, which then has no work left.
    axum::serve(listener, router).with_graceful_shutdown(asked_to_end()).await?;
    running.stop();
    running.await
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match serve(&Args::parse()).await {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            // The report of the operators up to the failure.
            error.report().into_iter().for_each(|report| eprintln!("{report}"));
            eprintln!("service: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    /// Needs NVRTC, and no GPU: `cargo test --example service -- --ignored`
    #[test]
    #[ignore = "needs NVRTC"]
    fn every_kernel_compiles() {
        wakeline::kernel::compile_all("sm_90").unwrap();
    }
}
