//! Each file of `accepted` compiles, without a warning, and runs.

#[path = "accepted/kernel.rs"]
mod kernel;
#[path = "accepted/kernel_struct.rs"]
mod kernel_struct;
#[path = "accepted/message.rs"]
mod message;
#[path = "accepted/ports.rs"]
mod ports;
#[path = "accepted/waits.rs"]
mod waits;

#[test]
fn kernels_of_every_form() {
    kernel::main();
}

#[test]
fn kernel_structs_of_every_form() {
    kernel_struct::main();
}

#[test]
fn messages_of_every_form() {
    message::main();
}

#[test]
fn ports_of_every_form() {
    ports::main();
}

#[test]
fn waits_of_every_form() {
    waits::main();
}
