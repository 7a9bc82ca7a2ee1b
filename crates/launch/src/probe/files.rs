//! Disks: how much room, which file system, and whether direct and asynchronous I/O work there.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What a folder's disk can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskProbe {
    /// Bytes that an ordinary user may still write.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// The kind of file system.
    pub kind: String,
    /// Whether a file can be written with `O_DIRECT`, or why not.
    pub direct_io: Result<(), String>,
}

/// Looks at the disk of a folder, and writes and removes one small file there.
pub fn probe_disk(folder: &Path) -> Result<DiskProbe, String> {
    let room = nix::sys::statvfs::statvfs(folder).map_err(|error| error.desc().to_owned())?;
    let kind = nix::sys::statfs::statfs(folder)
        .map_or_else(|_| "unknown".to_owned(), |stat| kind_name(stat.filesystem_type().0));
    let block = room.fragment_size();
    Ok(DiskProbe {
        free_bytes: room.blocks_available() * block,
        total_bytes: room.blocks() * block,
        kind,
        direct_io: try_direct_io(folder),
    })
}

/// Bytes that may still be written to the disk of a folder.
pub fn free_disk_bytes(folder: &Path) -> Result<u64, String> {
    let room = nix::sys::statvfs::statvfs(folder).map_err(|error| error.desc().to_owned())?;
    Ok(room.blocks_available() * room.fragment_size())
}

fn try_direct_io(folder: &Path) -> Result<(), String> {
    const BLOCK: usize = 4096;
    let path = folder.join(format!(".ferrospeed-doctor-{}", std::process::id()));
    let open =
        OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_DIRECT).open(&path);
    let written = open.and_then(|mut file| {
        // O_DIRECT wants an aligned buffer: take the aligned block inside a larger one.
        let buffer = vec![0u8; 2 * BLOCK];
        let start = buffer.as_ptr().align_offset(BLOCK);
        file.write_all(&buffer[start..start + BLOCK])
    });
    // It is ours and empty; if it could not be created there is nothing to remove.
    let _ = std::fs::remove_file(&path);
    written.map_err(|error| error.to_string())
}

fn kind_name(magic: libc::__fsword_t) -> String {
    let name = match magic as u64 & 0xffff_ffff {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x0102_1994 => "tmpfs",
        0x794c_7630 => "overlay",
        0x6969 => "nfs",
        0x0bd0_0bd0 => "lustre",
        0x2fc1_2fc1 => "zfs",
        0x6573_5546 => "fuse",
        other => return format!("type {other:#x}"),
    };
    name.to_owned()
}

/// Whether the kernel lets this process set up an io_uring, or why not.
pub fn io_uring() -> Result<(), String> {
    // `struct io_uring_params` is 120 bytes, all zero for a plain ring.
    let mut parameters = [0u64; 15];
    // SAFETY: the kernel reads and writes exactly the 120 bytes of `parameters`, which outlive the call.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    if ring < 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    // SAFETY: the call gave a new descriptor that nothing else owns; dropping it closes the ring.
    drop(unsafe { OwnedFd::from_raw_fd(ring as i32) });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probed_folder_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let probe = probe_disk(folder.path()).unwrap();
        assert!(probe.total_bytes >= probe.free_bytes && !probe.kind.is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(probe_disk(Path::new("/does/not/exist")).is_err());
    }
}
