//! Files that users name for what a command will write: looked at before the work, which may be long.

use std::path::Path;

use crate::failure::Failure;

/// Refuses a place where no file can be.
pub(super) fn check_place(output: &Path) -> Result<(), Failure> {
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let why = if output.is_dir() {
        format!("{} is a folder; name a file", output.display())
    } else if output.exists() && !output.is_file() {
        format!("{} is a pipe, socket or device; name a file", output.display())
    } else if !folder.is_dir() {
        format!("{}: there is no folder {}; make it first", output.display(), folder.display())
    } else {
        return Ok(());
    };
    Err(Failure::Usage(why))
}
