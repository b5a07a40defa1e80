//! [`FlowDevices`]: the devices of a flow's operators, for its observers.

use std::sync::Arc;

use crate::{
    device::Device,
    sync::{Mutex, lock},
};

/// The devices of a flow. A handle that outlives the flow knows their names, and keeps none of them open.
pub(crate) struct FlowDevices {
    /// By operator: the name of its device; `None` for the host.
    names: Vec<Option<Arc<str>>>,
    host: Arc<str>,
    open: Mutex<Vec<Device>>,
}

impl FlowDevices {
    /// By operator.
    pub(crate) fn new(devices: Vec<Device>) -> Self {
        let mut open: Vec<Device> = Vec::new();
        let mut names = Vec::with_capacity(devices.len());
        for device in devices {
            names.push((!device.is_host()).then(|| device.name().into()));
            if !device.is_host() && open.iter().all(|other| other.name() != device.name()) {
                open.push(device);
            }
        }
        Self { names, host: Device::host().name().into(), open: Mutex::new(open) }
    }

    pub(crate) fn is_host(&self, operator: usize) -> bool {
        self.names.get(operator).is_none_or(|name| name.is_none())
    }

    pub(crate) fn name(&self, operator: usize) -> &Arc<str> {
        self.names.get(operator).and_then(|name| name.as_ref()).unwrap_or(&self.host)
    }

    /// The devices, without the host; none once the flow has ended.
    pub(crate) fn open(&self) -> Vec<Device> {
        lock(&self.open).clone()
    }

    /// Called at the end of the flow.
    pub(crate) fn release(&self) {
        let open = std::mem::take(&mut *lock(&self.open));
        drop(open);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::Emulated, operator::source, prelude::*};

    #[tokio::test]
    async fn the_handle_of_a_flow_that_has_ended_keeps_no_device_open() {
        let device = Device::emulated(Emulated::new());
        let before = Arc::strong_count(device.backend());
        let mut flow = Flow::new("ends");
        let mut left = 0..3_u32;
        let read = flow.add("read", source(move || std::future::ready(Ok(left.next())))).on(&device);
        let take = flow.add("take", crate::operator::sink(async |_: u32| Ok(()))).on(&device);
        flow.connect(read.output, take.input);
        let running = flow.spawn().unwrap();
        let handle = running.handle();
        running.await.unwrap();
        let snapshot = handle.snapshot();
        assert_eq!(&*snapshot.operator("take").unwrap().device, device.name());
        assert_eq!(Arc::strong_count(device.backend()), before);
    }
}
