//! What Hugging Face gives its templates beside Jinja's own: `tojson` as Python writes it, and dates.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;

/// Python's `json.dumps`: a blank behind `:` and `,`; `indent` where it is asked for.
pub(super) fn to_json(value: &Value, options: minijinja::value::Kwargs) -> Result<Value, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let indent: Option<usize> = options.get("indent")?;
    // Python's other options change nothing that a model was trained to see.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    match indent {
        Some(indent) => {
            let blanks = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
                .map_err(|error| failed(&error))?;
        }
        None => value
            .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced))
            .map_err(|error| failed(&error))?,
    }
    String::from_utf8(bytes).map(Value::from_safe_string).map_err(|error| failed(&error))
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The directives that templates use for dates, in UTC; another one is an error.
pub(super) fn strftime(format: &str, now_s: u64) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (now_s / 86_400, now_s % 86_400);
    let (year, month, day) = ferrospeed_observe::civil_date(days);
    let (name, weekday) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        out += &match letters.next() {
            Some('Y') => format!("{year:04}"),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('b') => name[..3].to_owned(),
            Some('B') => name.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => {
                let what =
                    format!("strftime_now does not know %{}", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let said = |now_s| strftime("%a %d %b %Y, %A %e %B %H:%M:%S %m %%", now_s).unwrap();
        assert_eq!(said(0), "Thu 01 Jan 1970, Thursday  1 January 00:00:00 01 %");
        assert_eq!(said(951_825_599), "Tue 29 Feb 2000, Tuesday 29 February 11:59:59 02 %");
        assert_eq!(said(4_107_542_400), "Mon 01 Mar 2100, Monday  1 March 00:00:00 03 %");
        assert!(strftime("%Q", 0).is_err());
    }
}
