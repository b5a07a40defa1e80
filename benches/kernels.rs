//! The benches' kernels compile, which needs NVRTC and no GPU: `cargo test -p wakeline-benches --test kernels -- --ignored`

#[path = "through/churn.rs"]
mod churn;
#[path = "graph/nothing.rs"]
mod nothing;
#[path = "completion/spin.rs"]
mod spin;
#[path = "stage/step.rs"]
mod step;
#[path = "through/touch.rs"]
mod touch;
#[path = "paced/work.rs"]
mod work;

#[test]
#[ignore = "needs NVRTC"]
fn every_kernel_compiles() {
    let kernels = [
        churn::churn::kernel(),
        nothing::nothing::kernel(),
        spin::spin::kernel(),
        step::step::kernel(),
        touch::touch::kernel(),
        work::work::kernel(),
    ];
    assert_eq!(wakeline::kernel::Kernel::all().count(), kernels.len());
    wakeline::kernel::compile_all("sm_90").unwrap();
}
