//! Two operators that exchange host messages: the smallest flow.
//!
//! `cargo run --example ping`

use wakeline::{
    Flow, Result,
    operator::{sink, source},
};

#[tokio::main]
async fn main() -> Result<()> {
    let mut flow = Flow::new("ping");

    let mut left = 3;
    let ping = source(move || {
        left -= 1;
        std::future::ready(Ok((left >= 0).then(|| format!("ping, {left} left"))))
    });
    let pong = sink(async |message: String| {
        println!("{message}: pong");
        Ok(())
    });

    let ping = flow.add("ping", ping);
    let pong = flow.add("pong", pong);
    flow.connect(ping.output, pong.input);
    println!("{}", flow.run().await?);
    Ok(())
}
