//! [`Page`]: a live page of flows in a browser.
//!
//! A thread of its own, `wakeline-page`, serves it: it sees a runtime whose workers are all blocked, and lives on when
//! the runtime has ended. While there is a viewer it takes a snapshot of each flow four times a second and serialises
//! it once for all viewers. Without a viewer it sleeps.
//!
//! ```text
//!   snapshots ── 4/s ──> one event, the latest ──┬──> viewer
//!   (page/picture)        (page/events)          └──> viewer: takes the latest when its connection has room
//! ```

mod access;
mod assets;
mod body;
mod events;
mod groups;
mod picture;
mod routes;
mod server;
mod tracks;

use std::{fmt, net::SocketAddr, sync::Arc};

use tokio::{
    net::{ToSocketAddrs, lookup_host},
    runtime::Handle,
    sync::{oneshot, watch},
};

use self::{access::PageAccess, server::Listening};
use super::{
    Observe,
    environment::{PAGE, print_line},
    observer::ObservedFlows,
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{contained, log, logged},
};

/// A live page of the flows of an [`Observe`], in a browser. See [`Observe::page`].
///
/// It is served until this is dropped or [closed](Self::close); its viewers see that it has ended.
#[must_use = "the page is served until this is dropped"]
pub struct Page {
    url: String,
    address: SocketAddr,
    /// The server shuts down when it is dropped.
    shutdown: watch::Sender<()>,
    ended: oneshot::Receiver<()>,
}

/// How a [`Page`] is served: whether its viewers may control flows, and under which names it is reached.
///
/// ```
/// use wakeline::observe::PageOptions;
///
/// let options = PageOptions::new().controls(true).host("gpu-3.example.org");
/// ```
#[derive(Clone, Debug, Default)]
pub struct PageOptions {
    controls: bool,
    hosts: Vec<String>,
}

impl PageOptions {
    /// A page that only shows, reached by its address or as `localhost`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether viewers may pause, resume and stop flows. They may not by default.
    #[must_use]
    pub fn controls(mut self, allowed: bool) -> Self {
        self.controls = allowed;
        self
    }

    /// Adds a host name or an address under which the page is reached, without a port. Requests for names that were not
    /// added are refused, so that no foreign site can reach the page by a name of its own that resolves to this machine.
    #[must_use]
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.hosts.push(name.into());
        self
    }
}

impl Observe {
    /// Serves a live page of the flows that it observes, and returns when the page can be opened. Print its
    /// [`url`](Page::url), and keep the page as long as it is to be served. Port 0 selects a free port.
    ///
    /// The page begins with one sentence about what limits the flow. Below are the graph of operators and hubs, the
    /// times of paths and operators, and the memory of devices. It never shows messages.
    ///
    /// ```no_run
    /// use wakeline::observe::Observe;
    ///
    /// # async fn serve() -> wakeline::Result<()> {
    /// let watch = Observe::new();
    /// let page = watch.page("127.0.0.1:0").await?;
    /// println!("see the flow run at {}", page.url());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety from others
    ///
    /// The URL contains a random key in its fragment, which browsers do not send: the page exchanges it for a cookie. The
    /// key gives access, so treat the URL as a secret. Requests for data without it, from another site, or for
    /// another [host](PageOptions::host) are refused with 403. There is no encryption: on an address other than loopback the
    /// key can be read from the network, and a `tracing` warning says so. From another machine use a tunnel, such as
    /// `ssh -L 7070:localhost:7070`. Browsers send a cookie to every port of its host: while the page is open, do not open
    /// pages there that you do not trust, such as those of another user of the machine.
    ///
    /// # Costs
    ///
    /// Without a viewer none beyond those of the observer. With viewers it takes a snapshot four times a second: 0.3 % of a
    /// core for 100 operators (bench `page`, the host of an H200). It does so less often where that would take more than 2.5 % of a core; above 300 operators it
    /// shows groups. At most 16 can view it, and one that stops reading gets the latest event when it reads on.
    ///
    /// The feature `page` adds an HTTP server, hyper, and serde to the build: a debug build of wakeline with all that it
    /// depends on takes 65 s of processor time instead of 52.
    ///
    /// # Errors
    ///
    /// The address cannot be bound, or the thread cannot be spawned.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it is ready closes the page.
    pub async fn page(&self, address: impl ToSocketAddrs) -> Result<Page> {
        self.page_with(address, PageOptions::new()).await
    }

    /// Like [`page`](Self::page), with options.
    ///
    /// # Errors
    ///
    /// Like [`page`](Self::page), and if a host name is not one.
    ///
    /// # Cancel safety
    ///
    /// Like [`page`](Self::page).
    pub async fn page_with(&self, address: impl ToSocketAddrs, options: PageOptions) -> Result<Page> {
        if Handle::try_current().is_err() {
            return Err(Error::new(ErrorKind::Usage, "a page is opened in a tokio runtime"));
        }
        let addresses = lookup_host(address)
            .await
            .map_err(|error| Error::from(error).at("the address of the page (such as 127.0.0.1:0)"))?;
        let (listens, listening) = oneshot::channel();
        let open = Page::open(self.shared.clone(), addresses.collect(), &options, |result| {
            let _ = listens.send(result);
        })?;
        let gone = |_| Err(Error::internal("the thread of a page has ended"));
        let Listening { address, url } = listening.await.unwrap_or_else(gone)?;
        let OpenPage { shutdown, ended } = open;
        Ok(Page { url, address, shutdown, ended })
    }
}

impl Page {
    /// Starts the server, which calls `listens` once it listens or cannot.
    fn open(
        flows: Arc<ObservedFlows>,
        addresses: Vec<SocketAddr>,
        options: &PageOptions,
        listens: impl FnOnce(Result<Listening>) + Send + 'static,
    ) -> Result<OpenPage> {
        let access = Arc::new(PageAccess::new(&options.hosts)?);
        let (shutdown, until) = watch::channel(());
        let (ends, ended) = oneshot::channel();
        let controls = options.controls;
        let serve = move || {
            let _ends = ends;
            contained("the thread of a page panicked", || {
                server::run(flows, access, controls, &addresses, until, listens)
            });
        };
        let thread = std::thread::Builder::new().name("wakeline-page".into()).spawn(serve);
        thread.map_err(|error| Error::from(error).at("the thread of the page"))?;
        Ok(OpenPage { shutdown, ended })
    }

    /// Where to open the page, with its key. Treat it as a secret. For a page on all addresses (`0.0.0.0`) it has the loopback
    /// address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends the page, and returns when its connections are closed.
    ///
    /// # Cancel safety
    ///
    /// The page ends also if the future is dropped.
    pub async fn close(self) {
        let Self { shutdown, ended, .. } = self;
        drop(shutdown);
        let _ = ended.await;
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the URL, which is a secret.
        f.debug_struct("Page").field("address", &self.address).finish_non_exhaustive()
    }
}

/// What ends a page.
struct OpenPage {
    shutdown: watch::Sender<()>,
    ended: oneshot::Receiver<()>,
}

/// Serves a page until the process ends. It prints its URL.
pub(super) fn open_for_process(flows: Arc<ObservedFlows>, address: SocketAddr) {
    let failed = |error: Error| {
        print_line(format_args!("{PAGE} is not used: {error:#} (port 0 is a free one)"));
        logged(|| tracing::warn!("{PAGE} is not used: {error:#}"));
    };
    let opened = Page::open(flows, vec![address], &PageOptions::new(), move |result| match result {
        Ok(Listening { url, address }) => {
            if !address.ip().is_loopback() {
                print_line("the page can be reached from other machines, and is not encrypted");
            }
            print_line(format_args!("see the flows run at {url}"));
        }
        Err(error) => failed(error),
    });
    match opened {
        // The page ends if these are dropped.
        Ok(open) => std::mem::forget(open),
        Err(error) => log(move || failed(error)),
    }
}
