//! One scalar value against its type and range.

use serde_json::{Number, Value};

use super::suggest::nearest;
use crate::diagnostic::Code;
use crate::reader::{Content, Node, shorten};
use crate::table::{Form, Kind, Range};

/// Why a value does not fit.
#[derive(Debug)]
pub(super) struct Misfit {
    pub(super) code: Code,
    pub(super) why: String,
    pub(super) help: String,
}

/// A value that fits, and how it had to be converted.
#[derive(Debug)]
pub(super) struct Fit {
    pub(super) value: Value,
    pub(super) converted: Option<String>,
}

impl From<Value> for Fit {
    fn from(value: Value) -> Fit {
        Fit { value, converted: None }
    }
}

/// Fits a scalar. Lists and objects are the walker's business.
pub(super) fn scalar(node: &Node, kind: &Kind, form: Form) -> Result<Fit, Misfit> {
    match kind {
        Kind::Bool => boolean(node, form),
        Kind::Int { min, max } => {
            let fit = integer(node, kind, form)?;
            let number = fit.value.as_i64().unwrap_or(i64::MAX);
            if number < *min || number > *max { Err(out_of_range(node, kind)) } else { Ok(fit) }
        }
        Kind::Interval => interval(node, kind, form),
        Kind::IntChoice(choices) => int_choice(node, kind, choices),
        Kind::Float(range) => float(node, kind, *range, form),
        Kind::Text => match &node.content {
            Content::Text(text) => Ok(Value::String(text.clone()).into()),
            _ => Err(wrong_type(node, kind)),
        },
        Kind::NonEmptyText => match &node.content {
            Content::Text(text) if !text.is_empty() => Ok(Value::String(text.clone()).into()),
            Content::Text(_) => Err(Misfit {
                code: Code::OutOfRange,
                why: "cannot be empty".into(),
                help: "write a name".into(),
            }),
            _ => Err(wrong_type(node, kind)),
        },
        Kind::Choice { values, any_case } => choice(node, kind, values, *any_case),
        Kind::DataType => data_type(node, kind),
        Kind::Json => Ok(node.to_value().into()),
        Kind::List { .. } | Kind::Section(..) | Kind::Variants { .. } | Kind::Named(_) | Kind::Either(_) => {
            Err(wrong_type(node, kind))
        }
    }
}

/// A whole number that is not negative, however it is written: 2, 2.0 and 2e0 are the same.
pub fn whole(value: &Value) -> Option<u64> {
    // Above 2^53 not every whole number has a float, and a text that says one may be rounded.
    let as_float = || value.as_f64().filter(|float| float.fract() == 0.0 && (0.0..=9e15).contains(float));
    value.as_u64().or_else(|| as_float().map(|float| float as u64))
}

fn boolean(node: &Node, form: Form) -> Result<Fit, Misfit> {
    let meant = match &node.content {
        Content::Bool(value) => return Ok(Value::Bool(*value).into()),
        Content::Number(number) => match number.as_f64() {
            Some(0.0) => Some(false),
            Some(1.0) => Some(true),
            _ => None,
        },
        Content::Text(text) => match text.to_lowercase().as_str() {
            "on" | "t" | "true" | "y" | "yes" | "1" => Some(true),
            "off" | "f" | "false" | "n" | "no" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    match (meant, form) {
        (Some(value), Form::Schema) => Ok(Fit {
            value: Value::Bool(value),
            converted: Some(format!("{} was read as {value}", show(node))),
        }),
        (Some(value), Form::Plain) => {
            Err(Misfit { help: format!("write {value}"), ..wrong_type(node, &Kind::Bool) })
        }
        (None, _) => Err(wrong_type(node, &Kind::Bool)),
    }
}

fn integer(node: &Node, kind: &Kind, form: Form) -> Result<Fit, Misfit> {
    let converted = |value: i64| Fit {
        value: value.into(),
        converted: Some(format!("{} was read as the integer {value}", show(node))),
    };
    match &node.content {
        Content::Number(number) => {
            if let Some(value) = number.as_i64() {
                return Ok(Value::from(value).into());
            }
            let value = number.as_f64().unwrap_or(f64::INFINITY);
            // 2^63 itself is out of reach of i64; everything below it converts exactly.
            if !(-9.3e18..9_223_372_036_854_775_808.0).contains(&value) {
                return Err(out_of_range(node, kind));
            }
            match (value.fract() == 0.0, form) {
                (true, _) => Ok(Value::from(value as i64).into()),
                (false, Form::Schema) => Ok(converted(value.trunc() as i64)),
                (false, Form::Plain) => Err(wrong_type(node, kind)),
            }
        }
        Content::Bool(value) if form == Form::Schema => Ok(converted(i64::from(*value))),
        Content::Text(text) => match (text.trim().parse::<i64>(), form) {
            (Ok(value), Form::Schema) => Ok(converted(value)),
            (Ok(value), Form::Plain) => {
                Err(Misfit { help: format!("write {value} without quotes"), ..wrong_type(node, kind) })
            }
            (Err(_), _) => Err(match text.trim().parse::<f64>() {
                Ok(number) if number.is_finite() => {
                    Misfit { help: format!("write {} without quotes", text.trim()), ..wrong_type(node, kind) }
                }
                _ => wrong_type(node, kind),
            }),
        },
        _ => Err(wrong_type(node, kind)),
    }
}

/// Python's infinity, as JSON has it (`Infinity`) and as text, is never.
fn interval(node: &Node, kind: &Kind, form: Form) -> Result<Fit, Misfit> {
    if let Content::Text(text) = &node.content
        && text.trim().parse() == Ok(f64::INFINITY)
    {
        return Ok(Value::Null.into());
    }
    let fit = integer(node, kind, form)?;
    if fit.value.as_i64().is_some_and(|steps| steps >= 1) { Ok(fit) } else { Err(out_of_range(node, kind)) }
}

fn int_choice(node: &Node, kind: &Kind, choices: &[i64]) -> Result<Fit, Misfit> {
    let (number, converted) = match &node.content {
        Content::Number(number) => (number.as_f64(), None),
        Content::Bool(value) => (Some(f64::from(u8::from(*value))), Some(*value)),
        _ => (None, None),
    };
    let found = choices.iter().find(|&&choice| number == Some(choice as f64));
    match found {
        Some(choice) => Ok(Fit {
            value: (*choice).into(),
            converted: converted.map(|value| format!("{value} was read as {choice}")),
        }),
        None => Err(Misfit {
            code: Code::NotAChoice,
            why: format!("expected {}, found {}", describe(kind), show(node)),
            help: match &node.content {
                Content::Text(text) if choices.iter().any(|choice| choice.to_string() == *text) => {
                    format!("write {text} without quotes")
                }
                _ => String::new(),
            },
        }),
    }
}

fn float(node: &Node, kind: &Kind, range: Range, form: Form) -> Result<Fit, Misfit> {
    let fit: Fit = match &node.content {
        Content::Number(number) => Value::Number(number.clone()).into(),
        Content::Text(text) => match (text.trim().parse::<f64>().ok().and_then(Number::from_f64), form) {
            (Some(number), Form::Schema) => Fit {
                converted: Some(format!("{} was read as the number {number}", show(node))),
                value: number.into(),
            },
            (Some(_), Form::Plain) => {
                return Err(Misfit {
                    help: format!("write {} without quotes", text.trim()),
                    ..wrong_type(node, kind)
                });
            }
            (None, _) => return Err(wrong_type(node, kind)),
        },
        _ => return Err(wrong_type(node, kind)),
    };
    let value = fit.value.as_f64().unwrap_or(f64::NAN);
    let above = if range.above_min { value > range.min } else { value >= range.min };
    let below = if range.below_max { value < range.max } else { value <= range.max };
    if above && below { Ok(fit) } else { Err(out_of_range(node, kind)) }
}

fn choice(node: &Node, kind: &Kind, values: &[&str], any_case: bool) -> Result<Fit, Misfit> {
    let Content::Text(text) = &node.content else { return Err(wrong_type(node, kind)) };
    let found =
        values.iter().find(|&&value| if any_case { value.eq_ignore_ascii_case(text) } else { value == text });
    match found {
        Some(value) => Ok(Value::String((*value).to_owned()).into()),
        None => Err(not_a_choice(node, kind, nearest(text, values.iter().copied()))),
    }
}

fn data_type(node: &Node, kind: &Kind) -> Result<Fit, Misfit> {
    let Content::Text(text) = &node.content else { return Err(wrong_type(node, kind)) };
    let name = match text.as_str() {
        "fp16" | "float16" | "half" | "torch.float16" => "fp16",
        "fp32" | "float32" | "float" | "torch.float32" => "fp32",
        "bf16" | "bfloat16" | "torch.bfloat16" => "bf16",
        _ => return Err(not_a_choice(node, kind, nearest(text, ["fp16", "fp32", "bf16"].into_iter()))),
    };
    Ok(Value::String(name.to_owned()).into())
}

fn not_a_choice(node: &Node, kind: &Kind, near: Option<&str>) -> Misfit {
    Misfit {
        code: Code::NotAChoice,
        why: format!("expected {}, found {}", describe(kind), show(node)),
        help: near.map_or_else(String::new, |near| format!("did you mean \"{near}\"?")),
    }
}

fn out_of_range(node: &Node, kind: &Kind) -> Misfit {
    Misfit {
        code: Code::OutOfRange,
        why: format!("expected {}, found {}", describe(kind), show(node)),
        help: String::new(),
    }
}

/// The value is of another type than the option's.
pub(super) fn wrong_type(node: &Node, kind: &Kind) -> Misfit {
    Misfit {
        code: Code::WrongType,
        why: format!("expected {}, found {}", describe(kind), show(node)),
        help: String::new(),
    }
}

/// A value as messages show it.
fn show(node: &Node) -> String {
    match &node.content {
        Content::Null | Content::Bool(_) | Content::Number(_) => shorten(&node.to_value().to_string()),
        Content::Text(text) => format!("the string \"{}\"", shorten(text)),
        Content::List(_) | Content::Object(_) => node.type_name().to_owned(),
    }
}

/// A type as messages and the manual name it.
pub(crate) fn describe(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "true or false".into(),
        Kind::Int { min: i64::MIN, max: i64::MAX } => "an integer".into(),
        Kind::Int { min, max: i64::MAX } => format!("an integer ≥ {min}"),
        Kind::Int { min, max } => format!("an integer from {min} to {max}"),
        Kind::Interval => "an integer ≥ 1, or Infinity".into(),
        Kind::IntChoice(choices) => list_of(choices.iter().map(i64::to_string)),
        Kind::Float(range) => describe_range(range),
        Kind::Text => "a string".into(),
        Kind::NonEmptyText => "a string that is not empty".into(),
        Kind::Choice { values, .. } => list_of(values.iter().map(|value| format!("\"{value}\""))),
        Kind::DataType => "\"fp32\", \"fp16\" or \"bf16\"".into(),
        Kind::List { item, length: None } => format!("a list, each {}", describe(item)),
        Kind::List { item, length: Some(length) } => format!("a list of {length}, each {}", describe(item)),
        Kind::Section(..) | Kind::Variants { .. } | Kind::Named(_) => "an object".into(),
        Kind::Json => "any value".into(),
        Kind::Either(kinds) => kinds.iter().map(describe).collect::<Vec<_>>().join(", or "),
    }
}

fn describe_range(range: &Range) -> String {
    let low = match (range.min == f64::MIN, range.above_min) {
        (true, _) => String::new(),
        (false, true) => format!(" > {}", range.min),
        (false, false) => format!(" ≥ {}", range.min),
    };
    let high = match (range.max == f64::MAX, range.below_max) {
        (true, _) => String::new(),
        (false, true) => format!(" and < {}", range.max),
        (false, false) => format!(" and ≤ {}", range.max),
    };
    format!("a number{low}{high}")
}

/// `a, b or c`.
pub(crate) fn list_of(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    match items.split_last() {
        None => String::new(),
        Some((last, [])) => last.clone(),
        Some((last, before)) => format!("{} or {last}", before.join(", ")),
    }
}
