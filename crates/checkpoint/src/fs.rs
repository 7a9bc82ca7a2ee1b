//! The few operations that change the disk, behind one seam.
//!
//! A save is safe if it is safe after every one of them: tests replace [`Disk`] by a system that fails at the n-th.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use ferrospeed_io::{Queue, QueueOptions};

/// Every operation by which a save changes the disk.
pub trait FileSystem: Send + Sync {
    /// Makes a folder and those above it.
    fn create_folder(&self, path: &Path) -> std::io::Result<()>;
    /// Makes an empty file that was not there.
    fn create_file(&self, path: &Path) -> std::io::Result<File>;
    /// Appends to a file.
    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()>;
    /// What writes the pages of a large file, beside the caller.
    fn queue(&self) -> Queue {
        Queue::new(QueueOptions::default())
    }
    /// Brings a file's content to the disk.
    fn sync_file(&self, file: &File) -> std::io::Result<()>;
    /// Brings a folder's entries to the disk.
    fn sync_folder(&self, path: &Path) -> std::io::Result<()>;
    /// Gives a file or folder another name.
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()>;
    /// Removes a folder and all in it.
    fn remove_folder(&self, path: &Path) -> std::io::Result<()>;
    /// Bytes that may still be written to the file system of a folder.
    fn available_bytes(&self, path: &Path) -> std::io::Result<u64>;
}

/// The real one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

impl FileSystem for Disk {
    fn create_folder(&self, path: &Path) -> std::io::Result<()> {
        ferrospeed_files::create_folder(path)
    }

    fn create_file(&self, path: &Path) -> std::io::Result<File> {
        File::create_new(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        file.write_all(bytes)
    }

    fn sync_file(&self, file: &File) -> std::io::Result<()> {
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> std::io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> std::io::Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn available_bytes(&self, path: &Path) -> std::io::Result<u64> {
        let stat = nix::sys::statvfs::statvfs(path)?;
        Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
    }
}
