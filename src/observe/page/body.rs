//! [`PageBody`]: the body of a response, whole or a stream of events.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use futures::Stream;
use hyper::body::{Body, Bytes, Frame, SizeHint};

pub(super) enum PageBody {
    Whole(Option<Bytes>),
    /// Its next part is asked for when the connection has room for it.
    Events(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl PageBody {
    pub(super) fn whole(content: impl Into<Bytes>) -> Self {
        Self::Whole(Some(content.into()))
    }
}

impl Body for PageBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(content) => Poll::Ready(content.take().map(|content| Ok(Frame::data(content)))),
            Self::Events(events) => {
                events.as_mut().poll_next(cx).map(|event| event.map(|event| Ok(Frame::data(event))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(content) => SizeHint::with_exact(content.as_ref().map_or(0, |content| content.len() as u64)),
            Self::Events(_) => SizeHint::default(),
        }
    }
}
