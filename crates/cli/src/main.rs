//! The `ferrospeed` binary.
fn main() {}
