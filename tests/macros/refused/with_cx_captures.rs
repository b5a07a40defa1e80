use wakeline::{
    operator::{map_with, sink_with},
    prelude::*,
};

fn add(flow: &mut Flow) {
    let prefix = String::from("> ");
    flow.add("prefix", map_with(async move |line: String, _cx: &mut Cx| Ok(format!("{prefix}{line}"))));
    let mut total = 0;
    flow.add("sum", sink_with(async move |number: u32, _cx: &mut Cx| {
        total += number;
        Ok(())
    }));
}

fn main() {}
