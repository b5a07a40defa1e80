use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[output]
    numbers: Output<u64>,
}

async fn fill(ports: &mut P) -> Result<()> {
    let mut blank = ports.numbers.blank().await?;
    blank.set_len(1)
}

fn main() {}
