use wakeline::{Ingress, Message, prelude::*};

#[derive(Message)]
struct Frame {
    #[envelope]
    pixels: Envelope<u8>,
    #[envelope]
    mask: Envelope<u8>,
}

async fn fill(frames: Ingress<Frame>) -> Result<()> {
    let blanks: Envelope<u8> = frames.blanks().await?;
    drop(blanks);
    Ok(())
}

fn main() {}
