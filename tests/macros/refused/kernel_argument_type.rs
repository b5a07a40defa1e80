use wakeline::prelude::*;

#[kernel]
fn k(_words: &[String]) {}

#[kernel]
fn l(_word: String) {}

fn main() {}
