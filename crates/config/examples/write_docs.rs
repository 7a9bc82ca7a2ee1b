//! Prints `docs/config.md`.

fn main() {
    print!("{}", ferrospeed_config::docs::render());
}
