//! Filters and methods that write as much as a number says: templates count as code of the model's, and one such number would
//! fill all memory at once, which no count of steps sees.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Columns of an indentation or a field: more than a prompt has use for.
const MOST_WIDTH: i64 = 1000;
/// The engine's own filters, under names that no template can write.
const OWN_INDENT: &str = " indent";
const OWN_FORMAT: &str = " format";

/// Puts bounds on them.
pub(super) fn bound(environment: &mut Environment<'static>) {
    environment.add_filter(OWN_INDENT, minijinja::filters::indent);
    environment.add_filter(OWN_FORMAT, minijinja::filters::format);
    environment.add_filter("indent", |state: &State, arguments: Rest<Value>| {
        arguments.iter().skip(1).try_for_each(check_width)?;
        state.apply_filter(OWN_INDENT, &arguments)
    });
    environment.add_filter("format", |state: &State, arguments: Rest<Value>| {
        arguments.first().map_or(Ok(()), check_format)?;
        state.apply_filter(OWN_FORMAT, &arguments)
    });
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        if method == "format" {
            check_format(value)?;
        }
        pycompat::unknown_method_callback(state, value, method, arguments)
    });
}

fn refuse(what: &str) -> Result<(), Error> {
    let why = format!("{what} of more than {MOST_WIDTH} columns is not written");
    Err(Error::new(ErrorKind::InvalidOperation, why))
}

/// An argument, or the named ones together.
fn check_width(argument: &Value) -> Result<(), Error> {
    if argument.kind() == ValueKind::Map {
        let width = argument.get_attr("width").unwrap_or_default();
        return check_width(&width);
    }
    match i64::try_from(argument.clone()) {
        Ok(width) if width > MOST_WIDTH => refuse("an indentation"),
        _ if argument.is_number() && i64::try_from(argument.clone()).is_err() => refuse("an indentation"),
        _ => Ok(()),
    }
}

/// A format may name widths, and have arguments name them.
fn check_format(format: &Value) -> Result<(), Error> {
    let Some(text) = format.as_str() else { return Ok(()) };
    let digits = text.split(|char: char| !char.is_ascii_digit());
    let is_wide = digits.into_iter().any(|run| run.trim_start_matches('0').len() > 3);
    let is_told = text.contains('*') && text.contains('%');
    if is_wide || is_told { refuse("a field") } else { Ok(()) }
}
