//! Quoted strings, `'''` strings, and the values that need no quotes.

use serde_json::Number;

use super::Content;
use super::cursor::Cursor;
use super::parser::Failure;

/// Reads a quoted string; the cursor stands on the opening quote.
pub(super) fn quoted(cursor: &mut Cursor<'_>) -> Result<String, Failure> {
    let start = cursor.offset;
    let Some(quote) = cursor.next() else { return Err(Failure::at(start, "expected a string", "")) };
    let mut text = String::new();
    loop {
        let here = cursor.offset;
        match cursor.next() {
            Some(character) if character == quote => return Ok(text),
            Some('\\') => text.push(escape(cursor, here)?),
            None | Some('\n') => {
                return Err(Failure::at(
                    start,
                    "this string has no closing quote on its line",
                    "close it, or write \\n for a line break inside it",
                ));
            }
            Some(character) => text.push(character),
        }
    }
}

fn escape(cursor: &mut Cursor<'_>, start: usize) -> Result<char, Failure> {
    match cursor.next() {
        Some('b') => Ok('\u{8}'),
        Some('f') => Ok('\u{c}'),
        Some('n') => Ok('\n'),
        Some('r') => Ok('\r'),
        Some('t') => Ok('\t'),
        Some(literal @ ('"' | '\'' | '\\' | '/')) => Ok(literal),
        Some('u') => unicode_escape(cursor, start),
        _ => Err(Failure::at(
            start,
            "unknown escape in a string",
            "the escapes are \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX",
        )),
    }
}

fn unicode_escape(cursor: &mut Cursor<'_>, start: usize) -> Result<char, Failure> {
    let bad = || Failure::at(start, "bad \\u escape", "write \\u and four hexadecimal digits of a character");
    let first = four_hex_digits(cursor).ok_or_else(bad)?;
    if !(0xd800..0xdc00).contains(&first) {
        return char::from_u32(first).ok_or_else(bad);
    }
    if !(cursor.eat('\\') && cursor.eat('u')) {
        return Err(bad());
    }
    let second =
        four_hex_digits(cursor).filter(|second| (0xdc00..0xe000).contains(second)).ok_or_else(bad)?;
    char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)).ok_or_else(bad)
}

fn four_hex_digits(cursor: &mut Cursor<'_>) -> Option<u32> {
    let mut value = 0;
    for _ in 0..4 {
        value = value * 16 + cursor.next()?.to_digit(16)?;
    }
    Some(value)
}

/// Reads a `'''` string; the cursor stands on the first quote. Lines lose the indentation of the opening quotes.
pub(super) fn multi_line(cursor: &mut Cursor<'_>) -> Result<String, Failure> {
    let start = cursor.offset;
    let body = &cursor.rest()[3..];
    let Some(length) = body.find("'''") else {
        return Err(Failure::at(start, "this ''' string has no closing '''", "close it with '''"));
    };
    cursor.offset += 3 + length + 3;
    let body = &body[..length];
    if !body.contains('\n') {
        return Ok(body.to_owned());
    }
    let indent = cursor.column_of(start);
    let body = match body.split_once('\n') {
        Some((first, rest)) if first.trim().is_empty() => rest,
        _ => body,
    };
    let lines: Vec<&str> = body
        .split('\n')
        .map(|line| {
            let blank = line
                .chars()
                .take(indent)
                .take_while(|c| c.is_whitespace())
                .map(char::len_utf8)
                .sum::<usize>();
            line[blank..].trim_end_matches('\r')
        })
        .collect();
    let text = lines.join("\n");
    Ok(match text.rsplit_once('\n') {
        Some((before, last)) if last.trim().is_empty() => before.to_owned(),
        _ => text,
    })
}

/// Reads a value without quotes: a number, `true`, `false` or `null` ends at a separator, anything else is a string
/// that runs to the end of the line. No character is looked at twice, so that one long line stays cheap.
pub(super) fn unquoted(cursor: &mut Cursor<'_>) -> Result<Content, Failure> {
    let start = cursor.offset;
    let rest = cursor.rest();
    let word_end = rest
        .char_indices()
        .find(|&(at, c)| {
            matches!(c, '\n' | ',' | '}' | ']' | '#')
                || (c == '/' && matches!(rest.as_bytes().get(at + 1), Some(b'/' | b'*')))
        })
        .map_or(rest.len(), |(at, _)| at);
    let word = rest[..word_end].trim_end();
    if let Some(literal) = literal(word, start)? {
        cursor.offset += word.len();
        return Ok(literal);
    }
    let line_end = rest[word_end..].find('\n').map_or(rest.len(), |more| word_end + more);
    cursor.offset += line_end;
    Ok(Content::Text(rest[..line_end].trim().to_owned()))
}

fn literal(word: &str, start: usize) -> Result<Option<Content>, Failure> {
    Ok(match word {
        "true" => Some(Content::Bool(true)),
        "false" => Some(Content::Bool(false)),
        "null" => Some(Content::Null),
        // What Python writes for numbers that JSON has not; whoever takes one takes its name.
        "Infinity" | "-Infinity" | "NaN" => Some(Content::Text(word.to_owned())),
        _ if is_number(word) => Some(Content::Number(number(word).ok_or_else(|| {
            Failure::at(
                start,
                format!("the number {} is too large", super::shorten(word)),
                "numbers must fit 64 bits",
            )
        })?)),
        _ => None,
    })
}

/// The number grammar of JSON.
fn is_number(word: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let unsigned = word.strip_prefix('-').unwrap_or(word);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (unsigned, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(|exponent| digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent)))
}

/// The value of a well-formed number, unless it is infinite.
fn number(word: &str) -> Option<Number> {
    if let Ok(value) = word.parse::<i64>() {
        return Some(value.into());
    }
    if let Ok(value) = word.parse::<u64>() {
        return Some(value.into());
    }
    Number::from_f64(word.parse().ok()?)
}
