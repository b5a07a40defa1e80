//! A send that fails gives its message back, with the reason.

use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use futures::FutureExt;
use wakeline::{
    hub::{Outcome, Reply, SendError, TrySendError},
    prelude::*,
};

/// A message that is neither `Clone` nor `Debug`.
struct Job(u32);

impl wakeline::Message for Job {}

/// Ends in its first run, with a message that it never takes.
struct Ends;

impl Operator for Ends {
    type Ports = SinkPorts<Job>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

#[tokio::test]
async fn every_send_to_an_ended_reader_gives_its_message_back() {
    let mut flow = Flow::new("unsent");
    let back = shared();
    let noted = back.clone();
    let send = flow.add(
        "send",
        task(move |ports: &mut SourcePorts<Job>, _| {
            let back = noted.clone();
            async move {
                ports.output.send(Job(0)).await?;
                while !ports.output.is_closed() {
                    tokio::task::yield_now().await;
                }
                let unsent = ports.output.send(Job(1)).await.unwrap_err();
                assert!(unsent.error().is_closed(), "{unsent}");
                assert_eq!(unsent.to_string(), "the message was not sent");
                assert_eq!(format!("{unsent:#}"), format!("the message was not sent: {}", unsent.error()));
                lock(&back).extend(unsent.into_message().map(|job| job.0));
                let unsent = ports.output.send_for(Reply::default(), Job(2)).await.unwrap_err();
                lock(&back).extend(unsent.into_message().map(|job| job.0));
                let unsent = ports.output.try_send(Job(3)).unwrap_err();
                assert!(matches!(&unsent, TrySendError::Failed(unsent) if unsent.error().is_closed()), "{unsent}");
                assert!(!unsent.is_full());
                lock(&back).extend(unsent.into_message().map(|job| job.0));
                let offer = ports.output.offer(Job(4)).unwrap();
                assert_eq!(offer.outcomes, [Outcome::Closed]);
                lock(&back).extend(offer.kept.map(|job| job.0));
                // As with `?`: this operator has ended, not failed.
                Err(ports.output.send(Job(5)).await.unwrap_err().into_error())
            }
            .boxed()
        }),
    );
    let ends = flow.add("ends", Ends);
    flow.connect(send.output, ends.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&back), [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_full_hub_gives_the_message_back_and_its_question_mark_says_so() {
    let mut flow = Flow::new("full");
    let send = flow.add(
        "send",
        task(|ports: &mut SourcePorts<Job>, _| {
            async move {
                ports.output.try_send(Job(0))?;
                let unsent = ports.output.try_send(Job(1)).unwrap_err();
                assert!(unsent.is_full());
                assert_eq!(unsent.into_message().map(|job| job.0), Some(1));
                ports.output.try_send(Job(2))?;
                Ok(())
            }
            .boxed()
        }),
    );
    let never = flow.add("never", task(|_: &mut SinkPorts<Job>, _| std::future::pending().boxed()));
    flow.connect_with(send.output, never.input, HubOptions::bounded(1));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("no room for the message"), "{error}");
}

/// Sends an envelope that is larger than those of the hub: the transfer to the reader's device fails.
fn sends_too_much(device: &Device, back: &Shared<usize>) -> impl Operator<Ports = SourcePorts<Envelope<u32>>> + use<> {
    let (device, back) = (device.clone(), back.clone());
    task(move |ports: &mut SourcePorts<Envelope<u32>>, _| {
        let (device, back) = (device.clone(), back.clone());
        async move {
            let mut large = Buffer::<u32>::pinned(&device, 64).unwrap();
            large.write().await?.fill(7);
            let unsent = ports.output.send(large.into()).await.unwrap_err();
            assert_eq!(unsent.error().kind(), ErrorKind::Usage, "{unsent}");
            let error = unsent.error().clone();
            let envelope = unsent.into_message().expect("the envelope is given back");
            assert_eq!(*envelope.read().await?, [7; 64]);
            lock(&back).push(envelope.len());
            Err(error)
        }
        .boxed()
    })
}

on_both!(a_failed_transfer_gives_the_envelope_back, |device: Device| async move {
    let (mut flow, back) = (Flow::new("too much"), shared());
    let send = flow.add("send", sends_too_much(&device, &back));
    let increment = flow.add("increment", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(send.output, increment.input, HubOptions::default().envelope_bytes(16));
    flow.connect(increment.output, collect.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert_eq!(*lock(&back), [64]);
});

/// A message whose destructor panics.
struct Spiteful;

impl wakeline::Message for Spiteful {}

static DROPPED: AtomicUsize = AtomicUsize::new(0);

impl Drop for Spiteful {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        panic!("a destructor that panics");
    }
}

/// The operator of the question mark reports why the message was not sent, and not the destructor's panic.
#[tokio::test]
async fn a_question_mark_contains_a_panic_of_the_messages_destructor() {
    let mut flow = Flow::new("spiteful");
    let outcome = shared();
    let noted = outcome.clone();
    let send = flow.add(
        "send",
        task(move |ports: &mut SourcePorts<Spiteful>, _| {
            let noted = noted.clone();
            async move {
                ports.output.close();
                let sent = async { Ok(ports.output.send(Spiteful).await?) }.await;
                lock(&noted).push(sent.map_err(|error: Error| error.kind()));
                let sent = (|| Ok(ports.output.try_send(Spiteful)?))();
                lock(&noted).push(sent.map_err(|error: Error| error.kind()));
                Ok(())
            }
            .boxed()
        }),
    );
    let never = flow.add("never", sink(async |_: Spiteful| Ok(())));
    flow.connect(send.output, never.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&outcome), [Err(ErrorKind::Closed); 2]);
    assert_eq!(DROPPED.load(Ordering::Relaxed), 2);
}

/// The error needs nothing of the message.
#[test]
fn an_unsent_message_is_an_error_like_any_other() {
    fn is_error<E: std::error::Error + Send + 'static>() {}
    is_error::<SendError<Job>>();
    is_error::<TrySendError<Job>>();
    let full = TrySendError::Full(Job(1));
    assert_eq!(format!("{full:?}"), "Full(..)");
    let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(full);
    assert!(boxed.to_string().contains("no room"), "{boxed}");
}

/// A message that is not `Sync`.
struct NotSync(#[allow(dead_code, reason = "only its type matters")] std::cell::Cell<u32>);

impl wakeline::Message for NotSync {}

/// A send error that passes through a boxed error on its way keeps its kind: the operator ends with its reader.
#[tokio::test]
async fn a_boxed_send_error_is_still_the_end_of_the_reader() {
    async fn send(output: &mut Output<NotSync>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        output.send(NotSync(std::cell::Cell::new(1))).await?;
        Ok(())
    }

    let mut flow = Flow::new("boxed");
    let writer = flow.add(
        "writer",
        task(move |ports: &mut SourcePorts<NotSync>, _| {
            async move {
                loop {
                    send(&mut ports.output).await?;
                }
            }
            .boxed()
        }),
    );
    let reader = flow.add(
        "reader",
        sink_with(async |_: NotSync, cx: &mut Cx| {
            cx.finish();
            Ok(())
        }),
    );
    flow.connect(writer.output, reader.input);
    within(flow.run()).await.unwrap();
}
