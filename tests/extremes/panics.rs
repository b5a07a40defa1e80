//! Panics outside the operators: in a subscriber, and in the flow's own task.

use super::*;

/// A subscriber that panics at an event with this text.
struct PanicsAt(&'static str);

impl tracing::Subscriber for PanicsAt {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Finds(&'static str, bool);
        impl tracing::field::Visit for Finds {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.1 |= format!("{value:?}").contains(self.0);
            }
        }
        let mut finds = Finds(self.0, false);
        event.record(&mut finds);
        assert!(!finds.1, "the log is full");
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The flow returns the first failure, although its own task panics afterwards. Once it returned
/// `Cancelled: the runtime ended`.
#[tokio::test]
async fn a_panic_in_the_flows_own_task_hides_no_error() {
    let _subscriber = tracing::subscriber::set_default(PanicsAt("flow failed"));
    let mut flow = host_only();
    flow.add("fails", task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Operator && error.to_string().contains("no more"), "{error}");
}

/// A failing flow logs its report, with all names.
#[tokio::test]
async fn a_flow_of_long_names_fails_with_its_own_error() {
    let _subscriber = tracing::subscriber::set_default(PanicsAt("no event has this text"));
    let mut flow = host_only();
    flow.add("x".repeat(1 << 17), task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Operator && error.to_string().ends_with("no more"), "{:?}", error.kind());
}

/// The payload of a panic may itself panic when it is dropped.
#[tokio::test]
async fn a_panic_payload_that_panics_on_drop_is_forgotten() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            std::panic::panic_any(Payload);
        }
    }
    let mut flow = host_only();
    flow.add("bomb", task(|_: &mut (), _| Box::pin(async { std::panic::panic_any(Payload) })));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Panicked, "{error}");

    let device = emulated_with(Emulated::new().workers(1));
    let stream = Stream::new(&device).unwrap();
    for _ in 0..3 {
        stream.host_function(|| std::panic::panic_any(Payload)).unwrap();
    }
    // The device's only worker continues.
    within(stream.completed()).await.unwrap();
}
