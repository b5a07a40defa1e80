//! Operators that act at given times, and records of when something happened: for tests whose clock is paused
//! (`#[tokio::test(start_paused = true)]`). Time then passes only while all tasks wait, and every moment is exact.

use std::time::Duration;

use futures::FutureExt;
use tokio::time::{Instant, sleep_until};
use wakeline::prelude::*;

use crate::{Shared, SourcePorts, lock, shared, task};

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Events with their times, in milliseconds since the start.
pub struct Notes<T> {
    begun: Instant,
    all: Shared<(u64, T)>,
}

impl<T> Clone for Notes<T> {
    fn clone(&self) -> Self {
        Self { begun: self.begun, all: self.all.clone() }
    }
}

impl<T: Clone> Notes<T> {
    pub fn begin() -> Self {
        Self { begun: Instant::now(), all: shared() }
    }

    pub fn add(&self, what: T) {
        let since = self.begun.elapsed();
        assert_eq!(since.subsec_nanos() % 1_000_000, 0, "{since:?} is not a whole millisecond");
        lock(&self.all).push((since.as_millis() as u64, what));
    }

    pub fn all(&self) -> Vec<(u64, T)> {
        lock(&self.all).clone()
    }

    pub fn times(&self) -> Vec<u64> {
        lock(&self.all).iter().map(|(time, _)| *time).collect()
    }
}

struct Runs<P, F> {
    run: F,
    lasts: Duration,
    of: std::marker::PhantomData<fn(P)>,
}

impl<P: Ports, F: FnMut(&mut P, &mut Cx) -> Result<()> + Send + 'static> Operator for Runs<P, F> {
    type Ports = P;

    async fn compute(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        (self.run)(ports, cx)?;
        if !self.lasts.is_zero() {
            tokio::time::sleep(self.lasts).await;
        }
        Ok(())
    }
}

/// An operator whose runs call this function.
pub fn runs<P, F>(run: F) -> impl Operator<Ports = P>
where
    P: Ports,
    F: FnMut(&mut P, &mut Cx) -> Result<()> + Send + 'static,
{
    runs_for(0, run)
}

/// The same; each run takes so many milliseconds.
pub fn runs_for<P, F>(millis: u64, run: F) -> impl Operator<Ports = P>
where
    P: Ports,
    F: FnMut(&mut P, &mut Cx) -> Result<()> + Send + 'static,
{
    Runs { run, lasts: ms(millis), of: std::marker::PhantomData }
}

/// Sends each message at its time, in milliseconds since the operator started, and ends after the last.
pub fn at<M: wakeline::Message>(messages: impl IntoIterator<Item = (u64, M)>) -> impl Operator<Ports = SourcePorts<M>> {
    at_until(0, messages)
}

/// The same, but does not end before this time.
pub fn at_until<M: wakeline::Message>(
    end: u64,
    messages: impl IntoIterator<Item = (u64, M)>,
) -> impl Operator<Ports = SourcePorts<M>> {
    let mut messages = Some(messages.into_iter().collect::<Vec<_>>().into_iter());
    task(move |ports: &mut SourcePorts<M>, _cx: &mut Cx| {
        let messages = messages.take().expect("the flow runs only once");
        async move {
            let begun = Instant::now();
            for (time, message) in messages {
                sleep_until(begun + ms(time)).await;
                ports.output.send(message).await?;
            }
            sleep_until(begun + ms(end)).await;
            Ok(())
        }
        .boxed()
    })
}
