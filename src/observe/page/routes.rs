//! [`Routes`]: the answer to a request.
//!
//! | request | answer |
//! |---|---|
//! | `GET` of a [file](super::assets) | the file, without a key |
//! | `POST /session`, the key in its body | the cookie that all below need |
//! | `GET /session` | 204: the cookie is right |
//! | `GET /events` | [events](super::events), until the page is closed |
//! | `GET /flow?id=7` | one flow, also one that has ended |
//! | `GET /timeline?id=7` | its last two seconds, as [tracks](super::tracks); 204 if it is not recorded |
//! | `GET /trace?id=7` | the same as a file that Perfetto reads |
//! | `POST /pause?id=7`, `/resume`, `/stop` | 204, if the page may control flows |

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures::future::poll_fn;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body, Bytes, Incoming},
    header::{self, HeaderName, HeaderValue},
    http::uri::Authority,
};
use tokio::time::timeout;

use super::{
    super::{observer::ObservedFlows, timeline::Timeline, trace::Trace},
    access::PageAccess,
    assets::asset,
    body::PageBody,
    events::{EventFeed, ViewerProgress},
    picture, tracks,
};
use crate::{operator::Handle, sync::contained};

/// The most bytes of a request's body, and the longest that it may take.
const MOST: usize = 1 << 10;
const PATIENCE: Duration = Duration::from_secs(10);

const PATHS: [&str; 8] = ["/session", "/events", "/flow", "/timeline", "/trace", "/pause", "/resume", "/stop"];
/// How much of the past a timeline has.
const WINDOW: Duration = Duration::from_secs(2);

type PageAnswer = Response<PageBody>;

pub(super) struct Routes {
    access: Arc<PageAccess>,
    flows: Arc<ObservedFlows>,
    feed: Arc<EventFeed>,
    controls: bool,
}

impl Routes {
    pub(super) fn new(
        access: Arc<PageAccess>,
        flows: Arc<ObservedFlows>,
        feed: Arc<EventFeed>,
        controls: bool,
    ) -> Self {
        Self { access, flows, feed, controls }
    }

    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        local: SocketAddr,
        progress: Arc<ViewerProgress>,
    ) -> PageAnswer {
        let mut answer = self.route(request, local, progress).await;
        secure(answer.headers_mut());
        answer
    }

    async fn route(&self, request: Request<Incoming>, local: SocketAddr, progress: Arc<ViewerProgress>) -> PageAnswer {
        let (head, body) = request.into_parts();
        if !self.access.is_own_site(&head.method, &head.headers, local) {
            return text(StatusCode::FORBIDDEN, "this host or origin is not that of the page\n");
        }
        let (method, path, cookie) = (&head.method, head.uri.path(), cookie(&head.headers));
        let reads = matches!(*method, Method::GET | Method::HEAD);
        if let Some((kind, content)) = asset(path).filter(|_| reads) {
            return whole(kind, content);
        }
        if path == "/session" && *method == Method::POST {
            let key = timeout(PATIENCE, short(body)).await.ok().flatten();
            let bought = key.and_then(|key| self.access.exchange(&key, &cookie));
            let Some(cookie) = bought.and_then(|cookie| HeaderValue::from_str(&cookie).ok()) else {
                return text(StatusCode::FORBIDDEN, "this is not the key of the page\n");
            };
            let mut answer = empty(StatusCode::NO_CONTENT);
            answer.headers_mut().insert(header::SET_COOKIE, cookie);
            return answer;
        }
        if !self.access.has_session(&head.headers, &cookie) {
            return text(StatusCode::FORBIDDEN, "open the URL that the program has printed, with its key\n");
        }
        let id = head.uri.query().and_then(id);
        match (method, path) {
            (&Method::GET, "/session") => empty(StatusCode::NO_CONTENT),
            (&Method::GET, "/events") => self.events(progress),
            (&Method::GET, "/flow") => self.flow(id),
            (&Method::GET, "/timeline") => self.timeline(id),
            (&Method::GET, "/trace") => self.trace(id),
            (&Method::POST, "/pause") => self.control(id, Handle::pause),
            (&Method::POST, "/resume") => self.control(id, Handle::resume),
            (&Method::POST, "/stop") => self.control(id, Handle::stop),
            _ if PATHS.contains(&path) || asset(path).is_some() => {
                text(StatusCode::METHOD_NOT_ALLOWED, "this method is not for this path\n")
            }
            _ => text(StatusCode::NOT_FOUND, "there is no such path\n"),
        }
    }

    fn events(&self, progress: Arc<ViewerProgress>) -> PageAnswer {
        let Some(events) = self.feed.view(progress) else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "the page has as many viewers as it can have\n");
        };
        let mut answer = Response::new(PageBody::Events(Box::pin(events)));
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        answer
    }

    fn flow(&self, id: Option<u64>) -> PageAnswer {
        let mut found = None;
        contained("a flow's picture panicked", || found = id.and_then(|id| picture::of_one(&self.flows, id)));
        found.map_or_else(unknown_flow, |flow| whole("application/json", flow))
    }

    fn timeline(&self, id: Option<u64>) -> PageAnswer {
        self.of_timeline(id, |timeline| Some(whole("application/json", tracks::json(&timeline)?)))
    }

    fn trace(&self, id: Option<u64>) -> PageAnswer {
        self.of_timeline(id, |timeline| {
            let letters = timeline.flow.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' });
            let name = format!("attachment; filename=\"{}.pftrace\"", letters.take(64).collect::<String>());
            let mut answer = whole("application/octet-stream", Trace::new(vec![timeline]).to_bytes().into());
            answer.headers_mut().insert(header::CONTENT_DISPOSITION, HeaderValue::try_from(name).ok()?);
            Some(answer)
        })
    }

    fn of_timeline(&self, id: Option<u64>, answer: impl FnOnce(Timeline) -> Option<PageAnswer>) -> PageAnswer {
        let Some(records) = id.and_then(|id| picture::by_id(&self.flows, id)) else { return unknown_flow() };
        let mut found = None;
        contained("a flow's timeline panicked", || {
            found = records.timeline(WINDOW).and_then(answer);
            drop(records);
        });
        // The flow is not recorded.
        found.unwrap_or_else(|| empty(StatusCode::NO_CONTENT))
    }

    fn control(&self, id: Option<u64>, action: fn(&Handle)) -> PageAnswer {
        if !self.controls {
            return text(StatusCode::FORBIDDEN, "this page only shows: see `PageOptions::controls`\n");
        }
        let Some(flow) = id.and_then(|id| picture::by_id(&self.flows, id)?.handle()) else { return unknown_flow() };
        contained("the control of a flow panicked", || {
            action(&flow);
            drop(flow);
        });
        empty(StatusCode::NO_CONTENT)
    }
}

/// The name of the cookie. Cookies are shared by all ports of a host: it has the port that the browser sees, as the pages of
/// two machines may have the same port there, and two tunnels to them here.
fn cookie(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    format!("wakeline-page-{}", host.and_then(|host| host.port_u16()).unwrap_or(80))
}

/// The id in `id=7`.
fn id(query: &str) -> Option<u64> {
    query.split('&').find_map(|pair| pair.strip_prefix("id="))?.parse().ok()
}

/// A body that is short.
async fn short(mut body: Incoming) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    while let Some(frame) = poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx)).await {
        let part = frame.ok()?.into_data().ok()?;
        if content.len() + part.len() > MOST {
            return None;
        }
        content.extend_from_slice(&part);
    }
    Some(content)
}

fn unknown_flow() -> PageAnswer {
    text(StatusCode::NOT_FOUND, "there is no such flow\n")
}

fn empty(status: StatusCode) -> PageAnswer {
    let mut answer = Response::new(PageBody::Whole(None));
    *answer.status_mut() = status;
    answer
}

fn text(status: StatusCode, text: &'static str) -> PageAnswer {
    let mut answer = whole("text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()));
    *answer.status_mut() = status;
    answer
}

fn whole(kind: &'static str, content: Bytes) -> PageAnswer {
    let mut answer = Response::new(PageBody::whole(content));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// What every answer says to a browser.
fn secure(headers: &mut HeaderMap) {
    const POLICY: &str =
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'";
    let all = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in all {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
