//! [`simulate`]: one test under several seeds.

use std::panic::resume_unwind;

use crate::{
    device::Simulation,
    error::{Result, catch_panic},
};

/// Runs a test in a [`Simulation`] of its own for each seed: the seed decides the order of all tasks and streams. On a
/// runtime whose clock is paused (`#[tokio::test(start_paused = true)]`) time is virtual, and the run depends on the seed
/// alone.
///
/// ```
/// use wakeline::{operator::map, prelude::*, test};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(async {
/// test::simulate(0..20, async |simulation| {
///     let device = Device::simulated(simulation, Emulated::new()).race_checked();
///     let mut pass = test::operator(map(async |data: Envelope<u32>| Ok(data))).on(&device).start()?;
///     pass.input(pass.input).send_slice(&[1, 2, 3])?;
///     let passed = pass.output(pass.output).recv().await?.expect("one for each");
///     assert_eq!(passed.as_slice()?, [1, 2, 3]);
///     pass.finish().await?;
///     Ok(())
/// })
/// .await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
/// The first error of the test, which names the seed. If the test panics, the seed is printed and the panic continues. To
/// repeat that run alone, pass `[seed]`.
///
/// # Cancel safety
/// Dropping the future ends the current simulation: its tasks are dropped and its devices are lost.
pub async fn simulate<F>(seeds: impl IntoIterator<Item = u64>, test: F) -> Result<()>
where
    F: AsyncFn(&Simulation) -> Result<()>,
{
    for seed in seeds {
        let simulation = Simulation::new(seed);
        match catch_panic(simulation.run(test(&simulation))).await {
            Ok(outcome) => outcome.map_err(|error| error.at(format!("seed {seed}")))?,
            Err(panic) => {
                eprintln!("the test failed with seed {seed}: `simulate([{seed}], ..)` repeats it");
                resume_unwind(panic);
            }
        }
    }
    Ok(())
}
