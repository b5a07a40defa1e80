//! Hubs of chunks and the structures of their chunks.

use super::*;

/// A chunk's structure whose destructor panics.
#[derive(Clone)]
struct Shape(#[allow(dead_code, reason = "dropped")] Arc<Bomb>);

#[test]
fn structures_whose_destructors_panic_go_with_their_hub() {
    alone("chunks::structures_whose_destructors_panic_go_with_their_hub", async {
        let hub = ChunkHub::<u32, Shape>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        for number in 0..2 {
            let mut blank = produce.next().await.unwrap().unwrap();
            blank.set_structure(Shape(Arc::new(Bomb)));
            blank.fill_from(&[number]).await.unwrap();
            blank.commit().unwrap();
        }
        drop((produce, hub));
    });
}
