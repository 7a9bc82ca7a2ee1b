//! The resource pool: `NAME slots=COUNT`, one host per line, in rank order.
//!
//! Blank lines and `#` comments are passed over; anything after the count and a blank (such as MPI's
//! `max_slots=20`) belongs to other launchers. Refused: repeated hosts, counts with letters behind them, names
//! that ssh would take for an option, and files no cluster could need.

use std::path::Path;

use indexmap::IndexMap;

use crate::error::{LaunchError, shorten};

/// Hosts in rank order, with how many ranks each can hold.
pub type HostPool = IndexMap<String, u32>;

/// The largest number of slots one host may declare.
pub const MAX_SLOTS_PER_HOST: u32 = 65_536;

const MAX_HOSTFILE_BYTES: u64 = 16 << 20;

/// Reads a hostfile; `None` when there is no such file.
pub fn read(path: &Path) -> Result<Option<HostPool>, LaunchError> {
    match read_text(path)? {
        Some(text) => parse(&text).map(Some),
        None => Ok(None),
    }
}

/// Reads the text of a hostfile; `None` when there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, LaunchError> {
    let unreadable = |source| LaunchError::HostfileUnreadable { path: path.to_owned(), source };
    match ferrospeed_files::read_text(path, MAX_HOSTFILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(error)),
    }
}

/// Parses the text of a hostfile.
///
/// ```
/// let pool = ferrospeed_launch::hostfile::parse("# two machines\nworker-0 slots=4\nworker-1 slots=2\n")?;
/// assert_eq!(pool["worker-1"], 2);
/// # Ok::<(), ferrospeed_launch::LaunchError>(())
/// ```
pub fn parse(text: &str) -> Result<HostPool, LaunchError> {
    let bytes = text.len() as u64;
    if bytes > MAX_HOSTFILE_BYTES {
        return Err(LaunchError::HostfileTooLarge { bytes, limit: MAX_HOSTFILE_BYTES });
    }
    let mut pool = HostPool::new();
    for (index, raw) in text.lines().enumerate() {
        let line = raw.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let (host, slots) = parse_line(line).map_err(|reason| LaunchError::HostfileEntry {
            line: number,
            text: shorten(line),
            reason,
        })?;
        if pool.insert(host.to_owned(), slots).is_some() {
            return Err(LaunchError::HostfileDuplicate { line: number, host: shorten(host) });
        }
    }
    if pool.is_empty() {
        return Err(LaunchError::HostfileEmpty);
    }
    Ok(pool)
}

fn parse_line(line: &str) -> Result<(&str, u32), &'static str> {
    let mut words = line.split_whitespace();
    let (Some(host), Some(slots)) = (words.next(), words.next()) else {
        return Err("the slot count is missing");
    };
    check_host_name(host)?;
    let count = slots.strip_prefix("slots=").ok_or("the second word must be `slots=COUNT`")?;
    if count.is_empty() || !count.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("the slot count is not a number");
    }
    match count.parse::<u32>() {
        Ok(count) if count <= MAX_SLOTS_PER_HOST => Ok((host, count)),
        _ => Err("the slot count is larger than 65536"),
    }
}

/// Refuses names that a remote shell would read as something other than a host.
///
/// The name ends up on command lines (`ssh NAME …`, `pdsh -w NAME,NAME`), so a leading dash would be an option
/// and a comma, bracket or quote would be syntax.
pub(crate) fn check_host_name(name: &str) -> Result<(), &'static str> {
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '@');
    if name.starts_with('-') || name.starts_with('@') {
        return Err("a host name cannot begin with `-` or `@`");
    }
    if name.is_empty() || !name.chars().all(allowed) {
        return Err("the host name has characters that no host name has");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_ssh_would_take_for_an_option_is_refused() {
        for hostile in ["-oProxyCommand=id slots=1", "a,b slots=1", "h[1-9] slots=1", "$(id) slots=1"] {
            assert!(matches!(parse(hostile), Err(LaunchError::HostfileEntry { line: 1, .. })), "{hostile}");
        }
    }

    #[test]
    fn the_message_names_the_line_and_the_remedy() {
        let error = parse("a slots=1\n\nb slots=4x\n").unwrap_err().to_string();
        assert_eq!(
            error,
            "hostfile line 3: the slot count is not a number: \"b slots=4x\"; \
             a line reads `NAME slots=COUNT`, for example `worker-0 slots=8`"
        );
    }

    #[test]
    fn an_absurd_slot_count_is_refused_before_memory_is_spent_on_it() {
        assert!(parse("a slots=65536").is_ok());
        assert!(parse("a slots=65537").is_err());
        assert!(parse("a slots=99999999999999999999999").is_err());
    }

    #[test]
    fn a_missing_hostfile_is_not_an_error() {
        assert!(read(Path::new("/nonexistent/hostfile")).unwrap().is_none());
    }
}
