//! Files that get their names when they are complete: whole, or not there.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// A file in the making, under a name of its own, and gone where it never gets the one it is for.
pub(crate) struct New {
    pub(crate) path: PathBuf,
    /// Holds its lock, by which others know that somebody is at it, for as long as it has this name.
    _lock: File,
}

impl New {
    /// It is a new one, whatever lies there.
    pub(crate) fn beside(place: &Path) -> Result<(New, File)> {
        let (path, file) = ferrospeed_files::create_beside(place).map_err(DataError::io(place))?;
        let lock = file.try_clone().map_err(DataError::io(&path))?;
        Ok((New { path, _lock: lock }, file))
    }

    /// Gives it its name; a link that has it is replaced and leads nowhere.
    pub(crate) fn takes(self, place: &Path) -> Result<()> {
        std::fs::rename(&self.path, place).map_err(DataError::io(place))
    }
}

impl Drop for New {
    fn drop(&mut self) {
        // Best effort: what failed is what is reported, and who has its name is not here any more.
        let _ = std::fs::remove_file(&self.path);
    }
}
