//! stub
#[allow(missing_docs)]
#[derive(Debug)] pub struct Simulation; pub(crate) struct SimulationHandle;
pub(crate) fn current() -> Option<SimulationHandle> { None }
impl SimulationHandle { pub(crate) fn spawn(&self, _n: &str, _t: impl Future<Output=()>+Send+'static) {} pub(crate) fn on_idle_every(&self, _d: std::time::Duration, _f: Box<dyn FnMut()->bool+Send>) {} }
