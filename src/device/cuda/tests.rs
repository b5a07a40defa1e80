//! Tests of the backend alone.
//!
//! Tests that need a GPU begin with [`Gpu::get`]. They are ignored by default, as are those that need the compiler,
//! NVRTC. They run one at a time, so that no other test changes the device's memory, and each closes the device at its
//! end, so that reopening is tested too. The test of a fault runs in a separate process, as it ends the device there.

mod axis;
mod graph;
mod samples;

use std::{
    env,
    process::Command,
    slice,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use self::samples::*;
use super::*;
use crate::device::backend::Arg;

#[test]
fn gpu_tests_run_where_required() {
    let required = env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
    let included = env::args().any(|argument| argument == "--include-ignored" || argument == "--ignored");
    assert!(
        included || !required,
        "REQUIRE_CUDA=1 and the tests that need a GPU are left out: add `-- --include-ignored`"
    );
}

/// Exclusive access to device 0, in this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device 0, with exclusive access.
struct Gpu {
    device: Arc<CudaBackend>,
    stream: RawStream,
    _alone: MutexGuard<'static, ()>,
}

impl Gpu {
    fn get() -> Self {
        let alone = alone();
        let device = open(0).unwrap_or_else(|error| panic!("this test needs a GPU: {error:#}"));
        let stream = device.stream_create(&spec()).unwrap();
        Self { device, stream, _alone: alone }
    }

    fn upload(&self, host: NonNull<u8>, to: Address, bytes: &[u8]) {
        // SAFETY: `host` and `to` have room for the bytes; both live until the synchronisation below.
        unsafe {
            host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.device
                .copy(self.stream, Endpoint::Device(to), Endpoint::Host(host.as_ptr()), bytes.len() as u64)
                .unwrap();
        }
        self.device.stream_synchronize(self.stream).unwrap();
    }

    fn download(&self, host: NonNull<u8>, from: Address, bytes: usize) -> Vec<u8> {
        // SAFETY: as in `upload`, in the other direction; the device is done with `host` when it is read.
        unsafe {
            self.device.copy(self.stream, Endpoint::Host(host.as_ptr()), Endpoint::Device(from), bytes as u64).unwrap();
            self.device.stream_synchronize(self.stream).unwrap();
            slice::from_raw_parts(host.as_ptr(), bytes).to_vec()
        }
    }

    /// Runs a kernel on `values` and returns the result.
    fn run(&self, kernel: &'static KernelDef, values: &[f32], last: &[Arg], shared_bytes: u32) -> Result<Vec<f32>> {
        let bytes = bytemuck::cast_slice::<f32, u8>(values);
        let host = self.device.alloc_host(bytes.len())?;
        let address = self.device.alloc(bytes.len() as u64)?;
        self.upload(host, address, bytes);
        let (len, bytes) = (values.len() as u64, bytes.len());
        let mut args = vec![Arg::Slice { address, len, bytes: bytes as u64, write: true }];
        args.extend_from_slice(last);
        let launch =
            Launch { kernel, grid: [len.div_ceil(128) as u32, 1, 1], block: [128, 1, 1], shared_bytes, args: &args };
        // SAFETY: the arguments are the kernel's, or the launch is refused, and are valid until it is done, below.
        let launched = unsafe { self.device.launch(self.stream, &launch) };
        let result = launched.map(|()| floats(&self.download(host, address, bytes)));
        // SAFETY: the stream was synchronised.
        unsafe {
            self.device.free(address)?;
            self.device.free_host(host, bytes)?;
        }
        result
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.device.stream_destroy(self.stream);
    }
}

fn spec() -> StreamSpec {
    StreamSpec { name: "test".into(), priority: 0, non_blocking: true }
}

fn scalar(value: &f32) -> Arg<'_> {
    Arg::Scalar(bytemuck::bytes_of(value))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

#[test]
fn opening_never_panics() {
    match device_count() {
        Ok(count) => {
            let error = open(count).unwrap_err();
            assert!(error.is_no_device() && error.to_string().contains("does not exist"), "{error}");
        }
        Err(error) => {
            assert!(error.is_no_device(), "{error}");
            assert!(error.to_string().contains("driver"), "{error}");
            let opened = open(0).unwrap_err();
            assert!(opened.is_no_device() && !opened.to_string().contains('\n'), "{opened}");
        }
    }
}

#[test]
fn the_composed_source_puts_the_prototype_before_line_one() {
    let expected = "#line 1 \"<wakeline prototype of scale>\"\n\
                    extern \"C\" __global__ void scale(float* x, unsigned long long x_len, float a);\n\
                    #line 1 \"scale.cu\"\nBODY";
    assert_eq!(image::compose(&SCALE_CUDA, "", "BODY"), expected);
    let expected = "#line 1 \"<wakeline prototype of typed>\"\nstruct Point;\n\
                    extern \"C\" __global__ void typed(const Point* p, unsigned long long p_len);\n\
                    #line 1 \"scale.cu\"\nBODY";
    assert_eq!(image::compose(&TYPED, "", "BODY"), expected);
}

mod same_file {
    use crate::prelude::*;

    #[derive(Clone, Copy, KernelStruct)]
    #[repr(C)]
    pub(super) struct Small {
        x: f32,
    }

    #[derive(Clone, Copy, KernelStruct)]
    #[repr(C)]
    pub(super) struct Large {
        small: Small,
        y: [f32; 3],
    }

    #[kernel(unsafe(cuda = "tests/structs.cu"))]
    pub(super) fn narrow(small: &mut [Small]) {
        small[0].x += 1.0;
    }

    #[kernel(unsafe(cuda = "graph/../tests/structs.cu"))]
    pub(super) fn widen(large: &mut [Large]) {
        large[0].y[0] += large[0].small.x;
    }

    /// Of the same name as the other one.
    pub(super) mod other {
        use crate::prelude::*;

        #[derive(Clone, Copy, KernelStruct)]
        #[repr(C)]
        pub(crate) struct Small {
            x: f64,
        }

        #[kernel(unsafe(cuda = "tests/structs.cu"))]
        pub(crate) fn again(small: &mut [Small]) {
            small[0].x += 1.0;
        }
    }
}

/// Each body is compiled with those of the file's other kernels, which use other structs.
#[test]
fn a_source_follows_the_structs_of_all_kernels_of_its_file() {
    let composed = |kernel: crate::kernel::Kernel| image::compose(kernel.def(), "", "BODY");
    let (narrow, widen) = (composed(same_file::narrow::kernel()), composed(same_file::widen::kernel()));
    for source in [&narrow, &widen] {
        for definition in ["struct Small {\n    float x;", "struct Large {\n    Small small;\n    float y[3];"] {
            assert_eq!(source.matches(definition).count(), 1, "{definition} in {source}");
        }
        assert!(!source.contains("double"), "a name is defined once: {source}");
    }
    assert!(narrow.contains("void narrow(Small *") && !narrow.contains("void widen("), "its prototype alone: {narrow}");
    let own = composed(same_file::other::again::kernel());
    assert!(own.contains("struct Small {\n    double x;") && !own.contains("float x;"), "its own struct: {own}");
    assert!(!image::compose(&TYPED, "", "BODY").contains("Small"), "another file");
}

#[test]
fn without_a_body_there_is_a_clear_error() {
    for (def, word) in [(&SCALE_NONE, "no CUDA body"), (&SCALE_NO_CUBIN, "neither a cubin")] {
        let error = image::of(def, 90).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Kernel);
        assert!(error.to_string().contains(word) && error.to_string().contains("tests.rs:1"), "{error}");
    }
}

#[test]
fn without_a_compiler_there_is_a_clear_error() {
    if let Err(reason) = nvrtc::Compiler::get() {
        assert!(reason.contains("libnvrtc"), "{reason}");
        let error = image::of(&SCALE_CUDA, 90).unwrap_err();
        assert!(error.kind() == ErrorKind::NoCompiler && error.to_string().contains("CUDA toolkit"), "{error}");
    }
}

#[test]
#[ignore = "needs NVRTC"]
fn concurrent_loaders_compile_a_kernel_once() {
    let images: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| image::of(&SCALE_CUDA, 90).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(images.iter().all(|image| image.as_ptr() == images[0].as_ptr()));
    image::of(&TYPED, 90).unwrap();
    // Newer than any compiler: PTX for the newest architecture that it supports.
    image::of(&SCALE_CUDA, 9_999).unwrap();
}

#[test]
#[ignore = "needs NVRTC"]
fn compile_errors_name_file_and_line() {
    for (def, line, word) in [(&SCALE_BROKEN, "scale.cu(3)", "\"b\""), (&SCALE_OTHER, "scale.cu(2)", "scale")] {
        let error = image::of(def, 90).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Kernel);
        for part in [line, word, "`scale`", "tests.rs:1"] {
            assert!(error.to_string().contains(part), "no {part} in {error}");
        }
        assert_eq!(image::of(def, 90).unwrap_err().to_string(), error.to_string());
    }
    // Without `extern "C"`, a body that differs compiles; the difference is found when the lookup of its function
    // fails.
    for (def, parts) in [
        (&SCALE_OVERLOAD, ["scale.cu(2)", "overloaded", "void scale(float* x, "]),
        (&SCALE_MISSPELT, ["no function `scale` in scale.cu", "`scale`", "tests.rs:1"]),
        (&SCALE_TEMPLATE, ["no function `scale` in scale.cu", "`scale`", "tests.rs:1"]),
    ] {
        image::of(def, 90).unwrap();
        let error = image::missing(def, 90);
        assert_eq!(error.kind(), ErrorKind::Kernel);
        assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_of_both_kinds_run() {
    let gpu = Gpu::get();
    assert!(gpu.device.description().contains("NVIDIA"), "{:?}", gpu.device);
    let values: Vec<f32> = (0..100_u8).map(f32::from).collect();
    let doubled: Vec<f32> = values.iter().map(|x| x * 2.0).collect();
    gpu.device.load(&SCALE_CUDA).unwrap();
    for kernel in [&SCALE_CUDA, &SCALE_PTX] {
        assert_eq!(gpu.run(kernel, &values, &[scalar(&2.0)], 0).unwrap(), doubled);
    }
    // More shared memory than the default, and more than the device has.
    assert_eq!(gpu.run(&SCALE_CUDA, &values, &[scalar(&2.0)], 64 << 10).unwrap(), doubled);
    let error = gpu.run(&SCALE_CUDA, &values, &[scalar(&2.0)], 64 << 20).unwrap_err();
    assert!(error.kind() == ErrorKind::Driver && error.to_string().contains("`scale`"), "{error}");
    assert_eq!(gpu.run(&SCALE_CUDA, &values, &[scalar(&2.0)], 0).unwrap(), doubled);
}

#[test]
#[ignore = "needs a GPU"]
fn arguments_of_the_wrong_number_or_size_are_refused() {
    let gpu = Gpu::get();
    if gpu.device.cx.driver.func_get_param_info.is_none() {
        return;
    }
    for args in [&[][..], &[scalar(&1.0), scalar(&1.0)]] {
        let error = gpu.run(&SCALE_PTX, &[1.0], args, 0).unwrap_err();
        assert!(error.kind() == ErrorKind::Kernel && error.to_string().contains("[8, 8, 4]"), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_that_do_not_load_report_the_reason() {
    let gpu = Gpu::get();
    for (def, word) in [
        (&SCALE_BROKEN, "scale.cu(3)"),
        (&SCALE_OVERLOAD, "scale.cu(2)"),
        (&SCALE_MISSPELT, "no function `scale` in scale.cu"),
        (&SCALE_BAD_PTX, "cannot be loaded from scale.cu"),
    ] {
        for _ in 0..2 {
            let error = gpu.device.load(def).unwrap_err();
            assert!(error.kind() == ErrorKind::Kernel && error.to_string().contains(word), "{error}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn copies_and_fills() {
    let gpu = Gpu::get();
    let host = gpu.device.alloc_host(64).unwrap();
    assert_eq!(host.as_ptr() as usize % 64, 0);
    // SAFETY: 64 bytes that nothing else accesses.
    assert!(unsafe { slice::from_raw_parts(host.as_ptr(), 64) }.iter().all(|&byte| byte == 0));
    let (a, b) = (gpu.device.alloc(64).unwrap(), gpu.device.alloc(64).unwrap());
    assert_eq!((a.0 % 256, b.0 % 256), (0, 0));
    for (width, bits, expected) in
        [(1, 0x11, [0x11; 4]), (2, 0x2211, [0x11, 0x22, 0x11, 0x22]), (4, 0x4433_2211, [0x11, 0x22, 0x33, 0x44])]
    {
        // SAFETY: 64 bytes each, freed below.
        unsafe {
            gpu.device.fill(gpu.stream, a, Pattern { width, bits }, 64).unwrap();
            gpu.device.copy(gpu.stream, Endpoint::Device(b), Endpoint::Device(a), 64).unwrap();
        }
        assert_eq!(gpu.download(host, b, 64), expected.repeat(16));
    }
    let other = gpu.device.alloc_host(64).unwrap();
    // SAFETY: 64 bytes each; the stream is synchronised before they are read and freed.
    unsafe {
        assert!(gpu.device.fill(gpu.stream, a, Pattern { width: 4, bits: 0 }, 6).is_err());
        gpu.device.copy(gpu.stream, Endpoint::Host(other.as_ptr()), Endpoint::Host(host.as_ptr()), 64).unwrap();
        gpu.device.stream_synchronize(gpu.stream).unwrap();
        assert_eq!(slice::from_raw_parts(other.as_ptr(), 64), [0x11, 0x22, 0x33, 0x44].repeat(16));
        for (address, host) in [(a, host), (b, other)] {
            gpu.device.free(address).unwrap();
            gpu.device.free_host(host, 64).unwrap();
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn streams_wait_for_events_and_events_measure_time() {
    let gpu = Gpu::get();
    let device = &gpu.device;
    let urgent = StreamSpec { priority: i32::MIN, ..spec() };
    let (first, second) = (device.stream_create(&urgent).unwrap(), RawStream(0));
    let (start, end) = (device.event_create(true).unwrap(), device.event_create(true).unwrap());
    let gate = device.event_create(false).unwrap();
    assert!(device.event_query(gate).unwrap());
    let (open, opened) = mpsc::channel::<()>();
    let (begin, begun) = mpsc::channel::<()>();
    let asked = Instant::now();
    device.event_record(start, first).unwrap();
    let held = move || {
        begin.send(()).unwrap();
        opened.recv_timeout(Duration::from_secs(10)).unwrap();
    };
    device.host_function(first, &mut Some(Box::new(held))).unwrap();
    device.event_record(end, first).unwrap();
    device.event_record(gate, first).unwrap();
    // The legacy default stream waits for a non-blocking one only because of this call.
    device.stream_wait(second, gate).unwrap();
    begun.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(!device.event_query(gate).unwrap() && !device.stream_query(second).unwrap());
    assert_eq!(device.event_elapsed(start, end).unwrap_err().kind(), ErrorKind::Usage);
    open.send(()).unwrap();
    device.stream_synchronize(second).unwrap();
    assert!(device.event_query(gate).unwrap() && device.stream_query(first).unwrap());
    let elapsed = device.event_elapsed(start, end).unwrap();
    assert!(elapsed > Duration::ZERO && elapsed <= asked.elapsed(), "{elapsed:?}");
    [start, end, gate].into_iter().for_each(|event| device.event_destroy(event));
    [first, second].into_iter().for_each(|stream| device.stream_destroy(stream));
}

#[test]
#[ignore = "needs a GPU"]
fn warm_ups_come_from_any_thread_and_delay_no_work() {
    let gpu = Gpu::get();
    assert!(gpu.device.warm_up.is_some(), "the driver has refused the warm-up");
    let (open, opened) = mpsc::channel::<()>();
    let held = move || _ = opened.recv_timeout(Duration::from_secs(10));
    gpu.device.host_function(gpu.stream, &mut Some(Box::new(held))).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..1000).for_each(|_| gpu.device.warm_up().unwrap()));
        }
    });
    assert!(!gpu.device.stream_query(gpu.stream).unwrap(), "the work of another stream is still held");
    open.send(()).unwrap();
    gpu.device.stream_synchronize(gpu.stream).unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn host_functions_run_and_may_panic() {
    let gpu = Gpu::get();
    let ran = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ran);
    gpu.device.host_function(gpu.stream, &mut Some(Box::new(|| panic!("from a host function")))).unwrap();
    gpu.device.host_function(gpu.stream, &mut Some(Box::new(move || seen.store(true, Ordering::SeqCst)))).unwrap();
    gpu.device.stream_synchronize(gpu.stream).unwrap();
    assert!(ran.load(Ordering::SeqCst));
    assert_eq!(Arc::strong_count(&ran), 1);
}

#[test]
#[ignore = "needs a GPU"]
fn freed_memory_is_available_again_and_exhaustion_is_reported_with_numbers() {
    let gpu = Gpu::get();
    let device = &gpu.device;
    let before = device.memory().unwrap();
    let half = before.free / 2;
    let address = device.alloc(half).unwrap();
    assert!(device.memory().unwrap().free < before.free - half / 2);
    // SAFETY: nothing was enqueued that accesses it.
    unsafe { device.free(address).unwrap() };
    assert!(device.memory().unwrap().free >= before.free - before.free / 16);
    for too_much in [before.total, 1 << 50, u64::MAX / 2] {
        let error = device.alloc(too_much).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains(&too_much.to_string()), "{error}");
    }
    // After the failure the pool has returned its kept memory to the driver, and the device still works.
    assert!(device.cx.memory_info().unwrap().0 >= before.free - before.free / 16);
    let address = device.alloc(1).unwrap();
    // SAFETY: as above.
    unsafe { device.free(address).unwrap() };
}

#[test]
#[ignore = "needs a GPU"]
fn an_open_device_is_opened_only_once() {
    let gpu = Gpu::get();
    assert!(Arc::ptr_eq(&gpu.device, &open(0).unwrap()));
    let device: Arc<dyn Backend> = gpu.device.clone();
    thread::spawn(move || device.make_current().unwrap()).join().unwrap();
}

/// Runs in a separate process, in which the device is lost afterwards.
#[test]
#[ignore = "needs a GPU"]
fn a_trap_ends_the_device() {
    const ONLY: &str = "WAKELINE_TEST_ALONE";
    if env::var_os(ONLY).is_none() {
        let mut process = Command::new(env::current_exe().unwrap());
        let test = thread::current();
        process.args([test.name().unwrap(), "--exact", "--include-ignored"]).env(ONLY, "1");
        let output = process.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let gpu = Gpu::get();
    let device = &gpu.device;
    let dropped = Arc::new(());
    let inside = Arc::clone(&dropped);
    let address = device.alloc(4).unwrap();
    let args = [Arg::Slice { address, len: 1, bytes: 4, write: true }, scalar(&1.0)];
    let launch = Launch { kernel: &TRAP, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
    // SAFETY: the arguments are the kernel's; the memory is never freed.
    unsafe { device.launch(gpu.stream, &launch).unwrap() };
    device.host_function(gpu.stream, &mut Some(Box::new(move || drop(inside)))).unwrap();
    let asked = Instant::now();
    let error = loop {
        match device.stream_query(gpu.stream) {
            Err(error) => break error,
            Ok(_) => assert!(asked.elapsed() < Duration::from_secs(30), "no fault was reported"),
        }
        thread::yield_now();
    };
    assert!(error.is_device_lost() && error.to_string().contains("719"), "{error}");
    while Arc::strong_count(&dropped) > 1 {
        assert!(asked.elapsed() < Duration::from_secs(30), "the host function is not dropped");
        thread::yield_now();
    }
    let asked = Instant::now();
    // SAFETY: the device is lost, so both calls fail without effect.
    let refused = unsafe { [device.free(address), device.launch(gpu.stream, &launch)] };
    assert!(refused.into_iter().all(|result| result.unwrap_err().is_device_lost()));
    assert!(device.alloc(1).unwrap_err().is_device_lost());
    assert!(device.host_function(gpu.stream, &mut Some(Box::new(|| ()))).unwrap_err().is_device_lost());
    assert!(open(0).unwrap_err().is_device_lost());
    assert!(asked.elapsed() < Duration::from_millis(100), "{:?}", asked.elapsed());
}
