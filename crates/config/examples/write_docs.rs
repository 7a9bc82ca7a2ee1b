//! Prints `docs/config.md`; with the argument `differences`, the table of `docs/differences.md`.

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("differences") => print!("{}", ferrospeed_config::docs::without_effect()),
        _ => print!("{}", ferrospeed_config::docs::render()),
    }
}
