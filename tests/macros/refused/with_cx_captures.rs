use wakeline::{operator::map_with, prelude::*};

fn add(flow: &mut Flow) {
    let prefix = String::from("> ");
    flow.add("prefix", map_with(async move |line: String, _cx: &mut Cx| Ok(format!("{prefix}{line}"))));
}

fn main() {}
