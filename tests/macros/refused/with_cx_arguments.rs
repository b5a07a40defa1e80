use wakeline::{operator::sink_with, prelude::*};

fn add(flow: &mut Flow) {
    flow.add("print", sink_with(async |line: String| {
        println!("{line}");
        Ok(())
    }));
}

fn main() {}
