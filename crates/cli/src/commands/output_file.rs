//! Files that users name for what a command will write: looked at before the work, which may be long.

use std::path::Path;

use ferrospeed_command::Failure;
use ferrospeed_command::writable::{impossible, unwritable, unwritable_file};

/// Refuses what is there and no file.
pub(super) fn check_kind(output: &Path) -> Result<(), Failure> {
    let shown = output.display();
    if let Some(why) = impossible(output) {
        return Err(Failure::Usage(why));
    }
    match () {
        () if output.is_dir() => Err(Failure::Usage(format!("{shown} is a folder; name a file"))),
        () if output.exists() && !output.is_file() => {
            Err(Failure::Usage(format!("{shown} is a pipe, socket or device; name a file")))
        }
        () => Ok(()),
    }
}

/// Refuses a place where no file can be.
pub(super) fn check_place(output: &Path) -> Result<(), Failure> {
    check_kind(output)?;
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (shown, place) = (output.display(), folder.display());
    if !folder.is_dir() {
        return Err(Failure::Usage(format!("{shown}: there is no folder {place}; make it first")));
    }
    let why = if output.exists() { unwritable_file(output) } else { unwritable(folder) };
    why.map_or(Ok(()), |why| {
        Err(Failure::Usage(format!("{shown}: cannot be written ({why}); name another place")))
    })
}
