use wakeline::{Message, prelude::*};

#[derive(Message)]
struct Frame {
    #[envelope]
    pixels: Envelope<u8>,
}

#[derive(Ports)]
struct P {
    #[output]
    frames: Output<Frame>,
}

async fn fill(ports: &mut P) -> Result<()> {
    let mut blank = ports.frames.blank::<f32>().await?;
    blank.set_len(1)
}

fn main() {}
