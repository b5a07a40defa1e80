//! An operator and its tests, to copy: on the emulated device, on a GPU, under seeds, in virtual time, with faults.
//!
//! `cargo test --example operator_test`, and with a GPU `cargo test --example operator_test -- --include-ignored`

#![cfg_attr(not(test), allow(dead_code, reason = "the tests are the program"))]

use wakeline::{
    operator::{SourcePorts, source},
    prelude::*,
};

/// y = factor x
#[kernel(unsafe(cuda = "scale.cu"))]
fn scale(x: &[f32], y: &mut [f32], factor: f32) {
    for (x, y) in x.iter().zip(y) {
        *y = x * factor;
    }
}

#[derive(Ports)]
struct ScalePorts {
    #[input]
    numbers: Input<Envelope<f32>>,
    #[output(envelope_bytes = 4096)]
    scaled: Output<Envelope<f32>>,
}

/// Scales numbers on its device. The metadata `factor` of a message takes precedence over its own factor.
struct Scale {
    factor: f32,
}

impl Operator for Scale {
    type Ports = ScalePorts;

    async fn compute(&mut self, ports: &mut ScalePorts, cx: &mut Cx) -> Result<()> {
        let numbers = ports.numbers.take()?;
        if numbers.is_empty() {
            return Err("a message without numbers".into());
        }
        let factor = cx.metadata().get("factor").copied().unwrap_or(self.factor);
        let mut scaled = ports.scaled.blank().await?;
        scaled.set_len(numbers.len())?;
        scale::launch(cx.stream()?, &numbers, &mut scaled, factor)?;
        ports.scaled.send(scaled).await?;
        Ok(())
    }
}

/// Counts its runs.
fn count() -> impl Operator<Ports = SourcePorts<u64>> {
    let mut numbers = 0..;
    source(move || std::future::ready(Ok(numbers.next())))
}

fn main() {
    println!("operators to copy with their tests: `cargo test --example operator_test` runs them");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;
    use wakeline::{
        condition::every,
        device::Faults,
        test::{self, Harness, Stepped},
    };

    use super::*;

    fn emulated() -> Device {
        Device::emulated(Emulated::new()).race_checked()
    }

    fn started(device: &Device) -> Result<Harness<ScalePorts>> {
        test::operator(Scale { factor: 2.0 }).on(device).start()
    }

    /// The body of two tests: on the emulated device, and on a GPU.
    async fn scales(device: &Device) -> Result<()> {
        let mut scale = started(device)?;
        scale.input(scale.numbers).send_slice(&[1.0, 2.5])?;
        scale.input(scale.numbers).metadata("factor", 10.0_f32).send_slice(&[3.0])?;

        let doubled = scale.output(scale.scaled).recv().await?.expect("one for each");
        assert_eq!(doubled.as_slice()?, [2.0, 5.0]);
        let tenfold = scale.output(scale.scaled).recv().await?.expect("one for each");
        assert_eq!(tenfold.as_slice()?, [30.0]);
        assert_eq!(tenfold.metadata().get("factor"), Some(&10.0_f32), "metadata travels on");

        // Nothing more comes.
        assert!(scale.step().await?.is_waiting());
        let report = scale.finish().await?;
        assert_eq!(report.operator("Scale").expect("its name").runs, 2);
        Ok(())
    }

    #[tokio::test]
    async fn scales_emulated() -> Result<()> {
        scales(&emulated()).await
    }

    #[tokio::test]
    #[ignore = "needs a GPU"]
    async fn scales_cuda() -> Result<()> {
        scales(&Device::cuda(0)?.race_checked()).await
    }

    /// Each seed is another order of tasks and of device work.
    #[tokio::test(start_paused = true)]
    async fn scales_in_any_order() -> Result<()> {
        test::simulate(0..100, async |simulation| {
            scales(&Device::simulated(simulation, Emulated::new()).race_checked()).await
        })
        .await
    }

    /// The test is the caller, as behind a service.
    #[tokio::test]
    async fn answers_each_request() -> Result<()> {
        let mut scale = started(&emulated())?;
        let (numbers, _) = Buffer::wrap(vec![1.0, 2.5])?;
        let request = scale.input(scale.numbers).request(numbers.into())?;
        let scaled = scale.output(scale.scaled).answer(&request).await?;
        assert_eq!(scaled.as_slice()?, [2.0, 5.0]);
        Ok(())
    }

    #[tokio::test]
    async fn refuses_a_message_without_numbers() -> Result<()> {
        let mut scale = started(&emulated())?;
        scale.input(scale.numbers).send_slice(&[])?;
        let error = scale.step().await.unwrap_err();
        assert_eq!(error.to_string(), "operator `Scale`: a message without numbers");
        Ok(())
    }

    #[tokio::test]
    async fn a_fault_names_the_kernel() -> Result<()> {
        let faults = Faults::new().trap_kernel("scale", 2);
        let mut scale = started(&Device::emulated(Emulated::new().faults(faults)))?;
        scale.input(scale.numbers).send_slice(&[1.0])?;
        assert!(scale.output(scale.scaled).recv().await?.is_some());
        scale.input(scale.numbers).send_slice(&[1.0])?;
        let error = scale.output(scale.scaled).recv().await.unwrap_err();
        assert!(error.is_device_lost() && error.to_string().contains("kernel `scale`"), "{error}");
        Ok(())
    }

    /// An hour of virtual time.
    #[tokio::test(start_paused = true)]
    async fn counts_the_seconds() -> Result<()> {
        let begun = Instant::now();
        let mut count = test::operator(count()).when(every(Duration::from_secs(1))).start()?;
        for run in 1..=3600 {
            assert_eq!(count.step().await?, Stepped::Ran(run));
        }
        assert_eq!(begun.elapsed().as_secs(), 3599);
        let numbers = count.output(count.output).drain()?;
        assert!(numbers.iter().map(|number| **number).eq(0..3600));
        Ok(())
    }
}
