//! A mark in the environment by which a job's processes are known, wherever they went.
//!
//! Every process that a supervisor starts carries it, and so does everything that those start in turn, in whatever group
//! or session; only a process that throws its environment away loses it. Looking for it makes nothing but
//! async-signal-safe calls and allocates nothing, so that the guardian can do it after its fork.

use crate::error::LaunchError;
use crate::surroundings;

/// The variable that carries the mark. It is no secret.
pub(super) const VARIABLE: &str = "FERROSPEED_LAUNCH_ID";

/// What guardians call themselves: one that inherited the mark of an outer job has work to do and ends by itself.
pub(super) const GUARDIAN_NAME: &[u8] = b"ferro-guardian\0";

/// The mark of one supervisor's processes.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    /// `NAME=VALUE`
    assignment: Vec<u8>,
}

impl Mark {
    pub(super) fn new() -> Result<Self, LaunchError> {
        let value = surroundings::new_job_token()?;
        Ok(Mark { assignment: format!("{VARIABLE}={value}").into_bytes() })
    }

    pub(super) fn value(&self) -> &str {
        std::str::from_utf8(&self.assignment[VARIABLE.len() + 1..]).unwrap_or_default()
    }

    /// Whether a process carries the mark, and is no guardian.
    pub(super) fn is_on(&self, pid: i32) -> bool {
        let mut search = Search { wanted: &self.assignment, matched: Some(0), found: false };
        read_process_file(pid, b"/environ\0", |bytes| search.look_at(bytes));
        if !search.is_found() {
            return false;
        }
        let mut is_guardian = false;
        read_process_file(pid, b"/comm\0", |bytes| {
            is_guardian = bytes.starts_with(&GUARDIAN_NAME[..GUARDIAN_NAME.len() - 1]);
        });
        !is_guardian
    }

    /// Kills every process that carries the mark; gives their number.
    pub(super) fn kill_all(&self) -> usize {
        let mut killed = 0;
        for_each_process(|pid| {
            // SAFETY: plain system calls with integer arguments; a descriptor that was opened is closed. It is opened
            // before the mark is looked for, so that the process that is killed is the one that was looked at.
            unsafe {
                let handle = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
                if self.is_on(pid) {
                    killed += 1;
                    match handle {
                        -1 => libc::kill(pid, libc::SIGKILL),
                        _ => {
                            let no_information = std::ptr::null::<libc::siginfo_t>();
                            libc::syscall(
                                libc::SYS_pidfd_send_signal,
                                handle,
                                libc::SIGKILL,
                                no_information,
                                0,
                            ) as i32
                        }
                    };
                }
                if handle >= 0 {
                    libc::close(handle);
                }
            }
        });
        killed
    }
}

/// Looks for one variable in an environment that comes in pieces.
struct Search<'a> {
    wanted: &'a [u8],
    /// How many bytes of the variable at hand are as wanted; `None` once one is not.
    matched: Option<usize>,
    found: bool,
}

impl Search<'_> {
    fn look_at(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == 0 {
                self.found = self.is_found();
                self.matched = Some(0);
            } else {
                let fits = |&count: &usize| self.wanted.get(count) == Some(&byte);
                self.matched = self.matched.filter(fits).map(|count| count + 1);
            }
        }
    }

    fn is_found(&self) -> bool {
        self.found || self.matched == Some(self.wanted.len())
    }
}

/// Hands over the content of `/proc/PID/…` piece by piece; nothing where it cannot be read.
fn read_process_file(pid: i32, file: &[u8], mut take: impl FnMut(&[u8])) {
    const START: &[u8] = b"/proc/";
    let mut path = [0u8; 48];
    let mut length = 0;
    let mut push = |byte: u8| {
        path[length] = byte;
        length += 1;
    };
    START.iter().copied().for_each(&mut push);
    let mut divisor = 1_000_000_000;
    while divisor > 1 && pid / divisor == 0 {
        divisor /= 10;
    }
    while divisor > 0 {
        push(b'0' + (pid / divisor % 10) as u8);
        divisor /= 10;
    }
    file.iter().copied().for_each(&mut push);
    let mut piece = [0u8; 4096];
    // SAFETY: the path ends with a zero byte; reads stay within the buffer; the descriptor is closed.
    unsafe {
        let opened = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        if opened < 0 {
            return;
        }
        loop {
            match libc::read(opened, piece.as_mut_ptr().cast(), piece.len()) {
                count if count > 0 => take(&piece[..count as usize]),
                -1 if *libc::__errno_location() == libc::EINTR => {}
                _ => break,
            }
        }
        libc::close(opened);
    }
}

/// Calls `visit` with the number of every process.
fn for_each_process(mut visit: impl FnMut(i32)) {
    /// Where `linux_dirent64` has its length and its name.
    const LENGTH_AT: usize = 16;
    const NAME_AT: usize = 19;
    let mut entries = [0u8; 4096];
    // SAFETY: the path ends with a zero byte; the kernel writes at most the buffer's length; the descriptor is closed.
    unsafe {
        let opened = libc::open(c"/proc".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if opened < 0 {
            return;
        }
        loop {
            let read = libc::syscall(libc::SYS_getdents64, opened, entries.as_mut_ptr(), entries.len());
            let Some(mut rest) =
                usize::try_from(read).ok().filter(|&read| read > 0).map(|read| &entries[..read])
            else {
                break;
            };
            while rest.len() > NAME_AT {
                let length = usize::from(u16::from_ne_bytes([rest[LENGTH_AT], rest[LENGTH_AT + 1]]));
                if length <= NAME_AT || length > rest.len() {
                    break;
                }
                if let Some(pid) = number(&rest[NAME_AT..length]) {
                    visit(pid);
                }
                rest = &rest[length..];
            }
        }
        libc::close(opened);
    }
}

/// A name of digits, up to its zero byte.
fn number(name: &[u8]) -> Option<i32> {
    let mut value = None;
    for &byte in name.iter().take_while(|&&byte| byte != 0) {
        let digit = byte.checked_sub(b'0').filter(|&digit| digit < 10)?;
        value = Some(value.unwrap_or(0i32).checked_mul(10)?.checked_add(i32::from(digit))?);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_across_pieces_and_never_inside_another_value() {
        let found = |environment: &[u8], cut: usize| {
            let mut search = Search { wanted: b"A=xy", matched: Some(0), found: false };
            environment.chunks(cut).for_each(|piece| search.look_at(piece));
            search.is_found()
        };
        for cut in 1..6 {
            assert!(found(b"B=1\0A=xy\0C=2\0", cut) && found(b"B=1\0A=xy", cut));
            assert!(!found(b"B=A=xy\0A=xyz\0A=x\0", cut));
        }
    }

    #[test]
    fn processes_are_numbered_and_this_one_is_among_them() {
        let mut seen = false;
        for_each_process(|pid| seen |= pid as u32 == std::process::id());
        assert!(seen);
        assert_eq!((number(b"120\0x"), number(b"12a\0"), number(b"\0")), (Some(120), None, None));
    }
}
