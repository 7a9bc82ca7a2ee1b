//! Text that is safe inside HTML, and numbers that people can read.

use std::fmt::{self, Display, Formatter, Write};

/// Text from outside, for use between tags and inside quoted attributes.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\n' | '\t' => f.write_char(character)?,
                // Controls (terminal colours among them) and the two noncharacters that no XML may hold.
                c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Shown as it is: `2.31`, `0.0003`, `3e-5`.
    Plain,
    /// Shown with thousands as `k`, `M`, `G`, `T`.
    Count,
    /// Shown as KiB, MiB, GiB, TiB.
    Bytes,
    /// Shown as ms, s, min or h.
    Milliseconds,
}

impl Unit {
    /// The number with four significant digits at most.
    pub(super) fn show(self, value: f64) -> String {
        if value.is_nan() {
            return "not a number".into();
        }
        if value.is_infinite() {
            return if value > 0.0 { "∞".into() } else { "−∞".into() };
        }
        match self {
            Unit::Plain => significant(value),
            Unit::Count => scaled(value, 1000.0, &["", "k", "M", "G", "T", "P"]),
            Unit::Bytes => scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"]),
            Unit::Milliseconds if value.abs() >= 3_600_000.0 => {
                format!("{} h", significant(value / 3_600_000.0))
            }
            Unit::Milliseconds if value.abs() >= 60_000.0 => format!("{} min", significant(value / 60_000.0)),
            Unit::Milliseconds if value.abs() >= 1000.0 => format!("{} s", significant(value / 1000.0)),
            Unit::Milliseconds => format!("{} ms", significant(value)),
        }
    }

    /// What a round number of this unit is round in, around `magnitude`: bytes in powers of 1024, time in minutes.
    pub(super) fn tick_scale(self, magnitude: f64) -> f64 {
        let scales: &[f64] = match self {
            Unit::Plain | Unit::Count => &[],
            Unit::Bytes => &[1024.0, 1_048_576.0, 1_073_741_824.0, 1_099_511_627_776.0],
            Unit::Milliseconds => &[1000.0, 60_000.0, 3_600_000.0],
        };
        scales.iter().copied().rfind(|&scale| magnitude >= scale).unwrap_or(1.0)
    }
}

fn scaled(value: f64, base: f64, suffixes: &[&str]) -> String {
    let mut value = value;
    let mut index = 0;
    // Rounding happens at four digits, so 999 999 must already count as the next suffix.
    while value.abs() >= base * 0.99995 && index + 1 < suffixes.len() {
        value /= base;
        index += 1;
    }
    significant(value) + suffixes[index]
}

/// At most four significant digits, without trailing zeros; scientific where a plain number would be long.
fn significant(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude == 0.0 {
        return "0".into();
    }
    if !(1e-4..1e6).contains(&magnitude) {
        let text = format!("{value:.3e}");
        return match text.split_once('e') {
            Some((digits, exponent)) => format!("{}e{exponent}", trimmed(digits)),
            None => text,
        };
    }
    let decimals = (3 - magnitude.log10().floor() as i32).max(0) as usize;
    trimmed(&format!("{value:.decimals$}")).to_owned()
}

fn trimmed(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let cases = [
            (Unit::Plain, 2.345678, "2.346"),
            (Unit::Plain, 0.0003, "0.0003"),
            (Unit::Plain, 0.00003, "3e-5"),
            (Unit::Plain, 10.0, "10"),
            (Unit::Plain, -0.5, "-0.5"),
            (Unit::Plain, 1e300, "1e300"),
            (Unit::Count, 12_345.0, "12.35k"),
            (Unit::Count, 999_999.0, "1M"),
            (Unit::Count, 100.0, "100"),
            (Unit::Bytes, 1536.0, "1.5 KiB"),
            (Unit::Milliseconds, 90_000.0, "1.5 min"),
            (Unit::Plain, f64::NAN, "not a number"),
        ];
        for (unit, value, text) in cases {
            assert_eq!(unit.show(value), text, "{value}");
        }
    }

    #[test]
    fn markup_and_controls_are_disarmed() {
        assert_eq!(Escaped("<a b='\"&\u{1b}\0\n").to_string(), "&lt;a b=&#39;&quot;&amp;\u{fffd}\u{fffd}\n");
    }
}
