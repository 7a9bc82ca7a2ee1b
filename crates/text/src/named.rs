//! Chat templates that are known by name, for models that bring none: they write what the models of that name read, without default system
//! messages.

/// The names.
pub(crate) const NAMES: [&str; 8] =
    ["alpaca", "chatml", "gemma", "llama-3", "mistral", "phi-3", "plain", "zephyr"];

/// The source of a template.
pub(crate) fn source(name: &str) -> Option<&'static str> {
    Some(match name {
        "alpaca" => include_str!("named/alpaca.jinja"),
        "chatml" => include_str!("named/chatml.jinja"),
        "gemma" => include_str!("named/gemma.jinja"),
        "llama-3" => include_str!("named/llama-3.jinja"),
        "mistral" => include_str!("named/mistral.jinja"),
        "phi-3" => include_str!("named/phi-3.jinja"),
        "plain" => include_str!("named/plain.jinja"),
        "zephyr" => include_str!("named/zephyr.jinja"),
        _ => return None,
    })
}
