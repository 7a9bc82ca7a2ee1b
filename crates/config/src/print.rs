//! The way DeepSpeed prints a configuration in its log, for people who compare logs.

use serde_json::Value;

/// Four spaces of indentation, lists on one line, numbers above a thousand in exponent form, keys in their order.
pub fn as_deepspeed(config: &Value) -> String {
    let mut text = String::new();
    print(config, 0, &mut text);
    text
}

fn print(value: &Value, depth: usize, text: &mut String) {
    match value {
        Value::Object(map) => {
            text.push_str("{\n");
            for (index, (key, value)) in map.iter().enumerate() {
                text.push_str(if index > 0 { ", \n" } else { "" });
                text.push_str(&"    ".repeat(depth + 1));
                text.push_str(&format!("{}: ", Value::from(key.as_str())));
                print(value, depth + 1, text);
            }
            text.push_str(if map.is_empty() { "" } else { "\n" });
            text.push_str(&"    ".repeat(depth));
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                print(item, depth, text);
            }
            text.push(']');
        }
        Value::Number(number) => match number.as_f64() {
            Some(large) if large > 1000.0 => text.push_str(&exponent_form(large)),
            _ => text.push_str(&padded_exponent(&number.to_string())),
        },
        _ => text.push_str(&value.to_string()),
    }
}

/// C's `%e`: six decimals, and an exponent with a sign and at least two digits.
fn exponent_form(number: f64) -> String {
    padded_exponent(&format!("{number:.6e}"))
}

fn padded_exponent(text: &str) -> String {
    let Some((mantissa, exponent)) = text.split_once('e') else { return text.to_owned() };
    let (sign, digits) = match exponent.strip_prefix('-') {
        Some(digits) => ('-', digits),
        None => ('+', exponent.trim_start_matches('+')),
    };
    format!("{mantissa}e{sign}{digits:0>2}")
}
