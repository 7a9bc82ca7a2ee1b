//! Counts in the words of a command: at least one of something.

use std::num::{NonZeroU64, NonZeroUsize};

/// A count, of which the words for a mistake are a person's.
pub(super) fn at_least_one(text: &str) -> Result<NonZeroU64, String> {
    let is_negative = text.starts_with('-') && text[1..].bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u64>() {
        Ok(count) => NonZeroU64::new(count).ok_or_else(|| "must be at least 1".to_owned()),
        Err(_) if is_negative => Err("must be at least 1".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The same, of what this machine can address.
pub(super) fn at_least_one_here(text: &str) -> Result<NonZeroUsize, String> {
    NonZeroUsize::try_from(at_least_one(text)?).map_err(|error| error.to_string())
}
