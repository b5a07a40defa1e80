//! The server of a page: one thread, its connections, and the bounds on both.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use futures::{
    FutureExt,
    future::{Either, select},
};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    runtime,
    sync::{Semaphore, watch},
    task::JoinSet,
    time::sleep,
};

use super::{
    super::observer::ObservedFlows,
    access::PageAccess,
    events::{EventFeed, ViewerProgress},
    routes::Routes,
};
use crate::{
    error::{Error, Result},
    sync::logged,
};

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 64;
/// How long the head of a request may take, and a connection be idle.
const HEAD: Duration = Duration::from_secs(30);
/// Bytes that wait for a viewer that does not read, in the server and in the system; besides one event.
const BUFFER: usize = 64 << 10;
const SEND_BUFFER: u32 = 256 << 10;
/// A viewer that takes nothing for so long is disconnected.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a page is served.
pub(super) struct Listening {
    pub(super) address: SocketAddr,
    pub(super) url: String,
}

/// Serves until the sender of `until` is dropped.
pub(super) fn run(
    flows: Arc<ObservedFlows>,
    access: Arc<PageAccess>,
    controls: bool,
    addresses: &[SocketAddr],
    until: watch::Receiver<()>,
    listens: impl FnOnce(Result<Listening>),
) {
    let runtime = match runtime::Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime,
        Err(error) => return listens(Err(Error::from(error).at("the page"))),
    };
    runtime.block_on(async {
        let bound = bind(addresses).and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = match bound {
            Ok(bound) => bound,
            Err(error) => return listens(Err(error.at("the page"))),
        };
        if !address.ip().is_loopback() {
            logged(|| {
                tracing::warn!(
                    %address,
                    "a page of flows can be reached from other machines, and is not encrypted: bind it to 127.0.0.1 \
                     and use a tunnel"
                );
            });
        }
        let feed = Arc::new(EventFeed::new(flows.clone(), controls));
        let routes = Arc::new(Routes::new(access.clone(), flows, feed.clone(), controls));
        listens(Ok(Listening { address, url: access.url(address) }));
        let serve = async { futures::join!(accept(listener, routes), feed.publish()) };
        select(std::pin::pin!(serve), std::pin::pin!(closed(until))).await;
    });
}

async fn closed(mut until: watch::Receiver<()>) {
    while until.changed().await.is_ok() {}
}

fn bind(addresses: &[SocketAddr]) -> Result<TcpListener> {
    let mut failure = Error::from(io::Error::new(io::ErrorKind::InvalidInput, "the address names no host"));
    for address in addresses {
        let bound = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            // As `TcpListener::bind` does; elsewhere it would let two programs listen at once.
            #[cfg(unix)]
            socket.set_reuseaddr(true)?;
            // Connections inherit it.
            socket.set_send_buffer_size(SEND_BUFFER)?;
            socket.bind(*address)?;
            socket.listen(CONNECTIONS as u32)
        };
        match bound() {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = Error::from(error).at(address.to_string()),
        }
    }
    Err(failure)
}

async fn accept(listener: TcpListener, routes: Arc<Routes>) {
    let seats = Arc::new(Semaphore::new(CONNECTIONS));
    // Dropped, and with them all connections, when the page is closed.
    let mut connections = JoinSet::new();
    loop {
        let Ok(seat) = seats.clone().acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let connection = connection(stream, routes.clone());
                connections.spawn(connection.map(move |()| drop(seat)));
            }
            // Such as too many open files.
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn connection(stream: TcpStream, routes: Arc<Routes>) {
    let Ok(local) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let progress = Arc::new(ViewerProgress::default());
    let answer =
        service_fn(|request| routes.answer(request, local, progress.clone()).map(Ok::<_, std::convert::Infallible>));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), answer);
    let stalls = std::pin::pin!(stalled(&progress));
    match select(std::pin::pin!(served), stalls).await {
        // An error is the client's: a broken request, or a broken connection.
        Either::Left((_, _)) | Either::Right(((), _)) => {}
    }
}

/// Resolves when a viewer has taken nothing for a while, although there was something.
async fn stalled(progress: &ViewerProgress) {
    let mut before = progress.taken();
    loop {
        sleep(PATIENCE).await;
        let now = progress.taken();
        if now > 0 && now == before {
            return;
        }
        before = now;
    }
}
