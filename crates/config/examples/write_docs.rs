//! Prints `docs/config.md`; with the argument `differences`, `always` or `refused`, a table of `docs/differences.md`.

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("differences") => print!("{}", ferrospeed_config::docs::without_effect()),
        Some("always") => print!("{}", ferrospeed_config::docs::always_so()),
        Some("refused") => print!("{}", ferrospeed_config::docs::refused()),
        _ => print!("{}", ferrospeed_config::docs::render()),
    }
}
