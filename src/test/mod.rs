//! A harness for tests of one operator.
//!
//! ```text
//!   test ── input(..).send ──> [ operator under test ] ──> output(..).recv ──> test
//!                  step, settle, recv: it runs only in these calls, one run at a time
//! ```
//!
//! [`operator`] starts an operator by itself: the test feeds each input and collects each output. The operator runs in a
//! [`Flow`](crate::Flow), by [steps](crate::flow::Steps), and only while the test awaits one of the harness's methods. So
//! runs can be counted, nothing sleeps, and a call that cannot succeed is an error that says what the operator waits for.
//!
//! # A host operator
//!
//! ```
//! use wakeline::{hub::Metadata, operator::map, prelude::*, test};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let mut upper = test::operator(map(async |line: String| Ok(line.to_uppercase()))).start()?;
//! upper.input(upper.input).metadata("line", 1_u32).send("hello".into())?;
//!
//! let line = upper.output(upper.output).recv().await?.expect("one for each line");
//! assert_eq!(*line, "HELLO");
//! assert_eq!(line.metadata().get::<u32>("line"), Some(&1));
//! assert_eq!(upper.runs(), 1);
//!
//! // Nothing more comes, since the test has sent nothing more.
//! assert!(upper.step().await?.is_waiting());
//! let error = upper.output(upper.output).recv().await.unwrap_err();
//! assert!(error.is_stalled() && error.to_string().contains("waits for a message"), "{error}");
//!
//! let report = upper.finish().await?;            // ends the inputs
//! assert!(upper.output(upper.output).recv().await?.is_none());
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! # An operator on a device
//!
//! Envelopes are sent as slices, and received as copies in host memory. The harness needs no sizes: only an output that
//! makes blank envelopes must have its `envelope_bytes` in its attribute or in
//! [`output_hub`](HarnessBuilder::output_hub).
//!
//! ```
//! use wakeline::{prelude::*, test};
//!
//! #[kernel]
//! fn scale(numbers: &mut [f32], factor: f32) {
//!     numbers.iter_mut().for_each(|number| *number *= factor);
//! }
//!
//! #[derive(Ports)]
//! struct ScalePorts {
//!     #[input]
//!     numbers: Input<Envelope<f32>>,
//!     #[output]
//!     scaled: Output<Envelope<f32>>,
//! }
//!
//! struct Scale(f32);
//!
//! impl Operator for Scale {
//!     type Ports = ScalePorts;
//!
//!     async fn compute(&mut self, ports: &mut ScalePorts, cx: &mut Cx) -> Result<()> {
//!         let mut numbers = ports.numbers.take()?;
//!         scale::launch(cx.stream()?, &mut numbers, self.0)?;
//!         ports.scaled.send(numbers).await?;
//!         Ok(())
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! // `Device::cuda(0)?` instead runs the same test on a GPU, if the kernel has a CUDA body.
//! let device = Device::emulated(Emulated::new()).race_checked();
//! let mut scale = test::operator(Scale(2.0)).on(&device).start()?;
//! scale.input(scale.numbers).send_slice(&[1.0, 2.5])?;
//! let scaled = scale.output(scale.scaled).recv().await?.expect("one for each");
//! assert_eq!(scaled.as_slice()?, [2.0, 5.0]);
//! # scale.finish().await?;
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! # An operator that answers requests
//!
//! Behind [`Flow::service`](crate::Flow::service) a message has a caller that waits for an answer. The test is the caller
//! with [`request`](TestInput::request) in place of `send`, and [`answer`](TestOutput::answer) in place of `recv`.
//!
//! ```
//! use wakeline::{operator::MapPorts, prelude::*, test};
//!
//! struct Root;
//!
//! impl Operator for Root {
//!     type Ports = MapPorts<f64, f64>;
//!
//!     async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
//!         let number = ports.input.take()?;
//!         if number < 0.0 {
//!             let negative = Error::new(ErrorKind::Usage, "a negative number has no root");
//!             cx.take_replies().into_iter().for_each(|reply| reply.fail(negative.clone()));
//!             return Ok(());
//!         }
//!         Ok(ports.output.send(number.sqrt()).await?)
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let mut root = test::operator(Root).start()?;
//! let four = root.input(root.input).request(4.0)?;
//! let negative = root.input(root.input).request(-1.0)?;
//! assert_eq!(*root.output(root.output).answer(&four).await?, 2.0);
//! let error = root.output(root.output).answer(&negative).await.unwrap_err();
//! assert_eq!(error.to_string(), "invalid use: a negative number has no root");
//! # root.finish().await?;
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Planned faults
//!
//! [`Faults`](crate::device::Faults) are planned for the device. The call in which the operator fails returns its error,
//! and so does each later one.
//!
//! ```
//! use wakeline::{device::Faults, prelude::*, test};
//! # #[kernel]
//! # fn scale(numbers: &mut [f32], factor: f32) {
//! #     numbers.iter_mut().for_each(|number| *number *= factor);
//! # }
//! # #[derive(Ports)]
//! # struct ScalePorts {
//! #     #[input]
//! #     numbers: Input<Envelope<f32>>,
//! #     #[output]
//! #     scaled: Output<Envelope<f32>>,
//! # }
//! # struct Scale(f32);
//! # impl Operator for Scale {
//! #     type Ports = ScalePorts;
//! #     async fn compute(&mut self, ports: &mut ScalePorts, cx: &mut Cx) -> Result<()> {
//! #         let mut numbers = ports.numbers.take()?;
//! #         scale::launch(cx.stream()?, &mut numbers, self.0)?;
//! #         ports.scaled.send(numbers).await?;
//! #         Ok(())
//! #     }
//! # }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let traps = Emulated::new().faults(Faults::new().trap_kernel("scale", 2));
//! let mut scale = test::operator(Scale(2.0)).on(&Device::emulated(traps)).start()?;
//! scale.input(scale.numbers).send_slice(&[1.0])?;
//! assert!(scale.output(scale.scaled).recv().await?.is_some());
//! scale.input(scale.numbers).send_slice(&[2.0])?;
//! let error = scale.output(scale.scaled).recv().await.unwrap_err();
//! assert!(error.is_device_lost() && error.to_string().contains("`scale`"), "{error}");
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Virtual time, and seeds
//!
//! On a runtime whose clock is paused, time passes while [`step`](Harness::step) and [`recv`](TestOutput::recv) wait for
//! it. In a [`Simulation`](crate::device::Simulation) a device is part of that: without threads, in an order that a seed
//! decides. [`simulate`](fn@simulate) tries several seeds.
//!
//! ```
//! use std::time::Duration;
//! use wakeline::{condition::every, operator::source, prelude::*, test};
//!
//! // As in a test with `#[tokio::test(start_paused = true)]`.
//! # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(async {
//! test::simulate(0..10, async |_simulation| {
//!     let begun = tokio::time::Instant::now();
//!     let ticks = source(move || std::future::ready(Ok(Some(begun.elapsed().as_secs()))));
//!     let mut ticks = test::operator(ticks).when(every(Duration::from_secs(60))).start()?;
//!     for tick in [0, 60, 120] {
//!         let time = ticks.output(ticks.output).recv().await?.expect("it never ends");
//!         assert_eq!(*time, tick);
//!     }
//!     ticks.finish().await?;
//!     Ok(())
//! })
//! .await?;
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Hubs of chunks
//!
//! A port that is [linked](crate::operator::Linked) gets a hub from the test, with
//! [`HarnessBuilder::link`]. The test fills and reads it by links of its own: `hub.produce(&host)`, `hub.peek(&host)`.

mod builder;
mod harness;
mod request;
mod simulate;
mod sink;
mod source;
mod watchdog;

pub use builder::{HarnessBuilder, local_operator, operator, operator_named};
pub use harness::{Harness, Stepped, TestInput, TestOutput};
pub use request::TestRequest;
pub use simulate::simulate;
pub use sink::Received;
