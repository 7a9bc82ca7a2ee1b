//! Words and shells: quoting what a remote shell will read, splitting what a user wrote as one string.

use crate::error::{LaunchError, shorten};

/// Quotes a word for a POSIX shell; words of harmless characters stay as they are.
pub fn quote(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        return word.to_owned();
    }
    let mut quoted = String::with_capacity(word.len() + 2);
    quoted.push('"');
    for c in word.chars() {
        if matches!(c, '"' | '\\' | '$' | '`') {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

/// Joins words into one line that a shell splits back into the same words.
pub fn join(words: &[String]) -> String {
    words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}

/// Splits a string into words as a POSIX shell would, without expanding anything.
pub fn split(text: &str) -> Result<Vec<String>, LaunchError> {
    let refuse = |reason| LaunchError::LauncherArgs { text: shorten(text), reason };
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            ' ' | '\t' | '\n' | '\r' => words.extend(word.take()),
            '\\' => {
                let next = chars.next().ok_or_else(|| refuse("nothing follows the last backslash"))?;
                word.get_or_insert_default().push(next);
            }
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('\'') => break,
                        Some(inner) => word.push(inner),
                        None => return Err(refuse("a single quote is not closed")),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some(escaped @ ('"' | '\\' | '$' | '`')) => word.push(escaped),
                            Some(other) => word.extend(['\\', other]),
                            None => return Err(refuse("a double quote is not closed")),
                        },
                        Some(inner) => word.push(inner),
                        None => return Err(refuse("a double quote is not closed")),
                    }
                }
            }
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_shell_reads_back_what_was_quoted() {
        let words =
            ["", "a b", "x \"y\" z", "$HOME", "`id`", "it's", "back\\slash", "new\nline", "semi;colon"];
        let line = words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ");
        let output = std::process::Command::new("sh")
            .args(["-c", &format!("for word in {line}; do printf '%s\\0' \"$word\"; done")])
            .output()
            .expect("sh runs");
        let read: Vec<&str> = std::str::from_utf8(&output.stdout).unwrap().split_terminator('\0').collect();
        assert_eq!(read, words);
    }

    #[test]
    fn splitting_follows_the_shell() {
        assert_eq!(
            split(r#"-v  -x 'a b' "c \" d" e\ f """#).unwrap(),
            ["-v", "-x", "a b", "c \" d", "e f", ""]
        );
        assert!(split("'open").is_err());
        assert!(split("open\\").is_err());
    }
}
