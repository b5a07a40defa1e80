//! Elements of the widest alignment, and memory of other elements.

use super::*;

#[allow(unsafe_code)]
pub(super) mod aligned {
    use wakeline::{kernel, kernel::KernelType};

    /// As wide as the alignment of memory.
    #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C, align(256))]
    pub(crate) struct Wide(pub(crate) [u64; 32]);

    // SAFETY: double_wide.cu declares the same type.
    unsafe impl KernelType for Wide {
        const CUDA: &'static str = "Wide";
        const DECLARE: &'static str = "struct Wide;";
    }

    #[kernel(unsafe(cuda = "../kernels/double_wide.cu"))]
    pub(crate) fn double_wide(x: &mut [Wide]) {
        assert!(x.as_ptr().is_aligned());
        for n in x.iter_mut().flat_map(|wide| &mut wide.0) {
            *n *= 2;
        }
    }
}
use aligned::{Wide, double_wide};

on_both!(elements_of_the_widest_alignment_are_aligned_everywhere, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    // Odd sizes in between, so that no allocation is aligned by chance.
    let mut kept: Vec<Box<dyn Any + Send>> = Vec::new();
    for n in 1..20_u64 {
        let data: Vec<Wide> = (0..n).map(|at| Wide([at; 32])).collect();
        let mut there = Buffer::from_slice(&stream, &data).unwrap();
        double_wide::launch(&stream, &mut there).unwrap();
        let doubled: Vec<Wide> = (0..n).map(|at| Wide([2 * at; 32])).collect();
        assert_eq!(there.to_vec(&stream).await.unwrap(), doubled);
        for near in [&device, &Device::host()] {
            let odd = Buffer::<u8>::pinned(near, 1 + 3 * n as usize).unwrap();
            let mut here = Buffer::<Wide>::pinned(near, n as usize).unwrap();
            assert!(here.as_slice().unwrap().as_ptr().is_aligned());
            here.as_mut_slice().unwrap().copy_from_slice(&data);
            let envelope = Envelope::from(here);
            assert_eq!(envelope.as_slice().unwrap(), data);
            kept.push(Box::new((odd, envelope)));
        }
    }
    let hub = ChunkHub::<Wide, ()>::builder("wide").elements(3).host_envelopes(2).pinned_for(&device).build().unwrap();
    let mut produce = hub.produce(&Device::host()).unwrap();
    produce.with(async |blank| blank.fill_from(&[Wide([7; 32]); 3]).await).await.unwrap();
});

/// An envelope keeps its element type. With the doc-hidden way around that, memory that does not fit is an error.
#[test]
fn memory_of_other_elements_is_an_error_and_no_panic() {
    fn as_other<T: wakeline::memory::Plain>(envelope: Envelope<u8>) -> Envelope<T> {
        let raw: Option<RawEnvelope> = wakeline::Message::into_envelope(envelope);
        wakeline::Message::of_envelope(raw.unwrap()).unwrap()
    }
    for offset in 0..16 {
        struct Part(Vec<u8>, usize);
        impl AsRef<[u8]> for Part {
            fn as_ref(&self) -> &[u8] {
                &self.0[self.1..]
            }
        }
        let (part, _) = Buffer::wrap_read_only(Part(vec![1; 1024], offset)).unwrap();
        let other = as_other::<Wide>(part.into());
        if let Err(error) = other.as_slice() {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("Wide"), "{error}");
        }
        let mut mine = as_other::<f64>(Buffer::wrap(vec![1_u8; 64 + offset]).unwrap().0.into());
        let _ = mine.as_mut_slice().map(|all| assert!(all.as_ptr().is_aligned()));
        let _ = mine.as_mut_space().map(|all| assert!(all.as_ptr().is_aligned()));
    }
    // Byte elements are valid at an odd address.
    let (odd, _) = Buffer::wrap_read_only(bytes_at(1)).unwrap();
    assert_eq!(odd.as_slice().unwrap().len(), 63);
}

fn bytes_at(offset: usize) -> impl AsRef<[u8]> + Send + 'static {
    struct At(Arc<[u8]>, usize);
    impl AsRef<[u8]> for At {
        fn as_ref(&self) -> &[u8] {
            &self.0[self.1..]
        }
    }
    At(Arc::from([0; 64]), offset)
}
