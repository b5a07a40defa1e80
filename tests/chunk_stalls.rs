//! Groups of operators that wait only for each other and have links to hubs of chunks (Q7, Q8).

use std::{future::ready, time::Duration};

use common::*;
use wakeline::{condition::every, prelude::*};

#[derive(Ports)]
struct StorePorts {
    #[input]
    number: Input<u32>,
    #[produce]
    numbers: Produce<u32>,
}

struct Store;

impl Operator for Store {
    type Ports = StorePorts;

    async fn compute(&mut self, ports: &mut StorePorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.number.take()?;
        ports.numbers.get_mut()?.fill_from(&[number]).await
    }
}

#[derive(Ports)]
struct FetchPorts {
    #[consume]
    numbers: Consume<u32>,
    #[output]
    number: Output<u32>,
}

struct Fetch;

impl Operator for Fetch {
    type Ports = FetchPorts;

    async fn compute(&mut self, ports: &mut FetchPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.numbers.get()?.read().await?[0];
        ports.number.send(number).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct CountdownPorts {
    #[input]
    back: Input<u32>,
    #[output]
    forth: Output<u32>,
}

/// Sends a number round a loop and decrements it each time.
struct Countdown(u32);

impl Operator for Countdown {
    type Ports = CountdownPorts;

    async fn run(&mut self, ports: &mut CountdownPorts, _cx: &mut Cx) -> Result<()> {
        ports.forth.send(self.0).await?;
        while let Some(number) = ports.back.recv().await? {
            self.0 = number;
            if number > 0 {
                ports.forth.send(number - 1).await?;
            }
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut CountdownPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

fn chunks_on_the_host() -> ChunkHub<u32> {
    ChunkHub::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap()
}

/// An operator that has seen a blank envelope, and did not take it because it waits for a message, does not wait for
/// the envelope.
#[tokio::test(start_paused = true)]
async fn q7_a_quiet_loop_through_a_hub_of_chunks_ends() {
    let (mut flow, hub) = (Flow::new("q7"), chunks_on_the_host());
    let (count, store, fetch) = (flow.add("count", Countdown(5)), flow.add("store", Store), flow.add("fetch", Fetch));
    flow.connect(count.forth, store.number);
    flow.link(store.numbers, &hub);
    flow.link(fetch.numbers, &hub);
    flow.connect(fetch.number, count.back);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("store").unwrap().runs, 6);
}

#[derive(Ports)]
struct BothPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[produce]
    numbers: Produce<u32>,
    #[output]
    sent: Output<u32>,
}

struct Both;

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.left.take()? + ports.right.take()?;
        ports.numbers.get_mut()?.fill_from(&[number]).await?;
        ports.sent.send(number).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct LeftFirstPorts {
    #[input]
    sent: Input<u32>,
    #[output]
    left: Output<u32>,
    #[output]
    right: Output<u32>,
}

/// Sends to `right` only after a message has come back.
struct LeftFirst;

impl Operator for LeftFirst {
    type Ports = LeftFirstPorts;

    async fn run(&mut self, ports: &mut LeftFirstPorts, _cx: &mut Cx) -> Result<()> {
        ports.left.send(1).await?;
        while ports.sent.recv().await?.is_some() {
            ports.right.send(2).await?;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut LeftFirstPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// Two operators deadlock while another one runs on a timer. The deadlock is found although one of the two could get a
/// blank envelope of a hub that others use.
#[tokio::test(start_paused = true)]
async fn q8_a_deadlock_of_operators_with_room_in_a_hub_of_chunks_is_found() {
    let (mut flow, hub) = (Flow::new("q8"), chunks_on_the_host());
    let ticks = flow.add("ticks", chunks::Fill::each(0..u32::MAX >> 8)).when(every(Duration::from_millis(20)));
    let drain = flow.add("drain", chunks::Drain(shared()));
    let (both, first) = (flow.add("both", Both), flow.add("first", LeftFirst));
    flow.link(ticks.numbers, &hub);
    flow.link(both.numbers, &hub);
    flow.link(drain.numbers, &hub);
    flow.connect(first.left, both.left);
    flow.connect(first.right, both.right);
    flow.connect(both.sent, first.sent);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    assert!(text.contains("`both` waits for") && text.contains("`first` waits for"), "{text}");
    assert!(!text.contains("ticks") && !text.contains("blank"), "{text}");
}

#[derive(Ports)]
struct ProducesPorts {
    #[input(at_least = 1)]
    numbers: Inputs<u32>,
    #[input(optional)]
    settings: Input<u32>,
    #[output]
    forth: Output<u32>,
    #[produce]
    chunks: Produce<u32>,
}

struct Produces;

impl Operator for Produces {
    type Ports = ProducesPorts;

    async fn compute(&mut self, ports: &mut ProducesPorts, _cx: &mut Cx) -> Result<()> {
        ports.settings.try_take()?;
        let Some((_, number)) = ports.numbers.try_take_any()? else { return Ok(()) };
        ports.chunks.get_mut()?.fill_from(&[number]).await?;
        if number > 0 {
            ports.forth.send(number - 1).await?;
        }
        Ok(())
    }
}

#[derive(Ports)]
struct ConsumesPorts {
    #[consume]
    chunks: Consume<u32>,
}

struct Consumes;

impl Operator for Consumes {
    type Ports = ConsumesPorts;

    async fn compute(&mut self, ports: &mut ConsumesPorts, _cx: &mut Cx) -> Result<()> {
        ports.chunks.get()?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(())
    }
}

/// A loop that has run dry has not stalled when its chunks are left to a consumer that is still running, and its latest
/// setting is left unread.
#[tokio::test(start_paused = true)]
async fn q7_chunks_for_others_and_unread_settings_do_not_stall_a_quiet_loop() {
    for (by_hand, stepped) in [(false, false), (false, true), (true, false), (true, true)] {
        let hub = ChunkHub::<u32>::builder("chunks").elements(1).queue(8).host_envelopes(8).build().unwrap();
        let mut flow = Flow::new("q7");
        let produces = flow.add("produces", Produces);
        let mut once = Some(3);
        let begin = flow.add("begin", source(move || ready(Ok(once.take()))));
        flow.connect(begin.output, produces.numbers);
        flow.connect_with(produces.forth, produces.numbers, HubOptions::bounded(4));
        flow.link(produces.chunks, &hub);
        // At least one setting arrives after the loop's last run.
        let mut settings = 0..20;
        let settings = source(move || ready(Ok(settings.next())));
        let settings = flow.add("settings", settings).when(every(Duration::from_millis(10)));
        flow.connect_with(settings.output, produces.settings, HubOptions::latest());
        let taken = if by_hand {
            let mut link = hub.consume(&Device::host()).unwrap();
            Some(tokio::spawn(async move {
                let mut taken = 0;
                while let Some(chunk) = link.next().await.unwrap() {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    chunk.commit().unwrap();
                    taken += 1;
                }
                taken
            }))
        } else {
            let consumes = flow.add("consumes", Consumes);
            flow.link(consumes.chunks, &hub);
            None
        };
        drop(hub);
        let report = if stepped {
            let mut steps = flow.steps().unwrap();
            within(async { while steps.next().await.is_some() {} }).await;
            within(steps.run_on()).await
        } else {
            within(flow.run()).await
        };
        let report = report.unwrap_or_else(|error| panic!("by hand {by_hand}, stepped {stepped}: {error}"));
        let taken = match taken {
            Some(taken) => within(taken).await.unwrap(),
            None => report.operator("consumes").unwrap().runs,
        };
        assert_eq!(taken, 4, "by hand {by_hand}, stepped {stepped}");
    }
}

#[derive(Ports)]
struct NumberAndChunkPorts {
    #[input]
    numbers: Input<u32>,
    #[output]
    forth: Output<u32>,
    #[consume]
    chunks: Consume<u32>,
}

struct NumberAndChunk;

impl Operator for NumberAndChunk {
    type Ports = NumberAndChunkPorts;

    async fn compute(&mut self, ports: &mut NumberAndChunkPorts, _cx: &mut Cx) -> Result<()> {
        ports.numbers.take()?;
        ports.chunks.get()?;
        Ok(())
    }
}

/// A chunk that only a member of the deadlocked group could take counts as left over, whatever other links its hub has.
#[tokio::test(start_paused = true)]
async fn q8_a_chunk_that_only_the_group_itself_would_take_is_left() {
    let hub = ChunkHub::<u32>::builder("chunks").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut flow = Flow::new("q8");
    // Only the operator's own output could bring it a number.
    let both = flow.add("both", NumberAndChunk);
    flow.connect(both.forth, both.numbers);
    flow.link(both.chunks, &hub);
    let mut link = hub.produce(&Device::host()).unwrap();
    let produced = tokio::spawn(async move {
        let mut chunk = link.next().await.unwrap().unwrap();
        chunk.fill_from(&[1]).await.unwrap();
        chunk.commit().unwrap();
        tokio::time::sleep(Duration::from_secs(100_000)).await;
        drop(link);
    });
    drop(hub);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    produced.abort();
}
