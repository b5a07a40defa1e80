//! Shared by the scenario tests: devices, small operators, and ways to block things without sleeping.
//!
//! A test of a device runs its body twice, on the emulated device and on a GPU, both race-checked: [`on_both!`]. The
//! GPU test is ignored by default: `cargo test -- --include-ignored`.

pub mod alone;
pub mod chunks;
pub mod clock;
pub mod example;
pub mod fault;
pub mod graph;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use wakeline::{Stream, device::Emulated, hub::TrySendError, memory::Plain, prelude::*};

pub use wakeline::operator::{MapPorts, SinkPorts, SourcePorts, map, sink, source};

/// An emulated device, race-checked, with enough workers for blocked streams.
pub fn emulated() -> Device {
    emulated_with(Emulated::new().workers(4))
}

/// An emulated device with this configuration, race-checked.
pub fn emulated_with(config: Emulated) -> Device {
    hear_errors();
    let device = Device::emulated(config).race_checked();
    rest::expect_of(&device);
    device
}

/// The first GPU, race-checked.
pub fn cuda() -> Device {
    let device = cuda_without_kernels();
    hear_errors();
    // A driver may wait for all work of the device when it loads code or page-locks memory, and these tests block the
    // device.
    for kernel in wakeline::kernel::Kernel::all() {
        kernel.load_blocking(&device).expect("the tests' kernels compile");
    }
    let spares: Vec<_> = (0..8).map(|_| Buffer::<u32>::pinned(&device, 64)).collect();
    drop(spares);
    device
}

/// The same without loading the kernels: for a test of one that does not compile.
pub fn cuda_without_kernels() -> Device {
    Device::cuda(0).unwrap_or_else(|error| panic!("this test needs a GPU: {error:#}")).race_checked()
}

/// False if there was no room for the message, which is dropped.
pub fn fits<M: 'static>(sent: Result<(), TrySendError<M>>) -> Result<bool> {
    match sent {
        Ok(()) => Ok(true),
        Err(TrySendError::Full(_)) => Ok(false),
        Err(failed) => Err(failed.into()),
    }
}

/// The message of a send that found no room.
pub fn full<M: 'static>(unsent: TrySendError<M>) -> M {
    match unsent {
        TrySendError::Full(message) => message,
        TrySendError::Failed(unsent) => panic!("not full: {unsent}"),
    }
}

/// How often a test repeats, or how much it sends: `quick` in a debug build (`cargo test`), `long` in a release build
/// (`.ci/full`).
pub const fn quick_or_long<T: Copy>(quick: T, long: T) -> T {
    if cfg!(debug_assertions) { quick } else { long }
}

pub fn streams<const N: usize>(device: &Device) -> [Stream; N] {
    std::array::from_fn(|n| Stream::named(device, ["a", "b", "c", "d"][n]).unwrap())
}

/// Checks that no memory of a test's device outlives the test: when the test's thread ends, after its runtime.
mod rest {
    use std::{
        cell::{Cell, RefCell},
        sync::Once,
        time::{Duration, Instant},
    };

    use wakeline::Device;

    thread_local! {
        static FAILED: Cell<bool> = const { Cell::new(false) };
        static DEVICES: Devices = const { Devices(RefCell::new(Vec::new())) };
    }

    struct Devices(RefCell<Vec<Device>>);

    pub(super) fn expect_of(device: &Device) {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let _ = FAILED.try_with(|failed| failed.set(true));
                report(info);
            }));
        });
        DEVICES.with(|devices| devices.0.borrow_mut().push(device.clone()));
    }

    impl Drop for Devices {
        fn drop(&mut self) {
            // A failed test reports its own error.
            if FAILED.get() {
                return;
            }
            let asked = Instant::now();
            // A lost device keeps the memory that it may still access, and the memory's owners.
            let devices = self.0.take().into_iter().filter(|device| device.lost().is_none());
            for device in devices {
                let all = || [device.memory_stats(), device.pinned_memory_stats()];
                while !all().iter().all(|stats| stats.is_at_rest()) {
                    if asked.elapsed() > Duration::from_secs(10) {
                        let test = std::thread::current();
                        eprintln!("{}: memory of {device} is not released: {:?}", test.name().unwrap_or("?"), all());
                        std::process::abort();
                    }
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// One async body as two tests, `name::emulated` and `name::cuda`.
#[macro_export]
macro_rules! on_both {
    ($name:ident, $body:expr) => {
        mod $name {
            use super::*;

            async fn body(device: Device) {
                $crate::within($body(device.clone())).await;
                $crate::at_rest(&device).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn emulated() {
                body($crate::emulated()).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "needs a GPU"]
            async fn cuda() {
                let _alone = $crate::alone().await;
                body($crate::cuda()).await;
            }
        }
    };
}

/// Serialises the tests of one GPU: the driver calls host functions one at a time, so that one which blocks a stream
/// blocks those of all others, and the default stream waits for every test's work.
pub async fn alone() -> tokio::sync::MutexGuard<'static, ()> {
    static GPU: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    GPU.lock().await
}

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(60), future).await {
        Ok(output) => output,
        Err(_) => panic!("timed out after 60 seconds"),
    }
}

/// Resolves when the condition is true.
pub async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let becomes = async {
        while !is() {
            tokio::task::yield_now().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(10), becomes).await.is_err() {
        panic!("not within ten seconds: {what}");
    }
}

/// Resolves when wakeline has released all of the device's memory, none of it too early.
pub async fn freed(device: &Device) {
    until("all memory of the device is released", || device.memory_in_use() == 0).await;
    assert_eq!(freed_too_early(), [""; 0]);
}

/// Resolves when all counters of a device, and of its page-locked memory, are back at zero. Called at the end of every
/// test of a device.
pub async fn at_rest(device: &Device) {
    let all = || [device.memory_stats(), device.pinned_memory_stats()];
    let is_at_rest = || all().iter().all(wakeline::memory::MemoryStats::is_at_rest) && device.memory_in_use() == 0;
    let rests = async {
        while !is_at_rest() {
            tokio::task::yield_now().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(10), rests).await.is_err() {
        panic!("memory of {device} is not released: {:?}", all());
    }
    assert_eq!(freed_too_early(), [""; 0]);
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub type Shared<T> = Arc<Mutex<Vec<T>>>;

pub fn shared<T>() -> Shared<T> {
    Shared::default()
}

pub struct SendEach<T>(VecDeque<Vec<T>>);

impl<T> SendEach<T> {
    pub fn new(chunks: impl IntoIterator<Item = Vec<T>>) -> Self {
        Self(chunks.into_iter().collect())
    }
}

impl<T: Plain> Operator for SendEach<T> {
    type Ports = SourcePorts<Envelope<T>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let Some(chunk) = self.0.pop_front() else {
            cx.finish();
            return Ok(());
        };
        if self.0.is_empty() {
            cx.finish();
        }
        let mut envelope = ports.output.blank().await?;
        envelope.space().await?[..chunk.len()].copy_from_slice(&chunk);
        envelope.set_len(chunk.len())?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Collects the contents of each envelope, on the host.
pub struct Collect<T>(pub Shared<Vec<T>>);

impl<T: Plain> Operator for Collect<T> {
    type Ports = SinkPorts<Envelope<T>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        let data = envelope.read().await?.to_vec();
        lock(&self.0).push(data);
        Ok(())
    }
}

/// Adds one to each element on the device, in place, and passes the envelope on.
pub struct Increment;

impl Operator for Increment {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Passes messages on unchanged, wherever their data is.
pub fn pass_on<M: wakeline::Message + Sync>() -> impl Operator<Ports = MapPorts<M, M>> {
    map(|message: M| std::future::ready(Ok(message)))
}

pub fn keep<M: wakeline::Message + Sync>(seen: &Shared<M>) -> impl Operator<Ports = SinkPorts<M>> {
    let seen = seen.clone();
    sink(move |message: M| {
        lock(&seen).push(message);
        std::future::ready(Ok(()))
    })
}

/// Reads `first` messages, waits to be released, and then reads the rest.
pub fn held(
    first: usize,
    go: tokio::sync::oneshot::Receiver<()>,
    seen: &Shared<u64>,
) -> impl Operator<Ports = SinkPorts<u64>> + use<> {
    let (mut go, seen) = (Some(go), seen.clone());
    task(move |ports: &mut SinkPorts<u64>, _| {
        let (go, seen) = (go.take().unwrap(), seen.clone());
        async move {
            for _ in 0..first {
                let number = ports.input.recv().await?;
                lock(&seen).extend(number);
            }
            go.await.unwrap();
            while let Some(number) = ports.input.recv().await? {
                lock(&seen).push(number);
            }
            Ok(())
        }
        .boxed()
    })
}

struct Task<P, F>(F, std::marker::PhantomData<fn(P)>);

impl<P, F> Operator for Task<P, F>
where
    P: Ports,
    F: for<'a> FnMut(&'a mut P, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = P;

    async fn compute(&mut self, _ports: &mut P, _cx: &mut Cx) -> Result<()> {
        unreachable!("`run` does not call `compute`")
    }

    async fn run(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        (self.0)(ports, cx).await
    }
}

/// An operator with a loop of its own: a function that is called once.
pub fn task<P, F>(run: F) -> impl Operator<Ports = P>
where
    P: Ports,
    F: for<'a> FnMut(&'a mut P, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    Task(run, std::marker::PhantomData)
}

/// Blocks a stream until it is dropped.
#[must_use]
pub struct Hold {
    _go: mpsc::Sender<()>,
}

pub fn hold(stream: &Stream) -> Hold {
    let (go, held) = mpsc::channel::<()>();
    stream.host_function(move || _ = held.recv()).expect("a stream that works");
    Hold { _go: go }
}

/// Collects what wakeline logs as an error. The race checker finds memory that cannot be released because it may still
/// be in use; it can only log it.
struct Errors;

static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub fn hear_errors() {
    // Fails in the second test of a process: the collector is already installed.
    let _ = tracing::subscriber::set_global_default(Errors);
}

/// The errors about memory that was released too early.
pub fn freed_too_early() -> Vec<String> {
    lock(&ERRORS).iter().filter(|error| error.contains("could not be given back")).cloned().collect()
}

impl tracing::Subscriber for Errors {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        lock(&ERRORS).push(fields(event, ": "));
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

/// Collects the warnings of a thread, if set with `tracing::subscriber::set_default`.
#[derive(Clone, Default)]
pub struct Warnings(Shared<String>);

impl Warnings {
    /// Returns the warnings since the last call.
    pub fn messages(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        lock(&self.0).push(fields(event, "="));
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

/// An event's fields, each with its name.
fn fields(event: &tracing::Event<'_>, is: &str) -> String {
    struct Text<'a>(String, &'a str);
    impl tracing::field::Visit for Text<'_> {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            self.0.push_str(&format!("{field}{}{value:?}; ", self.1));
        }
    }
    let mut text = Text(String::new(), is);
    event.record(&mut text);
    text.0
}

/// Counts messages: how many exist, and the maximum at any time.
#[derive(Clone, Default)]
pub struct Census(Arc<(AtomicUsize, AtomicUsize)>);

/// A message that is counted from its creation to its drop.
pub struct Counted {
    pub number: u64,
    census: Census,
}

impl Census {
    pub fn message(&self, number: u64) -> Counted {
        let live = self.0.0.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.1.fetch_max(live, Ordering::Relaxed);
        Counted { number, census: self.clone() }
    }

    pub fn live(&self) -> usize {
        self.0.0.load(Ordering::Acquire)
    }

    pub fn most(&self) -> usize {
        self.0.1.load(Ordering::Acquire)
    }
}

impl wakeline::Message for Counted {}

impl Drop for Counted {
    fn drop(&mut self) {
        self.census.0.0.fetch_sub(1, Ordering::Release);
    }
}

#[kernel(unsafe(cuda = "../kernels/increment.cu"))]
pub fn increment(x: &mut [u32]) {
    for x in x {
        *x = x.wrapping_add(1);
    }
}

#[kernel(unsafe(cuda = "../kernels/add_one.cu"))]
pub fn add_one(x: &[u32], y: &mut [u32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = x.wrapping_add(1);
    }
}

/// b = a a, for a matrix of n rows and columns
#[kernel(unsafe(cuda = "../kernels/square.cu"))]
pub fn square(a: &[u32], b: &mut [u32], n: u32) {
    let n = n as usize;
    for (at, b) in b.iter_mut().enumerate() {
        let (row, column) = (at / n, at % n);
        *b = (0..n).fold(0, |sum: u32, k| sum.wrapping_add(a[row * n + k].wrapping_mul(a[k * n + column])));
    }
}

/// total = the sum of x
#[kernel(unsafe(cuda = "../kernels/sum.cu"))]
pub fn sum(x: &[u32], total: &mut [u32]) {
    total[0] = x.iter().fold(0, |sum, x| sum.wrapping_add(*x));
}

/// A test that fails where `REQUIRE_CUDA=1` and the run leaves out the tests that need a GPU. Each test program with such
/// tests has one.
#[macro_export]
macro_rules! gpu_tests_run_where_required {
    () => {
        #[test]
        fn gpu_tests_run_where_required() {
            let required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
            let included = std::env::args().any(|argument| argument == "--include-ignored" || argument == "--ignored");
            assert!(
                included || !required,
                "REQUIRE_CUDA=1 and the tests that need a GPU are left out: add `-- --include-ignored`"
            );
        }
    };
}

/// A test that every kernel of this executable compiles, which needs NVRTC and no GPU.
#[macro_export]
macro_rules! every_kernel_compiles {
    () => {
        #[test]
        #[ignore = "needs NVRTC"]
        fn every_kernel_compiles() {
            wakeline::kernel::compile_all("sm_90").unwrap();
        }
    };
}

// The programs of README, of one page of the guide and the macros' examples, as doc tests. They stand here because the
// packages that are published hold neither README's CUDA file nor what these programs depend on.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../../macros/src/examples/message.md")]
#[doc = include_str!("../../macros/src/examples/ports.md")]
// Its programs need cudarc's bindings of cuBLAS, cuDNN and cuFFT.
#[cfg_attr(feature = "cuda", doc = include_str!("../../src/guide/existing_code.md"))]
#[doc = include_str!("../../src/guide/request_spans.md")]
struct Readme;
