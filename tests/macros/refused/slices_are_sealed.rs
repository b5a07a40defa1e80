use wakeline::kernel::DeviceSlice;

struct Mine(wakeline::Buffer<u8>);

impl DeviceSlice<u64> for Mine {
    fn view(&self) -> wakeline::memory::View<'_> {
        DeviceSlice::<u8>::view(&self.0)
    }
}

fn main() {}
